"""Compaction: small fragments become larger ones, and deleted rows go, in one version with a lineage record.

Invariant: rows keep their values, row ids, creation versions and order, and every index keeps its coverage.

What is rewritten: adjacent fragments that together are at least `merge_factor` times the largest of them, so that a
byte is only ever rewritten into something that many times larger; and fragments with more than a set share of deleted
rows. Left alone: large fragments; neighbours of which one has a computed column that the other lacks, since that would
store NULLs for half of a fragment, and the fill would compute the other half again; and neighbours in different
segments of an index, which Lance cannot rewrite together.

Why not `Compaction.commit`: it makes two versions, neither with properties, and moves rewritten rows to the end, since
Lance orders rows by fragment id. Here the ids are given out at once, in order, and whatever follows a rewritten
fragment gets a new id too: a matter of metadata, and of a copy of its deletion file, which is named after the id.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import MaintainConfig
from pretrain_assets.errors import CommitError
from pretrain_assets.table.filler.columnfile import PREFIX, leaf_ids
from pretrain_assets.table.filler.spec import ERROR_SUFFIX
from pretrain_assets.table.schema import STAGE_KEY
from pretrain_assets.table.storage import filesystem, storage_options

if TYPE_CHECKING:
    import lance

BATCH_BYTES = 32 << 20
"""Bytes on storage of the rows that are read at a time: bounds memory when documents are long."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Adjacent fragments that become one."""

    fragment_ids: tuple[int, ...]
    """The fragments, in row order."""
    num_bytes: int
    """Bytes of their files: about what is rewritten."""
    num_rows: int
    """Rows that stay."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Fragments that were rewritten together, not yet committed."""

    old: list[Any]
    """Their metadata, in row order."""
    new: list[Any]
    """Metadata of what takes their place."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the files written."""
        return sum(int(file.file_size_bytes) for fragment in self.new for file in fragment.files)


def size_tiers(sizes: Sequence[int], factor: int) -> list[slice]:
    """Runs of adjacent sizes to merge: each at least two, the largest at most 1/factor of the run's sum.

    The whole is one run if it can be, else both sides of its largest member are looked at. Each cut takes away more
    than 1/factor of the rest, so the depth is logarithmic.
    """
    found: list[slice] = []
    todo = [slice(0, len(sizes))]
    while todo:
        run = todo.pop()
        part = sizes[run]
        if len(part) < 2:
            continue
        if max(part) * factor <= sum(part):
            found.append(run)
        else:
            cut = run.start + max(range(len(part)), key=part.__getitem__)
            todo += [slice(run.start, cut), slice(cut + 1, run.stop)]
    return sorted(found, key=lambda run: run.start)


def segments_to_merge(sizes: Sequence[int], factor: int) -> int:
    """How many of an index's newest segments to make one: the most that merge by the rule of fragments, or 0."""
    fitting = (n for n in range(len(sizes), 1, -1) if max(sizes[-n:]) * factor <= sum(sizes[-n:]))
    return next(fitting, 0)


def plan_groups(
    dataset: lance.LanceDataset, config: MaintainConfig, *, neighbours: Callable[[int], Any] = lambda _: None
) -> list[Group]:
    """What to rewrite, in row order.

    Args:
        dataset: The table.
        config: Sizes and shares.
        neighbours: Fragment id to a key; only fragments of equal keys are merged.
    """
    columns_of = _computed_columns(dataset)
    runs: list[list[lance.LanceFragment]] = [[]]
    key, run_bytes, deleted = None, 0, []
    for fragment in dataset.get_fragments():
        size = _num_bytes(fragment)
        small = size * 2 < config.target_bytes
        mine = (neighbours(fragment.fragment_id), columns_of(fragment)) if small else None
        if fragment.num_deletions > config.max_deleted_share * fragment.physical_rows:
            deleted.append(fragment)
        if mine != key or run_bytes >= config.target_bytes:
            runs.append([])
            run_bytes = 0
        key = mine
        if small:
            runs[-1].append(fragment)
            run_bytes += size
    parts = [run[part] for run in runs for part in size_tiers([_num_bytes(f) for f in run], config.merge_factor)]
    merged = {fragment.fragment_id for part in parts for fragment in part}
    parts += [[fragment] for fragment in deleted if fragment.fragment_id not in merged]
    return sorted(map(_group, parts), key=lambda group: group.fragment_ids)


def rewrite(dataset: lance.LanceDataset, groups: Sequence[Group]) -> list[Part]:
    """Write the rows of the groups anew, beside the table. Lance may part a group, but never joins two."""
    from lance.optimize import Compaction

    parts, everything = [], set(dataset.fragment_ids())
    for group in groups:
        options = {
            "target_rows_per_fragment": group.num_rows + 1,
            "materialize_deletions_threshold": 0.0,
            "batch_size": max(1, min(8_192, BATCH_BYTES * group.num_rows // max(1, group.num_bytes))),
            "excluded_fragment_ids": sorted(everything.difference(group.fragment_ids)),
        }
        for task in Compaction.plan(dataset, options).tasks:
            parts.append(Part(old=list(task.fragments), new=list(task.execute(dataset).new_fragments)))
    return parts


def commit(dataset: lance.LanceDataset, parts: Sequence[Part], properties: dict[str, str]) -> lance.LanceDataset:
    """Make what was rewritten one new version with these transaction properties.

    Raises:
        CommitError: another writer, one that takes no lease, committed meanwhile; nothing changed.
    """
    import lance
    from lance.commit import CommitConflictError

    uri, operation = dataset.uri, lance.LanceOperation.Rewrite(list(_renumbered(dataset, parts)), [])
    transaction = lance.Transaction(
        read_version=dataset.version, operation=operation, transaction_properties=properties
    )
    try:
        if dataset.latest_version == dataset.version:
            return lance.LanceDataset.commit(uri, transaction, storage_options=storage_options(uri))
    except (CommitConflictError, OSError) as error:  # OSError: an append took the fragment ids given out here
        if not isinstance(error, CommitConflictError) and "fragments with id" not in str(error):
            raise
        _log.info("lost the commit: %s", error)
    raise CommitError(
        f"{uri}: somebody else committed while fragments were rewritten. Nothing changed; run it again, and write to "
        "the table through `pretrain` only, which waits for maintenance."
    )


def _renumbered(dataset: lance.LanceDataset, parts: Sequence[Part]) -> Iterator[Any]:
    """Groups of the commit: from the first rewritten fragment on, every fragment gets a new id, in row order."""
    from lance import LanceOperation

    first_of = {part.old[0].id: part for part in parts}
    replaced = {metadata.id for part in parts for metadata in part.old}
    next_id = 1 + _largest_fragment_id(dataset)
    begun = False
    for fragment in dataset.get_fragments():
        part = first_of.get(fragment.fragment_id)
        begun = begun or part is not None
        if not begun or (part is None and fragment.fragment_id in replaced):
            continue
        part = part or Part(old=[fragment.metadata], new=[fragment.metadata])
        for metadata in part.new:
            _copy_deletions(dataset, metadata, next_id)
            metadata.id, next_id = next_id, next_id + 1
        yield LanceOperation.RewriteGroup(part.old, part.new)


def _copy_deletions(dataset: lance.LanceDataset, metadata: Any, new_id: int) -> None:
    if metadata.deletion_file is not None:
        fs, root = filesystem(dataset.uri)
        names = (metadata.deletion_file.path(fragment_id) for fragment_id in (metadata.id, new_id))
        fs.cp_file(*(f"{root.rstrip('/')}/{name}" for name in names))


def _largest_fragment_id(dataset: lance.LanceDataset) -> int:
    """Of all versions that are there: an id is not given to two fragments that somebody could have open."""
    opened = (dataset.checkout_version(entry["version"]) for entry in dataset.versions())
    return max(int(fragment_id) for one in opened for fragment_id in one.fragment_ids())


def _computed_columns(dataset: lance.LanceDataset) -> Callable[[lance.LanceFragment], frozenset[str]]:
    """Which computed columns a fragment has for all its rows; NULLs with a reason, of rows that failed, count too."""
    import pyarrow as pa

    computed = {f.name: f for f in dataset.schema if STAGE_KEY in (f.metadata or {})}
    reasons = {name for name in computed if name.endswith(ERROR_SUFFIX) and name.removesuffix(ERROR_SUFFIX) in computed}
    failed = " OR ".join(f"{name} IS NOT NULL" for name in sorted(reasons)) or "false"
    leaves = {name: set(leaf_ids(dataset.lance_schema, [name])) for name in computed.keys() - reasons}

    def columns_of(fragment: lance.LanceFragment) -> frozenset[str]:
        files = fragment.metadata.files
        carried = {leaf for file in files for leaf in file.fields}
        staged = {leaf for file in files if file.path.startswith(PREFIX) for leaf in file.fields}  # these have no NULL
        return frozenset(
            name
            for name, mine in leaves.items()
            if mine <= carried
            and (
                mine <= staged
                or pa.types.is_nested(computed[name].type)  # computed together with a narrow one
                or not fragment.count_rows(f"{name} IS NULL AND NOT ({failed})")
            )
        )

    return columns_of


def _group(fragments: Sequence[lance.LanceFragment]) -> Group:
    return Group(
        fragment_ids=tuple(f.fragment_id for f in fragments),
        num_bytes=sum(map(_num_bytes, fragments)),
        num_rows=sum(f.count_rows() for f in fragments),
    )


def _num_bytes(fragment: lance.LanceFragment) -> int:
    return sum(int(file.file_size_bytes or 0) for file in fragment.metadata.files)
