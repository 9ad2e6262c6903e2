"""Why a run did not train on documents: the term of the filter, the row repeated, or that there was no such row.

Invariant: computed from the pinned version, the table's records and the plan. A reason is given only when it is true:
where a version that would tell is gone, that is what is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import DataConfig
from pretrain_assets.curate.explain import shown
from pretrain_assets.curate.filters import Term, terms_of
from pretrain_assets.curate.sql import columns_in
from pretrain_assets.loader.turns import Turn
from pretrain_assets.table.lineage import LineageRecord, Pin
from pretrain_assets.table.predicate import excerpt, in_list
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import open_pin, records

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

HELD_OUT = "held out for validation"
LEFT_OUT = {
    "partial_step": "its blocks come after the last whole step of epoch {epoch}",
    "end_of_split": "left out at the end of split {split} of epoch {epoch}, where the other splits had no more blocks",
    "beyond_splits": "left over when the rows of epoch {epoch} were shared out to the splits equally",
    "thinned": "the mixture did not draw it for epoch {epoch}",
}
"""What the ledger's reasons mean for one document."""
EVIDENCE = (
    *("is_dup", "dup_of", "is_near_dup", "near_dup_of", "near_dup_similarity"),
    *("contaminated", "contamination_item"),
)
"""Columns that say more of a row than that a term is not true of it."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """Why a document was not trained on."""

    kind: str
    """`unknown`, `later`, `deleted`, `filter`, `duplicate`, `near_duplicate`, `contaminated`, `held_out`, `hole`,
    `not_reached`, `past_the_end`, or a reason of the ledger: `partial_step`, `end_of_split`, `beyond_splits`,
    `thinned`."""
    text: str
    """The same for people, with its evidence; a part of a sentence."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The evidence for programs: `terms` (of the filter that are not true, in order), `repeats` (id), `step`, ..."""


def why_outside(location: Location, pin: Pin, data: DataConfig, ids: Iterable[int]) -> dict[int, Why]:
    """Why each of the documents is not among the rows that the filter keeps; nothing of those that it keeps.

    One scan, whatever the number of documents.

    Args:
        location: The table.
        pin: The run's pinned version.
        data: The run's filters.
        ids: Documents, by the table's `id`.
    """
    wanted = sorted({int(i) for i in ids})
    if not wanted:
        return {}
    dataset = open_pin(location, pin)
    terms = [leaf for term in terms_of(data.filter, dataset.schema.names) for leaf in term.leaves]
    rows = {row["id"]: row for row in _judged(dataset, data, terms, wanted)}
    found = {i: _by_filter(row, terms) for i, row in rows.items() if not row["kept"]}
    missing = [i for i in wanted if i not in rows]
    return found | (_absent(location, pin, missing) if missing else {})


def why_not_yet(turns: Sequence[Turn], *, step: int, total_steps: int) -> Why:
    """Why a run of `step` steps has trained on no token of a document that its filter keeps.

    Args:
        turns: What its epochs make of the document, at least one.
        step: Optimizer steps done.
        total_steps: Steps of the whole run.
    """
    hidden = min((span for turn in turns for span in turn.masked), default=None)
    coming = min((span for turn in turns for span in turn.exposures), default=None)
    if hidden and (hidden.step <= step or not coming):
        text = f"left out on purpose (data.without): masked padding stands in its place, first at step {hidden.step:,}"
        return Why(kind="hole", text=text, facts={"step": hidden.step, "epoch": hidden.epoch})
    earlier = [turn for turn in turns if turn.left_out and (not coming or turn.epoch < coming.epoch)]
    reasons = [(next(iter(turn.left_out)), turn) for turn in earlier]
    said = list(dict.fromkeys(LEFT_OUT[kind].format(epoch=turn.epoch, split=turn.split) for kind, turn in reasons))
    if not coming:
        by_epoch = [{"epoch": turn.epoch, "reason": kind} for kind, turn in reasons]
        return Why(kind=reasons[0][0], text="; ".join(said), facts={"epochs": by_epoch})
    past = coming.step > total_steps
    comes = "would have come" if past else "comes"
    said += [f"its turn {comes} at step {coming.step:,} (epoch {coming.epoch}), after step {min(step, total_steps):,}"]
    facts = {"step": coming.step, "epoch": coming.epoch}
    return Why(kind="past_the_end" if past else "not_reached", text="; ".join(said), facts=facts)


def deletions(history: Sequence[LineageRecord], row: int, *, after: int, upto: int) -> list[LineageRecord]:
    """The deletions that can have taken a row away after one version and up to another: those that name it, if any."""
    made = [r for r in history if r.stage == "deleted" and after < r.version <= upto]
    return [r for r in made if row in r.details.get("ids", ())] or [r for r in made if "ids" not in r.details]


def _judged(
    dataset: lance.LanceDataset, data: DataConfig, terms: Sequence[Term], ids: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Each row that is there: `kept`, `held_out`, the truth of every term, and the columns that tell why."""
    among = in_list("id", ids)
    kept, held_out = (
        set(dataset.to_table(columns=["id"], filter=f"{among} AND ({predicate})")["id"].to_pylist())
        for predicate in (data.filter, data.held_out_filter)
    )
    names = dataset.schema.names
    reads = [name for term in terms for name in columns_in(term.sql, names) if _is_short(dataset.schema.field(name))]
    columns = list(dict.fromkeys(["id", *reads, *(name for name in EVIDENCE if name in names)]))
    truths = _truths(dataset, among, terms)
    for row in dataset.to_table(columns=columns, filter=among).to_pylist():
        i = row["id"]
        yield {**row, "kept": i in kept, "held_out": i in held_out, "truths": truths[i]}


def _truths(dataset: lance.LanceDataset, among: str, terms: Sequence[Term]) -> dict[int, list[bool | None]]:
    """Whether each term is true of each row; None: NULL."""
    columns = {"id": "id", **{f"t{place}": f"({term.sql})" for place, term in enumerate(terms)}}
    try:
        found = dataset.scanner(columns=columns, filter=among).to_table().to_pylist()
    except ValueError:  # `NOT regexp_match(...)`, which Lance takes in a filter only
        ids = dataset.to_table(columns=["id"], filter=among)["id"].to_pylist()
        among_them = [dataset.to_table(columns=["id"], filter=f"{among} AND ({term.sql})")["id"] for term in terms]
        return {i: [i in true for true in map(set, (ids.to_pylist() for ids in among_them))] for i in ids}
    return {row["id"]: [_truth(row[f"t{place}"]) for place in range(len(terms))] for row in found}


def _is_short(field: pa.Field) -> bool:
    """Whether a reason may show a value: neither the text, nor tokens, a vector, bytes or a struct."""
    import pyarrow as pa

    return field.name != "text" and not (pa.types.is_nested(field.type) or pa.types.is_binary(field.type))


def _truth(value: object) -> bool | None:
    """A value as a filter takes it; `regexp_match` gives the list of its matches."""
    return value if value is None or isinstance(value, bool) else True


def _by_filter(row: Mapping[str, Any], terms: Sequence[Term]) -> Why:
    """Why the filter leaves a row out: what is known of the row, and the first term that is not true of it."""
    failed = [(term, truth) for term, truth in zip(terms, row["truths"], strict=True) if truth is not True]
    facts: dict[str, Any] = {"terms": [{"number": term.number, "text": term.text} for term, _ in failed]}
    if row["held_out"]:
        return Why(kind="held_out", text=HELD_OUT, facts=facts)
    term, truth = failed[0]
    reads = columns_in(term.sql, list(row))
    by = f"term {term.number} of the filter, {excerpt(term.text)!r}"
    if "is_dup" in reads and row["is_dup"] and row.get("dup_of") is not None:
        text = f"a copy of row {row['dup_of']}; left out by {by}"
        return Why(kind="duplicate", text=text, facts={**facts, "repeats": row["dup_of"]})
    if "is_near_dup" in reads and row["is_near_dup"] and row.get("near_dup_of") is not None:
        similarity = shown(row["near_dup_similarity"])
        text = f"a near copy of row {row['near_dup_of']} (similarity {similarity}); left out by {by}"
        return Why(
            kind="near_duplicate", text=text, facts={**facts, "repeats": row["near_dup_of"], "similarity": similarity}
        )
    if "contaminated" in reads and row["contaminated"]:
        text = f"holds the evaluation item {row['contamination_item']}; left out by {by}"
        return Why(kind="contaminated", text=text, facts={**facts, "item": row["contamination_item"]})
    values = {name: shown(row[name]) for name in reads}
    said = ", ".join(f"{name} is {'NULL' if value is None else value}" for name, value in values.items())
    text = f"left out by {by}" + (f" ({said})" if said else "") + (", which is NULL" if truth is None else "")
    return Why(kind="filter", text=text, facts={**facts, "values": values})


def _absent(location: Location, pin: Pin, ids: Sequence[int]) -> dict[int, Why]:
    """Why a version has no rows with these ids, from the records and the newest version."""
    newest = open_dataset(location)
    history = records(newest)
    found = newest.to_table(columns=["id", "_row_created_at_version"], filter=in_list("id", ids))
    there = dict(zip(found["id"].to_pylist(), found["_row_created_at_version"].to_pylist(), strict=True))
    ingests = [r for r in history if r.stage == "ingested" and r.rows and "next_id" in r.details]

    def why(i: int) -> Why:
        came = next((r for r in ingests if 0 <= i < r.details["next_id"]), None)
        created = came.version if came else there.get(i)
        if created is None:
            known = f"ids go from 0 to {ingests[-1].details['next_id'] - 1:,}" if ingests else "nor has the newest one"
            nowhere = f"there never was a row {i}" if ingests else f"version {pin.version} has no row {i}"
            return Why(kind="unknown", text=f"{nowhere}: {known}")
        tag = came.tag if came else f"version {created}"
        late = created > pin.version
        gone = [] if i in there else deletions(history, i, after=created, upto=newest.version if late else pin.version)
        by = " or ".join(r.tag for r in gone) or "by something without a record"
        facts = {"created": created, "deleted": [r.tag for r in gone]}
        if late:
            since = "" if i in there else f" and deleted since ({by})"
            text = f"added later ({tag}){since}; the run is pinned to version {pin.version}"
            return Why(kind="later", text=text, facts=facts)
        return Why(kind="deleted", text=f"deleted before version {pin.version} ({by})", facts=facts)

    return {i: why(i) for i in ids}
