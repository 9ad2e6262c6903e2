"""`forensics/report`: the run card of a recipe's newest checkpoint, one partition per recipe.

It reads and changes nothing in the table; the card goes into the run's folder, beside what it is about.
"""

import dagster as dg

from pretrain_assets.assets.checkpoint import recipe_partitions
from pretrain_assets.assets.events import md, user_errors
from pretrain_assets.assets.keys import CHECKPOINT, CONTAMINATION_IN_TIME, GROUP, INDEX, REPORT, RETRY
from pretrain_assets.assets.pins import newest_checkpoint
from pretrain_assets.assets.resources import CorpusResource, LauncherResource
from pretrain_assets.table.lineage import digest


@dg.asset(
    key=REPORT,
    deps=[CHECKPOINT, INDEX, CONTAMINATION_IN_TIME],
    group_name=GROUP,
    kinds={"html"},
    partitions_def=recipe_partitions,
    retry_policy=RETRY,
    description="Run card: lineage as a graph, filter, ledger, loss curve, exposures, contamination, a sample traced.",
)
def report(
    context: dg.AssetExecutionContext, corpus: CorpusResource, launcher: LauncherResource
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Write the card of the partition's newest checkpoint into the run's folder."""
    from pretrain_assets.forensics.card.run_card import make_run_card
    from pretrain_assets.forensics.checkpoints import with_checkpoint
    from pretrain_assets.report.card.files import write_run_card
    from pretrain_assets.report.card.markdown import run_card_markdown

    location = corpus.location()
    with user_errors():
        which = newest_checkpoint(context) or context.partition_key
        found, card = with_checkpoint(which, launcher.runs(), lambda one: make_run_card(location, one), digests=False)
        html, markdown = write_run_card(card, found.run_dir)
    text = run_card_markdown(card)
    return dg.MaterializeResult(
        metadata={
            "card": md(text),
            "html": dg.MetadataValue.path(html),
            "markdown": dg.MetadataValue.path(markdown),
            "checkpoint": dg.MetadataValue.path(found.uri),
            "run_dir": dg.MetadataValue.path(found.run_dir),
            "steps": found.step,
            "lance/pin": str(found.pin),
            "lance/version": found.pin.version,
            "lacks": dg.MetadataValue.json(dict(card.missing)),
        },
        data_version=dg.DataVersion(digest([card.digest, text])),
    )
