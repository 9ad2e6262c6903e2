"""The launchpad: every setting of a recipe, typed and described, and refused before a run starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import dagster as dg
import pytest

from pretrain_assets import recipes
from pretrain_assets.assets.keys import CHECKPOINT
from pretrain_assets.assets.launchpad import changes_in, docstrings, recipe_schema
from pretrain_assets.config import Recipe, override, to_dict
from pretrain_assets.definitions import defs
from pretrain_assets.errors import ConfigError
from pretrain_assets.table.lineage import digest


def accepted(config: dict[str, Any]) -> dict[str, Any]:
    """What the step gets of what a person typed into the launchpad of the real job."""
    run_config = {"ops": {"model__checkpoint": {"config": config}}}
    step = dg.validate_run_config(defs.resolve_job_def("pretrain"), run_config)["ops"]["model__checkpoint"]
    assert isinstance(step["config"], dict)
    return step["config"]


def test_every_setting_is_there_with_its_docstring_and_without_a_default() -> None:
    schema = recipe_schema()
    groups = {f.name: f for f in dataclasses.fields(Recipe)}
    assert set(schema) == set(groups) - {"name"} | {"overrides"}
    for group in ("model", "data", "train", "execution", "loader"):
        config = getattr(recipes.demo(), group)
        fields = schema[group].config_type.fields  # type: ignore[attr-defined]
        assert set(fields) == set(to_dict(config))
        for name, entry in fields.items():
            assert not entry.is_required and not entry.default_provided
            assert entry.description == docstrings(type(config))[name] and len(entry.description) > 10


@pytest.mark.parametrize(
    ("config", "setting", "value"),
    [
        ({"train": {"max_steps": 3}}, "max_steps", 3),
        ({"train": {"max_steps": None}}, "max_steps", None),
        ({"train": {"learning_rate": 1}}, "learning_rate", 1.0),
        ({"train": {"optimizer": "muon"}}, "optimizer", "muon"),
        ({"train": {"max_steps": 3}, "overrides": {"train.max_steps": 4}}, "max_steps", 4),
    ],
)
def test_what_is_given_changes_the_recipe_and_nothing_else(config: dict[str, Any], setting: str, value: Any) -> None:
    before = recipes.gpt2_354m()
    after = override(before, changes_in(accepted(config)))
    assert after == dataclasses.replace(before, train=dataclasses.replace(before.train, **{setting: value}))


def test_nothing_given_changes_nothing_nor_does_an_empty_group() -> None:
    assert changes_in(accepted({})) == {} == changes_in(accepted({"train": {}}))


def test_lists_reach_the_recipe() -> None:
    part = {"name": "wiki", "predicate": "source = 'wiki'", "weight": 2}
    config = {"data": {"mixture": [part]}, "execution": {"trackers": ["tensorboard"]}, "sample_prompt": "Once"}
    recipe = override(recipes.demo(), changes_in(accepted(config)))
    assert recipe.execution.trackers == ("tensorboard",) and recipe.sample_prompt == "Once"
    assert [(p.name, p.weight) for p in recipe.data.mixture] == [("wiki", 2.0)]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train": {"lerning_rate": 1e-3}}, ["lerning_rate", "config:train", "learning_rate?: Float"]),
        ({"trian": {}}, ["trian", "train?"]),
        ({"train": {"max_steps": "many"}}, ["config:train:max_steps", "many", "Int"]),
        ({"train": {"warmup_steps": None}}, ["config:train:warmup_steps", "Int"]),
        ({"execution": {"parallel": "fspd"}}, ["config:execution:parallel", "fspd"]),
        ({"execution": {"trackers": ["tensorbord"]}}, ["trackers[0]", "tensorbord"]),
        ({"data": {"mixture": [{"name": "wiki", "weight": 1}]}}, ["mixture[0]", "predicate"]),
    ],
)
def test_mistakes_are_refused_before_a_run_starts(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError) as refused:
        accepted(config)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_dotted_overrides_suggest_the_near_setting() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'lerning_rate'\. Did you mean 'learning_rate'"):
        override(recipes.demo(), changes_in(accepted({"overrides": {"train.lerning_rate": 1e-3}})))


def test_the_launchpad_is_no_part_of_the_code_version() -> None:
    spec = defs.resolve_asset_graph().get(CHECKPOINT)
    assert spec.code_version == digest([make().lasting for make in recipes.RECIPES.values()])
