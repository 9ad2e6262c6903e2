"""Documents that a person chose, by id, by the source's own id, or by a predicate on the rows of a pinned version.

Invariant: nothing that was asked for gets lost: names that no row has are handed back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain_assets.config.data import MAX_HOLES
from pretrain_assets.curate.filters import checked
from pretrain_assets.errors import ConfigError
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

SCAN_ROWS = 262_144
_ID = re.compile("0|[1-9][0-9]*")


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Documents by the table's `id`, and what could not be found."""

    ids: tuple[int, ...]
    """Ascending, each once; those given as numbers whether the version has them or not."""
    unknown: tuple[str, ...] = ()
    """Names that are no `doc_id` of the version."""


def is_id(name: str) -> bool:
    """Whether a document is named by the table's `id`: a number as it is written there, without leading zeros.

    Such a number never means a source's own `doc_id`, whether there is a row with that id or not: else what it means
    would change with the rows, and a deletion done twice could take another document.
    """
    return _ID.fullmatch(name) is not None


def names_in(lines: Iterable[str]) -> list[str]:
    """The names in a list of one per line; `#` at the start of a line or after a space begins a comment."""
    return [name for line in lines if (name := re.sub(r"(^|\s)#.*", "", line).strip())]


def choose(location: Location, pin: Pin, names: Iterable[str], where: str | None = None) -> Chosen:
    """Find documents in a pinned version.

    Args:
        location: The table.
        pin: The version.
        names: Numbers are ids; anything else is the source's own `doc_id`; see `is_id`.
        where: Every row of which this SQL predicate is true as well; named filters may stand in it.

    Raises:
        FilterError: the predicate cannot be used.
        ConfigError: more documents than a run may leave out one by one.
    """
    given = set(names)
    numbers = {name for name in given if is_id(name)}
    beyond = {name for name in numbers if int(name) >= 2**63}  # no row's id
    ids = {int(name) for name in numbers - beyond}
    unknown = given - numbers
    dataset = open_pin(location, pin) if unknown or where is not None else None
    if dataset is not None and unknown and "doc_id" in dataset.schema.names:
        for batch in _with_names(dataset, unknown):
            ids.update(batch["id"].to_pylist())
            unknown = unknown - set(batch["doc_id"].to_pylist())
    if dataset is not None and where is not None:
        plain = checked(dataset, where, setting="--where")
        for batch in dataset.scanner(columns=["id"], filter=plain, batch_size=SCAN_ROWS).to_batches():
            ids.update(batch["id"].to_pylist())
            if len(ids) > MAX_HOLES:
                break
    if len(ids) > MAX_HOLES:
        raise ConfigError(
            f"More than {MAX_HOLES:,} documents are chosen: leave out so many by a filter, and train with it afresh"
        )
    return Chosen(ids=tuple(sorted(ids)), unknown=tuple(sorted(unknown | beyond)))


def _with_names(dataset: lance.LanceDataset, names: set[str]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted = pa.array(sorted(names), dataset.schema.field("doc_id").type)
    for batch in dataset.scanner(columns=["id", "doc_id"], batch_size=SCAN_ROWS).to_batches():
        yield batch.filter(pc.is_in(batch["doc_id"], value_set=wanted))
