"""What a run saw at one optimizer step: the documents, where they lie in its blocks, and the text of each part.

Invariant: computed from the run's recipe and pin alone, so a run without any checkpoint can be asked as well, and about
steps that it has not made yet; the answer is what the loader emits, token by token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain_assets.curate.explain import preview, shown
from pretrain_assets.errors import ConfigError, TokenizerError
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.forensics.subject import Span, Subject, find_subject
from pretrain_assets.loader.exposure import Exposure, documents
from pretrain_assets.table.lookup import rows_by_id
from pretrain_assets.table.predicate import in_list
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin
from pretrain_assets.tokenize.pretrained import tokenizer_of

PREVIEW_TOKENS = 200
"""Tokens of a part that are decoded to show how it begins."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SeenPart:
    """A part of a document in one block."""

    id: int
    """The table's row number."""
    doc_id: str | None
    """The source's own id; None if the table has none."""
    source: str | None
    """Where the document is from; None if the table does not say."""
    score: float | None
    """The source's quality score."""
    span: Span
    """Where the part lies, and how many tokens it has."""
    text: str | None
    """The part (or how it begins), decoded from its tokens; how the document begins, where `is_decoded` is false."""
    is_decoded: bool
    """Whether `text` is of the part itself: false where the tokenizer is not to be had."""


@dataclass(frozen=True, kw_only=True)
class SeenStep:
    """One step of a run, or what one rank or block had of it."""

    run: str
    """Folder of the checkpoint, or of a run without one."""
    pin: str
    """Table version it trains on."""
    step: int
    """Optimizer step, from 1."""
    done: bool
    """Whether it is among the steps that the checkpoint has done."""
    total_steps: int
    """Steps of the whole run."""
    epoch: int
    """Epoch of the step, from 0."""
    ranks: int | None
    """Ranks that made the step; None where that is not known, or it has not been made."""
    blocks: tuple[int, ...]
    """Blocks looked at, by their number in the epoch."""
    tokens: int
    """Tokens of documents in them, end of text included."""
    tokens_padded: int
    """Places in them without: padding, where a split has run out, and holes (`data.without`)."""
    num_documents: int
    """Different documents in them."""
    num_parts: int
    """Parts of documents in them."""
    parts: tuple[SeenPart, ...]
    """The first of them, in block order."""


def seen_at(
    which: str | None,
    step: int,
    *,
    location: Location,
    runs_uri: str,
    rank: int | None = None,
    ranks: int | None = None,
    block: int | None = None,
    limit: int | None = 20,
    whole: bool = False,
    tokenizer: str | None = None,
) -> SeenStep:
    """The documents that a run saw (or, ahead of it, will see) at a step.

    Args:
        which: Folder of a run or checkpoint, name of a run or recipe, or None for the run that was changed last.
        step: Optimizer step, from 1.
        location: The project's table; see `table_of`.
        runs_uri: Folder of all runs.
        rank: Only what this rank had, from 0.
        ranks: Number of ranks; None: as many as made the step, by the run's metrics.
        block: Only this block of the step, by its number in the epoch.
        limit: Parts of documents to look up; None: all.
        whole: The text of each part as it stands, instead of how it begins in one line.
        tokenizer: Place of the tokenizer, as for `tokenizer_of`.

    Raises:
        CheckpointError: no such run or checkpoint.
        ConfigError: the run has no such step, or the step no such rank or block.
        TableError: its table or version is gone.
    """
    subject = find_subject(which, runs_uri, location, ranks=ranks)
    recipe = subject.recipe
    schedule = schedule_of(subject.location, subject.pin, recipe)
    total_steps = schedule.total_steps(max_steps=recipe.train.max_steps, epochs=recipe.train.epochs)
    _check_step(step, total_steps, recipe.name)
    epoch, cycle = schedule.locate(step)
    blocks = _blocks(subject, step, cycle, rank, block)
    exposures = [exposure for exposure in documents(schedule, step) if exposure.block in blocks]
    tokens = sum(exposure.tokens for exposure in exposures)
    return SeenStep(
        run=subject.uri,
        pin=str(subject.pin),
        step=step,
        done=step <= subject.step,
        total_steps=total_steps,
        epoch=epoch,
        ranks=subject.ranks_at(step),
        blocks=tuple(blocks),
        tokens=tokens,
        tokens_padded=len(blocks) * recipe.data.seq_len - tokens,
        num_documents=len({exposure.doc_id for exposure in exposures}),
        num_parts=len(exposures),
        parts=tuple(_parts(subject, exposures[:limit], tokenizer, whole)),
    )


def _check_step(step: int, total_steps: int, name: str) -> None:
    if 1 <= step <= total_steps:
        return
    why = "steps count from 1, and before the first nothing was seen" if step < 1 else "the run ends before it"
    raise ConfigError(f"There is no step {step}: {why}. {name} has steps 1 to {total_steps:,}; give --step N.")


def _blocks(subject: Subject, step: int, cycle: int, rank: int | None, block: int | None) -> dict[int, None]:
    """The blocks of a step that are asked for, by their numbers in the epoch."""
    num_splits, cycles = subject.recipe.data.num_splits, subject.recipe.cycles_per_step
    first = cycle * num_splits
    blocks = range(first, first + cycles * num_splits)
    if rank is not None:
        ranks = subject.ranks_at(step)
        if ranks is None:
            raise ConfigError(
                f"How many ranks made step {step} is not known: the run has not made it yet, or its metrics are lost. "
                "Give their number with --ranks N."
            )
        if not 0 <= rank < ranks:
            raise ConfigError(f"There is no rank {rank}: step {step} was made by ranks 0 to {ranks - 1}")
    if block is not None and block not in blocks:
        raise ConfigError(f"Step {step} has no block {block}: it has the blocks {blocks[0]:,} to {blocks[-1]:,}")
    found = [b for b in ([block] if block is not None else blocks)]
    mine = [b for b in found if rank is None or subject.rank_of(b % num_splits, step) == rank]
    if not mine:
        owner = subject.rank_of(found[0] % num_splits, step)
        raise ConfigError(f"Block {block} of step {step} was rank {owner}'s; give --rank {owner}, or none")
    return dict.fromkeys(mine)


def _parts(subject: Subject, exposures: Sequence[Exposure], place: str | None, whole: bool) -> Iterator[SeenPart]:
    """Look the documents up, and decode their parts."""
    ids = [exposure.doc_id for exposure in exposures]
    rows = rows_by_id(subject.location, subject.pin, ids, ["doc_id", "source", "score", "text"])
    texts = _decoded(subject, exposures, place, None if whole else PREVIEW_TOKENS)
    for exposure in exposures:
        row: Mapping[str, Any] = rows.get(exposure.doc_id, {})
        begins = preview(row["text"]) if "text" in row else None
        yield SeenPart(
            id=exposure.doc_id,
            doc_id=row.get("doc_id"),
            source=row.get("source"),
            score=shown(row.get("score")),
            span=subject.span(exposure),
            text=begins if texts is None else next(texts) if whole else preview(next(texts)),
            is_decoded=texts is not None,
        )


def _decoded(
    subject: Subject, exposures: Sequence[Exposure], place: str | None, most_tokens: int | None
) -> Iterator[str] | None:
    """The first tokens of each part as text, in order; None without the tokenizer."""
    try:
        codec = tokenizer_of(subject.tokenizer, place)
    except TokenizerError as error:
        if place:
            raise
        _log.info("parts are shown by how their documents begin: %s", error)
        return None
    column = subject.recipe.data.token_column
    among = in_list("id", {exposure.doc_id for exposure in exposures})
    table = open_pin(subject.location, subject.pin).to_table(columns=["id", column], filter=among)
    lists = dict(zip(table["id"].to_pylist(), table[column], strict=True))  # Arrow's, of which a part is looked at

    def tokens(exposure: Exposure) -> list[int]:
        count = min(exposure.tokens, most_tokens or exposure.tokens)
        found: list[int] = lists[exposure.doc_id].values.slice(exposure.doc_start, count).to_pylist()
        return found

    return (codec.decode(tokens(exposure)) for exposure in exposures)
