"""Filters by name: what `clean` or `english` means, in SQL, and how names become plain SQL.

Invariant: what a run, a passport or a digest holds is plain SQL, so a name may change its meaning later without
changing what was trained. A column of the table wins over a name. Both are found whatever the case of their letters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from pretrain_assets.config import Recipe
from pretrain_assets.curate.quality_rules import RULES
from pretrain_assets.curate.sql import KEYWORDS, SYSTEM_PREFIX, and_terms, columns_in, tokens
from pretrain_assets.errors import FilterError
from pretrain_assets.table.columns import COLUMNS
from pretrain_assets.table.predicate import check_predicate, excerpt, near
from pretrain_assets.table.verify import Finding, filters_disjoint
from pretrain_assets.table.versions import STAGES, VERBS

if TYPE_CHECKING:
    import lance


@dataclass(frozen=True, kw_only=True)
class NamedFilter:
    """A predicate that has a name."""

    name: str
    """The word that stands for it, in lower case."""
    meaning: str
    """What the rows it keeps are, in a line."""
    sql: str
    """SQL over columns and other names."""


def by_name(*filters: NamedFilter) -> dict[str, NamedFilter]:
    """Filters by their names."""
    return {named.name: named for named in filters}


PUBLISHED = {
    "gopher_quality": "length, words, symbols, bullets and stop words as Gopher wants them (Rae et al. 2021, A.1.1)",
    "gopher_repetition": "no more repeated lines, paragraphs, n-grams than Gopher allows (Rae et al. 2021, table A1)",
    "c4": "C4's rules for documents: sentences, curly brackets, lorem ipsum (Raffel et al. 2020, section 2.2)",
    "fineweb_c4": "C4's rules but for the one on how lines end, as FineWeb uses them (Penedo et al. 2024, section 3.5)",
    "fineweb": "FineWeb's own rules for lines: ends, lengths, repetitions (Penedo et al. 2024, section 3.5)",
}
"""What the published sets of `quality_rules` keep."""

FILTERS = by_name(
    NamedFilter(
        name="clean",
        meaning="no copy of an earlier row, exact or near, and no evaluation text in it",
        sql="NOT is_dup AND NOT is_near_dup AND NOT contaminated",
    ),
    NamedFilter(
        name="english",
        meaning="English with a probability of at least 0.65, FineWeb's threshold (Penedo et al. 2024, section 3.3)",
        sql="language = 'en' AND language_probability >= 0.65",
    ),
    NamedFilter(
        name="high_quality",
        meaning="all published rules that FineWeb applies to a document's text",
        sql=" AND ".join(name for name in PUBLISHED if name != "c4"),
    ),
    *(
        NamedFilter(name=name, meaning=meaning, sql=" AND ".join(rule.kept for rule in RULES[name]))
        for name, meaning in PUBLISHED.items()
    ),
    NamedFilter(name="training", meaning="99 rows in a hundred", sql="id % 100 != 0"),
    NamedFilter(name="held_out", meaning="the other row in a hundred, for the validation loss", sql="id % 100 = 0"),
)
"""Every named filter, in the order in which people read them."""

DISJOINT = (("training", "held_out"),)
"""Pairs of names that no row may satisfy both of."""
MOST_NAMED = 3
"""Missing columns that a message names."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One of the conditions whose AND a filter is."""

    number: str
    """Place in the filter: `2`, or `2.1` for a term of the name that is term 2."""
    text: str
    """As it is written."""
    sql: str
    """The same in plain SQL."""
    children: tuple[Term, ...] = ()
    """Where it is a name: the terms of its meaning, if there are several."""

    @property
    def leaves(self) -> list[Term]:
        """The terms that have no terms of their own, in order."""
        return [leaf for child in self.children for leaf in child.leaves] or [self]


def expand(
    text: str,
    columns: Collection[str],
    *,
    names: Mapping[str, NamedFilter] = FILTERS,
    setting: str = "filter",
) -> str:
    """A predicate in plain SQL: every name outside of quotes is replaced by its meaning, in brackets.

    A predicate without names comes back as it is.

    Args:
        text: SQL over columns and names.
        columns: Columns of the table at the version that is asked.
        names: Known names.
        setting: Name of the setting that the predicate comes from, for messages.

    Raises:
        FilterError: a word is neither a column nor a name, a column is not there yet, or names go round in a circle.
    """
    unknown: dict[str, str] = {}
    plain = _expand(text, frozenset(name.lower() for name in columns), names, (), unknown)
    if unknown:
        raise FilterError(f"{setting}={excerpt(text)!r} {_advice(unknown, columns, names)}")
    return plain


def _expand(
    text: str,
    columns: frozenset[str],
    names: Mapping[str, NamedFilter],
    within: tuple[str, ...],
    unknown: dict[str, str],
) -> str:
    """The plain SQL; words that are neither column nor name go into `unknown`, with the name that they came from.

    Columns are given in lower case: Lance finds them whatever the case of their letters.
    """
    parts = []
    for token in tokens(text):
        word = token.text
        is_sql = token.lower in KEYWORDS or word.startswith(SYSTEM_PREFIX)
        if not token.is_name or token.lower in columns or is_sql:
            parts.append(word)
        elif token.lower in within:
            circle = " -> ".join([*within, token.lower])
            raise FilterError(f"The named filters go round in a circle: {circle}; change one")
        elif token.lower in names:
            parts.append(f"({_expand(names[token.lower].sql, columns, names, (*within, token.lower), unknown)})")
        else:
            unknown.setdefault(word, within[0] if within else "")
            parts.append(word)
    return "".join(parts)


def _advice(unknown: Mapping[str, str], columns: Collection[str], names: Mapping[str, NamedFilter]) -> str:
    """What to say of words that are neither columns of this version nor names."""
    owners = {column.name: column.owner for column in COLUMNS}
    strange = [word for word in unknown if word not in owners]
    if strange:
        known = near(strange[0], [*columns, *names])
        return f"holds {strange[0]!r}, which is neither a column nor a named filter. {known}"
    lacking = ", ".join(f"{word} (of {by})" if by else word for word, by in islice(unknown.items(), MOST_NAMED))
    lacking += f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
    order = {stage: place for place, stage in enumerate(STAGES)}
    stages = sorted({owners[word] for word in unknown}, key=lambda stage: order.get(stage, len(order)))
    commands = " && ".join(f"pretrain {VERBS.get(stage, stage)}" for stage in stages)
    return f"needs columns that this version lacks: {lacking}. Run `{commands}` first"


def checked(dataset: lance.LanceDataset, text: str, *, setting: str = "filter") -> str:
    """A predicate in plain SQL that the table can evaluate at this version.

    Raises:
        FilterError: it cannot; see `expand` and `check_predicate`.
    """
    try:
        plain = expand(text, dataset.schema.names, setting=setting)
    except FilterError as error:
        newest = dataset.checkout_version(dataset.latest_version)
        try:
            reads = columns_in(expand(text, newest.schema.names), newest.schema.names)
        except FilterError:
            raise error from None
        lacking = ", ".join(name for name in reads if name not in dataset.schema.names)
        raise FilterError(
            f"{setting}={excerpt(text)!r} needs columns that version {dataset.version} lacks: {lacking}. Version "
            f"{newest.version}, the newest, has them: ask that one"
        ) from None
    check_predicate(dataset, plain, setting=setting, written=text)
    return plain


def resolve(recipe: Recipe, columns: Collection[str]) -> Recipe:
    """A recipe with the filters and the parts of its mixture in plain SQL; without names, the same recipe.

    Args:
        recipe: Its predicates may use names.
        columns: Columns of the table at the version that is trained on.

    Raises:
        FilterError: as `expand`.
    """
    data = recipe.data

    def plain(predicate: str, setting: str) -> str:
        return expand(predicate, columns, setting=f"data.{setting}")

    return replace(
        recipe,
        data=replace(
            data,
            filter=plain(data.filter, "filter"),
            held_out_filter=plain(data.held_out_filter, "held_out_filter"),
            mixture=tuple(
                replace(part, predicate=plain(part.predicate, f"mixture[{part.name}].predicate"))
                for part in data.mixture
            ),
        ),
    )


def terms_of(
    text: str, columns: Collection[str], *, names: Mapping[str, NamedFilter] = FILTERS, prefix: str = ""
) -> tuple[Term, ...]:
    """The terms whose AND a predicate is; a name is one term with terms of its own."""
    found, named = [], names.keys() - {column.lower() for column in columns}
    for number, term in enumerate(and_terms(text), 1):
        place, name = f"{prefix}{number}", term.lower()
        children = terms_of(names[name].sql, columns, names=names, prefix=f"{place}.") if name in named else ()
        several = children if len(children) > 1 else ()
        found.append(Term(number=place, text=term, sql=expand(term, columns, names=names), children=several))
    return tuple(found)


def usable(columns: Collection[str]) -> dict[str, str]:
    """The names that a version has all columns for, with their plain SQL."""
    found = {}
    for name in FILTERS:
        try:
            found[name] = expand(name, columns)
        except FilterError:
            continue
    return found


def disjoint(dataset: lance.LanceDataset) -> Finding:
    """Whether no row is in two named filters that must share none, at this version."""
    pairs = {
        f"{one} and {other}": filters_disjoint(dataset, checked(dataset, one), checked(dataset, other))
        for one, other in DISJOINT
    }
    return Finding(
        name="filters_disjoint",
        passed=all(finding.passed for finding in pairs.values()),
        description="; ".join(f"{pair}: {finding.description}" for pair, finding in pairs.items()),
    )
