"""Arrays that all processes of a node share: built once, memory-mapped, found again by what they were built from.

Invariant: an entry under its final name is whole, for it appears there by one atomic rename; one process makes it while
the others wait. Opening reads no array. With a shared uri it is built once for all nodes and fetched once per node.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pretrain_assets.loader.entries import (
    CACHE_VARIABLE,
    MANIFEST,
    NEW,
    read_manifest,
    remove_unused,
    sole_process,
    sync,
    touch,
    write_manifest,
    writing,
)
from pretrain_assets.table.lineage import canonical_json, digest
from pretrain_assets.table.storage import filesystem, join

_PIECE_BYTES = 16 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """An entry of the store."""

    arrays: dict[str, npt.NDArray[Any]]
    """Read-only, memory-mapped."""
    facts: dict[str, Any]
    """What the builder returned, as JSON gives it back."""
    digest: str
    """xxh3-128 in hex of names, dtypes, shapes and bytes of all arrays, and of the facts."""


class Writer:
    """Where a builder puts its arrays."""

    def __init__(self, folder: Path):
        self.folder, self.arrays = folder, dict[str, dict[str, Any]]()

    def array(self, name: str, dtype: npt.DTypeLike, shape: int | tuple[int, ...]) -> npt.NDArray[Any]:
        """A new array of zeros on disk, to be filled in place.

        Raises:
            PretrainError: the disk has no room for it.
        """
        kind, sizes = np.dtype(dtype), shape if isinstance(shape, tuple) else (shape,)
        num_bytes = kind.itemsize * math.prod(sizes)
        self.arrays[_plain(name)] = {"dtype": kind.str, "shape": list(map(int, sizes)), "bytes": num_bytes}
        path = self.folder / name
        with writing(self.folder.parent), path.open("wb") as file:
            if num_bytes:  # blocks are taken now: a full disk would otherwise kill the process at some later store
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        return _map(path, self.arrays[name], "r+")


class ArrayStore:
    """Entries in a local folder, and behind it, with a shared uri, in object storage."""

    def __init__(self, folder: Path, shared_uri: str | None = None):
        self.folder, self.shared_uri = folder, shared_uri

    def get(self, kind: str, key: Mapping[str, Any], build: Callable[[Writer], Mapping[str, Any]]) -> Stored:
        """The entry of a key: opened, fetched, or built by this process while others wait for it.

        Args:
            kind: What it holds, the beginning of its folder's name.
            key: Everything that its content depends on, as plain JSON.
            build: Fills the arrays and returns facts about them, as plain JSON.

        Raises:
            PretrainError: the folder cannot be written.
        """
        plain = json.loads(canonical_json(key))
        entry = self.folder / f"{kind}-{digest(plain)}"
        if found := _find(entry, plain, log_level=logging.DEBUG):
            return found
        with sole_process(entry, f"makes {entry.name}"):
            if found := _find(entry, plain, log_level=logging.WARNING):
                return found
            built = self._make(entry, plain, build)
        if built:  # outside the lock: nobody has to wait for the upload
            self._upload(entry)
        return _open(entry, plain)

    def _make(self, entry: Path, key: dict[str, Any], build: Callable[[Writer], Mapping[str, Any]]) -> bool:
        """Fetch or build an entry and publish it; True when it was built."""
        new = entry.with_name(entry.name + NEW)
        try:
            fetched = self._fetch(new, entry.name, key)
            if not fetched:
                writer = Writer(_emptied(new))
                facts = json.loads(canonical_json(dict(build(writer))))
                manifest = {"key": key, "facts": facts, "arrays": writer.arrays}
                write_manifest(new, {**manifest, "digest": _content_digest(new, manifest)})
            with writing(self.folder):
                shutil.rmtree(entry, ignore_errors=True)  # one that is not whole; maps of its files stay valid
                for path in new.iterdir():
                    sync(path)
                new.rename(entry)
                sync(self.folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        remove_unused(self.folder)
        return not fetched

    def _fetch(self, new: Path, name: str, key: dict[str, Any]) -> bool:
        """Copy an entry from the shared uri; False when it is not there, or not whole."""
        if self.shared_uri is None:
            return False
        uri = join(self.shared_uri, name)
        fs, root = filesystem(uri)
        try:
            manifest = json.loads(fs.cat_file(f"{root}/{MANIFEST}"))
            _emptied(new)
            names = [_plain(array) for array in manifest["arrays"]]
            fs.get([f"{root}/{array}" for array in names], [str(new / array) for array in names])
            write_manifest(new, manifest)
            if _content_digest(new, manifest) != _open(new, key).digest:
                raise ValueError("its content is not what its digest says")
        except FileNotFoundError as error:
            _log.info("%s is not there, or not whole, and is built: %s", uri, error)
            return False
        except Exception as error:  # whatever the storage's client raises: the entry can always be built
            _log.warning("%s cannot be used and is built again: %s: %s", uri, type(error).__name__, error)
            return False
        _log.info("fetched %s", uri)
        return True

    def _upload(self, entry: Path) -> None:
        if self.shared_uri is None:
            return
        uri = join(self.shared_uri, entry.name)
        fs, root = filesystem(uri)
        try:
            for path in sorted(entry.iterdir(), key=lambda path: path.name == MANIFEST):  # the manifest comes last
                fs.put_file(str(path), f"{root}/{path.name}")
        except Exception as error:  # whatever the storage's client raises
            _log.warning("%s was not shared; every node builds its own: %s: %s", uri, type(error).__name__, error)


def cache_folder() -> Path:
    """Where copies that can be made again lie: `PRETRAIN_CACHE_DIR`, else the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretrain_assets"


def _find(entry: Path, key: dict[str, Any], *, log_level: int) -> Stored | None:
    """An entry that is there and whole."""
    if not entry.exists():
        return None
    try:
        found = _open(entry, key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.log(log_level, "%s is damaged and is made again: %s: %s", entry, type(error).__name__, error)
        return None
    touch(entry)
    return found


def _open(entry: Path, key: dict[str, Any]) -> Stored:
    manifest = read_manifest(entry, key)
    arrays = {name: _map(entry / _plain(name), array, "r") for name, array in manifest["arrays"].items()}
    return Stored(arrays=arrays, facts=manifest["facts"], digest=manifest["digest"])


def _map(path: Path, array: dict[str, Any], mode: Literal["r", "r+"]) -> npt.NDArray[Any]:
    kind, shape = np.dtype(array["dtype"]), tuple(array["shape"])
    num_bytes = path.stat().st_size
    if num_bytes != array["bytes"] or num_bytes != kind.itemsize * math.prod(shape):
        raise ValueError(f"{path} has {num_bytes:,} bytes, {array['bytes']:,} were written")
    if num_bytes:
        return np.asarray(np.memmap(path, kind, mode, shape=shape))
    empty = np.empty(shape, kind)  # nothing cannot be mapped
    empty.flags.writeable = mode != "r"
    return empty


def _content_digest(folder: Path, manifest: Mapping[str, Any]) -> str:
    import xxhash

    content = xxhash.xxh3_128()
    for name, array in sorted(manifest["arrays"].items()):
        content.update(canonical_json([name, array["dtype"], array["shape"]]).encode())
        with (folder / name).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                content.update(piece)
    content.update(canonical_json(manifest["facts"]).encode())
    return str(content.hexdigest())


def _plain(name: str) -> str:
    """The name of an array, which is its file's: never a path out of the folder."""
    if not name.isidentifier():
        raise ValueError(f"{name!r} cannot be the name of an array; use letters, digits and _")
    return name


def _emptied(folder: Path) -> Path:
    with writing(folder.parent):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    return folder
