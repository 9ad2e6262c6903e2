"""The loss of every document under a checkpoint, as columns: `loss_<name>`, `loss_max_<name>`, `loss_tokens_<name>`.

Invariant: a document is judged alone, all of its tokens and its end of text once, as the trainer would see them behind
another document's end; so a value depends on the document and the checkpoint, which the column's metadata name.

What the model is given before the first token is the end of text. Where it was trained with `document_mask`, it saw no
token of a document together with the end of the one before: there the first token is predicted from the end of text
alone, and the document stands at position 0. A document of more tokens than the context is cut as the trainer's blocks
are, but that the first token of each further window is not left out: it is the last target of the window before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.config import DocumentLossConfig, EngineConfig, Recipe, TokenizerIdentity, from_dict, to_dict
from pretrain_assets.curate.document_models import gpus_per_worker
from pretrain_assets.errors import CheckpointError, ColumnError
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.loader.state import check_same
from pretrain_assets.table.filler.fill import fill
from pretrain_assets.table.filler.spec import BatchFunction, ColumnReader, Fill, RowColumns, Worker
from pretrain_assets.table.lineage import Pin, StageResult
from pretrain_assets.table.schema import computed_field, made_by, tokenizer_identity
from pretrain_assets.table.storage import Location, absolute
from pretrain_assets.table.versions import open_pin
from pretrain_assets.train.checkpoint import checkpoint_uri, digest, open_checkpoint

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from pretrain_assets.train.model import GPT

STAGE = "loss_measured"
CODE_VERSION = "1"
"""Raised when the same checkpoint would give other losses."""
FORWARD_TOKENS = 32768
"""Positions per forward pass at most, padding included: keeps a GPU busy, with the logits of 4,096 of them in memory
at a time (`GPT.chunked_loss`)."""
CPU_LOGITS_BYTES = 26 << 20
"""Logits per forward pass on a CPU: 128 positions of GPT-2's vocabulary. glibc gives the memory of larger arrays back
to the kernel every time: with 2,048 positions a token of the demo's model took 2.2 times as long on one core."""

Int64s = npt.NDArray[np.int64]


def measure_loss(
    location: Location,
    checkpoint: Checkpoint,
    config: DocumentLossConfig,
    *,
    input_pin: Pin,
    run_id: str | None = None,
    engine: EngineConfig | None = None,
) -> StageResult:
    """Fill the loss columns for the rows that lack them: one new version, or none.

    `loss_<name>` is the mean cross entropy in nats per predicted token, `loss_max_<name>` the largest of one token, and
    `loss_tokens_<name>` how many were predicted: all of the document's and its end of text. The two losses are NULL
    exactly where that is 0: where the row has no tokens, since its text could not be encoded.

    Args:
        location: The table.
        checkpoint: Its model and tokenizer. Another one under the same name measures every row anew.
        config: Name of the columns, and how the model is run.
        input_pin: Version of the stage of its tokens to work from.
        run_id: Dagster run id for the lineage record.
        engine: Where documents are measured; None: processes on this machine.

    Raises:
        TableError: the version is not there, or has no such tokens.
        DataIdentityError: its tokens are of another tokenizer than the checkpoint's.
        CheckpointError: the checkpoint cannot be read.
        ColumnError: a loss is not finite: the model has diverged.
    """
    spec = _fill(location, checkpoint, config, input_pin)
    return fill(location, spec, input_pin=input_pin, run_id=run_id, engine=engine)


def column_name(recipe: Recipe) -> str:
    """The name that a recipe's columns get when none is given: its letters and digits."""
    return re.sub("[^a-z0-9]", "", recipe.name.lower())


def measuring(
    run_dir: str,
    step: int,
    expected: str,
    eos_id: int,
    lead: int,
    max_tokens: int | None,
    precision: str,
    worker: Worker,
) -> BatchFunction:
    """The function that makes the loss columns from token ids.

    Args:
        run_dir: Folder of the run.
        step: Step of its checkpoint.
        expected: The checkpoint's digest.
        eos_id: End of text.
        lead: 1 to put the end of text before a document, 0 for a model with a document mask.
        max_tokens: Tokens of a document that are predicted, from its beginning; None for all, and its end of text.
        precision: `float32` or `bfloat16`.
        worker: Where it runs.

    Raises:
        CheckpointError: the checkpoint is not there, or is another.
    """
    import pyarrow as pa
    import torch

    from pretrain_assets.train.state import load_model

    uri, device = checkpoint_uri(run_dir, step), torch.device(worker.device)
    with open_checkpoint(run_dir, step) as folder:
        if digest(uri) != expected:
            raise CheckpointError(f"{uri} is another checkpoint for this worker: share the run's folder between nodes.")
        model = load_model(folder, device=device)
    model.chunked_loss = True
    shape = {"seq_len": model.seq_len, "pad_id": model.pad_id, "num_tokens": FORWARD_TOKENS}
    if device.type == "cpu":
        shape["num_tokens"] = min(FORWARD_TOKENS, CPU_LOGITS_BYTES // (4 * model.vocab_size))
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=precision == "bfloat16")
    first = None if lead else _first_losses(model, eos_id, device, autocast)

    def loss_columns(batch: pa.RecordBatch) -> list[pa.Array]:
        tokens, firsts, known = tokens_of(batch.column(0))
        stream, starts = joined(tokens, firsts, eos_id, lead)
        lengths = np.minimum(np.diff(starts), lead + max_tokens if max_tokens else len(stream))
        sums, most = np.zeros(len(known)), np.zeros(len(known), np.float32)
        counts = np.zeros(len(known), np.int64)
        if first is not None:
            begins = stream[starts[:-1]]
            sums, most, counts = first[begins].astype(np.float64), first[begins], (begins != model.pad_id).astype(int)
        for documents, ids in windows(stream, starts[:-1], lengths, **shape):
            given = torch.from_numpy(ids).to(device)
            with torch.inference_mode(), autocast():
                losses = model(given, reduction="none").double()
            if not losses.isfinite().all():
                raise ColumnError(f"{uri} gives losses that are not finite: the model has diverged. Use another one.")
            np.add.at(sums, documents, losses.sum(1).cpu().numpy())
            np.add.at(counts, documents, (given[:, 1:] != model.pad_id).sum(1).cpu().numpy())
            np.maximum.at(most, documents, losses.amax(1).float().cpu().numpy())
        counts[~known] = 0
        means = (sums / np.maximum(counts, 1)).astype(np.float32)
        nothing = counts == 0
        return [pa.array(means, mask=nothing), pa.array(most, mask=nothing), pa.array(counts.astype(np.int32))]

    return loss_columns


def tokens_of(lists: pa.Array) -> tuple[npt.NDArray[np.int32], Int64s, npt.NDArray[np.bool_]]:
    """Token ids of documents, one after the other, where each begins and the last ends, and which are not NULL."""
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    firsts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return lists.flatten().to_numpy(), firsts, pc.is_valid(lists).to_numpy(zero_copy_only=False)


def joined(tokens: npt.NDArray[np.int32], firsts: Int64s, eos_id: int, lead: int) -> tuple[Int64s, Int64s]:
    """Documents in one stream, `lead` ends of text before each and one after; and where each begins, and the end."""
    documents = np.arange(len(firsts) - 1)
    stream = np.full(len(tokens) + (1 + lead) * len(documents), eos_id, np.int64)
    shift = np.repeat((1 + lead) * documents + lead, np.diff(firsts))
    stream[np.arange(len(tokens)) + shift] = tokens
    return stream, firsts + (1 + lead) * np.arange(len(firsts))


def windows(
    stream: Int64s, starts: Int64s, lengths: Int64s, *, seq_len: int, pad_id: int, num_tokens: int
) -> Iterator[tuple[Int64s, Int64s]]:
    """Documents cut into windows that overlap by one token, in batches of similar length, the longest first.

    Args:
        stream: Token ids of all documents.
        starts: Where each begins; (documents,).
        lengths: How many of them count; (documents,).
        seq_len: Most tokens of a window.
        pad_id: Put behind shorter ones; no target.
        num_tokens: Most tokens of a batch, padding included, but for a single window.

    Yields:
        The document of each window, (windows,), and their token ids, (windows, tokens).
    """
    counts = -(-(lengths - 1) // (seq_len - 1))  # targets, by windows of seq_len - 1 of them
    documents = np.repeat(np.arange(len(lengths)), counts)
    begins = starts[documents] + (seq_len - 1) * (
        np.arange(len(documents)) - np.repeat(counts.cumsum() - counts, counts)
    )
    ends = np.minimum(begins + seq_len, starts[documents] + lengths[documents])
    order = np.argsort(begins - ends, kind="stable")
    while len(order):
        width = int(ends[order[0]] - begins[order[0]])
        some, order = np.split(order, [max(1, num_tokens // width)])
        places = begins[some, None] + np.arange(width)
        inside = places < ends[some, None]
        yield documents[some], np.where(inside, stream[np.where(inside, places, 0)], pad_id)


def _first_losses(model: GPT, eos_id: int, device: torch.device, autocast: Any) -> npt.NDArray[np.float32]:
    """Loss of every token as the first of a document, predicted from an end of text alone; 0 for the pad id."""
    import torch

    with torch.inference_mode(), autocast():
        logits = model.logits(torch.tensor([[eos_id]], device=device))[0, 0].float()
    losses = np.zeros(max(model.vocab_size, model.pad_id + 1), np.float32)
    losses[: model.vocab_size] = -logits.log_softmax(-1).cpu().numpy()
    losses[model.pad_id] = 0
    return losses


def _fill(location: Location, checkpoint: Checkpoint, config: DocumentLossConfig, input_pin: Pin) -> Fill:
    import pyarrow as pa

    from pretrain_assets.loader.stream import check_token_column

    recipe, name = checkpoint.recipe, config.name
    column, dataset = recipe.data.token_column, open_pin(location, input_pin)
    ours, theirs = from_dict(TokenizerIdentity, checkpoint.passport["tokenizer"]), tokenizer_identity(dataset, column)
    check_token_column(dataset, column)
    if ours.fingerprint != theirs.fingerprint:
        check_same(
            to_dict(ours),
            to_dict(theirs),
            between=("checkpoint", f"version {input_pin.version}"),
            sentence=f"{checkpoint.uri} cannot measure the documents of version {input_pin.version} of {location.uri}",
            remedy=f"Tokenize them with {ours.name} (`pretrain tokenize --beside` keeps both), or give a checkpoint "
            f"that was trained on tokens of {theirs.name}.",
        )
    parameters: dict[str, Any] = {
        "checkpoint": digest(checkpoint.uri),
        "run": checkpoint.run_dir.rstrip("/").rpartition("/")[2],
        "step": checkpoint.step,
        "tokenizer": ours.name,
        "tokenizer_fingerprint": ours.fingerprint,
        "token_column": column,
        "tokens_made_by": made_by(dataset.schema.field(column)),
        "seq_len": recipe.data.seq_len,
        "max_tokens": config.max_tokens,
        "precision": config.precision,
    }
    making: dict[str, Any] = {"stage": f"{STAGE}_{name}", "code_version": CODE_VERSION, "parameters": parameters}
    types = {f"loss_{name}": pa.float32(), f"loss_max_{name}": pa.float32(), f"loss_tokens_{name}": pa.int32()}
    lead = 0 if recipe.model.document_mask else 1
    model = (absolute(checkpoint.run_dir), checkpoint.step, parameters["checkpoint"], ours.eos_id, lead)
    return Fill(
        stage=f"{STAGE}_{name}",
        groups=(
            RowColumns(
                outputs=pa.schema([computed_field(field, kind, **making) for field, kind in types.items()]),
                inputs=(column,),
                nullable=(f"loss_{name}", f"loss_max_{name}"),
                make=partial(measuring, *model, config.max_tokens, config.precision),
                worker_bytes=config.batch_bytes,
                num_gpus=gpus_per_worker(config.device),
            ),
        ),
        code_version=CODE_VERSION,
        parameters=parameters,
        batch_bytes=config.batch_bytes,
        summarize=partial(_summarize, f"loss_tokens_{name}"),
    )


def _summarize(column: str, read: ColumnReader) -> dict[str, int]:
    import pyarrow.compute as pc

    tokens = read(column)
    without = pc.sum(pc.equal(tokens, 0), min_count=0).as_py()
    return {"in": len(tokens), "measured": len(tokens) - without, "without_tokens": without}
