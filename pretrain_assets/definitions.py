"""The asset graph, in flow order.

source/files -> ingested -> deduped -> near_deduped -> quality -> decontaminated -> tokenized -> checkpoint -> export,
and from tokenized the index and the curation report; from a checkpoint contamination in time and the run card. Beside
them stand the optional columns (masked, model_scored, embedded, document_loss) and maintenance, which makes no asset.
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
from pretrain_assets.assets.contamination_in_time import contamination_in_time
from pretrain_assets.assets.curation import curation_report
from pretrain_assets.assets.decontaminated import decontaminated
from pretrain_assets.assets.deduped import deduped
from pretrain_assets.assets.document_loss import document_loss
from pretrain_assets.assets.embedded import embedded, model_scored
from pretrain_assets.assets.eval_sets import eval_sets
from pretrain_assets.assets.export import export, export_checks
from pretrain_assets.assets.index import index
from pretrain_assets.assets.ingested import ingested
from pretrain_assets.assets.maintenance import maintenance
from pretrain_assets.assets.masked import masked
from pretrain_assets.assets.near_deduped import near_deduped
from pretrain_assets.assets.quality import quality_signals
from pretrain_assets.assets.report import report
from pretrain_assets.assets.resources import default_resources
from pretrain_assets.assets.sources import source_files
from pretrain_assets.assets.tokenized import tokenized


def build_defs(resource_overrides: Mapping[str, object] | None = None) -> dg.Definitions:
    """All definitions; `resource_overrides` replaces resources by name, such as corpus, source or engine."""
    return dg.Definitions(
        assets=[
            *(source_files, eval_sets),
            *(ingested, deduped, near_deduped, quality_signals, decontaminated, tokenized),
            *(masked, model_scored, embedded, document_loss),
            *(checkpoint, export, index, contamination_in_time, report, curation_report, maintenance),
        ],
        asset_checks=[*corpus_checks, checkpoint_checks, export_checks],
        jobs=[recurate_job, pretrain_job, maintenance_job],
        schedules=[nightly, weekly],
        sensors=[source_sensor],
        resources={**default_resources(), **(resource_overrides or {})},
    )


defs = build_defs()
