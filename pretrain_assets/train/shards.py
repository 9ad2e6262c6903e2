"""A rank's tensors as one safetensors file in the layout of torch.distributed.checkpoint, copied, written and read.

Invariant: the files are what torch's HuggingFaceStorageWriter (save_distributed=True) writes, so its reader puts them
together on any number of ranks; equal tensors give equal bytes; no pickle is written or read.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pretrain_assets.errors import CheckpointError
from pretrain_assets.launch.contract import read_marker

CHUNK_BYTES = 1 << 22
"""Bytes written and hashed at once."""

_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


class Piece(NamedTuple):
    """What a rank holds of a named tensor."""

    tensor: Tensor
    """Its part, on the device."""
    offset: tuple[int, ...]
    """Where the part begins in the whole tensor."""


class Snapshot:
    """Pieces copied to host memory as they will lie in their file; the memory is used again for the next ones.

    torch's own writer would build the file as one more copy, holding Python's lock: with 480 MB, the training thread
    stood still for seconds. Here memory is written as it is, without the lock.
    """

    def __init__(self) -> None:
        self._header, self._data = b"", torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def take(self, pieces: Mapping[str, Piece]) -> None:
        """Copy pieces; on CUDA the copies are only queued, before whatever the current stream does next."""
        names = sorted(pieces, key=lambda name: (-pieces[name].tensor.element_size(), name))  # so all are aligned
        spans, end = {}, 0
        for name in names:
            spans[name] = (end, end + pieces[name].tensor.nbytes)
            end = spans[name][1]
        cuda = any(piece.tensor.is_cuda for piece in pieces.values())
        if len(self._data) != end:
            self._data = torch.empty(end, dtype=torch.uint8, pin_memory=cuda)
        for name, (start, stop) in spans.items():
            tensor = pieces[name].tensor
            self._data[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if cuda else None
        self._header = _header(pieces, spans)

    def chunks(self) -> Iterator[memoryview]:
        """The bytes of the file."""
        if self._copied is not None:
            self._copied.synchronize()
        yield memoryview(self._header)
        data = memoryview(cast(Any, self._data.numpy()))
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


def stored(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of every tensor in a folder's files, put together.

    Raises:
        CheckpointError: a part of one is missing, a file is no safetensors file, or its header is not as we write it.
    """
    reader = _reader(folder)
    for path in sorted(path for path in reader.fs.ls(str(folder)) if path.endswith(".safetensors")):
        _check_header(path)
    try:
        tensors = reader.read_metadata().state_dict_metadata
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"Checkpoint {folder} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise CheckpointError(f"Checkpoint {folder} lacks a part of {name}: a file is missing")
    return {name: (tensor.size, tensor.properties.dtype) for name, tensor in tensors.items()}


def read_into(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors (a rank's parts of them, where they are shared out) by name from a folder's files.

    Raises:
        CheckpointError: one is missing there or has another shape.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load(tensors, storage_reader=_reader(folder), no_dist=True)  # every rank reads what it needs
        except CheckpointException as error:
            reasons = "; ".join(str(failure[0]) for failure in error.failures.values())
            raise CheckpointError(f"Checkpoint {folder} does not fit: {reasons}") from error


def _check_header(path: str) -> None:
    """Refuse a file whose header does not say where each of its tensors lies in the whole."""
    name = "its header"
    try:
        with safe_open(path, framework="pt") as file:
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                offsets, shape = places[name]["saved_offsets"], file.get_slice(name).get_shape()
                if len(offsets) != len(shape) or any(type(offset) is not int or offset < 0 for offset in offsets):
                    raise ValueError(f"saved_offsets {offsets!r:.80} for the shape {shape}")
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        folder, file_name = os.path.split(path)
        raise CheckpointError(f"Checkpoint {folder} cannot be read: {file_name}: {name}: {reason}") from error


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader: Any = HuggingFaceStorageReader(str(folder))
    named = read_marker(str(folder))
    if not isinstance(named, str):  # what else lies there is none of the checkpoint's
        everything = reader.fs.ls
        reader.fs.ls = lambda path: [file for file in everything(path) if Path(file).name in named]
    return reader


def _header(pieces: Mapping[str, Piece], spans: Mapping[str, tuple[int, int]]) -> bytes:
    """The head of a safetensors file (huggingface.co/docs/safetensors): its length, then JSON filled up to 8 bytes."""
    offsets = {name: {"saved_offsets": pieces[name].offset} for name in spans}
    facts: dict[str, Any] = {
        "__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    }
    for name, span in spans.items():
        tensor = pieces[name].tensor
        facts[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(facts, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
