"""Reading token lists by row id: one request for many rows, tried again when the storage may recover.

Invariant: a request returns every row asked for, in the order asked, or raises an error that names a row id.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pretrain_assets.errors import TableError
from pretrain_assets.loader.plan import UInt64Array
from pretrain_assets.table.storage import is_remote

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

TRIES = 6
"""Tries of a request; the pauses between them add up to about half a minute."""
FIRST_PAUSE_SECONDS = 1.0
URING_SCHEME = "file+uring://"

_log = logging.getLogger(__name__)
T = TypeVar("T")


def fastest(dataset: lance.LanceDataset) -> lance.LanceDataset:
    """The same version of the table, opened with io_uring where the kernel allows it (up to twice as fast)."""
    import lance

    path = dataset.uri.removeprefix("file://")
    if is_remote(dataset.uri) or not path.startswith("/") or not sys.platform.startswith("linux"):
        return dataset
    try:
        quick = lance.dataset(URING_SCHEME + path, version=dataset.version)
        quick.take([0], columns=["id"])
    except (OSError, ValueError) as error:
        _log.info("reading with plain file reads: io_uring cannot be used here (%s)", str(error).split("\n")[0])
        return dataset
    return quick


def take_rows(
    dataset: lance.LanceDataset, row_ids: UInt64Array, columns: list[str], *, retried: Callable[[], None] = lambda: None
) -> pa.Table:
    """Columns of the rows with the given row ids, in the order given.

    Args:
        dataset: The table at its pinned version.
        row_ids: Stable row ids; ascending ones make fewer and longer reads.
        columns: Columns to read.
        retried: Called before each further try.

    Raises:
        TableError: a row is not there (the take itself drops it silently), or cannot be read.
    """

    def take(rows: UInt64Array) -> pa.Table:
        return dataset._take_rows(rows, columns=columns)  # the only take by stable row id that pylance 14 offers

    try:
        table = _patiently(lambda: take(row_ids), remote=is_object_store(dataset.uri), retried=retried)
    except OSError as error:
        raise TableError(
            f"{dataset.uri} at version {dataset.version}: row id {_culprit(take, row_ids)} cannot be read: "
            f"{str(error).splitlines()[0]}. Check the storage and the data files, then run this again."
        ) from error
    if table.num_rows != len(row_ids):
        missing = _culprit(take, row_ids)
        raise TableError(
            f"{dataset.uri} at version {dataset.version} lacks {len(row_ids) - table.num_rows} of {len(row_ids)} "
            f"planned rows, the first with row id {missing}: the table was not written with stable row ids. Ingest it "
            "again into a new database_uri."
        )
    return table


def is_object_store(uri: str) -> bool:
    """Whether a dataset is read over a network: a local one opened by io_uring has a scheme too."""
    return is_remote(uri) and not uri.startswith(URING_SCHEME)


def _patiently(read: Callable[[], T], *, remote: bool, retried: Callable[[], None]) -> T:
    """Read; on an object store, again after a while when it fails in a way that may pass."""
    for attempt in range(1, TRIES + 1):
        try:
            return read()
        except OSError as error:
            if not remote or attempt == TRIES or "not found" in str(error).lower():
                raise
            pause = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
            _log.warning(
                "reading failed (%s); try %d of %d in %.1f s", str(error).splitlines()[0], attempt + 1, TRIES, pause
            )
            retried()
            time.sleep(pause)
    raise AssertionError("unreachable")


def _culprit(take: Callable[[UInt64Array], pa.Table], row_ids: UInt64Array) -> int:
    """The first row id that fails or is missing, found by halving."""
    rows = row_ids
    while len(rows) > 1:
        half = rows[: len(rows) // 2]
        try:
            whole = take(half).num_rows == len(half)
        except OSError:
            whole = False
        rows = rows[len(half) :] if whole else half
    return int(np.asarray(rows)[0])
