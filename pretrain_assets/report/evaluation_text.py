"""Text for people: how well a model predicts some rows, of which version they are, and whether it has seen them.

Invariant: prints what it is given and looks up nothing; what is not known is printed as such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

from pretrain_assets.plural import counted

if TYPE_CHECKING:  # they need torch, which takes seconds to import
    from pretrain_assets.train.assessment import Assessment
    from pretrain_assets.train.scores import Measure


def evaluation_text(found: Assessment) -> str:
    """What was evaluated, then one line for all tokens and one for every source, then what to know about them."""
    numbers, (_, _, version) = found.evaluation, found.pin.rpartition("@")
    trained = found.trained_pin and found.trained_pin.rpartition("@")[2]
    if found.pin == found.trained_pin:
        which = f"{version}, the one it was trained on"
    elif trained is None:
        which = f"{version}; which data it was trained on is not known"
    else:
        which = f"{version}, NOT the one it was trained on, which is {trained}"
    share = "all" if numbers.blocks == found.blocks_there else f"the first {numbers.blocks:,}"
    there, documents = counted(found.blocks_there, "block"), counted(found.documents, "row")
    facts = [
        ["model", found.subject],
        ["version", f"{which} ({found.pin})"],
        ["rows", f"{found.rows:,} of {found.filter}"],
        ["read", f"{share} of {there} of {found.seq_len:,} tokens: {documents}"],
    ]
    rows = [["all", *_cells(numbers)], *([name, *_cells(part)] for name, part in numbers.by_source.items())]
    headers = ["source", "tokens", "loss", "perplexity", "bits per byte"]
    parts = [
        tabulate(facts, tablefmt="plain", disable_numparse=True),
        tabulate(rows, headers=headers, disable_numparse=True, colalign=["left", *["right"] * 4]),
    ]
    if found.documents_trained:
        parts.append(
            f"Warning: the run's training filter keeps {found.documents_trained:,} of these {found.documents:,} rows: "
            "the model may have been trained on them, and the loss is then lower than on new text."
        )
    elif found.documents_trained is None:
        parts.append(
            "Whether the model was trained on these rows is not known: the version it learned from is not there."
        )
    return "\n\n".join(parts)


def _cells(part: Measure) -> list[str]:
    bits = "n/a" if part.bits_per_byte is None else f"{part.bits_per_byte:.4f}"
    return [f"{part.tokens:,}", f"{part.loss:.4f}", f"{part.perplexity:,.2f}", bits]
