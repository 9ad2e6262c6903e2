"""When a run trained on documents: every span of them, step by step, and what became of the rest of their tokens.

Invariant: the exact inverse of `seen`. Every token of a document that the run's filter keeps is seen, to come, masked
or left out for a reason, in each epoch and draw; a document that was not seen has a reason that is true.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pretrain_assets.curate.explain import preview, shown
from pretrain_assets.errors import TableError
from pretrain_assets.forensics.chosen import is_id
from pretrain_assets.forensics.exposure import turns_of
from pretrain_assets.forensics.subject import Span, Subject, find_subject
from pretrain_assets.forensics.why import Why, deletions, why_not_yet, why_outside
from pretrain_assets.loader.planner import Planner
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.table.lookup import rows_by_id
from pretrain_assets.table.predicate import in_list
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import open_pin, records

_REMEDY = "Give the table's id, or the source's own doc_id; `pretrain search WORDS` shows the ids of what it finds."


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Tokens of one draw that no step trains on."""

    epoch: int
    """Epoch, from 0."""
    reason: str
    """The ledger's: `partial_step`, `end_of_split`, `beyond_splits` or `thinned`."""
    tokens: int
    """How many."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """One document in a run."""

    id: int
    """The table's row number."""
    doc_id: str | None
    """The source's own id; None where the pinned version does not have the row, and so for what follows."""
    source: str | None
    """Where the document comes from."""
    score: float | None
    """The source's quality score."""
    preview: str | None
    """How it begins."""
    tokens: int | None
    """Tokens of one draw of it, end of text included; None where it was not tokenized."""
    times: int
    """Draws of it with at least one token seen."""
    seen: tuple[Span, ...]
    """What was trained on up to the step, in order."""
    to_come: tuple[Span, ...]
    """What the run trains on after the step, up to its last one."""
    past_the_end: tuple[Span, ...]
    """What would follow in the last epoch if the run were longer."""
    masked: tuple[Span, ...]
    """What is in holes instead (`data.without`), up to the run's last step."""
    left_out: tuple[LeftOut, ...]
    """What no step trains on, in the epochs of the run."""
    why: Why | None
    """Why nothing of it was seen; None where something was."""
    deleted: tuple[str, ...]
    """Tags of the deletions that have taken it out of later versions; several where the records do not say which."""


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Documents in a run, up to a step."""

    run: str
    """Folder of the checkpoint, or of a run without one."""
    pin: str
    """Table version that it trains on."""
    step: int
    """Optimizer steps done."""
    total_steps: int
    """Steps of the whole run."""
    documents: tuple[Where, ...]
    """In the order asked for."""


def where(
    which: str | None, docs: Sequence[str | int], *, location: Location, runs_uri: str, ranks: int | None = None
) -> Whereabouts:
    """Find every place of documents in a run.

    Args:
        which: Folder of a run or checkpoint, name of a run or recipe, or None for the run that was changed last.
        docs: Documents: the table's `id`, or the source's own `doc_id` where that is not a number.
        location: The project's table; see `table_of`.
        runs_uri: Folder of all runs.
        ranks: Number of ranks, where the metrics do not say or another number is of interest.

    Raises:
        CheckpointError: no such run or checkpoint.
        ConfigError: that many ranks cannot share the splits.
        TableError: its table or version is gone, or no document is named so.
    """
    subject = find_subject(which, runs_uri, location, ranks=ranks)
    ids = list(dict.fromkeys(_ids(subject, docs)))
    planner = Planner(subject.location, subject.pin, subject.recipe.data)
    schedule = Schedule(planner.plan, subject.recipe.cycles_per_step)
    train = subject.recipe.train
    total_steps = schedule.total_steps(max_steps=train.max_steps, epochs=train.epochs)
    return Whereabouts(
        run=subject.uri,
        pin=str(subject.pin),
        step=subject.step,
        total_steps=total_steps,
        documents=tuple(_places(subject, planner, schedule, ids, total_steps)),
    )


def _places(
    subject: Subject, planner: Planner, schedule: Schedule, ids: Sequence[int], total_steps: int
) -> Iterator[Where]:
    location, pin, data = subject.location, subject.pin, subject.recipe.data
    outside = why_outside(location, pin, data, ids)
    kept = [i for i in ids if i not in outside]
    made = turns_of(planner, schedule, kept, range(schedule.locate(max(total_steps, 1))[0] + 1))
    rows = rows_by_id(location, pin, ids, ["doc_id", "source", "score", "text", data.count_column])
    deleted = _deleted(subject, rows)
    for i in ids:
        row, mine = rows.get(i, {}), made.get(i, [])
        spans = sorted(subject.span(one) for turn in mine for one in turn.exposures)
        seen = tuple(span for span in spans if span.step <= subject.step)
        not_yet = None if seen or not mine else why_not_yet(mine, step=subject.step, total_steps=total_steps)
        tokens = row.get(data.count_column)
        yield Where(
            id=i,
            doc_id=row.get("doc_id"),
            source=row.get("source"),
            score=shown(row.get("score")),
            preview=preview(row["text"]) if "text" in row else None,
            tokens=None if tokens is None else tokens + 1,
            times=sum(span.doc_start == 0 for span in seen),
            seen=seen,
            to_come=tuple(span for span in spans if subject.step < span.step <= total_steps),
            past_the_end=tuple(span for span in spans if span.step > total_steps),
            masked=tuple(sorted(subject.span(s) for turn in mine for s in turn.masked if s.step <= total_steps)),
            left_out=tuple(
                LeftOut(epoch=turn.epoch, reason=reason, tokens=count)
                for turn in mine
                for reason, count in turn.left_out.items()
            ),
            why=outside.get(i, not_yet),
            deleted=deleted.get(i, ()),
        )


def _deleted(subject: Subject, ids: Iterable[int]) -> dict[int, tuple[str, ...]]:
    """Which rows of the pinned version the newest one no longer has, and the tags of what took them away."""
    newest, wanted = open_dataset(subject.location), list(ids)
    if not wanted or newest.version == subject.pin.version:
        return {}
    there = newest.to_table(columns=["id"], filter=in_list("id", wanted))["id"].to_pylist()
    history, gone = records(newest), sorted(set(wanted).difference(there))
    by = {i: deletions(history, i, after=subject.pin.version, upto=newest.version) for i in gone}
    return {i: tuple(record.tag for record in found) or ("unknown",) for i, found in by.items()}


def _ids(subject: Subject, docs: Sequence[str | int]) -> Iterator[int]:
    """The ids of documents as people name them, in that order.

    Raises:
        TableError: no document is named so.
    """
    names = [doc for doc in docs if isinstance(doc, str) and not is_id(doc)]
    named = _named(subject, names) if names else {}
    for doc in docs:
        if doc in named:
            yield from named[str(doc)]
        elif int(doc) < 2**63:
            yield int(doc)
        else:
            raise TableError(f"{doc} is the id of no row: it has more than 63 bits. {_REMEDY}")


def _named(subject: Subject, names: Sequence[str]) -> dict[str, list[int]]:
    """The rows with each of these texts as `doc_id`: of the pinned version, else of the newest."""
    found: dict[str, list[int]] = {}
    for dataset in (open_pin(subject.location, subject.pin), open_dataset(subject.location)):
        wanted = [name for name in names if name not in found]
        if not wanted or "doc_id" not in dataset.schema.names:
            continue
        for row in dataset.to_table(columns=["id", "doc_id"], filter=in_list("doc_id", wanted)).to_pylist():
            found.setdefault(row["doc_id"], []).append(row["id"])
    missing = next((name for name in names if name not in found), None)
    if missing is not None:
        raise TableError(f"{subject.location.uri} has no document with the doc_id {missing[:200]!r}. {_REMEDY}")
    return found
