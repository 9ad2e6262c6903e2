"""Exporting a checkpoint as a Hugging Face folder: config, safetensors, tokenizer, model card; local or on S3.

Invariant: a folder has a config.json only when all else in it is complete, so a reader never takes half a model for a
whole one. Equal checkpoints give equal bytes. What is there already and as it should be is not written again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pretrain_assets.config import TokenizerIdentity, from_dict
from pretrain_assets.errors import CheckpointError
from pretrain_assets.launch.contract import read_file
from pretrain_assets.table.lineage import canonical_json, digest
from pretrain_assets.table.storage import Location, filesystem, is_remote, join
from pretrain_assets.train import checkpoint
from pretrain_assets.train.export_place import refuse_others, refuse_runs, warn_of_others
from pretrain_assets.train.layout import to_config, to_generation_config, to_theirs
from pretrain_assets.train.model import GPT
from pretrain_assets.train.provenance import CODE_VERSION, provenance
from pretrain_assets.train.sampling import check_finite
from pretrain_assets.train.state import load_model

Dtype = Literal["float32", "bfloat16", "float16"]

CONFIG_NAME, WEIGHTS_NAME, CARD_NAME = "config.json", "model.safetensors", "README.md"
MANIFEST_NAME = "export.json"
"""What was exported, and size and digest of every other file; written first, as config.json is last."""
LINEAGE_KEY = "lineage"
"""Key of the lineage, as JSON, in the metadata of the safetensors file."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """An exported model."""

    uri: str
    """Its folder."""
    digest: str
    """Digest of what it was made from: the checkpoint, the exporter's code version, the lineage and the settings."""
    changed: bool
    """False when all of it was there already."""
    files: dict[str, int]
    """Bytes of every file."""
    lineage: dict[str, Any]
    """What the model says about its data; see `train.provenance`."""
    card: str
    """The model card."""


def default_uri(run_dir: str, step: int, dtype: Dtype = "float32") -> str:
    """Where the export of a checkpoint goes unless said otherwise: a folder of its own in the run's directory."""
    return join(run_dir, "exports", f"step_{step:08d}{'' if dtype == 'float32' else f'-{dtype}'}")


def export(
    location: Location,
    run_dir: str,
    step: int,
    *,
    write_card: Callable[[Mapping[str, Any]], str],
    uri: str | None = None,
    dtype: Dtype = "float32",
    tokenizer: str | None = None,
    overwrite: bool = False,
) -> Export:
    """Export a checkpoint.

    Args:
        location: The table that it was trained on.
        run_dir: Folder of the run.
        step: Step of a complete checkpoint.
        write_card: Makes the model card from the lineage.
        uri: Folder to write, local or `s3://`; None for `default_uri`.
        dtype: Type of the weights.
        tokenizer: Place of the tokenizer, where its name does not say; see `tokenize.pretrained.tokenizer_of`.
        overwrite: Replace whatever is in the folder, but never a run. An export of the same checkpoint is replaced
            without.

    Raises:
        CheckpointError: there is something else in the folder, or a run that it would touch; it cannot be written; or
            the model has diverged.
        TableError: the table is another one, or the pinned version is gone.
        TokenizerError: the tokenizer is not there, or is another one.
    """
    uri = uri or default_uri(run_dir, step, dtype)
    if not is_remote(uri):
        _clear_leftovers(Path(filesystem(uri)[1]))
    with checkpoint.open_checkpoint(run_dir, step) as source:
        source_digest = checkpoint.digest(source)
        lineage = provenance(location, checkpoint.read_passport(source), source_digest) | {"dtype": dtype}
        card = write_card(lineage)
        made_from = {"checkpoint": source_digest, "dtype": dtype, "digest": digest([CODE_VERSION, lineage, card])}
        found = read_manifest(uri)
        changed = found is None or found["digest"] != made_from["digest"] or not _intact(uri, found["files"])
        if changed:
            refuse_runs(uri)
            if not overwrite:
                refuse_others(uri, found, made_from)
            warn_of_others(uri, {MANIFEST_NAME, *(found["files"] if found else ())})
            model = load_model(source)
            try:
                with _staging(uri) as folder:
                    _write(folder, model, lineage, card, tokenizer)
                    found = {**made_from, "files": _contents(folder)}
                    (folder / MANIFEST_NAME).write_text(json.dumps(found, indent=2), encoding="utf-8")
                    _publish(folder, uri)
            except (OSError, SafetensorError) as error:
                space = "Free space there, or choose" if getattr(error, "errno", 0) == errno.ENOSPC else "Choose"
                raise CheckpointError(f"Cannot write {uri}: {error}. {space} another place with --out.") from error
    assert found is not None
    files = {name: int(facts["bytes"]) for name, facts in found["files"].items()}
    return Export(uri=uri, digest=found["digest"], changed=changed, files=files, lineage=lineage, card=card)


def read_manifest(uri: str) -> dict[str, Any] | None:
    """What an exported folder says it was made from and holds; None for any other folder."""
    try:
        found = json.loads(read_file(join(uri, MANIFEST_NAME)) or b"{}")
        files = {name: (facts["bytes"], facts["sha256"]) for name, facts in found["files"].items()}
    except (ValueError, OSError, KeyError, TypeError, AttributeError):
        return None
    typed = all(type(size) is int and type(sha256) is str for size, sha256 in files.values())
    plain = all(PurePosixPath(name).name == name for name in files)
    return found if typed and plain and {"checkpoint", "dtype", "digest"} <= found.keys() else None


def altered(folder: Path, files: Mapping[str, Any]) -> str | None:
    """The first file of a local folder that is there, but not as its manifest says; None when all are as they were."""
    there = [name for name in files if (folder / name).is_file()]
    return next((name for name in there if _facts(folder / name) != files[name]), None)


def _write(folder: Path, model: GPT, lineage: Mapping[str, Any], card: str, tokenizer_place: str | None) -> None:
    """All files but the manifest."""
    from pretrain_assets.tokenize.pretrained import save_tokenizer

    tokenizer = from_dict(TokenizerIdentity, lineage["tokenizer"])
    with torch.no_grad():
        check_finite(model.logits(torch.tensor([[tokenizer.eos_id]])))
    save_tokenizer(tokenizer, folder, max_tokens=model.seq_len, place=tokenizer_place)
    dtype = lineage["dtype"]
    weights = {name: value.to(getattr(torch, dtype)) for name, value in to_theirs(model).items()}
    save_file(weights, folder / WEIGHTS_NAME, metadata={"format": "pt", LINEAGE_KEY: canonical_json(lineage)})
    _sort_header(folder / WEIGHTS_NAME)
    for name, values in (
        (CONFIG_NAME, to_config(model, tokenizer, dtype)),
        ("generation_config.json", to_generation_config(tokenizer)),
    ):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / CARD_NAME).write_text(card, encoding="utf-8")
    (folder / WEIGHTS_NAME).chmod((folder / CARD_NAME).stat().st_mode)  # the library lets nobody else read it


def _sort_header(path: Path) -> None:
    """Sort the metadata of a safetensors file, which the library writes in the order of a randomly seeded hash."""
    with path.open("r+b") as handle:
        size = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size
        handle.seek(8)
        handle.write(text.ljust(size))


def _intact(uri: str, files: Mapping[str, Any]) -> bool:
    """Whether every file has its size and, on local disk, its digest."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    for name, facts in files.items():
        if not fs.exists(f"{path}/{name}") or fs.size(f"{path}/{name}") != facts["bytes"]:
            return False
    return is_remote(uri) or _contents(Path(path), files) == files


@contextmanager
def _staging(uri: str) -> Iterator[Path]:
    """An empty local folder, gone afterwards; near a local target, so that a rename publishes it.

    Its own folder is locked while this process lives: what nobody locks was left by one that was killed.
    """
    if is_remote(uri):
        with tempfile.TemporaryDirectory(prefix="export-") as temporary:
            yield Path(temporary)
        return
    target = Path(filesystem(uri)[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    around = Path(tempfile.mkdtemp(prefix=f".{target.name}.export-", dir=target.parent))
    with _locked(around):
        try:
            (around / "new").mkdir()
            yield around / "new"
        finally:
            _put_back_and_remove(around, target)


def _clear_leftovers(target: Path) -> None:
    """Remove what exports to a target that were killed left beside it."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.export-[a-z0-9_]{{8}}")
    for around in target.parent.iterdir() if target.parent.is_dir() else ():
        with suppress(OSError):  # gone meanwhile, or somebody else's
            if ours.fullmatch(around.name) and set(os.listdir(around)) <= {"new", "old"}:
                with _locked(around) as locked:
                    if locked:
                        _put_back_and_remove(around, target)


def _put_back_and_remove(around: Path, target: Path) -> None:
    """Remove a staging folder; the export that it was about to replace goes back where nothing replaced it."""
    if os.path.lexists(around / "old") and not os.path.lexists(target):
        os.replace(around / "old", target)
    shutil.rmtree(around, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder, and say whether it is held: another may hold it, or the file system have none."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        locked = False
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        yield locked
    finally:
        os.close(handle)


def _publish(folder: Path, uri: str) -> None:
    """Make a staged folder the export: by rename, or on an object store by writing config.json last."""
    fs, path = filesystem(uri)
    if not is_remote(uri):
        for file in folder.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        if os.path.lexists(path):
            os.replace(path, folder.with_name("old"))
        os.replace(folder, path)
        return
    fs.invalidate_cache()
    names = {file.name for file in folder.iterdir()}
    for old in fs.ls(path, detail=False) if fs.exists(path) else []:
        if old.rsplit("/", 1)[-1] not in names - {CONFIG_NAME}:
            fs.rm(old, recursive=True)
    for name in sorted(names, key=lambda name: (name == CONFIG_NAME, name != MANIFEST_NAME)):
        fs.put_file(str(folder / name), f"{path}/{name}")


def _contents(folder: Path, names: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    return {name: _facts(folder / name) for name in sorted(names or (file.name for file in folder.iterdir()))}


def _facts(path: Path) -> dict[str, Any]:
    found = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 22):
            found.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": found.hexdigest()}
