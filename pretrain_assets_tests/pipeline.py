"""The story of one project, told once for every kind of storage: see test_assets.py (local) and test_assets_s3.py."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pretrain_assets.assets.keys import (
    CHECKPOINT,
    CURATION_REPORT,
    DECONTAMINATED,
    DEDUPED,
    INDEX,
    INGESTED,
    NEAR_DEDUPED,
    QUALITY,
    SOURCE_FILES,
    TOKENIZED,
)
from pretrain_assets.cli import cli
from pretrain_assets.definitions import build_defs
from pretrain_assets.table.storage import Location, filesystem, open_dataset

ROOT = Path(__file__).parent.parent
BUNDLED = ROOT / "pretrain_assets" / "data" / "public_domain_docs.parquet"
TINY = {
    "model.n_layer": 1,
    "model.n_head": 2,
    "model.n_embd": 16,
    "data.seq_len": 32,
    "train.global_batch_tokens": 8 * 32,
    "train.max_steps": 6,
    "train.warmup_steps": 1,
    "execution.log_every": 1,
    "train.eval_every": 3,
    "train.eval_blocks": 8,
    "execution.checkpoint_every": 3,
}
"""The demo's recipe, made small enough for a test."""
CHAIN = (INGESTED, DEDUPED, NEAR_DEDUPED, QUALITY, DECONTAMINATED, TOKENIZED)
"""Stages that make one version each, in order; then comes the index."""
FILLED = ("is_dup", "is_near_dup", "pii_ips", "contaminated", "n_tokens")
"""A column of every stage that has a value in each row."""
TOKENS = len(CHAIN)
"""The version of the first tokens."""


@dataclass
class Project:
    """A persistent Dagster instance, a table and a folder of sources."""

    home: Path
    instance: dg.DagsterInstance
    location: Location
    sources: Path

    def run(self, job: str, *, config: dict[str, Any] | None = None, partition: str | None = None) -> Any:
        """Execute a job of the real definitions in this process."""
        definition = build_defs().resolve_job_def(job)
        return definition.execute_in_process(
            instance=self.instance, run_config=config or {}, partition_key=partition, raise_on_error=False
        )

    def pretrain(self) -> Any:
        """The whole graph with the tiny recipe."""
        config = {"ops": {"model__checkpoint": {"config": {"overrides": TINY}}}}
        return self.run("pretrain", config=config, partition="demo")

    def add_source(self, name: str, first: int, count: int) -> None:
        """Put `count` bundled documents into a new source file."""
        pq.write_table(pq.read_table(BUNDLED).slice(first, count), self.sources / name)

    def materialization(self, key: dg.AssetKey) -> dg.AssetMaterialization:
        event = self.instance.get_latest_materialization_event(key)
        assert event is not None and event.asset_materialization is not None, key
        return event.asset_materialization

    def metadata(self, key: dg.AssetKey) -> dict[str, Any]:
        return {name: value.value for name, value in self.materialization(key).metadata.items()}

    def data_files(self) -> dict[str, int]:
        """Data files of the table and their sizes."""
        fs, path = filesystem(f"{self.location.uri}/data")
        fs.invalidate_cache()
        return {info["name"].rsplit("/", 1)[-1]: info["size"] for info in fs.ls(path, detail=True)}

    def cli(self, *arguments: str) -> str:
        """Output of a `pretrain` command that must succeed."""
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout


def open_project(home: Path, storage: str, patch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A fresh project at `home`, its table and runs under `storage`."""
    home.mkdir()
    shutil.copy(ROOT / "dagster.yaml", home)
    sources = home / "sources"
    sources.mkdir()
    settings = {
        "PRETRAIN_DATABASE_URI": f"{storage}/lancedb",
        "PRETRAIN_RUNS_URI": f"{storage}/runs",
        "PRETRAIN_SOURCES": str(sources),
        "PRETRAIN_TOKENIZER": "byte",
        "DAGSTER_HOME": str(home),
    }
    for name, value in settings.items():
        patch.setenv(name, value)
    with dg.DagsterInstance.get() as instance:
        yield Project(home, instance, Location(database_uri=f"{storage}/lancedb"), sources)


class PipelineStory:
    """Steps in order; each builds on the one before. Subclasses bring the `project` fixture."""

    def test_the_whole_graph_materializes_one_version_per_stage(self, project: Project) -> None:
        project.add_source("first.parquet", 0, 400)
        result = project.pretrain()
        assert result.success
        versions = [project.metadata(key)["lance/version"] for key in (*CHAIN, INDEX)]
        assert versions == [*range(1, TOKENS + 2)] and open_dataset(project.location).version == TOKENS + 1
        assert project.metadata(TOKENIZED)["dagster/row_count"] == 400
        assert project.metadata(TOKENIZED)["lance/tag"] == f"tokenized-v{TOKENS}"
        assert "data:image/svg+xml" in project.metadata(TOKENIZED)["plot"]
        checks = result.get_asset_check_evaluations()
        assert {check.check_name for check in checks} >= {"ids_unique", "token_counts_match", "filters_disjoint"}
        assert all(check.passed for check in checks)

    def test_training_streams_numbers_and_pins_its_data(self, project: Project) -> None:
        found = project.metadata(CHECKPOINT)
        table_id = project.metadata(TOKENIZED)["lance/table_id"]
        assert found["lance/pin"] == found["passport"]["pin"] == f"{table_id}@{TOKENS}"
        assert found["steps"] == 6 and found["val_loss"] < found["first_val_loss"]
        observations = project.instance.fetch_observations(CHECKPOINT, limit=100).records
        losses = [
            r.asset_observation.metadata["loss"].value for r in observations if "loss" in r.asset_observation.metadata
        ]
        assert len(losses) == 6 and losses[0] == pytest.approx(found["train_loss"], abs=1e-4)

    def test_data_versions_are_pins_and_provenance_follows_them(self, project: Project) -> None:
        table_id = project.metadata(TOKENIZED)["lance/table_id"]
        for version, (upstream, key) in enumerate(itertools.pairwise((*CHAIN, CHECKPOINT)), 1):
            tags = project.materialization(key).tags or {}
            assert tags[f"dagster/input_data_version/{upstream.to_user_string()}"] == f"{table_id}@{version}"

    def test_lineage_says_what_dagsters_provenance_says(self, project: Project) -> None:
        facts = json.loads(project.cli("lineage", "--json"))
        text = project.cli("lineage")
        assert [link["stage"] for link in facts["chain"]] == [key.path[-1] for key in reversed(CHAIN)]
        links = dict(zip(reversed(CHAIN), facts["chain"], strict=True))
        for key, link in links.items():
            metadata = project.metadata(key)
            assert (link["pin"], link["tag"]) == (metadata["lance/pin"], metadata["lance/tag"])
            assert link["pin"] in text and link["tag"] in text
            assert project.instance.get_run_by_id(link["run_id"]) is not None
        tags = project.materialization(CHECKPOINT).tags or {}
        assert tags["dagster/input_data_version/corpus/tokenized"] == facts["checkpoint"]["pin"]
        for upstream, key in itertools.pairwise(CHAIN):
            tags = project.materialization(key).tags or {}
            assert [tags[f"dagster/input_data_version/{upstream.to_user_string()}"]] == links[key]["inputs"]

    def test_search_says_what_the_checkpoint_saw(self, project: Project) -> None:
        answer = json.loads(project.cli("search", "lord king people", "--json"))
        assert len(answer["hits"]) == 5
        for hit in answer["hits"]:
            seen = hit["seen"]
            assert (seen["first_step"] is None) == bool(seen["reason"])
            assert seen["first_step"] is None or 1 <= seen["first_step"] <= 6

    def test_again_changes_nothing(self, project: Project) -> None:
        keys = (*CHAIN, CHECKPOINT, INDEX, CURATION_REPORT)
        before = {key: (project.materialization(key).tags or {})["dagster/data_version"] for key in keys}
        files = project.data_files()
        assert project.pretrain().success
        assert {key: (project.materialization(key).tags or {})["dagster/data_version"] for key in keys} == before
        assert open_dataset(project.location).version == TOKENS + 1 and project.data_files() == files
        assert project.metadata(TOKENIZED)["changed"] is False

    def test_a_nightly_tick_curates_just_the_new_rows(self, project: Project) -> None:
        old_files, old_checkpoint = project.data_files(), project.metadata(CHECKPOINT)
        rows_at_pin = open_dataset(project.location, TOKENS).to_table(columns=["id", "input_ids"])
        project.add_source("second.parquet", 380, 40)  # 20 documents again, 20 new ones

        schedule = build_defs().resolve_schedule_def("nightly_recuration")
        with dg.build_schedule_context(instance=project.instance) as context:
            tick = schedule.evaluate_tick(context)
        assert len(tick.run_requests or []) == 1
        assert project.run("recurate", config=tick.run_requests[0].run_config).success

        versions = [project.metadata(key)["lance/version"] for key in (*CHAIN, INDEX)]
        assert versions == [*range(TOKENS + 2, 2 * TOKENS + 3)]
        new_files = project.data_files()
        assert {name: new_files[name] for name in old_files} == old_files
        added = sum(size for name, size in new_files.items() if name not in old_files)
        assert added < sum(old_files.values()) / 4
        dataset = open_dataset(project.location)
        assert dataset.count_rows() == 440 and dataset.count_rows("is_dup AND id >= 400") == 20
        assert dataset.count_rows(" OR ".join(f"{name} IS NULL" for name in FILLED)) == 0
        assert project.metadata(CHECKPOINT) == old_checkpoint
        pinned = int(old_checkpoint["lance/pin"].rpartition("@")[2])
        assert open_dataset(project.location, pinned).to_table(columns=["id", "input_ids"]) == rows_at_pin

    def test_the_old_checkpoint_still_answers_from_its_own_rows(self, project: Project) -> None:
        facts = json.loads(project.cli("lineage", "--json"))
        assert facts["checkpoint"]["tag"] == f"tokenized-v{TOKENS}"
        assert [ingest["tag"] for ingest in facts["ingests"]] == ["ingested-v1"]
        hits = json.loads(project.cli("search", "lord", "--limit", "50", "--json"))["hits"]
        assert hits and max(hit["id"] for hit in hits) < 400

    def test_the_sensor_fires_once_per_change(self, project: Project) -> None:
        sensor = build_defs().resolve_sensor_def("source_sensor")

        def tick(cursor: str | None) -> Any:
            resources = build_defs().resources or {}
            context = dg.build_sensor_context(
                instance=project.instance, cursor=cursor, resources={"source": resources["source"]}
            )
            return sensor.evaluate_tick(context)

        first = tick(None)
        assert len(first.run_requests) == 1 and tick(first.cursor).skip_message
        project.add_source("third.parquet", 500, 10)
        second = tick(first.cursor)
        assert len(second.run_requests) == 1 and second.cursor != first.cursor
        assert project.run("recurate").success
        assert open_dataset(project.location).count_rows() == 450
        observed = project.instance.fetch_observations(SOURCE_FILES, limit=1).records[0].asset_observation
        assert observed.metadata["num_files"].value == 3
