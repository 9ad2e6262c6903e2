"""Dagster assets on local disk: the story of a project, and what only Dagster can get wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import dagster as dg
import pytest

from pretrain_assets.assets.keys import DEDUPED, INGESTED
from pretrain_assets.definitions import build_defs, defs
from pretrain_assets.table.storage import open_dataset
from pretrain_assets_tests.pipeline import PipelineStory, Project, open_project


@pytest.fixture(scope="class")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    base = tmp_path_factory.mktemp("local")
    with pytest.MonkeyPatch.context() as patch:
        yield from open_project(base / "home", str(base / "storage"), patch)


class TestLocalStory(PipelineStory):
    """The whole story on local disk."""


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
        result = project.run("pretrain", config=config, partition="demo")
        assert not result.success
        failures = [event for event in result.all_events if event.is_step_failure]
        assert [event.step_key for event in failures] == ["model__checkpoint"]
        message = failures[0].step_failure_data.user_failure_data.description
        assert "scroe" in message and "n_tokens" in message
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
