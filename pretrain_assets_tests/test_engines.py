"""The engines: identical columns everywhere, deaths survived, and the same errors."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pretrain_assets.config import DedupConfig, EngineConfig, TokenizeConfig
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.errors import ColumnError, ConfigError, WorkerError
from pretrain_assets.table.filler import engines, tasks
from pretrain_assets.table.filler.engines import local, on_ray
from pretrain_assets.table.filler.fill import fill
from pretrain_assets.table.filler.spec import BatchFunction, Fill, RowColumns, Worker
from pretrain_assets.table.lineage import StageResult
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets_tests.tables import append, make_table, newest

ROWS = 900
DEADLY, BAD = "deadly", "bad"

ONE = EngineConfig(workers=1)
TWO = EngineConfig(workers=2)
RAY = EngineConfig(engine="ray", workers=2)
GENEVA = EngineConfig(engine="geneva", workers=2)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A real cluster on this machine; fills join it, and leave it as it was."""
    with engines.start(RAY):  # what it sets before Ray is imported
        on_ray.connect(RAY, extra_cpus=1)
    yield
    import ray

    assert ray.is_initialized()
    ray.shutdown()


GENEVA_MARKS = (
    pytest.mark.slow,
    pytest.mark.optional,
    pytest.mark.filterwarnings("ignore"),
)  # the warnings are its own


@pytest.fixture(
    params=[
        pytest.param(TWO, id="local"),
        pytest.param(RAY, id="ray", marks=pytest.mark.slow),
        pytest.param(GENEVA, id="geneva", marks=GENEVA_MARKS),
    ]
)
def engine(request: pytest.FixtureRequest) -> EngineConfig:
    """Every engine in turn; Ray is required, Geneva may be absent."""
    config: EngineConfig = request.param
    if config is GENEVA and importlib.util.find_spec("geneva") is None:
        pytest.skip("geneva is proprietary, so never required: pip install 'geneva==0.17.*' in another environment")
    if config is not TWO:
        request.getfixturevalue("ray_cluster")
    return config


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Location:
    """A table of two fragments, with deleted rows, empty texts and null."""
    texts: list[str | None] = [f"text {at % 83}: " + "some words, à la carte. " * (at % 40) for at in range(ROWS)]
    texts[100:104] = ["", None, " ", "\u00e9\u0065\u0301 😀"]
    location = make_table(tmp_path_factory.mktemp("original"), texts, identity="engines")
    append(location, texts[: ROWS // 3])
    open_dataset(location).delete("id IN (0, 7, 8, 500, 899, 1000)")
    return location


@pytest.fixture(autouse=True)
def many_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranges, and so joins, in fragments of this size."""
    monkeypatch.setattr(tasks, "RANGE_BYTES", 3_000)


def copy_of(original: Location, path: Path) -> Location:
    """The same table elsewhere: its staged files get the same names."""
    shutil.copytree(original.database_uri, path)
    return Location(database_uri=str(path))


def staged_files(location: Location) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(location.uri, "data").glob("fill-*")}


def columns(location: Location, *names: str) -> pa.Table:
    return open_dataset(location).to_table(columns=["id", *names])


def lengths(builds: str, worker: Worker) -> BatchFunction:
    """Notes which process builds it; a deadly text kills that, once."""
    with open(builds, "a") as file:
        file.write(f"{os.getpid()}\n")
    return partial(_lengths, f"{builds}.died")


def deadly_lengths(builds: str, worker: Worker) -> BatchFunction:
    """A deadly text kills every time."""
    return partial(_lengths, None)


def _lengths(died: str | None, batch: pa.RecordBatch) -> list[pa.Array]:
    texts = [text or "" for text in batch.column(0).to_pylist()]
    if BAD in texts:
        raise KeyError("no such word\nand more")
    if DEADLY in texts and (died is None or not Path(died).exists()):
        if died is not None:
            Path(died).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [pa.array([len(text) for text in texts], pa.int32())]


def fill_lengths(location: Location, engine: EngineConfig, make: Any = lengths, **settings: Any) -> StageResult:
    making: dict[str, Any] = {"stage": "measured", "code_version": "1", "parameters": {}}
    group = RowColumns(
        outputs=pa.schema([computed_field("length", pa.int32(), **making)]),
        inputs=("text",),
        make=partial(make, str(Path(location.database_uri, "builds"))),
        batch_rows=16,
    )
    spec = Fill(stage="measured", groups=(group,), code_version="1", parameters={}, batch_bytes=1 << 20, **settings)
    return fill(location, spec, input_pin=newest(location), engine=engine)


def with_text(original: Location, path: Path, text: str) -> Location:
    """The table with one more fragment, in the middle of which is this text."""
    location = copy_of(original, path)
    append(location, ["before"] * 50 + [text] + ["after"] * 50)
    return location


class TestEnginesGiveIdenticalColumns:
    def test_tokens(self, original: Location, tmp_path: Path, engine: EngineConfig) -> None:
        one, other = copy_of(original, tmp_path / "one"), copy_of(original, tmp_path / "other")
        before = newest(other).version
        for location, config in ((one, ONE if engine is TWO else TWO), (other, engine)):
            tokenize(location, TokenizeConfig(), input_pin=newest(location), engine=config)
        assert columns(other, "input_ids", "n_tokens").equals(columns(one, "input_ids", "n_tokens"))
        assert newest(other).version == before + 1
        if engine is RAY:  # the others have other batches, and with them other pages
            assert staged_files(other) == staged_files(one)
        assert not list(Path(other.staging_uri).glob("geneva-*"))

    def test_hashes_and_duplicates(self, original: Location, tmp_path: Path, engine: EngineConfig) -> None:
        one, other = copy_of(original, tmp_path / "one"), copy_of(original, tmp_path / "other")
        results = [
            dedup(location, DedupConfig(), input_pin=newest(location), engine=config)
            for location, config in ((one, ONE if engine is TWO else TWO), (other, engine))
        ]
        assert columns(other, "content_hash", "is_dup").equals(columns(one, "content_hash", "is_dup"))
        assert results[0].record.ledger == results[1].record.ledger
        if engine is RAY:
            assert staged_files(other) == staged_files(one)


class TestFailingRows:
    def test_the_same_error_names_the_row(self, original: Location, tmp_path: Path, engine: EngineConfig) -> None:
        location = with_text(original, tmp_path / "table", BAD)
        version = newest(location).version
        errors = []
        for config in (ONE, engine):
            with pytest.raises(ColumnError) as caught:
                fill_lengths(location, config)
            assert type(caught.value) is ColumnError
            errors.append(str(caught.value))
        assert errors[0] == errors[1]
        assert "id 1250, doc_id 'doc-1250'" in errors[0]
        assert "KeyError" in errors[0]
        assert newest(location).version == version

    def test_counted_ones_leave_the_same_columns(
        self, original: Location, tmp_path: Path, engine: EngineConfig
    ) -> None:
        one, other = (with_text(original, tmp_path / name, BAD) for name in ("one", "other"))
        results = [fill_lengths(at, config, on_error="null") for at, config in ((one, ONE), (other, engine))]
        assert columns(other, "length", "length_error").equals(columns(one, "length", "length_error"))
        assert results[0].record.ledger == results[1].record.ledger
        assert results[1].record.ledger["failed:KeyError"] == 1


class TestWorkers:
    def test_a_function_is_built_once_per_worker(
        self, original: Location, tmp_path: Path, engine: EngineConfig
    ) -> None:
        location = copy_of(original, tmp_path / "table")
        fill_lengths(location, engine)
        built = Path(location.database_uri, "builds").read_text().split()
        assert 1 <= len(built) <= 2
        assert len(set(built)) == len(built)
        assert str(os.getpid()) not in built

    @pytest.mark.slow
    def test_one_that_dies_does_not_fail_the_fill(
        self, original: Location, tmp_path: Path, engine: EngineConfig
    ) -> None:
        location = with_text(original, tmp_path / "table", DEADLY)
        version = newest(location).version
        result = fill_lengths(location, engine)
        assert Path(location.database_uri, "builds.died").exists()
        assert result.record.rows == open_dataset(location).count_rows("length IS NOT NULL")
        assert result.record.rows == open_dataset(location).count_rows()
        assert newest(location).version == version + 1

    @pytest.mark.slow
    def test_a_row_that_kills_every_one_ends_the_fill(
        self, original: Location, tmp_path: Path, engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in (local, on_ray):
            monkeypatch.setattr(module, "MAX_DEATHS", 2)
        location = with_text(original, tmp_path / "table", DEADLY)
        version = newest(location).version
        with pytest.raises(WorkerError, match="died"):
            fill_lengths(location, engine, make=deadly_lengths)
        assert newest(location).version == version


@pytest.mark.parametrize("name", ["ray", "geneva"])
def test_a_missing_package_is_named_with_its_command(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install '{name}"), engines.start(EngineConfig(engine=name)):
        pass


@pytest.mark.slow
class TestRayClusters:
    def test_one_without_the_gpus_asked_for_is_an_error(self, original: Location, ray_cluster: None) -> None:
        group = RowColumns(outputs=pa.schema([pa.field("x", pa.int32())]), inputs=("text",), make=_none, num_gpus=1)
        job = tasks.Job(
            key="gpu",
            uri=original.uri,
            version=newest(original).version,
            group=group,
            outputs=group.outputs,
            judged=("x",),
            error_name=None,
            on_error="raise",
            batch_bytes=1 << 20,
        )
        work = tasks.cut(open_dataset(original), open_dataset(original).get_fragments()[0], group, "fill-gpu", [])
        with engines.start(RAY) as session, pytest.raises(ConfigError, match="1 GPUs per worker for x"):
            session.run(job, work, lambda *_: None)


def _none(worker: Worker) -> BatchFunction:
    raise AssertionError("never built")
