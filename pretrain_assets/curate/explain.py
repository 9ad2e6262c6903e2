"""Why a row is kept or left out: every term of a filter with the values that it reads, and what the row repeats.

Invariant: answers from the table at one version alone, and says nothing of columns that it lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.curate.filters import FILTERS, Term, checked, terms_of, usable
from pretrain_assets.curate.sql import columns_in, tokens
from pretrain_assets.errors import FilterError, TableError
from pretrain_assets.table.predicate import excerpt

if TYPE_CHECKING:
    import lance

PREVIEW_CHARACTERS = 200
"""Of a text that is shown."""
PARTNERS = (("dup_of", None), ("near_dup_of", "near_dup_similarity"))
"""Columns that name the row which a duplicate repeats, and how similar the two are; None: equal but for white space."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """A term's truth for one row."""

    number: str
    """Place in the filter, such as `2` or `2.1`."""
    text: str
    """As it is written."""
    holds: bool | None
    """Whether it is true; None: NULL, which keeps no row."""
    values: dict[str, Any]
    """The columns that it reads, with the row's values."""
    children: tuple[Truth, ...] = ()
    """Terms of its meaning, where it is a name."""


@dataclass(frozen=True, kw_only=True)
class Partner:
    """The row that a duplicate repeats."""

    column: str
    """Column that names it."""
    id: int
    """Its id."""
    similarity: float
    """How much alike the two are, from 0 to 1."""
    is_there: bool
    """Whether this version still has it."""
    source: str | None
    """Where it comes from."""
    preview: str
    """Beginning of its text."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One row, and why a filter keeps it or leaves it out."""

    id: int
    """The row."""
    version: int
    """Version of the table."""
    filter: str | None
    """As it was asked for; None: the named filters that the version has columns for, each for itself."""
    kept: bool | None
    """Whether the filter is true for it; None: NULL. Without a filter None as well."""
    removed_by: tuple[str, ...]
    """Numbers of the terms that are not true."""
    terms: tuple[Truth, ...]
    """Every term."""
    repeats: tuple[Partner, ...]
    """Rows that it repeats."""
    contamination: dict[str, Any]
    """What evaluation text it holds: columns of the decontaminated stage, and that text itself; empty when none."""
    values: dict[str, Any]
    """All columns but texts and lists."""
    preview: str
    """Beginning of its text."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A row that a term removes."""

    id: int
    """The row."""
    source: str | None
    """Where it comes from."""
    number: str
    """Place in the filter of the first rule of the term that is not true for it; of the term, if it is one rule."""
    rule: str
    """That rule, as it is written."""
    values: dict[str, Any]
    """The columns that the rule reads."""
    preview: str
    """Beginning of its text."""


def explain(dataset: lance.LanceDataset, row: int, text: str | None = None) -> Explanation:
    """Why a filter keeps a row or leaves it out.

    Args:
        dataset: The table at the version that is asked.
        row: Id of the row.
        text: SQL over columns and names; None: the named filters that can be evaluated, each for itself.

    Raises:
        FilterError: the table cannot evaluate the filter.
        TableError: there is no such row.
    """
    names = dataset.schema.names
    if text is not None:
        checked(dataset, text)
    terms = terms_of(text or " AND ".join(_outermost(usable(names))), names)
    values = _row(dataset, row)
    truths = _truths(dataset, row, terms, values)
    removed = tuple(truth.number for truth in truths if truth.holds is not True)
    return Explanation(
        id=row,
        version=dataset.version,
        filter=text,
        kept=None if text is None else all_of([truth.holds for truth in truths]),
        removed_by=() if text is None else removed,
        terms=truths,
        repeats=_partners(dataset, values),
        contamination=_contamination(values) if values.get("contaminated") else {},
        values={name: shown(value) for name, value in values.items() if name not in ("text", "text_masked")},
        preview=preview(values["text"]),
    )


def examples(dataset: lance.LanceDataset, text: str, asked: str, *, limit: int) -> list[Example]:
    """The first rows that a term of a filter removes, whatever its other terms say.

    Args:
        dataset: The table at the version that is asked.
        text: SQL over columns and names.
        asked: The term, as `funnel` numbers it, `2` or `2.1`, or as it is written.
        limit: Rows at most.

    Raises:
        FilterError: the table cannot evaluate it, or it has no such term.
    """
    checked(dataset, text)
    names = dataset.schema.names
    terms = every_term(terms_of(text, names))
    term = next((term for term in terms if asked.strip().lower() in (term.number, term.text.lower())), None)
    if term is None:
        known = ", ".join(f"{term.number} ({term.text})" for term in terms)
        raise FilterError(f"filter={excerpt(text)!r} has no term {asked}; it has {known}")
    truths = {f"({rule.sql}) IS TRUE": rule for rule in term.leaves}
    columns = {name: f"`{name}`" for name in ("id", "source", "text", *columns_in(term.sql, names))}
    found = dataset.scanner(
        columns={**columns, **{truth: truth for truth in truths}}, filter=f"({term.sql}) IS NOT TRUE", limit=limit
    ).to_table()

    def example(row: dict[str, Any]) -> Example:
        rule = next(rule for truth, rule in truths.items() if not row[truth])
        reads = [name for name in columns_in(rule.sql, names) if name != "text"]
        return Example(
            id=row["id"],
            source=row["source"],
            number=rule.number,
            rule=rule.text,
            values={name: shown(row[name]) for name in reads},
            preview=preview(row["text"]),
        )

    return [example(row) for row in found.to_pylist()]


def every_term(terms: Sequence[Term]) -> list[Term]:
    """The terms and theirs, in order."""
    return [found for term in terms for found in (term, *every_term(term.children))]


def all_of(truths: Sequence[bool | None]) -> bool | None:
    """SQL's AND."""
    return False if False in truths else None if None in truths else True


def preview(text: str | None) -> str:
    """Beginning of a text on one line."""
    words = " ".join((text or "")[: 4 * PREVIEW_CHARACTERS].split())
    return words if len(words) <= PREVIEW_CHARACTERS else f"{words[:PREVIEW_CHARACTERS]}..."


def shown(value: Any) -> Any:
    """A value as JSON has it: long texts cut, floats to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return preview(value) if isinstance(value, str) else value


def _outermost(names: Collection[str]) -> list[str]:
    """Names that stand in the meaning of no other one."""
    inner = {token.text for name in names for token in tokens(FILTERS[name].sql)}
    return [name for name in names if name not in inner]


def _row(dataset: lance.LanceDataset, row: int) -> dict[str, Any]:
    """The row's columns, but for what says nothing to people: tokens, hashes, signatures, embeddings."""
    import pyarrow as pa

    def tells(kind: pa.DataType) -> bool:
        lists = pa.types.is_nested(kind) and not (pa.types.is_list(kind) and kind.value_type == pa.string())
        return not (lists or pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind))

    narrow = [field.name for field in dataset.schema if tells(field.type)]
    found = dataset.to_table(columns=narrow, filter=f"id = {row}").to_pylist()
    if not found:
        raise TableError(f"{dataset.uri} version {dataset.version} has no row {row}")
    return dict(found[0])


def _truths(
    dataset: lance.LanceDataset, row: int, terms: Sequence[Term], values: Mapping[str, Any]
) -> tuple[Truth, ...]:
    leaves = [leaf for term in terms for leaf in term.leaves]
    columns = {"id": "id", **{f"t{place}": f"({leaf.sql})" for place, leaf in enumerate(leaves)}}
    (found,) = dataset.to_table(columns=columns, filter=f"id = {row}").to_pylist()
    holds = iter(found[f"t{place}"] for place in range(len(leaves)))

    def truth(term: Term) -> Truth:
        children = tuple(truth(child) for child in term.children)
        reads = [name for name in columns_in(term.sql, list(values)) if name != "text"]
        return Truth(
            number=term.number,
            text=term.text,
            holds=all_of([child.holds for child in children]) if children else next(holds),
            values={} if children else {name: shown(values[name]) for name in reads},
            children=children,
        )

    return tuple(truth(term) for term in terms)


def _partners(dataset: lance.LanceDataset, values: Mapping[str, Any]) -> tuple[Partner, ...]:
    """The rows that a row repeats, by the columns that name them."""
    found = []
    for column, similarity in PARTNERS:
        other = values.get(column)
        if other is None or other == values["id"]:
            continue
        rows = dataset.to_table(columns=["source", "text"], filter=f"id = {other}").to_pylist()
        alike = 1.0 if similarity is None else values.get(similarity)
        found.append(
            Partner(
                column=column,
                id=other,
                similarity=shown(alike),
                is_there=bool(rows),
                source=rows[0]["source"] if rows else None,
                preview=preview(rows[0]["text"]) if rows else "",
            )
        )
    return tuple(found)


def _contamination(values: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluation items that a row holds, and the longest run of their words as it stands in the text."""
    start, stop = values["contamination_start"], values["contamination_stop"]
    return {
        "item": values["contamination_item"],
        "items": values["contamination_items"],
        "overlap": shown(values["contamination_overlap"]),
        "start": start,
        "stop": stop,
        "text": preview(values["text"][start:stop]),
    }
