"""`corpus/masked`: the text with e-mail and public IP addresses replaced; in no job, since most train on the text."""

import dagster as dg
from pydantic import Field

from pretrain_assets.assets.events import stage_result, user_errors
from pretrain_assets.assets.keys import DECONTAMINATED, MASKED
from pretrain_assets.assets.pins import input_pin
from pretrain_assets.assets.resources import CorpusResource, EngineResource
from pretrain_assets.assets.stage import table_asset
from pretrain_assets.config import MaskConfig, from_dict
from pretrain_assets.curate.masking import CODE_VERSION, mask
from pretrain_assets.report.plots import bars


class MaskSettings(dg.Config):
    """Launchpad settings of the masked stage; others than those before make every row anew."""

    emails: list[str] = Field(default=list(MaskConfig.emails))
    """Replacements of e-mail addresses, in turn within a document."""
    ips: list[str] = Field(default=list(MaskConfig.ips))
    """Replacements of public IP addresses, in turn within a document."""


@table_asset(
    MASKED,
    deps=[DECONTAMINATED],
    code_version=CODE_VERSION,
    description="text_masked and n_masked. Optional: tokenize it instead of text by the setting text_column.",
)
def masked(
    context: dg.AssetExecutionContext, corpus: CorpusResource, engine: EngineResource, config: MaskSettings
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Mask new rows."""
    location = corpus.location()
    with user_errors():
        pin = input_pin(context, DECONTAMINATED, location, "decontaminated")
        settings = from_dict(MaskConfig, config.model_dump())
        result = mask(location, settings, input_pin=pin, run_id=context.run.run_id, engine=engine.config())
    ledger = {name: count for name, count in result.record.ledger.items() if name != "in"}
    return stage_result(location, result, DECONTAMINATED, bars("documents", list(ledger), list(ledger.values())))
