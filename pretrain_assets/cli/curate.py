"""The verbs of curation beyond exact duplicates, and the group `curate`: all its stages in order, and the report.

Invariant: a verb does what the asset of the same stage does, with the same inputs, and prints the version it made.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pretrain_assets import project
from pretrain_assets.cli.common import (
    as_json,
    check_folder,
    parse_change,
    pin_of,
    print_stage,
    stage_facts,
    with_engine,
)
from pretrain_assets.cli.filters import at_version, open_at
from pretrain_assets.config import EngineConfig, override

if TYPE_CHECKING:
    from pretrain_assets.table.lineage import Pin, StageResult
    from pretrain_assets.table.storage import Location

T = TypeVar("T")

with_settings = click.option(
    "--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change a setting of the stage, such as threshold=0.8"
)


@click.command("near-dedup")
@with_settings
@with_engine
@as_json
@click.pass_obj
def near_dedup(obj: dict[str, Any], changes: tuple[str, ...], engine: EngineConfig, json_output: bool) -> None:
    """Find near duplicates (MinHash) among the rows that were not compared yet; others than before: all rows."""
    print_stage(_near_dedup(obj["location"], engine, changes), json_output)


@click.command()
@with_settings
@with_engine
@as_json
@click.pass_obj
def quality(obj: dict[str, Any], changes: tuple[str, ...], engine: EngineConfig, json_output: bool) -> None:
    """Measure the signals of Gopher, C4 and FineWeb, language and PII of the rows that lack them."""
    print_stage(_quality(obj["location"], engine, changes), json_output)


@click.command()
@click.argument("eval_sets", nargs=-1)
@with_settings
@with_engine
@as_json
@click.pass_obj
def decontaminate(
    obj: dict[str, Any],
    eval_sets: tuple[str, ...],
    changes: tuple[str, ...],
    engine: EngineConfig,
    json_output: bool,
) -> None:
    """Search the rows that were not searched yet for evaluation items; with other sets or settings, all rows.

    EVAL_SETS: [NAME=]FILES[#FIELD+FIELD], JSON lines or parquet, or bundled [PRETRAIN_EVAL_SETS; bundled].
    """
    from pretrain_assets.curate.contamination_report import contamination_report
    from pretrain_assets.report.contamination_text import contamination_text
    from pretrain_assets.table.versions import open_pin

    result = _decontaminate(obj["location"], engine, changes, eval_sets)
    print_stage(result, json_output)
    if not json_output:
        click.echo(contamination_text(contamination_report(open_pin(obj["location"], result.pin))))


@click.command()
@with_settings
@with_engine
@as_json
@click.pass_obj
def mask(obj: dict[str, Any], changes: tuple[str, ...], engine: EngineConfig, json_output: bool) -> None:
    """Write text_masked: the text with e-mail and public IP addresses replaced."""
    from pretrain_assets.config import MaskConfig
    from pretrain_assets.curate.masking import mask as run

    location = obj["location"]
    config = _settings(location, "masked", MaskConfig(), changes)
    print_stage(run(location, config, input_pin=pin_of(location, "ingested"), engine=engine), json_output)


@click.group()
def curate() -> None:
    """Duplicates, quality, language and contamination as columns; nothing is thrown away."""


@curate.command("run")
@with_engine
@as_json
@click.pass_obj
def run_all(obj: dict[str, Any], engine: EngineConfig, json_output: bool) -> None:
    """Run dedup, near-dedup, quality and decontaminate in order, each with the settings of its last run.

    Rows that were done are left as they are.
    """
    results = []
    for stage in (_dedup, _near_dedup, _quality, _decontaminate):
        results.append(stage(obj["location"], engine))
        if not json_output:
            print_stage(results[-1], False)
    if json_output:
        click.echo(json.dumps([stage_facts(result) for result in results], indent=2))


@curate.command()
@click.option("--filter", "predicate", help="SQL over columns and named filters [clean]")
@at_version
@click.option("-o", "--out", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="HTML file to write.")
@as_json
@click.pass_obj
def report(
    obj: dict[str, Any], predicate: str | None, version: str | None, out: Path | None, json_output: bool
) -> None:
    """Score, length, language, duplicates, quality signals, contamination and the funnel, as one HTML file."""
    check_folder("--out", out)
    from pretrain_assets.curate.report import make_report
    from pretrain_assets.report.curation_html import report_html, write_report
    from pretrain_assets.report.curation_text import funnel_text

    found = make_report(open_at(obj["location"], version), predicate)
    if out:
        out.write_text(report_html(found))
    if json_output:
        click.echo(json.dumps({**asdict(found), "html": out and str(out)}, indent=2))
        return
    place = str(out) if out else write_report(found, obj["runs"])
    if found.funnel:
        click.echo(f"filter {found.funnel.filter}\n{funnel_text(found.funnel)}\n")
    for section in found.sections:
        if section.missing:
            click.echo(f"{section.title}: {section.missing}")
    click.echo(f"report: {place}")


def _dedup(location: Location, engine: EngineConfig) -> StageResult:
    from pretrain_assets.config import DedupConfig
    from pretrain_assets.curate.dedup import dedup as run

    return run(location, DedupConfig(), input_pin=pin_of(location, "ingested"), engine=engine)


def _near_dedup(location: Location, engine: EngineConfig, changes: tuple[str, ...] = ()) -> StageResult:
    from pretrain_assets.config import NearDedupConfig
    from pretrain_assets.curate.near_dedup import near_dedup as run

    config = _settings(location, "near_deduped", NearDedupConfig(), changes)
    return run(location, config, input_pin=_before(location, "near_deduped"), engine=engine)


def _quality(location: Location, engine: EngineConfig, changes: tuple[str, ...] = ()) -> StageResult:
    from pretrain_assets.config import QualityConfig
    from pretrain_assets.curate.quality import quality as run

    config = _settings(location, "quality", QualityConfig(), changes)
    return run(location, config, input_pin=_before(location, "quality"), engine=engine)


def _decontaminate(
    location: Location, engine: EngineConfig, changes: tuple[str, ...] = (), eval_sets: tuple[str, ...] = ()
) -> StageResult:
    from pretrain_assets.config import ContaminationConfig
    from pretrain_assets.curate.contamination import decontaminate as run
    from pretrain_assets.curate.eval_sets import parse_source

    named = [parse_source(one).written(Path.cwd()) for one in eval_sets]
    if not named and project.setting("EVAL_SETS", ""):
        named = project.eval_sets()
    config = _settings(location, "decontaminated", ContaminationConfig(), changes)
    config = replace(config, eval_sets=tuple(named)) if named else config
    return run(location, config, input_pin=_before(location, "decontaminated"), engine=engine)


def _before(location: Location, stage: str) -> Pin:
    """The newest version of the curation stages before a stage.

    Raises:
        TableError: none has run.
    """
    from pretrain_assets.table.versions import CURATION

    return pin_of(location, *CURATION[: CURATION.index(stage)])


def _settings(location: Location, stage: str, usual: T, changes: tuple[str, ...]) -> T:
    """The settings that the stage ran with last, else the usual ones, with those that a person changes.

    So a forgotten option remakes nothing.
    """
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import latest_record

    last = latest_record(open_dataset(location), stage)
    kept = last.details.get("settings", {}) if last else {}
    return override(usual, {**kept, **dict(parse_change(change) for change in changes)})


VERBS = (near_dedup, quality, decontaminate, mask, curate)
