"""`corpus/document_loss`: the loss of every document under a recipe's checkpoint, as columns. In no job: it takes a
forward pass over the whole corpus.
"""

from typing import Literal

import dagster as dg

from pretrain_assets.assets.checkpoint import recipe_partitions
from pretrain_assets.assets.events import check_result, md, stage_result, user_errors
from pretrain_assets.assets.keys import CHECKPOINT, DOCUMENT_LOSS, TOKENIZED
from pretrain_assets.assets.pins import input_pin, newest_checkpoint
from pretrain_assets.assets.resources import CorpusResource, EngineResource, LauncherResource
from pretrain_assets.assets.stage import table_asset
from pretrain_assets.config import DocumentLossConfig, from_dict
from pretrain_assets.forensics.losses.document_loss import CODE_VERSION
from pretrain_assets.forensics.losses.loss_report import losses_complete, losses_plausible
from pretrain_assets.report.loss_text import loss_text
from pretrain_assets.report.plots import bars
from pretrain_assets.table.lineage import digest
from pretrain_assets.table.storage import open_dataset


class DocumentLossSettings(dg.Config):
    """Launchpad settings of the loss columns."""

    name: str = ""
    """A word: the columns are `loss_<name>`, `loss_max_<name>` and `loss_tokens_<name>`. Empty: the recipe's name."""
    max_tokens: int | None = DocumentLossConfig.max_tokens
    """Tokens of a document that are predicted, from its beginning; null for all."""
    precision: Literal["float32", "bfloat16"] = DocumentLossConfig.precision
    """Of the model's arithmetic."""
    device: Literal["auto", "cpu", "cuda"] = DocumentLossConfig.device
    """`auto` (a GPU for each worker where there is one), `cpu` or `cuda`."""


@table_asset(
    DOCUMENT_LOSS,
    deps=[CHECKPOINT, TOKENIZED],
    kinds={"table", "pytorch"},
    partitions_def=recipe_partitions,
    code_version=digest([CODE_VERSION]),
    check_specs=[
        dg.AssetCheckSpec("losses_complete", asset=DOCUMENT_LOSS, description=losses_complete.__doc__, blocking=True),
        dg.AssetCheckSpec("losses_plausible", asset=DOCUMENT_LOSS, description=losses_plausible.__doc__),
    ],
    description="loss_<name>: mean nats per token of every document under the checkpoint. Optional: it takes a GPU.",
)
def document_loss(
    context: dg.AssetExecutionContext,
    corpus: CorpusResource,
    engine: EngineResource,
    launcher: LauncherResource,
    config: DocumentLossSettings,
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Measure new rows; another checkpoint measures all rows anew."""
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.forensics.losses.document_loss import column_name, measure_loss
    from pretrain_assets.forensics.losses.loss_report import loss_report

    location = corpus.location()
    with user_errors():
        pin = input_pin(context, TOKENIZED, location, "tokenized")
        found = find_checkpoint(newest_checkpoint(context) or context.partition_key, launcher.runs())
        changes = {"name": config.name or column_name(found.recipe)}
        settings = from_dict(DocumentLossConfig, {**config.model_dump(), **changes})
        result = measure_loss(
            location, found, settings, input_pin=pin, run_id=context.run.run_id, engine=engine.config()
        )
        report = loss_report(location, found, settings.name)
    plot = bars("mean loss", [one.name for one in report.groups], [one.loss or 0 for one in report.groups])
    made = stage_result(location, result, TOKENIZED, plot)
    complete = losses_complete(open_dataset(location, result.record.version), settings.name)
    return made._replace(
        metadata={**(made.metadata or {}), "losses": md(loss_text(report, tablefmt="github"))},
        check_results=[
            check_result(complete, DOCUMENT_LOSS, dg.AssetCheckSeverity.ERROR),
            check_result(losses_plausible(report), DOCUMENT_LOSS, dg.AssetCheckSeverity.WARN),
        ],
    )
