"""The asset graph, in flow order: source/files -> ingested -> deduped -> tokenized -> checkpoint -> export, index.

Beside it stands maintenance, which reads and makes no asset.
"""

from collections.abc import Mapping

import dagster as dg

from pretrain_assets.assets.automation import (
    maintenance_job,
    nightly,
    pretrain_job,
    recurate_job,
    source_sensor,
    weekly,
)
from pretrain_assets.assets.checkpoint import checkpoint, checkpoint_checks
from pretrain_assets.assets.checks import corpus_checks
from pretrain_assets.assets.deduped import deduped
from pretrain_assets.assets.export import export, export_checks
from pretrain_assets.assets.index import index
from pretrain_assets.assets.ingested import ingested
from pretrain_assets.assets.maintenance import maintenance
from pretrain_assets.assets.resources import default_resources
from pretrain_assets.assets.sources import source_files
from pretrain_assets.assets.tokenized import tokenized


def build_defs(resource_overrides: Mapping[str, object] | None = None) -> dg.Definitions:
    """All definitions; `resource_overrides` replaces resources by name (corpus, source, engine, launcher)."""
    return dg.Definitions(
        assets=[source_files, ingested, deduped, tokenized, checkpoint, export, index, maintenance],
        asset_checks=[*corpus_checks, checkpoint_checks, export_checks],
        jobs=[recurate_job, pretrain_job, maintenance_job],
        schedules=[nightly, weekly],
        sensors=[source_sensor],
        resources={**default_resources(), **(resource_overrides or {})},
    )


defs = build_defs()
