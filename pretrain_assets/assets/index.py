"""`forensics/index`: the full-text index over the rows that models were trained on."""

import dagster as dg

from pretrain_assets.assets.events import record_metadata, user_errors
from pretrain_assets.assets.keys import CHECKPOINT, INDEX, TOKENIZED
from pretrain_assets.assets.pins import input_pin
from pretrain_assets.assets.resources import CorpusResource
from pretrain_assets.assets.stage import table_asset
from pretrain_assets.config import IndexConfig
from pretrain_assets.forensics.index import CODE_VERSION, TOKENIZER, build_index
from pretrain_assets.table.lineage import digest


class IndexSettings(dg.Config):
    """Launchpad settings of the index."""

    with_position: bool = False
    """Keep word positions, needed for phrase search: four times the build time, twice the size."""


@table_asset(
    INDEX,
    deps=[TOKENIZED, CHECKPOINT],
    code_version=digest([CODE_VERSION, TOKENIZER]),
    description="Full-text index (BM25) on text; a delta after every append, never a rebuild.",
)
def index(context: dg.AssetExecutionContext, corpus: CorpusResource, config: IndexSettings) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Index the rows that are not indexed yet."""
    location = corpus.location()
    with user_errors():
        pin = input_pin(context, TOKENIZED, location, "tokenized")
        settings = IndexConfig(with_position=config.with_position)
        result = build_index(location, settings, input_pin=pin, run_id=context.run.run_id)
    return dg.MaterializeResult(
        metadata={**record_metadata(location, result.record, TOKENIZED), "changed": result.changed},
        data_version=dg.DataVersion(str(result.pin)),
    )
