"""Maintenance as the CLI and Dagster run it: with the training runs that pin versions, and the full-text index.

Invariant: nothing is freed before the folder of runs was read; a run that names a version keeps it.
"""

from __future__ import annotations

import logging

from pretrain_assets.config import MaintainConfig
from pretrain_assets.forensics.indexes.index import upkeep
from pretrain_assets.forensics.pins import pinned_by_runs
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.upkeep import maintain as table
from pretrain_assets.table.upkeep.maintain import MaintainReport
from pretrain_assets.table.versions import table_id

_log = logging.getLogger(__name__)


def maintain(
    location: Location, runs_uri: str, config: MaintainConfig, *, dry_run: bool = False, run_id: str | None = None
) -> MaintainReport:
    """Look after the table; see `table.maintain.maintain`.

    Args:
        location: The table.
        runs_uri: Folder of all training runs.
        config: What stays, and what is rewritten.
        dry_run: Only say what would be done.
        run_id: Dagster run id for the lineage record.
    """
    pinned = pinned_by_runs(runs_uri, table_id(open_dataset(location)), strict=True)
    _log.info("training runs in %s name %d versions of the table", runs_uri, len(pinned))
    return table.maintain(
        location,
        config,
        pinned_by_runs=pinned,
        index=upkeep(location, run_id=run_id),
        dry_run=dry_run,
        run_id=run_id,
    )
