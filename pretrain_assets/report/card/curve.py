"""The loss curve of a run card as a picture: training and validation loss, learning rate, and what happened when.

Invariant: one SVG that takes its colours from the page's style; every point drawn is a record, and every mark has its
number as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from pretrain_assets.forensics.card.run_card import RunCard
from pretrain_assets.report.card.words import compact, loss
from pretrain_assets.report.clean import clean

LEFT, RIGHT, TOP, BOTTOM = 46, 14, 34, 24
"""Room for the axes, in pixels."""
RATE_HEIGHT, RATE_GAP = 46, 30
"""Height of the learning rate's panel below the losses, and the room between them."""

Scale = Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Where things are on the picture."""

    width: int
    """Of the whole picture, in pixels."""
    floor: float
    """Lower edge of the losses."""
    x: Scale
    """Place of a step."""
    y: Scale
    """Place of a loss."""


def curve_svg(card: RunCard, *, width: int, height: int, kind: str) -> Markup:
    """The curve; empty where the run has no training record and no evaluation.

    Args:
        card: The run.
        width: Of the picture, in pixels.
        height: Of the picture, in pixels.
        kind: Class for the page's style.
    """
    history = card.history
    values = [*(p.loss for p in history.points), *(e.loss for e in history.evaluations)]
    if not values:
        return Markup("")
    has_rates = any(point.learning_rate is not None for point in history.points)
    floor = height - BOTTOM - (RATE_HEIGHT + RATE_GAP if has_rates else 0)
    last = max(card.step, 1)
    marks = ticks(min(values), max(values), 5 if height > 300 else 4)
    low, high = min(marks[0], *values), max(marks[-1], *values)
    frame = Frame(
        width=width,
        floor=floor,
        x=lambda step: LEFT + (width - LEFT - RIGHT) * step / last,
        y=lambda value: TOP + (floor - TOP) * (high - value) / (high - low),
    )
    parts = [
        _grid(frame, marks, width),
        _axes(frame, card, height),
        *_events(frame, card),
        _losses(frame, card),
        *([_rates(frame, card, height)] if has_rates else []),
    ]
    return Markup(
        "<svg class='curve {kind}' role='img' aria-label='{label}' viewBox='0 0 {width} {height}'>{parts}</svg>"
    ).format(kind=kind, label=_label(card), width=width, height=height, parts=Markup("").join(parts))


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from just below `low` to just above `high`."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough)
    first, stop = math.floor(low / step), math.ceil(high / step)
    return [round(step * number, 10) for number in range(first, stop + 1)]


def _label(card: RunCard) -> str:
    history = card.history
    first, last = (history.points[0], history.points[-1]) if history.points else (None, None)
    text = f"Loss over {card.step:,} steps"
    if first and last:
        text += f": training loss from {loss(first.loss)} to {loss(last.loss)}"
    if history.evaluations:
        text += f", validation loss from {loss(history.evaluations[0].loss)} to {loss(history.evaluations[-1].loss)}"
    return text


def _grid(frame: Frame, marks: Sequence[float], width: int) -> Markup:
    lines = [
        Markup("<path class='grid' d='M{} {:.1f}H{}'/>{}").format(
            LEFT, frame.y(mark), width - RIGHT, _text(LEFT - 7, frame.y(mark) + 4, f"{mark:g}", "soft end")
        )
        for mark in marks
    ]
    return Markup("").join(lines)


def _axes(frame: Frame, card: RunCard, height: int) -> Markup:
    """Steps below, tokens above."""
    last, tokens_per_step = max(card.step, 1), card.recipe.train.global_batch_tokens
    steps = [mark for mark in ticks(0, last, 8 if frame.width > 600 else 4) if mark <= last and mark == int(mark)]
    name = f"step {card.step:,}"
    room = frame.width - RIGHT - 8 * len(name) - 24
    parts = [_text(frame.x(at), height - 8, f"{at:,.0f}", "soft middle") for at in steps if frame.x(at) < room]
    parts.append(_text(frame.width - RIGHT, height - 8, name, "soft end"))
    tokens = [mark for mark in ticks(0, last * tokens_per_step, 6 if frame.width > 600 else 3)]
    for mark in tokens:
        step = mark / tokens_per_step
        if 0 < step < (0.8 if frame.width > 600 else 0.6) * last:
            parts.append(Markup("<path class='grid' d='M{:.1f} {}v5'/>").format(frame.x(step), TOP - 6))
            parts.append(_text(frame.x(step), TOP - 12, compact(mark), "soft middle"))
    parts.append(_text(frame.width - RIGHT, TOP - 12, "tokens, with padding", "soft end"))
    return Markup("").join(parts)


def _events(frame: Frame, card: RunCard) -> list[Markup]:
    """Epochs, resumes, checkpoints and spikes."""
    history, parts = card.history, []
    rules = [
        (step, f"epoch {number} (from 0) begins", f"epoch {number}", "")
        for number, step in enumerate(history.epochs, 1)
    ]
    for (_, before), (step, ranks) in pairwise(history.ranks):
        rules.append((step, f"resumed on {ranks} ranks, before {before}", f"{before} → {ranks} ranks", "stop"))
    rules += [(step, "stopped or resumed", "resumed", "stop") for step in history.interruptions]
    parts += _rules(frame, sorted(rules))
    for step in card.checkpoints:
        x, y = frame.x(step), frame.floor
        name = "this checkpoint" if step == card.step else "checkpoint"
        parts.append(
            Markup("<path class='save' d='M{:.1f} {:.1f}l5 9h-10z'><title>{}, step {:,}, on {}</title></path>").format(
                x, y, name, step, clean(card.tag)
            )
        )
    for spike in history.spikes:
        parts.append(
            Markup("<circle class='spike' cx='{:.1f}' cy='{:.1f}' r='4.5'><title>{}</title></circle>").format(
                frame.x(spike.step),
                max(TOP, frame.y(spike.loss)),
                f"spike at step {spike.step:,}: loss {loss(spike.loss)}, {loss(spike.expected)} expected",
            )
        )
    return parts


def _rules(frame: Frame, rules: Sequence[tuple[int, str, str, str]]) -> list[Markup]:
    """Lines across the losses, each with its name at the top, or below the name that would be in its way."""
    found = []
    taken: list[float] = []
    for step, title, label, kind in rules:
        x, width = frame.x(step), 7.0 * len(label)
        at_end = x + width > frame.width - RIGHT
        start = x - width if at_end else x
        level = next((level for level, end in enumerate(taken) if end < start), len(taken))
        taken[level : level + 1] = [start + width]
        found.append(
            Markup("<g class='rule {}'><title>{}, step {:,}</title><path d='M{:.1f} {}V{:.1f}'/>{}</g>").format(
                kind,
                title,
                step,
                x,
                TOP,
                frame.floor,
                _text(x - 4 if at_end else x + 4, TOP + 12 + 14 * level, label, "soft end" if at_end else "soft"),
            )
        )
    return found


def _losses(frame: Frame, card: RunCard) -> Markup:
    history = card.history
    trained = _line([(frame.x(p.step), frame.y(p.loss)) for p in history.points])
    judged = _line([(frame.x(e.step), frame.y(e.loss)) for e in history.evaluations])
    dots = [
        Markup("<circle cx='{:.1f}' cy='{:.1f}' r='3.5'><title>step {:,}: validation loss {}</title></circle>").format(
            frame.x(e.step), frame.y(e.loss), e.step, loss(e.loss)
        )
        for e in history.evaluations
    ]
    return Markup("<path class='train' d='{}'/><g class='val'><path d='{}'/>{}</g>").format(
        trained, judged, Markup("").join(dots)
    )


def _rates(frame: Frame, card: RunCard, height: int) -> Markup:
    """The learning rate, from 0, in a panel of its own."""
    base = height - BOTTOM
    points = [(p.step, p.learning_rate) for p in card.history.points if p.learning_rate is not None]
    top = max(rate for _, rate in points) or 1.0
    places = [(frame.x(step), base - RATE_HEIGHT * rate / top) for step, rate in points]
    area = f"{_line(places)}L{places[-1][0]:.1f} {base}L{places[0][0]:.1f} {base}Z"
    return Markup(
        "<g class='rate'><title>learning rate, at most {top:.3g}</title><path class='grid' d='M{left} {base}H{right}'/>"
        "<path class='area' d='{area}'/><path d='{line}'/>{label}{peak}{zero}</g>"
    ).format(
        top=top,
        left=LEFT,
        right=frame.width - RIGHT,
        base=base,
        area=area,
        line=_line(places),
        label=_text(LEFT + 6, base - RATE_HEIGHT - 3, "learning rate", "soft"),
        peak=_text(LEFT - 7, base - RATE_HEIGHT + 4, _rate(top), "soft end"),
        zero=_text(LEFT - 7, base + 4, "0", "soft end"),
    )


def _rate(value: float) -> str:
    """A learning rate in few characters: 0.005, 6e-4."""
    return f"{value:.3g}" if value >= 1e-3 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")


def _line(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup("<text x='{:.1f}' y='{:.1f}' class='{}'>{}</text>").format(x, y, kind, text)
