"""`model/export`: the checkpoint as a Hugging Face folder, one partition per recipe.

It is made from the checkpoint that the newest materialization of the partition names. What is there already and made
from the same is left as it is.
"""

from collections.abc import Iterator
from typing import Literal

import dagster as dg

from pretrain_assets import project
from pretrain_assets.assets.checkpoint import recipe_partitions
from pretrain_assets.assets.events import check_result, md, user_errors
from pretrain_assets.assets.keys import CHECKPOINT, EXPORT, GROUP, RETRY
from pretrain_assets.assets.pins import newest_checkpoint
from pretrain_assets.assets.resources import CorpusResource, LauncherResource
from pretrain_assets.errors import TableError
from pretrain_assets.report.model_card import model_card
from pretrain_assets.table.lineage import digest
from pretrain_assets.train.provenance import CODE_VERSION


class ExportSettings(dg.Config):
    """Launchpad settings of an export."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights."""
    tokenizer: str | None = project.setting("TOKENIZER", "") or None
    """Where a tokenizer named `hf:...` is, as `hf:<name or directory>`; others need none."""


@dg.asset(
    key=EXPORT,
    deps=[CHECKPOINT],
    group_name=GROUP,
    kinds={"huggingface"},
    partitions_def=recipe_partitions,
    code_version=digest([CODE_VERSION]),
    retry_policy=RETRY,
    description="The model for everybody: GPT2LMHeadModel safetensors, tokenizer, and a card with its data's lineage.",
)
def export(
    context: dg.AssetExecutionContext, corpus: CorpusResource, launcher: LauncherResource, config: ExportSettings
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Export the partition's newest checkpoint into a folder of its own in the run's directory."""
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.train.export import export as run

    with user_errors():
        found = find_checkpoint(newest_checkpoint(context) or context.partition_key, launcher.runs())
        made = run(
            corpus.location(),
            found.run_dir,
            found.step,
            write_card=model_card,
            dtype=config.dtype,
            tokenizer=config.tokenizer,
        )
    context.log.info(f"{made.uri}: {'written' if made.changed else 'all there already, nothing written'}")
    return dg.MaterializeResult(
        metadata={
            "card": md(made.card),
            "folder": dg.MetadataValue.path(made.uri),
            "files": dg.MetadataValue.json(made.files),
            "bytes": sum(made.files.values()),
            "changed": made.changed,
            "dtype": config.dtype,
            "checkpoint": dg.MetadataValue.path(found.uri),
            "run_dir": dg.MetadataValue.path(found.run_dir),
            "steps": found.step,
            "lance/pin": str(found.pin),
            "lance/version": found.pin.version,
            "lineage": dg.MetadataValue.json(made.lineage),
        },
        data_version=dg.DataVersion(made.digest),
    )


@dg.multi_asset_check(
    name="export_checks",
    specs=[
        dg.AssetCheckSpec(
            "logits_match",
            asset=EXPORT,
            description="transformers computes the same logits from the exported files as we do from the checkpoint.",
        )
    ],
)
def export_checks(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
    """The exported model through transformers against ours."""
    from pretrain_assets.train.agreement import logits_match

    event = context.instance.get_latest_materialization_event(EXPORT)
    with user_errors():
        if event is None or event.asset_materialization is None:
            raise TableError(f"{EXPORT.to_user_string()} has never run: materialize it first.")
        metadata = {name: value.value for name, value in event.asset_materialization.metadata.items()}
        finding = logits_match(metadata["folder"], metadata["run_dir"], metadata["steps"], metadata["dtype"])
    yield check_result(finding, EXPORT, dg.AssetCheckSeverity.ERROR)
