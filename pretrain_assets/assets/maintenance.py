"""`corpus/maintenance`: the table looked after while nobody works on it.

It stands beside the graph: no asset reads it, and it reads none, so it makes nothing stale and never becomes stale.
"""

from dataclasses import asdict

import dagster as dg
from pydantic import Field

from pretrain_assets.assets.events import md, user_errors
from pretrain_assets.assets.keys import GROUP, MAINTENANCE, RETRY, TABLE_POOL
from pretrain_assets.assets.resources import CorpusResource, LauncherResource, table_metadata
from pretrain_assets.config import MaintainConfig
from pretrain_assets.forensics.maintenance import maintain
from pretrain_assets.report.text import kept_text
from pretrain_assets.table.storage import open_dataset
from pretrain_assets.table.versions import table_id

DEFAULT = MaintainConfig()


class MaintainSettings(dg.Config):
    """Launchpad settings of maintenance; see `config.MaintainConfig`."""

    keep_last: int = Field(default=DEFAULT.keep_last)
    """Versions of every stage that stay."""
    older_than_seconds: int = Field(default=DEFAULT.older_than_seconds)
    """Younger versions stay."""
    keep_unfinished_seconds: int = Field(default=DEFAULT.keep_unfinished_seconds)
    """Younger files of unfinished work stay."""
    max_deleted_share: float = Field(default=DEFAULT.max_deleted_share)
    """Fragments with a larger share of deleted rows are rewritten."""
    dry_run: bool = False
    """Only report what would be done."""


@dg.asset(
    key=MAINTENANCE,
    group_name=GROUP,
    kinds={"table"},
    pool=TABLE_POOL,
    retry_policy=RETRY,
    metadata=table_metadata(),
    description="Index deltas, compaction, clean-up of versions that nobody names, removal of leftovers.",
)
def maintenance(
    context: dg.AssetExecutionContext, corpus: CorpusResource, launcher: LauncherResource, config: MaintainSettings
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Look after the table."""
    location = corpus.location()
    settings = MaintainConfig(
        keep_last=config.keep_last,
        older_than_seconds=config.older_than_seconds,
        keep_unfinished_seconds=config.keep_unfinished_seconds,
        max_deleted_share=config.max_deleted_share,
    )
    with user_errors():
        report = maintain(location, launcher.runs(), settings, dry_run=config.dry_run, run_id=context.run.run_id)
        pin = f"{table_id(open_dataset(location))}@{report.version}"
    facts = asdict(report)
    return dg.MaterializeResult(
        metadata={
            "versions_kept": md(kept_text(report.versions_kept, tablefmt="pipe")),
            "versions_freed": list(report.versions_freed),
            "waiting": list(report.waiting),
            "changed": report.changed,
            "lance/version": report.version,
            "lance/pin": pin,
            "lance/uri": location.uri,
            **{name: value for name, value in facts.items() if type(value) in (int, float, bool)},
        },
        data_version=dg.DataVersion(pin),
    )
