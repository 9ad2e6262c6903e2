"""The ledger of a checkpoint: every row and token on the way into it, stage by stage and epoch by epoch.

Invariant: in = out by reason in every section, and what leaves one section enters the next; whatever does not add up is
a gap, in words. Stages are read from the table's records, epochs from the passport, and both are held against the
pinned version itself: its rows, its filter, and its plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import DataConfig
from pretrain_assets.curate.funnel import Count, Funnel, funnel
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.forensics.lineage import lineage_of
from pretrain_assets.forensics.subject import table_of
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.table.lineage import LineageRecord
from pretrain_assets.table.storage import Location
from pretrain_assets.table.verify import ledger_closes
from pretrain_assets.table.versions import open_pin, records

if TYPE_CHECKING:
    import lance

CAME = ("in", "repeated")
"""Lines of an epoch's ledger that come in; the others go out."""
NO_LINES = (("tokens", "planned"), ("tokens", "padded"))
"""Lines that are none of an account: a sum of others, and places of blocks without a token."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """What came in and what became of it, in one unit."""

    unit: str
    """`rows`, `tokens` (ends of text included), `tokens of text` (without), `places in blocks`, or `documents`: those
    that the order holds, as often as it does."""
    came: dict[str, int]
    """What came in, by name."""
    went: dict[str, int]
    """What became of it, by reason."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A stage, the filter, an epoch, or a part of a mixture in one."""

    name: str
    """Such as `deduped` or `epoch 0`."""
    detail: str
    """What it is of: tags, or the filter."""
    accounts: tuple[Account, ...]
    """One for each unit."""
    gaps: tuple[str, ...] = ()
    """What does not add up, in words."""


@dataclass(frozen=True, kw_only=True)
class RunLedger:
    """All sections of a checkpoint's ledger."""

    run: str
    """Folder of the checkpoint."""
    pin: str
    """Table version that it was trained on."""
    step: int
    """Optimizer steps done."""
    tokens_seen: int
    """Tokens trained on, by its passport."""
    sections: tuple[Section, ...]
    """In flow order: stages, the pinned version, the filter, epochs."""

    @property
    def gaps(self) -> tuple[str, ...]:
        """What does not add up anywhere; empty where everything does."""
        return tuple(f"{section.name}: {gap}" for section in self.sections for gap in section.gaps)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with `gaps` and whether the ledger `closes`."""
        return {**asdict(self), "gaps": list(self.gaps), "closes": not self.gaps}


def ledger_of(location: Location, checkpoint: Checkpoint) -> RunLedger:
    """Account for every row and token behind a checkpoint.

    Args:
        location: The project's table; see `table_of`.
        checkpoint: Whose data are accounted for.

    Raises:
        TableError: the table or the pinned version is gone, or a record of it.
    """
    location = table_of(checkpoint.run_dir, checkpoint.pin, location)
    dataset, data = open_pin(location, checkpoint.pin), checkpoint.recipe.data
    history = [record for record in records(dataset) if record.version <= dataset.version]
    chain = [record.stage for record in reversed(lineage_of(location, checkpoint).records)]
    terms = f"({data.held_out_filter}) IS NOT TRUE AND ({data.filter})"  # so that what is held out comes off first
    kept = funnel(dataset, terms, count_column=data.count_column)
    return RunLedger(
        run=checkpoint.uri,
        pin=str(checkpoint.pin),
        step=checkpoint.step,
        tokens_seen=checkpoint.passport["tokens_seen"],
        sections=(
            *(_stage([record for record in history if record.stage == stage]) for stage in chain),
            _version(dataset, history),
            _filter(kept, data),
            *_epochs(location, checkpoint, kept),
        ),
    )


def _section(name: str, detail: str, accounts: Iterable[Account], gaps: Iterable[str] = ()) -> Section:
    """A section whose accounts' gaps stand before others."""
    held = tuple(accounts)
    own = [
        f"{sum(a.came.values()):,} {a.unit} came in, {sum(a.went.values()):,} are accounted for"
        for a in held
        if sum(a.came.values()) != sum(a.went.values())
    ]
    return Section(name=name, detail=detail, accounts=held, gaps=(*own, *gaps))


def _stage(made: Sequence[LineageRecord]) -> Section:
    """All that one stage has done for the version, over its own versions."""
    went = Counter[str]()
    for record in made:
        went.update(record.ledger)
    tags = [record.tag for record in made]
    detail = tags[0] if len(tags) == 1 else f"{len(tags)} versions, {tags[0]} to {tags[-1]}"
    gaps = [f"{record.tag} does not close" for record in made if not ledger_closes(record).passed]
    return _section(
        made[0].stage, detail, [Account(unit="rows", came={"in": went.pop("in", 0)}, went=dict(went))], gaps
    )


def _version(dataset: lance.LanceDataset, history: Sequence[LineageRecord]) -> Section:
    """The rows of the pinned version: all that were ever ingested, less those deleted."""
    came = {record.tag: record.rows for record in history if record.stage == "ingested" and record.rows}
    gone = {f"{record.tag}, deleted": record.rows for record in history if record.stage == "deleted"}
    went = {**gone, f"version {dataset.version}": dataset.count_rows()}
    return _section("table", f"version {dataset.version}", [Account(unit="rows", came=came, went=went)])


def _filter(kept: Funnel, data: DataConfig) -> Section:
    """What the filter keeps, what is held out, and what each of its terms removes of the rest, in order."""
    held_out, *terms = kept.steps
    names = {held_out.number: "held out"}
    names |= {step.number: f"term {number}, {step.text}" for number, step in enumerate(terms, 1)}
    version = f"version {kept.version}"

    def account(unit: str, amount: Callable[[Count], int]) -> Account:
        went = {names[step.number]: amount(step.in_order) for step in kept.steps}
        return Account(unit=unit, came={version: amount(kept.total)}, went={**went, "kept": amount(kept.kept)})

    units = {"rows": lambda count: count.rows, f"{kept.unit} of text": lambda count: count.amount}
    return _section("filter", data.filter, [account(unit, amount) for unit, amount in units.items()])


def _epochs(location: Location, checkpoint: Checkpoint, kept: Funnel) -> Iterator[Section]:
    """Every epoch of the passport, and the parts of its mixture."""
    passport, step = checkpoint.passport, checkpoint.step
    schedule = schedule_of(location, checkpoint.pin, checkpoint.recipe)
    plans = schedule.ledgers(step)
    entered = {"rows": kept.kept.rows, "tokens": kept.kept.amount + kept.kept.rows}
    for epoch in dict.fromkeys([*plans, *passport["ledger"]]):
        lines = passport["ledger"].get(epoch, {})
        gaps = [
            f"{lines.get(f'{unit}_in', 0):,} {unit} came in; the filter keeps {count:,}"
            for unit, count in entered.items()
            if lines.get(f"{unit}_in", 0) != count
        ]
        if lines != plans.get(epoch):
            gaps.append("the passport does not say what the plan says")
        blocks = lines.get("blocks", 0)
        places = Account(
            unit="places in blocks",
            came={f"{blocks:,} blocks": blocks * passport["seq_len"]},
            went={name: lines.get(f"tokens_{name}", 0) for name in ("trained", "in_holes", "padded")},
        )
        accounts = [*_accounts(lines), places, *([_documents(schedule, int(epoch), step)] if epoch in plans else [])]
        yield _section(f"epoch {epoch}", f"up to step {step}", accounts, gaps)
        for part, of_part in lines.get("parts", {}).items():
            yield _section(f"epoch {epoch}, part {part}", f"up to step {step}", _accounts(of_part))


def _documents(schedule: Schedule, epoch: int, last_step: int) -> Account:
    """What became of the documents in an epoch's order, up to a step."""
    plan, (last_epoch, cycle) = schedule.plan(epoch), schedule.locate(last_step)
    steps = schedule.steps_in(epoch) if epoch < last_epoch else cycle // schedule.cycles_per_step + 1
    there = plan.position(steps * schedule.cycles_per_step)
    reached, begun = int(there.docs_consumed.sum()), int((there.tail_tokens > 0).sum())
    went = {"read to their end": reached - begun, "read in part": begun, "not_reached": len(plan.order) - reached}
    return Account(unit="documents", came={"in": len(plan.order)}, went=went)


def _accounts(lines: Mapping[str, Any]) -> Iterator[Account]:
    """Rows and tokens of an epoch or a part, by the lines of its ledger."""
    for unit in ("rows", "tokens"):
        own = {name.removeprefix(f"{unit}_"): count for name, count in lines.items() if name.startswith(f"{unit}_")}
        came = {name: own.pop(name) for name in CAME if name in own}
        yield Account(unit=unit, came=came, went={n: c for n, c in own.items() if (unit, n) not in NO_LINES})
