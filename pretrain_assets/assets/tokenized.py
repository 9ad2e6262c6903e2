"""`corpus/tokenized`: token columns, made by the tokenizer that the column's metadata names."""

import dagster as dg
from pydantic import Field

from pretrain_assets import project
from pretrain_assets.assets.events import stage_result, user_errors
from pretrain_assets.assets.keys import DECONTAMINATED, MASKED, MODEL_SCORED, TOKENIZED
from pretrain_assets.assets.pins import input_pin
from pretrain_assets.assets.resources import CorpusResource, EngineResource
from pretrain_assets.assets.stage import table_asset
from pretrain_assets.config import TokenizeConfig, from_dict
from pretrain_assets.curate import eda
from pretrain_assets.report.plots import bars
from pretrain_assets.table.lineage import digest
from pretrain_assets.table.storage import open_dataset
from pretrain_assets.tokenize.columns import CODE_VERSION, tokenize

OPTIONAL = (MASKED, MODEL_SCORED)
"""Assets in no job: once they have run, this stage's version has their columns, to be tokenized or filtered by."""


class TokenizeSettings(dg.Config):
    """Launchpad settings of the tokenized stage."""

    tokenizer: str = Field(default_factory=project.tokenizer)
    """`gpt2`, `byte` or `hf:<name or local directory>`. Another one recomputes every row, in one new version."""
    engine: str = "auto"
    """What runs a byte-level BPE: `auto`, `fastokens`, `tiktoken` or `transformers`; all give the same ids."""
    text_column: str = "text"
    """`text`, or `text_masked`. Another one recomputes every row."""
    on_error: str = "raise"
    """`raise`, or `null` to leave out texts that cannot be encoded, counted by reason in the ledger."""
    max_failed_share: float = 0.001
    """Share of such texts above which the check `failed_share` alarms."""


@table_asset(
    TOKENIZED,
    deps=[DECONTAMINATED],
    code_version=digest([CODE_VERSION, project.tokenizer()]),
    description="input_ids (no end-of-text; the packer adds it) and n_tokens, for the rows that lack them.",
)
def tokenized(
    context: dg.AssetExecutionContext, corpus: CorpusResource, engine: EngineResource, config: TokenizeSettings
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Encode new rows."""
    location = corpus.location()
    with user_errors():
        pin = input_pin(context, DECONTAMINATED, location, "decontaminated", OPTIONAL)
        settings = from_dict(TokenizeConfig, config.model_dump())
        result = tokenize(location, settings, input_pin=pin, run_id=context.run.run_id, engine=engine.config())
    bins = eda.length_bins(open_dataset(location, result.record.version))
    plot = bars("documents by characters", [b.label for b in bins], [b.rows for b in bins])
    event = stage_result(location, result, DECONTAMINATED, plot)
    how = {f"tokenizer/{name}": value for name, value in result.record.details.get("tokenizer_engine", {}).items()}
    return event._replace(metadata={**(event.metadata or {}), **how})
