"""Filters by name, the funnel's arithmetic, why a row is left out, and the report: at a table small enough to count."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import dagster as dg
import lance
import pandas as pd
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain_assets import recipes
from pretrain_assets.assets.curation import curation_report
from pretrain_assets.assets.resources import CorpusResource, LauncherResource
from pretrain_assets.cli import cli
from pretrain_assets.config import DedupConfig, EngineConfig, MixtureComponent, TokenizeConfig
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.curate.explain import examples, explain
from pretrain_assets.curate.figures import Bars, Histogram, Report, Table
from pretrain_assets.curate.filters import FILTERS, NamedFilter, by_name, disjoint, expand, resolve, terms_of, usable
from pretrain_assets.curate.funnel import Funnel, funnel
from pretrain_assets.curate.quality_rules import RULES, rows_failing
from pretrain_assets.curate.report import make_report
from pretrain_assets.curate.sql import and_terms, columns_in, tokens
from pretrain_assets.errors import ConfigError, FilterError, TableError
from pretrain_assets.report.curation_html import report_html
from pretrain_assets.report.curation_text import report_markdown
from pretrain_assets.table.quality_columns import QUALITY
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets_tests.tables import make_table, newest
from pretrain_assets_tests.ui import CHROMIUM, FLAGS, needs_chromium

COLUMNS = ["id", "text", "source", "score", "n_chars", "n_tokens", "is_dup", "is_near_dup", "contaminated"]
NAMES = by_name(
    NamedFilter(name="clean", meaning="", sql="NOT is_dup AND NOT contaminated"),
    NamedFilter(name="good", meaning="", sql="clean AND score >= 3"),
    NamedFilter(name="wiki", meaning="", sql="source = 'wiki' OR source = 'clean'"),
    NamedFilter(name="a", meaning="", sql="b"),
    NamedFilter(name="b", meaning="", sql="NOT c"),
    NamedFilter(name="c", meaning="", sql="score > 1 OR a"),
)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("clean", "(NOT is_dup AND NOT contaminated)"),
        ("NOT clean or wiki", "NOT (NOT is_dup AND NOT contaminated) or (source = 'wiki' OR source = 'clean')"),
        ("good", "((NOT is_dup AND NOT contaminated) AND score >= 3)"),
        ("source = 'clean' AND `clean` > 0", "source = 'clean' AND `clean` > 0"),
        ("source = 'it''s clean' AND NOT is_dup", "source = 'it''s clean' AND NOT is_dup"),
        ("clean(score)", "clean(score)"),
        ("score.clean > 0", "score.clean > 0"),
        ("score > 3  AND\n id%2=1", "score > 3  AND\n id%2=1"),
        ("CLEAN or not Wiki", "(NOT is_dup AND NOT contaminated) or not (source = 'wiki' OR source = 'clean')"),
        ("SCORE > 3 AND n_chars::bigint > 1e3", "SCORE > 3 AND n_chars::bigint > 1e3"),
        ("CAST(score AS clean) IS NULL", "CAST(score AS clean) IS NULL"),
        ("_rowid > 3", "_rowid > 3"),
        ("", ""),
    ],
)
def test_names_become_sql_and_nothing_else_changes(text: str, plain: str) -> None:
    assert expand(text, COLUMNS, names=NAMES) == plain
    assert "".join(token.text for token in tokens(text)) == text


def test_a_column_wins_over_a_name() -> None:
    assert expand("clean AND good", [*COLUMNS, "clean"], names=NAMES) == "clean AND (clean AND score >= 3)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("claen AND score > 3", ["data.filter='claen AND score > 3'", "'claen'", "Did you mean 'clean'?"]),
        ("scroe > 3", ["'scroe'", "Did you mean 'score'?", "`pretrain filter` lists all columns"]),
        ("x" * 1000, ["x" * 200 + "...'"]),
        ("score > 1 AND a", ["circle", "a -> b -> c -> a"]),
    ],
)
def test_what_is_no_name_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(FilterError) as refusal:
        expand(text, COLUMNS, names=NAMES, setting="data.filter")
    for word in words:
        assert word in str(refusal.value)
    assert "n_tokens" not in str(refusal.value)


def test_a_name_whose_columns_are_not_there_says_what_to_run() -> None:
    with pytest.raises(FilterError) as refusal:
        expand("clean AND score >= 3", ["id", "score", "is_dup"])
    message = str(refusal.value)
    assert "is_near_dup (of clean), contaminated (of clean)" in message
    assert "`pretrain near-dedup && pretrain decontaminate`" in message
    with pytest.raises(FilterError, match=re.escape("lacks: n_tokens. Run `pretrain tokenize` first")):
        expand("n_tokens > 3", ["id", "score"])


def test_every_name_says_what_it_means_and_is_sql_of_declared_columns() -> None:
    from pretrain_assets.table.columns import COLUMNS as declared

    there = [column.name for column in declared]
    assert {"clean", "high_quality", "english", "held_out", "training"} <= set(FILTERS)
    assert list(usable(there)) == list(FILTERS)
    for name, named in FILTERS.items():
        assert (named.name, bool(named.meaning), "\n" in named.meaning) == (name, True, False)
        assert columns_in(expand(name, there), there)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("a", ["a"]),
        ("a AND b and c", ["a", "b", "c"]),
        ("a AND b OR c", ["a AND b OR c"]),
        ("(a AND b) AND ((c))", ["a", "b", "c"]),
        ("(a OR b) AND NOT (c AND d)", ["a OR b", "NOT (c AND d)"]),
        ("(a) AND (b)", ["a", "b"]),
        ("x BETWEEN 1 AND 3 AND y", ["x BETWEEN 1 AND 3", "y"]),
        ("x NOT BETWEEN (1) AND 3 AND y BETWEEN 1 AND 2", ["x NOT BETWEEN (1) AND 3", "y BETWEEN 1 AND 2"]),
        ("CASE WHEN a AND b THEN c ELSE d END AND e", ["CASE WHEN a AND b THEN c ELSE d END", "e"]),
        ("s = 'x AND y' AND t = 'it''s OR'", ["s = 'x AND y'", "t = 'it''s OR'"]),
        ("f(a, b AND c) AND `AND` > 1", ["f(a, b AND c)", "`AND` > 1"]),
    ],
)
def test_the_terms_of_a_top_level_and(text: str, terms: list[str]) -> None:
    assert and_terms(text) == terms


def test_a_name_is_one_term_with_terms_of_its_own() -> None:
    found = terms_of("good AND (wiki AND id > 3)", COLUMNS, names=NAMES)
    assert [(term.number, term.text) for term in found] == [("1", "good"), ("2", "wiki"), ("3", "id > 3")]
    assert [(term.number, term.text) for term in found[0].children] == [("1.1", "clean"), ("1.2", "score >= 3")]
    assert [leaf.sql for leaf in found[0].leaves] == ["NOT is_dup", "NOT contaminated", "score >= 3"]
    assert terms_of("GOOD", COLUMNS, names=NAMES)[0].children == found[0].children
    assert found[1].children == () and found[1].sql == "(source = 'wiki' OR source = 'clean')"


def test_recipes_take_names_and_keep_plain_sql() -> None:
    parts = (
        MixtureComponent(name="good", predicate="score >= 3 AND clean", weight=1),
        MixtureComponent(name="rest", predicate="(score >= 3) IS NOT TRUE", weight=1),
    )
    demo = recipes.demo()
    data = replace(demo.data, filter="clean AND training", held_out_filter="clean AND held_out", mixture=parts)
    found = resolve(replace(demo, data=data), COLUMNS).data
    clean = "(NOT is_dup AND NOT is_near_dup AND NOT contaminated)"
    assert (found.filter, found.held_out_filter) == (f"{clean} AND (id % 100 != 0)", f"{clean} AND (id % 100 = 0)")
    assert [part.predicate for part in found.mixture] == [f"score >= 3 AND {clean}", parts[1].predicate]
    for make in recipes.RECIPES.values():  # no name in it: the run keeps its digest
        assert resolve(make(), COLUMNS) == make()
    with pytest.raises(FilterError, match=re.escape("data.mixture[good].predicate=")):
        resolve(replace(demo, data=replace(data, filter="true", held_out_filter="true")), ["id", "score"])


def curated(path: Path | str, rows: pd.DataFrame) -> lance.LanceDataset:
    """A table of these rows with the columns of curation, as the stages would have left them."""
    kinds = {"source": pa.string(), "score": pa.float32(), "n_chars": pa.int32()}
    ingested = {name: pa.array(rows[name], kind, from_pandas=True).to_pylist() for name, kind in kinds.items()}
    location = make_table(path, [f"text {i}" for i in range(len(rows))], **ingested)
    extra = {"is_dup": pa.bool_(), "is_near_dup": pa.bool_(), "contaminated": pa.bool_(), "n_tokens": pa.int32()}
    dataset = lance.dataset(location.uri)
    columns = {name: pa.array(rows[name], kind, from_pandas=True) for name, kind in extra.items() if name in rows}
    dataset.add_columns(pa.table(columns).to_reader())
    return lance.dataset(location.uri)


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    """300 rows; NULLs in every column that may have them."""
    size = 300
    table = pd.DataFrame({"id": range(size)})
    table["source"] = [("x", "y", "x", "it's", None)[i % 5] for i in range(size)]
    table["score"] = pd.array([None if i % 7 == 3 else (i * 37 % 11) / 2 for i in range(size)], "Float32")
    table["n_chars"] = pd.array([i * i % 401 for i in range(size)], "Int32")
    table["n_tokens"] = pd.array([None if i % 50 == 49 else i % 90 for i in range(size)], "Int32")
    for place, name in enumerate(("is_dup", "is_near_dup", "contaminated"), 3):
        table[name] = pd.array([None if i % 11 == place else i * place % 4 == 0 for i in range(size)], "boolean")
    return table


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, rows: pd.DataFrame) -> lance.LanceDataset:
    return curated(tmp_path_factory.mktemp("filters"), rows)


Node = tuple[str, Any]
LEAVES: list[tuple[str, Callable[[pd.DataFrame], Any]]] = [
    ("is_dup", lambda t: t.is_dup),
    ("NOT is_near_dup", lambda t: ~t.is_near_dup),
    ("contaminated IS NOT TRUE", lambda t: ~t.contaminated.fillna(False)),
    ("score >= 2.5", lambda t: t.score >= 2.5),
    ("score IS NULL", lambda t: t.score.isna().astype("boolean")),
    ("n_chars BETWEEN 30 AND 300", lambda t: t.n_chars.between(30, 300).astype("boolean")),
    ("n_tokens < 60", lambda t: t.n_tokens < 60),
    ("source = 'it''s'", lambda t: (t.source == "it's").astype("boolean").mask(t.source.isna())),
    ("source IN ('x', 'AND')", lambda t: (t.source == "x").astype("boolean").mask(t.source.isna())),
    ("id % 3 = 1", lambda t: (t.id % 3 == 1).astype("boolean")),
    ("clean", lambda t: ~t.is_dup & ~t.is_near_dup & ~t.contaminated),
]
PREDICATES = st.recursive(
    st.sampled_from(range(len(LEAVES))).map(lambda place: ("leaf", place)),
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=4)),
    ),
    max_leaves=8,
)


def sql_of(node: Node) -> str:
    kind, inner = node
    if kind == "leaf":
        return LEAVES[inner][0]
    if kind == "not":
        return f"NOT ({sql_of(inner)})"
    return f" {kind.upper()} ".join(sql_of(part) if part[0] == "leaf" else f"({sql_of(part)})" for part in inner)


def truth_of(node: Node, table: pd.DataFrame) -> Any:
    """Kleene's logic, as pandas has it."""
    kind, inner = node
    if kind == "leaf":
        return LEAVES[inner][1](table)
    if kind == "not":
        return ~truth_of(inner, table)
    found = truth_of(inner[0], table)
    for part in inner[1:]:
        found = found & truth_of(part, table) if kind == "and" else found | truth_of(part, table)
    return found


def flat(node: Node) -> list[Node]:
    return [term for part in node[1] for term in flat(part)] if node[0] == "and" else [node]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(node=PREDICATES)
def test_the_funnel_counts_as_pandas_does(node: Node, dataset: lance.LanceDataset, rows: pd.DataFrame) -> None:
    found = funnel(dataset, sql_of(node))
    whole, terms = truth_of(node, rows), [truth_of(term, rows) for term in flat(node)]
    tokens_of = rows.n_tokens.fillna(0)

    def same(count: Any, mask: Any) -> None:
        mask = mask.fillna(False).astype(bool)
        assert (count.rows, count.amount) == (mask.sum(), tokens_of[mask].sum())

    same(found.total, rows.id >= 0)
    same(found.kept, whole)
    same(found.rejected, ~whole)
    same(found.unknown, whole.isna())
    assert len(found.steps) == len(terms)
    before = rows.id >= 0
    for place, (step, term) in enumerate(zip(found.steps, terms, strict=True)):
        others = [other.fillna(False) for other in (*terms[:place], *terms[place + 1 :])]
        same(step.removes, ~term.fillna(False))
        same(step.unknown, term.isna())
        same(step.only, ~term.fillna(False) & (pd.concat(others, axis=1).all(axis=1) if others else rows.id >= 0))
        same(step.in_order, before & ~term.fillna(False))
        before = before & term.fillna(False)
        same(step.left, before)
    for count in found.by_source:
        of_source = rows.source.isna() if count.source == "(none)" else rows.source == count.source
        same(count.total, of_source)
        same(count.kept, whole & of_source)
    adds_up(found)


def adds_up(found: Funnel) -> None:
    """Every row is counted once, whichever way."""
    for measure in ("rows", "amount"):
        total, kept = getattr(found.total, measure), getattr(found.kept, measure)
        assert kept + sum(getattr(step.in_order, measure) for step in found.steps) == total
        assert kept + getattr(found.rejected, measure) + getattr(found.unknown, measure) == total
        assert sum(getattr(count.total, measure) for count in found.by_source) == total
        assert sum(getattr(count.kept, measure) for count in found.by_source) == kept
    for step in found.steps:
        assert not step.children or sum(child.in_order.rows for child in step.children) == step.in_order.rows
    for place, step in enumerate(found.steps):
        assert sum(count.removed[place] for count in found.by_source) == step.in_order.rows


def test_the_funnel_counts_what_training_would_read(tmp_path: Path) -> None:
    """3.3 is no float32: a filter compares it as one, which plain SQL over the table does not."""
    score = [3.3, 3.4, None, 1.0]
    location = make_table(tmp_path, ["a"] * 4, score=score, source=["x", "x", None, "y"], n_chars=[5, 6, 7, None])
    dataset = lance.dataset(location.uri)
    found = funnel(dataset, "score >= 3.3 AND id < 100")
    assert found.kept.rows == dataset.count_rows("score >= 3.3") == 2
    assert (found.unit, found.kept.amount, found.total.amount, found.unmeasured) == ("characters", 11, 18, 1)
    assert (found.unknown.rows, found.rejected.rows) == (1, 1)
    assert [count.source for count in found.by_source] == ["x", "(none)", "y"]
    adds_up(found)


def test_the_funnel_of_an_empty_table_and_of_a_name(tmp_path: Path, dataset: lance.LanceDataset) -> None:
    empty = lance.dataset(make_table(tmp_path, []).uri)
    found = funnel(empty, "score > 1 AND id > 3")
    assert (found.total.rows, found.kept.rows, len(found.steps), found.by_source) == (0, 0, 2, ())
    step = funnel(dataset, "clean").steps[0]
    assert [child.number for child in step.children] == ["1.1", "1.2", "1.3"]
    assert step.children[-1].left == step.left and step.removes == step.only == step.in_order


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("score >", ["not a predicate"]),
        ("regexp_match(source, 'x')", ["regexp_like"]),
        ("random() < 0.5", ["another answer each time"]),
        ("`random`() < 0.5 AND id > 0", ["calls random(), which gives another answer each time"]),
        ("id > 0 OR `Current_Date` () > '2020-01-01'", ["calls Current_Date()"]),
        ("`current_date` > 1", ["no column is named 'current_date'"]),
        (" ", ["filter=' ' is empty"]),
        ("id / 0 = 1", ["filter='id / 0 = 1' is not a predicate of this table: Divide by zero error"]),
        ("clean AND", ["filter='clean AND' is not a predicate of this table: Expected: an expression, found: its end"]),
        ("(" * 400 + "id > 1" + ")" * 400, ["filter='" + "(" * 200 + "...' is not a predicate", "recursion limit"]),
        ("score > 1; id > 3", ["semicolon"]),
        ("_rowid > 3 AND score > 1", ["cannot be counted"]),
        ("n_tokens_byte > 1", ["n_tokens_byte", "Did you mean 'n_tokens'"]),
    ],
)
def test_what_cannot_be_counted_is_refused(dataset: lance.LanceDataset, text: str, words: list[str]) -> None:
    with pytest.raises(FilterError) as refusal:
        funnel(dataset, text)
    message = str(refusal.value)
    for word in words:
        assert word in message
    assert "SELECT" not in message and "is_near_dup" not in message and ".rs:" not in message and "\n" not in message


def test_an_older_version_says_which_one_has_the_columns(tmp_path: Path) -> None:
    dataset = lance.dataset(make_table(tmp_path, ["a", "b"], source=["x", "y"]).uri)
    old = dataset.version
    dataset.add_columns({"n_tokens": "id"})
    older = dataset.checkout_version(old)
    with pytest.raises(FilterError, match=f"version {old} lacks: n_tokens. Version {old + 1}, the newest, has them"):
        funnel(older, "id > 0 AND n_tokens > 0")
    with pytest.raises(FilterError, match=r"lacks: is_dup\. Run `pretrain dedup` first"):
        funnel(older, "NOT is_dup AND n_chars > 0")
    assert funnel(dataset, "n_tokens > 0").kept.rows == 1


def test_the_published_sets_count_as_quality_rules_does(tmp_path: Path) -> None:
    """At and beside every threshold; a float column's 0.1 is at most 0.1."""
    table: dict[str, pa.Array] = {}
    for name, kind, _ in QUALITY:
        edges = [rule.threshold for rules in RULES.values() for rule in rules if rule.column == name] or [1]
        around = [edge + step for edge in edges for step in (-1, -0.001, 0, 0.001, 1)]
        some = [None if row % 41 == 40 else around[row * 7 % len(around)] for row in range(200)]
        texts = [None if value is None else str(value) for value in some]
        table[name] = pa.array(texts) if kind == "string" else pa.array(some, pa.float64()).cast(kind, safe=False)
    location = make_table(tmp_path, ["text"] * 200, n_chars=[row % 3 for row in range(200)])
    lance.dataset(location.uri).add_columns(pa.table(table).to_reader())
    dataset = lance.dataset(location.uri)
    found = funnel(dataset, "high_quality")
    for step in found.steps[0].children:
        counts = rows_failing(dataset)[step.text]
        assert step.removes.rows - step.unknown.rows == counts.pop("")
        assert [child.removes.rows - child.unknown.rows for child in step.children] == list(counts.values())
        assert any(counts.values())
    adds_up(found)


def test_training_and_held_out_share_no_row(dataset: lance.LanceDataset, rows: pd.DataFrame) -> None:
    finding = disjoint(dataset)
    assert (finding.name, finding.passed) == ("filters_disjoint", True)
    kept = [dataset.count_rows(expand(name, dataset.schema.names)) for name in ("training", "held_out")]
    assert kept == [297, 3]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Location:
    """Five rows: kept, an exact copy of it, nearly it, contaminated, and not judged yet; one source's name is HTML."""
    folder = tmp_path_factory.mktemp("judged")
    texts = [
        "the first text of all",
        "the first text  of all",
        "the first text of most",
        "so 6 x 7 = 42, he said",
        None,
    ]
    location = make_table(folder, texts, source=["<b>a&b</b>", "b", "b", "c", "c"], score=[4.0, 3.0, 2.0, 4.0, None])
    sets = [{"name": "sums", "items": 9, "searched": 9, "too_short": 0, "boilerplate": 0}]
    making: dict[str, Any] = {"stage": "decontaminated", "code_version": "1", "parameters": {"eval_sets": sets}}
    table = pa.table(
        {
            "dup_of": pa.array([None, 0, None, None, None], pa.int64()),
            "is_dup": pa.array([False, True, False, False, None]),
            "near_dup_of": pa.array([None, None, 0, None, None], pa.int64()),
            "near_dup_similarity": pa.array([None, None, 0.8125, None, None], pa.float32()),
            "is_near_dup": pa.array([False, False, True, False, None]),
            "language": ["en", "en", "de", "en", None],
            "gopher_words": pa.array([5, 5, 5, 7, None], pa.int32()),
            "contamination_item": [None, None, None, "sums/7", None],
            "contamination_items": pa.array([None, None, None, ["sums/7", "sums/9"], None], pa.list_(pa.string())),
            "contamination_overlap": pa.array([0, 0, 0, 0.75, None], pa.float32()),
            "contamination_start": pa.array([None, None, None, 3, None], pa.int32()),
            "contamination_stop": pa.array([None, None, None, 13, None], pa.int32()),
            "contaminated": [False, False, False, True, None],
            "n_tokens": pa.array([5, 5, 5, 9, None], pa.int32()),
        }
    )
    place = table.schema.get_field_index("contaminated")
    made = table.schema.set(place, computed_field("contaminated", pa.bool_(), **making))
    lance.dataset(location.uri).add_columns(table.cast(made).to_reader())
    return location


def test_a_row_that_is_left_out_says_by_which_rule_with_what_value(judged: Location) -> None:
    dataset = lance.dataset(judged.uri)
    found = explain(dataset, 1, "clean AND score >= 3.5")
    assert (found.kept, found.removed_by) == (False, ("1", "2"))
    assert [(t.number, t.holds, t.values) for t in found.terms] == [("1", False, {}), ("2", False, {"score": 3.0})]
    children = found.terms[0].children
    assert (children[0].text, children[0].holds, children[0].values) == ("NOT is_dup", False, {"is_dup": True})
    assert [t.holds for t in children] == [False, True, True]
    (copied,) = found.repeats
    assert (copied.id, copied.similarity, copied.preview, copied.is_there) == (0, 1.0, "the first text of all", True)
    by_name = explain(dataset, 2)
    assert [(t.number, t.text, t.holds) for t in by_name.terms] == [
        ("1", "clean", False),
        ("2", "training", True),
        ("3", "held_out", False),
    ]
    assert (by_name.kept, by_name.removed_by, by_name.terms[0].children[1].number) == (None, (), "1.2")
    (near,) = by_name.repeats
    assert (near.column, near.id, near.similarity) == ("near_dup_of", 0, 0.8125)
    contaminated = explain(dataset, 3, "clean")
    assert contaminated.removed_by == ("1",) and contaminated.repeats == ()
    assert (contaminated.contamination["text"], contaminated.contamination["items"]) == (
        "6 x 7 = 42",
        ["sums/7", "sums/9"],
    )
    kept, unknown = explain(dataset, 0, "clean"), explain(dataset, 4, "clean AND score > 1")
    assert (kept.kept, kept.removed_by, kept.contamination) == (True, (), {})
    assert (unknown.kept, unknown.removed_by, unknown.preview) == (None, ("1", "2"), "")
    with pytest.raises(TableError, match="has no row 99"):
        explain(dataset, 99, "clean")


def test_examples_of_what_a_term_removes(judged: Location) -> None:
    dataset = lance.dataset(judged.uri)
    found = examples(dataset, "clean AND score >= 3.5", "2", limit=10)
    assert [(e.id, e.values) for e in found] == [(1, {"score": 3.0}), (2, {"score": 2.0}), (4, {"score": None})]
    assert [e.id for e in examples(dataset, "clean", "1.2", limit=1)] == [2]
    failed = [(1, "1.1", "NOT is_dup", {"is_dup": True}), (2, "1.2", "NOT is_near_dup", {"is_near_dup": True})]
    failed += [(3, "1.3", "NOT contaminated", {"contaminated": True}), (4, "1.1", "NOT is_dup", {"is_dup": None})]
    for asked in ("1", "clean", "CLEAN"):
        named = examples(dataset, "Clean AND score >= 3.5", asked, limit=10)
        assert [(e.id, e.number, e.rule, e.values) for e in named] == failed
    assert [e.id for e in examples(dataset, "clean AND score >= 3.5", "score >= 3.5", limit=10)] == [1, 2, 4]
    with pytest.raises(FilterError, match=re.escape("has no term 3; it has 1 (clean), 1.1 (NOT is_dup)")):
        examples(dataset, "clean", "3", limit=1)


def pretrain(location: Location, *arguments: str) -> Result:
    done = CliRunner().invoke(cli, ["--database", location.database_uri, *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_the_verbs_filter_and_explain(judged: Location, tmp_path: Path) -> None:
    plot = tmp_path / "funnel.svg"
    text = pretrain(judged, "filter", "clean AND score >= 3", "--plot", str(plot)).stdout
    assert "keeps 1 of 5 (20.0%) rows, 5 of 24 (20.8%) tokens" in text
    assert "1 kept + 4 removed in order = 5 rows; of the removed 3 are false and 1 unknown (NULL)" in text
    assert "1 row without tokens yet, counted as 0" in text and re.search(
        r"1\.2 +NOT is_near_dup +2 +1 +0 +1 +2 ", text
    )
    assert plot.read_text().startswith("<svg") and "1.2  NOT is_near_dup" in plot.read_text()
    facts = json.loads(pretrain(judged, "filter", "clean AND score >= 3", "--version", "v2", "--json").stdout)
    assert (facts["kept"]["rows"], facts["steps"][0]["in_order"]["rows"], facts["version"]) == (1, 4, 2)
    listed = pretrain(judged, "filter").stdout
    assert "clean\n    no copy" in listed and "Run `pretrain quality` first" in listed
    assert "\ncolumns: id, " in listed and "is_near_dup, language, gopher_words" in " ".join(listed.split())
    removed = pretrain(judged, "filter", "clean", "--removed-by", "clean").stdout
    assert "id 2 (b): is_near_dup True (not 1.2, NOT is_near_dup)" in removed
    with pytest.raises(ConfigError, match=r"name a file that ends in \.svg"):
        pretrain(judged, "filter", "clean", "--plot", str(tmp_path / "funnel.png"))
    explained = pretrain(judged, "explain", "2", "--filter", "clean").stdout
    assert "left out, by term 1\n" in explained and "repeats row 0 (<b>a&b</b>), similarity 0.812" in explained
    assert json.loads(pretrain(judged, "explain", "3", "--json").stdout)["contamination"]["item"] == "sums/7"


@pytest.mark.slow
def test_curation_in_order_then_tokens_of_its_newest_version(tmp_path: Path) -> None:
    location = Location(database_uri=str(tmp_path))
    pretrain(location, "ingest", "synthetic:30")
    run = ("curate", "run", "--workers", "1")
    facts = json.loads(pretrain(location, *run, "--json").stdout)
    tags = ["deduped-v2", "near_deduped-v3", "quality-v4", "decontaminated-v5"]
    assert [(fact["tag"], fact["changed"]) for fact in facts] == [(tag, True) for tag in tags]
    assert pretrain(location, *run).stdout.splitlines() == [f"{tag}: nothing to do, no new version" for tag in tags]
    again = ("near-dedup", "--set", "threshold=0.9", "--workers", "1", "--json")
    assert json.loads(pretrain(location, *again).stdout)["parameters"]["threshold"] == 0.9
    tokens = json.loads(pretrain(location, "tokenize", "--tokenizer", "byte", "--workers", "1", "--json").stdout)
    assert [pin.rpartition("@")[2] for pin in tokens["inputs"]] == ["6"]
    found = json.loads(pretrain(location, "filter", "clean AND english AND high_quality", "--json").stdout)
    assert (found["total"]["rows"], found["unit"], found["unmeasured"]) == (30, "tokens", 0)
    assert found["kept"]["rows"] + sum(step["in_order"]["rows"] for step in found["steps"]) == 30


class _Page(HTMLParser):
    """What a page asks for from elsewhere, and whether every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asked: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.asked += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "rect", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "path"):
            assert self.open.pop() == tag


def test_the_report_shows_what_is_there_and_says_what_is_not(judged: Location) -> None:
    found = make_report(lance.dataset(judged.uri))
    assert isinstance(found, Report) and found.funnel and found.funnel.filter == "clean" and found.rows == 5
    sections = {section.title: section for section in found.sections}
    assert "run `pretrain quality`" in sections["Quality signals"].missing and not sections["Duplicates"].missing
    shares, table = sections["Duplicates"].figures
    assert isinstance(shares, Bars) and isinstance(table, Table)
    assert shares.labels == ("b", "c", "<b>a&b</b>") and [s.values for s in shares.series] == [(0.5, 0, 0), (0.5, 0, 0)]
    assert table.rows[-1] == ("all", 5, 1, 0.2, 1, 0.2)
    (words,) = (
        f for f in sections["Quality signals"].figures if isinstance(f, Histogram) and f.title == "gopher_words"
    )
    assert (sum(words.counts), words.nulls, words.outside, words.low) == (4, 1, 0, 5.0)
    (languages,) = sections["Language"].figures
    assert isinstance(languages, Bars) and dict(zip(languages.labels, languages.series[0].values, strict=True)) == {
        "en": 3,
        "de": 1,
        "unknown": 1,
    }
    assert sections["Contamination"].figures[0].rows == (("sums", 9, 9, 2, 1),)  # type: ignore[union-attr]
    page = _Page()
    html = report_html(found)
    page.feed(html)
    assert page.open == [] and "script" not in page.tags and "b>a&b<" not in html and "&lt;b&gt;a&amp;b" in html
    assert page.asked and all(place.startswith("#") for place in page.asked) and "url(" not in html
    parts = report_markdown(found)
    assert len(parts["funnel_plot"]) < 1000 and "data:image/svg+xml" in parts["funnel_plot"]
    assert "| b" in parts["duplicates"] and parts["funnel"].startswith("keeps 1 of 5")


def test_a_report_of_a_table_that_was_only_ingested(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["a", "b"])
    found = make_report(lance.dataset(location.uri))
    assert found.funnel is None and report_html(found).count("class='missing'") >= 4
    text = pretrain(location, "--runs", str(tmp_path / "runs"), "curate", "report").stdout
    assert "Duplicates: this version has no is_dup, is_near_dup: run `pretrain dedup && pretrain near-dedup`" in text
    assert text.splitlines()[-1] == f"report: {tmp_path}/runs/curation/report-v1.html"
    assert (tmp_path / "runs" / "curation" / "report-v1.html").read_text().startswith("<!doctype html>")
    out = tmp_path / "it.html"
    facts = json.loads(pretrain(location, "curate", "report", "--filter", "id > 0", "-o", str(out), "--json").stdout)
    assert facts["funnel"]["kept"]["rows"] == 1 and facts["html"] == str(out) and out.exists()


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> Location:
    """200 rows of bytes, one of them an exact copy."""
    folder = tmp_path_factory.mktemp("tokenized")
    location = make_table(folder / "lancedb", [f"document {i} " * 9 for i in [*range(199), 3]])
    engine = EngineConfig(workers=1)
    dedup(location, DedupConfig(), input_pin=newest(location), engine=engine)
    tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location), engine=engine)
    return location


def test_a_run_takes_names_and_its_files_hold_plain_sql(tokenized: Location, tmp_path: Path) -> None:
    named = ("NOT is_dup AND training", "NOT is_dup AND held_out")
    plain = ("NOT is_dup AND (id % 100 != 0)", "NOT is_dup AND (id % 100 = 0)")

    def spec(filters: tuple[str, str]) -> dict[str, Any]:
        changes = [f"data.filter={filters[0]}", f"data.held_out_filter={filters[1]}"]
        options = [word for change in changes for word in ("--set", change)]
        done = pretrain(tokenized, "--runs", str(tmp_path), "train", "demo", *options, "--write-spec", "--json")
        return dict(json.loads(Path(json.loads(done.stdout)["argv"][-1]).read_text()))

    found = spec(named)
    assert (found["recipe"]["data"]["filter"], found["recipe"]["data"]["held_out_filter"]) == plain
    assert found == spec(plain)  # the same run: folder, digest and all


def test_the_curation_report_as_an_asset(tokenized: Location, tmp_path: Path) -> None:
    resources = {
        "corpus": CorpusResource(database_uri=tokenized.database_uri),
        "launcher": LauncherResource(runs_uri=str(tmp_path)),
    }
    config = {"ops": {"corpus__curation_report": {"config": {"filter": "NOT is_dup AND n_chars > 116"}}}}
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([curation_report], instance=instance, resources=resources, run_config=config)
    (event,) = result.asset_materializations_for_node("corpus__curation_report")
    facts = {name: value.value for name, value in event.metadata.items()}
    kept = sum(len(f"document {i} " * 9) > 116 for i in range(199))
    assert (facts["dagster/row_count"], facts["rows_kept"], facts["lance/version"]) == (200, kept, 3)
    assert "data:image/svg+xml" in str(facts["funnel_plot"]) and "NOT is_dup" in str(facts["funnel"])
    assert "run `pretrain quality`" in str(facts["quality_signals"])
    assert Path(str(facts["html"])).read_text().startswith("<!doctype html>")
    assert [(check.check_name, check.passed) for check in result.get_asset_check_evaluations()] == [
        ("filters_disjoint", True)
    ]


@pytest.mark.slow
@pytest.mark.browser
@needs_chromium
def test_the_report_in_a_browser(judged: Location, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    place = tmp_path / "report.html"
    place.write_text(report_html(make_report(lance.dataset(judged.uri))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            asked: list[str] = []
            problems: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            page.on("console", lambda message: problems.append(message.text))
            page.goto(place.as_uri())
            assert asked == [place.as_uri()] and problems == []
            assert page.locator("section").count() == 9
            assert page.get_by_text("1 of 5 rows").first.is_visible()
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        finally:
            browser.close()


def test_training_refuses_columns_made_anew_since_its_version(tmp_path: Path) -> None:
    from pretrain_assets.cli.common import on_table
    from pretrain_assets.config import ContaminationConfig, override
    from pretrain_assets.curate.contamination import decontaminate
    from pretrain_assets.tokenize.columns import tokenize

    location = make_table(tmp_path, ["one", "two", "three"])
    decontaminate(location, ContaminationConfig(), input_pin=newest(location))
    tokens = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location)).record
    filters = {"data.filter": "NOT contaminated AND id > 0", "data.held_out_filter": "id = 0"}
    recipe = override(recipes.demo(), filters)
    assert on_table(location, recipe, None) == (recipe, tokens)
    decontaminate(location, ContaminationConfig(min_overlap=0.9), input_pin=newest(location))
    with pytest.raises(FilterError, match=r"contaminated, which decontaminated-v4 .*min_overlap: 0.5 -> 0.9.*tokenize"):
        on_table(location, recipe, None)
    assert on_table(location, recipe, tokens.tag) == (recipe, tokens)
    tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location))
    assert on_table(location, recipe, None)[1].version == 4


def test_a_stage_keeps_the_settings_of_its_last_run(tmp_path: Path) -> None:
    from pretrain_assets.cli import curate

    location = make_table(tmp_path, ["one two three four five six", "other words"])
    engine = EngineConfig(workers=1)
    dedup(location, DedupConfig(), input_pin=newest(location))
    first = curate._near_dedup(location, engine, ("bands=20", "threshold=0.6"))
    assert not curate._near_dedup(location, engine).changed
    again = curate._near_dedup(location, engine, ("threshold=0.9",))
    assert (first.record.parameters["bands"], again.record.parameters["bands"]) == (20, 20)
    assert again.record.parameters["threshold"] == 0.9


def test_a_pin_is_of_the_stage_named_and_tokens_follow_every_stage_before_them(tmp_path: Path) -> None:
    from pretrain_assets.cli.common import pin_of
    from pretrain_assets.cli.stages import _before_tokens
    from pretrain_assets.config import MaskConfig
    from pretrain_assets.curate.masking import mask
    from pretrain_assets.tokenize.columns import tokenize

    location = make_table(tmp_path, ["one", "two"])
    dedup(location, DedupConfig(), input_pin=newest(location))
    tokens = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location)).pin
    tokenize(location, TokenizeConfig(tokenizer="byte", beside="byte"), input_pin=newest(location))
    assert pin_of(location, "tokenized") == tokens != newest(location)
    masked = mask(location, MaskConfig(), input_pin=newest(location)).pin
    assert _before_tokens(location) == masked
