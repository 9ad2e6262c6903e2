"""`source/eval_sets`: the evaluation sets outside the table, observed by the content that is searched for."""

import warnings

import dagster as dg

from pretrain_assets.assets.events import user_errors
from pretrain_assets.assets.keys import EVAL_SETS, GROUP
from pretrain_assets.assets.resources import EvalSetsResource

warnings.filterwarnings("ignore", message=".*observable_source_asset", category=dg.BetaWarning)


@dg.observable_source_asset(
    key=EVAL_SETS, group_name=GROUP, description="Evaluation items that documents are searched for; never trained on."
)
def eval_sets(eval_sets: EvalSetsResource) -> dg.ObserveResult:
    """Read the sets: the data version changes when an item or the fields searched do."""
    from pretrain_assets.curate.eval_sets import read_eval_sets
    from pretrain_assets.table.lineage import digest

    with user_errors():
        sets = read_eval_sets(eval_sets.eval_sets)
    return dg.ObserveResult(
        data_version=dg.DataVersion(digest([[one.name, one.fingerprint] for one in sets])),
        metadata={
            "eval_sets": eval_sets.eval_sets,
            "items": {one.name: len(one.items) for one in sets},
        },
    )
