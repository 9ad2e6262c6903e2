"""Contamination in time for terminals and as markdown: which checkpoints' scores stand, the evidence, clean scores.

Invariant: prints what it is given and looks up nothing; what is not known is said to be unknown, never clean.
"""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from pretrain_assets.forensics.contamination.contamination import ContaminationInTime, SetInTime
from pretrain_assets.forensics.contamination.eval_results import Scored, ScoredSet
from pretrain_assets.plural import counted
from pretrain_assets.report.clean import clean, named

EXCERPT = 50
"""Characters of an excerpt shown."""
MOST_STEPS = 12
"""Saved checkpoints shown: the first, the last, and some between."""


def in_time_text(found: ContaminationInTime, *, tablefmt: str = "simple") -> str:
    """What was searched, the verdict on every set, the saved checkpoints, and the evidence."""
    parts = [_searched(found), verdicts_text(found.sets, tablefmt=tablefmt)]
    if any(one.first_step is not None for one in found.sets):
        parts.append(steps_text(found, tablefmt=tablefmt))
    if found.sightings:
        parts.append(sightings_text(found, tablefmt=tablefmt))
    if found.newer:
        parts.append(
            f"{found.newer} was searched for other eval sets, or otherwise: `--tag {found.newer}` asks about those."
        )
    return "\n\n".join(parts)


def verdict(one: SetInTime) -> str:
    """Whether the score of a set stands, in a word or some."""
    if one.stands:
        return "stands" if one.searched == one.items else f"stands for {one.searched:,} of {one.items:,} items"
    return "unknown" if one.stands is None else "does NOT stand"


def verdicts_text(sets: Sequence[SetInTime], *, tablefmt: str = "simple") -> str:
    """One line per eval set: whether the score at the checkpoint stands, and at which it last does."""
    headers = ["eval set", "score", "first seen at step", "newest clean checkpoint", "items"]
    headers += ["searched", "too short", "boilerplate", "in corpus"]
    rows = [
        [
            one.name,
            verdict(one),
            "never" if one.first_step is None else f"{one.first_step:,}",
            "none" if one.newest_clean is None else f"step {one.newest_clean:,}",
            *(f"{number:,}" for number in (one.items, one.searched, one.too_short, one.boilerplate, one.found)),
        ]
        for one in sets
    ]
    return tabulate(rows, headers, disable_numparse=True, tablefmt=tablefmt)


def steps_text(found: ContaminationInTime, *, tablefmt: str = "simple") -> str:
    """One line per saved checkpoint: items of each set that it had seen, of those searched for."""
    count = len(found.steps)
    places = sorted({round(i * (count - 1) / max(1, MOST_STEPS - 1)) for i in range(min(MOST_STEPS, count))} | {0})
    places = sorted({*places, found.steps.index(found.step), count - 1})
    rows = [
        [f"{found.steps[at]:,}{' *' if found.steps[at] == found.step else ''}"]
        + [f"{one.searched - one.dirty[at]:,} clean, {one.dirty[at]:,} seen" for one in found.sets]
        for at in places
    ]
    more = f"\n{count} checkpoints are saved; {len(places)} are shown." if count > len(places) else ""
    headers = ["checkpoint (* asked)", *(one.name for one in found.sets)]
    return tabulate(rows, headers, disable_numparse=True, tablefmt=tablefmt) + more


def sightings_text(found: ContaminationInTime, *, tablefmt: str = "simple") -> str:
    """One line per item, the first seen first: where it stands, when that was trained on, and its words."""
    by_item = {one.item: one for one in found.items}
    headers = ["item", "first seen", "its words", "times seen", "documents", "document", "source", "overlap", "text"]
    rows = [
        [
            one.item,
            "never" if one.first_step is None else f"step {one.first_step:,}",
            one.words if one.words_step is None else f"step {one.words_step:,}",
            f"{by_item[one.item].times:,}",
            f"{by_item[one.item].documents:,}",
            f"id {one.document}",
            named(one.source),
            "" if one.overlap is None else f"{one.overlap:.2f}",
            _cut(one.excerpt or ""),
        ]
        for one in found.sightings
    ]
    left = len(found.items) - len(rows)
    more = f"\n... and {counted(left, 'more item')}; `--limit` shows more, `--json` all." if left else ""
    return clean(tabulate(rows, headers, disable_numparse=True, tablefmt=tablefmt)) + more


def scores_text(scores: Sequence[ScoredSet], *, tablefmt: str = "simple") -> str:
    """One line per set and metric: the mean score over all items, and over the clean, the seen and the other ones."""
    headers = ["eval set", "metric", "all items", "clean", "seen before", "not searchable", "without result"]
    rows = [
        [one.name, one.metric, *map(_scored, (one.all, one.clean, one.seen, one.unsearched)), f"{one.without_result:,}"]
        for one in scores
    ]
    notes = [
        f"{one.name}, {one.metric}: {counted(one.num_unmatched, 'result')} could not be matched to an item and "
        f"{'counts' if one.num_unmatched == 1 else 'count'} nowhere: {'; '.join(one.unmatched)}"
        + ("; ..." if one.num_unmatched > len(one.unmatched) else "")
        for one in scores
        if one.num_unmatched
    ]
    return clean("\n\n".join([tabulate(rows, headers, disable_numparse=True, tablefmt=tablefmt), *notes]))


def _searched(found: ContaminationInTime) -> str:
    how = found.parameters
    text = f"{found.checkpoint} ({found.pin}), searched at version {found.version}: {how['min_overlap']:.0%} or more "
    text += f"of the {how['ngram']}-grams of one text of an item. "
    if not found.documents:
        text += "No document of the table holds an item."
    elif not found.documents_kept:
        text += f"The run's filter keeps none of the {counted(found.documents, 'document')} that hold an item."
    else:
        text += (
            f"{counted(found.documents, 'document')} of the table hold{'s' if found.documents == 1 else ''} an item; "
            f"the run's filter keeps {found.documents_kept:,}, and this checkpoint had trained on "
            f"{found.documents_seen:,}."
        )
    if found.unsearched:
        text += (
            f" {counted(found.unsearched, 'document')} of the run's were not searched, {found.unsearched_seen:,} of "
            "them seen: `pretrain decontaminate`, then ask with its --tag."
        )
    return text


def _scored(scored: Scored) -> str:
    if scored.score is None:
        return "no items"
    error = "" if scored.error is None else f" ± {scored.error:.4f}"
    return f"{scored.score:.4f}{error} ({scored.items:,})"


def _cut(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\u2502")
    return line if len(line) <= EXCERPT else f"{line[: EXCERPT - 3]}..."
