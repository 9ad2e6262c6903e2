"""What changed between two versions of the table: rows, columns, how columns are made, bytes, stages.

Invariant: only reads, and answers from the two versions themselves wherever they say it, so that the answer stays right
after a compaction, after deletes, and after the versions between were cleaned up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.errors import TableError
from pretrain_assets.table.history import data_files
from pretrain_assets.table.lineage import LineageRecord
from pretrain_assets.table.schema import CODE_VERSION_KEY, PARAMETERS_KEY, STAGE_KEY, same_making
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import records, table_id

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

_NUMBER = re.compile(r"v?(\d{1,18})")


@dataclass(frozen=True, kw_only=True)
class ParameterChange:
    """One parameter of a stage that differs."""

    stage: str
    """Stage whose values it changes."""
    name: str
    """Name of the parameter; `code version` and `type` count as parameters."""
    old: Any
    """Plain JSON value at the older version; None when it was not there."""
    new: Any
    """Plain JSON value at the newer version; None when it is not there."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """What the newer of two versions has, lacks or makes otherwise than the older."""

    older: int
    """The smaller of the two version numbers."""
    newer: int
    """The larger one."""
    rows_older: int
    """Rows at the older version."""
    rows_newer: int
    """Rows at the newer version."""
    rows_added: int
    """Rows of the newer version that were created after the older."""
    rows_deleted: int
    """Rows of the older version that are gone from the newer."""
    columns_added: tuple[str, ...]
    """Columns that only the newer version has."""
    columns_removed: tuple[str, ...]
    """Columns that only the older version has."""
    columns_remade: tuple[str, ...]
    """Columns that both have, made by another code version, with other parameters, or of another type."""
    parameters_changed: tuple[ParameterChange, ...]
    """Why columns were remade, and other settings of stages that own no column (ingest, index)."""
    bytes_added: int
    """Bytes of the data files that the newer version has and the older has not."""
    stages: tuple[LineageRecord, ...]
    """Records of the stages that ran after the older version, up to the newer; oldest first."""


def diff(location: Location, one: int | str, other: int | str) -> Diff:
    """Compare two versions, in whichever order they are given.

    Args:
        location: The table.
        one: A version number, or text: `7`, `v7` or a tag.
        other: Likewise.

    Raises:
        TableError: a version or tag is not there, a name is ambiguous, or the table was recreated in between.
    """
    opened = open_named(location, one), open_named(location, other)
    older, newer = sorted(opened, key=lambda dataset: int(dataset.version))
    if table_id(older) != table_id(newer):
        raise TableError(
            f"{location.uri} was recreated between versions {older.version} and {newer.version}: they are different "
            "tables and have no difference. `pretrain versions` lists what is there."
        )
    added, deleted = _rows(older, newer)
    before, after = ({f.name: f for f in dataset.schema} for dataset in (older, newer))
    remade = [name for name in after if name in before and not same_making(before[name], after[name])]
    changes = [change for name in remade for change in _remaking(before[name], after[name])]
    history = records(newer)
    changes += _settings(history, older.version, newer.version, {_stage_of(f) for f in after.values()})
    known = data_files(older)
    return Diff(
        older=older.version,
        newer=newer.version,
        rows_older=older.count_rows(),
        rows_newer=newer.count_rows(),
        rows_added=added,
        rows_deleted=deleted,
        columns_added=tuple(name for name in after if name not in before),
        columns_removed=tuple(name for name in before if name not in after),
        columns_remade=tuple(remade),
        parameters_changed=tuple(change for at, change in enumerate(changes) if change not in changes[:at]),
        bytes_added=sum(num_bytes for path, num_bytes in data_files(newer).items() if path not in known),
        stages=tuple(record for record in history if older.version < record.version <= newer.version),
    )


def open_named(location: Location, name: int | str) -> lance.LanceDataset:
    """The table at a version number, at `7` or `v7`, or at a tag.

    Raises:
        TableError: it is not there, or the name is ambiguous.
    """
    number = _NUMBER.fullmatch(name) if isinstance(name, str) else None
    if not number:
        return open_dataset(location, name)
    version = int(number[1])
    tag = open_dataset(location).tags.list().get(name)
    if tag and tag["version"] != version:
        raise TableError(
            f"{name!r} is version {version} of {location.uri} and also a tag, of version {tag['version']}. "
            f"Say {version} or {tag['version']}."
        )
    return open_dataset(location, version)


def _rows(older: lance.LanceDataset, newer: lance.LanceDataset) -> tuple[int, int]:
    """Rows added and rows deleted."""
    if newer.has_stable_row_ids:
        added = newer.count_rows(f"_row_created_at_version > {older.version}")
        deleted = older.count_rows() + added - newer.count_rows()
        if deleted >= 0:
            return added, deleted
    # Without stable row ids no row knows when it was created (Lance says version 1 for all), and a restored version
    # brings rows back: then the ids themselves are compared. An id is given once.
    import numpy as np

    before, after = (dataset.to_table(columns=["id"])["id"].to_numpy() for dataset in (older, newer))
    return int(np.isin(after, before, invert=True).sum()), int(np.isin(before, after, invert=True).sum())


def _stage_of(field: pa.Field) -> str:
    return ((field.metadata or {}).get(STAGE_KEY) or b"").decode()


def _making(field: pa.Field) -> dict[str, Any]:
    """Everything that a field says about how its values were made."""
    metadata = field.metadata or {}
    code_version = metadata.get(CODE_VERSION_KEY)
    return {
        **json.loads(metadata.get(PARAMETERS_KEY) or "{}"),
        "code version": code_version.decode() if code_version else None,
        "type": str(field.type),
    }


def _remaking(before: pa.Field, after: pa.Field) -> Iterator[ParameterChange]:
    """What differs in the making of one column."""
    yield from _changes(_stage_of(after) or _stage_of(before) or after.name, _making(before), _making(after))


def _settings(
    history: Sequence[LineageRecord], older: int, newer: int, told_by_columns: set[str]
) -> Iterator[ParameterChange]:
    """What differs in the records of stages that own no computed column, whose fields would tell."""
    for stage in dict.fromkeys(record.stage for record in history):
        before = [record for record in history if record.stage == stage and record.version <= older]
        after = [record for record in history if record.stage == stage and record.version <= newer]
        if before and after and stage not in told_by_columns:
            yield from _changes(stage, _recorded(before[-1]), _recorded(after[-1]))


def _recorded(record: LineageRecord) -> dict[str, Any]:
    """Settings of a stage, without the sources of an ingest: what it read, not how."""
    settings = {name: value for name, value in record.parameters.items() if name != "sources"}
    return {**settings, "code version": record.code_version}


def _changes(stage: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[ParameterChange]:
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old != new:
            yield ParameterChange(stage=stage, name=name, old=old, new=new)
