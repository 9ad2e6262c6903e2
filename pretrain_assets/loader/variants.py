"""Ways to read that a profile compares: the recipe's own settings, a grid around them, and changes of the order.

Invariant: the recipe as it was given comes first. What a grid varies never changes which blocks come in which order.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pretrain_assets.config import LoaderConfig, Recipe, override
from pretrain_assets.errors import ConfigError

GRID = ("window_tokens", "io_threads", "read_ahead_bytes")
"""Settings that a grid may vary."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to read."""

    recipe: Recipe
    """The recipe with the changes made."""
    changes: Mapping[str, int]
    """What differs from the recipe as it was given, by dotted name: what `--set` takes."""

    @property
    def name(self) -> str:
        """The changes as text."""
        return " ".join(f"{name.partition('.')[2]}={value}" for name, value in self.changes.items()) or "as it is"

    @property
    def changes_order(self) -> bool:
        """Whether a run with it is another run: other blocks, or the same ones in another order."""
        return any(name.startswith("data.") for name in self.changes)


def default_choices(settings: LoaderConfig, *, remote: bool) -> dict[str, list[int]]:
    """Values to try around those of a recipe.

    Locally `read_ahead_bytes` only limits windows, so it is left alone there.
    """
    return {
        "window_tokens": [max(1, settings.window_tokens // 4), settings.window_tokens, 4 * settings.window_tokens],
        "io_threads": sorted({max(1, settings.io_threads // 2), settings.io_threads, 2 * settings.io_threads}),
        "read_ahead_bytes": [settings.read_ahead_bytes, *([4 * settings.read_ahead_bytes] if remote else [])],
    }


def parse_choices(words: Sequence[str]) -> dict[str, list[int]]:
    """Values to try from words such as `io_threads=1,2,4`.

    Raises:
        ConfigError: no such setting, or not whole numbers from 1 on.
    """
    choices: dict[str, list[int]] = {}
    for word in words:
        name, _, values = word.partition("=")
        if name not in GRID:
            near = difflib.get_close_matches(name, GRID, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Use {', '.join(GRID)}."
            raise ConfigError(f"--grid {word!r}: {name!r} is no setting of a grid. {hint}")
        try:
            choices[name] = list(dict.fromkeys(int(value) for value in values.split(",")))
        except ValueError:
            choices[name] = [0]
        if min(choices[name]) < 1:
            raise ConfigError(f"--grid {word!r}: give whole numbers from 1 on, such as --grid {name}=1,2,4")
    return choices


def variants_of(recipe: Recipe, choices: Mapping[str, Sequence[int]]) -> list[Variant]:
    """The recipe as it is, then every other combination of the values to try."""
    own = asdict(recipe.loader)
    combinations = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    changes = [{f"loader.{name}": v for name, v in combo.items() if v != own[name]} for combo in combinations]
    return [_variant(recipe, {}), *(_variant(recipe, change) for change in changes if change)]


def order_variants(recipe: Recipe, *, world_size: int) -> list[Variant]:
    """Ways to read that change the order, and with it the run: documents kept together, fewer splits."""
    clumps = [4 * recipe.data.shuffle_clump_size, 16 * recipe.data.shuffle_clump_size]
    changes: list[dict[str, int]] = [{"data.shuffle_clump_size": clump} for clump in clumps]
    if recipe.data.num_splits % (4 * world_size) == 0:
        changes.append({"data.num_splits": recipe.data.num_splits // 4})
    return [_variant(recipe, change) for change in changes]


def _variant(recipe: Recipe, changes: Mapping[str, int]) -> Variant:
    return Variant(recipe=override(recipe, changes), changes=changes)
