"""Jobs, the schedules and the source sensor. All are delivered stopped: switch them on in the UI.

Invariant: a re-curation does work for new rows only, and trains nothing; training stays a decision.
"""

import dagster as dg

from pretrain_assets.assets.keys import (
    CHECKPOINT,
    CONTAMINATION_IN_TIME,
    CURATION_REPORT,
    DECONTAMINATED,
    DEDUPED,
    EVAL_SETS,
    INDEX,
    INGESTED,
    MAINTENANCE,
    NEAR_DEDUPED,
    QUALITY,
    REPORT,
    SOURCE_FILES,
    TOKENIZED,
)
from pretrain_assets.assets.resources import SourceResource

CORPUS = (SOURCE_FILES, EVAL_SETS, INGESTED, DEDUPED, NEAR_DEDUPED, QUALITY, DECONTAMINATED, TOKENIZED)
"""From source files to tokens."""

recurate_job = dg.define_asset_job(
    "recurate",
    selection=dg.AssetSelection.assets(*CORPUS, INDEX, CURATION_REPORT),
    description="Observe the sources, append what is new, fill columns for just those rows, extend the index, report.",
)

pretrain_job = dg.define_asset_job(
    "pretrain",
    selection=dg.AssetSelection.assets(*CORPUS, CURATION_REPORT, CHECKPOINT, INDEX, CONTAMINATION_IN_TIME, REPORT),
    description="The whole way from source files to a trained checkpoint of one recipe, the index and the run card.",
)

maintenance_job = dg.define_asset_job(
    "maintenance",
    selection=dg.AssetSelection.assets(MAINTENANCE),
    description="Index deltas, compaction, clean-up: what the table needs now and then, while nobody works on it.",
)

nightly = dg.ScheduleDefinition(
    name="nightly_recuration",
    job=recurate_job,
    cron_schedule="0 2 * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.STOPPED,
    description="Re-curate at 02:00 UTC: new documents only.",
)

weekly = dg.ScheduleDefinition(
    name="weekly_maintenance",
    job=maintenance_job,
    cron_schedule="0 6 * * 0",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.STOPPED,
    description="Look after the table on Sundays at 06:00 UTC, hours after the night's re-curation began.",
)


@dg.sensor(
    name="source_sensor",
    job=recurate_job,
    minimum_interval_seconds=60,
    default_status=dg.DefaultSensorStatus.STOPPED,
    description="Re-curate as soon as the fingerprint of the source files changes.",
)
def source_sensor(context: dg.SensorEvaluationContext, source: SourceResource) -> dg.SensorResult | dg.SkipReason:
    """Compare the listing's fingerprint with the cursor."""
    from pretrain_assets.ingest.sources import sources_fingerprint

    fingerprint, num_files = sources_fingerprint(source.config())
    if fingerprint == context.cursor:
        return dg.SkipReason(f"{num_files} source files, unchanged")
    return dg.SensorResult(run_requests=[dg.RunRequest(run_key=fingerprint)], cursor=fingerprint)
