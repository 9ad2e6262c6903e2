"""Dagster assets on local disk: the story of a project, and what only Dagster can get wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import psutil
import pytest

from pretrain_assets.assets.keys import CHECKPOINT, DEDUPED, INGESTED, TOKENIZED
from pretrain_assets.definitions import build_defs, defs
from pretrain_assets.launch.contract import read_result
from pretrain_assets.table.storage import open_dataset
from pretrain_assets.train import checkpoint
from pretrain_assets_tests.pipeline import CHAIN, TINY, PipelineStory, Project, open_project
from pretrain_assets_tests.ui import browser_page, make_ui, needs_chromium, screenshot


@pytest.fixture(scope="class")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    base = tmp_path_factory.mktemp("local")
    with pytest.MonkeyPatch.context() as patch:
        yield from open_project(base / "home", str(base / "storage"), patch)


@pytest.fixture(scope="class")
def ui_port(project: Project) -> Iterator[int]:
    project.add_source("first.parquet", 0, 400)
    assert project.pretrain().success
    with make_ui(project.home) as port:
        yield port


class TestLocalStory(PipelineStory):
    """The whole story on local disk."""


@pytest.mark.slow
class TestUserInterface:
    """A look at a project through `make ui`."""

    @pytest.mark.browser
    @needs_chromium
    def test_a_browser_shows_the_graph_versions_rows_and_plots(self, project: Project, ui_port: int) -> None:
        with browser_page(ui_port) as page:
            page.goto("/asset-groups")
            for name in (*(key.path[-1] for key in CHAIN), "checkpoint", "export", "index", "curation_report"):
                page.get_by_text(name, exact=True).last.wait_for()
            screenshot(page, "asset-graph")
            for key, name in ((TOKENIZED, "tokenized"), (CHECKPOINT, "checkpoint")):
                shown = project.metadata(key)
                page.goto(f"/assets/{key.to_user_string()}?view=events")
                page.get_by_text(str(shown["lance/pin"]), exact=True).first.wait_for()
                page.get_by_role("cell", name=str(shown["lance/version"]), exact=True).first.wait_for()
                if name == "tokenized":
                    page.get_by_role("cell", name="dagster/row_count", exact=True).wait_for()
                    page.get_by_role("cell", name=str(shown["dagster/row_count"]), exact=True).first.wait_for()
                plot = page.locator("img[src^='data:image/svg+xml']").first
                plot.wait_for()
                assert plot.evaluate("image => image.complete && image.naturalWidth > 100")
                screenshot(page, f"{name}-materialization")

    def test_a_run_cancelled_in_the_ui_saves_and_leaves_no_process(self, project: Project, ui_port: int) -> None:
        from dagster_graphql import DagsterGraphQLClient

        client = DagsterGraphQLClient("127.0.0.1", ui_port)
        endless = {**TINY, "train.max_steps": 100_000, "execution.checkpoint_every": 1}
        run_id = client.submit_job_execution(
            "pretrain",
            run_config={
                "ops": {"model__checkpoint": {"config": {"overrides": endless}}},
                "execution": {"config": {"in_process": {}}},  # one process fewer to start; cancelling is the same
            },
            tags={"dagster/partition": "demo"},
            asset_selection=[CHECKPOINT],
        )
        wait_until(lambda: len(_ranks(project)) == 2 and _newest_step(project) > 6, seconds=90)
        client.terminate_run(run_id)
        wait_until(lambda: client.get_run_status(run_id) == dg.DagsterRunStatus.CANCELED, seconds=90)
        wait_until(lambda: not _ranks(project), seconds=10)
        newest = max(_run_dirs(project), key=lambda run_dir: run_dir.stat().st_mtime)
        result = read_result(str(newest))
        assert result is not None and result["status"] == "stopped"
        assert result["step"] == _newest_step(project) == checkpoint.newest(str(newest))


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.2)


def _ranks(project: Project) -> list[psutil.Process]:
    """Training processes of the project's runs."""
    wanted = ["-m", "pretrain_assets.train"]
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if (line := process.info["cmdline"] or [])[2:4] == wanted and line[-1].startswith(str(project.home.parent))
    ]


def _newest_step(project: Project) -> int:
    steps = [path for run_dir in _run_dirs(project) for path in run_dir.glob("checkpoints/step_*")]
    return max((int(path.name.removeprefix("step_")) for path in steps), default=0)


def _run_dirs(project: Project) -> list[Path]:
    return list((project.home.parent / "storage" / "runs").iterdir())


class TestPins:
    """A step reads the version its input materialization names."""

    def test_rows_committed_outside_dagster_are_left_to_the_next_run(self, project: Project) -> None:
        project.add_source("first.parquet", 0, 50)
        assert _run(project, INGESTED)
        project.add_source("second.parquet", 50, 30)
        project.cli("ingest")  # version 2, of which Dagster knows nothing
        assert open_dataset(project.location).version == 2
        assert _run(project, DEDUPED)
        metadata = project.metadata(DEDUPED)
        assert metadata["lance/inputs"] == [f"{metadata['lance/table_id']}@1"]
        dataset = open_dataset(project.location)
        assert dataset.count_rows("is_dup IS NOT NULL") == 50 and dataset.count_rows("is_dup IS NULL") == 30

    def test_a_mistake_fails_once_with_its_own_words(self, project: Project) -> None:
        overrides = {"data.filter": "scroe > 3"}
        config = {"ops": {"model__checkpoint": {"config": {"overrides": overrides}}}}
        project.cli("tokenize")
        result = (
            build_defs()
            .resolve_implicit_global_asset_job_def()
            .execute_in_process(
                instance=project.instance,
                asset_selection=[CHECKPOINT],
                run_config=config,
                partition_key="demo",
                raise_on_error=False,
            )
        )
        assert not result.success
        failures = [event for event in result.all_events if event.is_step_failure]
        assert [event.step_key for event in failures] == ["model__checkpoint"]
        message = failures[0].step_failure_data.user_failure_data.description
        assert "scroe" in message and "Did you mean 'score'?" in message
        assert not [event for event in result.all_events if event.is_step_up_for_retry]


def _run(project: Project, key: dg.AssetKey) -> bool:
    definition = build_defs().resolve_implicit_global_asset_job_def()
    return bool(definition.execute_in_process(instance=project.instance, asset_selection=[key]).success)


def test_definitions_are_loadable_and_delivered_stopped() -> None:
    dg.Definitions.validate_loadable(defs)
    assert defs.resolve_schedule_def("nightly_recuration").default_status == dg.DefaultScheduleStatus.STOPPED
    assert defs.resolve_sensor_def("source_sensor").default_status == dg.DefaultSensorStatus.STOPPED


def test_the_location_loads_without_torch_lancedb_or_ray() -> None:
    code = "import sys, pretrain_assets.definitions; print({'torch', 'lancedb', 'lance', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_resources_can_be_overridden() -> None:
    from pretrain_assets.assets.resources import CorpusResource

    replaced = build_defs({"corpus": CorpusResource(database_uri="/elsewhere")}).resources or {}
    assert replaced["corpus"].location().uri == "/elsewhere/corpus.lance"
