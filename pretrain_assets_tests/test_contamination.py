# ruff: noqa: RUF001  texts in other scripts are what is tested
"""Evaluation items in documents: words, n-grams, spans, thresholds, and the stage that keeps them as columns."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import shutil
import unicodedata
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain_assets.assets import checks
from pretrain_assets.assets.decontaminated import decontaminated
from pretrain_assets.assets.eval_sets import eval_sets
from pretrain_assets.assets.keys import EVAL_SETS
from pretrain_assets.assets.resources import CorpusResource, EngineResource, EvalSetsResource
from pretrain_assets.cli.contamination import contamination
from pretrain_assets.config import ContaminationConfig, EngineConfig
from pretrain_assets.curate import verify
from pretrain_assets.curate.contamination import decontaminate, describe_sets, index_of, searching
from pretrain_assets.curate.contamination_report import contamination_report
from pretrain_assets.curate.eval_sets import read_eval_sets
from pretrain_assets.curate.ngram_search import CHUNK_WORDS, find, scratch
from pretrain_assets.curate.plain_words import APOSTROPHES, UNSPACED, letters, plain_words
from pretrain_assets.curate.words import text_bytes
from pretrain_assets.errors import InputError
from pretrain_assets.report.contamination_text import contamination_text
from pretrain_assets.table.filler import fill
from pretrain_assets.table.filler.spec import BatchFunction, Worker
from pretrain_assets.table.lineage import StageResult
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import find_record, tag_version
from pretrain_assets_tests.tables import append, make_table, newest, values

COLUMNS = ("contamination_item", "contamination_items", "contamination_overlap", "contamination_start")
COLUMNS = (*COLUMNS, "contamination_stop", "contaminated")
Row = dict[str, Any]


def write_set(path: Path, *items: str | dict[str, Any]) -> str:
    rows = [{"text": item} if isinstance(item, str) else item for item in items]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def search(texts: list[str | None], *eval_sets: str, **config: Any) -> list[Row]:
    """What the columns say of some texts."""
    return _rows(_function(ContaminationConfig(eval_sets=eval_sets, **config)), texts)


def _function(config: ContaminationConfig) -> BatchFunction:
    fingerprints = tuple(one.fingerprint for one in read_eval_sets(config.eval_sets))
    return searching(config, fingerprints, Worker(num_threads=1, device="cpu"))


def _rows(function: BatchFunction, texts: list[str | None]) -> list[Row]:
    arrays = function(pa.record_batch([pa.array(texts, pa.string())], names=["text"]))
    return [dict(zip(COLUMNS, row, strict=True)) for row in zip(*(a.to_pylist() for a in arrays), strict=True)]


def run(location: Location, *eval_sets: str, **config: Any) -> StageResult:
    settings = ContaminationConfig(eval_sets=eval_sets, **config)
    return decontaminate(location, settings, input_pin=newest(location), engine=EngineConfig(workers=1))


def words_of(texts: list[str]) -> list[list[int]]:
    words, firsts = plain_words(*text_bytes(pa.array(texts, pa.string())), letters())
    return [words[a:b].tolist() for a, b in itertools.pairwise(firsts)]


def in_python(text: str) -> list[str]:
    """The words of the written policy, by whole strings."""
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    kept = [c for c in plain if unicodedata.category(c)[0] != "M" and unicodedata.category(c) != "Cf"]
    parts = []
    for c in kept:
        if c in APOSTROPHES:
            continue
        alone = any(first <= ord(c) <= last for first, last in UNSPACED)
        parts.append(f" {c} " if alone and c.isalnum() else c if c.isalnum() else " ")
    return "".join(parts).split()


PIECES = "abAB1 .,\n'-_\u00e9e\u0301\u00df\ufb01\u00bd\u3316\ufdfa\uac00\u1100\u1161\u304c\u0e01\u4e2d\U00020000"


def check_words(texts: list[str]) -> None:
    """The words are those of the written policy: as many, equal where they are equal, and otherwise not."""
    expected = [in_python(text) for text in texts]
    spelled = sorted({word for words in expected for word in words})
    alone = words_of(spelled)
    assert all(len(hashes) == 1 for hashes in alone)
    hash_of = {word: hashes[0] for word, hashes in zip(spelled, alone, strict=True)}
    assert words_of(texts) == [[hash_of[word] for word in words] for words in expected]
    assert len(set(hash_of.values())) == len(spelled)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(PIECES, max_size=12), max_size=4))
def test_words_are_those_of_the_written_policy(texts: list[str]) -> None:
    check_words(texts)


def test_every_character_counts_as_the_policy_says() -> None:
    codes = [code for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    check_words(["".join(map(chr, codes[at : at + 61])) for at in range(0, len(codes), 61)])
    check_words([f"a{chr(code)}b" for code in codes[:0x3100] if unicodedata.category(chr(code))[0] != "L"])


@pytest.fixture(scope="module")
def pages() -> list[str]:
    """All 4,361 bundled documents."""
    with (files("pretrain_assets") / "data" / "public_domain_docs.parquet").open("rb") as file:
        found: list[str] = pq.read_table(file, columns=["text"])["text"].to_pylist()
    return found


@pytest.fixture(scope="module")
def gsm8k() -> list[dict[str, str]]:
    lines = (files("pretrain_assets") / "data" / "eval" / "gsm8k_test_300.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_no_false_alarm_on_the_bundled_corpus(pages: list[str], bundled: Callable[[list[str]], list[Row]]) -> None:
    assert len(pages) == 4361
    rows = bundled(pages)
    assert [row for row in rows if row["contaminated"]] == []
    assert sum(row["contamination_overlap"] > 0 for row in rows) == 0


def reset(text: str) -> str:
    """Other case, punctuation, quotes, accents and line breaks; the same words."""
    turned = re.sub(r"[.,!?;:]", lambda match: " \u2014 " if match[0] in ".!" else "*", text.swapcase())
    turned = turned.replace("'", "\u2019").replace('"', "\u201d").replace("e", "e\u0301")
    spaces = ("\r\n", "\n\n", " \t", "\u00a0")
    return re.sub(r"\s+", lambda match: spaces[match.start() % 4], turned)


@pytest.fixture(scope="module")
def bundled() -> Callable[[list[str | None]], list[Row]]:
    """`search` for the bundled set, its index made once."""
    return partial(_rows, _function(ContaminationConfig()))


@pytest.mark.parametrize("change", [str, str.upper, reset])
@pytest.mark.parametrize("fields", [("question", "answer"), ("question",), ("answer",)])
def test_planted_items_are_all_found_where_they_stand(
    pages: list[str],
    gsm8k: list[dict[str, str]],
    bundled: Callable[[list[str | None]], list[Row]],
    change: Any,
    fields: tuple[str, ...],
) -> None:
    random.seed(len(fields))
    hosts = [page for page in pages if len(page) > 3000]
    planted, spans = list[str | None](), list[str]()
    for number, item in enumerate(gsm8k):
        page = hosts[number * 7 % len(hosts)]
        cut = page.index(" ", random.randrange(len(page) - 100))
        text = change(" ".join(item[field] for field in fields))
        planted.append(f"{page[:cut]}\n\n{text}\n\n{page[cut:]}")
        spans.append(re.sub(r"^\W+|\W+$", "", text))
    rows = bundled(planted)
    assert [row["contamination_item"] for row in rows] == [f"gsm8k_test_300/{n}" for n in range(1, 301)]
    assert all(row["contaminated"] and row["contamination_overlap"] == 1 for row in rows)
    found = [str(t)[r["contamination_start"] : r["contamination_stop"]] for t, r in zip(planted, rows, strict=True)]
    if len(fields) == 1:
        assert [plain_span(span) for span in found] == [plain_span(span) for span in spans]


def plain_span(span: str) -> str:
    return span.strip("\u0301\u2019'")


TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
TEXT = f"{TEXT} eighteen nineteen twenty more words"  # 22 words, 10 13-grams


def test_field_29_common_short_lines_are_no_evidence(tmp_path: Path) -> None:
    line = "Choose the one best answer to the question below."  # nine words
    long_line = f"Read the passage, then answer. {line}"
    items = [
        {"question": f"{long_line} {TEXT.replace('more', f'item{n}')}", "instruction": line, "answer": "None of these."}
        for n in range(11)
    ]
    exam = write_set(tmp_path / "exam.jsonl", *items)
    page = "A page about exams. " * 400
    lines = [page + line, page + long_line, f"None of these.\n{page}", TEXT[:60] + page, "Yes", "", None]
    assert [row["contaminated"] for row in search(lines, exam)] == [False] * 7
    planted = f"{page}\n{items[7]['question']}\n{page}"
    (row,) = search([planted], exam)
    assert (row["contaminated"], row["contamination_item"]) == (True, "exam/8")
    # of the 24 n-grams (36 words), the 12 that hold `item7` are this item's alone
    assert (row["contamination_items"], row["contamination_overlap"]) == (["exam/8"], 1.0)
    assert [row["contaminated"] for row in search(lines[:2], exam, max_items=11)] == [True, True]


@pytest.mark.parametrize(("num_words", "overlap"), [(12, 0.0), (13, 0.1), (17, 0.5), (18, 0.6), (22, 1.0)])
def test_the_overlap_is_the_share_of_the_ngrams_of_a_text(tmp_path: Path, num_words: int, overlap: float) -> None:
    exam = write_set(tmp_path / "exam.jsonl", TEXT)
    part = " ".join(TEXT.split()[:num_words])
    for limit in (0.1, 0.5, 0.51, 1.0):
        (row,) = search([f"Intro. {part} and no more"], exam, min_overlap=limit)
        assert row["contamination_overlap"] == np.float32(overlap)
        assert row["contaminated"] == (overlap >= limit)
        assert row["contamination_items"] == (["exam/1"] if overlap >= limit else None)
        if overlap:
            assert (row["contamination_start"], row["contamination_stop"]) == (7, 7 + len(part))
        else:
            assert row["contamination_item"] is row["contamination_start"] is row["contamination_stop"] is None


def test_the_span_is_the_longest_run_of_the_strongest_item(tmp_path: Path) -> None:
    exam = write_set(tmp_path / "exam.jsonl", TEXT, f"{TEXT} and then a great deal that is not there at all, is it?")
    words = TEXT.split()
    text = f"{' '.join(words[:14])} ... caf\u00e9 \U0001d518 {' '.join(words[6:])} ... {' '.join(words[:13])}"
    (row,) = search([text], exam)
    assert (row["contamination_item"], row["contamination_items"]) == ("exam/1", ["exam/1"])
    assert row["contamination_overlap"] == np.float32((2 + 4) / 10)
    assert text[row["contamination_start"] : row["contamination_stop"]] == " ".join(words[6:])


def test_a_repeated_ngram_counts_once_and_each_document_anew(tmp_path: Path) -> None:
    exam = write_set(tmp_path / "exam.jsonl", TEXT)
    part = " ".join(TEXT.split()[:13])
    rows = search([f"{part}. {part}. {part}", "nothing", part, TEXT], exam)
    assert [row["contamination_overlap"] for row in rows] == [np.float32(x) for x in (0.1, 0.0, 0.1, 1.0)]


def test_short_texts_are_searched_as_a_whole_or_counted(tmp_path: Path) -> None:
    eight, seven = "why is the sky above the desert blue", "why is the sky so very blue"
    exam = write_set(tmp_path / "exam.jsonl", eight, {"text": seven, "id": "short"}, {"text": None}, {"text": 5})
    rows = search([f"Tell me: WHY is the sky above the desert blue?! {seven}", f"{eight[:-5]} red"], exam)
    assert [row["contaminated"] for row in rows] == [True, False]
    assert rows[0]["contamination_items"] == ["exam/1"]
    config = ContaminationConfig(eval_sets=(exam,))
    sets = read_eval_sets(config.eval_sets)
    (described,) = describe_sets(sets, index_of(sets, config))
    counts = {name: described[name] for name in ("items", "searched", "too_short", "boilerplate")}
    assert counts == {"items": 4, "searched": 1, "too_short": 3, "boilerplate": 0}
    assert search([seven], exam, min_words=7)[0]["contamination_item"] == "exam/short"
    nothing = write_set(tmp_path / "short.jsonl", seven)
    assert search([eight], nothing)[0]["contaminated"] is False


def test_equal_hashes_of_other_words_are_no_hit(tmp_path: Path) -> None:
    config = ContaminationConfig(eval_sets=(write_set(tmp_path / "exam.jsonl", TEXT),))
    index = index_of(read_eval_sets(config.eval_sets), config)
    data, offsets = text_bytes(pa.array([TEXT]))
    assert find(data, offsets, letters(), index, scratch(index), 0.5).overlap.tolist() == [1.0]
    words = index.words.copy()
    words[12] += np.uint64(1)  # of the first 10 n-grams, all have word 13
    index = index._replace(words=words)
    assert find(data, offsets, letters(), index, scratch(index), 0.5).overlap.tolist() == [0.0]


SCRIPTS = {
    "Russian": "Сколько стоит дом, если Иван купил его за восемьдесят тысяч рублей, а потом продал ещё дороже?",
    "Greek": "Πόσο κοστίζει το σπίτι, αν ο Γιάννης το αγόρασε ογδόντα χιλιάδες ευρώ και το πούλησε ακριβότερα;",
    "Chinese": "一个农场有十六只鸭子，每天下十六个蛋，她吃三个，用四个做松饼，剩下的卖掉，每天赚多少钱？",
    "Japanese": "農場には十六羽のアヒルがいて、毎日十六個の卵を産みます。残りを市場で売るといくらになりますか。",
    "Thai": "ฟาร์มแห่งหนึ่งมีเป็ดสิบหกตัว ออกไข่วันละสิบหกฟอง ที่เหลือขายได้วันละเท่าไร",
    "Korean": "농장에는 오리가 열여섯 마리 있고 매일 알을 열여섯 개 낳고 나머지를 시장에서 팔면 하루에 얼마 벌까요",
    "Arabic": "كَمْ ثَمَنُ البيت إذا اشتراه أحمد بثمانين ألف دينار ثم باعه بعد سنة واحدة بسعر أعلى من ذلك بكثير جدا",
}


@pytest.mark.parametrize("language", SCRIPTS)
def test_other_scripts_whatever_their_unicode_form(tmp_path: Path, language: str) -> None:
    item = SCRIPTS[language]
    exam = write_set(tmp_path / "exam.jsonl", item)
    for form in ("NFC", "NFD", "NFKC"):
        text = "\u00dcber \U0001d518: " + unicodedata.normalize(form, item).swapcase() + " \u2026 end"
        (row,) = search([text], exam)
        assert (row["contaminated"], row["contamination_overlap"]) == (True, 1.0)
        span = text[row["contamination_start"] : row["contamination_stop"]]
        assert in_python(span) == in_python(item)
        assert span[0].isalnum()
    others = [text for name, text in SCRIPTS.items() if name != language]
    assert not any(row["contaminated"] for row in search([*others, item[: len(item) // 3]], exam))


def test_items_of_two_sets_that_overlap_are_both_named(tmp_path: Path) -> None:
    nowhere = "another item that stands nowhere in any of all these documents here"
    first = write_set(tmp_path / "first.jsonl", nowhere, TEXT)
    second = write_set(tmp_path / "second.jsonl", {"question": TEXT, "id": "q1"}, {"question": f"{TEXT} {TEXT[:40]}"})
    location = make_table(tmp_path / "db", [f"a {TEXT} b", "clean", TEXT[:80]], source=["web", "web", "books"])
    record = run(location, first, second, max_share_contaminated=0.4).record
    assert values(location, "contamination_items") == [["first/2", "second/q1", "second/2"], None, None]
    assert values(location, "contamination_item") == ["first/2", None, "first/2"]
    dataset = open_dataset(location)
    found = contamination_report(dataset, limit=5)
    assert [(s.name, s.items, s.searched, s.items_found, s.documents) for s in found.sets] == [
        ("first", 2, 2, 1, 1),
        ("second", 2, 2, 2, 1),
    ]
    assert [(s.source, s.rows, s.contaminated) for s in found.sources] == [("web", 2, 1), ("books", 1, 0)]
    (match,) = found.matches
    assert (match.id, match.item, match.items, match.excerpt) == (0, "first/2", 3, TEXT)
    assert verify.matches_lie_in_their_texts(dataset, record).passed
    share = verify.contaminated_share(dataset, record)
    assert (share.passed, share.details) == (False, {"sources_over_limit": ["web"], "limit": 0.4})
    text = contamination_text(found)
    assert "1 of 3 documents" in text and "first/2 (+2)" in text and "one two three" in text


def test_a_document_of_50_mb_in_one_pass(tmp_path: Path) -> None:
    exam = write_set(tmp_path / "exam.jsonl", TEXT)
    filler = "lorem ipsum dolor sit amet " * (50_000_000 // 27)
    start = len(filler) // 2
    text = f"{filler[:start]} {TEXT} {filler[start:]} {TEXT[:90]}"
    (row,) = search([text], exam)
    assert (row["contaminated"], row["contamination_start"]) == (True, start + 1)
    assert row["contamination_stop"] == start + 1 + len(TEXT)
    assert search(["a" * 50_000_000], exam)[0]["contaminated"] is False


@pytest.mark.parametrize("offset", [-23, -12, -1, 0, CHUNK_WORDS - 5])
def test_items_across_the_chunks_of_a_document(tmp_path: Path, offset: int) -> None:
    before = CHUNK_WORDS + offset
    exam = write_set(tmp_path / "exam.jsonl", TEXT)
    intro = "x " * before
    for text in (intro + TEXT, f"{intro}{TEXT} {'y ' * before}"):
        (row,) = search([text], exam)
        assert row["contamination_overlap"] == 1
        assert (row["contamination_start"], row["contamination_stop"]) == (2 * before, 2 * before + len(TEXT))


@pytest.mark.parametrize(("batches", "killed"), [(1, False), (3, True), (20, False)])
def test_batches_give_the_columns_of_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int, killed: bool
) -> None:
    exam = write_set(tmp_path / "exam.jsonl", TEXT, "why is the sky above the desert blue")
    short = "why is the sky above the desert"
    texts = [f"page {n} {TEXT[: 4 * n]} {short} {'red' if n % 9 else 'blue'}" for n in range(40)]
    size = -(-len(texts) // batches)
    location = make_table(tmp_path / "db", texts[:size])
    run(location, exam, batch_bytes=1024)
    for start in range(size, len(texts), size):
        append(location, texts[start : start + size])
        if killed:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(fill, "_commit", _killed)
                run(location, exam, batch_bytes=1024)
        assert run(location, exam, batch_bytes=1024).record.rows == min(size, len(texts) - start)
    expected = search(list(texts), exam)
    assert {name: values(location, name) for name in COLUMNS} == {
        name: [row[name] for row in expected] for name in COLUMNS
    }
    assert 0 < sum(row["contaminated"] for row in expected) < len(texts)


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt


def test_sets_of_the_same_content_recompute_nothing_and_others_everything(tmp_path: Path) -> None:
    exam = write_set(tmp_path / "exam.jsonl", TEXT)
    location = make_table(tmp_path / "db", [TEXT, "why is the sky above the desert blue"])
    first = run(location, exam)
    assert first.record.ledger == {"in": 2, "not_contaminated": 1, "contaminated": 1}
    assert open_dataset(location).count_rows("NOT contaminated") == 1
    moved = shutil.copy(exam, tmp_path / "elsewhere.jsonl")
    assert run(location, f"exam={moved}").changed is False
    write_set(tmp_path / "exam.jsonl", {"text": TEXT, "comment": "not searched"})
    assert run(location, exam).changed is False
    write_set(tmp_path / "exam.jsonl", TEXT, "why is the sky above the desert blue")
    second = run(location, exam)
    assert second.changed and second.record.version == first.record.version + 1
    assert values(location, "contaminated") == [True, True]
    assert values(location, "contaminated", first.record.version) == [True, False]
    assert run(location, exam, min_overlap=0.9).changed


def test_a_worker_with_other_sets_refuses(tmp_path: Path) -> None:
    exam = write_set(tmp_path / "exam.jsonl", TEXT)
    config = ContaminationConfig(eval_sets=(exam,))
    with pytest.raises(InputError, match="put the same files on every node"):
        searching(config, ("0" * 16,), Worker(num_threads=1, device="cpu"))


@pytest.mark.slow
def test_two_workers_give_the_same_columns(tmp_path: Path, pages: list[str], gsm8k: list[dict[str, str]]) -> None:
    texts = [f"{page} {gsm8k[n % 300]['question']}" if n % 10 == 0 else page for n, page in enumerate(pages * 60)]
    location = make_table(tmp_path, texts[: len(texts) // 2])
    pin = append(location, texts[len(texts) // 2 :])
    config = ContaminationConfig()
    decontaminate(location, config, input_pin=pin, engine=EngineConfig(workers=2))
    assert sum(values(location, "contaminated")) == len(texts[::10])


def test_an_empty_table_gets_the_columns(tmp_path: Path) -> None:
    location = make_table(tmp_path, [])
    assert run(location, "bundled").record.ledger == {"in": 0, "not_contaminated": 0, "contaminated": 0}
    assert open_dataset(location).schema.names[-6:] == list(COLUMNS)
    found = contamination_report(open_dataset(location))
    assert (found.rows, found.matches, found.sets[0].searched) == (0, (), 300)
    assert contamination_text(found).startswith("0 of 0 documents")


def test_the_assets_and_the_verb(tmp_path: Path) -> None:
    exam = write_set(tmp_path / "exam.jsonl", TEXT)
    location = make_table(tmp_path / "db", [f"a {TEXT} b", "clean"])
    quality = run(location, exam).record  # stands for the stage before, which is another room's
    tag_version(open_dataset(location), dataclasses.replace(quality, stage="quality"))
    resources = {
        "corpus": CorpusResource(database_uri=location.database_uri),
        "engine": EngineResource(workers=1),
        "eval_sets": EvalSetsResource(eval_sets=[exam]),
    }
    settings = {"ops": {"corpus__decontaminated": {"config": {"min_overlap": 0.75}}}}
    with dg.DagsterInstance.ephemeral() as instance:
        first = _observed(instance, resources)
        result = dg.materialize([decontaminated], instance=instance, resources=resources, run_config=settings)
        write_set(tmp_path / "exam.jsonl", TEXT, TEXT)
        second = _observed(instance, resources)
    assert len(first) == 16 and first != second
    (event,) = result.asset_materializations_for_node("corpus__decontaminated")
    facts = {name: value.value for name, value in event.metadata.items()}
    assert facts["ledger"] == {"in": 2, "not_contaminated": 1, "contaminated": 1}
    assert facts["parameters"]["min_overlap"] == 0.75
    assert "exam/1" in str(facts["contamination"]) and "| eval set" in str(facts["contamination"])
    record = find_record(location, "decontaminated")
    findings = {finding.name: finding.passed for finding in checks.find(location, record)}
    assert findings.pop("contaminated_share") is False  # half of the rows
    assert findings == dict.fromkeys(
        ("schema_matches", "no_nulls", "matches_lie_in_their_texts", "ledger_closes"), True
    )

    done = CliRunner().invoke(contamination, ["--json", "--limit", "1"], obj={"location": location})
    found = json.loads(done.stdout)
    assert (found["contaminated"], found["matches"][0]["excerpt"], found["sets"][0]["documents"]) == (1, TEXT, 1)
    assert "1 of 2 documents" in CliRunner().invoke(contamination, [], obj={"location": location}).stdout


def _observed(instance: dg.DagsterInstance, resources: dict[str, Any]) -> str:
    """The data version of the eval sets now."""
    job = dg.define_asset_job("observe", selection=dg.AssetSelection.assets(EVAL_SETS))
    defs = dg.Definitions(assets=[eval_sets], jobs=[job], resources=resources)
    assert defs.resolve_job_def("observe").execute_in_process(instance=instance).success
    record = instance.fetch_observations(EVAL_SETS, limit=1).records[0]
    assert record.asset_observation is not None
    return str(record.asset_observation.data_version)
