"""Configuration: round trips, refusals that say what to write instead, and the recipes' published numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from pretrain_assets import config, recipes
from pretrain_assets.cli.common import parse_change
from pretrain_assets.config import IngestConfig, Recipe, RunSpec, TokenizerIdentity, from_dict, override, to_dict
from pretrain_assets.errors import ConfigError, PretrainError

RUN = RunSpec(
    recipe=recipes.demo(),
    database_uri="s3://bucket/db",
    table_name="corpus",
    pin="abc@7",
    tag="tokenized-v7",
    tokenizer=TokenizerIdentity(name="byte", fingerprint="f", vocab_size=257, eos_id=256, pad_id=257),
    run_dir="/runs/1",
    storage_env=("AWS_REGION",),
)

WIKI = {"name": "wiki", "predicate": "source = 'wiki'", "weight": 0.7}


@pytest.mark.parametrize(
    "value", [*(make() for make in recipes.RECIPES.values()), RUN, IngestConfig(sources=("a", "b"))]
)
def test_round_trip_through_json(value: Any) -> None:
    assert from_dict(type(value), json.loads(json.dumps(to_dict(value)))) == value


def test_override_changes_dotted_settings_and_only_them() -> None:
    before = recipes.demo()
    after = override(before, {"data.filter": "id > 3", "train.learning_rate": 1, "train.max_steps": 7})
    assert (after.data.filter, after.train.learning_rate, after.train.max_steps) == ("id > 3", 1.0, 7)
    assert isinstance(after.train.learning_rate, float)
    restored = {"data.filter": before.data.filter, "train.learning_rate": 5e-3, "train.max_steps": None}
    assert override(after, restored) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.fliter": "x"}, "data has no setting 'fliter'. Did you mean 'filter'?"),
        ({"dta.filter": "x"}, "there is no group 'dta'. Did you mean 'data'?"),
        ({"name.filter": "x"}, "there is no group 'name'."),
        ({"data.filter.more": "x"}, "there is no group 'filter'."),
        (
            {"maxsteps": 1},
            "Recipe has no setting 'maxsteps'. Did you mean 'train.max_steps'?",
        ),
        (
            {"execution.trackers": "tensorbord, wandb"},
            "execution.trackers[0]='tensorbord' is not one of 'tensorboard', 'wandb', 'mlflow', 'trackio'",
        ),
        (
            {"nonsense": 1},
            "Recipe has no setting 'nonsense'. Known: name, model, data, train, execution, loader, sample_prompt.",
        ),
        ({"data.seq_len": "128"}, "data.seq_len='128' must be a whole number, not text"),
        ({"data.seq_len": True}, "data.seq_len=True must be a whole number, not true or false"),
        ({"data.seq_len": 128.0}, "data.seq_len=128.0 must be a whole number, not a decimal number"),
        ({"execution.compile": 1}, "execution.compile=1 must be true or false, not a whole number"),
        ({"train.learning_rate": True}, "train.learning_rate=True must be a number, not true or false"),
        ({"train.learning_rate": None}, "train.learning_rate=None must be a number, not null"),
        ({"train.max_steps": "9"}, "train.max_steps='9' must be a whole number or null, not text"),
        ({"sample_prompt": 5}, 'sample_prompt=5 must be text, not a whole number; write it in "quotes"'),
        ({"data": 3}, "data must be a mapping of settings, not a whole number"),
        ({"data.seq_len": 1}, "data.seq_len=1 cannot work: use at least 2"),
        ({"model.n_embd": 65}, "model.n_embd=65 cannot work: must be a multiple of n_head=4"),
        ({"model.dropout": 1.0}, "model.dropout=1.0 cannot work"),
        ({"train.max_steps": 0}, "train.max_steps=0 cannot work: use 1 to 999,999,999"),
        ({"train.learning_rate": 0.0}, "train.learning_rate=0.0 cannot work: use a positive number"),
        ({"train.learning_rate": math.nan}, "train.learning_rate=nan cannot work: use a positive number"),
        ({"train.learning_rate": 1e38}, "train.learning_rate=1e+38 cannot work: use a positive number, at most 1e+30"),
        ({"train.warmup_steps": 10**20}, "train.warmup_steps=100000000000000000000 cannot work: use 0 to 999,999,999"),
        ({"train.init_seed": -5}, "train.init_seed=-5 cannot work: use an integer from 0"),
        ({"model.n_embd": 10**12}, "model.n_embd=1000000000000 cannot work: use 1 to 999,999,999"),
        ({"data.mixture": "[{name: a}]"}, "must be a list; check the quotes and brackets of its JSON"),
        ({"data.mixture": [{**WIKI, "wieght": 1}]}, "data.mixture[0] has no setting 'wieght'. Did you mean 'weight'?"),
        ({"data.mixture": [{"name": "wiki"}]}, "data.mixture[0] lacks required settings: predicate, weight"),
        ({"data.mixture": [WIKI, {**WIKI, "weight": "1"}]}, "data.mixture[1].weight='1' must be a number, not text"),
        ({"data.mixture": [{**WIKI, "weight": 0}]}, "weight of wiki=0.0 cannot work: use a positive number"),
        ({"data.mixture": [{**WIKI, "weight": math.inf}]}, "weight of wiki=inf cannot work: use a positive number"),
        ({"data.mixture": [{**WIKI, "name": "a b"}]}, "mixture name 'a b' cannot work"),
        ({"data.mixture": [WIKI, WIKI]}, "mixture=['wiki', 'wiki'] cannot work: give every part a name of its own"),
        ({"data.mixture": [{**WIKI, "name": f"p{i}"} for i in range(256)]}, "mixture='256 parts' cannot work: use at"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        override(recipes.demo(), changes)
    assert message in str(error.value)
    if "Did you mean" not in message:
        assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (Recipe, {"name": "x"}, "Recipe lacks required settings: model, data, train"),
        (IngestConfig, {"sources": "bundled"}, "sources='bundled' must be a list"),
        (IngestConfig, {"sources": [1]}, "sources[0]=1 must be text, not a whole number"),
        (IngestConfig, {"sources": []}, "name at least one source"),
        (IngestConfig, {"on_bad_row": "drop"}, "on_bad_row='drop' is not one of 'raise', 'skip'"),
        (config.DedupConfig, {"batch_bytes": 0}, "batch_bytes=0 cannot work: use at least 1024"),
        (config.TokenizeConfig, {"batch_bytes": -1}, "batch_bytes=-1 cannot work: use at least 1024"),
    ],
)
def test_from_dict_names_what_is_wrong(cls: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_dict(cls, values)
    assert message in str(error.value)


@pytest.mark.parametrize(("tokens", "nearest"), [(2049, 2048), (1, 1024), (2600, 3072)])
def test_a_global_batch_must_hold_whole_cycles(tokens: int, nearest: int) -> None:
    with pytest.raises(ConfigError, match=rf"num_splits \* seq_len = 8 \* 128 = 1024.*The nearest is {nearest}\."):
        override(recipes.demo(), {"train.global_batch_tokens": tokens})


def test_identity_holds_the_data_and_nothing_of_the_machine() -> None:
    assert RUN.identity == {
        "table_version": "abc@7",
        "filter": RUN.recipe.data.filter,
        "mixture": [],
        "token_column": "input_ids",
        "shuffle_clump_size": 1,
        "tokenizer": "f",
        "seed": 0,
        "num_splits": 8,
        "seq_len": 128,
        "global_batch_tokens": 1024,
        "eos_id": 256,
        "pad_id": 257,
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.max_steps=null", None),
        ("train.max_steps=None", None),
        ("train.max_steps=none", None),
        ("model.document_mask=true", True),
        ("model.document_mask=True", True),
        ("execution.compile=FALSE", False),
        ("train.grad_clip=inf", math.inf),
        ("train.grad_clip=Infinity", math.inf),
        ("train.learning_rate=7e-3", 7e-3),
        ("data.filter=true AND id > 3", "true AND id > 3"),
        ('sample_prompt="None"', "None"),
    ],
)
def test_a_change_may_be_spelled_as_in_json_or_as_in_python(text: str, value: Any) -> None:
    name, found = parse_change(text)
    assert found == value and type(found) is type(value)
    group, _, setting = name.rpartition(".")
    recipe = override(recipes.demo(), {name: found})
    assert getattr(getattr(recipe, group) if group else recipe, setting) == value


def test_nan_and_null_are_refused_where_nothing_can_come_of_them() -> None:
    for text in ("train.grad_clip=nan", "train.grad_clip=NaN", "train.weight_decay=inf", "train.beta1=nan"):
        with pytest.raises(ConfigError, match=rf"{text.partition('=')[0]}=(nan|inf) cannot work"):
            override(recipes.demo(), dict([parse_change(text)]))


def test_how_a_run_is_executed_and_what_its_sample_continues_make_no_other_run() -> None:
    same = {"sample_prompt": "Once", "execution.compile": True, "loader.io_threads": 3}
    assert override(recipes.demo(), same).lasting == recipes.demo().lasting
    assert override(recipes.demo(), {"train.max_steps": 41}).lasting != recipes.demo().lasting


def test_a_mixture_from_the_command_line_is_part_of_the_identity() -> None:
    name, value = parse_change(f"data.mixture={json.dumps([WIKI, {**WIKI, 'name': 'b', 'weight': 2}])}")
    recipe = override(RUN.recipe, {name: value})
    assert [(part.name, part.weight) for part in recipe.data.mixture] == [("wiki", 0.7), ("b", 2.0)]
    mixed = replace(RUN, recipe=recipe)
    assert mixed.identity["mixture"] == [WIKI, {**WIKI, "name": "b", "weight": 2.0}]
    assert from_dict(RunSpec, json.loads(json.dumps(to_dict(mixed)))) == mixed
    heavier = replace(RUN, recipe=override(recipe, {"data.mixture": [WIKI, {**WIKI, "name": "b", "weight": 3}]}))
    assert heavier.identity != mixed.identity != RUN.identity


@pytest.mark.parametrize(("name", "blocks", "cycles"), [("demo", 8, 1), ("gpt2_124m", 512, 4), ("gpt2_354m", 512, 4)])
def test_blocks_per_step(name: str, blocks: int, cycles: int) -> None:
    recipe = recipes.get(name)
    assert (recipe.name, recipe.blocks_per_step, recipe.cycles_per_step) == (name, blocks, cycles)


def test_published_numbers_of_the_gpt2_recipes() -> None:
    small, medium = recipes.gpt2_124m(), recipes.gpt2_354m()
    assert small.data.filter == medium.data.filter == "NOT is_dup AND score >= 1.0 AND (id % 100 != 0)"
    assert small.data.held_out_filter == "NOT is_dup AND score >= 1.0 AND (id % 100 = 0)"
    assert (small.model.n_layer, small.model.n_head, small.model.n_embd) == (12, 12, 768)
    assert (medium.model.n_layer, medium.model.n_head, medium.model.n_embd) == (24, 16, 1024)
    for recipe in (small, medium):
        assert recipe.train.global_batch_tokens == 512 * 1024 == recipe.blocks_per_step * recipe.data.seq_len
        assert (recipe.data.seq_len, recipe.data.num_splits, recipe.data.mixture) == (1024, 128, ())
    assert (small.train.max_steps, small.train.epochs) == (None, 1)  # 4,636 steps of 2.43 B tokens
    assert 4_636 * small.train.global_batch_tokens == pytest.approx(2.43e9, rel=1e-3)
    assert (small.train.learning_rate, medium.train.learning_rate) == (6e-4, 3e-4)
    assert recipes.num_parameters(small) == 124_475_904 and recipes.num_parameters(medium) == 354_871_296
    assert medium.train.max_steps == 13_351
    assert medium.train.max_steps * medium.train.global_batch_tokens == pytest.approx(7.0e9, rel=1e-3)


def test_an_unknown_recipe_is_met_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'gpt2_124m'"):
        recipes.get("gpt2_124")
    assert issubclass(ConfigError, PretrainError) and issubclass(PretrainError, ValueError)
