"""Text of an attribution: the verdict, the text with what stands elsewhere marked, and the documents.

Invariant: prints what it is given; what is not known is printed as `-`.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from pretrain_assets.plural import counted
from pretrain_assets.report.clean import clean, named

if TYPE_CHECKING:
    from pretrain_assets.forensics.attribution.attribution import Attribution
    from pretrain_assets.forensics.attribution.sources import Match, Source

WIDTH = 100
"""Characters of a line."""
SHOWN_CHARACTERS = 2_000
"""Of the text, from its beginning; JSON has all of it."""


def attribution_text(found: Attribution) -> str:
    """The verdict first, then what it rests on."""
    parts = [f"{found.checkpoint} ({found.pin})", textwrap.fill(found.verdict, WIDTH)]
    if found.prompt is not None:
        parts.append(f"prompt: {found.prompt!r}")
    parts.append(f"{_legend(found)}\n{textwrap.indent(marked(found), '   ')}")
    parts += [_source(place, source, len(found.ids)) for place, source in enumerate(found.sources, 1)]
    parts += [textwrap.fill(f"note: {note}", WIDTH) for note in found.notes]
    return clean("\n\n".join(parts))


def marked(found: Attribution) -> str:
    """The text, with brackets around what stands word for word in other rows."""
    text, edges = found.text, []
    for brackets, spans in (("«»", found.spans), ("{}", found.unseen_spans)):
        for span in spans:
            if span.characters:
                edges += [(span.characters[0], 1, brackets[0]), (span.characters[1], 0, brackets[1])]
    for at, _, bracket in sorted(edges, reverse=True):
        text = text[:at] + bracket + text[at:]
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."


def _legend(found: Attribution) -> str:
    marks = [
        *(["«word for word in what the model was trained on»"] if found.spans else []),
        *(["{word for word only where it was not}"] if found.unseen_spans else []),
    ]
    return f"the text{'; ' if marks else ''}{', '.join(marks)}:"


def _source(place: int, source: Source, num_tokens: int) -> str:
    facts = [f"{source.covered_tokens:,} of {num_tokens:,} tokens word for word"]
    facts += [] if source.bm25 is None else [f"BM25 {source.bm25:.1f}"]
    facts += [] if source.cosine is None else [f"cosine {source.cosine:.3f}"]
    lines = [f"{place}. id {source.id} ({named(source.source)}): {', '.join(facts)}", f"   {source.seen.describe()}"]
    if source.preview is not None:
        lines.append(textwrap.indent(textwrap.fill(source.preview, WIDTH), "   "))
    lines += [f"   - {_match(match)}" for match in source.matches]
    if source.influence:
        lines.append(
            f"   one gradient step of {source.influence.learning_rate:g} on "
            f"{counted(source.influence.document_tokens, 'token')} of it: {source.influence.measured:+.5f} nats per "
            f"token on the text (first order {source.influence.first_order:+.5f})"
        )
    return "\n".join(lines)


def _match(match: Match) -> str:
    there = "" if match.document_characters is None else f", characters {_range(match.document_characters)} of it"
    places = f" at {match.occurrences:,} places" if match.occurrences > 1 else ""
    trained = "not trained on" if not match.times_seen else f"trained on {counted(match.times_seen, 'time')}"
    return (
        f"{textwrap.shorten(match.text, WIDTH, placeholder=' ...')!r} ({counted(match.tokens, 'token')}, "
        f"{match.bits:.0f} bits{places}{there}; {trained})"
    )


def _range(characters: tuple[int, int]) -> str:
    return f"{characters[0]:,}-{characters[1]:,}"
