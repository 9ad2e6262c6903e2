"""Neighbours and clusters on vectors that are known, against arithmetic on all of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from pretrain_assets.cli import cli
from pretrain_assets.config import IndexConfig
from pretrain_assets.errors import ConfigError, FilterError, TableError
from pretrain_assets.forensics.indexes.index import build_index
from pretrain_assets.forensics.retrieval.cluster_rows import read_rows
from pretrain_assets.forensics.retrieval.clusters import find_clusters
from pretrain_assets.forensics.retrieval.neighbours import neighbours_of
from pretrain_assets.forensics.retrieval.vectors import Nearest, nearest, vector_column
from pretrain_assets.report.neighbours_plot import threshold_svg
from pretrain_assets.report.neighbours_text import clusters_text, neighbours_text
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets_tests.tables import append, make_table, newest

ANGLES = [0.0, 0.0, 10.0, 90.0, 95.0, 103.0, 200.0, None, math.inf]
"""Degrees of each document's vector; then one that says nothing, and one without a vector."""


def with_vectors(path: Path, vectors: list[Any], **columns: list[int | None]) -> Location:
    """A table with these vectors, and what deduplication would have said."""
    location = make_table(path, [f"text {i}" for i in range(len(vectors))])
    dims = len(next(vector for vector in vectors if vector))
    fields = {"embedding": pa.array(vectors, pa.list_(pa.float16(), dims))}
    table = open_dataset(location).to_table()
    for name, values in columns.items():
        fields[name] = pa.array(values, pa.int64())
    for name, array in fields.items():
        table = table.append_column(name, array)
    lance.write_dataset(table, location.uri, mode="overwrite", enable_stable_row_ids=True)
    return location


def of_angle(degrees: float | None) -> list[float] | None:
    if degrees is None:
        return [0.0, 0.0]
    if math.isinf(degrees):
        return None
    return [math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]


@pytest.fixture
def plane(tmp_path: Path) -> Location:
    """Documents 0 and 1 are copies, 2 is a near duplicate of 0 by the table; 3, 4, 5 are near and not known."""
    empty = [None] * 6
    return with_vectors(
        tmp_path, [of_angle(a) for a in ANGLES], dup_of=[None, 0, None, *empty], near_dup_of=[None, None, 0, *empty]
    )


def test_neighbours_are_the_nearest_others_and_say_what_is_known(plane: Location) -> None:
    found = neighbours_of(plane, 0, limit=3)
    assert [near.id for near in found.neighbours] == [1, 2, 3]
    cosines = [1.0, math.cos(math.radians(10)), 0.0]
    assert [near.similarity for near in found.neighbours] == pytest.approx(cosines, abs=2e-3)
    assert [near.known for near in found.neighbours] == [True, True, False]
    assert neighbours_of(plane, "doc-2", limit=1).neighbours[0].known
    assert [near.id for near in neighbours_of(plane, 0, where="id > 2", limit=9).neighbours] == [3, 4, 5, 6]
    text = neighbours_text(found)
    assert "1. id 1 (test), similarity 1.0000, known to deduplication" in text and "every vector compared" in text


def test_of_equals_the_lower_id_comes_first_however_many_there_are(tmp_path: Path) -> None:
    at = [math.cos(math.radians(one)) for one in range(40)]
    vectors = [[one, math.sqrt(1 - one * one)] for one in [*at[1:9][::-1], *[1.0] * 90, *at[9:]]]
    location = with_vectors(tmp_path, vectors)
    dataset = open_dataset(location)
    found = nearest(dataset, vector_column(dataset), np.array([[1, 0], [0, 1]], np.float32), limit=95, exact=True)
    assert found.ids[0].tolist() == [*range(8, 98), 7, 6, 5, 4, 3]
    assert found.ids[1].tolist() == [*range(len(vectors) - 1, 97, -1), *range(8), *range(8, 8 + 95 - 39)]
    best = Nearest(1, 3)
    best.add(np.array([9, 4, 7, 2, 5]), np.full((1, 5), 0.5, np.float32))
    best.add(np.array([8, 1, 6, 3]), np.array([[0.5, 0.5, 0.6, 0.5]], np.float32))
    assert best.ids.tolist() == [[6, 1, 2]]


def test_documents_without_neighbours_say_why(plane: Location) -> None:
    silent = neighbours_of(plane, 7)
    assert not silent.has_vector and not silent.neighbours and "no word that the model knows" in neighbours_text(silent)
    with pytest.raises(TableError, match=r"Document 8 came after the last embedding.*run `pretrain embed"):
        neighbours_of(plane, 8)
    for nobody in (99, "doc-99", "9" * 30):
        with pytest.raises(TableError, match=rf"has no document '{nobody}'.*pretrain search WORDS"):
            neighbours_of(plane, nobody)
    with pytest.raises(FilterError, match="where="):
        neighbours_of(plane, 0, where="no_such = 1")
    assert 7 not in {near.id for near in neighbours_of(plane, 0, limit=20).neighbours}


def test_curve_clusters_and_agreement_by_hand(plane: Location) -> None:
    found = find_clusters(plane, threshold=0.98)
    assert (found.rows, found.asked, found.zero, found.missing) == (9, 9, 1, 1)
    assert (found.at(1.0).documents, found.at(1.0).pairs) == (2, 1)
    near = found.at(0.98)  # cos 10 = 0.985, cos 8 = 0.990, cos 13 = 0.974
    assert (near.documents, near.documents_new, near.pairs, near.lists_full) == (6, 3, 5, 0)
    assert (near.share, near.error) == (pytest.approx(6 / 7, abs=1e-6), 0.0)
    assert found.at(0.5).pairs == 3 + 3 and found.curve[0].threshold == 0.5
    assert (found.num_clusters, found.clustered, found.sizes) == (2, 6, {"3-4": 2})
    assert [[m.id for m in cluster.members] for cluster in found.largest] == [[0, 1, 2], [3, 4, 5]]
    assert [cluster.flagged for cluster in found.largest] == [2, 0]
    assert found.largest[1].mean_similarity == pytest.approx((0.9962 + 0.9903 + 0.9744) / 3, abs=1e-3)
    agreement = found.agreement
    assert (agreement.neighbours_known, agreement.neighbours_new) == (6, 4)
    assert (agreement.flagged, agreement.flagged_found, agreement.clustered_beyond) == (2, 2, 2)


def test_a_copy_of_a_near_duplicate_is_of_its_family(tmp_path: Path) -> None:
    vectors = [of_angle(0.0)] * 3
    location = with_vectors(tmp_path, vectors, dup_of=[None, None, 1], near_dup_of=[None, 0, None])
    assert find_clusters(location).agreement.neighbours_new == 0
    assert [near.known for near in neighbours_of(location, 0).neighbours] == [True, True]
    assert neighbours_of(location, 2, where="id = 0").neighbours[0].known


def test_lists_that_are_full_are_counted_and_clusters_still_whole(tmp_path: Path) -> None:
    location = with_vectors(tmp_path, [of_angle(float(i // 20)) for i in range(60)])
    found = find_clusters(location, threshold=1.0, limit=5)
    assert found.at(1.0).lists_full == 60 and found.at(1.0).pairs == 60 * 5 // 2
    assert (found.num_clusters, found.sizes) == (3, {"17-32": 3})
    assert found.agreement.columns == () and "run `pretrain dedup`" in clusters_text(found)


def test_against_arithmetic_on_all_vectors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = np.repeat(rng.normal(size=(150, 8)), 2, axis=0) + 0.25 * rng.normal(size=(300, 8))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    location = with_vectors(tmp_path, vectors.tolist())
    unit = vectors.astype(np.float32)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -1)
    found = find_clusters(location, sample=None, threshold=0.85, limit=299)
    for point in found.curve[::5]:
        reached = cosine.round(4) >= np.float32(point.threshold)
        assert (point.documents, point.pairs) == (reached.any(axis=1).sum(), reached.sum() // 2)
    labels = np.arange(300)
    for _ in range(300):
        labels = np.minimum(labels, np.where(cosine >= 0.85, labels[None, :], 300).min(axis=1))
    sizes = np.unique(labels, return_counts=True)[1]
    assert (found.num_clusters, found.clustered) == ((sizes > 1).sum(), sizes[sizes > 1].sum())
    part = find_clusters(location, sample=100, threshold=0.85, limit=299)
    whole = found.at(0.85)
    assert part.asked == 100 and abs(part.at(0.85).share - whole.share) < 3 * part.at(0.85).error
    assert part.at(0.85).pairs == pytest.approx(whole.pairs, rel=0.3)


def test_by_the_index_with_the_recall_that_it_was_measured_to_have(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = np.repeat(rng.normal(size=(600, 16)), 2, axis=0) + 0.05 * rng.normal(size=(1200, 16))
    location = with_vectors(tmp_path, (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist())
    record = build_index(location, IndexConfig(exact_below=1000), input_pin=newest(location)).record
    every = find_clusters(location, sample=200, limit=3)
    found = find_clusters(location, sample=200, limit=3, exact=False)
    assert every.method.exact and every.at(0.9).documents == 200
    assert every.at(0.9).pairs == 600 and abs(found.num_clusters - every.num_clusters) <= 5
    assert found.method.recall == record.details["vectors"]["recall_at_10"] is not None
    assert "by the index (recall@10" in clusters_text(found) and found.at(0.9).documents >= 195
    assert neighbours_of(location, 0, limit=1).neighbours[0].id == 1


def test_a_sample_depends_on_ids_and_seed_alone(tmp_path: Path) -> None:
    location = with_vectors(tmp_path, [of_angle(float(i)) for i in range(300)])

    def sampled(seed: int = 0) -> set[int]:
        rows = read_rows(open_dataset(location), None, sample=40, seed=seed)
        assert rows.sample is not None
        return set(open_dataset(location)._take_rows(rows.sample.tolist(), columns=["id"])["id"].to_pylist())

    first, other = sampled(), sampled(-3)
    assert len(first) == len(other) == 40 and first != other and max(first) > 200 > 100 > min(first)
    open_dataset(location).optimize.compact_files()
    assert sampled() == first
    append(location, ["new"] * 30)
    assert len(sampled() & first) >= 30 and find_clusters(location, sample=40).missing == len(sampled() - first)


def test_questions_that_cannot_be_answered(plane: Location, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--threshold 1\.5"):
        find_clusters(plane, threshold=1.5)
    with pytest.raises(ConfigError, match="sample=0 cannot work"):
        find_clusters(plane, sample=0)
    with pytest.raises(FilterError, match="keeps none of the 9 rows"):
        find_clusters(plane, where="id > 99")
    with pytest.raises(TableError, match="no column embedding: make it with `pretrain embed"):
        find_clusters(make_table(tmp_path / "bare", ["a"]))


def test_the_verbs_print_and_draw(plane: Location, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--database", plane.database_uri]
    cli.main([*base, "neighbours", "--doc", "3", "--limit", "1", "--json"], standalone_mode=False)
    assert [near["id"] for near in json.loads(capsys.readouterr().out)["neighbours"]] == [4]
    plot = tmp_path / "curve.svg"
    cli.main([*base, "clusters", "--threshold", "0.98", "--sample", "8", "--plot", str(plot)], standalone_mode=False)
    text = capsys.readouterr().out
    assert "a sample of 8 of 9 documents" in text and "0.98 *" in text and "±" in text
    cli.main([*base, "clusters", "--all", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["asked"] == 9
    svg = plot.read_text()
    assert svg == threshold_svg(find_clusters(plane, threshold=0.98, sample=8)) and svg.count("<circle") == 2 * 51
