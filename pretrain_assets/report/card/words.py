"""How a run card puts values into words, in HTML as in markdown.

Invariant: what comes out is safe to print anywhere: characters that steer a terminal, a browser or the direction of
writing are shown as escapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from pretrain_assets.config import Recipe, to_dict
from pretrain_assets.forensics.attribution.attribution import Span
from pretrain_assets.forensics.card.lineage import Node
from pretrain_assets.forensics.card.rows import Seen
from pretrain_assets.forensics.card.run_card import RunCard
from pretrain_assets.forensics.card.sample import Sample
from pretrain_assets.forensics.contamination.contamination import SetInTime
from pretrain_assets.plural import counted
from pretrain_assets.report.curation_text import readable
from pretrain_assets.report.text import megabytes

NAMED, HOLES, CHECKPOINTS = 10, 50, 8
"""Events, documents left out and saved checkpoints that are named one by one."""
_NOUNS = {"duplicate", "near_duplicate"}
_COMPACT = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def compact(number: float) -> str:
    """A number in at most four digits: 999, 1.2 k, 100.8 k, 17.5 M."""
    for size, unit in _COMPACT:
        if abs(number) >= size:
            return f"{number / size:.4g} {unit}" if abs(number) < 1e3 * size else f"{number / size:,.0f} {unit}"
    return f"{number:,.4g}"


def loss(value: float | None) -> str:
    """A loss in four decimals."""
    return "unknown" if value is None else f"{value:.4f}"


def perplexity(value: float) -> str:
    """Of a loss."""
    return f"{math.exp(value):,.2f}" if value < 50 else "over 10^21"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{minutes:.1f} min" if minutes >= 2 else f"{seconds:.1f} s"


def size_of(num_bytes: int) -> str:
    """Bytes in GB (10^9) or MB."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else megabytes(num_bytes)


def times_of(seen: Seen) -> str:
    """How often documents were seen."""
    if seen.high == 0:
        return "never"
    if seen.low == seen.high:
        return "once" if seen.low == 1 else f"{seen.low:,} times"
    return f"{seen.low:,} to {seen.high:,} times"


def progress_of(card: RunCard) -> str:
    """Step and total, in words."""
    if card.step == card.total_steps:
        return f"{counted(card.step, 'step')}, the whole run"
    return f"step {card.step:,} of {card.total_steps:,}"


def replay_of(card: RunCard) -> str:
    """What it is a replay of, in a sentence; empty for other runs."""
    without = card.recipe.data.without
    if card.replay_of is None:
        return f"The places of {counted(len(without), 'document')} are masked holes." if without else ""
    original, start = card.replay_of, card.replay_of["start_step"]
    begun = f"begun from its checkpoint {original['start']} of step {start:,}" if start else "begun from new weights"
    return (
        f"A counterfactual replay of checkpoint {original['checkpoint']} (step {original['step']:,}): the same order, "
        f"the places of {counted(len(without), 'document')} left as masked holes; {begun}."
    )


def epochs_of(card: RunCard) -> str | None:
    """How many epochs the steps are; None where the passport does not say how long one is."""
    return counted(card.step / card.steps_per_epoch, "epoch", ".3g") if card.steps_per_epoch else None


def marks_of(node: Node) -> list[str]:
    """Rows that a stage left out or marked, largest first."""
    ordered = sorted(node.marked.items(), key=lambda item: (-item[1], item[0]))
    return [
        counted(rows, name.replace("_", " ")) if name in _NOUNS else f"{rows:,} {name.replace('_', ' ')}"
        for name, rows in ordered
    ]


def became(went: Mapping[str, int]) -> list[tuple[str, int]]:
    """What became of rows or tokens, by reasons in words (those in SQL as they are); what is nothing is left out."""
    words = {
        name: name if " " in name else re.sub("left_out[_:]", "left out: ", name).replace("_", " ") for name in went
    }
    return [(readable(words[name], 80), count) for name, count in went.items() if count]


def by_step(one: SetInTime, steps: Sequence[int]) -> list[tuple[int, int, bool | None]]:
    """Saved checkpoints, some of many: step, items of a set seen by then, and whether its score stands."""
    places = sorted({round(i * (len(steps) - 1) / (CHECKPOINTS - 1)) for i in range(CHECKPOINTS)})
    clean = one.newest_clean if one.newest_clean is not None else -1
    return [
        (steps[at], one.dirty[at], False if one.dirty[at] else True if steps[at] <= clean else None) for at in places
    ]


def rows_of(node: Node) -> str:
    """Rows of a node, and how many of them were new to it."""
    if node.rows is None:
        return ""
    rows = f"{node.rows:,}" if node.rows < 100_000_000 else compact(node.rows)
    new = f", {node.worked_on:,} new" if node.worked_on not in (None, node.rows) else ""
    return f"{rows} row{'' if node.rows == 1 else 's'}{new}"


def parameters_of(parameters: Mapping[str, object]) -> list[tuple[str, str]]:
    """Parameters of a stage, each value on one line; what is long is cut."""
    return [(name, short(value)) for name, value in parameters.items()]


def short(value: object, width: int = 160) -> str:
    """A plain value on one line: lists by their items, what is long cut."""
    if isinstance(value, (list, tuple)):
        text = ", ".join(short(item, width) for item in value) or "none"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{name} {short(inner, width)}" for name, inner in value.items()) or "none"
    elif value is None:
        text = "none"
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 1]}…"


def measured(value: float | None, at: int | None, step: int) -> str:
    """What there is to say beside a loss: its perplexity, and where it was measured if not at this step."""
    if value is None:
        return "not measured"
    return f"perplexity {perplexity(value)}" + (f", at step {at:,}" if at not in (None, step) else "")


def events_of(card: RunCard) -> list[str]:
    """Spikes, resumes and interruptions, a sentence each."""
    history, found = card.history, []
    if history.spikes:
        often = "once" if len(history.spikes) == 1 else f"{len(history.spikes):,} times"
        steps = _few([f"step {spike.step:,} ({loss(spike.loss)})" for spike in history.spikes])
        found.append(f"The loss jumped {often}: {steps}.")
    for (_, before), (step, ranks) in pairwise(history.ranks):
        found.append(f"It went on with {counted(ranks, 'rank')} instead of {before:,} at step {step:,}.")
    if history.interruptions:
        steps = _few([f"{step:,}" for step in history.interruptions])
        found.append(f"It was stopped or resumed at step {steps}; the order of the data is the same.")
    return found


def _few(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def speeds_of(card: RunCard) -> list[tuple[str, str, str]]:
    """What is known of a run's speed: name, value, note."""
    speed, found = card.history.speed, []
    ranks = card.history.ranks[-1][1] if card.history.ranks else None
    if speed.tok_per_s is not None:
        found.append(("tokens per second", compact(speed.tok_per_s), counted(ranks, "rank") if ranks else ""))
    if speed.goodput_tok_per_s is not None:
        found.append(("goodput", compact(speed.goodput_tok_per_s), "tokens per second of all wall time"))
    if speed.data_wait is not None:
        found.append(("data wait", f"{speed.data_wait:.2%}", "of training time"))
    if speed.tok_per_s is not None:
        mfu = ("unknown", "the device's peak is not known") if speed.mfu is None else (f"{speed.mfu:.1%}", "median")
        found.append(("model FLOP use", *mfu))
    if speed.memory_bytes is not None:
        found.append(("memory", size_of(speed.memory_bytes), "most of the main rank"))
    return found


def time_parts_of(card: RunCard) -> list[tuple[str, float, float, int]]:
    """Parts of the last attempt's time: name, seconds, share, number of a colour; largest first."""
    parts = {name: seconds for name, seconds in card.history.speed.seconds_by_part.items() if seconds > 0}
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda part: (-part[1], part[0]))
    return [(name.replace("_", " "), s, s / total, min(n, 5)) for n, (name, s) in enumerate(ordered)]


@dataclass(frozen=True, kw_only=True)
class EvaluatedTable:
    """Losses by source at the first and the last evaluation, in words."""

    first_step: int
    """Step of the first."""
    last_step: int
    """Step of the last."""
    rows: tuple[tuple[str, str, str, str, str], ...]
    """Source, loss before, loss after, change, perplexity after; all sources together come last."""


def evaluated_of(card: RunCard) -> EvaluatedTable | None:
    """The table; None without an evaluation."""
    evaluations = card.history.evaluations
    if not evaluations:
        return None
    first, last = evaluations[0], evaluations[-1]
    ordered = sorted(last.by_source.items(), key=lambda item: (item[1], item[0]))
    lines = [(name, first.by_source.get(name), after) for name, after in ordered]
    lines.append(("all held-out rows", first.loss, last.loss))
    return EvaluatedTable(
        first_step=first.step,
        last_step=last.step,
        rows=tuple(
            (
                name,
                loss(before),
                loss(after),
                f"{after - before:+.4f}" if before is not None else "-",
                perplexity(after),
            )
            for name, before, after in lines
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stretch of the sample."""

    text: str
    """Its characters."""
    span: Span | None
    """The run of tokens that it is, where rows hold it."""
    seen: bool
    """Whether the checkpoint was trained on one of those rows."""


def pieces_of(sample: Sample) -> list[Piece]:
    """The sample cut at the ends of its runs; a run that the checkpoint has seen wins over one that it has not."""
    found, text = sample.attribution, sample.text
    owners: list[tuple[Span, bool] | None] = [None] * len(text)
    for spans, seen in ((found.unseen_spans, False), (found.spans, True)):
        for span in spans:
            start, stop = span.characters or (0, 0)
            owners[start:stop] = [(span, seen)] * (min(stop, len(text)) - start)
    cut = groupby(zip(text, owners, strict=True), key=lambda pair: pair[1])
    return [
        Piece(text="".join(character for character, _ in group), span=owner and owner[0], seen=bool(owner and owner[1]))
        for owner, group in cut
    ]


def span_title(span: Span, *, seen: bool) -> str:
    """What is known of a run of tokens."""
    where = f"{counted(span.tokens, 'token')}, in {counted(span.rows, 'document')}"
    if not seen:
        return f"{where}, none of them seen"
    return f"{where}, seen {counted(span.times_seen, 'time')}, first at step {span.first_step:,}"


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain values; a long list of documents left out is only counted."""
    values = to_dict(recipe)
    without = values["data"]["without"]
    if len(without) > HOLES:
        values["data"]["without"] = f"{len(without):,} documents"
    return values
