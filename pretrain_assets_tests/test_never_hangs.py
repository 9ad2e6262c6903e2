"""Never hangs, and says what it does: deaths, failures, hangs, diverging losses, spikes, lines, `pretrain seen`."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain_assets.cli import cli
from pretrain_assets.cli import main as pretrain
from pretrain_assets.config import RunSpec, override
from pretrain_assets.errors import ConfigError, DivergenceError, FilterError, WorkerError
from pretrain_assets.launch import local
from pretrain_assets.launch.contract import read_result, write_spec
from pretrain_assets.launch.local import run_local, torchrun_argv
from pretrain_assets.loader.exposure import documents
from pretrain_assets.train import checkpoint, distributed, links, liveness
from pretrain_assets.train.distributed import World, hang_seconds
from pretrain_assets.train.engine import Engine
from pretrain_assets.train.failure import Failure, hung
from pretrain_assets.train.lines import duration, progress_line
from pretrain_assets.train.links import Link
from pretrain_assets.train.liveness import watching
from pretrain_assets.train.loop import Trainer
from pretrain_assets.train.measure import Clock
from pretrain_assets.train.metrics import read_metrics
from pretrain_assets.train.preflight import check_memory
from pretrain_assets.train.pulse import Beat
from pretrain_assets.train.run import run
from pretrain_assets.train.spikes import LEAST, Curve, Point, SpikeDetector
from pretrain_assets_tests import runs
from pretrain_assets_tests.runs import RECIPE, TOKENIZER, after, eventually, losses, make_database, spec_in


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_database(tmp_path_factory.mktemp("train"))


@pytest.fixture
def make_spec(database: str, tmp_path: Path) -> Callable[..., RunSpec]:
    return lambda name="run", **changes: spec_in(database, str(tmp_path / name), **changes)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_num_cores", lambda: 1)


# --- ranks as threads: who is told what, and which failure counts ---------------------------------------------------


class Ended(BaseException):
    """Stands for the end of a process."""


class Ranks:
    """Ranks of one job as threads, with real connections; where a process would end, its threads stop."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch):
        self.size, self.told, self.outcomes = size, list[Failure](), dict[int, str]()
        self._barrier, self._value, self._watches = threading.Barrier(size), 0, dict[int, liveness.Watch]()
        monkeypatch.setattr(World, "from_main", lambda world, value: self._from_main(world, value))
        monkeypatch.setattr(liveness, "end_process", self._end)
        watch = liveness.Watch._watch
        monkeypatch.setattr(liveness.Watch, "_watch", lambda own: self._watch(own, watch))

    def run(self, *bodies: Callable[[World], None]) -> None:
        """Run one body per rank to its end."""
        for rank, body in enumerate(bodies):
            threading.Thread(target=self._rank, args=(rank, body), daemon=True).start()
        eventually(lambda: len(self.outcomes) == self.size)

    def stuck(self, _: World) -> None:
        """As in a collective whose other ranks never come."""
        threading.Event().wait()

    def killed(self, world: World) -> None:
        """As SIGKILL leaves a process: the kernel closes its connections, and it says nothing."""
        watch = eventually(lambda: self._watches.get(world.rank))
        watch._over.set()
        eventually(lambda: world.rank in self.outcomes)
        self.stuck(world)

    def _rank(self, rank: int, body: Callable[[World], None]) -> None:
        world = World(rank=rank, size=self.size, local_size=self.size, device=torch.device("cpu"), control=None)
        try:
            with watching(world, self.told.append):
                body(world)
            self.outcomes[rank] = "left"
        except SystemExit as end:
            self.outcomes[rank] = f"exit {end.code}"

    def _watch(self, own: liveness.Watch, watch: Callable[[liveness.Watch], None]) -> None:
        self._watches[own._world.rank] = own
        try:
            watch(own)
        except Ended:
            for link in own._links.values():
                link.socket.close()
        if not own._failing and not own._leaving:
            self.outcomes[own._world.rank] = "ended"

    def _from_main(self, world: World, value: int) -> int:
        if world.is_main:
            self._value = value
        self._barrier.wait(30)
        value = self._value
        self._barrier.wait(30)
        return value

    def _end(self) -> None:
        raise Ended


def fail(error: Exception) -> Callable[[World], None]:
    """A body that raises."""

    def body(_: World) -> None:
        raise error

    return body


def test_ranks_leave_together_when_the_main_one_has_finished(monkeypatch):
    order: list[int] = []

    def main(_: World) -> None:
        time.sleep(0.3)  # as the last sample and the digest take
        order.append(0)

    ranks = Ranks(3, monkeypatch)
    leave = liveness.Watch.leave
    monkeypatch.setattr(liveness.Watch, "leave", lambda watch: (leave(watch), order.append(watch._world.rank)))
    ranks.run(main, lambda _: None, lambda _: None)
    assert ranks.outcomes == {0: "left", 1: "left", 2: "left"} and ranks.told == []
    assert order[0] == 0  # nobody had left before


def test_the_exception_of_one_rank_ends_ranks_that_wait_and_is_told_once(monkeypatch, capsys):
    ranks = Ranks(3, monkeypatch)
    ranks.run(ranks.stuck, fail(KeyError("lost")), ranks.stuck)
    assert ranks.outcomes == {0: "ended", 1: "exit 1", 2: "ended"}
    (told,) = ranks.told
    assert told.rank == 1 and told.kind == "KeyError" and not told.is_mistake
    assert told.message.startswith(f"rank 1 ({socket.gethostname()}, pid {os.getpid()})")
    assert capsys.readouterr().err.count("KeyError: 'lost'") == 1


def test_the_cause_counts_not_the_closed_connection_that_others_notice(monkeypatch, capsys):
    noticed = threading.Event()

    def notice(_: World) -> None:
        noticed.set()
        raise RuntimeError("Connection closed by peer")

    def cause(_: World) -> None:
        assert noticed.wait(30)
        raise MemoryError("the cause")

    ranks = Ranks(3, monkeypatch)
    ranks.run(notice, notice, cause)
    assert [told.kind for told in ranks.told] == ["MemoryError"] and ranks.told[0].rank == 2
    assert set(ranks.outcomes.values()) == {"exit 1"}
    assert "Connection closed" not in capsys.readouterr().err


def test_a_mistake_met_by_all_ranks_is_one_clean_message(monkeypatch, capsys):
    ranks = Ranks(2, monkeypatch)
    ranks.run(*[fail(FilterError("keeps no row"))] * 2)
    (told,) = ranks.told
    assert told.result == {
        "status": "failed",
        "error": told.message,
        "error_type": "FilterError",
        "is_mistake": True,
        "rank": told.rank,
    }
    assert capsys.readouterr().err == f"error: {told.message}\n" and told.message.endswith("keeps no row")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_ends_without_a_word_is_named(monkeypatch, capsys, victim):
    ranks = Ranks(3, monkeypatch)
    bodies = [ranks.stuck, ranks.stuck, ranks.stuck]
    bodies[victim] = ranks.killed
    ranks.run(*bodies)
    name = f"rank {victim} ({socket.gethostname()}, pid {os.getpid()}) ended without a word"
    assert name in capsys.readouterr().err
    assert [told.kind for told in ranks.told] == (["RankDied"] if victim else [])
    assert sum(outcome == "ended" for outcome in ranks.outcomes.values()) == 3


def test_a_rank_that_does_not_get_on_is_named_with_its_place(monkeypatch, capsys):
    monkeypatch.setenv(distributed.HANG_ENV, "2")

    def waiting(world: World) -> None:
        world.pulse.at("training", 7)
        ranks.stuck(world)

    def slow(world: World) -> None:
        world.pulse.at("waiting for data", 7)
        ranks.stuck(world)

    ranks = Ranks(2, monkeypatch)
    ranks.run(waiting, slow)
    (told,) = ranks.told
    assert told.kind == "RankHung" and told.stuck == [1] and "waiting for data at step 7" in told.message
    assert "the others wait for it" in told.message and "PRETRAIN_HANG_SECONDS=" in told.message
    assert "rank 1 hangs at" in capsys.readouterr().err


def test_a_stopped_process_is_told_from_one_that_waits():
    world = World(rank=0, size=3, local_size=3, device=torch.device("cpu"), control=None)
    world.pulse.at("training", 5)
    found = {rank: Link.__new__(Link) for rank in (1, 2)}
    for rank, link in found.items():
        link.rank, link.host, link.pid, link.left, link.closed = rank, "node", 40 + rank, False, False
        link.beat, link._heard = Beat(5, "training", 30.0), time.monotonic() - (20 if rank == 2 else 0)
    assert hung(world, found, limit=60.0) == []
    (failure,) = hung(world, found, limit=45.0)
    assert failure.stuck == [2] and "rank 2 (node, pid 42)" in failure.message and "SIGSTOP" in failure.message


def test_the_main_rank_may_take_its_time_to_finish():
    world = World(rank=0, size=2, local_size=2, device=torch.device("cpu"), control=None)
    world.pulse.at("finishing")
    time.sleep(0.02)
    assert hung(world, {}, limit=0.01) == []


def test_a_stranger_on_the_port_is_turned_away(monkeypatch):
    monkeypatch.setattr(links, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(World, "from_main", lambda _, value: value)
    world = World(rank=0, size=2, local_size=2, device=torch.device("cpu"), control=None)
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as stranger:
        stranger.sendall(b'{"token": 1, "rank": 1}\n')
        with pytest.raises(WorkerError, match="Ranks 1 did not connect"):
            links._accept(server, world, token=2)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_the_limit_of_a_hang_is_a_number_of_seconds(text):
    with pytest.raises(ConfigError, match="PRETRAIN_HANG_SECONDS="):
        hang_seconds({distributed.HANG_ENV: text})
    assert hang_seconds({}) == 600


# --- losses ---------------------------------------------------------------------------------------------------------


def test_a_jump_is_found_once_where_it_begins_and_noise_is_none():
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0)) * 0.05
    values = [4 - 0.002 * step + float(noise[step]) for step in range(400)]
    plain = [Point(step, loss, 1.0) for step, loss in enumerate(values)]
    assert SpikeDetector(warmup_steps=10).find(plain) == []
    jumped = [point._replace(loss=point.loss + 2) if 200 <= point.step < 205 else point for point in plain]
    (spike,) = SpikeDetector(warmup_steps=10).find(jumped)
    assert spike.step == 200 and spike.loss > 5 and spike.expected == pytest.approx(3.73, abs=0.1)
    assert SpikeDetector(warmup_steps=300).find(jumped) == []
    assert SpikeDetector(warmup_steps=0).find(jumped[195:205]) == []  # too few to compare with


def test_a_loss_that_hardly_moves_has_no_spikes_by_rounding():
    detector = SpikeDetector(warmup_steps=0)
    assert detector.find([Point(step, 1.0, 1.0) for step in range(LEAST)]) == []
    assert detector.find([Point(LEAST, 1.005, 1.0)]) == [] != detector.find([Point(LEAST + 1, 1.02, 1.0)])


def test_the_curve_gives_every_step_once():
    curve = Curve()
    assert curve.look() == []
    for step in (1, 2, 3):
        curve.add(step, torch.tensor(float(step)), torch.tensor(math.inf if step == 3 else 0.5))
    points = curve.look()
    assert points[:2] == [Point(1, 1.0, 0.5), Point(2, 2.0, 0.5)]
    assert [point.is_finite for point in points] == [True, True, False] and curve.look() == []


def spoil(monkeypatch: pytest.MonkeyPatch, at: int, loss: Callable[[Any], Any], norm: Callable[[Any], Any]) -> None:
    """Change what the engine reports of one step."""
    train_step = Engine.train_step

    def spoiled(self: Engine, blocks: Any, *, step: int, total_steps: int) -> Any:
        found = train_step(self, blocks, step=step, total_steps=total_steps)
        return (loss(found[0]), norm(found[1])) if step == at else found

    monkeypatch.setattr(Engine, "train_step", spoiled)


@pytest.mark.parametrize("kind", ["loss", "norm"])
def test_a_step_that_is_not_finite_stops_the_run_with_its_documents(make_spec, monkeypatch, kind):
    same, bad = (lambda x: x), (lambda x: x * math.nan)
    spoil(monkeypatch, 6, bad if kind == "loss" else same, bad if kind == "norm" else same)
    spec = make_spec(execution__log_every=5, execution__async_checkpoint=False)
    with pytest.raises(
        DivergenceError, match=f"The {'loss' if kind == 'loss' else 'gradient norm'} of step 6 is not"
    ) as caught:
        run(spec)
    world = World(rank=0, size=1, local_size=1, device=torch.device("cpu"), control=None)
    ids = list(dict.fromkeys(e.doc_id for e in documents(Trainer(spec, world, []).schedule, 6)))
    assert f"documents {', '.join(map(str, ids[:5]))} and {len(ids) - 5} more" in str(caught.value)
    assert f"`pretrain seen {spec.run_dir} --step 6`" in str(caught.value)
    assert "Nothing after the checkpoint of step 4" in str(caught.value) and checkpoint.steps(spec.run_dir) == [4]
    result = read_result(spec.run_dir)
    assert result["error"] == str(caught.value) and result["is_mistake"] and result["rank"] == 0


def test_a_model_that_its_last_step_ruined_is_neither_saved_nor_sampled(make_spec):
    """The loss of the step is finite: it is from before the update."""
    changes = {"learning_rate": 1e30, "min_learning_rate": 1e30, "warmup_steps": 0, "max_steps": 1}
    spec = make_spec(**{f"train__{name}": value for name, value in changes.items()})
    with pytest.raises(DivergenceError, match="validation loss after step 1 is not finite"):
        run(spec)
    assert checkpoint.steps(spec.run_dir) == [] and read_result(spec.run_dir)["is_mistake"]


def test_weights_too_large_to_compute_with_are_not_saved(make_spec):
    spec = make_spec(train__max_steps=3, execution__checkpoint_every=2, train__eval_every=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "is_sound", lambda self: False)
        with pytest.raises(DivergenceError, match="weights after step 2 are not finite, or too large"):
            run(spec)
    assert checkpoint.steps(spec.run_dir) == []
    recipe, world = spec.recipe, World(rank=0, size=1, local_size=1, device=torch.device("cpu"), control=None)
    engine = Engine(recipe, spec.tokenizer, world)
    assert engine.is_sound()
    with torch.no_grad():
        engine.model.norm.weight[0] = 1e30
    assert not engine.is_sound()


def test_a_second_request_to_stop_does_not_cut_the_saving_short():
    """The launcher is asked again while its run saves; it waits for it to end all the same."""
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), sys.exit(75)));"
        "print(flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    local.stop(process)
    assert process.poll() == 75
    process.stdout.close()


@pytest.fixture(scope="module")
def evaluated_long(database: str, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """A run whose evaluations ask twice each whether to stop: after steps 0, 3, 6 and 7."""
    return long_evaluations(database, str(tmp_path_factory.mktemp("long")))


def long_evaluations(database: str, run_dir: str) -> RunSpec:
    changes = {"max_steps": 7, "eval_every": 3, "eval_blocks": 11}
    return spec_in(
        database, run_dir, execution__micro_batch_blocks=1, **{f"train__{name}": v for name, v in changes.items()}
    )


@pytest.mark.parametrize(
    ("asked", "step", "evaluated"),
    [(1, 0, []), (5, 3, [0]), (7, 3, [0]), (10, 6, [0, 3]), (13, 7, [0, 3, 6]), (14, 7, [0, 3, 6])],
)
def test_a_request_to_stop_ends_an_evaluation_which_is_made_up_for(
    evaluated_long, database, tmp_path, asked, step, evaluated
):
    """The first evaluation; before and in a later one; before and in the last."""
    if read_result(evaluated_long.run_dir) is None:
        assert run(evaluated_long) == 0
    spec = long_evaluations(database, str(tmp_path / "run"))
    assert run(spec, after(asked)) == 75
    result = read_result(spec.run_dir)
    assert (result["status"], result["step"]) == ("stopped", step)
    assert [at for at, _ in losses(spec.run_dir)["val_loss"]] == evaluated
    assert checkpoint.newest(spec.run_dir) == (step or None) and (result["checkpoint"] is None) == (step == 0)
    assert run(spec) == 0
    assert losses(spec.run_dir) == losses(evaluated_long.run_dir)
    for name in ("digest", "passport"):
        assert read_result(spec.run_dir)[name] == read_result(evaluated_long.run_dir)[name]


def test_a_model_beyond_all_memory_is_refused_before_it_grows(make_spec, monkeypatch):
    numbers = (
        r"model.n_layer=100000000 and model.n_embd=32 has 1,270,\d{3},\d{3},\d{3} weights: 5,08\d\.\d GB, and this"
    )
    with pytest.raises(ConfigError, match=rf"{numbers} machine has [\d,]+\.\d GB of memory"):
        check_memory(override(RECIPE, {"model.n_layer": 100_000_000}), TOKENIZER)
    refused = ConfigError("too large")
    monkeypatch.setattr("pretrain_assets.train.loop.check_memory", lambda *_: (_ for _ in ()).throw(refused))
    monkeypatch.setattr("pretrain_assets.train.loop.Engine", None)  # which would be made afterwards
    with pytest.raises(ConfigError, match="too large"):
        run(make_spec())


def test_a_spike_between_two_log_lines_is_recorded_and_warned_of(make_spec, monkeypatch, caplog):
    spoil(monkeypatch, 38, lambda loss: loss + 9, lambda norm: norm)
    spec = make_spec(
        train__max_steps=40,
        train__global_batch_tokens=128,
        train__learning_rate=1e-4,
        train__eval_every=100,
        execution__checkpoint_every=100,
        execution__log_every=10,
    )
    assert run(spec) == 0
    spikes = {record["step"]: record["spikes"] for record in read_metrics(spec.run_dir) if "spikes" in record}
    assert list(spikes) == [40] and [spike["step"] for spike in spikes[40]] == [38]
    assert spikes[40][0]["loss"] == pytest.approx(spikes[40][0]["expected"] + 9, abs=0.5)
    assert f"at step 38, where {spikes[40][0]['expected']:.4f} was to be expected" in caplog.text
    assert f"pretrain seen {spec.run_dir} --step 38" in caplog.text


# --- lines ----------------------------------------------------------------------------------------------------------


def test_durations_read_well():
    times = {0.4: "0s", 59.4: "59s", 61: "1m01s", 3599.6: "1h00m", 5000: "1h23m", 90_000: "1d01h"}
    assert {seconds: duration(seconds) for seconds in times} == times


def test_lines_of_different_sizes_have_their_columns_at_the_same_places():
    small = {
        "step": 1, "total_steps": 12_000, "loss": 3.1, "lr": 6e-4, "grad_norm": 0.5, "tok_per_s": 950.0, "mfu": None,
        "data_wait": 0.0, "queue_rows": 0, "memory_bytes": 6 * 10**8, "eta_seconds": 5.0,
    }  # fmt: skip
    large = {
        "step": 11_999, "total_steps": 12_000, "loss": 10.98765, "lr": 1.5e-5, "grad_norm": 123.4, "tok_per_s": 3.9e6,
        "mfu": 0.423, "data_wait": 0.101, "queue_rows": 123_456, "memory_bytes": 12 * 10**10, "eta_seconds": 90_000.0,
    }  # fmt: skip
    lines = [progress_line(record) for record in (small, large)]
    places = [[place for place, char in enumerate(line) if char == "|"] for line in lines]
    assert places[0] == places[1] and len(lines[0]) == len(lines[1])
    assert "MFU   n/a" in lines[0] and "MFU 42.3%" in lines[1] and lines[1].endswith("eta  1d01h")


def test_every_second_of_a_run_belongs_to_one_part(make_spec, caplog):
    caplog.set_level("INFO")
    spec = make_spec(train__max_steps=3)
    assert run(spec) == 0
    result = read_result(spec.run_dir)
    assert sum(result["seconds_by_part"].values()) == pytest.approx(result["seconds"])
    assert all(result["seconds_by_part"][part] > 0 for part in ("start", "training", "evaluation", "checkpoints"))
    records = [record for record in read_metrics(spec.run_dir) if "loss" in record]
    stepping = result["seconds_by_part"]["training"] + result["seconds_by_part"]["data_wait"]
    assert sum(record["seconds"] for record in records) == pytest.approx(stepping, rel=0.2)
    assert result["goodput_tok_per_s"] == pytest.approx(3 * 256 / result["seconds"])
    assert all(10**7 < record["memory_bytes"] < 10**11 for record in records)
    assert "256 tokens = 1 rank x 8 blocks (at most 3 at once) x 32 tokens" in caplog.text
    assert "goodput" in caplog.text and f"tokenized-v1 ({spec.pin})" in caplog.text


def test_a_clock_gives_each_lap_to_its_part():
    clock = Clock()
    clock.lap("start")
    time.sleep(0.02)
    clock.lap("training")
    clock.lap("data_wait")
    assert clock.seconds["training"] >= 0.02 and clock.stepping >= clock.seconds["training"]
    assert clock.total == pytest.approx(sum(clock.seconds.values()))


# --- pretrain seen --------------------------------------------------------------------------------------------------


def seen(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    cli.main(["seen", *arguments, "--json"], standalone_mode=False)
    return dict(json.loads(capsys.readouterr().out))


def test_seen_shows_what_a_step_trained_on_with_and_without_a_checkpoint(make_spec, capsys, monkeypatch):
    spec, taken = make_spec(train__max_steps=3), []
    write_spec(spec)
    before = seen(capsys, spec.run_dir, "--step", "2", "--limit", "99", "--ranks", "1")  # it has not run yet
    train_step = Engine.train_step

    def noting(self: Engine, blocks: Any, **at: int) -> Any:
        taken.append(blocks.input_ids)
        return train_step(self, blocks, **at)

    monkeypatch.setattr(Engine, "train_step", noting)
    assert run(spec) == 0
    found = seen(capsys, f"{spec.run_dir}/checkpoints/step_00000003", "--step", "2", "--limit", "99")
    assert found == before | {"run": f"{spec.run_dir}/checkpoints/step_00000003", "done": True}
    parts = found["parts"]
    tokens = int((taken[1] != spec.tokenizer.pad_id).sum())
    assert sum(part["span"]["tokens"] for part in parts) == found["tokens"] == tokens
    assert len(parts) == found["num_parts"] and len(found["blocks"]) == len(taken[1])
    assert found["step"] == 2 and len({part["id"] for part in parts}) == found["num_documents"]
    cli.main(["seen", spec.run_dir, "--step", "2", "--limit", "1"], standalone_mode=False)
    assert f"1 of {len(parts)} parts; --limit {len(parts)} shows all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("which", "step", "said"),
    [
        ("run", "0", "There is no step 0: steps count from 1"),
        ("run", "19", "There is no step 19: the run ends before it. tiny has steps 1 to 18"),
        ("nothing", "1", "There is no run in"),
        ("run/checkpoints/step_00000007", "1", "has no checkpoint of step 7"),
    ],
)
def test_seen_says_what_it_cannot_find(make_spec, capsys, which, step, said):
    spec = make_spec()
    write_spec(spec)
    with pytest.raises(SystemExit):
        pretrain(["seen", str(Path(spec.run_dir).parent / which), "--step", step])
    assert said in capsys.readouterr().err


# --- real processes -------------------------------------------------------------------------------------------------

DRIVER = """
import os, signal, sys, time
from pathlib import Path
from pretrain_assets.launch.contract import read_spec
from pretrain_assets.train.run import run
signal.signal(signal.SIGTERM, lambda *_: None)
deed, at, who, note, calls = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), 0

def should_stop():
    global calls
    calls += 1
    if calls == at and int(os.environ["RANK"]) == who:
        note.write_text(str(time.time()))
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif deed == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif deed == "raise":
            raise KeyError("only here")
    return False

sys.exit(run(read_spec(sys.argv[1]), should_stop))
"""


def drive(spec: RunSpec, deed: str, *, at: int, who: int, folder: Path, env: dict[str, str] | None = None) -> Any:
    """A deed of one of two ranks after a step: exit code, seconds from the deed to the end, and what was printed."""
    driver, note = folder / "driver.py", folder / "note"
    driver.write_text(DRIVER)
    argv = [*torchrun_argv("", 2)[:-3], str(driver), write_spec(spec), deed, str(at), str(who), str(note)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env={**os.environ, **(env or {})})
    return done.returncode, time.time() - float(note.read_text()), done.stdout + done.stderr


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_soon_and_the_same_command_again_is_bitwise_undisturbed(make_spec, tmp_path):
    undisturbed = make_spec("undisturbed")
    whole = run_local(undisturbed, 2)
    spec = make_spec()
    code, seconds, printed = drive(spec, "kill", at=10, who=1, folder=tmp_path)
    assert code == 1 and seconds < 20
    failed = read_result(spec.run_dir)
    assert failed["rank"] == 1 and failed["error_type"] == "RankDied" and not failed["is_mistake"]
    assert failed["error"].startswith("rank 1 (") and printed.count(failed["error"]) == 1
    assert "was ended by SIGKILL" in printed and "Traceback" not in printed
    assert checkpoint.newest(spec.run_dir) in (4, 8)  # step 8 may still have been written
    result = run_local(spec, 2)
    assert losses(spec.run_dir) == losses(undisturbed.run_dir)
    assert result["digest"] == whole["digest"]  # weights, moments, generator state, passport
    assert result["passport"] == whole["passport"]


@pytest.mark.slow
def test_the_main_rank_killed_is_named_by_the_other(make_spec, tmp_path):
    code, seconds, printed = drive(make_spec(), "kill", at=3, who=0, folder=tmp_path)
    assert code == 1 and seconds < 20 and "error: rank 0 (" in printed and "ended without a word" in printed


@pytest.mark.slow
def test_an_exception_of_rank_1_only_is_shown_once_and_is_the_result(make_spec, tmp_path):
    spec = make_spec()
    code, seconds, printed = drive(spec, "raise", at=3, who=1, folder=tmp_path)
    assert code == 1 and seconds < 20
    result = read_result(spec.run_dir)
    assert result["error"].endswith("at step 3: KeyError: 'only here'") and result["rank"] == 1, printed
    assert "in should_stop" in result["traceback"]
    assert printed.count("Traceback") == 1 and printed.count("KeyError: 'only here'") == 1
    assert "ChildFailedError" not in printed and "closed by peer" not in printed


@pytest.mark.slow
def test_a_stopped_rank_is_reported_within_the_limit(make_spec, tmp_path):
    spec, limit = make_spec(), 25
    env = {distributed.HANG_ENV: str(limit)}
    code, seconds, _ = drive(spec, "freeze", at=3, who=1, folder=tmp_path, env=env)
    assert code == 1 and limit <= seconds < limit + 20
    result = read_result(spec.run_dir)
    assert result["error_type"] == "RankHung" and result["rank"] == 1 and "SIGSTOP" in result["error"]


@pytest.mark.slow
def test_the_launcher_names_the_signal_and_a_reason_without_a_result(make_spec, monkeypatch):
    spec = make_spec()
    argv = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
    elastic = [*torchrun_argv("", 1)[:-3], "--no-python", *argv]
    monkeypatch.setattr(local, "torchrun_argv", lambda *_: elastic)
    result = run_local(spec, 1)
    assert result["status"] == "failed" and "was ended by SIGSEGV and left no result" in result["error"]
    monkeypatch.undo()
    with local.contextlib.ExitStack() as stack:
        from pretrain_assets.train.lock import sole_writer

        stack.enter_context(sole_writer(spec.run_dir))  # nothing may be written there, the reason comes all the same
        result = run_local(spec, 2)
    assert result["error_type"] == "ConfigError" and "is being trained by another process" in result["error"]
    assert result["is_mistake"] and read_result(spec.run_dir) is None


@pytest.mark.slow
def test_two_ranks_break_off_an_evaluation_together(database, tmp_path):
    """Rank 1 is asked once in each evaluation and after each step, and says yes in that of step 3."""
    alone, spec = (long_evaluations(database, str(tmp_path / name)) for name in ("alone", "run"))
    assert runs.drive(spec, "stop", 5, tmp_path) != 0
    assert read_result(spec.run_dir)["status"] == "stopped" and checkpoint.newest(spec.run_dir) == 3
    assert [at for at, _ in losses(spec.run_dir)["val_loss"]] == [0]
    assert run(alone) == 0 and run(spec) == 0
    runs.assert_close(losses(spec.run_dir), losses(alone.run_dir))


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_and_says_nothing_more(make_spec):
    spec = make_spec(train__max_steps=1_000_000, train__eval_every=1_000_000, execution__checkpoint_every=1_000_000)
    process = subprocess.Popen(torchrun_argv(write_spec(spec), 2), stderr=subprocess.PIPE, text=True)
    while not any(record["step"] > 3 for record in read_metrics(spec.run_dir)):
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=90)
    result = read_result(spec.run_dir)
    assert process.returncode == 143 and result["status"] == "stopped"
    assert checkpoint.newest(spec.run_dir) == result["step"] and "Traceback" not in printed
    assert run(spec, after(1)) == 75 and read_result(spec.run_dir)["step"] == result["step"] + 1
