"""Proof of absence: every place that this project writes text to, searched for documents that were deleted.

Invariant: each check says where it looked, how and at how much, and names whatever still holds one of them with what to
do about it; places that are not searched are named too. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain_assets.config import MaintainConfig
from pretrain_assets.forensics.receipts.documents import Documents
from pretrain_assets.forensics.receipts.needles import is_in
from pretrain_assets.forensics.receipts.storage_search import cached_copies, search_folder
from pretrain_assets.forensics.receipts.traces import PHRASE_CHARS, READ_ROWS, Traces
from pretrain_assets.loader.plan import Int64Array
from pretrain_assets.plural import counted
from pretrain_assets.table.storage import Location, filesystem, open_dataset
from pretrain_assets.table.upkeep.retention import plan_retention
from pretrain_assets.table.versions import HISTORY_TAG, stage_tags

if TYPE_CHECKING:
    import lance

WEIGHTS = (".safetensors",)
"""Endings of files that hold no text: what a model has learnt of a document cannot be searched for."""
ASKED = 64
"""Phrases that an index is asked for, at most, spread evenly."""
HITS = 20
"""Answers of an index to each phrase."""
UNFINISHED = "pretrain maintain --keep-unfinished 0s"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One place that was searched."""

    place: str
    """Where."""
    method: str
    """How, and at how much."""
    found: tuple[str, ...]
    """What still holds one of the documents; empty: none does."""
    remedy: str = ""
    """What to do about it."""
    unproven: tuple[str, ...] = ()
    """What could not be looked for, or into; empty: nothing."""


@dataclass(frozen=True, kw_only=True)
class Absence:
    """What was searched for documents, and what still holds them."""

    newest: tuple[Check, ...]
    """What the newest version and its indexes answer."""
    stored: tuple[Check, ...]
    """Older versions, and files on storage."""
    not_searched: tuple[str, ...]
    """Places that were not searched, and why."""

    @property
    def in_newest(self) -> bool:
        """No query to the newest version gives one of them."""
        return not any(check.found for check in self.newest)

    @property
    def nothing_found(self) -> bool:
        """Nothing that was looked for and into shows one of them."""
        return self.in_newest and not any(check.found for check in self.stored)

    @property
    def everywhere(self) -> bool:
        """Nothing that was searched holds one of them, and there all of them could be looked for."""
        return self.nothing_found and not any(check.unproven for check in self.stored)


def prove(
    location: Location,
    runs_uri: str,
    documents: Documents,
    traces: Traces,
    *,
    pinned_by_runs: Mapping[int, Sequence[str]],
    project: str,
) -> Absence:
    """Search for documents everywhere.

    Args:
        location: The table.
        runs_uri: Folder of all training runs.
        documents: They, as they were found before they were deleted.
        traces: What they left.
        pinned_by_runs: Training runs by the version that they name.
        project: Folder with Dagster's event log and the output of its runs.
    """
    dataset = open_dataset(location)
    return Absence(
        newest=(*_rows(dataset, traces), *_indexes(dataset, traces)),
        stored=(
            _versions(dataset, traces.ids, pinned_by_runs),
            *_table_files(location, dataset, traces),
            _folder("staged work beside the table", location.staging_uri, traces, UNFINISHED),
            _copies(documents.newest.table_id, traces),
            _folder("runs and reports", runs_uri, traces, "remove the files named", WEIGHTS),
            *(
                _folder(f"Dagster's folder {name}", f"{project}/{name}", traces, "delete that run in Dagster")
                for name in ("history", "storage")
            ),
        ),
        not_searched=tuple(_not_searched(location, documents)),
    )


def _rows(dataset: lance.LanceDataset, traces: Traces) -> Iterator[Check]:
    """The newest version, all of its rows read: by id, by digests of values, by phrases and runs of tokens."""
    columns = [name for name in dataset.schema.names if name in ("id", *traces.keys)]
    found: set[str] = set()
    for batch in dataset.scanner(columns=columns, batch_size=READ_ROWS).to_batches():
        found |= traces.in_batch(batch)
    parts = f"{counted(len(traces.phrases), 'phrase')}, {counted(len(traces.runs), 'run')} of tokens"
    values = f"digests of {', '.join(traces.keys)}; {parts}" if traces.keys else "no version has their text still"
    yield Check(
        place=f"version {dataset.version}, the newest",
        method=f"all {dataset.count_rows():,} rows, by id; {values}",
        found=tuple(sorted(found)),
        remedy="they were added again, or the deletion was undone: run this again",
    )
    yield Check(
        place="copies in the newest version",
        method="digests of content, before the deletion",
        found=(f"{counted(traces.shared, 'document')} with a copy under another id",) if traces.shared else (),
        remedy="the same command with --with-duplicates, once `pretrain dedup` has seen all rows",
    )


def _indexes(dataset: lance.LanceDataset, traces: Traces) -> Iterator[Check]:
    """Queries to the full-text indexes of the newest version; what their files hold is found with all other files."""
    import pyarrow.compute as pc

    asked = traces.phrases[:: -(-len(traces.phrases) // ASKED) or 1]
    for index in dataset.describe_indices():
        if index.field_names != ["text"]:
            yield Check(
                place=f"index {index.name} of the newest version",
                method="gives rows of the newest version only; the rows that its files list: see files of the table",
                found=(),
            )
            continue
        found = []
        for phrase in asked:
            words = phrase.replace('"', " ")  # quotes would ask for word positions
            hits = dataset.scanner(columns=["id", "text", "_score"], full_text_query=words, limit=HITS).to_table()
            mine = is_in(hits["id"].to_numpy(), traces.ids).any()
            if mine or pc.any(pc.match_substring(hits["text"], phrase)).as_py():
                found.append("a phrase of one of them finds it")
        yield Check(
            place=f"index {index.name} of the newest version",
            method=f"asked for {counted(len(asked), 'phrase')}",
            found=tuple(dict.fromkeys(found)),
            remedy="pretrain maintain --purge",
        )


def _versions(dataset: lance.LanceDataset, ids: Int64Array, pinned_by_runs: Mapping[int, Sequence[str]]) -> Check:
    """Every older version that is there, its ids read."""
    config = MaintainConfig(older_than_seconds=0, keep_last=1)
    kept = {e.version: e.reasons for e in plan_retention(dataset, config, pinned_by_runs=pinned_by_runs).kept}
    older = [int(entry["version"]) for entry in dataset.versions() if entry["version"] != dataset.version]
    found, found_in = [], []
    for version in older:
        rows = sum(
            int(is_in(batch["id"].to_numpy(), ids).sum())
            for batch in dataset.checkout_version(version).scanner(columns=["id"]).to_batches()
        )
        if rows:
            why = "; ".join(kept.get(version, ())) or "nothing"
            found.append(f"version {version} has {counted(rows, 'row')}, kept by: {why}")
            found_in.append(version)
    return Check(
        place="older versions",
        method=f"{counted(len(older), 'version')}, by id",
        found=tuple(found),
        remedy="; then ".join(
            [
                "--purge frees what nothing keeps but its stage or the index",
                *_releases(dataset, found_in, pinned_by_runs),
                *(["this command again"] if found_in else []),
            ]
        ),
    )


def _releases(
    dataset: lance.LanceDataset, versions: Sequence[int], pinned_by_runs: Mapping[int, Sequence[str]]
) -> Iterator[str]:
    """What to do so that nothing of people and runs keeps these versions: folders to remove, and tags to release."""
    if runs := sorted({run for version in versions for run in pinned_by_runs.get(version, ())}):
        yield f"remove the folder of {', '.join(runs)}"
    tags = dataset.tags.list()
    mine = sorted(set(tags) - set(stage_tags(tags)) - {HISTORY_TAG})
    if commands := [f"`pretrain release {name}`" for name in mine if tags[name]["version"] in versions]:
        yield ", ".join(commands)


def _table_files(location: Location, dataset: lance.LanceDataset, traces: Traces) -> Iterator[Check]:
    """The table's folder, and which versions refer to what still holds one of the documents."""
    files = search_folder(location.uri, traces)
    users = _users(dataset) if files.found else {}
    found = []
    for name, how in files.found.items():
        versions = users.get(name) or users.get("/".join(name.split("/")[:2]))
        by = f"of version {', '.join(map(str, versions))}" if versions else "of no version: left by unfinished work"
        found.append(f"{name} ({', '.join(how)}) {by}")
    yield Check(
        place="files of the table",
        method=f"all {files.files:,} ({files.num_bytes:,} bytes) as plain bytes; {files.decoded:,} of them also with "
        "their columns decoded, since text may be compressed: ids, digests of values, phrases, runs of tokens, and in "
        "indexes row ids",
        found=tuple(found),
        unproven=_not_looked_for(len(traces.ids) - traces.read, traces, "known by id only: no version has their text"),
        remedy=f"they go with the versions that refer to them (--purge); those of no version: {UNFINISHED}; an index "
        "of the newest version that this program did not make: drop it, or build it anew",
    )
    if files.unreadable:
        yield Check(
            place="files of the table that cannot be decoded",
            method="plain bytes only",
            found=files.unreadable,
            remedy=f"those of no version go with {UNFINISHED}",
        )


def _users(dataset: lance.LanceDataset) -> dict[str, list[int]]:
    """Versions that refer to each data file and to the folder of each index, by path in the table's folder."""
    found: dict[str, list[int]] = {}
    for entry in dataset.versions():
        opened = dataset.checkout_version(entry["version"])
        names = {f"data/{file.path}" for fragment in opened.get_fragments() for file in fragment.metadata.files}
        names |= {f"_indices/{segment.uuid}" for index in opened.describe_indices() for segment in index.segments}
        for name in names:
            found.setdefault(name, []).append(int(entry["version"]))
    return found


def _folder(place: str, uri: str, traces: Traces, remedy: str, but: tuple[str, ...] = ()) -> Check:
    found = search_folder(uri, traces, but=but)
    return Check(
        place=place,
        method=f"{counted(found.files, 'file')} as plain bytes, by phrases of up to {PHRASE_CHARS[1]} characters of "
        f"{traces.phrased:,} of {counted(len(traces.ids), 'document')}",
        found=tuple(f"{name} ({', '.join(how)})" for name, how in found.found.items()),
        remedy=remedy,
        unproven=(
            *_not_looked_for(
                len(traces.ids) - traces.phrased if found.files else 0, traces, "without a phrase to look for"
            ),
            *found.unreadable,
        ),
    )


def _not_looked_for(number: int, traces: Traces, why: str) -> tuple[str, ...]:
    return (f"{number:,} of {counted(len(traces.ids), 'document')}: {why}",) if number else ()


def _copies(table_id: str, traces: Traces) -> Check:
    num_copies, found = cached_copies(table_id, traces)
    return Check(
        place="copies of columns on this machine (loader.prefetch)",
        method=f"{counted(num_copies, 'folder')} of this table, by id; plans of runs beside them hold ids, no text",
        found=found,
        remedy="remove these folders from PRETRAIN_CACHE_DIR (by default in the user's cache folder)",
    )


def _not_searched(location: Location, documents: Documents) -> Iterator[str]:
    for name in sorted({row.source_file for row in documents.rows if row.source_file}):
        yield (
            f"source file {name}, outside the table. `pretrain ingest` has read it and skips it, so it brings nothing "
            "back; under another name, or into another table, it does. Without the document it counts as changed and "
            "is refused by that name: take it out of the sources"
        )
    if unnamed := len(documents) - sum(row.source_file is not None for row in documents.rows):
        which = f"{counted(unnamed, 'document')} that are not listed, or known by id only"
        yield f"source files of {which}: they may hold them still"
    fs, path = filesystem(location.database_uri)
    fs.invalidate_cache()
    names = sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(path, detail=False))
    tables = [name.removesuffix(".lance") for name in names if name.endswith(".lance")]
    if others := [name for name in tables if name != location.table_name]:
        yield f"other tables of this database, {', '.join(others)}: ask with `pretrain --table NAME receipt`"
    yield "plain files, for other parts of a document than its one or two phrases, or for a part of a phrase"
    yield "weights of models: above it says which checkpoints and exports have seen the documents"
    yield "other machines, backups and database servers: caches of columns, exports and reports written elsewhere"
