"""What the launchpad offers for a training run: every setting of a recipe, typed, with its docstring as its help.

Made from the recipe's dataclasses, so a new field is in the launchpad at once. Invariant: nothing has a default here.
What is not given keeps the recipe's value, and Dagster refuses an unknown name or a wrong type before a run starts.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

import dagster as dg

from pretrain_assets.config import Recipe

OVERRIDES = "overrides"
"""The field for settings by dotted name, as `pretrain train --set` takes them."""


def recipe_schema() -> dict[str, dg.Field]:
    """The config schema of a step that trains a recipe: its groups of settings, and `overrides`."""
    fields = _fields(Recipe, required=False)
    del fields["name"]  # the partition
    example = '{"data.filter": "score > 3", "train.max_steps": 100}'
    description = f"Settings by dotted name, for scripts, such as {example}; these win over the groups above."
    return fields | {OVERRIDES: dg.Field(dict, is_required=False, description=description)}


def changes_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a launchpad config changes in a recipe, by dotted name; see `config.override`."""
    changes: dict[str, Any] = {}
    for name, value in config.items():
        if name != OVERRIDES and isinstance(value, dict):
            changes |= {f"{name}.{setting}": given for setting, given in value.items()}
        elif name != OVERRIDES:
            changes[name] = value
    return {**changes, **config.get(OVERRIDES, {})}


def _fields(cls: type, *, required: bool) -> dict[str, dg.Field]:
    """A config field per field of a dataclass; `required` where the dataclass has no default, or none at all."""
    hints, descriptions = typing.get_type_hints(cls), docstrings(cls)
    return {
        entry.name: dg.Field(
            _config_type(hints[entry.name], f"{cls.__name__}_{entry.name}"),
            is_required=required and entry.default is dataclasses.MISSING,
            description=descriptions[entry.name],
        )
        for entry in dataclasses.fields(cls)
    }


def _config_type(hint: Any, name: str, *, required: bool = False) -> Any:
    """Dagster's config type for a field's type; `name` is what the launchpad calls a choice."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return dg.Shape(_fields(hint, required=required))  # type: ignore[no-untyped-call]
    if origin is Literal:
        return dg.Enum(name, [dg.EnumValue(choice) for choice in arguments])
    if origin is tuple:
        return dg.Array(_config_type(arguments[0], name, required=True))
    if origin in (Union, types.UnionType):
        return dg.Noneable(_config_type(next(part for part in arguments if part is not type(None)), name))
    return hint


def docstrings(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found
