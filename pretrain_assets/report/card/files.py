"""Writing a run card: `card.html` and `card.md`, local or on an object store.

Invariant: a file is replaced whole, and only these files are written.
"""

from __future__ import annotations

from pretrain_assets.forensics.card.run_card import RunCard
from pretrain_assets.launch.contract import write_file
from pretrain_assets.report.card.html import run_card_html
from pretrain_assets.report.card.markdown import run_card_markdown
from pretrain_assets.table.storage import join

RENDERERS = {".html": run_card_html, ".md": run_card_markdown}
NAME = "card"


def write_run_card(card: RunCard, place: str) -> tuple[str, ...]:
    """Write one file where `place` ends in `.html` or `.md`, else both into that folder; what was written is returned.

    Raises:
        StorageError: it cannot be written; the old file is as it was.
    """
    ending = next((ending for ending in RENDERERS if place.endswith(ending)), None)
    files = {place: ending} if ending else {join(place, f"{NAME}{ending}"): ending for ending in RENDERERS}
    for uri, kind in files.items():
        write_file(uri, RENDERERS[kind](card).encode())
    return tuple(files)
