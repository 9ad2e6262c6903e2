"""`corpus/quality`: what the published quality rules measure, language and PII, as numbers; filters decide."""

import dagster as dg
from pydantic import Field

from pretrain_assets.assets.events import md, stage_result, user_errors
from pretrain_assets.assets.keys import NEAR_DEDUPED, QUALITY
from pretrain_assets.assets.pins import input_pin
from pretrain_assets.assets.resources import CorpusResource, EngineResource
from pretrain_assets.assets.stage import table_asset
from pretrain_assets.config import QualityConfig, from_dict
from pretrain_assets.curate import eda
from pretrain_assets.curate.quality import CODE_VERSION, quality
from pretrain_assets.curate.quality_rules import rows_failing
from pretrain_assets.report.plots import bars
from pretrain_assets.report.quality_text import rules_text
from pretrain_assets.table.storage import open_dataset


class QualitySettings(dg.Config):
    """Launchpad settings of the quality stage; others than those before measure every row anew."""

    stop_words: list[str] = Field(default=list(QualityConfig.stop_words))
    """Words of which `gopher_stop_words` counts those that occur; at most 64."""
    language_model: str = QualityConfig.language_model
    """`eldc`, or `lid.176` (extra `lid176`)."""
    language_chars: int = QualityConfig.language_chars
    """Characters from the beginning of a text by which its language is told."""


@table_asset(
    QUALITY,
    deps=[NEAR_DEDUPED],
    code_version=CODE_VERSION,
    description="The numbers of Gopher's, C4's and FineWeb's rules, language and PII, for the rows that lack them. "
    "Nothing is left out here: the published thresholds are filters.",
)
def quality_signals(
    context: dg.AssetExecutionContext, corpus: CorpusResource, engine: EngineResource, config: QualitySettings
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Measure new rows."""
    location = corpus.location()
    with user_errors():
        pin = input_pin(context, NEAR_DEDUPED, location, "near_deduped")
        settings = from_dict(QualityConfig, config.model_dump())
        result = quality(location, settings, input_pin=pin, run_id=context.run.run_id, engine=engine.config())
    dataset = open_dataset(location, result.record.version)
    languages, words = eda.language_bins(dataset), eda.word_bins(dataset)
    plots = {
        "languages": md(bars("documents by language", [b.label for b in languages], [b.rows for b in languages])),
        "rules": md(rules_text(rows_failing(dataset), dataset.count_rows(), tablefmt="github")),
    }
    plot = bars("documents by words", [b.label for b in words], [b.rows for b in words])
    made = stage_result(location, result, NEAR_DEDUPED, plot)
    return made._replace(metadata={**(made.metadata or {}), **plots})
