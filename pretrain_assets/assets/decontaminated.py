"""`corpus/decontaminated`: evaluation items found in documents, which are marked and never removed."""

import dagster as dg
from pydantic import Field

from pretrain_assets.assets.events import md, stage_result, user_errors
from pretrain_assets.assets.keys import DECONTAMINATED, EVAL_SETS, QUALITY
from pretrain_assets.assets.pins import input_pin
from pretrain_assets.assets.resources import CorpusResource, EngineResource, EvalSetsResource
from pretrain_assets.assets.stage import table_asset
from pretrain_assets.config import ContaminationConfig, from_dict
from pretrain_assets.curate.contamination import CODE_VERSION, decontaminate
from pretrain_assets.curate.contamination_report import contamination_report
from pretrain_assets.report.contamination_text import contamination_text
from pretrain_assets.report.plots import bars
from pretrain_assets.table.storage import open_dataset

DEFAULTS = ContaminationConfig()


class ContaminationSettings(dg.Config):
    """Launchpad settings of the decontaminated stage; others than those before recompute every row."""

    ngram: int = Field(default=DEFAULTS.ngram)
    """Words that must follow each other as in the item."""
    min_words: int = Field(default=DEFAULTS.min_words)
    """A shorter text is searched for as a whole from this length on, and not at all below."""
    max_items: int = Field(default=DEFAULTS.max_items)
    """An n-gram that more items have is boilerplate."""
    min_overlap: float = Field(default=DEFAULTS.min_overlap)
    """Share of a text's n-grams from which a document is contaminated."""
    max_share_contaminated: float = Field(default=DEFAULTS.max_share_contaminated)
    """Share of a source's rows above which the check `contaminated_share` alarms."""


@table_asset(
    DECONTAMINATED,
    deps=[QUALITY, EVAL_SETS],
    code_version=CODE_VERSION,
    description="contaminated, with item, share and span, for the rows that lack them: filter with NOT contaminated.",
)
def decontaminated(
    context: dg.AssetExecutionContext,
    corpus: CorpusResource,
    engine: EngineResource,
    eval_sets: EvalSetsResource,
    config: ContaminationSettings,
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Search new rows for the items of the eval sets."""
    location = corpus.location()
    with user_errors():
        pin = input_pin(context, QUALITY, location, "quality")
        settings = from_dict(ContaminationConfig, {"eval_sets": eval_sets.eval_sets, **config.model_dump()})
        result = decontaminate(location, settings, input_pin=pin, run_id=context.run.run_id, engine=engine.config())
    found = contamination_report(open_dataset(location, result.record.version))
    plot = bars("contaminated documents by eval set", [s.name for s in found.sets], [s.documents for s in found.sets])
    made = stage_result(location, result, QUALITY, plot)
    text = contamination_text(found, tablefmt="github")
    return made._replace(metadata={**(made.metadata or {}), "contamination": md(text)})
