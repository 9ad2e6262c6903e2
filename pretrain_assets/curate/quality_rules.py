"""The published quality rules as SQL over the columns of stage `quality`: what each keeps, and why another row goes.

Invariant: the same rows are kept as by datatrove's filter of the same name with its defaults, words split by
`str.split` (measured row by row: `benchmarks.curation_quality`). Thresholds of float columns are cast to their type,
or 0.1 would not equal 0.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain_assets.table.query import sql_rows

if TYPE_CHECKING:
    import lance


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One threshold."""

    name: str
    """The reason that datatrove gives for a document that it leaves out."""
    column: str
    """What is compared."""
    sign: str
    """How: `>=`, `<=`, `>` or `=`."""
    threshold: float
    """With what; an int for a count."""
    meaning: str
    """What stays, for people."""
    source: str
    """Where the threshold is published."""

    @property
    def kept(self) -> str:
        """SQL that holds for the rows that stay."""
        is_count = isinstance(self.threshold, int)
        return f"{self.column} {self.sign} {self.threshold if is_count else f'CAST({self.threshold} AS FLOAT)'}"


def _rules(source: str, *rules: tuple[str, str, str, float, str]) -> tuple[Rule, ...]:
    return tuple(
        Rule(name=name, column=column, sign=sign, threshold=threshold, meaning=meaning, source=source)
        for name, column, sign, threshold, meaning in rules
    )


RULES: dict[str, tuple[Rule, ...]] = {
    "gopher_quality": _rules(
        "Rae et al. 2021, appendix A.1.1",
        ("gopher_short_doc", "gopher_words", ">=", 50, "at least 50 words"),
        ("gopher_long_doc", "gopher_words", "<=", 100_000, "at most 100,000 words"),
        ("gopher_below_avg_threshold", "gopher_word_length", ">=", 3, "words of 3 characters on average, or more"),
        ("gopher_above_avg_threshold", "gopher_word_length", "<=", 10, "words of 10 characters on average, or fewer"),
        ("gopher_too_many_hashes", "gopher_hash_ratio", "<=", 0.1, "at most one # in 10 words"),
        ("gopher_too_many_ellipsis", "gopher_ellipsis_ratio", "<=", 0.1, "at most one ellipsis in 10 words"),
        ("gopher_too_many_bullets", "gopher_bullet_lines", "<=", 0.9, "at most 90% of lines with a bullet"),
        ("gopher_too_many_end_ellipsis", "gopher_ellipsis_lines", "<=", 0.3, "at most 30% of lines end in an ellipsis"),
        ("gopher_below_alpha_threshold", "gopher_alpha_words", ">=", 0.8, "at least 80% of words have a letter"),
        ("gopher_enough_stop_words", "gopher_stop_words", ">=", 2, "at least 2 of the stop words"),
    ),
    "gopher_repetition": _rules(
        "Rae et al. 2021, table A1",
        ("empty", "n_chars", ">", 0, "any text"),
        ("dup_para_frac", "gopher_dup_paragraphs", "<=", 0.3, "at most 30% of paragraphs are repeated"),
        ("dup_para_char_frac", "gopher_dup_paragraph_chars", "<=", 0.2, "at most 20% of characters are in them"),
        ("dup_line_frac", "gopher_dup_lines", "<=", 0.3, "at most 30% of lines are repeated"),
        ("dup_line_char_frac", "gopher_dup_line_chars", "<=", 0.2, "at most 20% of characters are in them"),
        *(
            (f"top_{n}_gram", f"gopher_top_{n}gram", "<=", most, f"at most {most:.0%} are the top {n}-gram")
            for n, most in ((2, 0.2), (3, 0.18), (4, 0.16))
        ),
        *(
            (f"duplicated_{n}_n_grams", f"gopher_dup_{n}gram", "<=", most, f"at most {most:.0%} in repeated {n}-grams")
            for n, most in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1))
        ),
    ),
    "c4": _rules(
        "Raffel et al. 2020, section 2.2",
        ("lorem_ipsum", "c4_lorem_ipsum_lines", "=", 0, "no `lorem ipsum`"),
        ("curly_bracket", "c4_curly_lines", "=", 0, "no curly bracket"),
        ("too_few_sentences", "c4_sentences", ">=", 5, "at least 5 sentences in lines that C4 keeps"),
    ),
    "fineweb_c4": _rules(
        "Penedo et al. 2024, section 3.5: C4's filters but for the one on terminal punctuation",
        ("lorem_ipsum", "fineweb_lorem_ipsum_lines", "=", 0, "no `lorem ipsum`, in lines of any ending"),
        ("curly_bracket", "fineweb_curly_lines", "=", 0, "no curly bracket, in lines of any ending"),
        ("too_few_sentences", "fineweb_sentences", ">=", 5, "at least 5 sentences, in lines of any ending"),
    ),
    "fineweb": _rules(
        "datatrove's FineWebQualityFilter; Penedo et al. 2024, section 3.5, has 0.1 for char_dup_ratio",
        ("line_punct_ratio", "fineweb_ended_lines", ">=", 0.12, "at least 12% of lines end a sentence"),
        ("short_line_ratio", "fineweb_short_lines", "<=", 0.67, "at most 67% of lines are short"),
        ("char_dup_ratio", "fineweb_dup_line_chars", "<=", 0.01, "at most 1% of characters are in repeated lines"),
        ("list_ratio", "fineweb_newlines", "<=", 0.3, "at most 3 line feeds in 10 words"),
    ),
}
"""The rules of every published set, in the order in which datatrove asks them."""


def rows_failing(dataset: lance.LanceDataset) -> dict[str, dict[str, int]]:
    """Rows that each rule would leave out, by set and rule; `""` counts those that any rule of the set would.

    Args:
        dataset: The table at a version with the columns of stage `quality`; rows not measured yet are not counted.
    """
    sets = {name: {"": keeps(rules), **{rule.name: rule.kept for rule in rules}} for name, rules in RULES.items()}
    kept = [(name, rule, sql) for name, rules in sets.items() for rule, sql in rules.items()]
    counts = ", ".join(f"count(*) FILTER (WHERE NOT ({sql})) AS c{number}" for number, (_, _, sql) in enumerate(kept))
    row = sql_rows(dataset, f"SELECT {counts} FROM dataset")[0]
    failing: dict[str, dict[str, int]] = {name: {} for name in sets}
    for number, (name, rule, _) in enumerate(kept):
        failing[name][rule] = row[f"c{number}"]
    return failing


def keeps(rules: Sequence[Rule]) -> str:
    """SQL that holds for the rows that meet all rules."""
    return " AND ".join(rule.kept for rule in rules)


def reason(rules: Sequence[Rule]) -> str:
    """SQL of the first rule that a row does not meet, by name; NULL where it meets all."""
    return f"CASE {' '.join(f'''WHEN NOT ({rule.kept}) THEN '{rule.name}' ''' for rule in rules)}END"
