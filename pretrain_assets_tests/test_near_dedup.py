"""Near duplicates: signatures, the recall curve, who wins, what is incremental, and the written policy on words."""

from __future__ import annotations

import functools
import itertools
import math
import random
import signal
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain_assets.config import DedupConfig, MaintainConfig, NearDedupConfig
from pretrain_assets.curate import eda, folded_words, lsh, minhash, verify
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.curate.near_dedup import near_dedup
from pretrain_assets.errors import ConfigError, TableError
from pretrain_assets.table.filler import columnread
from pretrain_assets.table.lineage import StageResult
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.upkeep.maintain import maintain
from pretrain_assets.table.verify import Finding, schema_matches
from pretrain_assets_tests.tables import append, make_table, newest, values

COLUMNS = ("minhash", "near_dup_of", "near_dup_similarity", "is_near_dup")
DEFAULTS = NearDedupConfig()
PLANTED = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Jaccard indices of planted pairs."""


def run(location: Location, config: NearDedupConfig = DEFAULTS) -> StageResult:
    dedup(location, DedupConfig(), input_pin=newest(location))
    return near_dedup(location, config, input_pin=newest(location))


def words(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [f"w{draw.randrange(10**9)}" for _ in range(count)]


def pair(similarity: float, seed: int, shingles: int = 190) -> tuple[str, str]:
    """Two texts of equal length whose sets of 5-word shingles have this Jaccard index, to the nearest shingle."""
    shared = round(2 * shingles * similarity / (1 + similarity))
    first = words(shingles + 4, 2 * seed)
    second = first[: shared + 4] + words(shingles - shared, 2 * seed + 1)
    return " ".join(first), " ".join(second)


def sign(*texts: str | None, **changes: int) -> npt.NDArray[np.uint32]:
    settings = {"ngram_words": 5, "min_words": 5, "num_values": 112, "seed": 1} | changes
    return minhash.signatures(pa.array(texts, pa.string()), **settings)


def same(left: str, right: str) -> bool:
    """Whether two texts have the same normalised words."""
    first, second = sign(left, right)
    return bool((first == second).all())


# --- signatures


def reference(shingles: list[int], num_values: int = 112, seed: int = 1) -> list[int]:
    """The signature of a text with these polynomials, by the words of the docstring."""
    multipliers, addends = minhash.hash_functions(num_values, seed)
    salt = minhash._split_mix(seed, 2 * num_values)
    hashes = [int(folded_words.mix(np.uint64(shingle ^ salt))) for shingle in shingles]
    slots: dict[int, int] = {}
    for hashed in hashes:
        slot = (hashed >> 32) * num_values >> 32
        slots[slot] = min(slots.get(slot, 2**32), hashed % 2**31)
    own = [
        2**31 + min((int(a) * (hashed >> 32) + int(b)) % 2**64 >> 33 for hashed in hashes)
        for a, b in zip(multipliers, addends, strict=True)
    ]
    return [slots.get(slot, own[slot]) for slot in range(num_values)]


def polynomials(text: str, ngram: int = 5) -> list[int]:
    """The shingles of a text of words that are normal already, before they are mixed."""
    hashed = []
    for word in text.split():
        value = folded_words.FNV_OFFSET
        for character in word:
            value = (value ^ ord(character)) * folded_words.FNV_PRIME % 2**64
        hashed.append(int(folded_words.mix(np.uint64(value))) | 1)
    grams = [hashed[at : at + ngram] for at in range(max(1, len(hashed) - ngram + 1))]
    return [functools.reduce(lambda sum, word: (sum * minhash.POLYNOMIAL + word) % 2**64, gram, 0) for gram in grams]


@pytest.mark.parametrize("count", [1, 4, 5, 6, 60, 300, minhash.BLOCK + 3, minhash.BLOCK + 4, minhash.BLOCK + 5, 2500])
def test_a_signature_is_what_the_docstring_says(count: int) -> None:
    text = " ".join(words(count, count))
    assert sign(text)[0].tolist() == reference(polynomials(text))


def test_slots_that_no_shingle_reaches_in_a_long_text() -> None:
    text = "a b c d e " * minhash.BLOCK  # five shingles, in several blocks
    assert sign(text)[0].tolist() == reference(polynomials("a b c d e a b c d"))


def test_the_shingles_of_a_text_are_those_of_its_words() -> None:
    text = "The quick, brown fox -- jumps over the lazy dog."
    normal = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    sets, lengths = minhash.shingle_sets(pa.array([text]), ngram_words=5, min_words=5)
    assert lengths.tolist() == [5]
    expected = [int(folded_words.mix(np.uint64(shingle))) for shingle in polynomials(" ".join(normal))]
    assert sets.tolist() == sorted(expected)


def test_signatures_are_the_same_on_every_machine() -> None:
    digest = sign("One text of some words, 1.5 é 漢字", "", "a").astype(np.uint64).sum(axis=1)
    assert digest.tolist() == [277184642492, 112 * 0xFFFFFFFF, 346096611755]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(st.sampled_from("ab .,é漢1\u2019\u3000"), max_size=60), max_size=6), st.integers(1, 4))
def test_a_batch_gives_each_text_its_own_signature(texts: list[str], ngram: int) -> None:
    together = sign(*texts, ngram_words=ngram)
    assert [row.tolist() for row in together] == [sign(text, ngram_words=ngram)[0].tolist() for text in texts]


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("one\r\ntwo three\r\nfour five six", "one\ntwo three\nfour five six", True),
        ("\ufeffone two three four five", "one two three four five", True),
        ("zero\u200bwidth one two three four", "zerowidth one two three four", True),
        (
            unicodedata.normalize("NFC", "café Ångström việt й ΐ ё"),
            unicodedata.normalize("NFD", "café Ångström việt й ΐ ё"),
            True,
        ),
        ("\u201cCurly\u201d don\u2019t \u2014 stop", '"Curly" don\'t - stop', True),
        ("ÉCOLE ЖЁЛТЫЙ ΔΣΩ a b", "école жёлтый δσω a b", True),
        ("1 2 3 4 5 6", "1 2 3 4 5 7", False),
        ("1.5 2.5 3.5 4.5 5.5", "15 25 35 45 55", False),
        ("-1 2 3 4 5", "1 2 3 4 5", False),
        ("(1) 2 3 4 5", "1 2 3 4 5", True),
        ("2020-01-02 a b c d", "20200102 a b c d", False),
        ("10 4 a b c", "1 04 a b c", False),
        ("x² a b c d", "x2 a b c d", False),
        ("漢字かな", "漢 字\u3000か、な", True),
        ("漢字かな", "漢字かに", False),
    ],
)
def test_field_28_written_policy(left: str, right: str, equal: bool) -> None:
    assert same(left, right) == equal


def test_every_white_space_divides_words() -> None:
    spaces = [chr(c) for c in range(0x3001) if chr(c).isspace()]
    assert len(spaces) == 29
    assert all(same(f"a{space}b", "a b") and not same(f"a{space}b", "ab") for space in spaces)


def test_torn_characters_are_no_danger() -> None:
    torn = pa.array([b"word \xe6\xbc", b"\xf0\x9f", b"\xc3", b"ok"]).view(pa.string())
    assert (minhash.signatures(torn, ngram_words=5, min_words=5, num_values=8, seed=1)[:, 0] > 0).all()


# --- recall and precision


@pytest.fixture(scope="module")
def planted() -> dict[float, tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]]:
    """Signatures of 400 pairs of each similarity."""
    found = {}
    for similarity in PLANTED:
        pairs = [pair(similarity, round(similarity * 1000) * 1000 + at) for at in range(400)]
        found[similarity] = sign(*(one for one, _ in pairs)), sign(*(other for _, other in pairs))
    return found


@pytest.mark.parametrize("similarity", PLANTED)
def test_recall_is_the_theoretical_curve(
    planted: dict[float, tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]], similarity: float
) -> None:
    """Within five standard errors of a binomial share of 400 pairs; verified, it is that curve or a steeper one."""
    left, right = planted[similarity]
    banded = (minhash.band_hashes(left, 14) == minhash.band_hashes(right, 14)).any(axis=0)
    verified = banded & ((left == right).mean(axis=1) >= 0.75)
    for found, threshold in ((banded, 0.0), (verified, 0.75)):
        expected = lsh.detection_probability(similarity, bands=14, rows_per_band=8, threshold=threshold)
        tolerance = 5 * math.sqrt(expected * (1 - expected) / len(left)) + 2 / len(left)
        assert found.mean() <= expected + tolerance or similarity > threshold > 0
        assert found.mean() >= expected - tolerance or similarity < threshold


@pytest.mark.parametrize("shingles", [6, 40, 2000])
def test_the_estimate_is_unbiased_and_no_wider_than_binomial(shingles: int) -> None:
    """Whatever the number of shingles: fewer than slots, or many more."""
    pairs = [pair(0.6, at, shingles) for at in range(200 if shingles < 1000 else 50)]
    left, right = sign(*(one for one, _ in pairs)), sign(*(other for _, other in pairs))
    estimates = (left == right).mean(axis=1)
    shared = round(2 * shingles * 0.6 / 1.6)
    true = shared / (2 * shingles - shared)
    error = math.sqrt(true * (1 - true) / 112)
    assert estimates.mean() == pytest.approx(true, abs=5 * error / math.sqrt(len(pairs)))
    assert estimates.std() < 1.25 * error


def test_the_curve_without_threshold_is_the_known_one() -> None:
    for similarity in PLANTED:
        curve = lsh.detection_probability(similarity, bands=14, rows_per_band=8)
        assert curve == pytest.approx(1 - (1 - similarity**8) ** 14, abs=1e-9)


def test_true_similarity_of_planted_pairs() -> None:
    for similarity in PLANTED:
        sets, lengths = minhash.shingle_sets(pa.array(pair(similarity, 7)), ngram_words=5, min_words=5)
        assert lengths.tolist() == [190, 190]
        assert lsh.jaccard(sets[:190], sets[190:]) == pytest.approx(similarity, abs=0.004)


# --- the columns


def test_field_26_near_is_not_transitive(tmp_path: Path) -> None:
    """A near B, B near C, A far from C: B goes, C stays; and no row is near one that goes."""
    text = words(300, 1)
    chain = [" ".join(text[at : at + 204]) for at in (0, 20, 40)]  # 200 shingles; neighbours share 180: 0.82, ends 0.67
    location = make_table(tmp_path, [*chain, chain[2] + " more"])
    result = run(location, NearDedupConfig(verify="exact"))
    assert values(location, "near_dup_of") == [None, 0, None, 2]
    assert values(location, "is_near_dup") == [False, True, False, True]
    assert values(location, "near_dup_similarity") == [None, pytest.approx(180 / 220), None, pytest.approx(200 / 201)]
    assert result.record.ledger == {"in": 4, "kept": 2, "near_duplicate": 2, "duplicate": 0}


def test_the_most_similar_kept_row_is_named_and_of_equals_the_first(tmp_path: Path) -> None:
    text = words(104, 1)
    far = [*words(8, 2), *text[8:]]  # of 100 shingles it shares 92 with the text: 0.85
    near = [*text[:-4], *words(4, 3)]  # shares 96: 0.92; of the two, 88 are the same: 0.79
    location = make_table(tmp_path, [" ".join(some) for some in (far, near, text, reversed(text), reversed(text[:-1]))])
    run(location, NearDedupConfig(verify="exact", bands=50, rows_per_band=2, threshold=0.8))
    assert values(location, "near_dup_of") == [None, None, 1, None, 3]


def test_short_texts_have_their_own_rule(tmp_path: Path) -> None:
    texts = ["Hello, world", "hello world!", "hello there", "", "...", None, "!", "one two three four", "one two three"]
    location = make_table(tmp_path, texts)
    run(location)
    assert values(location, "near_dup_of") == [None, 0, *[None] * 7]
    long = " ".join(words(20, 1))
    other = make_table(tmp_path / "min_words", [long, long + " more", long + "!"])
    run(other, NearDedupConfig(min_words=30))
    assert values(other, "near_dup_of") == [None, None, 0], "compared whole"


def test_exact_duplicates_take_no_part(tmp_path: Path) -> None:
    text = " ".join(words(100, 1))
    location = make_table(tmp_path, [text, text + " ", text.upper(), text.upper()])
    result = run(location)
    assert values(location, "is_dup") == [False, True, False, True]
    assert values(location, "near_dup_of") == [None, None, 0, None]
    assert values(location, "near_dup_similarity") == [None, None, 1.0, None]
    assert values(location, "is_near_dup") == [False, False, True, False]
    assert result.record.ledger == {"in": 4, "kept": 1, "near_duplicate": 1, "duplicate": 2}


def test_the_lowest_id_wins_whatever_the_row_order(tmp_path: Path) -> None:
    text = " ".join(words(100, 1))
    location = make_table(tmp_path, [f"{text} {last}" for last in "abc"], id=[5, 3, 4])
    run(location)
    assert values(location, "near_dup_of") == [3, None, 3]


def test_field_28_tables_of_numbers_stay_apart(tmp_path: Path) -> None:
    draw = random.Random(1)
    tables = ["\n".join(" ".join(f"{draw.random():.3f}" for _ in range(6)) for _ in range(30)) for _ in range(20)]
    location = make_table(tmp_path, [*tables, tables[0].replace("\n", "\r\n\r\n")[:-6] + " 9.999"])
    run(location)
    assert values(location, "near_dup_of") == [None] * 20 + [0]


def test_field_26_templates_alarm_and_can_be_left_out(tmp_path: Path) -> None:
    template = words(100, 1)
    pages = [" ".join([*template, *words(8, 10 + page)]) for page in range(10)]
    location = make_table(
        tmp_path, [*pages, *(" ".join(words(90, at)) for at in range(50, 60))], source=["t"] * 10 + ["o"] * 10
    )
    result = run(location)
    assert values(location, "is_near_dup") == [False, *[True] * 9, *[False] * 10]
    finding = verify.near_share_removed(open_dataset(location), result.record)
    assert (finding.passed, finding.details) == (False, {"sources_over_limit": ["t"], "limit": 0.5})
    assert "90.0% of t (limit 50%)" in finding.description
    shares = eda.duplicates_by_source(open_dataset(location), "is_near_dup")
    assert [(share.source, share.duplicates) for share in shares] == [("o", 0), ("t", 9)]
    result = run(location, NearDedupConfig(skip_sources=("t",)))
    assert not any(values(location, "is_near_dup"))
    assert verify.near_share_removed(open_dataset(location), result.record).passed


def test_a_full_bucket_is_compared_with_its_earliest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Texts of one template, none near another: each is compared with two, and the log says so."""
    template = words(100, 1)
    pages = [" ".join([*template, *words(100, 10 + page)]) for page in range(12)]
    config = NearDedupConfig(bands=20, rows_per_band=1, max_compared=2, threshold=0.9)
    location = make_table(tmp_path, [*pages, pages[0] + " x"])
    run(location, config)
    assert values(location, "near_dup_of")[-1] == 0
    assert "were not compared with all kept texts" in caplog.text


# --- incremental, and checked


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    """Families of texts, each a step further from the last, with exact copies and short texts among them."""
    draw = random.Random(0)
    texts: list[str] = []
    for family in range(25):
        text = words(draw.choice([3, 40, 120]), family)
        for _ in range(8):
            texts.append(" ".join(text))
            at = draw.randrange(len(text))
            text = [*text[:at], *words(len(text) // 30, draw.randrange(10**6)), *text[at + len(text) // 30 :]]
    draw.shuffle(texts)
    return texts


def findings(location: Location, result: StageResult) -> list[Finding]:
    dataset = open_dataset(location)
    return [schema_matches(dataset, "near_deduped"), verify.near_duplicates_name_survivors(dataset, result.record)]


def brute_force(texts: list[str], threshold: float) -> list[int | None]:
    """What each text repeats, every kept earlier one compared by its true shingles."""
    sets = [
        set(itertools.pairwise(itertools.pairwise(itertools.pairwise(itertools.pairwise(text.split())))))
        for text in texts
    ]
    sets = [found or {text} for found, text in zip(sets, texts, strict=True)]
    kept: list[int] = []
    partners: list[int | None] = []
    for row, text in enumerate(texts):
        if text in texts[:row]:
            partners.append(None)
            continue
        near = [(len(sets[row] & sets[other]) / len(sets[row] | sets[other]), -other) for other in kept]
        best = max(near, default=(0.0, 0))
        partners.append(-best[1] if best[0] >= threshold else None)
        if best[0] < threshold:
            kept.append(row)
    return partners


@pytest.mark.parametrize("batches", [1, 3, pytest.param(20, marks=pytest.mark.slow)])
def test_field_27_batches_give_the_columns_of_one_batch(tmp_path: Path, corpus: list[str], batches: int) -> None:
    """And they are those of comparing everything with everything, where bands let no pair slip."""
    config = NearDedupConfig(verify="exact", bands=56, rows_per_band=2, threshold=0.7)
    size = -(-len(corpus) // batches)
    location = make_table(tmp_path, corpus[:size])
    before: list[int | None] = []
    for start in range(0, len(corpus), size):
        if start:
            append(location, corpus[start : start + size])
        result = run(location, config)
        partners = values(location, "near_dup_of")
        assert partners[: len(before)] == before, "an appended batch flipped an earlier row"
        before = partners
    assert before == brute_force(corpus, 0.7)
    assert 20 < sum(partner is not None for partner in before) < 150
    assert all(finding.passed for finding in findings(location, result))


def test_a_second_run_is_a_no_op_and_new_rows_alone_get_signatures(
    tmp_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    location = make_table(tmp_path, corpus[:150])
    assert run(location).changed
    assert not run(location).changed
    signed: list[int] = []
    real = minhash.signatures
    monkeypatch.setattr(minhash, "signatures", lambda texts, **keys: signed.append(len(texts)) or real(texts, **keys))
    append(location, corpus[150:])
    run(location)
    assert sum(signed) == 50
    run(location, replace(DEFAULTS, threshold=0.9, max_compared=7))
    assert sum(signed) == 50, "settings of the decision leave signatures alone"
    run(location, replace(DEFAULTS, seed=2))
    assert sum(signed) == 250


def test_a_deleted_survivor_is_as_if_it_had_never_been(tmp_path: Path, corpus: list[str]) -> None:
    location = make_table(tmp_path, corpus)
    run(location)
    survivor = next(partner for partner in values(location, "near_dup_of") if partner is not None)
    dataset = open_dataset(location)
    dataset.delete(f"id = {survivor}")
    result = run(location)
    assert all(finding.passed for finding in findings(location, result))
    rest = [text for row, text in enumerate(corpus) if row != survivor]
    fresh = make_table(tmp_path / "fresh", rest, id=[row for row in range(len(corpus)) if row != survivor])
    run(fresh)
    for column in COLUMNS[1:]:
        assert values(location, column) == values(fresh, column)


def test_an_exact_duplicate_that_became_the_first_is_judged(tmp_path: Path) -> None:
    """Also when near duplicates were asked for between the deletion and the new `is_dup`."""
    text = " ".join(words(100, 1))
    location = make_table(tmp_path, [text + " a", text, "other", text])
    run(location)
    assert values(location, "near_dup_of") == [None, 0, None, None]
    open_dataset(location).delete("id = 1")
    near_dedup(location, DEFAULTS, input_pin=newest(location))
    assert values(location, "near_dup_of") == [None, None, None]
    assert run(location).changed
    assert values(location, "near_dup_of") == [None, None, 0]
    assert not run(location).changed


def test_a_changed_is_dup_is_seen_through_a_compaction(tmp_path: Path) -> None:
    text = " ".join(words(100, 1))
    location = make_table(tmp_path, [text, text, text + " a", "other"])
    run(location)
    assert values(location, "near_dup_of") == [None, None, 0, None]
    open_dataset(location).delete("id = 0")
    near_dedup(location, DEFAULTS, input_pin=newest(location))
    assert values(location, "near_dup_of") == [None, None, None], "row 1 is an exact duplicate still"
    dedup(location, DedupConfig(), input_pin=newest(location))
    before = [fragment.fragment_id for fragment in open_dataset(location).get_fragments()]
    maintain(location, MaintainConfig(max_deleted_share=0.1), pinned_by_runs={})
    assert not set(before) & {fragment.fragment_id for fragment in open_dataset(location).get_fragments()}
    assert near_dedup(location, DEFAULTS, input_pin=newest(location)).changed
    assert values(location, "near_dup_of") == [None, 1, None]
    assert not run(location).changed


@pytest.mark.parametrize("file", ["band-0", "evidence"])
def test_a_full_temporary_folder_is_named_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    text = " ".join(words(100, 1))
    location = make_table(tmp_path / "db", [text, text + " a"])
    dedup(location, DedupConfig(), input_pin=newest(location))
    pin = newest(location)

    def full(*_: object, **__: object) -> str:
        (tmp_path / "scratch").mkdir()
        (tmp_path / "scratch" / file).symlink_to("/dev/full")
        return str(tmp_path / "scratch")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", full)
        with pytest.raises(TableError, match=r"near duplicates are found by .*No space left.*TMPDIR"):
            near_dedup(location, DEFAULTS, input_pin=pin)
    assert newest(location) == pin and not (tmp_path / "scratch").exists()
    near_dedup(location, DEFAULTS, input_pin=pin)
    assert values(location, "near_dup_of") == [None, 0]


@pytest.mark.parametrize("verify_by", ["estimate", "exact"])
def test_columns_are_read_in_pieces(
    tmp_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch, verify_by: str
) -> None:
    """Some rows at a time, of fragments with deleted rows and of files that are not committed yet."""
    config = NearDedupConfig(verify=verify_by)  # type: ignore[arg-type]
    whole, pieces = (make_table(tmp_path / name, corpus[:120]) for name in ("whole", "pieces"))
    append(pieces, corpus[120:])
    append(whole, corpus[120:])
    run(whole, config)
    sizes: list[int] = []
    real = columnread.column_batches

    def counted(dataset: Any, fragments: Any, column: pa.Field, **more: Any) -> Iterator[pa.Array]:
        for piece in real(dataset, fragments, column, **more):
            sizes.append(len(piece) if column.name == "minhash" else 0)
            yield piece

    monkeypatch.setattr(columnread, "column_batches", counted)
    monkeypatch.setattr(columnread, "READ_BATCH_BYTES", 4480)
    run(pieces, config)
    assert 5 < max(sizes) <= 10 and sum(sizes) == len(corpus) * (2 if verify_by == "estimate" else 1)
    for location in (whole, pieces):
        open_dataset(location).delete("id IN (0, 5, 130, 199)")
        run(location, config)
    for column in COLUMNS:
        assert values(pieces, column) == values(whole, column)


def test_a_wrong_partner_is_found(tmp_path: Path) -> None:
    import lance

    text = " ".join(words(50, 1))
    location = make_table(tmp_path, [text + " a", text + " b", text + " c"])
    result = run(location)
    assert findings(location, result)[1].passed
    lance.dataset(location.uri).update({"near_dup_of": "1"}, where="id = 2")
    finding = findings(location, result)[1]
    assert (finding.passed, finding.details) == (False, {"near_duplicates": 2, "wrong": 1})


def test_an_empty_table_gets_the_columns(tmp_path: Path) -> None:
    location = make_table(tmp_path, [])
    result = run(location)
    assert result.record.ledger == {"in": 0, "kept": 0, "near_duplicate": 0, "duplicate": 0}
    assert open_dataset(location).schema.names[-4:] == list(COLUMNS)


def test_near_duplicates_come_after_exact_ones(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["a"])
    with pytest.raises(TableError, match="run `pretrain dedup` first"):
        near_dedup(location, DEFAULTS, input_pin=newest(location))


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("ngram_words", 0, "use 1 to 64"),
        ("bands", 0, "use at least 1"),
        ("rows_per_band", 100, "use at most 1024"),
        ("threshold", 0.0, "above 0"),
        ("threshold", 1.5, "at most 1"),
        ("verify", "guess", "use estimate or exact"),
        ("min_words", 4, "ngram_words \\(5\\)"),
        ("seed", -1, "use 0 to"),
        ("skip_sources", ("",), "name no empty source"),
        ("max_compared", 0, "use at least 1"),
        ("max_share_removed", 2.0, "from 0 to 1"),
        ("batch_bytes", 1, "use at least 1024"),
    ],
)
def test_settings_that_cannot_work_are_refused(setting: str, value: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        NearDedupConfig(**{setting: value})  # type: ignore[arg-type]


# --- kills and sizes

KILLED = """
import os, signal, sys
from pretrain_assets.config import EngineConfig, NearDedupConfig
from pretrain_assets.curate import lsh
from pretrain_assets.curate.near_dedup import near_dedup
from pretrain_assets.table.storage import Location
from pretrain_assets_tests.tables import newest

lsh.first_wins = lambda *arguments, **more: os.kill(os.getpid(), signal.SIGKILL)
location = Location(database_uri=sys.argv[1])
near_dedup(location, NearDedupConfig(), input_pin=newest(location), engine=EngineConfig(workers=1))
"""


@pytest.mark.slow
def test_kills_between_change_nothing(tmp_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in each of three batches, after the signatures were made: those are not made again."""
    killed, calm = (make_table(tmp_path / name, corpus[:100]) for name in ("killed", "calm"))
    signed: list[int] = []
    real = minhash.signatures
    for start in (0, 100, 150):
        if start:
            append(killed, corpus[start : start + 50])
            append(calm, corpus[start : start + 50])
        dedup(killed, DedupConfig(), input_pin=newest(killed))
        child = subprocess.run([sys.executable, "-c", KILLED, killed.database_uri], timeout=120)
        assert child.returncode == -signal.SIGKILL
        with monkeypatch.context() as patch:
            patch.setattr(minhash, "signatures", lambda texts, **keys: signed.append(len(texts)) or real(texts, **keys))
            assert run(killed).changed
        run(calm)
    assert signed == []
    for column in COLUMNS:
        assert values(killed, column) == values(calm, column)


HUGE = """
import resource, sys
import pyarrow as pa
from pretrain_assets.curate import minhash

def sign(texts):
    return minhash.signatures(texts, ngram_words=5, min_words=5, num_values=112, seed=1)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10  # MiB

sign(pa.array(["a b c d e f"]))
texts = pa.array(["".join(f"w{at} " for at in range(6_500_000)), "a" * 1_000_000, "a " * 1_000_000])
before = peak()
print(texts.nbytes >> 20, peak() - before if sign(texts).all() else -1)
"""


@pytest.mark.slow
def test_a_huge_document_takes_no_memory_of_its_own() -> None:
    printed = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True).stdout
    size, grown = map(int, printed.split())
    assert size >= 50 and 0 <= grown < 8


@pytest.mark.slow
def test_field_21_a_document_of_50_megabytes_in_a_table(tmp_path: Path) -> None:
    text = " ".join(words(5_000_000, 1))
    location = make_table(tmp_path, [text, "a" * 1_000_000, text + " more", "a" * 1_000_000 + " more"])
    assert len(text) > 50_000_000
    run(location, NearDedupConfig(verify="exact"))
    assert values(location, "near_dup_of") == [None, None, 0, None]
