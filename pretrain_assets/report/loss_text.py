"""A loss column for terminals and as markdown: the groups, the hardest documents, the ones known by heart.

Invariant: prints what it is given and looks up nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from pretrain_assets.forensics.losses.loss_report import MIN_TOKENS, LossDocument, LossReport
from pretrain_assets.plural import counted
from pretrain_assets.report.clean import clean, named

PREVIEW = 50
"""Characters of a document shown."""


def loss_text(report: LossReport, *, tablefmt: str = "simple") -> str:
    """Everything, the groups first."""
    text = f"{report.column} at version {report.version}, in nats per token, under {report.checkpoint}"
    if report.val_loss is not None:
        text += f" (validation loss of training {report.val_loss:.4f})"
    if report.max_tokens is not None:
        text += f"; of the first {counted(report.max_tokens, 'token')} of each document"
    if report.without_tokens:
        text += f"; {counted(report.without_tokens, 'row')} without tokens have none"
    parts = [text, groups_text(report, tablefmt=tablefmt)]
    if report.highest:
        parts.append("Highest: hard, or broken\n" + documents_text(report.highest, tablefmt=tablefmt))
    if report.lowest:
        parts.append(
            "Lowest of those trained on: memorised where hardly a held-out document is lower\n"
            + documents_text(report.lowest, tablefmt=tablefmt)
        )
        parts.append(
            f"Documents of fewer than {min(MIN_TOKENS, report.max_tokens or MIN_TOKENS)} tokens are not listed."
        )
    return "\n\n".join(parts)


def groups_text(report: LossReport, *, tablefmt: str = "simple") -> str:
    """One line per group of documents."""
    rows = [
        [group.name, f"{group.documents:,}", f"{group.tokens:,}", *_numbers((group.loss, *group.quantiles))]
        for group in report.groups
    ]
    headers = ["documents", "number", "tokens", "mean loss", "5% below", "median", "95% below"]
    return tabulate(rows, headers, disable_numparse=True, tablefmt=tablefmt)


def documents_text(documents: Sequence[LossDocument], *, tablefmt: str = "simple") -> str:
    """One line per document, with what the checkpoint saw of it."""
    headers = ["id", "loss", "held out below", "largest", "tokens", "source", "seen", "text"]
    rows = [
        [
            str(one.id),
            f"{one.loss:.3f}",
            "" if one.held_out_below is None else f"{one.held_out_below:.1%}",
            f"{one.loss_max:.2f}",
            f"{one.tokens:,}",
            named(one.source),
            one.seen.describe(),
            _cut(one.preview),
        ]
        for one in documents
    ]
    widths = [None] * 6 + [40, None]
    return clean(tabulate(rows, headers, disable_numparse=True, tablefmt=tablefmt, maxcolwidths=widths))


def _numbers(values: Sequence[float | None]) -> list[str]:
    return ["" if value is None else f"{value:.3f}" for value in values]


def _cut(text: str) -> str:
    line = text.replace("|", "\u2502")
    return line if len(line) <= PREVIEW else f"{line[: PREVIEW - 3]}..."
