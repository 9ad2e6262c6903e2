"""What a run would otherwise find only after minutes or hours: no place for its checkpoints, a model beyond all memory.

Invariant: nothing is left behind by looking.
"""

from __future__ import annotations

import os
import tempfile

from pretrain_assets.config import Recipe, TokenizerIdentity
from pretrain_assets.errors import ConfigError
from pretrain_assets.launch.contract import CHECKPOINTS_NAME, list_folder, storage_fault
from pretrain_assets.recipes import num_parameters
from pretrain_assets.table.storage import filesystem, is_remote, join
from pretrain_assets.train.checkpoint import STEP_NAME

WEIGHT_BYTES = 4
"""Of a weight in float32, as it is drawn in host memory before it goes to its device."""


def check_way(run_dir: str) -> None:
    """Look for what would only be in the way of a checkpoint once its steps are trained.

    Raises:
        ConfigError: nothing can be written there, or a file has the name of a checkpoint's folder.
    """
    folder = join(run_dir, CHECKPOINTS_NAME)
    fs, path = filesystem(folder)
    try:
        if is_remote(run_dir):
            fs.pipe_file(f"{path}/.probe", b"")
            fs.rm_file(f"{path}/.probe")
            return
        if os.path.lexists(path):
            with tempfile.TemporaryFile(dir=path):
                pass
    except Exception as error:  # of the disk, or what the client of an object store raises
        raise ConfigError(f"Checkpoints cannot be written to {folder}: {storage_fault(folder, error)}") from error
    for name, is_folder, _ in list_folder(folder):
        if not is_folder and STEP_NAME.match(name.removeprefix(".").removesuffix(".tmp")):
            raise ConfigError(f"{join(folder, name)} is in the way of a checkpoint: move this file somewhere else")


def check_memory(recipe: Recipe, tokenizer: TokenizerIdentity) -> None:
    """Refuse a model whose weights alone do not fit into this machine, before it begins to grow.

    Raises:
        ConfigError: they do not.
    """
    weights = num_parameters(recipe, tokenizer.vocab_size)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if weights * WEIGHT_BYTES > memory:
        model = recipe.model
        raise ConfigError(
            f"A model with model.n_layer={model.n_layer} and model.n_embd={model.n_embd} has {weights:,} weights: "
            f"{weights * WEIGHT_BYTES / 1e9:,.1f} GB, and this machine has {memory / 1e9:,.1f} GB of memory. "
            "Make it smaller."
        )
