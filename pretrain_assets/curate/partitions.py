"""Records kept apart by their first bits: in memory up to a limit, past it in temporary files.

Invariant: equal first numbers lie in the same partition, so that each partition can be compared by itself; what is kept
where never changes a result. The files have no name: they are gone when the process is, however it ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

import numpy as np
import numpy.typing as npt

from pretrain_assets.errors import TableError

Records = npt.NDArray[np.uint64]

BITS = 7
"""128 partitions: 1 000 million records of 24 bytes are 190 MB each, and as many open files are allowed everywhere."""


class Partitions:
    """Records of some unsigned 64-bit numbers each, partitioned by the top bits of the first; a context manager."""

    def __init__(self, width: int, memory_bytes: int):
        """Nothing in it yet.

        Args:
            width: Numbers per record.
            memory_bytes: Held in memory at most; what is more goes to files in the system's temporary folder.
        """
        self._width, self._memory_bytes, self._held = width, memory_bytes, 0
        self._pieces: list[list[Records]] = [[] for _ in range(1 << BITS)]
        self._files: list[IO[bytes]] = []
        self._open = ExitStack()

    def __enter__(self) -> Partitions:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # of what could not be written before, which is not wanted any more
            self._open.close()

    @property
    def spilled(self) -> bool:
        """Whether some records are in files."""
        return bool(self._files)

    def add(self, records: Records) -> None:
        """Add records, shape (any number, width).

        Raises:
            TableError: the temporary folder is full.
        """
        numbers = (records[:, 0] >> np.uint64(64 - BITS)).astype(np.uint8)
        order = np.argsort(numbers, kind="stable")
        ordered = np.ascontiguousarray(records[order])
        stops = np.cumsum(np.bincount(numbers, minlength=1 << BITS))
        for number, piece in enumerate(np.split(ordered, stops[:-1])):
            if len(piece):
                self._pieces[number].append(piece)
        self._held += ordered.nbytes
        if self._held > self._memory_bytes:
            self._spill()

    def __iter__(self) -> Iterator[Records]:
        """Every partition with records in it, whole, in the order in which they were added."""
        if self.spilled:
            self._spill()
            for file in self._files:
                if file.tell():
                    yield np.asarray(np.memmap(file, np.uint64, mode="r+")).reshape(-1, self._width)
            return
        for pieces in self._pieces:
            if pieces:
                yield np.concatenate(pieces)

    def _spill(self) -> None:
        with temporary_files(f"what does not fit into {self._memory_bytes:,} bytes of memory (memory_bytes)"):
            if not self._files:
                new = (tempfile.TemporaryFile() for _ in range(1 << BITS))  # noqa: SIM115
                self._files = [self._open.enter_context(file) for file in new]
            for file, pieces in zip(self._files, self._pieces, strict=True):
                for piece in pieces:
                    file.write(piece.data)
                file.flush()
                pieces.clear()
        self._held = 0


def zeros(length: int, *, on_disk: bool) -> npt.NDArray[np.int64]:
    """Zeros: in memory, where they take up room once they are written to, or in a file without a name.

    Raises:
        TableError: the temporary folder is full. Were room not taken up front, writing would end the process (SIGBUS).
    """
    if not on_disk or not length:
        return np.zeros(length, np.int64)
    with temporary_files("what does not fit into memory_bytes"), tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, length * 8)
        return np.asarray(np.memmap(file, np.int64, mode="r+", shape=(length,)))


@contextmanager
def temporary_files(what: str) -> Iterator[None]:
    """Name the temporary folder in an error of it; Lance's errors, which carry no number of the system's, pass.

    Args:
        what: Is put there, for the message.

    Raises:
        TableError: no room, or no access.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise TableError(
            f"{what} cannot be put into a temporary file in {tempfile.tempdir or 'any folder'}: {error}. Make room "
            "there, or name another folder with the environment variable TMPDIR; nothing of the table was changed."
        ) from error
