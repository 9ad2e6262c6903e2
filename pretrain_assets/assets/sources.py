"""`source/files`: the documents outside the table, observed by fingerprint."""

import warnings

import dagster as dg

from pretrain_assets.assets.events import user_errors
from pretrain_assets.assets.keys import GROUP, SOURCE_FILES
from pretrain_assets.assets.resources import SourceResource

warnings.filterwarnings("ignore", message=".*observable_source_asset", category=dg.BetaWarning)


@dg.observable_source_asset(key=SOURCE_FILES, group_name=GROUP, description="Files to ingest; never copied here.")
def source_files(source: SourceResource) -> dg.ObserveResult:
    """Observe the listing: the data version changes when a file is added or changes."""
    from pretrain_assets.ingest.sources import sources_fingerprint

    with user_errors():
        fingerprint, num_files = sources_fingerprint(source.config())
    return dg.ObserveResult(
        data_version=dg.DataVersion(fingerprint), metadata={"num_files": num_files, "sources": source.sources}
    )
