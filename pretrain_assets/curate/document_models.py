"""Models that read documents, for embeddings and scores: where they come from, what identifies them, where they run.

Invariant: a model is a folder of files without code and without pickles, and its fingerprint is a digest of them; so
another folder with the same files is the same model, and a column never comes from two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import EmbedConfig, ModelScoreConfig
from pretrain_assets.errors import ConfigError, ModelError, TableError
from pretrain_assets.table.schema import text_parameters
from pretrain_assets.table.storage import Location, open_dataset

if TYPE_CHECKING:
    import pyarrow as pa

FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]
"""What is fetched from the hub. Weights as safetensors only: the older formats can carry code."""
READ_BYTES = 1 << 20
TOKEN_CHARS = 100
"""Characters per token of a text that are looked at: bounds the work on long documents."""


@dataclass(frozen=True, kw_only=True)
class DocumentModel:
    """A model on this machine."""

    name: str
    """Name on the hub, or of the folder."""
    folder: str
    """Where its files are."""
    fingerprint: str
    """Digest of the names and contents of its files."""

    def parameters(self, config: EmbedConfig | ModelScoreConfig) -> dict[str, Any]:
        """What of it and of the configuration changes values, but for the text column (`text_of`)."""
        return {
            "model": self.name,
            "fingerprint": self.fingerprint,
            "max_tokens": config.max_tokens,
            "precision": config.precision,
        }


def find_model(name: str, *, fetch: bool = True) -> DocumentModel:
    """A folder, or a model on the hub, whose files are fetched where they are not there yet.

    Args:
        name: Directory, or name on the hub.
        fetch: Ask the hub; else only the files that were fetched before are looked for.

    Raises:
        ModelError: neither.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _fetched(name, fetch)
        called = name
    else:
        called = folder.resolve().name
    files = sorted(path for path in folder.rglob("*") if path.is_file() and any(path.match(one) for one in FILES))
    if not any(path.suffix == ".safetensors" for path in files):
        raise ModelError(
            f"{folder} has no weights (*.safetensors): save the model with save_pretrained, and give that folder."
        )
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder)}:{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
    return DocumentModel(name=called, folder=str(folder), fingerprint=digest.hexdigest()[:16])


def same_model(model: DocumentModel) -> None:
    """See that a worker finds the files that the stage was started with.

    Raises:
        ModelError: it finds others, or none.
    """
    found = find_model(model.folder if Path(model.folder).is_dir() else model.name)
    if found.fingerprint != model.fingerprint:
        raise ModelError(
            f"Model {model.name} has the fingerprint {found.fingerprint} for this worker, and {model.fingerprint} "
            "where the stage was started: put the same files on every node."
        )


def gpus_per_worker(device: str) -> float:
    """GPUs that each worker asks for: 1 where the configuration or this machine says so."""
    if device == "auto":
        import torch

        return float(torch.cuda.is_available())
    return float(device == "cuda")


def text_of(location: Location, column: str) -> dict[str, Any]:
    """What a stage's parameters say of the text column that it reads.

    Raises:
        TableError: the table has no such column.
    """
    schema = open_dataset(location).schema
    if column not in schema.names:
        raise TableError(f"{location.uri} has no column {column}: run the stage that makes it first, or read `text`.")
    return text_parameters(schema, column)


def require_package(module: str, extra: str) -> None:
    """See that an optional package is installed.

    Raises:
        ConfigError: it is not.
    """
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise ConfigError(f"{module} is not installed: pip install 'pretrain-assets[{extra}]'.")


def beginnings(texts: pa.Array, max_tokens: int) -> list[str]:
    """Texts as Python strings, no longer than tokens can reach; NULL is empty."""
    return [(text or "")[: max_tokens * TOKEN_CHARS] for text in texts.to_pylist()]


def by_length(texts: Sequence[str], batch_size: int) -> Iterator[list[int]]:
    """Positions of texts in batches of similar length, longest first: the first one shows whether memory is enough."""
    order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def torch_dtype(precision: str) -> Any:
    """The type of that name."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


def _fetched(name: str, fetch: bool) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=FILES, local_files_only=not fetch))
    except Exception as error:  # of the network, the hub, or a name that is none
        if not fetch:
            raise ModelError(f"No model {name}: it is no local directory, and was not fetched from the hub.") from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"No model {name}: it is no local directory, and the hub did not give it ({reason}). Give a directory with "
            "the model's files, or a name that this machine can reach."
        ) from error
