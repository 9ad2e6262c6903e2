"""`corpus/deduped`: exact duplicates marked, never removed."""

import dagster as dg

from pretrain_assets.assets.events import stage_result, user_errors
from pretrain_assets.assets.keys import DEDUPED, INGESTED
from pretrain_assets.assets.pins import input_pin
from pretrain_assets.assets.resources import CorpusResource, EngineResource
from pretrain_assets.assets.stage import table_asset
from pretrain_assets.config import DedupConfig, from_dict
from pretrain_assets.curate import eda
from pretrain_assets.curate.dedup import CODE_VERSION, PARAMETERS, dedup
from pretrain_assets.report.plots import bars
from pretrain_assets.table.lineage import digest
from pretrain_assets.table.storage import open_dataset


class DedupSettings(dg.Config):
    """Launchpad settings of the deduped stage; none changes a value."""

    memory_bytes: int = DedupConfig.memory_bytes
    """Bytes held to compare rows with earlier ones, 24 for each; more goes to temporary files."""
    max_share_removed: float = DedupConfig.max_share_removed
    """Share of a source's rows above which the check `share_removed` alarms."""


@table_asset(
    DEDUPED,
    deps=[INGESTED],
    code_version=digest([CODE_VERSION, PARAMETERS]),
    description="content_hash, dup_of and is_dup, for rows that lack them. Duplicates stay; filters leave them out.",
)
def deduped(
    context: dg.AssetExecutionContext, corpus: CorpusResource, engine: EngineResource, config: DedupSettings
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Compare new rows with all earlier ones."""
    location = corpus.location()
    with user_errors():
        pin = input_pin(context, INGESTED, location, "ingested")
        settings = from_dict(DedupConfig, config.model_dump())
        result = dedup(location, settings, input_pin=pin, run_id=context.run.run_id, engine=engine.config())
    shares = eda.duplicates_by_source(open_dataset(location, result.record.version))
    plot = bars("duplicates by source", [s.source for s in shares], [s.duplicates for s in shares])
    return stage_result(location, result, INGESTED, plot)
