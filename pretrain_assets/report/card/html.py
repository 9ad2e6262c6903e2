"""The run card as one HTML file: no script, no font, no other file, readable without a network.

Invariant: everything shown comes from the card given. The template escapes every value, and what it prints is freed of
characters that steer a browser, so no text of a document is ever markup. The same card gives the same bytes.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import jinja2
from markupsafe import Markup, escape

from pretrain_assets.forensics.card.run_card import RunCard
from pretrain_assets.report.card import words
from pretrain_assets.report.card.curve import curve_svg
from pretrain_assets.report.card.graph import graph_svg
from pretrain_assets.report.clean import clean
from pretrain_assets.report.contamination_in_time_text import verdict as stands
from pretrain_assets.report.curation_text import lines_of, percent, readable
from pretrain_assets.table.lineage import Pin


def run_card_html(card: RunCard) -> str:
    """The whole page."""
    documents = sum(seen.documents for seen in card.exposures)
    return _template().render(
        card=card,
        version=Pin.parse(card.pin).version,
        sections=_SECTIONS,
        replay=words.replay_of(card),
        progress=words.progress_of(card),
        epochs=words.epochs_of(card),
        val_note=words.measured(card.val_loss, card.val_loss_step, card.step),
        train_note=words.measured(card.train_loss, card.train_loss_step, card.step),
        documents=documents,
        documents_seen=sum(seen.documents for seen in card.exposures if seen.high),
        most_documents=max((seen.documents for seen in card.exposures), default=1),
        curves=[curve for curve in _curves(card) if curve],
        graphs=[graph_svg(card.lineage, tall=tall) for tall in (False, True)] if card.lineage else [],
        events=words.events_of(card),
        speed=card.history.speed,
        speeds=words.speeds_of(card),
        time_parts=words.time_parts_of(card),
        evaluated=words.evaluated_of(card),
        terms=list(lines_of(card.funnel.steps)) if card.funnel else [],
        pieces=words.pieces_of(card.sample) if card.sample else [],
        listed={source.id for source in card.sample.attribution.sources} if card.sample else set(),
        licensed=any(source.license for source in card.sources),
        settings=json.dumps(words.settings_of(card.recipe), indent=1, ensure_ascii=False),
    )


_SECTIONS = [
    (name, name.capitalize())
    for name in (
        "training",
        "evaluation",
        "lineage",
        "filter",
        "sources",
        "ledger",
        "exposures",
        "contamination",
        "sample",
        "recipe",
    )
] + [("ask", "Ask further")]


def _curves(card: RunCard) -> list[Markup]:
    """For wide pages and for narrow ones."""
    return [
        curve_svg(card, width=1080, height=400, kind="broad"),
        curve_svg(card, width=360, height=300, kind="narrow"),
    ]


@lru_cache
def _template() -> jinja2.Template:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("pretrain_assets", "report/card"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "n": lambda number: f"{number:,}",
        "compact": words.compact,
        "loss": words.loss,
        "percent": percent,
        "duration": words.duration,
        "sql": readable,
        "times": words.times_of,
        "parameters": words.parameters_of,
        "span_title": words.span_title,
        "stands": stands,
        "became": words.became,
        "by_step": words.by_step,
        "told": _told,
    }
    return found.get_template("run_card.html.jinja")


def _told(sentence: str) -> Markup:
    """A sentence with what stands between backticks as code."""
    parts = clean(sentence).split("`")
    return Markup("").join(Markup("<code>{}</code>").format(p) if n % 2 else escape(p) for n, p in enumerate(parts))


def _printed(value: Any) -> Any:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
