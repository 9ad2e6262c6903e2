"""`forensics/index`: full text and vectors of the rows that models were trained on, to be searched."""

from typing import Any

import dagster as dg

from pretrain_assets.assets.events import record_metadata, user_errors
from pretrain_assets.assets.keys import CHECKPOINT, EMBEDDED, INDEX, TOKENIZED
from pretrain_assets.assets.pins import input_pin
from pretrain_assets.assets.resources import CorpusResource
from pretrain_assets.assets.stage import table_asset
from pretrain_assets.config import IndexConfig, from_dict
from pretrain_assets.forensics.indexes.index import CODE_VERSION, TOKENIZER, build_index
from pretrain_assets.report.search_text import index_text
from pretrain_assets.table.lineage import digest


class IndexSettings(dg.Config):
    """Launchpad settings of the index."""

    with_position: bool = IndexConfig.with_position
    """Keep word positions, which phrases need; the text index is nearly three times as large with them."""
    exact_below: int = IndexConfig.exact_below
    """Fewer vectors than this get no index: all are read."""


@table_asset(
    INDEX,
    deps=[TOKENIZED, CHECKPOINT],
    code_version=digest([CODE_VERSION, TOKENIZER]),
    description="Indexes of text (BM25, phrases) and of embedding, in one version; a delta after every append.",
)
def index(context: dg.AssetExecutionContext, corpus: CorpusResource, config: IndexSettings) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Index the rows that are not indexed yet."""
    location = corpus.location()
    with user_errors():
        pin = input_pin(context, TOKENIZED, location, "tokenized", (EMBEDDED,))
        settings = from_dict(IndexConfig, config.model_dump())
        result = build_index(location, settings, input_pin=pin, run_id=context.run.run_id)
    found: dict[str, Any] = {"changed": result.changed, "indexes": index_text(result.record)}
    if vectors := result.record.details.get("vectors"):
        found |= {"vectors": vectors, "recall_at_10": vectors["recall_at_10"] if vectors["segments"] else 1.0}
    return dg.MaterializeResult(
        metadata={**record_metadata(location, result.record, TOKENIZED), **found},
        data_version=dg.DataVersion(str(result.pin)),
    )
