"""The loader's profiler: what it measures on real tables, what it makes of the numbers, and its verb."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pretrain_assets.cli import cli, main
from pretrain_assets.config import LoaderConfig, Recipe, override
from pretrain_assets.errors import ConfigError
from pretrain_assets.loader.diagnosis import diagnose
from pretrain_assets.loader.pack import Packer
from pretrain_assets.loader.profile import Measurement, Pace, act_out, profile
from pretrain_assets.loader.stream import BlockLoader
from pretrain_assets.loader.variants import Variant, default_choices, order_variants, parse_choices, variants_of
from pretrain_assets.recipes import demo
from pretrain_assets.report.profile_plot import RATES, profile_svg
from pretrain_assets.report.profile_text import profile_text
from pretrain_assets.train.metrics import data_wait, speed_per_rank
from pretrain_assets_tests.conftest import S3Server
from pretrain_assets_tests.test_loader import FILTER, SEQ, TOKENIZER, write_table

Table = Callable[[Variant], BlockLoader]
SPLITS = 4


def tiny(settings: LoaderConfig | None = None, **data: Any) -> Recipe:
    """A recipe with one cycle per step: 64 tokens."""
    recipe = dataclasses.replace(demo(), loader=settings or LoaderConfig())
    changes = {"train.global_batch_tokens": SPLITS * SEQ, "data.seq_len": SEQ, "data.num_splits": SPLITS}
    return override(recipe, {**changes, "data.filter": FILTER, **data})


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """4,000 documents of 20 tokens: about 1,000 steps."""
    location, pin = write_table(tmp_path_factory.mktemp("profile"), [20] * 4000, rows_per_file=1000)
    return lambda variant: BlockLoader(location, pin, variant.recipe.data, TOKENIZER, settings=variant.recipe.loader)


def test_a_measurement_counts_whole_windows_after_the_small_first_ones(table: Table) -> None:
    batch = SPLITS * SEQ
    variants = variants_of(tiny(LoaderConfig(window_tokens=16 * batch)), {"io_threads": [1, 2]})
    for measured in profile(table, variants, batches=40):
        assert measured.restarts == 0 and measured.batches % 16 == 0 and 40 <= measured.batches < 40 + 16
        assert measured.tokens == measured.batches * batch
        # four windows may have been read ahead when it begins, and none when it ends, or the other way round
        assert abs(measured.bytes_read / 4 - measured.tokens) < 5 * 16 * batch
        assert measured.seconds > measured.pack_seconds > 0
        assert measured.tokens_per_second == pytest.approx(measured.tokens / measured.seconds)
        assert measured.first_block_seconds > 0 and measured.peak_memory_bytes > 50e6 and measured.retries == 0


def test_each_measurement_reads_its_own_part_of_the_epoch(table: Table) -> None:
    starts: list[int] = []

    class Spied(BlockLoader):
        def batches(self, epoch: int, start_cycle: int = 0, *rest: Any, **options: Any) -> Any:
            starts.append(start_cycle)
            return super().batches(epoch, start_cycle, *rest, **options)

    def spied(variant: Variant) -> BlockLoader:
        loader = table(variant)
        loader.__class__ = Spied
        return loader

    variants = variants_of(tiny(LoaderConfig(window_tokens=256)), {"io_threads": [1, 2, 3, 4]})
    found = profile(spied, variants, batches=10)
    steps = table(variants[0]).plan(0).cycles_per_epoch
    assert starts == [steps * part // 4 for part in range(4)]
    rows = [sum(measured.rows.values()) for measured in found]  # all that was still to be read where it began
    planned = len(table(variants[0]).plan(0).order)
    assert rows == pytest.approx([planned * (4 - part) / 4 for part in range(4)], abs=3 * SPLITS)


def test_a_short_epoch_is_read_over_again(table: Table) -> None:
    recipe = tiny(**{"data.filter": "id < 1100"})  # one window
    (measured,) = profile(table, variants_of(recipe, {}), batches=100)
    steps = table(Variant(recipe=recipe, changes={})).plan(0).cycles_per_epoch
    assert measured.restarts == -(-100 // steps) and measured.batches == measured.restarts * steps
    notes = diagnose([measured], remote=False).notes
    assert any(f"its end was reached {measured.restarts} times" in note for note in notes)


def test_an_epoch_too_small_for_a_step_is_refused_with_what_it_has(table: Table) -> None:
    recipe = tiny(**{"train.global_batch_tokens": 64 * 100, "data.filter": "id < 1020"})
    with pytest.raises(ConfigError, match=r"Epoch 0 has \d+ blocks of 16 tokens, fewer than the 400 of one step"):
        profile(table, variants_of(recipe, {}), batches=1)


@pytest.mark.parametrize(("slow", "pattern"), [("read", "storage"), ("pack", "packer")])
def test_a_slow_stage_is_found_on_a_real_table(
    table: Table, slow: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = getattr(Packer, slow)

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return quick(*arguments, **options)

    monkeypatch.setattr(Packer, slow, slowly)
    (variant,) = variants_of(tiny(LoaderConfig(window_tokens=512, io_threads=1)), {})
    measured = profile(table, [variant], batches=80)
    assert measured[0].tokens_per_second < 512 / 0.02
    assert diagnose(measured, remote=False).pattern == pattern
    pace = act_out(table(variant), variant, 1_000_000, seconds=0.5)  # forty times what it can have
    assert pace and 0.4 < pace.wait_seconds / pace.seconds < 1
    assert diagnose(measured, remote=False, trainer=1_000_000, pace=pace).pattern == pattern


def test_a_slow_trainer_never_waits(table: Table) -> None:
    (variant,) = variants_of(tiny(), {})
    pace = act_out(table(variant), variant, 3200, seconds=0.4)  # 20 ms per step
    assert pace and 0.4 <= pace.seconds < 0.8 and pace.wait_seconds < 0.1 * pace.seconds
    assert act_out(table(variant), variant, 100, seconds=1) is None  # 640 ms per step


def measured(own: LoaderConfig | None = None, **changes: Any) -> Measurement:
    """One second of the demo recipe: reading is the bottleneck unless told otherwise."""
    variant_changes = changes.pop("changes", {})
    recipe = dataclasses.replace(demo(), loader=own or LoaderConfig())
    defaults: dict[str, Any] = {
        "variant": Variant(recipe=override(recipe, variant_changes), changes=variant_changes),
        "batches": 1000,
        "tokens": 1_000_000,
        "seconds": 1.0,
        "bytes_read": 4_000_000,
        "disk_bytes": 4_000_000,
        "read_seconds": 1.9,
        "pack_seconds": 0.1,
        "pack_wait_seconds": 0.9,
        "wait_seconds": 0.95,
        "rows": {"unread": 1, "read": 2, "packed": 3, "consumed": 4},
        "retries": 0,
        "restarts": 0,
        "plan_seconds": 0.1,
        "first_block_seconds": 0.1,
        "peak_memory_bytes": 100_000_000,
    }
    return Measurement(**{**defaults, **changes})


SLOW_PACKER = {"pack_seconds": 0.9, "pack_wait_seconds": 0.05}


def test_storage_too_slow() -> None:
    faster = measured(changes={"loader.io_threads": 4}, tokens=1_800_000)
    found = diagnose([measured(), faster], remote=True)
    assert (found.pattern, found.best, dict(found.changes)) == ("storage", 1, {"loader.io_threads": 4})
    assert "waited for it 90% of the time and packed 10% (4 MB/s with io_threads=2" in found.finding
    assert "up to 1,000,000 tokens/s" in found.finding and "--tokens-per-second" in found.finding
    assert found.advice[:2] == (
        "Set io_threads=4: 1.8 times the tokens/s of the recipe's own settings.",
        "4 was the largest io_threads tried; go on with --grid io_threads=4,8,16.",
    )
    words = " ".join(found.advice)
    assert "loader.prefetch=true" in words and "read_ahead_bytes (now 268435456)" in words
    assert "shuffle_clump_size=4 or 16 (now 1)" in words and "--order" in words
    assert "prefetch" not in " ".join(diagnose([measured(), faster], remote=False).advice)


def test_packer_too_slow() -> None:
    found = diagnose([measured(**SLOW_PACKER)], remote=False, trainer=4_000_000)
    assert (found.pattern, found.best, dict(found.changes)) == ("packer", 0, {})
    assert "packed 90% of the time and waited for reads 5%" in found.finding
    assert "gives 1,000,000 tokens/s, a rank takes 4,000,000: it waits 75%." in found.finding
    assert any("more ranks" in line for line in found.advice) and any("int32" in line for line in found.advice)
    assert found.headroom == 0.25


def test_loader_ahead() -> None:
    faster = measured(changes={"loader.io_threads": 4}, tokens=1_800_000)
    pace = Pace(tokens_per_second=70_000, seconds=5.0, wait_seconds=0.05)
    found = diagnose([measured(), faster], remote=False, trainer=70_000, pace=pace)
    assert (found.pattern, found.best, dict(found.changes)) == ("ahead", 1, {})
    assert "a rank that takes 70,000 tokens/s waited 1.0% of the time" in found.finding
    assert "14.3 times as much: it could feed 14 ranks like this one." in found.finding
    assert found.advice == ("Nothing to change.",) and found.headroom == pytest.approx(1e6 / 70_000)
    assert "computed" in diagnose([measured()], remote=False, trainer=70_000).finding
    nobody = diagnose([measured(wait_seconds=0.1)], remote=False)
    assert nobody.pattern == "ahead" and "1,000 tokens at a time waited 10% of the time" in nobody.finding


def test_a_trainer_that_waits_for_bursts_is_not_called_ahead() -> None:
    pace = Pace(tokens_per_second=500_000, seconds=5.0, wait_seconds=1.0)
    found = diagnose([measured()], remote=False, trainer=500_000, pace=pace)
    assert found.pattern == "storage" and "waited 20.0% of the time when acted out: too close" in found.finding
    assert diagnose([measured()], remote=False, trainer=950_000).pattern == "storage"  # headroom within the noise


def test_noise_and_another_order_are_never_the_best() -> None:
    noise = measured(changes={"loader.io_threads": 4}, tokens=1_090_000)
    other = measured(changes={"data.shuffle_clump_size": 16}, tokens=3_000_000)
    found = diagnose([measured(), noise, other], remote=False)
    assert (found.best, dict(found.changes)) == (0, {})
    assert "No other setting of the grid was faster by more than 10%." in found.advice
    assert "shuffle_clump_size=16 gave 3.0 times the tokens/s, but it changes the order: another run." in found.advice


def test_notes_say_what_the_numbers_are_worth() -> None:
    assert diagnose([measured()], remote=False).notes == ()
    notes = diagnose([measured(disk_bytes=0, retries=2, restarts=3)], remote=False).notes
    assert len(notes) == 3 and "Of 4 MB read, 0 MB came from a disk" in notes[1] and "2 reads failed" in notes[2]
    assert diagnose([measured(disk_bytes=None)], remote=False).notes == ()
    assert diagnose([measured(disk_bytes=0)], remote=True).notes == ()  # a network's bytes come from no disk


def test_the_grid_varies_every_setting_and_begins_with_the_recipe() -> None:
    own = LoaderConfig(window_tokens=1024, io_threads=2, read_ahead_bytes=4096)
    recipe = dataclasses.replace(demo(), loader=own)
    local, remote = (variants_of(recipe, default_choices(own, remote=remote)) for remote in (False, True))
    assert (len(local), len(remote)) == (9, 18) and local[0].changes == {} and local[0].recipe == recipe
    settings = [dataclasses.astuple(variant.recipe.loader) for variant in remote]
    wanted = itertools.product((256, 1024, 4096), (4096, 16384), (1, 2, 4), (False,))
    assert sorted(settings) == sorted(wanted) and len(set(settings)) == 18
    assert default_choices(LoaderConfig(io_threads=1), remote=False)["io_threads"] == [1, 2]
    assert not any(variant.changes_order for variant in remote)


def test_variants_of_another_order_keep_the_step_and_the_ranks() -> None:
    variants = order_variants(demo(), world_size=2)
    assert [variant.name for variant in variants] == ["shuffle_clump_size=4", "shuffle_clump_size=16", "num_splits=2"]
    assert all(v.changes_order and v.recipe.train == demo().train for v in variants)
    assert [variant.name for variant in order_variants(demo(), world_size=4)][2:] == []  # 2 splits, 4 ranks


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("io_thread=2", "Did you mean 'io_threads'"),
        ("batch=2", "Use window_tokens, io_threads, read_ahead_bytes"),
        ("io_threads=2,x", "--grid io_threads=1,2,4"),
        ("io_threads=0", "whole numbers from 1 on"),
        ("io_threads", "whole numbers from 1 on"),
    ],
)
def test_a_bad_word_of_the_grid_is_explained(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parse_choices([word])
    assert parse_choices(["io_threads=2,4,2"]) == {"io_threads": [2, 4]}


def test_the_table_marks_the_best_and_gives_the_words_to_paste() -> None:
    found = [
        measured(),
        measured(changes={"loader.io_threads": 4}, tokens=2_000_000),
        measured(changes={"data.num_splits": 2}),
    ]
    text = profile_text(found, diagnose(found, remote=False), recipe="demo")
    lines = [line for line in text.splitlines() if "1/2/3/4" in line]
    assert [line.split()[0] for line in lines] == ["as", "*", "!"]
    assert "2,000,000" in lines[1] and "1.9 s 190%" in lines[0] and "0.9 s  90%" in lines[0]
    assert "would change the order" in text
    assert text.splitlines()[-1] == "  pretrain train demo --set loader.io_threads=4"


def test_the_plot_shows_rates_the_trainer_and_shares() -> None:
    found = [measured(), measured(changes={"loader.io_threads": 4}, tokens=2_000_000)]
    tree = ET.fromstring(profile_svg("a < b", found, best=1, trainer=500_000))
    kind = "{http://www.w3.org/2000/svg}"
    texts = [element.text or "" for element in tree.iter(f"{kind}text")]
    assert {"a < b", "io_threads=4 (best)", "1,000,000", "dashed: the trainer takes 500,000"} <= set(texts)
    widths = [float(bar.attrib["width"]) for bar in tree.iter(f"{kind}rect") if bar.attrib.get("height") == "18"]
    assert widths[0] == RATES / 2 and widths[4] == RATES  # a rate, then its three shares
    assert widths[2] / widths[1] == pytest.approx(9, rel=0.01) and widths[3] == 0
    (line,) = tree.iter(f"{kind}path")
    bar = next(bar for bar in tree.iter(f"{kind}rect") if bar.attrib.get("height") == "18")
    assert float(line.attrib["d"][1:].split()[0]) == float(bar.attrib["x"]) + RATES / 4


def test_what_a_run_tells_about_its_waiting() -> None:
    records = [
        {"step": 0, "val_loss": 1.0},
        {"step": 1, "seconds": 1.0, "data_wait": 0.5, "tok_per_s": 100.0, "ranks": 2},
        {"step": 2, "seconds": 9.0, "data_wait": 0.0, "tok_per_s": 400.0, "ranks": 2},
        {"step": 3, "seconds": 10.0, "data_wait": 0.1, "tok_per_s": 540.0, "ranks": 2},
    ]
    assert data_wait(records) == pytest.approx((0.5 + 0 + 1.0) / 20)
    assert speed_per_rank(records) == pytest.approx(200)  # the median of 100, 200 and 300
    assert data_wait(records[:1]) is None and speed_per_rank(records[:1]) is None


EVERY_ROW = ("--set", "data.filter=NOT is_dup AND id % 20 != 0", "--set", "data.held_out_filter=id % 20 = 0")


def pretrain(*arguments: str) -> Any:
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with 3,000 synthetic documents as bytes, and a table that was never tokenized."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(home))
        for verb in (["ingest", "synthetic:3000:1"], ["dedup"], ["tokenize", "--tokenizer", "byte"]):
            assert pretrain(*verb).exit_code == 0
        assert pretrain("--table", "raw", "ingest", "synthetic:10:1").exit_code == 0
    return home


def test_the_verb_measures_and_prints_one_document(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    plot = tmp_path / "profile.svg"
    words = ("--batches", "20", "--grid", "io_threads=1,2", "--ranks", "4", "--plot", str(plot))
    done = pretrain("profile-loader", "demo", *EVERY_ROW, *words, "--tokens-per-second", "20000", "--json")
    assert done.exit_code == 0 and done.stderr.splitlines()[:1] == ["[1/2] as it is"]
    facts = json.loads(done.stdout)
    assert (facts["recipe"], facts["tag"], facts["ranks"], facts["batch_tokens"]) == ("demo", "tokenized-v3", 4, 256)
    assert [m["loader"]["io_threads"] for m in facts["measurements"]] == [2, 1]
    assert all(m["tokens"] == 256 * m["batches"] >= 256 * 20 for m in facts["measurements"])
    assert facts["trainer"]["tokens_per_second"] == 20000 and facts["trainer"]["run_dir"] is None
    assert facts["diagnosis"]["headroom"] == pytest.approx(facts["measurements"][0]["tokens_per_second"] / 20000)
    assert ET.parse(plot).getroot().tag.endswith("svg")


def test_without_a_recipe_the_first_that_fits_is_measured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    done = pretrain("profile-loader", "--set", "data.seq_len=64", "--set", "train.global_batch_tokens=8192", *EVERY_ROW,
                    "--batches", "2", "--grid", "io_threads=2", "--order")  # fmt: skip
    assert done.stdout.startswith("gpt2_124m on tokenized-v3 (") and "one of 2 ranks; plan ready after" in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("!")][:3] == [
        "shuffle_clump_size=4",
        "shuffle_clump_size=16",
        "num_splits=32",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--table", "raw", "profile-loader", "demo"], ["tokenized stage has made no version", "pretrain tokenize"]),
        (["profile-loader", "demo", *EVERY_ROW, "--ranks", "3"], ["num_splits=8", "3 ranks", "1, 2, 4, 8"]),
        (["profile-loader", "demo", "--grid", "threads=2"], ["'threads'", "io_threads"]),
        (["profile-loader", "demo", "--seconds", "1", "--batches", "1"], ["--seconds 1", "--batches 1"]),
        (["profile-loader", "demo", "--batches", "1"], ["apt:dict-devil", "keeps none of the 3,000 rows"]),
        (
            ["profile-loader", "--set", "train.global_batch_tokens=104857600"],
            ["No recipe fits", "gpt2_124m: Epoch 0 has", "demo: data.filter"],
        ),
        (["profile-loader", "demo", *EVERY_ROW, "--tag", "tokenized-v9"], ["no tag 'tokenized-v9'", "tokenized-v3"]),
    ],
)
def test_what_cannot_be_measured_is_one_message(
    home: Path,
    arguments: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    message = capsys.readouterr().err
    assert exit_info.value.code == 1 and "error: " in message and "Traceback" not in message
    assert all(word in message for word in words), message


def test_the_words_it_prints_are_a_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    words = ("--set", "loader.io_threads=4", "--set", "loader.window_tokens=4096", "--write-spec", "--json")
    written = json.loads(pretrain("train", "demo", *EVERY_ROW, *words).stdout)
    spec = json.loads((Path(written["run_dir"]) / "run.json").read_text())
    assert (spec["recipe"]["loader"]["io_threads"], spec["recipe"]["loader"]["window_tokens"]) == (4, 4096)


def test_on_s3(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("PRETRAIN_DATABASE_URI", f"{s3.bucket('profile')}/db")
    for verb in (["ingest", "synthetic:600:1"], ["dedup"], ["tokenize", "--tokenizer", "byte"]):
        assert pretrain(*verb).exit_code == 0
    words = ("--batches", "100", "--grid", "io_threads=1,2", "--json")
    facts = json.loads(pretrain("profile-loader", "demo", *EVERY_ROW, *words).stdout)
    assert [m["bytes_read"] > 0 for m in facts["measurements"]] == [True, True]
    assert facts["diagnosis"]["pattern"] in ("storage", "ahead")


def test_pack_sample_writes_the_first_blocks_of_a_recipe(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    words = [
        "pack-sample",
        "demo",
        "--blocks",
        "20",
        "--out",
        str(tmp_path / "blocks.npy"),
        "--set",
        "data.filter=id >= 0",
    ]
    facts = json.loads(pretrain(*words, "--json").stdout)
    assert (facts["blocks"], facts["seq_len"], facts["data"]["filter"]) == (20, 128, "id >= 0")
    assert facts["tokenizer"]["name"] == "byte" and facts["dtype"] == "uint16"
    assert "20 blocks of 128 tokens as uint16, 0.0 MB, from tokenized-v" in pretrain(*words).stdout
