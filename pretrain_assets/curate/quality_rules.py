"""The published quality rules as SQL over the columns of stage `quality`: what each keeps, and why another row goes.

Invariant: the same rows are kept as by datatrove's filter of the same name with its defaults, words split by
`str.split` (measured row by row: `benchmarks.curation_quality`). Thresholds of float columns are cast to their type,
or 0.1 would not equal 0.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One threshold."""

    name: str
    """The reason that datatrove gives for a document that it leaves out."""
    kept: str
    """SQL that holds for the rows that stay."""
    meaning: str
    """What stays, for people."""
    source: str
    """Where the threshold is published."""


GOPHER = "Rae et al. 2021, appendix A.1.1"
REPETITION = "Rae et al. 2021, table A1"
C4 = "Raffel et al. 2020, section 2.2"
FINEWEB = "Penedo et al. 2024, section 3.5"


def _rule(name: str, column: str, comparison: str, meaning: str, source: str) -> Rule:
    sign, threshold = comparison.split()
    value = f"CAST({threshold} AS FLOAT)" if "." in threshold else threshold
    return Rule(name=name, kept=f"{column} {sign} {value}", meaning=meaning, source=source)


RULES: dict[str, tuple[Rule, ...]] = {
    "gopher_quality": (
        _rule("gopher_short_doc", "gopher_words", ">= 50", "at least 50 words", GOPHER),
        _rule("gopher_long_doc", "gopher_words", "<= 100000", "at most 100,000 words", GOPHER),
        _rule("gopher_below_avg_threshold", "gopher_word_length", ">= 3", "words of 3 characters or more", GOPHER),
        _rule("gopher_above_avg_threshold", "gopher_word_length", "<= 10", "words of 10 characters or fewer", GOPHER),
        _rule("gopher_too_many_hashes", "gopher_hash_ratio", "<= 0.1", "at most one # in 10 words", GOPHER),
        _rule(
            "gopher_too_many_ellipsis", "gopher_ellipsis_ratio", "<= 0.1", "at most one ellipsis in 10 words", GOPHER
        ),
        _rule("gopher_too_many_bullets", "gopher_bullet_lines", "<= 0.9", "at most 90% bullet lines", GOPHER),
        _rule(
            "gopher_too_many_end_ellipsis", "gopher_ellipsis_lines", "<= 0.3", "30% of lines end in ellipses", GOPHER
        ),
        _rule("gopher_below_alpha_threshold", "gopher_alpha_words", ">= 0.8", "80% of words with a letter", GOPHER),
        _rule("gopher_enough_stop_words", "gopher_stop_words", ">= 2", "at least 2 of the stop words", GOPHER),
    ),
    "gopher_repetition": (
        _rule("empty", "n_chars", "> 0", "a text", "datatrove"),
        _rule("dup_para_frac", "gopher_dup_paragraphs", "<= 0.3", "at most 30% repeated paragraphs", REPETITION),
        _rule("dup_para_char_frac", "gopher_dup_paragraph_chars", "<= 0.2", "20% of characters in them", REPETITION),
        _rule("dup_line_frac", "gopher_dup_lines", "<= 0.3", "at most 30% repeated lines", REPETITION),
        _rule("dup_line_char_frac", "gopher_dup_line_chars", "<= 0.2", "20% of characters in them", REPETITION),
        *(
            _rule(f"top_{n}_gram", f"gopher_top_{n}gram", f"<= {most}", f"{most} in the top {n}-gram", REPETITION)
            for n, most in ((2, "0.2"), (3, "0.18"), (4, "0.16"))
        ),
        *(
            _rule(
                f"duplicated_{n}_n_grams",
                f"gopher_dup_{n}gram",
                f"<= {most}",
                f"{most} in repeated {n}-grams",
                REPETITION,
            )
            for n, most in ((5, "0.15"), (6, "0.14"), (7, "0.13"), (8, "0.12"), (9, "0.11"), (10, "0.1"))
        ),
    ),
    "c4": (
        _rule("lorem_ipsum", "c4_lorem_ipsum_lines", "= 0", "no `lorem ipsum`", C4),
        _rule("curly_bracket", "c4_curly_lines", "= 0", "no curly bracket", C4),
        _rule("too_few_sentences", "c4_sentences", ">= 5", "at least 5 sentences in kept lines", C4),
    ),
    "fineweb": (
        _rule("line_punct_ratio", "fineweb_ended_lines", ">= 0.12", "at least 12% of lines end sentences", FINEWEB),
        _rule("short_line_ratio", "fineweb_short_lines", "<= 0.67", "at most 67% short lines", FINEWEB),
        _rule(
            "char_dup_ratio",
            "fineweb_dup_line_chars",
            "<= 0.01",
            "at most 1% of characters in repeated lines",
            "datatrove, which made FineWeb; the paper says 0.1",
        ),
        _rule("list_ratio", "fineweb_newlines", "<= 0.3", "at most 3 line feeds in 10 words", "datatrove"),
    ),
}
"""The rules of every published set, in the order in which datatrove asks them."""


def keeps(rules: Sequence[Rule]) -> str:
    """SQL that holds for the rows that meet all rules."""
    return " AND ".join(rule.kept for rule in rules)


def reason(rules: Sequence[Rule]) -> str:
    """SQL of the first rule that a row does not meet, by name; NULL where it meets all."""
    return f"CASE {' '.join(f'''WHEN NOT ({rule.kept}) THEN '{rule.name}' ''' for rule in rules)}END"
