"""Asset checks, one op per stage; those that guard GPU time block what comes after.

A check looks at the version its asset stands at. Where the stage reported no change, that version was checked when it
was made, and only what costs nothing is looked at again.
"""

from collections.abc import Callable, Iterator

import dagster as dg

from pretrain_assets.assets.events import check_result, user_errors
from pretrain_assets.assets.keys import DECONTAMINATED, DEDUPED, INDEX, INGESTED, NEAR_DEDUPED, QUALITY, TOKENIZED
from pretrain_assets.assets.pins import latest_pin
from pretrain_assets.assets.resources import CorpusResource
from pretrain_assets.curate import verify as curation
from pretrain_assets.errors import TableError
from pretrain_assets.table import verify
from pretrain_assets.table.lineage import LineageRecord
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.verify import Finding
from pretrain_assets.table.versions import open_pin, record_of, records

Findings = Callable[[Location, LineageRecord], list[Finding]]
WARNINGS = frozenset({"share_removed", "near_share_removed", "contaminated_share"})
"""Checks that report without blocking."""


def _ingested(location: Location, record: LineageRecord) -> list[Finding]:
    dataset = open_pin(location, record.pin)
    return [verify.schema_matches(dataset, "ingested"), verify.ids_unique(dataset), verify.ledger_closes(record)]


def _deduped(location: Location, record: LineageRecord) -> list[Finding]:
    dataset = open_pin(location, record.pin)
    return [
        verify.schema_matches(dataset, "deduped"),
        verify.no_nulls(dataset, record),
        verify.one_kept_per_class(dataset),
        verify.duplicates_name_survivors(dataset),
        verify.ledger_closes(record),
        verify.share_removed(dataset, record),
    ]


def _near_deduped(location: Location, record: LineageRecord) -> list[Finding]:
    dataset = open_pin(location, record.pin)
    return [
        verify.schema_matches(dataset, "near_deduped"),
        verify.no_nulls(dataset, record),
        curation.near_duplicates_name_survivors(dataset, record),
        verify.ledger_closes(record),
        curation.near_share_removed(dataset, record),
    ]


def _decontaminated(location: Location, record: LineageRecord) -> list[Finding]:
    dataset = open_pin(location, record.pin)
    return [
        verify.schema_matches(dataset, "decontaminated"),
        verify.no_nulls(dataset, record),
        curation.matches_lie_in_their_texts(dataset, record),
        verify.ledger_closes(record),
        curation.contaminated_share(dataset, record),
    ]


def _quality(location: Location, record: LineageRecord) -> list[Finding]:
    dataset = open_pin(location, record.pin)
    return [
        verify.schema_matches(dataset, "quality"),
        verify.no_nulls(dataset, record),
        curation.lines_add_up(dataset),
        verify.ledger_closes(record),
    ]


def _tokenized(location: Location, record: LineageRecord) -> list[Finding]:
    dataset = open_pin(location, record.pin)
    earlier = [r.version for r in records(dataset, "tokenized") if r.version < record.version]
    return [
        verify.schema_matches(dataset, "tokenized"),
        verify.no_nulls(dataset, record),
        verify.token_counts_match(dataset, max(earlier, default=0)),
        verify.ledger_closes(record),
        verify.failed_share(record),
    ]


def _indexed(location: Location, record: LineageRecord) -> list[Finding]:
    return [verify.ledger_closes(record)]


def _guard(key: dg.AssetKey, stage: str, names: list[str], find: Findings) -> dg.AssetChecksDefinition:
    specs = [
        dg.AssetCheckSpec(
            name,
            asset=key,
            blocking=name not in WARNINGS,
            description=getattr(verify if hasattr(verify, name) else curation, name).__doc__,
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
            found = find(location, record_of(open_dataset(location), stage, pin.version))
        for finding in found:
            severity = dg.AssetCheckSeverity.WARN if finding.name in WARNINGS else dg.AssetCheckSeverity.ERROR
            yield check_result(finding, key, severity)

    return checks


corpus_checks = [
    _guard(INGESTED, "ingested", ["schema_matches", "ids_unique", "ledger_closes"], _ingested),
    _guard(
        DEDUPED,
        "deduped",
        [
            "schema_matches",
            "no_nulls",
            "one_kept_per_class",
            "duplicates_name_survivors",
            "ledger_closes",
            "share_removed",
        ],
        _deduped,
    ),
    _guard(
        NEAR_DEDUPED,
        "near_deduped",
        ["schema_matches", "no_nulls", "near_duplicates_name_survivors", "ledger_closes", "near_share_removed"],
        _near_deduped,
    ),
    _guard(
        DECONTAMINATED,
        "decontaminated",
        ["schema_matches", "no_nulls", "matches_lie_in_their_texts", "ledger_closes", "contaminated_share"],
        _decontaminated,
    ),
    _guard(
        QUALITY,
        "quality",
        ["schema_matches", "no_nulls", "lines_add_up", "ledger_closes"],
        _quality,
    ),
    _guard(
        TOKENIZED,
        "tokenized",
        ["schema_matches", "no_nulls", "token_counts_match", "ledger_closes", "failed_share"],
        _tokenized,
    ),
    _guard(INDEX, "indexed", ["ledger_closes"], _indexed),
]
"""Checks of the stages of the table; the checkpoint's are beside it, in assets/checkpoint.py."""
