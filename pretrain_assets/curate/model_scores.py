"""Scores by a text-classification model of transformers, such as FineWeb-Edu's classifier: `model_score_<name>`.

Invariant: the column's metadata names the model, its fingerprint and the label; a score is a number, and limits on it
are filters. NULL and empty texts are scored as the empty text.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import EngineConfig, ModelScoreConfig
from pretrain_assets.curate.document_models import (
    DocumentModel,
    beginnings,
    by_length,
    find_model,
    gpus_per_worker,
    same_model,
    text_of,
    torch_dtype,
)
from pretrain_assets.errors import ModelError
from pretrain_assets.table.filler.fill import fill
from pretrain_assets.table.filler.spec import BatchFunction, Fill, RowColumns, Worker
from pretrain_assets.table.lineage import Pin, StageResult
from pretrain_assets.table.query import sql_rows
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    import lance

CODE_VERSION = "1"
"""Raised when the same model would give other scores."""
CALL_BATCHES = 8
"""Forward passes between two savings of work."""


def score(
    location: Location,
    config: ModelScoreConfig,
    *,
    input_pin: Pin,
    run_id: str | None = None,
    engine: EngineConfig | None = None,
) -> StageResult:
    """Fill `model_score_<name>` for the rows that lack it: one new version, or none.

    Args:
        location: The table.
        config: The model, which of its outputs is the score, and how it is run.
        input_pin: Version of the stage before to work from.
        run_id: Dagster run id for the lineage record.
        engine: Where texts are scored; None: processes on this machine.

    Raises:
        ModelError: no such model, or it has no such label.
        TableError: the table has no such text column.
    """
    text = text_of(location, config.text_column)
    model = find_model(config.model)
    output, activation = output_of(model, config)
    spec = _fill(model, output, activation, config, text)
    return fill(location, spec, input_pin=input_pin, run_id=run_id, engine=engine)


def output_of(model: DocumentModel, config: ModelScoreConfig) -> tuple[int, str]:
    """Which of the model's outputs is the score, and the function that makes it one.

    Raises:
        ModelError: no text-classification model, or no such label.
    """
    import transformers

    try:
        found = transformers.AutoConfig.from_pretrained(model.folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{model.folder} is no model of transformers: {str(error).splitlines()[0]}") from error
    kinds = found.architectures or []
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise ModelError(f"Model {model.name} is {', '.join(kinds) or 'unknown'}, and no ...ForSequenceClassification.")
    labels = {str(label): int(at) for label, at in found.label2id.items()}
    if config.label not in labels and (config.label or found.num_labels > 1):
        known = ", ".join(sorted(labels, key=labels.__getitem__))
        raise ModelError(f"Model {model.name} has no label {config.label!r}: choose one of {known}.")
    several = found.problem_type == "multi_label_classification"
    auto = "none" if found.num_labels == 1 else "sigmoid" if several else "softmax"
    return labels.get(config.label, 0), auto if config.activation == "auto" else config.activation


def scoring(
    model: DocumentModel, output: int, activation: str, config: ModelScoreConfig, worker: Worker
) -> BatchFunction:
    """The function that makes `model_score_<name>` from a text column."""
    import numpy as np
    import pyarrow as pa
    import torch
    import transformers

    same_model(model)
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.folder, **local)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(
        model.folder, dtype=torch_dtype(config.precision), use_safetensors=True, **local
    )
    classifier = classifier.eval().to(worker.device)
    max_tokens = min(config.max_tokens, tokenizer.model_max_length)
    functions: dict[str, Any] = {
        "none": lambda outputs: outputs,
        "sigmoid": torch.sigmoid,
        "softmax": lambda outputs: torch.softmax(outputs, dim=-1),
    }

    def model_score(batch: pa.RecordBatch) -> list[pa.Array]:
        texts = beginnings(batch.column(0), max_tokens)
        scores = np.empty(len(texts), np.float32)
        for some in by_length(texts, config.batch_size):
            given = tokenizer(
                [texts[at] for at in some], truncation=True, max_length=max_tokens, padding=True, return_tensors="pt"
            )
            with torch.inference_mode():
                logits = classifier(**given.to(worker.device)).logits.float()
            scores[some] = functions[activation](logits)[:, output].cpu().numpy()
        if not np.isfinite(scores).all():
            raise ModelError("the model gives a score that is not finite")
        return [pa.array(scores)]

    return model_score


def score_bins(dataset: lance.LanceDataset, name: str, *, most: int = 10) -> dict[str, int]:
    """Rows by score, in `most` bins of equal width from the lowest score to the highest."""
    column = f"model_score_{name}"
    low, high = (_one(dataset, f"SELECT {fold}({column}) AS one FROM dataset") for fold in ("min", "max"))
    if low is None or low == high:
        return {} if low is None else {f"{low:.3g}": dataset.count_rows(f"{column} IS NOT NULL")}
    width = (high - low) / most
    edges = [low + at * width for at in range(most)]
    return {
        f"{edge:.3g} to {edge + width:.3g}": dataset.count_rows(
            f"{column} >= {edge!r}" + (f" AND {column} < {edge + width!r}" if at < most - 1 else "")
        )
        for at, edge in enumerate(edges)
    }


def _one(dataset: lance.LanceDataset, query: str) -> Any:
    return sql_rows(dataset, query)[0]["one"]


def _fill(model: DocumentModel, output: int, activation: str, config: ModelScoreConfig, text: dict[str, Any]) -> Fill:
    import pyarrow as pa

    how = {"label": config.label, "output": output, "activation": activation}
    parameters = {**model.parameters(config), **text, **how}
    stage = f"model_scored_{config.name}"
    making: dict[str, Any] = {"stage": stage, "code_version": CODE_VERSION, "parameters": parameters}
    return Fill(
        stage=stage,
        groups=(
            RowColumns(
                outputs=pa.schema([computed_field(f"model_score_{config.name}", pa.float32(), **making)]),
                inputs=(config.text_column,),
                make=partial(scoring, model, output, activation, config),
                batch_rows=CALL_BATCHES * config.batch_size,
                worker_bytes=1 << 20,
                num_gpus=gpus_per_worker(config.device),
            ),
        ),
        code_version=CODE_VERSION,
        parameters=parameters,
        batch_bytes=config.batch_bytes,
    )
