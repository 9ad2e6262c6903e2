"""The golden curve: losses of a 50-step run over the bundled documents, from the real table, loader and trainer.

`python -m pretrain_assets_tests.golden` writes `golden_curve.json`, which `test_ladder.py` compares with. Write it
again only after a change that is meant to change what is learned, and say so in the commit.

Invariant: the run is the same everywhere: no random number but the recipe's, no tokenizer but the bytes of the texts.
"""

from __future__ import annotations

import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pretrain_assets.config import (
    DataConfig,
    ExecutionConfig,
    ModelConfig,
    Recipe,
    RunSpec,
    TokenizerIdentity,
    TrainConfig,
)
from pretrain_assets.table.versions import identified
from pretrain_assets.train.metrics import read_metrics
from pretrain_assets.train.run import run

FILE = Path(__file__).with_name("golden_curve.json")
BUNDLED = Path(__file__).parent.parent / "pretrain_assets" / "data" / "public_domain_docs.parquet"
NUM_DOCUMENTS, BYTES_OF_EACH = 200, 100
RECIPE = Recipe(
    name="golden",
    model=ModelConfig(n_layer=2, n_head=2, n_embd=32),
    data=DataConfig(filter="id % 10 != 0", held_out_filter="id % 10 = 0", seq_len=64, num_splits=4),
    train=TrainConfig(
        global_batch_tokens=8 * 64,
        max_steps=50,
        learning_rate=2e-3,
        min_learning_rate=2e-4,
        warmup_steps=5,
        eval_every=10,
        eval_blocks=None,
    ),
    execution=ExecutionConfig(micro_batch_blocks=3, log_every=1, checkpoint_every=25),
)
"""50 steps over more than one epoch of 34 steps, the last micro-batch of a step smaller than the others."""


def golden_spec(folder: Path) -> RunSpec:
    """The golden run in a folder, where its table is written too."""
    texts = pq.read_table(BUNDLED, columns=["text"])["text"].slice(0, NUM_DOCUMENTS).to_pylist()
    tokens = [list(text.encode()[:BYTES_OF_EACH]) for text in texts]
    columns = {
        "id": pa.array(range(len(texts)), pa.int64()),
        "input_ids": pa.array(tokens, pa.list_(pa.int32())),
        "n_tokens": pa.array(map(len, tokens), pa.int32()),
    }
    table = pa.table(columns)
    lance.write_dataset(
        table.cast(identified(table.schema, "golden")), str(folder / "corpus.lance"), enable_stable_row_ids=True
    )
    return RunSpec(
        recipe=RECIPE,
        database_uri=str(folder),
        table_name="corpus",
        pin="golden@1",
        tag="tokenized-v1",
        tokenizer=TokenizerIdentity(name="none", fingerprint="bytes", vocab_size=257, eos_id=256, pad_id=257),
        run_dir=str(folder / "run"),
    )


def curve(spec: RunSpec) -> dict[str, dict[str, float]]:
    """What a finished run has measured, by quantity and step."""
    records = read_metrics(spec.run_dir)
    return {
        name: {str(record["step"]): record[name] for record in records if name in record}
        for name in ("loss", "val_loss", "lr")
    }


def main() -> None:
    """Write the file."""
    from benchmarks.harness import commit

    with tempfile.TemporaryDirectory() as folder:
        spec = golden_spec(Path(folder))
        run(spec)
        found: dict[str, Any] = {
            "command": "python -m pretrain_assets_tests.golden",
            "commit": commit(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
            **curve(spec),
        }
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
