"""What an attribution amounts to, in sentences, each with its evidence and with the thresholds that it goes by.

Invariant: nothing is claimed beyond what was read: rows that were not read are said to be so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretrain_assets.plural import counted

if TYPE_CHECKING:
    from pretrain_assets.forensics.attribution.attribution import Attribution
    from pretrain_assets.forensics.attribution.sources import Source

MOSTLY = 0.5
"""Share of the text's tokens in one document from which that is called its source."""


def verdict(found: Attribution) -> str:
    """A paragraph: what stands word for word in what was trained on, what in other rows, and what was read."""
    return " ".join([_seen(found), *_unseen(found), *_influence(found), _read(found)])


def _seen(found: Attribution) -> str:
    total, runs = len(found.ids), f"runs of {found.min_tokens} tokens or more"
    if total < found.min_tokens:
        return (
            f"Too short: the text has {counted(total, 'token')}, and only {runs} count; --min-tokens {total} looks for "
            "shorter ones."
        )
    if not found.covered_tokens:
        return (
            f"No verbatim source: nothing in the rows that the model has seen by step {found.step:,} has {runs} in "
            f"common with the text's {total:,} tokens (white space does not count, but has to be the same: a line "
            f"break is no space).{_nearest(found)}"
        )
    best = max(found.sources, key=lambda source: source.covered_seen_tokens, default=None)
    most = best.covered_seen_tokens if best else 0
    head = "Verbatim" if most == total else "Mostly verbatim" if most >= MOSTLY * total else "Verbatim in parts"
    where = f"; {most:,} of them in {_named(best)}, {best.seen.describe()}" if best and most else ""
    span = found.spans[0]
    rows = f"{'at least ' if span.at_least else ''}{counted(span.rows, 'row')}"
    looked_at = "" if span.rows == len(span.ids) else f" in the {len(span.ids):,} of them that were looked at"
    return (
        f"{head}: {found.covered_tokens:,} of {total:,} tokens stand word for word in what the model was trained on, "
        f"in {runs}{where}. The rarest run, {counted(span.tokens, 'token')} from token {span.start:,} on, stands in "
        f"{rows}, and was trained on {counted(span.times_seen, 'time')}{looked_at}, first at step {span.first_step:,}. "
        f"({MOSTLY:.0%} of the text in one document is called mostly verbatim.)"
    )


def _nearest(found: Attribution) -> str:
    near = [source for source in found.sources if source.bm25 is not None or source.cosine is not None]
    if not near:
        return ""
    return f" Nearest otherwise: {_named(near[0])} ({_similarity(near[0])}), {near[0].seen.describe()}."


def _unseen(found: Attribution) -> list[str]:
    if not found.covered_unseen_tokens:
        return []
    source = next((one for one in found.sources if one.covered_tokens > one.covered_seen_tokens), None)
    where = f", such as {_named(source)} ({source.seen.describe()})" if source else ""
    return [
        f"{'Further' if found.covered_tokens else 'But'} {counted(found.covered_unseen_tokens, 'token')} stand word "
        f"for word only where it was not trained on{where}: they cannot come from there."
    ]


def _influence(found: Attribution) -> list[str]:
    return [
        f"One gradient step on document {source.id} at the checkpoint, with a learning rate of {step.learning_rate:g}, "
        f"changes the loss on the text by {step.measured:+.5f} nats per token, from {step.loss:.4f} (to first order "
        f"{step.first_order:+.5f})."
        for source in found.sources[:1]
        if (step := source.influence)
    ]


def _read(found: Attribution) -> str:
    missing = f", {found.rows_without_tokens:,} of them without tokens" if found.rows_without_tokens else ""
    rows = f"{counted(found.tokens_read, 'token')} of"
    if found.exact:
        return f"Read: {rows} all {counted(found.rows_read, 'row')} of {found.pin}{missing}."
    return (
        f"Read: {rows} {counted(found.rows_read, 'candidate')} among {counted(found.rows_in_version, 'row')} of "
        f"{found.pin}{missing}; a source that shares few rare words with the text may be missed, --exact reads all."
    )


def _named(source: Source) -> str:
    return f"document {source.id}" + (f" ({source.source})" if source.source else "")


def _similarity(source: Source) -> str:
    words = [] if source.bm25 is None else [f"BM25 {source.bm25:.1f}"]
    return ", ".join([*words, *([] if source.cosine is None else [f"cosine {source.cosine:.2f}"])])
