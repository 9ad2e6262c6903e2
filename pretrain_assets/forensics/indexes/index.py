"""The indexes: full text on `text`, and nearest vectors on `embedding` where the table has it. Built once, and after
every append extended by what is new, both in one version, which carries the tag `indexed-v<N>`.

Invariant: at the version of the newest `indexed` record every live row is in the text index, but for those that came
while it was built, which its ledger counts. They, and vectors that no segment covers, of which there are fewer than
`exact_below`, are read by a search, so that it finds them too.

Vector segments merge as they are written, the newest first, by the rule by which maintenance merges fragments: a vector
is only indexed again in a segment four times as large. Text segments are merged by maintenance, which plans it together
with the fragments.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import IndexConfig
from pretrain_assets.forensics.indexes import recall, segments
from pretrain_assets.forensics.indexes.segments import TEXT, VECTORS, Segment
from pretrain_assets.forensics.retrieval.vectors import VectorColumn, count_vectors, find_column
from pretrain_assets.table.lease import hold
from pretrain_assets.table.lineage import RECORD_KEY, LineageRecord, Pin, StageResult
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.upkeep.compaction import segments_to_merge
from pretrain_assets.table.upkeep.maintain import IndexUpkeep
from pretrain_assets.table.versions import heal, latest_record, records, table_id, tag_version

if TYPE_CHECKING:
    import lance

CODE_VERSION = "1"
"""Raised when the indexes must be built anew."""
TOKENIZER: dict[str, Any] = {"language": "English", "stem": True, "remove_stop_words": False, "lower_case": True}
"""How the index splits text into terms; BM25 over stemmed English words. Stop words stay, for phrases: they make the
index a fifth larger (26.7 MB of text: 10.4 MB instead of 8.6) and searches no slower."""
UNFINISHED = "unfinished"
"""In the details that a commit carries, which knows what it adds, and not yet how well vectors are found in it. A run
that was killed then leaves it, and the next one finishes the record.
"""
MEANWHILE, ROUNDS = "came_meanwhile", 3
"""Line of the ledger: rows added between the listing of what is new and the commit. They are indexed in a further
version, so many times at most, and else by the next run.
"""
MERGE_FACTOR = 4
"""Newest vector segments become one that is at least this many times the largest of them."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """What one index needs."""

    todo: list[int]
    """Fragments to write a segment for, in row order."""
    removed: list[Segment]
    """Segments that it replaces, or that cover nothing any more."""
    anew: bool = False
    """None of the segments there were is kept."""
    num_vectors: int = 0
    """Vectors in those fragments that point somewhere."""


def build_index(location: Location, config: IndexConfig, *, input_pin: Pin, run_id: str | None = None) -> StageResult:
    """Bring the indexes up to date: one new version if there was anything to index, otherwise none.

    Args:
        location: The table.
        config: Whether word positions are kept (a change builds the text index anew), and when vectors are indexed.
        input_pin: Version whose rows must be found afterwards.
        run_id: Dagster run id for the lineage record.

    Raises:
        BusyError: another process builds the indexes, makes vectors, or maintains the table.
    """
    with ExitStack() as leases:
        leases.enter_context(hold(location, "index"))
        if find_column(open_dataset(location)):  # Lance would commit an index over vectors that were replaced meanwhile
            leases.enter_context(hold(location, "fill embedded"))
        result = _build(location, {**dataclasses.asdict(config), **TOKENIZER}, input_pin, run_id)
        for _ in range(ROUNDS - 1):
            if MEANWHILE not in result.record.ledger:
                break
            again = _build(location, result.record.parameters, input_pin, run_id)
            result = StageResult(record=again.record, changed=True)
        return result


def upkeep(location: Location, *, run_id: str | None = None) -> IndexUpkeep:
    """How maintenance, which holds the table, extends the indexes: built as they were, for the rows there are."""

    def build(**how: Any) -> None:
        dataset = heal(location)
        previous = latest_record(dataset, "indexed")
        if previous is not None:
            parameters = {"exact_below": IndexConfig.exact_below, **previous.parameters}
            _build(location, parameters, Pin(table_id(dataset), dataset.version), run_id, **how)

    found = records(open_dataset(location))
    built = max((r.version for r in found if r.stage == "indexed" and r.details.get("anew")), default=0)
    has_deleted = any(r.stage == "deleted" and r.version > built for r in found)
    return IndexUpkeep(
        name=TEXT,
        extend=lambda number: build(merge=number),
        rebuild=partial(build, anew=True) if has_deleted and any(r.stage == "indexed" for r in found) else None,
    )


def _build(
    location: Location,
    parameters: dict[str, Any],
    input_pin: Pin,
    run_id: str | None,
    *,
    merge: int = 0,
    anew: bool = False,
) -> StageResult:
    """As `build_index`; `merge` of the newest text segments become one with what is new, or all is built `anew`."""
    started = time.monotonic()
    dataset = heal(location)
    previous = latest_record(dataset, "indexed")
    anew = anew or (previous is not None and previous.code_version != CODE_VERSION)
    column = find_column(dataset)
    text, vectors = _text_work(dataset, parameters, anew), _vector_work(dataset, column, parameters, anew)
    merge = 0 if text.anew else merge
    changed = bool(merge or text.todo or vectors.todo or text.removed or vectors.removed)
    unfinished = previous is not None and UNFINISHED in previous.details
    if previous and not changed and not unfinished and previous.version >= input_pin.version:
        _log.info("indexed: nothing new, still %s", previous.tag)
        return StageResult(record=previous, changed=False)
    begun = previous if previous and unfinished and previous.version == dataset.version else None
    there = _uuids(dataset).difference(begun.details[UNFINISHED] if begun else ())
    rows = dataset.count_rows()
    record = LineageRecord(
        stage="indexed",
        table_id=table_id(dataset),
        version=dataset.version,
        inputs=(str(input_pin),),
        columns=(),
        parameters=parameters,
        code_version=CODE_VERSION,
        run_id=run_id,
        rows=_rows(dataset, text.todo) + (begun.rows if begun else 0),
        rows_total=rows,
        bytes_added=0,
        ledger={"in": rows, "indexed": rows},
        seconds=0,
        details={"anew": text.anew or bool(begun and begun.details["anew"])},
    )
    if changed:
        _log.info("indexed: %s of %s rows to index", f"{record.rows:,}", f"{rows:,}")
        dataset = _commit(dataset, column, text, vectors, record, merge)
    rows, indexed = dataset.count_rows(), segments.rows_indexed(dataset, TEXT)
    known = previous.details.get("vectors", {}) if previous and not (vectors.todo or vectors.removed) else {}
    record = dataclasses.replace(
        record,
        version=dataset.version,
        bytes_added=sum(one.num_bytes for one in _all(dataset) if one.index.uuid not in there),
        rows_total=rows,
        ledger={"in": rows, "indexed": indexed, **({MEANWHILE: rows - indexed} if indexed < rows else {})},
        details=record.details | (_vector_facts(dataset, column, known) if column else {}),
        seconds=round(time.monotonic() - started, 3),
    )
    tag_version(dataset, record)
    _log.info("indexed: %s %s", "version of tag" if changed else "nothing new, moves on to", record.tag)
    return StageResult(record=record, changed=changed)


def _text_work(dataset: lance.LanceDataset, parameters: dict[str, Any], anew: bool) -> _Work:
    found = segments.segments(dataset, TEXT)
    # the index itself says how it was built: true also after a kill between its commit and its tag
    stored, wanted = segments.text_parameters(dataset), _text_parameters(parameters)
    if found and not anew and all(stored.get(name) == value for name, value in wanted.items()):
        return _Work(todo=segments.uncovered(dataset, found), removed=[])
    return _Work(todo=list(dataset.fragment_ids()), removed=found, anew=True)


def _vector_work(
    dataset: lance.LanceDataset, column: VectorColumn | None, parameters: dict[str, Any], anew: bool
) -> _Work:
    found, there = segments.segments(dataset, VECTORS), set(dataset.fragment_ids())
    if column is None:
        return _Work(todo=[], removed=found)
    rows_of = {one.index.uuid: _rows(dataset, one.fragment_ids & there) for one in found}
    kept = [] if anew else [one for one in found if rows_of[one.index.uuid]]
    todo = segments.uncovered(dataset, kept)
    new, sizes = count_vectors(dataset, column, todo), [rows_of[one.index.uuid] for one in kept]
    if new < parameters["exact_below"]:
        few = sum(sizes) + new < parameters["exact_below"]
        return _Work(todo=[], removed=found if few else [one for one in found if one not in kept])
    merged = kept[len(kept) + 1 - max(1, segments_to_merge([*sizes, new], MERGE_FACTOR)) :]
    again = sorted(there & frozenset[int]().union(*(one.fragment_ids for one in merged)))
    return _Work(
        todo=[one for one in dataset.fragment_ids() if one in {*todo, *again}],
        removed=[one for one in found if one not in kept or one in merged],
        num_vectors=new + count_vectors(dataset, column, again),
    )


def _commit(
    dataset: lance.LanceDataset,
    column: VectorColumn | None,
    text: _Work,
    vectors: _Work,
    record: LineageRecord,
    merge: int,
) -> lance.LanceDataset:
    """Write the segments, and commit those of both indexes at once; text segments that merge are a version before."""
    new = []
    if merge:  # without reading their texts again
        dataset.optimize.optimize_indices(num_indices_to_merge=merge, index_names=[TEXT])
        dataset.checkout_latest()
    elif text.todo:
        new.append(segments.write_text(dataset, text.todo, _text_parameters(record.parameters)))
    if column is not None and vectors.todo:
        new.append(segments.write_vectors(dataset, column, vectors.todo, vectors.num_vectors))
    removed = [*text.removed, *vectors.removed]
    if not new and not removed:
        return dataset
    details = record.details | {UNFINISHED: [index.uuid for index in new]}
    record = dataclasses.replace(record, version=dataset.version + 1, details=details)
    return segments.commit(dataset, new, removed, {RECORD_KEY: record.to_json()})


def _vector_facts(dataset: lance.LanceDataset, column: VectorColumn, known: dict[str, Any]) -> dict[str, Any]:
    """What the record says of vectors: rows = indexed + read + without. Recall is measured when segments change."""
    found, rows = segments.segments(dataset, VECTORS), dataset.count_rows()
    total = count_vectors(dataset, column)
    read = count_vectors(dataset, column, segments.uncovered(dataset, found)) if found else total
    facts = {"rows": rows, "indexed": total - read, "read": read, "without": rows - total}
    facts |= {"segments": len(found), "bytes": sum(one.num_bytes for one in found)}
    if found:
        facts["entries"] = segments.entries(dataset)
        if "recall_at_10" not in known:
            known = recall.measure(dataset, column) | {"measured_at": dataset.version}
        facts |= {name: known[name] for name in ("recall_at_10", "queries", "measured_at")}
    return {"vectors": facts}


def _text_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name == "with_position" or name in TOKENIZER}


def _rows(dataset: lance.LanceDataset, fragment_ids: Iterable[int]) -> int:
    return sum(dataset.get_fragment(one).count_rows() for one in fragment_ids)


def _all(dataset: lance.LanceDataset) -> list[Segment]:
    return [*segments.segments(dataset, TEXT), *segments.segments(dataset, VECTORS)]


def _uuids(dataset: lance.LanceDataset) -> set[str]:
    return {one.index.uuid for one in _all(dataset)}
