"""Which version of the table answers for the rows of a pinned one, and how many of them it cannot answer for.

Invariant: an answer is about rows that the pinned version has and no others; rows of it that no retained version can
search any more, since they were deleted, are counted and never left out silently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain_assets.curate.sql import columns_in
from pretrain_assets.errors import TableError
from pretrain_assets.forensics.indexes.segments import TEXT, segments, text_parameters, uncovered
from pretrain_assets.forensics.retrieval.vectors import VectorColumn, find_column, vector_column
from pretrain_assets.table.filler.columnfile import leaf_ids
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import latest_record, open_pin, records

if TYPE_CHECKING:
    import lance
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Searchable:
    """A version that is searched for the rows of a pinned one."""

    dataset: lance.LanceDataset
    """The version that is searched."""
    pinned: lance.LanceDataset
    """The pinned version, whose rows are asked for."""
    judge: lance.LanceDataset | None = None
    """Version that judges a predicate over columns that the pinned one lacks; None: the pinned one judges."""
    column: VectorColumn | None = None
    """The vectors that are compared; None for text."""

    @property
    def missing(self) -> int:
        """Rows of the pinned version that were deleted before this one, or before the one that judges."""
        later = [one for one in self._asked if one.version != self.pinned.version]
        held = [int(one.count_rows(within(self.pinned))) for one in later]
        return int(self.pinned.count_rows()) - min(held) if held else 0

    @property
    def version(self) -> int:
        """The newest version that is asked: rows deleted before it are not found."""
        return max(int(one.version) for one in self._asked)

    @property
    def without_vectors(self) -> int:
        """Rows of the pinned version whose vectors were never made: no file of their fragment has the column."""
        files = _files(self.dataset, [self.column.name] if self.column else [])
        lacking = [one for one, mine in files.items() if self.column and not mine]
        return sum(self.dataset.get_fragment(one).count_rows(within(self.pinned)) for one in lacking)

    def rows(self, where: str | None) -> str | None:
        """Predicate, for the version that is searched, of the pinned rows; with `where` where that means the same."""
        parts = [] if self.dataset.version == self.pinned.version else [within(self.pinned)]
        parts += [f"({where})"] if where and not self._remade(where) else []
        return " AND ".join(parts) or None

    def allowed(self, where: str | None) -> npt.NDArray[np.int64] | None:
        """Ids that satisfy `where` at the version that judges, if `rows` cannot ask it in the one searched; else None.

        8 bytes for each row that satisfies it.
        """
        import numpy as np

        if not where or not self._remade(where):
            return None
        judge = self.pinned if self.judge is None else self.judge
        found = judge.scanner(columns=["id"], filter=f"({where}) AND {within(self.pinned)}").to_table()
        return np.asarray(found["id"], np.int64)

    @property
    def _asked(self) -> list[lance.LanceDataset]:
        return [self.dataset, *([self.judge] if self.judge is not None else [])]

    def _remade(self, where: str) -> bool:
        """Whether a column of a predicate may have other values in the version searched than in the pinned one.

        It has the same where the same data files carry it; after a compaction that is not known, and counts as made
        anew.
        """
        if self.judge is not None:
            return True
        if self.dataset.version == self.pinned.version:
            return False
        if any(word in where for word in ("_rowaddr", "_row_last_updated")):
            return True
        names = columns_in(where, self.pinned.schema.names)
        if any(name not in self.dataset.schema.names for name in names):
            return True
        before, now = _files(self.pinned, names), _files(self.dataset, names)
        return any(now.get(fragment_id) != files for fragment_id, files in before.items())


def within(pinned: lance.LanceDataset) -> str:
    """Predicate, for any version since, of the rows that a pinned one has."""
    return f"_row_created_at_version <= {pinned.version}"


def for_text(location: Location, pin: Pin, *, phrases: bool = False) -> Searchable:
    """The version whose text index is asked: the pinned one if all of its rows are indexed, else the oldest indexed one
    since, which has lost the fewest of them; for `phrases`, of those with word positions.

    Raises:
        TableError: there is no index yet, it is older than the pinned version, or none has word positions.
    """
    pinned, later = open_pin(location, pin), list(_retained(location, pin, "indexed"))
    mine = segments(pinned, TEXT)
    indexed = [pinned, *later] if mine and not uncovered(pinned, mine) else later
    for dataset in indexed:
        if not phrases or text_parameters(dataset).get("with_position", True):  # an index over no rows is none
            return Searchable(dataset=dataset, pinned=pinned)
    if indexed:
        raise TableError(
            f"{location.uri}: a phrase needs word positions, and the index has none. Build them once with `pretrain "
            "index --with-position`, or search for the words without quotes."
        )
    record = latest_record(open_dataset(location), "indexed")
    have = "there is no full-text index" if record is None else f"the newest index is {record.tag}"
    raise TableError(
        f"To search version {pin.version} of {location.uri} an index of that version or later is needed; {have}. "
        "Run `pretrain index`, or materialize forensics/index."
    )


def for_vectors(location: Location, pin: Pin) -> tuple[Searchable, VectorColumn]:
    """The version whose vectors are compared: the first with vectors in every fragment, of the pinned one, indexed ones
    since, and embedded ones since; else the first with any.

    Raises:
        TableError: no version from the pinned one on has vectors.
    """
    pinned = open_pin(location, pin)
    some: tuple[Searchable, VectorColumn] | None = None
    for dataset in (pinned, *_retained(location, pin, "indexed"), *_retained(location, pin, "embedded")):
        column = find_column(dataset)
        if column is not None:
            found = Searchable(dataset=dataset, pinned=pinned, column=column), column
            if all(_files(dataset, [column.name]).values()):
                return found
            some = some or found
    return some or (Searchable(dataset=pinned, pinned=pinned), vector_column(pinned))


def _retained(location: Location, pin: Pin, stage: str) -> Iterable[lance.LanceDataset]:
    """Versions that a stage made since the pinned one and that are there, oldest first."""
    newest = open_dataset(location)
    there = {entry["version"] for entry in newest.versions()}
    for record in records(newest, stage):
        if record.version >= pin.version and record.version in there:
            yield open_dataset(location, record.version)


def _files(dataset: lance.LanceDataset, names: list[str]) -> dict[int, tuple[str, ...]]:
    """The data files that carry columns, by fragment; none where a fragment lacks them."""
    wanted = set(leaf_ids(dataset.lance_schema, names))
    return {
        fragment.fragment_id: tuple(file.path for file in fragment.metadata.files if wanted & set(file.fields))
        for fragment in dataset.get_fragments()
    }
