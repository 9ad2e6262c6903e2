"""`model/checkpoint`: torchrun on a pinned version, one partition per recipe.

The run is a separate process tree (see launch/): it reports through Pipes while it trains, dies with this step, and the
next materialization resumes it from its newest complete checkpoint.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dagster as dg

from pretrain_assets import recipes
from pretrain_assets.assets.events import check_result, md, user_errors
from pretrain_assets.assets.keys import CHECKPOINT, GROUP, TOKENIZED, TRAINING_POOL
from pretrain_assets.assets.launchpad import changes_in, recipe_schema
from pretrain_assets.assets.pins import input_pin, record_at
from pretrain_assets.assets.resources import CorpusResource, LauncherResource
from pretrain_assets.config import Recipe, RunSpec, from_dict, override
from pretrain_assets.curate.filters import resolve
from pretrain_assets.errors import CheckpointError, TableError
from pretrain_assets.launch.contract import finished_result
from pretrain_assets.launch.local import run_local
from pretrain_assets.report.plots import line, lines
from pretrain_assets.report.text import mixture_text
from pretrain_assets.table.lineage import Pin, digest
from pretrain_assets.table.tags import protect_run
from pretrain_assets.table.verify import Finding, filters_disjoint
from pretrain_assets.table.versions import open_pin
from pretrain_assets.train.metrics import read_metrics
from pretrain_assets.train.passport import ledger_gaps, missing_fields
from pretrain_assets.train.spec import make_spec
from pretrain_assets.train.trackers import check_trackers

# Dagster's own Pipes session calls this preview function of Dagster.
warnings.filterwarnings("ignore", message="Function `PipesMessageReader.expected_writer_count`")

recipe_partitions = dg.StaticPartitionsDefinition(list(recipes.RECIPES))


@dg.asset(
    key=CHECKPOINT,
    deps=[TOKENIZED],
    group_name=GROUP,
    kinds={"pytorch"},
    partitions_def=recipe_partitions,
    code_version=digest([recipe().lasting for recipe in recipes.RECIPES.values()]),
    pool=TRAINING_POOL,
    config_schema=recipe_schema(),
    description="A trained model, and the passport of exactly the rows it saw. One partition per recipe.",
)
def checkpoint(
    context: dg.AssetExecutionContext, corpus: CorpusResource, launcher: LauncherResource
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Train the partition's recipe on the version that the tokenized materialization names."""
    location = corpus.location()
    with user_errors():
        pin = input_pin(context, TOKENIZED, location, "tokenized")
        tag = record_at(location, pin, "tokenized").tag
        asked = override(recipes.get(context.partition_key), changes_in(context.op_execution_context.op_config))
        recipe = resolve(asked, open_pin(location, pin).schema.names)
        spec = make_spec(location, pin, tag, recipe, launcher.runs())
        check_trackers(recipe.execution.trackers)
        protect_run(location, pin, spec.run_dir)
        result = train(context, spec, launcher.nproc_per_node)
    return dg.MaterializeResult(
        metadata=run_metadata(spec, result), data_version=dg.DataVersion(f"{spec.pin}#{result['digest']}")
    )


def train(context: dg.AssetExecutionContext, spec: RunSpec, nproc: int) -> dict[str, Any]:
    """Run to the end, streaming progress into the event log; a finished run is not started again.

    Raises:
        CheckpointError: the run failed, or was stopped before its last step.
    """
    finished = finished_result(spec)
    if finished:
        context.log.info(f"{spec.run_dir} is complete: nothing to train")
        return finished
    with dg.open_pipes_session(
        context=context.op_execution_context,
        context_injector=dg.PipesTempFileContextInjector(),
        message_reader=dg.PipesTempFileMessageReader(),
    ) as session:
        observe = _observer(context, session)
        env = {**os.environ, **session.get_bootstrap_env_vars()}
        result = run_local(spec, nproc, env=env, while_running=observe)
        observe()
    if result["status"] != "done":
        raise CheckpointError(
            f"Training {spec.recipe.name} {result['status']}: {result.get('error', 'on request')}. Checkpoints are in "
            f"{spec.run_dir}; materialize again to resume from the newest."
        )
    return result


def _observer(context: dg.AssetExecutionContext, session: dg.PipesSession) -> Callable[[], None]:
    """A function that turns new progress messages into observations, which the UI plots while the run goes on."""
    shown = 0

    def observe() -> None:
        nonlocal shown
        messages = session.get_custom_messages()
        for message in messages[shown:]:
            if message.get("kind") == "progress":
                numbers = {name: v for name, v in message.items() if isinstance(v, (int, float))}
                context.log_event(
                    dg.AssetObservation(asset_key=CHECKPOINT, partition=context.partition_key, metadata=numbers)
                )
        shown = len(messages)

    return observe


def run_metadata(spec: RunSpec, result: dict[str, Any]) -> dict[str, Any]:
    """Metadata of a checkpoint: its data, its losses, its files, and its curves."""
    records = read_metrics(spec.run_dir)
    curve = _curves(records)
    last = {name: value for record in records for name, value in record.items()}
    pin = Pin.parse(spec.pin)
    return {
        "plot": md(line("training loss", *curve("loss"))),
        "validation_plot": md(line("validation loss", *curve("val_loss"))),
        "training_plots": md(lines({name: curve(key) for name, key in TRAINING_PLOTS.items()})),
        "lance/version": pin.version,
        "lance/tag": spec.tag,
        "lance/table_id": pin.table_id,
        "lance/pin": spec.pin,
        "lance/uri": f"{spec.database_uri}/{spec.table_name}.lance",
        "run_dir": dg.MetadataValue.path(spec.run_dir),
        "checkpoint": dg.MetadataValue.path(result["checkpoint"]),
        "steps": result["step"],
        "tokens_seen": result["passport"]["tokens_seen"],
        **{name: round(result[name], 4) for name in LOSSES if result[name] is not None},
        **{name: round(last[name], 4) for name in VALIDATION if name in last},
        "mfu": "n/a" if last.get("mfu") is None else round(last["mfu"], 4),
        "seconds": round(result["seconds"], 1),
        **({"data_wait": round(result["data_wait"], 4)} if result.get("data_wait") is not None else {}),
        "filter": spec.recipe.data.filter,
        "held_out_filter": spec.recipe.data.held_out_filter,
        "passport": dg.MetadataValue.json(result["passport"]),
        **({"mixture": md(mixture_text(result["passport"], tablefmt="github"))} if spec.recipe.data.mixture else {}),
        "sample": dg.MetadataValue.text(result["sample"]),
    }


def _curves(records: Sequence[dict[str, Any]]) -> Callable[[str], tuple[list[float], list[float]]]:
    """The steps and values at which the records have a quantity, by its name."""

    def curve(key: str) -> tuple[list[float], list[float]]:
        found = [record for record in records if record.get(key) is not None]
        return [record["step"] for record in found], [record[key] for record in found]

    return curve


TRAINING_PLOTS = {"learning rate": "lr", "gradient norm": "grad_norm", "tokens/s": "tok_per_s"}
LOSSES = ("first_loss", "train_loss", "first_val_loss", "val_loss")
VALIDATION = ("val_perplexity", "val_bits_per_byte")
CHECKS = {
    "loss_falls": "The validation loss is finite and lower at the end than at the start.",
    "passport_complete": "The passport has every field and names the version that was trained on.",
    "ledger_closes": "Every row and token of every epoch, and of every part of a mixture, is accounted for.",
    "filters_disjoint": "No row is in both the training and the held-out set.",
}


@dg.multi_asset_check(
    name="checkpoint_checks",
    specs=[dg.AssetCheckSpec(name, asset=CHECKPOINT, blocking=True, description=text) for name, text in CHECKS.items()],
)
def checkpoint_checks(context: dg.AssetCheckExecutionContext, corpus: CorpusResource) -> Iterator[dg.AssetCheckResult]:
    """Loss finite and falling, passport complete, ledger closed, training and held-out rows disjoint."""
    event = context.instance.get_latest_materialization_event(CHECKPOINT)
    with user_errors():
        if event is None or event.asset_materialization is None:
            raise TableError(f"{CHECKPOINT.to_user_string()} has never run: materialize it first.")
        metadata = {name: value.value for name, value in event.asset_materialization.metadata.items()}
        passport: dict[str, Any] = metadata["passport"]
        recipe = from_dict(Recipe, passport["recipe"])
        dataset = open_pin(corpus.location(), Pin.parse(str(metadata["lance/pin"])))
        found = [
            _loss_falls(metadata),
            _passport_complete(passport, str(metadata["lance/pin"])),
            _ledger_closes(passport),
            filters_disjoint(dataset, recipe.data.filter, recipe.data.held_out_filter),
        ]
    for finding in found:
        yield check_result(finding, CHECKPOINT, dg.AssetCheckSeverity.ERROR)


def _loss_falls(metadata: dict[str, Any]) -> Finding:
    first, last = (float(metadata.get(name, "nan")) for name in ("first_val_loss", "val_loss"))  # metrics may be lost
    return Finding(
        name="loss_falls",
        passed=last < first,  # false for NaN as well
        description=f"validation loss {first:.4f} at the start, {last:.4f} at the end",
    )


def _passport_complete(passport: dict[str, Any], pin: str) -> Finding:
    missing = missing_fields(passport)
    same = passport.get("pin") == pin
    return Finding(
        name="passport_complete",
        passed=not missing and same,
        description=f"missing: {missing}" if missing else f"names {passport.get('pin')}, trained on {pin}",
    )


def _ledger_closes(passport: dict[str, Any]) -> Finding:
    gaps = ledger_gaps(passport)
    text = f"{passport['tokens_seen']:,} tokens trained in {len(passport['ledger'])} epochs, all accounted for"
    return Finding(name="ledger_closes", passed=not gaps, description="; ".join(gaps) or text)
