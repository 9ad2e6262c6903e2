"""`forensics/contamination`: at which step a run first trained on each evaluation item, one partition per recipe.

Its check `scores_stand` is the gate of evaluation results: whoever shows or compares a score of the checkpoint asks it,
or the metadata `scores_stand`, set by set. It is an error, but blocks nothing: what comes after it (the run card) is
what has to say in plain sight that a score does not stand, and would not be made if this check blocked.
"""

from dataclasses import asdict

import dagster as dg

from pretrain_assets.assets.checkpoint import recipe_partitions
from pretrain_assets.assets.events import check_result, md, user_errors
from pretrain_assets.assets.keys import CHECKPOINT, CONTAMINATION_IN_TIME, DECONTAMINATED, GROUP, RETRY
from pretrain_assets.assets.pins import newest_checkpoint
from pretrain_assets.assets.resources import CorpusResource, LauncherResource
from pretrain_assets.forensics.contamination.contamination import CODE_VERSION, ContaminationInTime, scores_stand
from pretrain_assets.report.contamination_in_time_text import sightings_text, steps_text, verdict, verdicts_text
from pretrain_assets.report.plots import lines
from pretrain_assets.table.lineage import digest

MOST_PLOTTED = 3
"""Sets with a curve, those with the most items seen: more do not fit in one small image."""


class ContaminationInTimeSettings(dg.Config):
    """Launchpad settings of the question."""

    tag: str = ""
    """A tag of the decontaminated stage, for eval sets added after training. Empty: the version trained on."""


@dg.asset(
    key=CONTAMINATION_IN_TIME,
    deps=[CHECKPOINT, DECONTAMINATED],
    group_name=GROUP,
    kinds={"table"},
    partitions_def=recipe_partitions,
    code_version=digest([CODE_VERSION]),
    retry_policy=RETRY,
    check_specs=[dg.AssetCheckSpec("scores_stand", asset=CONTAMINATION_IN_TIME, description=scores_stand.__doc__)],
    description="First step that trained on each evaluation item, so which checkpoints' scores stand.",
)
def contamination_in_time(
    context: dg.AssetExecutionContext,
    corpus: CorpusResource,
    launcher: LauncherResource,
    config: ContaminationInTimeSettings,
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Ask about the partition's newest checkpoint, and all that its run has saved."""
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.forensics.contamination import contamination

    with user_errors():
        which = newest_checkpoint(context) or context.partition_key
        subject = find_checkpoint(which, launcher.runs(), digests=False)
        found = contamination.contamination_in_time(corpus.location(), subject, tag=config.tag or None)
    severity = dg.AssetCheckSeverity.ERROR if found.stands is False else dg.AssetCheckSeverity.WARN
    return dg.MaterializeResult(
        metadata={
            "plot": md(_plot(found)),
            "scores": md(verdicts_text(found.sets, tablefmt="github")),
            "checkpoints": md(steps_text(found, tablefmt="github")),
            "evidence": md(sightings_text(found, tablefmt="github") if found.items else "No document holds an item."),
            "scores_stand": dg.MetadataValue.json({one.name: verdict(one) for one in found.sets}),
            "newest_clean": dg.MetadataValue.json({one.name: one.newest_clean for one in found.sets}),
            "checkpoint": dg.MetadataValue.path(found.checkpoint),
            "steps": found.step,
            "documents_seen": found.documents_seen,
            "documents_not_searched": found.unsearched_seen,
            "lance/pin": found.pin,
            "lance/version": found.version,
        },
        data_version=dg.DataVersion(digest([CODE_VERSION, found.pin, found.step, [asdict(one) for one in found.sets]])),
        check_results=[check_result(scores_stand(found), CONTAMINATION_IN_TIME, severity)],
    )


def _plot(found: ContaminationInTime) -> str:
    """Items that are still clean at the start and at every saved checkpoint."""
    dirtiest = sorted(found.sets, key=lambda one: -one.dirty[-1])[:MOST_PLOTTED]
    return lines(
        {
            f"clean, {one.name}": ((0, *found.steps), [one.searched - seen for seen in (0, *one.dirty)])
            for one in dirtiest
        }
    )
