"""The way back: a Hugging Face GPT-2 folder, ours or anybody's, as our model, its tokenizer's identity and its lineage.

Invariant: only JSON and safetensors are read, never a pickle, and transformers is not needed for what we exported.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pretrain_assets.config import Recipe, TokenizerIdentity, from_dict
from pretrain_assets.errors import CheckpointError, TokenizerError
from pretrain_assets.launch.contract import CHECKPOINTS_NAME
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import filesystem, is_remote, join
from pretrain_assets.train.export import (
    CARD_NAME,
    CONFIG_NAME,
    LINEAGE_KEY,
    MANIFEST_NAME,
    WEIGHTS_NAME,
    altered,
    read_manifest,
)
from pretrain_assets.train.layout import from_config, load_theirs
from pretrain_assets.train.model import GPT

INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
"""Names the file of every tensor, where a model is split into several."""


class Exported(NamedTuple):
    """A model from a folder."""

    model: GPT
    """In evaluation mode, float32, on the CPU."""
    tokenizer: TokenizerIdentity
    """Of its vocabulary."""
    lineage: dict[str, Any]
    """What it says about its data; empty for a model that was not exported here."""


def is_exported(uri: str) -> bool:
    """Whether a uri is the folder of a model rather than of a run or a checkpoint."""
    if f"/{CHECKPOINTS_NAME}/step_" in uri:
        return False
    fs, _ = filesystem(uri)
    fs.invalidate_cache()
    return any(fs.exists(filesystem(join(uri, name))[1]) for name in (CONFIG_NAME, WEIGHTS_NAME, "pytorch_model.bin"))


@contextmanager
def open_exported(uri: str) -> Iterator[Path]:
    """The folder of a model on local disk; downloaded for the duration when it is remote."""
    fs, path = filesystem(uri)
    if not is_remote(uri):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="export-") as temporary:
        for entry in fs.ls(path, detail=False):
            fs.get_file(entry, f"{temporary}/{entry.rsplit('/', 1)[-1]}")
        yield Path(temporary)


def load_exported(folder: Path) -> Exported:
    """Load a model.

    Raises:
        CheckpointError: a file is missing, damaged or not as it was exported, the weights are pickled, or the model is
            not one that ours is.
        TokenizerError: the model was not exported here, and its folder has no files of a usable tokenizer.
    """
    _check_files(folder)
    config = _read_json(folder / CONFIG_NAME)
    tensors, metadata = _read_weights(folder)
    shape = from_config(config, where=str(folder))
    lineage: dict[str, Any] = {}
    if LINEAGE_KEY in metadata:
        lineage, tokenizer, recipe = _read_lineage(metadata[LINEAGE_KEY], folder)
        shape = replace(shape, document_mask=recipe.model.document_mask and not shape.dropout)
        said, trained = (shape, config["n_positions"]), (recipe.model, recipe.data.seq_len)
        if said != trained:
            raise CheckpointError(
                f"{folder}: config.json describes {said[0]} of {said[1]} positions, its lineage {trained[0]} of "
                f"{trained[1]}. Export or copy it again."
            )
    else:
        tokenizer = _identify(folder, config)
    if config["vocab_size"] != tokenizer.vocab_size:
        raise CheckpointError(
            f"{folder}: config.json has vocab_size={config['vocab_size']}, its lineage a tokenizer of "
            f"{tokenizer.vocab_size} tokens. Export or copy it again."
        )
    model = GPT(shape, tokenizer, config["n_positions"])
    load_theirs(model, tensors, where=str(folder))
    return Exported(model.eval(), tokenizer, lineage)


def _read_lineage(text: str, folder: Path) -> tuple[dict[str, Any], TokenizerIdentity, Recipe]:
    """The lineage that weights carry, and the tokenizer and recipe that it names."""
    try:
        found = json.loads(text)
        Pin.parse(found["pin"])
        return found, from_dict(TokenizerIdentity, found["tokenizer"]), from_dict(Recipe, found["recipe"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: the lineage in its safetensors file cannot be read: {error!r}. Export or copy it again."
        ) from error


def _check_files(folder: Path) -> None:
    """Refuse files that are not those that were exported; the card is for people, who may rewrite it."""
    if not (folder / MANIFEST_NAME).exists():
        return
    manifest = read_manifest(str(folder))
    files = {} if manifest is None else {name: facts for name, facts in manifest["files"].items() if name != CARD_NAME}
    name = MANIFEST_NAME if manifest is None else altered(folder, files)
    if name:
        reason = "is damaged" if manifest is None else f"is damaged: {MANIFEST_NAME} has another size or digest of it"
        raise CheckpointError(f"{folder / name} {reason}. Export or copy it again.")


def _read_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of the one file or of several, and the metadata of the first."""
    index = folder / INDEX_NAME
    names = _names_in(index) if index.exists() else [WEIGHTS_NAME]
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name in names:
        if not (folder / name).exists():
            pickled = sorted(path.name for path in folder.glob("*.bin"))
            raise CheckpointError(
                f"{folder} has no {name}, only pickled weights ({pickled[0]}), and loading those would run code from "
                "the file. Ask its author for safetensors, or convert it where that is safe (transformers: "
                "from_pretrained, then save_pretrained)."
                if pickled
                else f"{folder} has no {name}: it is not a model's folder, or was copied in part."
            )
        try:
            with safe_open(folder / name, framework="pt") as file:
                metadata = {**(file.metadata() or {}), **metadata}
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{folder / name} is damaged: {error}. Export or copy it again.") from error
    return tensors, metadata


def _names_in(index: Path) -> list[str]:
    """Names of the files that an index names, all of them of its own folder."""
    files = _read_json(index).get("weight_map")
    names = set(map(str, files.values())) if isinstance(files, dict) else set()
    if not names or any(PurePosixPath(name).name != name for name in names):
        raise CheckpointError(f"{index} is damaged: its weight_map must name files of this folder. Copy it again.")
    return sorted(names)


def _identify(folder: Path, config: Mapping[str, Any]) -> TokenizerIdentity:
    """The tokenizer by its files, with the vocabulary that the model was trained with.

    Raises:
        TokenizerError: no files, or not those of this model.
    """
    from pretrain_assets.tokenize.pretrained import identify

    try:
        found = identify(folder)
    except TokenizerError as error:
        raise TokenizerError(
            f"{folder} was not exported by this project, so its tokenizer must be known by its files: {error} Put the "
            "model's tokenizer.json and tokenizer_config.json there."
        ) from error
    if max(found.vocab_size, found.eos_id + 1) > config["vocab_size"]:
        raise TokenizerError(
            f"The tokenizer in {folder} has {found.vocab_size:,} ids, the model {config['vocab_size']:,}: they do not "
            "belong together. Put the model's own tokenizer.json there."
        )
    return replace(found, vocab_size=config["vocab_size"])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"a JSON object is wanted, not {type(found).__name__}")
        return found
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}: it is not a model's folder, or its export was interrupted."
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Export or copy it again.") from error
