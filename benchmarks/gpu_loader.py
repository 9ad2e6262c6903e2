"""Batches of the real loader, from a table made for the purpose; needs Lance and what the loader needs.

Invariant: the same table, order and blocks on every machine.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import torch

from benchmarks import loader_table
from pretrain_assets.loader.stream import Batch, BlockLoader
from pretrain_assets.table.storage import Location

ROWS, MEAN_TOKENS, FRAGMENTS = 8_000, 900, 4


def batches(blocks_per_step: int) -> Iterator[Batch]:
    """Batches without end, epoch after epoch, pinned where there is a GPU."""
    with tempfile.TemporaryDirectory(prefix="benchmark-gpu-") as folder:
        loader_table.write(folder, ROWS, MEAN_TOKENS, FRAGMENTS)
        data = loader_table.data(num_splits=blocks_per_step)
        loader = BlockLoader(Location(database_uri=folder), loader_table.PIN, data, loader_table.TOKENIZER)
        pinned, epoch = torch.cuda.is_available(), 0
        while True:
            stream = loader.batches(epoch, dtype="int32", doc_ids=False, pin_memory=pinned)
            with contextlib.closing(stream) as found:
                yield from found
            epoch += 1
