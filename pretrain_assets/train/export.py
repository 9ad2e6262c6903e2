"""Exporting a checkpoint as a Hugging Face folder: config, safetensors, tokenizer, model card; local or on S3.

Invariant: a folder has a config.json only when all else in it is complete, so a reader never takes half a model for a
whole one. Equal checkpoints give equal bytes. What is there already and as it should be is not written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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
from pretrain_assets.train.layout import to_config, to_generation_config, to_theirs
from pretrain_assets.train.provenance import CODE_VERSION, provenance
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
        overwrite: Replace whatever is in the folder. An export of the same checkpoint is replaced without.

    Raises:
        CheckpointError: there is something else in the folder, or it cannot be written.
        TableError: the table is another one, or the pinned version is gone.
        TokenizerError: the tokenizer is not there, or is another one.
    """
    uri = uri or default_uri(run_dir, step, dtype)
    with checkpoint.open_checkpoint(run_dir, step) as source:
        source_digest = checkpoint.digest(source)
        lineage = provenance(location, checkpoint.read_passport(source), source_digest) | {"dtype": dtype}
        card = write_card(lineage)
        made_from = {"checkpoint": source_digest, "dtype": dtype, "digest": digest([CODE_VERSION, lineage, card])}
        found = read_manifest(uri)
        changed = found is None or found["digest"] != made_from["digest"] or not _intact(uri, found["files"])
        if changed:
            if not overwrite:
                _refuse_others(uri, found, made_from)
            try:
                with _staging(uri) as folder:
                    _write(folder, source, lineage, card, tokenizer)
                    found = {**made_from, "files": _contents(folder)}
                    (folder / MANIFEST_NAME).write_text(json.dumps(found, indent=2), encoding="utf-8")
                    _publish(folder, uri)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"Cannot write {uri}: {error}. Free space there, or choose another place with --out."
                ) from error
    assert found is not None
    files = {name: int(facts["bytes"]) for name, facts in found["files"].items()}
    return Export(uri=uri, digest=found["digest"], changed=changed, files=files, lineage=lineage, card=card)


def read_manifest(uri: str) -> dict[str, Any] | None:
    """What an exported folder says it was made from and holds; None for any other folder."""
    try:
        found = json.loads(read_file(join(uri, MANIFEST_NAME)) or b"{}")
    except (ValueError, OSError):
        return None
    return found if isinstance(found, dict) and {"checkpoint", "dtype", "digest", "files"} <= found.keys() else None


def _write(folder: Path, source: Path, lineage: Mapping[str, Any], card: str, tokenizer_place: str | None) -> None:
    """All files but the manifest."""
    from pretrain_assets.tokenize.pretrained import save_tokenizer

    model, tokenizer = load_model(source), from_dict(TokenizerIdentity, lineage["tokenizer"])
    save_tokenizer(tokenizer, folder, max_tokens=model.seq_len, place=tokenizer_place)
    dtype = lineage["dtype"]
    weights = {name: value.to(getattr(torch, dtype)) for name, value in to_theirs(model).items()}
    save_file(weights, folder / WEIGHTS_NAME, metadata={"format": "pt", LINEAGE_KEY: canonical_json(lineage)})
    (folder / WEIGHTS_NAME).chmod((folder / CONFIG_NAME).stat().st_mode)  # the library lets nobody else read it
    _sort_header(folder / WEIGHTS_NAME)
    for name, values in (
        (CONFIG_NAME, to_config(model, tokenizer, dtype)),
        ("generation_config.json", to_generation_config(tokenizer)),
    ):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / CARD_NAME).write_text(card, encoding="utf-8")


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


def _refuse_others(uri: str, found: Mapping[str, Any] | None, made_from: Mapping[str, Any]) -> None:
    """Refuse a place that holds anything but an export, whole or not, of the same checkpoint."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    if not fs.exists(path) or (fs.isdir(path) and not fs.ls(path, detail=False)):
        return
    if found is not None and all(found[name] == made_from[name] for name in ("checkpoint", "dtype")):
        return
    what = f"the {found['dtype']} export of checkpoint {found['checkpoint']}" if found else "something else"
    raise CheckpointError(f"{uri} holds {what}. Choose another place with --out, or give --overwrite to replace it.")


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
    """An empty local folder, gone afterwards; near a local target, so that a rename publishes it."""
    if is_remote(uri):
        with tempfile.TemporaryDirectory(prefix="export-") as temporary:
            yield Path(temporary)
        return
    target = Path(filesystem(uri)[1])
    around = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(around, ignore_errors=True)
    (around / "new").mkdir(parents=True)
    try:
        yield around / "new"
    finally:
        shutil.rmtree(around, ignore_errors=True)


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
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
        for name in sorted(names or (file.name for file in folder.iterdir()))
    }


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 22):
            found.update(chunk)
    return found.hexdigest()
