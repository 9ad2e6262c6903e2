"""Embeddings: a vector for each document, of length 1, by a sentence-transformers model or by static token vectors.

Invariant: the column's metadata names the model, its fingerprint and the number of dimensions. A text without words the
model knows, NULL and empty included, has the zero vector, never NULL: it points nowhere. A cosine index does not find
such a row (measured), whereas one over a fragment of NULLs cannot be built (TABLE.md, trap 7).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import EmbedConfig, EngineConfig
from pretrain_assets.curate.document_models import (
    DocumentModel,
    beginnings,
    find_model,
    gpus_per_worker,
    require_package,
    same_model,
    text_of,
    torch_dtype,
)
from pretrain_assets.errors import ModelError, PretrainError
from pretrain_assets.table.filler.fill import fill
from pretrain_assets.table.filler.spec import BatchFunction, ColumnReader, Fill, RowColumns, Worker
from pretrain_assets.table.lineage import Pin, StageResult
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location
from pretrain_assets.table.verify import Finding

if TYPE_CHECKING:
    from collections.abc import Callable

    import lance
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Encode = Callable[[list[str]], npt.NDArray[np.float32]]

CODE_VERSION = "1"
"""Raised when the same model would give other vectors."""
CALL_BATCHES = 8
"""Forward passes between two savings of work."""
CHECKED_ROWS = 4_096
TOLERANCE = 0.01
"""Of a vector's length: float16 has 11 bits."""


def embed(
    location: Location,
    config: EmbedConfig,
    *,
    input_pin: Pin,
    run_id: str | None = None,
    engine: EngineConfig | None = None,
) -> StageResult:
    """Fill `embedding` for the rows that lack it: one new version, or none. Another model makes every row anew.

    Args:
        location: The table.
        config: The model, and how it is run.
        input_pin: Version of the stage before to work from.
        run_id: Dagster run id for the lineage record.
        engine: Where texts are embedded; None: processes on this machine.

    Raises:
        ConfigError: the package that runs such models is not installed.
        ModelError: no such model, or none that gives vectors.
        TableError: the table has no such text column.
    """
    text = text_of(location, config.text_column)
    model = find_model(config.model)
    dims = load(model, config, "cpu")(["dimensions"]).shape[1]
    return fill(location, _fill(model, dims, config, text), input_pin=input_pin, run_id=run_id, engine=engine)


def load(model: DocumentModel, config: EmbedConfig, device: str) -> Encode:
    """What makes vectors, shape (texts, dims), of any length.

    Raises:
        ConfigError: the package that runs such models is not installed.
        ModelError: the files are no model of that library.
    """
    loader = _transformer if config.library == "sentence-transformers" else _static
    try:
        return loader(model.folder, config, device)
    except PretrainError:
        raise
    except Exception as error:  # libraries raise what they like about files they cannot read
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{config.library} cannot load {model.folder}: {reason}. Is it a model for another library?"
        ) from error


def vectors(model: DocumentModel, config: EmbedConfig, dims: int, worker: Worker) -> BatchFunction:
    """The function that makes `embedding` from a text column."""
    import numpy as np
    import pyarrow as pa

    same_model(model)
    encode = load(model, config, worker.device)

    def embedding(batch: pa.RecordBatch) -> list[pa.Array]:
        texts = beginnings(batch.column(0), config.max_tokens)
        said = [at for at, text in enumerate(texts) if text and not text.isspace()]
        found = np.zeros((len(texts), dims), np.float32)
        if said:
            found[said] = encode([texts[at] for at in said])
        if not np.isfinite(found).all():
            raise ModelError("the model gives a vector that is not finite")
        lengths = np.linalg.norm(found, axis=1, keepdims=True)
        unit = np.divide(found, lengths, out=np.zeros_like(found), where=lengths > 0).astype(config.dtype)
        return [pa.FixedSizeListArray.from_arrays(pa.array(unit.reshape(-1)), dims)]

    return embedding


def unit_vectors(dataset: lance.LanceDataset) -> Finding:
    """Every vector has length 1, or 0 where a text says nothing to the model."""
    import numpy as np

    rows = dataset.count_rows()
    at = list(range(0, rows, max(1, rows // CHECKED_ROWS)))
    column: Any = dataset.take(at, columns=["embedding"]).column(0).combine_chunks().drop_null()
    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    lengths = np.linalg.norm(values.reshape(-1, column.type.list_size), axis=1)
    wrong = int(((np.abs(lengths - 1) > TOLERANCE) & (lengths != 0)).sum())
    return Finding(
        name="unit_vectors",
        passed=not wrong,
        description=f"{wrong:,} of {len(lengths):,} vectors have a length other than 1 and 0",
        details={"zero": int((lengths == 0).sum())},
    )


def _fill(model: DocumentModel, dims: int, config: EmbedConfig, text: dict[str, Any]) -> Fill:
    import pyarrow as pa

    parameters = {**model.parameters(config), **text, "library": config.library, "dims": dims, "normalised": True}
    making: dict[str, Any] = {"stage": "embedded", "code_version": CODE_VERSION, "parameters": parameters}
    element = pa.float16() if config.dtype == "float16" else pa.float32()
    transformer = config.library == "sentence-transformers"
    return Fill(
        stage="embedded",
        groups=(
            RowColumns(
                outputs=pa.schema([computed_field("embedding", pa.list_(element, dims), **making)]),
                inputs=(config.text_column,),
                make=partial(vectors, model, config, dims),
                batch_rows=CALL_BATCHES * config.batch_size if transformer else None,
                worker_bytes=1 << 20 if transformer else 16 << 20,
                num_gpus=gpus_per_worker(config.device) if transformer else 0.0,
            ),
        ),
        code_version=CODE_VERSION,
        parameters=parameters,
        batch_bytes=config.batch_bytes,
        summarize=partial(_summarize, config.text_column),
    )


def _summarize(text_column: str, read: ColumnReader) -> dict[str, int]:
    """`empty` are rows without text."""
    import pyarrow.compute as pc

    rows, empty = 0, 0
    for texts in read.batches(text_column):
        rows += len(texts)
        empty += texts.null_count + (pc.sum(pc.equal(pc.binary_length(texts), 0)).as_py() or 0)
    return {"in": rows, "embedded": rows - empty, "empty": empty}


def _transformer(folder: str, config: EmbedConfig, device: str) -> Encode:
    require_package("sentence_transformers", "embed")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        folder,
        device=device,
        local_files_only=True,
        trust_remote_code=False,
        model_kwargs={"dtype": torch_dtype(config.precision)},
    )
    model.max_seq_length = min(config.max_tokens, model.max_seq_length or config.max_tokens)

    def encode(texts: list[str]) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = model.encode(
            texts, batch_size=config.batch_size, convert_to_numpy=True, show_progress_bar=False
        )
        return found.astype("float32")

    return encode


def _static(folder: str, config: EmbedConfig, device: str) -> Encode:
    del device  # a mean of a few vectors
    require_package("model2vec", "embed-static")
    from model2vec import StaticModel

    model = StaticModel.from_pretrained(folder)

    def encode(texts: list[str]) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = model.encode(
            texts, max_length=config.max_tokens, use_multiprocessing=False, show_progress_bar=False
        )
        return found.astype("float32")

    return encode
