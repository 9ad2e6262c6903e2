"""`corpus/curation_report`: what the documents of a version are like, and what a filter would keep of them.

It reads and changes nothing in the table. Another filter is another materialization: nothing is rebuilt.
"""

import dagster as dg

from pretrain_assets.assets.events import check_result, md, user_errors
from pretrain_assets.assets.keys import CURATION_REPORT, GROUP, RETRY, TOKENIZED
from pretrain_assets.assets.pins import input_pin
from pretrain_assets.assets.resources import CorpusResource, LauncherResource, table_metadata
from pretrain_assets.curate.filters import DISJOINT, disjoint
from pretrain_assets.curate.report import make_report
from pretrain_assets.report.curation_html import write_report
from pretrain_assets.report.curation_text import report_markdown
from pretrain_assets.table.lineage import digest
from pretrain_assets.table.versions import open_pin

CHECK = "filters_disjoint"
"""Whether named filters that must share no row share none."""


class CurationReportSettings(dg.Config):
    """Launchpad settings of the curation report."""

    filter: str = ""
    """SQL over columns and named filters, whose funnel is shown; empty: `clean`, as far as its columns are there."""


@dg.asset(
    key=CURATION_REPORT,
    deps=[TOKENIZED],
    group_name=GROUP,
    kinds={"markdown"},
    retry_policy=RETRY,
    metadata=table_metadata(),
    check_specs=[
        dg.AssetCheckSpec(
            CHECK,
            asset=CURATION_REPORT,
            description=f"No row is in both of {', '.join(' and '.join(pair) for pair in DISJOINT)}.",
        )
    ],
    description="Score, length, language, duplicates, quality signals, contamination and the funnel of a filter.",
)
def curation_report(
    context: dg.AssetExecutionContext,
    corpus: CorpusResource,
    launcher: LauncherResource,
    config: CurationReportSettings,
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Report on the version that the tokenized materialization names."""
    location = corpus.location()
    with user_errors():
        pin = input_pin(context, TOKENIZED, location, "tokenized")
        dataset = open_pin(location, pin)
        found = make_report(dataset, config.filter or None)
        place = write_report(found, launcher.runs())
        checked = disjoint(dataset)
    funnel = found.funnel
    return dg.MaterializeResult(
        metadata={
            **{name: md(text) for name, text in report_markdown(found).items()},
            "html": dg.MetadataValue.path(place),
            "lance/pin": str(pin),
            "lance/version": pin.version,
            "lance/uri": location.uri,
            "dagster/row_count": found.rows,
            **({"filter": funnel.filter, "sql": funnel.sql, "rows_kept": funnel.kept.rows} if funnel else {}),
        },
        data_version=dg.DataVersion(f"{pin}#{digest(funnel.sql if funnel else '')}"),
        check_results=[check_result(checked, CURATION_REPORT, dg.AssetCheckSeverity.ERROR)],
    )
