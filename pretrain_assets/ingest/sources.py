"""Which files an ingest reads: listing, formats and fingerprints, without reading a document.

Invariant: the same files give the same list in the same order (sources as configured, names sorted within one source),
and a file whose content changed has another fingerprint.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from typing import Any

from pretrain_assets.config import IngestConfig
from pretrain_assets.errors import InputError
from pretrain_assets.table.lineage import digest
from pretrain_assets.table.storage import absolute, filesystem, is_remote

FORMATS: dict[str, tuple[str, str | None]] = {
    ".parquet": ("parquet", None),
    **{
        f"{lines}{suffix}": ("jsonl", compression)
        for lines in (".jsonl", ".ndjson", ".json")
        for suffix, compression in (("", None), (".gz", "gzip"), (".zst", "zstd"))
    },
}
"""File name endings that can be read, with their format and compression."""

BUNDLED_FILE = "public_domain_docs.parquet"
"""The package's own corpus, in `pretrain_assets/data`."""

DEFAULT_SYNTHETIC_ROWS = 10_000
_EDGE_BYTES = 64 << 10
_CONTENT_MARKS = ("ETag", "etag", "blob_id", "md5Hash", "content_md5")
_SYNTHETIC = re.compile(r"synthetic(?::(?P<rows>\d+)(?::(?P<seed>\d+))?)?")
_MAGIC = re.compile(r"[*?\[]")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file to ingest."""

    name: str
    """Absolute path or uri; what `source_file` and the lineage record say."""
    source: str
    """The entry of `IngestConfig.sources` that lists it."""
    format: str
    """`parquet`, `jsonl` or `synthetic`."""
    compression: str | None
    """`gzip`, `zstd` or None."""
    size: int
    """Bytes as stored; 0 for synthetic."""
    fingerprint: str
    """Digest of size and content marks: another one means other content."""
    path: str
    """Where to open it; never recorded."""

    def open(self) -> Any:
        """A seekable binary file that reads exactly the ranges asked for."""
        fs, path = filesystem(self.path)
        return fs.open(path, "rb", cache_type="none") if is_remote(self.path) else fs.open(path, "rb")


def list_files(config: IngestConfig) -> list[SourceFile]:
    """All files of all sources, each once.

    Raises:
        InputError: a source that does not exist, matches nothing, or is in a format that cannot be read.
    """
    files: dict[str, SourceFile] = {}
    for source in config.sources:
        for file in _list_source(source):
            files.setdefault(file.name, file)
    return list(files.values())


def sources_fingerprint(config: IngestConfig) -> tuple[str, int]:
    """Digest of all files' fingerprints, and the number of files.

    Costs one listing per source, and two small reads per file where the listing has no content mark (local disk).
    """
    files = list_files(config)
    return digest([file.fingerprint for file in files]), len(files)


def _list_source(source: str) -> list[SourceFile]:
    if source == "bundled":
        return [_bundled()]
    if source == "synthetic" or source.startswith("synthetic:"):
        return [_synthetic(source)]
    try:
        fs, path = filesystem(absolute(source))
        fs.invalidate_cache()
        listing = _listing(fs, path, source)
    except InputError:
        raise
    except ValueError as error:  # an unknown protocol, or an address that its file system cannot read
        raise InputError(f"Source {source!r} cannot be opened: {error}") from error
    return [_file(fs, entry, listing[entry], source) for entry in sorted(listing)]


def _listing(fs: Any, path: str, source: str) -> dict[str, Any]:
    """Files under a source with the filesystem's facts about each."""
    if fs.isdir(path):
        found = fs.find(path, detail=True)
        listing = {entry: info for entry, info in found.items() if _format(entry) and not _hidden(entry[len(path) :])}
        if len(found) > len(listing):
            _log.info("%s: %d files in other formats are not documents", source, len(found) - len(listing))
    elif fs.exists(path):
        listing = {path: fs.info(path)}
    elif _MAGIC.search(path):
        listing = {entry: info for entry, info in fs.glob(path, detail=True).items() if info["type"] == "file"}
    else:
        raise InputError(f"Source {source!r} does not exist (looked for {path}). Check the path, or use `bundled`.")
    if not listing:
        raise InputError(f"Source {source!r} matches no file ending in {', '.join(FORMATS)}. Check the path or glob.")
    return listing


def _file(fs: Any, path: str, info: dict[str, Any], source: str) -> SourceFile:
    name = fs.unstrip_protocol(path).removeprefix("file://")
    known = _format(path)
    if known is None:
        raise InputError(f"{name} is in a format that cannot be read. Give a file ending in {', '.join(FORMATS)}.")
    file_format, compression = known
    return SourceFile(
        name=name,
        source=source,
        format=file_format,
        compression=compression,
        size=int(info["size"]),
        fingerprint=_fingerprint(fs, path, info),
        path=name,
    )


def _fingerprint(fs: Any, path: str, info: dict[str, Any]) -> str:
    """Size with the store's own content hash, or else with time of change and the first and last 64 KiB."""
    size = int(info["size"])
    marks = [str(info[key]) for key in _CONTENT_MARKS if info.get(key)]
    return digest([size, *marks]) if marks else digest([size, str(info.get("mtime")), _edges(fs, path, size)])


def _edges(fs: Any, path: str, size: int) -> str:
    if size == 0:
        return ""
    head = fs.cat_file(path, 0, min(_EDGE_BYTES, size))
    tail = fs.cat_file(path, max(size - _EDGE_BYTES, 0), size)
    return hashlib.sha256(head + tail).hexdigest()


def _bundled() -> SourceFile:
    from importlib.resources import files

    fs, path = filesystem(str(files("pretrain_assets") / "data" / BUNDLED_FILE))
    size = int(fs.info(path)["size"])
    return SourceFile(
        name=f"bundled:{BUNDLED_FILE}",
        source="bundled",
        format="parquet",
        compression=None,
        size=size,
        fingerprint=digest([size, _edges(fs, path, size)]),
        path=path,
    )


def _synthetic(source: str) -> SourceFile:
    from pretrain_assets.ingest.synthetic import GENERATOR_VERSION

    match = _SYNTHETIC.fullmatch(source)
    if match is None:
        raise InputError(f"Source {source!r} is not synthetic[:rows[:seed]]; for example synthetic:10000:7")
    rows, seed = int(match["rows"] or DEFAULT_SYNTHETIC_ROWS), int(match["seed"] or 0)
    return SourceFile(
        name=f"synthetic:{rows}:{seed}",
        source="synthetic",
        format="synthetic",
        compression=None,
        size=0,
        fingerprint=digest(["synthetic", GENERATOR_VERSION, rows, seed]),
        path=f"{rows}:{seed}",
    )


def _format(path: str) -> tuple[str, str | None] | None:
    lower = path.lower()
    return next((FORMATS[ending] for ending in FORMATS if lower.endswith(ending)), None)


def _hidden(path: str) -> bool:
    """Whether a file or a folder around it is no data by convention (`_SUCCESS`, `.cache`, a table's `_refs`)."""
    return any(part.startswith((".", "_")) for part in path.split("/"))
