"""Which table version a step reads: the one that its input materialization names, never "latest".

In a race the newest event can be younger than the one Dagster recorded as the input. So the input's storage id is taken
from the step context and exactly that materialization is fetched. That method is not public in Dagster 1.13; it is used
in this one place, guarded by a test.
"""

from collections.abc import Sequence

import dagster as dg

from pretrain_assets.assets.keys import CHECKPOINT
from pretrain_assets.errors import TableError
from pretrain_assets.table.lineage import LineageRecord, Pin
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import latest_record, record_of


def input_pin(
    context: dg.AssetExecutionContext,
    key: dg.AssetKey,
    location: Location,
    stage: str,
    optional: Sequence[dg.AssetKey] = (),
) -> Pin:
    """Pin of the materialization of `key` that Dagster recorded as this step's input.

    A table made by the CLI has no materialization yet: then it is the stage's newest version in the table itself.

    Args:
        context: Of the step.
        key: The input.
        location: The table.
        stage: Stage of the input.
        optional: Assets that may never have run, of which the newest materialization counts; they are no inputs in
            Dagster's eyes, which would warn of them before every run. The newest version of all is what the step reads.

    Raises:
        TableError: the stage has never run.
    """
    others = [pin for other in optional if (pin := latest_pin(context.instance, other))]
    return max([_required(context, key, location, stage), *others], key=lambda pin: pin.version)


def _recorded(context: dg.AssetExecutionContext, key: dg.AssetKey) -> Pin | None:
    info = context.get_step_execution_context().maybe_fetch_and_get_input_asset_version_info(key)
    if info is None or info.event_type != dg.DagsterEventType.ASSET_MATERIALIZATION:
        return None
    records = context.instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=key, storage_ids=[info.storage_id]), limit=1
    ).records
    return pin_of(records[0].asset_materialization) if records and records[0].asset_materialization else None


def _required(context: dg.AssetExecutionContext, key: dg.AssetKey, location: Location, stage: str) -> Pin:
    recorded = _recorded(context, key)
    if recorded is not None:
        return recorded
    record = latest_record(open_dataset(location), stage)
    if record is None:
        raise TableError(f"{key.to_user_string()} has never run: materialize it first.")
    context.log.info(f"{key.to_user_string()} has no materialization here; using {record.tag} from the table")
    return record.pin


def latest_pin(instance: dg.DagsterInstance, key: dg.AssetKey) -> Pin | None:
    """Pin of the newest materialization, or None."""
    event = instance.get_latest_materialization_event(key)
    return pin_of(event.asset_materialization) if event and event.asset_materialization else None


def pin_of(materialization: dg.AssetMaterialization) -> Pin:
    """The pin in a materialization's metadata."""
    return Pin.parse(str(materialization.metadata["lance/pin"].value))


def record_at(location: Location, pin: Pin, stage: str) -> LineageRecord:
    """The lineage record behind a materialization."""
    return record_of(open_dataset(location), stage, pin.version)


def newest_checkpoint(context: dg.AssetExecutionContext) -> str | None:
    """The checkpoint of the partition's newest materialization; None for a recipe that only the CLI has trained."""
    wanted = dg.AssetRecordsFilter(asset_key=CHECKPOINT, asset_partitions=[context.partition_key])
    records = context.instance.fetch_materializations(wanted, limit=1).records
    event = records[0].asset_materialization if records else None
    return str(event.metadata["checkpoint"].value) if event else None
