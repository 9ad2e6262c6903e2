"""Evaluation sets: which texts of which items are searched for in the corpus.

Invariant: the fingerprint of a set is that of its items' ids and searched texts alone, in order, wherever its files
lie; every item is there, also one without any text, and a fault names file, line, field and remedy.

A set is written `[NAME=]FILES[#FIELD+FIELD...]`: `bundled`, or a path, folder or glob of JSON lines (plain, gzip or
zstd) or parquet, local, `s3://` or `hf://datasets/...`. A field may lie in another (`choices.text`); lists and
structures give each text in them apart. Texts of different fields are never joined.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import check_name
from pretrain_assets.errors import ConfigError, InputError
from pretrain_assets.table.storage import absolute, filesystem

if TYPE_CHECKING:
    import pyarrow as pa

BUNDLED, BUNDLED_NAME = "bundled", "gsm8k_test_300"
"""The first 300 items of GSM8K's test set, which lie in the package."""
DEFAULT_FIELDS = (
    *("question", "problem", "prompt", "query", "instruction", "input", "text", "sentence", "goal", "ctx", "code"),
    *("answer", "solution", "canonical_solution"),
)
"""Searched where a set names no fields: what is asked and what is answered. Not `context` or `passage`, which usually
quote a public page, nor `choices` or `endings`, short lines that occur anywhere: name them with `#` to search them."""
ID_FIELDS = ("id", "task_id", "question_id")
"""The first of these that an item has is its id; the number of its line otherwise."""

_COMPRESSION = {".jsonl": None, ".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
_ENDINGS = (".parquet", *_COMPRESSION)
_MAGIC = re.compile(r"[*?\[]")
_WRITTEN = re.compile(r"(?:(?P<name>[A-Za-z0-9_.-]+)=)?(?P<files>[^#]+)(?:#(?P<fields>.+))?")


@dataclass(frozen=True, kw_only=True)
class EvalSource:
    """Where a set lies and what of it is searched."""

    name: str
    """Name of the set: as given, else of its dataset, file or folder."""
    files: str
    """`bundled`, or a path, folder, glob or uri."""
    fields: tuple[str, ...]
    """Fields that are searched; empty: those of `DEFAULT_FIELDS` that an item has."""

    def written(self, root: str | Path) -> str:
        """As it is written, with a local path made absolute from `root`."""
        where = self.files if self.files == BUNDLED else absolute(self.files, root)
        return f"{self.name}={where}" + (f"#{'+'.join(self.fields)}" if self.fields else "")


@dataclass(frozen=True, kw_only=True)
class EvalItem:
    """One item of a set."""

    id: str
    """`set/own id` or `set/line`; with the file's name before the line where a set has several files."""
    texts: tuple[str, ...]
    """Its searched texts, fields apart, in order."""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A set, read."""

    name: str
    """Its name."""
    items: tuple[EvalItem, ...]
    """All of its items, in the order of its files and lines."""
    fingerprint: str
    """First 16 hex digits of the SHA-256 of ids and searched texts."""


def parse_source(written: str) -> EvalSource:
    """Read `[NAME=]FILES[#FIELD+FIELD...]`.

    Raises:
        ConfigError: it is not written so, or the name cannot be one.
    """
    match = _WRITTEN.fullmatch(written.strip())
    if match is None:
        raise ConfigError(f"Eval set {written!r} is not [NAME=]FILES[#FIELD+FIELD], such as mmlu=mmlu.jsonl#question")
    fields = tuple(field.strip() for field in (match["fields"] or "").split("+") if field.strip())
    name = match["name"] or _name_of(match["files"])
    check_name(name, f"name of eval set {written!r}:")
    return EvalSource(name=name, files=match["files"], fields=fields)


def read_eval_sets(written: Sequence[str]) -> list[EvalSet]:
    """All sets, in order.

    Raises:
        ConfigError: a set is written wrongly, or two have one name.
        InputError: files are missing or cannot be read, or an item lacks what is to be searched.
    """
    sources = [parse_source(one) for one in written]
    names = [source.name for source in sources]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"Two eval sets are named {min(repeated)!r}: name them apart, for example first={written[0]}")
    return [_read_set(source) for source in sources]


def _read_set(source: EvalSource) -> EvalSet:
    paths, digest, items = _paths(source), hashlib.sha256(), list[EvalItem]()
    given: set[str] = set()
    for path in paths:
        for line, row in read_rows(path):
            item = _item(source, path, line, row, len(paths) > 1, given)
            given.add(item.id)
            items.append(item)
            digest.update(json.dumps([item.id, *item.texts]).encode())
    if not items:
        raise InputError(f"Eval set {source.name!r} ({source.files}) has no items. Check the files, or take it out.")
    return EvalSet(name=source.name, items=tuple(items), fingerprint=digest.hexdigest()[:16])


def _item(source: EvalSource, path: str, line: int, row: dict[str, Any], several: bool, given: set[str]) -> EvalItem:
    where = f"{path}, line {line}"
    place = f"{_stem(path)}:{line}" if several else str(line)
    named = next((name for name in ID_FIELDS if isinstance(row.get(name), (str, int))), None)
    own = f"{source.name}/{_whole(str(row[named]), where, named) if named else place}"
    while own in given:
        own += f":{place}"
    texts: list[str] = []
    names = source.fields or [name for name in DEFAULT_FIELDS if name in row]
    if not names:
        raise InputError(
            f"{where}: none of the fields {', '.join(DEFAULT_FIELDS)} is there (found {', '.join(row)}). Name those to "
            f"search: {source.name}={source.files}#FIELD+FIELD"
        )
    for name in names:
        found = list(_texts(_value(row, name, where), where, name))
        if source.fields and not found and _value(row, name, where) is not None:
            raise InputError(f"{where}, field {name!r}: no text in it. Take it out of the fields to search.")
        texts += found
    return EvalItem(id=own, texts=tuple(texts))


def _value(row: dict[str, Any], dotted: str, where: str) -> Any:
    value: Any = row
    for name in dotted.split("."):
        if value is None:
            return None
        if not isinstance(value, dict) or name not in value:
            there = f"found {', '.join(value)}" if isinstance(value, dict) else f"it lies in a {type(value).__name__}"
            raise InputError(f"{where}: there is no field {dotted!r} ({there}). Mend the item or the fields.")
        value = value[name]
    return value


def _texts(value: Any, where: str, name: str) -> Iterator[str]:
    """Every text in a value; numbers are none."""
    if isinstance(value, str):
        yield _whole(value, where, name)
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner, where, name)


def _whole(text: str, where: str, name: str) -> str:
    """The text, if all of it are characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}, field {name!r}: half of a surrogate pair at character {error.start}, which is no character. "
            "Mend the item."
        ) from error
    return text


def read_rows(path: str, what: str = "an eval set") -> Iterator[tuple[int, dict[str, Any]]]:
    """Line (row, in parquet) from 1, and its values.

    Raises:
        InputError: the file cannot be read as `what` it is to be.
    """
    import pyarrow as pa

    fs, inside = filesystem(path)
    try:
        with fs.open(inside, "rb") as file:
            yield from _parquet_rows(file) if path.endswith(".parquet") else _json_rows(file, path)
    except (ConnectionError, TimeoutError, PermissionError, InputError):
        raise
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise InputError(f"{path} cannot be read as {what}: {reason}. Fetch it again, or take it out.") from error


def _parquet_rows(file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow.parquet as pq

    line = 0
    for batch in pq.ParquetFile(file).iter_batches():
        for row in _as_rows(batch):
            line += 1
            yield line, row


def _as_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def _json_rows(file: Any, path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa

    compression = _COMPRESSION[_ending(path)]
    stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), compression) if compression else file
    for line, text in enumerate(stream.read().split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {line}: not JSON in UTF-8 ({error}). Mend the line.") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {line}: not an object with fields but {text[:80]!r}. Mend the line.")
        yield line, row


def _paths(source: EvalSource) -> list[str]:
    """The set's files, names sorted."""
    if source.files == BUNDLED:
        return [str(files("pretrain_assets") / "data" / "eval" / f"{BUNDLED_NAME}.jsonl")]
    try:
        fs, path = filesystem(absolute(source.files))
        fs.invalidate_cache()
        if fs.isdir(path):
            found = [entry for entry in fs.find(path) if entry.endswith(_ENDINGS)]
        elif fs.exists(path):
            found = [path]
        else:
            found = list(fs.glob(path)) if _MAGIC.search(path) else []
    except ValueError as error:  # an unknown protocol, or an address that its file system cannot read
        raise InputError(f"Eval set {source.files!r} cannot be opened: {error}") from error
    if not found:
        raise InputError(f"Eval set {source.files!r} matches no file (looked for {path}). Check the path.")
    if wrong := [entry for entry in found if not entry.endswith(_ENDINGS)]:
        raise InputError(f"{wrong[0]} cannot be read as an eval set. Give files ending in {', '.join(_ENDINGS)}.")
    return [fs.unstrip_protocol(entry).removeprefix("file://") for entry in sorted(found)]


def _name_of(written_files: str) -> str:
    """The dataset of an `hf://` address, else the name of the file or of the last folder without a wildcard."""
    if written_files == BUNDLED:
        return BUNDLED_NAME
    parts = [part for part in re.split("[/\\\\]", written_files) if part]
    if written_files.startswith("hf://datasets/") and len(parts) >= 4:
        return parts[3].partition("@")[0]
    plain = [part for part in parts if not _MAGIC.search(part)]
    return _stem(plain[-1]) if plain else "eval"


def _ending(path: str) -> str:
    return next(ending for ending in _ENDINGS if path.endswith(ending))


def _stem(path: str) -> str:
    name = path.replace("\\", "/").rpartition("/")[2]
    return next((name.removesuffix(ending) for ending in _ENDINGS if name.endswith(ending)), name)
