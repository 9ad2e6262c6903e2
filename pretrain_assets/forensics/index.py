"""The full-text index on `text`: built once, a delta after every append, always tagged with the version it covers.

Invariant: the newest `indexed` record's version has every live row in the index.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import IndexConfig
from pretrain_assets.table.lease import hold
from pretrain_assets.table.lineage import LineageRecord, Pin, StageResult
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.upkeep.maintain import IndexUpkeep
from pretrain_assets.table.versions import heal, latest_record, records, table_id, tag_version

if TYPE_CHECKING:
    import lance

CODE_VERSION = "1"
"""Raised when an index must be built anew."""
INDEX_NAME = "text_fts"
TOKENIZER: dict[str, Any] = {"language": "English", "stem": True, "remove_stop_words": True, "lower_case": True}
"""How the index splits text into terms; BM25 over stemmed English words."""

_log = logging.getLogger(__name__)


def build_index(location: Location, config: IndexConfig, *, input_pin: Pin, run_id: str | None = None) -> StageResult:
    """Bring the full-text index up to date: one new version if a row was not indexed yet, otherwise none.

    Args:
        location: The table.
        config: Whether word positions are kept. A change builds the index anew.
        input_pin: Version whose rows must be found afterwards.
        run_id: Dagster run id for the lineage record.

    Raises:
        BusyError: another process builds the index, or maintains the table.
    """
    with hold(location, "index"):
        return _build(location, {"with_position": config.with_position, **TOKENIZER}, input_pin, run_id)


def upkeep(location: Location, *, run_id: str | None = None) -> IndexUpkeep:
    """How maintenance, which holds the table, extends the index: built as it was, for the rows there are."""

    def build(**how: Any) -> None:
        dataset = heal(location)
        previous = latest_record(dataset, "indexed")
        if previous is not None:
            _build(location, previous.parameters, Pin(table_id(dataset), dataset.version), run_id, **how)

    found = records(open_dataset(location))
    built = max((r.version for r in found if r.stage == "indexed" and r.details.get("anew")), default=0)
    has_deleted = any(r.stage == "deleted" and r.version > built for r in found)
    return IndexUpkeep(
        name=INDEX_NAME,
        extend=lambda segments: build(merge=segments),
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
    """As `build_index`; `merge` of the newest segments become one with what is new, or all is built `anew`."""
    started = time.monotonic()
    dataset = heal(location)
    previous = latest_record(dataset, "indexed")
    covered, size_before = _coverage(dataset)
    same = (
        not anew
        and covered > 0
        and _built_with(dataset, parameters)
        and (not previous or previous.code_version == CODE_VERSION)
    )
    rows = dataset.count_rows()
    if previous is not None and same and not merge and covered == rows and previous.version >= input_pin.version:
        _log.info("indexed: nothing new, still %s", previous.tag)
        return StageResult(record=previous, changed=False)
    changed = bool(merge) or not (same and covered == rows)
    if changed:
        _log.info("indexed: %s of %s rows to index", f"{rows - covered if same else rows:,}", f"{rows:,}")
        dataset = _extend(dataset, merge) if same else _create(dataset, parameters)
    indexed, size = _coverage(dataset)
    record = LineageRecord(
        stage="indexed",
        table_id=table_id(dataset),
        version=dataset.version,
        inputs=(str(input_pin),),
        columns=(),
        parameters=parameters,
        code_version=CODE_VERSION,
        run_id=run_id,
        rows=rows - covered if same else rows,
        rows_total=rows,
        bytes_added=max(0, size - size_before),
        ledger={"in": rows, "indexed": indexed},
        seconds=round(time.monotonic() - started, 3),
        details={"anew": not same},
    )
    tag_version(dataset, record)
    _log.info("indexed: %s %s", "version of tag" if changed else "nothing new, moves on to", record.tag)
    return StageResult(record=record, changed=changed)


def _coverage(dataset: lance.LanceDataset) -> tuple[int, int]:
    """Rows in the index and its size in bytes."""
    for index in dataset.describe_indices():
        if index.name == INDEX_NAME:
            return int(index.num_rows_indexed), int(index.total_size_bytes or 0)
    return 0, 0


def _built_with(dataset: lance.LanceDataset, parameters: dict[str, Any]) -> bool:
    """Whether the index itself says that it was built so: true also after a kill between its commit and its tag."""
    stored = dataset.stats.index_stats(INDEX_NAME)["indices"][0]["params"]
    return all(stored.get(name) == value for name, value in parameters.items())


def _create(dataset: lance.LanceDataset, parameters: dict[str, Any]) -> lance.LanceDataset:
    dataset.create_scalar_index("text", "INVERTED", name=INDEX_NAME, replace=True, **parameters)
    dataset.checkout_latest()
    return dataset


def _extend(dataset: lance.LanceDataset, merge: int) -> lance.LanceDataset:
    """Index only the new rows, as a segment beside those that exist, or as one with the newest of them."""
    dataset.optimize.optimize_indices(num_indices_to_merge=merge, index_names=[INDEX_NAME])
    dataset.checkout_latest()
    return dataset
