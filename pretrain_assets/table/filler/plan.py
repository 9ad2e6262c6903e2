"""What a fill has to do on one version of the table: which fragments lack which columns, and if the schema changes.

Invariant: a plan is made from one version and one declaration; it says what to compute and holds what was staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pretrain_assets.errors import ConfigError
from pretrain_assets.table.filler import columnfile
from pretrain_assets.table.filler.columnfile import StagedFile
from pretrain_assets.table.filler.spec import Fill, RowColumns, TableColumns
from pretrain_assets.table.lineage import LineageRecord, Pin
from pretrain_assets.table.schema import making_changes, same_making
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import latest_record, open_pin

if TYPE_CHECKING:
    import lance
    import pyarrow as pa


@dataclass(kw_only=True)
class GroupWork:
    """What is to be done for one column group."""

    group: RowColumns | TableColumns
    """The group."""
    outputs: pa.Schema
    """Columns written: the group's, then the one for the reasons of failed rows when the table has or gets one."""
    error_name: str | None
    """That one."""
    judged: tuple[str, ...]
    """A computed row has a value in one of these."""
    remake: bool
    """The columns are new, or made by other code or parameters: every fragment, and the schema changes."""
    fragments: list[lance.LanceFragment]
    """Fragments that lack values; staging adds those whose values are outdated."""
    staged: dict[int, StagedFile] = field(default_factory=dict)
    """Fragment id to the column file computed for it."""


@dataclass(kw_only=True)
class Plan:
    """What one fill has to do on one version of the table."""

    spec: Fill
    """The declaration."""
    dataset: lance.LanceDataset
    """The newest version, which the commit is made on."""
    wanted: list[lance.LanceFragment]
    """Fragments that hold rows of the input version."""
    may_be_outdated: bool
    """Values that depend on other rows may be: rows that they were made from are gone, or were made anew."""
    input_rows: int
    """Rows of the input version."""
    previous: LineageRecord | None
    """The stage's last record; None before its first. Work staged before another is never taken up again."""
    work: list[GroupWork]
    """Per column group, in order."""
    joined_parts: list[str] = field(default_factory=list)
    """Staged parts that the commit makes superfluous."""

    @property
    def fields(self) -> list[pa.Field]:
        """All fields written."""
        return [f for work in self.work for f in work.outputs]

    @property
    def remake(self) -> bool:
        """Whether columns of some group are made anew."""
        return any(work.remake for work in self.work)

    @property
    def changes(self) -> dict[str, list[str]]:
        """By the names of its columns, why a group is made anew that was made otherwise before."""
        existing = {f.name: f for f in self.dataset.schema}
        last = {", ".join(work.group.names): work.group.outputs.field(work.group.names[-1]) for work in self.work}
        found = {names: making_changes(existing[f.name], f) for names, f in last.items() if f.name in existing}
        return {names: changes for names, changes in found.items() if changes}

    @property
    def schema_changes(self) -> bool:
        """Whether the commit changes the schema as well."""
        return self.remake or not {f.name for f in self.fields} <= set(self.dataset.schema.names)

    @property
    def filled(self) -> list[lance.LanceFragment]:
        """Fragments that get a column file, in row order."""
        filled = {fragment_id for work in self.work for fragment_id in work.staged}
        return [fragment for fragment in self.wanted if fragment.fragment_id in filled]


def make_plan(location: Location, spec: Fill, input_pin: Pin) -> Plan:
    """Look at the newest version for what the rows of `input_pin` lack.

    Raises:
        TableError: `input_pin` names another table, or a version that is gone.
    """
    dataset = open_dataset(location)
    pinned = open_pin(location, input_pin)
    previous = latest_record(dataset, spec.stage)
    wanted = _fragments_of(dataset, pinned)
    work: list[GroupWork] = []
    for group in spec.groups:
        after_remade = isinstance(group, TableColumns) and any(earlier.remake for earlier in work)
        remake = after_remade or not _is_made_so(dataset, group)
        work.append(_group_work(dataset, wanted, group, spec, remake))
    return Plan(
        spec=spec,
        dataset=dataset,
        wanted=wanted,
        may_be_outdated=_may_be_outdated(dataset, spec, previous),
        input_rows=pinned.count_rows(),
        previous=previous,
        work=work,
    )


def _is_made_so(dataset: lance.LanceDataset, group: RowColumns | TableColumns) -> bool:
    existing = {f.name: f for f in dataset.schema}
    return all(f.name in existing and same_making(existing[f.name], f) for f in group.outputs)


def _fragments_of(dataset: lance.LanceDataset, pinned: lance.LanceDataset) -> list[lance.LanceFragment]:
    """Fragments of the newest version that hold the pinned rows; all of them if compaction moved rows since."""
    now = dataset.get_fragments()
    then = {fragment.fragment_id for fragment in pinned.get_fragments()}
    kept = [fragment for fragment in now if fragment.fragment_id in then]
    return kept if len(kept) == len(then) else now


def _group_work(
    dataset: lance.LanceDataset,
    wanted: Sequence[lance.LanceFragment],
    group: RowColumns | TableColumns,
    spec: Fill,
    remake: bool,
) -> GroupWork:
    import pyarrow as pa

    outputs, error_name = group.outputs, None
    if isinstance(group, RowColumns) and (spec.on_error == "null" or group.error_name in dataset.schema.names):
        error_name = group.error_name
        if error_name in dataset.schema.names and not pa.types.is_string(dataset.schema.field(error_name).type):
            raise ConfigError(
                f"{group.names[0]} wants {error_name} for the reasons of failed rows, and the table has another column "
                f"of that name ({dataset.schema.field(error_name).type}): drop or rename that one."
            )
        outputs = outputs.append(_reasons_field(outputs, error_name))
    judged = (group.names[-1], *([error_name] if error_name and spec.on_error == "null" else []))
    fragments = list(wanted) if remake else missing_fragments(dataset, wanted, group, judged)
    return GroupWork(
        group=group, outputs=outputs, error_name=error_name, judged=judged, remake=remake, fragments=fragments
    )


def _reasons_field(outputs: pa.Schema, name: str) -> pa.Field:
    import pyarrow as pa

    return pa.field(name, pa.string(), metadata=outputs.field(len(outputs) - 1).metadata)


def missing_fragments(
    dataset: lance.LanceDataset,
    fragments: Sequence[lance.LanceFragment],
    group: RowColumns | TableColumns,
    judged: Sequence[str],
) -> list[lance.LanceFragment]:
    """Fragments that lack values: no file carries a column, or a NULL is stored for a row.

    NULLs come from a compaction of fragments that had the column with fragments that had not, and from failed rows;
    the filler's own files have none but of failed rows, so they are only looked into when those are to be tried again.
    Columns of a group are written together, so only its last column is looked at: put the narrowest last.
    """
    leaves = columnfile.leaf_ids(dataset.lance_schema, group.names)
    retry_failed = isinstance(group, RowColumns) and group.error_name in dataset.schema.names and len(judged) == 1
    null = " AND ".join(f"{name} IS NULL" for name in judged if name in dataset.schema.names)
    missing = []
    for fragment in fragments:
        files = fragment.metadata.files
        carried = {leaf for file in files for leaf in file.fields}
        ours = any(leaves[-1] in file.fields and file.path.startswith(columnfile.PREFIX) for file in files)
        whole = carried.issuperset(leaves)
        if not whole or ((retry_failed or not ours) and fragment.count_rows(null)):
            missing.append(fragment)
    return missing


def _may_be_outdated(dataset: lance.LanceDataset, spec: Fill, previous: LineageRecord | None) -> bool:
    """Whether rows are gone since the stage's last version, or files with inputs of its `TableColumns` are others.

    Where compaction moved rows, the files no longer tell, so that the values are compared.
    """
    inputs = {name for group in spec.groups if isinstance(group, TableColumns) for name in group.inputs}
    if previous is None or not inputs:
        return False
    seen = previous.details["planned"]  # the version that the values were made from; a delete may have raced the commit
    if dataset.count_rows(f"_row_created_at_version <= {seen['version']}") < seen["rows"]:
        return True
    try:
        before = dataset.checkout_version(seen["version"])
    except (ValueError, OSError):  # cleaned up, long ago
        return True
    leaves = set(columnfile.leaf_ids(dataset.lance_schema, sorted(inputs)))
    then, now = (
        {f.fragment_id: {file.path for file in f.metadata.files if leaves.intersection(file.fields)} for f in fragments}
        for fragments in (before.get_fragments(), dataset.get_fragments())
    )
    return any(now.get(fragment_id) != files for fragment_id, files in then.items())
