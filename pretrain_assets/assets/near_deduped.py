"""`corpus/near_deduped`: near duplicates marked, with the row that each repeats; never removed."""

import dagster as dg
from pydantic import Field

from pretrain_assets.assets.events import stage_result, user_errors
from pretrain_assets.assets.keys import DEDUPED, NEAR_DEDUPED
from pretrain_assets.assets.pins import input_pin
from pretrain_assets.assets.resources import CorpusResource, EngineResource
from pretrain_assets.assets.stage import table_asset
from pretrain_assets.config import NearDedupConfig, from_dict
from pretrain_assets.curate import eda, minhash
from pretrain_assets.curate.near_dedup import CODE_VERSION, near_dedup
from pretrain_assets.report.plots import bars
from pretrain_assets.table.lineage import digest
from pretrain_assets.table.storage import open_dataset


class NearDedupSettings(dg.Config):
    """Launchpad settings of the near_deduped stage; those of the signature make all signatures anew."""

    ngram_words: int = NearDedupConfig.ngram_words
    """Words per shingle; of the signature."""
    bands: int = NearDedupConfig.bands
    """Bands: texts that agree in all values of one are compared."""
    rows_per_band: int = NearDedupConfig.rows_per_band
    """Values per band; bands x rows_per_band is of the signature."""
    threshold: float = NearDedupConfig.threshold
    """Similarity (Jaccard index of shingles) from which a row is a near duplicate."""
    verify: str = NearDedupConfig.verify
    """`estimate`: similarity by signatures; `exact`: by the texts."""
    min_words: int = NearDedupConfig.min_words
    """A text of fewer words is compared whole; of the signature."""
    seed: int = NearDedupConfig.seed
    """Seed of the hash functions; of the signature."""
    skip_sources: list[str] = Field(default_factory=list)
    """Sources that take no part, such as templated ones."""
    max_compared: int = NearDedupConfig.max_compared
    """Kept rows of a bucket that a row is compared with at most."""
    max_share_removed: float = NearDedupConfig.max_share_removed
    """Share of a source's rows above which the check `near_share_removed` alarms."""


@table_asset(
    NEAR_DEDUPED,
    deps=[DEDUPED],
    code_version=digest([CODE_VERSION, minhash.CODE_VERSION]),
    description="minhash (of new rows only), near_dup_of, near_dup_similarity and is_near_dup. Near duplicates stay; "
    "filters leave them out.",
)
def near_deduped(
    context: dg.AssetExecutionContext, corpus: CorpusResource, engine: EngineResource, config: NearDedupSettings
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Compare new rows with all earlier ones, by their signatures."""
    location = corpus.location()
    with user_errors():
        pin = input_pin(context, DEDUPED, location, "deduped")
        settings = from_dict(NearDedupConfig, config.model_dump())
        result = near_dedup(location, settings, input_pin=pin, run_id=context.run.run_id, engine=engine.config())
    shares = eda.duplicates_by_source(open_dataset(location, result.record.version), "is_near_dup")
    plot = bars("near duplicates by source", [s.source for s in shares], [s.duplicates for s in shares])
    return stage_result(location, result, DEDUPED, plot)
