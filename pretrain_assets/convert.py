"""Dataclasses to plain JSON values and back, every name and type checked; dotted overrides.

Also the checks that configs make of their own values. Invariant: `from_dict(type(c), to_dict(c)) == c`. Import these
from `pretrain_assets.config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from pretrain_assets.errors import ConfigError

T = TypeVar("T")

WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "a mapping of settings",
    type(None): "null",
}
"""What people call the types of JSON values."""


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON-ready dictionaries and lists."""
    plain = _plain(config)
    assert isinstance(plain, dict)
    return plain


def from_dict(cls: type[T], values: Mapping[str, Any], *, where: str = "") -> T:
    """Build a config from plain JSON values, checking every name and type.

    Raises:
        ConfigError: an unknown, missing or ill-typed field, or a value that cannot work; unknown names come with the
            nearest known one.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where or cls.__name__} must be a mapping of settings, not {_word(values)}")
    hints = typing.get_type_hints(cls)
    fields = {entry.name: entry for entry in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(fields)}."
            raise ConfigError(f"{where or cls.__name__} has no setting {name!r}.{hint}")
    arguments = {name: _coerce(hints[name], value, f"{where}.{name}".lstrip(".")) for name, value in values.items()}
    missing = [
        name
        for name, entry in fields.items()
        if name not in arguments
        and entry.default is dataclasses.MISSING
        and entry.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where or cls.__name__} lacks required settings: {', '.join(missing)}")
    try:
        return cls(**arguments)
    except ConfigError as error:
        if where and str(error).partition("=")[0] in fields:  # it names the setting, without its group
            raise ConfigError(f"{where}.{error}") from error
        raise


def override(config: T, changes: Mapping[str, Any]) -> T:
    """A copy of a config with dotted settings changed, such as `{"data.filter": "score > 3"}`; typed and checked.

    Raises:
        ConfigError: as `from_dict`.
    """
    values = to_dict(config)
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        target = values
        for part in path:
            if not isinstance(target.get(part), dict):
                groups = [name for name, group in target.items() if isinstance(group, dict)]
                near = difflib.get_close_matches(part, groups, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"{dotted!r}: there is no group {part!r}.{hint}")
            target = target[part]
        if last not in target and not path:
            inside = {name: group for group, v in target.items() if isinstance(v, dict) for name in v}
            near = difflib.get_close_matches(last, inside, n=1)
            if near:
                raise ConfigError(
                    f"{type(config).__name__} has no setting {last!r}. Did you mean {f'{inside[near[0]]}.{near[0]}'!r}?"
                )
        target[last] = value
    return from_dict(type(config), values)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):  # of up to a million ids
        return [item if type(item) is int else _plain(item) for item in value]
    return value


def _coerce(hint: Any, value: Any, where: str, *, or_null: str = "") -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_dict(hint, value, where=where)  # type: ignore[arg-type]
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(f"{where}={value!r} is not one of {', '.join(map(repr, choices))}")
        return value
    if origin is tuple:
        if isinstance(value, str) and typing.get_origin(typing.get_args(hint)[0]) is Literal:  # `a,b`, as people write
            value = [word.strip() for word in value.split(",") if word.strip()]
        if not isinstance(value, (list, tuple)):
            hint = "; check the quotes and brackets of its JSON" if isinstance(value, str) else ""
            raise ConfigError(f"{where}={value!r} must be a list{or_null}{hint}")
        kind = typing.get_args(hint)[0]
        if kind is int and all(type(item) is int for item in value):  # up to a million ids
            return tuple(value)
        return tuple(_coerce(kind, item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        wanted = next(part for part in typing.get_args(hint) if part is not type(None))
        return _coerce(wanted, value, where, or_null=" or null")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool) and type(value) is not hint:
        remedy = '; write it in "quotes"' if hint is str else ""
        raise ConfigError(f"{where}={value!r} must be {WORDS[hint]}{or_null}, not {_word(value)}{remedy}")
    return value


def _word(value: Any) -> str:
    """What people call the value's type."""
    return "a decimal number" if isinstance(value, float) else WORDS.get(type(value), type(value).__name__)


def check_name(name: str, what: str) -> None:
    """Refuse a name that could not be one file name on every storage.

    Raises:
        ConfigError: empty, or with a character other than letters, digits, dot, underscore and hyphen.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{what} {name!r} cannot work: use letters, digits, '.', '_' and '-' only")


def require(condition: bool, name: str, value: Any, remedy: str) -> None:
    """Refuse a value, naming it and the remedy.

    Raises:
        ConfigError: the condition does not hold.
    """
    if not condition:
        raise ConfigError(f"{name}={value!r} cannot work: {remedy}")
