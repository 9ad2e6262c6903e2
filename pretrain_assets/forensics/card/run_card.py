"""Everything that a run card shows of a checkpoint, as plain values.

Invariant: computed from the checkpoint, its run's history and the pinned table alone, offline and without a clock: the
same inputs give the same card. It names no host and no place; what a run or a version lacks is one sentence in
`missing`, never a guess.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from pretrain_assets.config import Recipe
from pretrain_assets.curate.funnel import Funnel, funnel
from pretrain_assets.errors import PretrainError, ReplacedError
from pretrain_assets.forensics.card.history import History, history_of
from pretrain_assets.forensics.card.lineage import ColumnMade, DataLineage, columns_made, data_lineage, public
from pretrain_assets.forensics.card.rows import Seen, Source, exposures_of, sources_of
from pretrain_assets.forensics.card.sample import Sample, sample_of
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.contamination.contamination import ContaminationInTime, contamination_in_time
from pretrain_assets.forensics.ledger import RunLedger, ledger_of
from pretrain_assets.forensics.lineage import lineage_of
from pretrain_assets.forensics.subject import metrics_of, table_of
from pretrain_assets.launch.contract import read_result
from pretrain_assets.recipes import num_parameters
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin
from pretrain_assets.train import checkpoint as checkpoints

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Question:
    """How to ask further."""

    asks: str
    """What it answers."""
    command: str
    """The command, to be given where the project lies."""


@dataclass(frozen=True, kw_only=True)
class RunCard:
    """A checkpoint, where its data come from, what it saw of them, and how it went."""

    run: str
    """Name of the run's folder."""
    recipe: Recipe
    """What it was told to do."""
    step: int
    """Optimizer steps done by the checkpoint."""
    total_steps: int
    """Steps of the whole run."""
    steps_per_epoch: int | None
    """Steps of the checkpoint's epoch."""
    tokens_seen: int
    """Tokens trained on, padding left out."""
    train_loss: float | None
    """Newest training loss in the passport."""
    train_loss_step: int | None
    """Step that it was measured at."""
    val_loss: float | None
    """Newest loss on the held-out rows."""
    val_loss_step: int | None
    """Step that it was measured at."""
    table: str
    """Name of the table."""
    pin: str
    """`table-id@version` that it was trained on."""
    tag: str
    """Tag that names that version."""
    digest: str
    """Of the checkpoint's files: equal for bitwise equal runs."""
    code_version: str
    """Release of pretrain_assets that trained it."""
    tokenizer: str
    """Name of the tokenizer."""
    vocab_size: int
    """Its number of tokens."""
    num_parameters: int
    """Weights of the model, as the trainer counts them."""
    status: str | None
    """How the run ended: `done`, `stopped` or `failed`; None where it has no result."""
    checkpoints: tuple[int, ...]
    """Steps whose checkpoints are there, up to this one."""
    replay_of: Mapping[str, Any] | None
    """`config.ReplayOf` of the passport: the checkpoint that it replays without some documents; None for other runs."""
    lineage: DataLineage | None
    """Source files to checkpoint."""
    columns: tuple[ColumnMade, ...]
    """Columns of the pinned version."""
    funnel: Funnel | None
    """What the filter keeps of the pinned version, term by term."""
    ledger: RunLedger | None
    """What became of every row and token."""
    history: History
    """Losses, evaluations and speed."""
    exposures: tuple[Seen, ...]
    """Documents by how often they were seen, fewest times first."""
    sources: tuple[Source, ...]
    """Training rows by source, most tokens first."""
    contamination: ContaminationInTime | None
    """Which checkpoints' scores on evaluation sets stand."""
    sample: Sample | None
    """What the model wrote at the end, and where that may come from."""
    questions: tuple[Question, ...]
    """How to ask further."""
    missing: Mapping[str, str]
    """Why a part is not there, by its name, in a sentence."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with what the verdicts amount to."""
        facts = asdict(self)
        if self.ledger:
            facts["ledger"] = self.ledger.to_dict()
        if self.contamination:
            facts["contamination"]["stands"] = self.contamination.stands
        if self.sample:
            facts["sample"]["attribution"]["verdict"] = self.sample.attribution.verdict
        return facts


def make_run_card(location: Location, checkpoint: Checkpoint) -> RunCard:
    """Collect what there is to say of a checkpoint.

    Args:
        location: The project's table; see `table_of`.
        checkpoint: What the card is of.

    Raises:
        TableError: the table is another one, or the pinned version is gone.
        ReplacedError: a run that goes on replaced the checkpoint meanwhile.
    """
    passport, recipe, run_dir = checkpoint.passport, checkpoint.recipe, checkpoint.run_dir
    run = run_dir.rstrip("/").rsplit("/", 1)[-1]
    location = table_of(run_dir, checkpoint.pin, location)
    dataset = open_pin(location, checkpoint.pin)
    parts = _Parts({location.uri: location.table_name, location.database_uri: "the database", run_dir: run})
    result = read_result(run_dir)
    total_steps = passport["budget"]["total_steps"]
    history = history_of(
        metrics_of(run_dir),
        result,
        step=checkpoint.step,
        log_every=recipe.execution.log_every,
        total_steps=total_steps,
    )
    parts.note_gaps(history)
    return RunCard(
        run=run,
        recipe=recipe,
        step=checkpoint.step,
        total_steps=total_steps,
        steps_per_epoch=passport["budget"].get("steps_per_epoch"),
        tokens_seen=passport["tokens_seen"],
        **{name: passport.get(name) for name in ("train_loss", "train_loss_step", "val_loss", "val_loss_step")},
        table=location.table_name,
        pin=passport["pin"],
        tag=passport["tag"],
        digest=checkpoints.digest(checkpoint.uri),
        code_version=passport["code_version"],
        tokenizer=public(passport["tokenizer"]["name"]),
        vocab_size=passport["tokenizer"]["vocab_size"],
        num_parameters=num_parameters(recipe, passport["tokenizer"]["vocab_size"]),
        status=result["status"] if result else None,
        checkpoints=tuple(step for step in reversed(checkpoints.steps(run_dir)) if step <= checkpoint.step),
        replay_of=passport.get("replay_of"),
        lineage=parts.get("lineage", lambda: data_lineage(dataset, lineage_of(location, checkpoint))),
        columns=columns_made(dataset, recipe.data),
        funnel=parts.get("funnel", lambda: funnel(dataset, recipe.data.filter, count_column=recipe.data.count_column)),
        ledger=parts.get("ledger", lambda: replace(ledger_of(location, checkpoint), run=run)),
        history=history,
        exposures=exposures_of(location, checkpoint),
        sources=parts.get("sources", lambda: sources_of(dataset, recipe.data)) or (),
        contamination=parts.get("contamination", lambda: _contamination(location, checkpoint, run)),
        sample=parts.get("sample", lambda: sample_of(location, checkpoint, result, parts.told)),
        questions=_questions(checkpoint),
        missing=parts.missing,
    )


class _Parts:
    """Parts of the card that may fail for a reason that people can read: what fails is missing, with that reason."""

    def __init__(self, names: Mapping[str, str]):
        """`names` gives the public name of every place that a reason may speak of."""
        self._names, self.missing = names, dict[str, str]()

    def get(self, part: str, make: Callable[[], T]) -> T | None:
        """What `make` gives; None, and the reason in `missing`, where it raises an error for people."""
        try:
            return make()
        except ReplacedError:  # ask about the newer one
            raise
        except PretrainError as error:
            self.missing[part] = self.told(str(error))
            return None

    def told(self, sentence: str) -> str:
        """A sentence with the names of places instead of them."""
        for place, name in self._names.items():
            sentence = sentence.replace(place, name)
        return str(public(sentence))

    def note_gaps(self, history: History) -> None:
        """Say what a run's records lack."""
        if not history.points:
            self.missing["metrics"] = "The run has no training records, so losses are those of the passport alone."
        if not history.evaluations:
            self.missing["evaluation"] = "No evaluation was recorded: `pretrain evaluate` makes one."
        elif not history.evaluations[-1].by_source:
            self.missing["evaluation"] = "The records do not tell sources apart: `pretrain evaluate` does."


def _contamination(location: Location, checkpoint: Checkpoint, run: str) -> ContaminationInTime:
    found = contamination_in_time(location, checkpoint)
    seen = tuple(replace(one, source=public(one.source)) for one in found.sightings)
    return replace(found, checkpoint=run, sightings=seen)


def _questions(checkpoint: Checkpoint) -> tuple[Question, ...]:
    """Commands for this very run, by the name of its folder."""
    run = shlex.quote(checkpoint.run_dir.rstrip("/").rsplit("/", 1)[-1])
    asks = {
        "the documents of one step, with their places in its blocks": f"seen {run} --step {max(1, checkpoint.step)}",
        "when a document was trained on, or why not": f"where {run} --doc ID",
        "documents about something, each with when it was seen": f'search "words" --checkpoint {run}',
        "where a text may come from: verbatim spans and near documents": f'attribute {run} --text "..."',
        "rows and tokens in, and what became of them": f"ledger {run}",
        "which models saw a document, and how to take it out": "receipt --doc ID",
        "the same run without some documents": f"replay {run} --without ids.txt",
    }
    return tuple(Question(asks=what, command=f"pretrain {verb}") for what, verb in asks.items())
