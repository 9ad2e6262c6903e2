"""`corpus/embedded` and `corpus/model_scored`: columns by models that read documents. In no job: they need a model."""

import dagster as dg
from pydantic import Field

from pretrain_assets import project
from pretrain_assets.assets.events import check_result, stage_result, user_errors
from pretrain_assets.assets.keys import (
    DECONTAMINATED,
    EMBEDDED,
    MASKED,
    MODEL_SCORED,
    TOKENIZED,
)
from pretrain_assets.assets.pins import input_pin
from pretrain_assets.assets.resources import CorpusResource, EngineResource
from pretrain_assets.assets.stage import table_asset
from pretrain_assets.config import EmbedConfig, ModelScoreConfig, from_dict
from pretrain_assets.curate import embedding, model_scores
from pretrain_assets.report.plots import bars
from pretrain_assets.table.lineage import digest
from pretrain_assets.table.storage import open_dataset


class EmbedSettings(dg.Config):
    """Launchpad settings of the embedded stage."""

    model: str = Field(default_factory=lambda: project.setting("EMBED_MODEL", ""))
    """Local directory or name on the Hugging Face hub [PRETRAIN_EMBED_MODEL]. Another one makes every row anew."""
    library: str = EmbedConfig.library
    """`sentence-transformers`, or `model2vec` for static vectors."""
    dtype: str = EmbedConfig.dtype
    """`float16` or `float32`."""
    max_tokens: int = EmbedConfig.max_tokens
    """Tokens of a text that are read, from its beginning."""
    precision: str = EmbedConfig.precision
    """Of a transformer's arithmetic: `float32`, or `bfloat16`."""
    device: str = EmbedConfig.device
    """`auto` (a GPU for each worker where there is one), `cpu` or `cuda`."""
    text_column: str = EmbedConfig.text_column
    """`text` or `text_masked`."""


class ModelScoreSettings(dg.Config):
    """Launchpad settings of the model_scored stage."""

    name: str = Field(default_factory=lambda: project.setting("SCORE_NAME", "model"))
    """A word: the column is `model_score_<name>` [PRETRAIN_SCORE_NAME]."""
    model: str = Field(default_factory=lambda: project.setting("SCORE_MODEL", ""))
    """Local directory or name on the Hugging Face hub [PRETRAIN_SCORE_MODEL]. Another one makes every row anew."""
    label: str = ModelScoreConfig.label
    """Label whose probability is the score; empty for a model of one output."""
    activation: str = ModelScoreConfig.activation
    """`auto`, `none`, `sigmoid` or `softmax`."""
    max_tokens: int = ModelScoreConfig.max_tokens
    """Tokens of a text that are read, from its beginning."""
    precision: str = ModelScoreConfig.precision
    """Of the model's arithmetic: `float32`, or `bfloat16`."""
    device: str = ModelScoreConfig.device
    """`auto` (a GPU for each worker where there is one), `cpu` or `cuda`."""
    text_column: str = ModelScoreConfig.text_column
    """`text` or `text_masked`."""


@table_asset(
    EMBEDDED,
    deps=[TOKENIZED],
    kinds={"table", "huggingface"},
    code_version=digest([embedding.CODE_VERSION]),
    check_specs=[
        dg.AssetCheckSpec("unit_vectors", asset=EMBEDDED, description=embedding.unit_vectors.__doc__, blocking=True)
    ],
    description="embedding: a vector of length 1 per document, for the rows that lack one. Optional: it needs a model.",
)
def embedded(
    context: dg.AssetExecutionContext, corpus: CorpusResource, engine: EngineResource, config: EmbedSettings
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Embed new rows."""
    location = corpus.location()
    with user_errors():
        pin = input_pin(context, TOKENIZED, location, "tokenized")
        settings = from_dict(EmbedConfig, config.model_dump())
        result = embedding.embed(location, settings, input_pin=pin, run_id=context.run.run_id, engine=engine.config())
    finding = embedding.unit_vectors(open_dataset(location, result.record.version))
    ledger = {name: count for name, count in result.record.ledger.items() if name != "in"}
    plot = bars("documents", list(ledger), list(ledger.values()))
    return stage_result(location, result, TOKENIZED, plot)._replace(
        check_results=[check_result(finding, EMBEDDED, dg.AssetCheckSeverity.ERROR)]
    )


@table_asset(
    MODEL_SCORED,
    deps=[DECONTAMINATED],
    kinds={"table", "huggingface"},
    code_version=digest([model_scores.CODE_VERSION]),
    description="model_score_<name> by a text-classification model, for the rows that lack it. Optional.",
)
def model_scored(
    context: dg.AssetExecutionContext, corpus: CorpusResource, engine: EngineResource, config: ModelScoreSettings
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Score new rows."""
    location = corpus.location()
    with user_errors():
        pin = input_pin(context, DECONTAMINATED, location, "decontaminated", (MASKED,))
        settings = from_dict(ModelScoreConfig, config.model_dump())
        result = model_scores.score(
            location, settings, input_pin=pin, run_id=context.run.run_id, engine=engine.config()
        )
    bins = model_scores.score_bins(open_dataset(location, result.record.version), settings.name)
    plot = bars(f"documents by model_score_{settings.name}", list(bins), list(bins.values()))
    return stage_result(location, result, DECONTAMINATED, plot)
