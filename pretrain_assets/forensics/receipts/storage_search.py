"""Every file in a folder searched for traces of documents: as plain bytes, and Lance files with their columns decoded.

Invariant: every file that is there is looked at in both ways, whether a version refers to it or not; one that cannot be
decoded or unpacked is named. Text on storage may be compressed, so that plain bytes alone prove nothing about it.
"""

from __future__ import annotations

import lzma
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pretrain_assets.forensics.receipts.needles import find_in_bytes
from pretrain_assets.forensics.receipts.traces import READ_ROWS, Traces
from pretrain_assets.loader.entries import MANIFEST
from pretrain_assets.loader.store import cache_folder
from pretrain_assets.table.storage import filesystem, is_remote, storage_options
from pretrain_assets.table.upkeep.leftovers import StoredFile, listing
from pretrain_assets.table.versions import table_id

DECODED = (".lance", ".idx")
"""Endings of files in Lance's own format: data, and indexes."""
UNPACKED = (".gz", ".bz2", ".xz")
"""Endings of compressed files that are searched unpacked."""
PACKED = (".zip", ".zst", ".tgz", ".7z", ".npz", ".parquet", ".arrow", ".feather", ".orc", ".avro")
"""Endings of files that may be compressed in a way that is not undone here: their plain bytes prove nothing."""
DELETIONS = "_deletions/"
"""Where Lance writes which rows of a fragment are deleted: numbers alone."""
READERS = 4
"""Files searched at once: the work is compiled code and waiting for storage, so threads share it."""


@dataclass(frozen=True, kw_only=True)
class Searched:
    """A folder that was searched."""

    files: int
    """Files looked at."""
    num_bytes: int
    """Their bytes."""
    decoded: int
    """Of the files, how many were also read as Lance files, with all columns decoded."""
    found: dict[str, tuple[str, ...]]
    """Files that hold a trace, by their path in the folder, with what shows it."""
    unreadable: tuple[str, ...]
    """Files whose content could not be decoded or unpacked, with the reason; at most plain bytes were searched."""


def search_folder(uri: str, traces: Traces, *, but: tuple[str, ...] = ()) -> Searched:
    """Search the files under a folder, local or on an object store.

    Args:
        uri: The folder; one that is not there has no files.
        traces: What to look for.
        but: Endings of the names of files that are not searched.
    """
    files = [file for file in listing(uri) if not file.name.endswith(but)]
    with ThreadPoolExecutor(READERS) as pool:
        answers = list(pool.map(lambda file: _search(uri, file, traces), files))
    found = {file.name: tuple(sorted(hits)) for file, (hits, _, _) in zip(files, answers, strict=True) if hits}
    return Searched(
        files=len(files),
        num_bytes=sum(file.num_bytes for file in files),
        decoded=sum(was_decoded for _, was_decoded, _ in answers),
        found=found,
        unreadable=tuple(fault for _, _, fault in answers if fault),
    )


def _search(uri: str, file: StoredFile, traces: Traces) -> tuple[set[str], bool, str]:
    """What shows a trace, whether the file was decoded, and why not where it should have been."""
    fs, _ = filesystem(uri)
    unpacked = file.name.endswith(UNPACKED)
    try:
        with fs.open(file.uri, "rb", compression="infer" if unpacked else None) as content:
            hits = {"plain bytes"} if find_in_bytes(content, traces.needles) else set[str]()
    except FileNotFoundError:  # gone meanwhile
        return set(), False, ""
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if not unpacked:
            raise
        return set(), False, f"{file.name} cannot be unpacked: {error}"
    if file.name.endswith(PACKED) and not file.name.startswith(DELETIONS):
        return hits, False, f"{file.name} may be compressed and is not unpacked here"
    if not file.name.endswith(DECODED):
        return hits, False, ""
    place = f"{uri.rstrip('/')}/{file.name}" if is_remote(uri) else file.uri
    try:
        return hits | _decoded(place, traces), True, ""
    except (OSError, ValueError) as error:
        return hits, False, f"{file.name}: {(str(error).splitlines() or [''])[0][:200]}"


def _decoded(place: str, traces: Traces) -> set[str]:
    from lance.file import LanceFileReader

    reader = LanceFileReader(place, storage_options=storage_options(place))
    hits: set[str] = set()
    for batch in reader.read_all(batch_size=READ_ROWS).to_batches():
        hits |= traces.in_batch(batch)
    return hits


def cached_copies(identity: str, traces: Traces) -> tuple[int, tuple[str, ...]]:
    """Local copies of columns of a table (`loader.prefetch`) on this machine: how many, and those with a document."""
    import lance

    copies, found = 0, []
    for manifest in sorted(cache_folder().glob(f"columns-*/{MANIFEST}")):
        try:
            copy = lance.dataset(str(manifest.parent))
            if table_id(copy) != identity:
                continue
        except (OSError, ValueError):  # one that is being made or removed, or another table
            continue
        copies += 1
        if any(traces.in_batch(batch) for batch in copy.scanner(columns=["id"]).to_batches()):
            found.append(manifest.parent.name)
    return copies, tuple(found)
