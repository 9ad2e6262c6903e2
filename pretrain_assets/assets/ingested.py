"""`corpus/ingested`: new files appended to the table, one version per ingest."""

import dagster as dg

from pretrain_assets.assets.events import stage_result, user_errors
from pretrain_assets.assets.keys import INGESTED, SOURCE_FILES
from pretrain_assets.assets.resources import CorpusResource, SourceResource
from pretrain_assets.assets.stage import table_asset
from pretrain_assets.curate import eda
from pretrain_assets.ingest.append import CODE_VERSION, ingest
from pretrain_assets.report.plots import bars
from pretrain_assets.table.storage import open_dataset


@table_asset(
    INGESTED,
    deps=[SOURCE_FILES],
    code_version=CODE_VERSION,
    description="Raw documents, written once: id, doc_id, text, source, source_file, score, n_chars.",
)
def ingested(context: dg.AssetExecutionContext, corpus: CorpusResource, source: SourceResource) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Append what is new."""
    location = corpus.location()
    with user_errors():
        result = ingest(location, source.config(), run_id=context.run.run_id)
    bins = eda.score_bins(open_dataset(location, result.record.version))
    plot = bars("documents by score", [b.label for b in bins], [b.rows for b in bins])
    return stage_result(location, result, SOURCE_FILES, plot)
