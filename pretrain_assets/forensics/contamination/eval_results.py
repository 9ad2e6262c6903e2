"""An evaluation's scores, item by item, set against what a checkpoint had seen: over all items and over the clean ones.

Invariant: no result is left out silently, and an item is called clean only where it was searched for and no document
that the checkpoint had trained on holds it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np

from pretrain_assets.config import ContaminationConfig, from_dict
from pretrain_assets.curate.contamination import STAGE, index_of
from pretrain_assets.curate.eval_sets import ID_FIELDS, EvalSet, read_eval_sets, read_rows
from pretrain_assets.errors import InputError, TableError
from pretrain_assets.forensics.contamination.contamination import ContaminationInTime
from pretrain_assets.table.predicate import near
from pretrain_assets.table.storage import Location, absolute, filesystem, open_dataset
from pretrain_assets.table.versions import records

SCORE_FIELDS = ("score", "exact_match", "acc", "acc_norm", "em", "f1", "correct", "passed")
"""The first of these that a result has is its score, unless one is named."""
EXAMPLES = 5
"""Results that could not be matched, shown."""
_SAMPLES = re.compile(r"samples_(?P<task>.+?)(?:_\d{4}-\d\d-\d\dT[^/]*)?\.jsonl(?:\.gz|\.zst)?$")
"""Name of a file of lm-evaluation-harness (`--log_samples`)."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Some items of a set and their mean score."""

    items: int
    """How many."""
    score: float | None
    """Mean; None of no items."""
    error: float | None
    """Standard error of the mean, sample deviation / sqrt(items); None of fewer than two items."""


@dataclass(frozen=True, kw_only=True)
class ScoredSet:
    """The results of one set by one metric."""

    name: str
    """Set."""
    metric: str
    """Field of the score, with the harness's filter of answers where it names one."""
    all: Scored
    """Every item that has a result."""
    clean: Scored
    """Those searched for that the checkpoint had not seen."""
    seen: Scored
    """Those that it had."""
    unsearched: Scored
    """Those of which nothing is known: too short, or boilerplate."""
    without_result: int
    """Items of the set that have none."""
    unmatched: tuple[str, ...]
    """Results that name no item of the set, or one with another text: the first of them, with reasons."""
    num_unmatched: int
    """All of them."""


@dataclass
class _Group:
    """What was read of one set and metric."""

    scores: dict[str, float] = dataclass_field(default_factory=dict)
    unmatched: list[str] = dataclass_field(default_factory=list)


@dataclass(frozen=True)
class _Known:
    """The items of one set."""

    ids: tuple[str, ...]
    """Items in the order of the set."""
    texts: dict[str, str | None]
    """First searched text of every item; None of one without any."""
    searched: frozenset[str]
    """Items searched for."""


def score_clean(
    location: Location,
    found: ContaminationInTime,
    file: str,
    *,
    set_name: str | None = None,
    field: str | None = None,
) -> tuple[ScoredSet, ...]:
    """Mean scores over all items and over those that the checkpoint had not seen.

    Args:
        location: The table.
        found: What the checkpoint had seen.
        file: One result per line (JSON lines, also .gz or .zst, or parquet), with `set`, `id` and a score; or what
            lm-evaluation-harness writes for a task with `--log_samples`: `doc_id`, `doc` and its metrics.
        set_name: The set of results that do not name theirs; of those that do, only this one's count.
        field: Field of the score; the first of `SCORE_FIELDS` that the first result has otherwise.

    Raises:
        InputError: the file is missing or no file of results, a result lacks a field, has no number as its score or is
            given twice, or names a set that was not searched for.
        TableError: the evaluation sets are no longer those that were searched for.
    """
    known = _known_sets(location, found)
    seen = {item for item, step in found.first_step_of().items() if step <= found.step}
    groups = _read(file, known, set_name, field)
    return tuple(_scored(name, metric, group, known[name], seen) for (name, metric), group in groups.items())


def _scored(name: str, metric: str, group: _Group, known: _Known, seen: set[str]) -> ScoredSet:
    scores = group.scores
    return ScoredSet(
        name=name,
        metric=metric,
        all=_mean(scores.values()),
        clean=_mean([score for item, score in scores.items() if item in known.searched and item not in seen]),
        seen=_mean([score for item, score in scores.items() if item in seen]),
        unsearched=_mean([score for item, score in scores.items() if item not in known.searched]),
        without_result=len(known.texts) - len(scores),
        unmatched=tuple(group.unmatched[:EXAMPLES]),
        num_unmatched=len(group.unmatched),
    )


def _mean(scores: Any) -> Scored:
    values = np.array(list(scores), np.float64)
    count = len(values)
    return Scored(
        items=count,
        score=float(values.mean()) if count else None,
        error=float(values.std(ddof=1) / math.sqrt(count)) if count > 1 else None,
    )


def _known_sets(location: Location, found: ContaminationInTime) -> dict[str, _Known]:
    """The items of the sets as they were searched for, read again where they lie."""
    made = [r for r in records(open_dataset(location), STAGE) if r.version <= found.version]
    record = next((r for r in reversed(made) if r.parameters == found.parameters), None)
    if record is None:
        raise TableError(
            f"The record of what version {found.version} of {location.uri} was searched for is gone. Run `pretrain "
            "decontaminate` again, and ask with its --tag."
        )
    config = from_dict(ContaminationConfig, record.details["settings"])
    sets = read_eval_sets(config.eval_sets)
    for one, was in zip(sets, found.parameters["eval_sets"], strict=True):
        if one.fingerprint != was["fingerprint"]:
            raise TableError(
                f"Eval set {one.name} is another than was searched for at version {found.version} (fingerprint "
                f"{was['fingerprint']} then, {one.fingerprint} now). Put the old files back, or run `pretrain "
                "decontaminate` again and ask with its --tag."
            )
    index, at = index_of(sets, config), 0
    searched = np.zeros(sum(len(one.items) for one in sets), bool)
    searched[index.items[index.totals > 0]] = True
    known = {}
    for one in sets:
        known[one.name] = _items_of(one, searched[at : at + len(one.items)].tolist())
        at += len(one.items)
    return known


def _items_of(one: EvalSet, searched: Sequence[bool]) -> _Known:
    return _Known(
        ids=tuple(item.id for item in one.items),
        texts={item.id: next(iter(item.texts), None) for item in one.items},
        searched=frozenset(item.id for item, known in zip(one.items, searched, strict=True) if known),
    )


def _read(
    file: str, known: Mapping[str, _Known], set_name: str | None, score_field: str | None
) -> dict[tuple[str, str], _Group]:
    """Results by set and metric."""
    groups: dict[tuple[str, str], _Group] = {}
    named = set_name or _task_of(file)
    for line, row in _rows(file):
        where = f"{file}, line {line}"
        score_field = score_field or _find_score(row, where)
        name = str(row.get("set") or named or "")
        if set_name and name != set_name:
            continue
        if name not in known:
            raise InputError(f"{where}: {_unknown_set(name, known)}")
        answered = row.get("filter")
        metric = score_field + (f", {answered}" if answered not in (None, "none") else "")
        group = groups.setdefault((name, metric), _Group())
        score = _score(row, score_field, where)
        item = _item(row, name, known[name], where)
        if item in known[name].texts:
            if item in group.scores:
                raise InputError(f"{where}: item {item} has a result of {metric} already. Give every result once.")
            group.scores[item] = score
        else:
            group.unmatched.append(f"line {line}: {item}")
    if not groups:
        which = f" of set {set_name!r}" if set_name else ""
        raise InputError(f"{file} has no result{which}. Give the file that the evaluation wrote for each item.")
    return groups


def _rows(file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    fs, path = filesystem(absolute(file))
    if not fs.exists(path) or fs.isdir(path):
        raise InputError(f"There is no file of results {file}. Give one line of JSON per item.")
    if not path.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")):
        raise InputError(f"{file} is no file of results: give one that ends in .jsonl (.gz, .zst) or .parquet.")
    yield from read_rows(absolute(file), "results")


def _task_of(file: str) -> str | None:
    match = _SAMPLES.search(file.replace("\\", "/").rpartition("/")[2])
    return match["task"] if match else None


def _find_score(row: Mapping[str, Any], where: str) -> str:
    found = next((name for name in SCORE_FIELDS if name in row), None)
    if found is None:
        raise InputError(
            f"{where}: none of the fields {', '.join(SCORE_FIELDS)} is there (found {', '.join(row)}). Name the field "
            "of the score: --score FIELD"
        )
    return found


def _score(row: Mapping[str, Any], name: str, where: str) -> float:
    value = row.get(name)
    if isinstance(value, (bool, int, float)) and math.isfinite(value):
        return float(value)
    there = f"is {value!r:.60}, and no finite number" if name in row else f"is not there (found {', '.join(row)})"
    raise InputError(f"{where}: the score {name!r} {there}. Mend the line, or name another field: --score FIELD")


def _unknown_set(name: str, known: Mapping[str, _Known]) -> str:
    sets = ", ".join(known)
    if not name:
        return f"the result does not name its set (field `set`). Say which it is: --set NAME, one of {sets}."
    hint = near(name, known).split("`")[0]
    return (
        f"{name!r} is no eval set that was searched for (those are {sets}). {hint}Give --set NAME where it goes by "
        "another name here, or search for it first: `pretrain decontaminate NAME=FILES`, then --tag."
    )


def _item(row: Mapping[str, Any], name: str, known: _Known, where: str) -> str:
    """The item of a result: by its own id, else by its place in the set; with another text, words that match none."""
    document = row.get("doc")
    fields = document if isinstance(document, dict) else {}
    own = next((fields[key] for key in ID_FIELDS if f"{name}/{fields.get(key)}" in known.texts), None)
    if "id" in row or own is not None:
        return f"{name}/{str(row.get('id', own)).removeprefix(f'{name}/')}"
    place = row.get("doc_id")
    if type(place) is not int or place < 0:
        raise InputError(
            f"{where}: neither `id` nor `doc_id`, a whole number from 0, says which item it is (found "
            f"{', '.join(row)}). Add the id that the item has in its set, or the number of its line from 1, as `id`."
        )
    if place >= len(known.ids):
        return f"doc_id {place} is beyond the {len(known.ids):,} items of {name}"
    item = known.ids[place]
    other = bool(fields) and known.texts[item] is not None and known.texts[item] not in _strings(fields)
    return f"doc_id {place} has another text than {item}" if other else item


def _strings(value: Any) -> Iterator[Any]:
    """Every text in a value of JSON."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    yield from [value] if isinstance(value, str) else itertools.chain.from_iterable(map(_strings, inner))
