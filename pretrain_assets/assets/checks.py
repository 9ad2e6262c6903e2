"""Asset checks, one op per stage; those that guard GPU time block what comes after.

A check looks at the version its asset stands at. Where the stage reported no change, that version was checked when it
was made, and only what costs nothing is looked at again.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import dagster as dg

from pretrain_assets.assets.events import check_result, user_errors
from pretrain_assets.assets.keys import (
    DECONTAMINATED,
    DEDUPED,
    EMBEDDED,
    INDEX,
    INGESTED,
    MASKED,
    MODEL_SCORED,
    NEAR_DEDUPED,
    QUALITY,
    TOKENIZED,
)
from pretrain_assets.assets.pins import latest_pin
from pretrain_assets.assets.resources import CorpusResource
from pretrain_assets.curate import verify as curation
from pretrain_assets.errors import TableError
from pretrain_assets.forensics.indexes import checks as index_checks
from pretrain_assets.table import verify
from pretrain_assets.table.lineage import LineageRecord
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.verify import Finding
from pretrain_assets.table.versions import STAGES as IN_FLOW
from pretrain_assets.table.versions import flow_place, open_pin, record_of, records

if TYPE_CHECKING:
    import lance

ROOMS = (verify, curation, index_checks)
"""Where the checks are defined."""
Check = Callable[["lance.LanceDataset", LineageRecord], Finding]
WARNINGS = frozenset({"share_removed", "near_share_removed", "contaminated_share", "recall_is_high"})
"""Checks that report without blocking."""


def _token_counts_match(dataset: "lance.LanceDataset", record: LineageRecord) -> Finding:
    """Of the rows that are new since the stage's version before this one."""
    earlier = [r.version for r in records(dataset, record.stage) if r.version < record.version]
    return verify.token_counts_match(dataset, max(earlier, default=0))


CHECKS: dict[str, Check] = {
    "schema_matches": lambda dataset, record: verify.schema_matches(dataset, record.stage),
    "no_nulls": verify.no_nulls,
    "ledger_closes": lambda _, record: verify.ledger_closes(record),
    "ids_unique": lambda dataset, _: verify.ids_unique(dataset),
    "one_kept_per_class": lambda dataset, _: verify.one_kept_per_class(dataset),
    "duplicates_name_survivors": lambda dataset, _: verify.duplicates_name_survivors(dataset),
    "share_removed": verify.share_removed,
    "near_duplicates_name_survivors": curation.near_duplicates_name_survivors,
    "near_share_removed": curation.near_share_removed,
    "lines_add_up": lambda dataset, _: curation.lines_add_up(dataset),
    "matches_lie_in_their_texts": curation.matches_lie_in_their_texts,
    "contaminated_share": curation.contaminated_share,
    "token_counts_match": _token_counts_match,
    "failed_share": lambda _, record: verify.failed_share(record),
    "vectors_add_up": lambda _, record: index_checks.vectors_add_up(record),
    "recall_is_high": lambda _, record: index_checks.recall_is_high(record),
}
"""What is asked of the version and the record of a stage, by the name of the function that answers."""


FILLED = ("schema_matches", "no_nulls", "ledger_closes")
"""Asked of every stage that fills columns."""
STAGES: dict[str, tuple[dg.AssetKey, tuple[str, ...]]] = {
    "ingested": (INGESTED, ("schema_matches", "ids_unique", "ledger_closes")),
    "deduped": (DEDUPED, (*FILLED, "one_kept_per_class", "duplicates_name_survivors", "share_removed")),
    "near_deduped": (NEAR_DEDUPED, (*FILLED, "near_duplicates_name_survivors", "near_share_removed")),
    "quality": (QUALITY, (*FILLED, "lines_add_up")),
    "decontaminated": (DECONTAMINATED, (*FILLED, "matches_lie_in_their_texts", "contaminated_share")),
    "masked": (MASKED, FILLED),
    "model_scored": (MODEL_SCORED, ("ledger_closes",)),
    "tokenized": (TOKENIZED, (*FILLED, "token_counts_match", "failed_share")),
    "embedded": (EMBEDDED, ("schema_matches", "ledger_closes")),
    "indexed": (INDEX, ("ledger_closes", "vectors_add_up", "recall_is_high")),
}
"""The asset of each stage, and what is asked of it."""


def find(location: Location, record: LineageRecord) -> list[Finding]:
    """What the checks of a record's stage find at its version."""
    dataset = open_pin(location, record.pin)
    return [CHECKS[name](dataset, record) for name in STAGES[IN_FLOW[flow_place(record.stage)]][1]]


def _record(dataset: "lance.LanceDataset", stage: str, version: int) -> LineageRecord:
    """The record of a stage at a version, also of one of several beside each other, such as `model_scored_<name>`."""
    places = {record.stage: flow_place(record.stage) for record in records(dataset) if record.version == version}
    return record_of(dataset, next((name for name in places if places[name] == flow_place(stage)), stage), version)


def _guard(stage: str) -> dg.AssetChecksDefinition:
    key, names = STAGES[stage]
    specs = [
        dg.AssetCheckSpec(
            name,
            asset=key,
            blocking=name not in WARNINGS,
            description=next(getattr(room, name).__doc__ for room in ROOMS if hasattr(room, name)),
        )
        for name in names
    ]

    @dg.multi_asset_check(name=f"{stage}_checks", specs=specs)
    def checks(context: dg.AssetCheckExecutionContext, corpus: CorpusResource) -> Iterator[dg.AssetCheckResult]:
        with user_errors():
            location = corpus.location()
            pin = latest_pin(context.instance, key)
            if pin is None:
                raise TableError(f"{key.to_user_string()} has never run: materialize it first.")
            found = find(location, _record(open_dataset(location), stage, pin.version))
        for finding in found:
            severity = dg.AssetCheckSeverity.WARN if finding.name in WARNINGS else dg.AssetCheckSeverity.ERROR
            yield check_result(finding, key, severity)

    return checks


corpus_checks = [_guard(stage) for stage in STAGES]
"""Checks of the stages of the table; the checkpoint's are beside it, in assets/checkpoint.py."""
