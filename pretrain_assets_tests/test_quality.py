"""Quality signals, language and PII: values worked out by hand, rule by rule, and the stages that write them."""

from __future__ import annotations

# ruff: noqa: RUF001  # scripts whose letters look like Latin ones
import json
import random
import re
import resource
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import curation_quality
from pretrain_assets.config import EngineConfig, MaskConfig, QualityConfig
from pretrain_assets.curate import pii
from pretrain_assets.curate.language import telling
from pretrain_assets.curate.masking import mask
from pretrain_assets.curate.quality import measuring, outputs, quality
from pretrain_assets.curate.quality_numbers import rule_numbers
from pretrain_assets.curate.quality_rules import RULES, keeps, reason, rows_failing
from pretrain_assets.curate.verify import lines_add_up
from pretrain_assets.curate.words import text_bytes
from pretrain_assets.errors import ConfigError
from pretrain_assets.table.columns import columns_of
from pretrain_assets.table.filler.spec import Worker
from pretrain_assets.table.lineage import StageResult
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets_tests.tables import append, make_table, newest, values

STOP_WORDS = QualityConfig().stop_words
OUTCOMES = [c.name for c in columns_of("quality") if c.name.startswith("c4_")][1:-1]
ONE = EngineConfig(workers=1)


def numbers(text: str | None, stop_words: tuple[str, ...] = STOP_WORDS) -> dict[str, float]:
    found = rule_numbers(*text_bytes(pa.array(["the text before", text, "and behind"])), stop_words)
    return {name: array[1].item() for name, array in found.items()}


def run(location: Location, **config: Any) -> StageResult:
    return quality(location, QualityConfig(**config), input_pin=newest(location), engine=ONE)


@pytest.mark.parametrize(
    ("text", "column", "value"),
    [
        # words and symbols
        ("a bb ccc — ... (!)", "gopher_words", 3),
        ("a bb ccc — ... (!)", "gopher_word_length", 2.0),
        ("café\u3000日本語\x1cnaïve", "gopher_words", 3),
        ("café\u3000日本語\x1cnaïve", "gopher_word_length", 4.0),
        ("1 － x", "gopher_words", 3),  # a full-width hyphen is none of datatrove's punctuation, a full-width 1 is
        ("１ x", "gopher_words", 1),
        ("# one ## two", "gopher_hash_ratio", 0.75),
        ("wait... what…  ....... no", "gopher_ellipsis_ratio", 1.0),  # seven full stops are two ellipses
        ("ab 12 é 1a -- 漢", "gopher_alpha_words", 4 / 6),
        ("The the be THE to to of", "gopher_stop_words", 4),
        # how lines begin and end
        ("• a\n  - b\nc\n—d", "gopher_bullet_lines", 0.5),
        ("a...\nb… \nc..\n...d\r\ne", "gopher_ellipsis_lines", 0.4),
        # repeated lines and paragraphs
        ("aa\nbb\naa\n\n\naa", "gopher_dup_lines", 0.5),
        ("aa\nbb\naa\n\n\naa", "gopher_dup_line_chars", 4 / 13),
        ("\na\n", "gopher_dup_lines", 1 / 3),  # an empty line before and one behind
        ("éé\n\nb\nb\n\n\n\néé\n\n", "gopher_dup_paragraphs", 1 / 3),
        ("éé\n\nb\nb\n\n\n\néé\n\n", "gopher_dup_paragraph_chars", 2 / 15),
        ("x\n \nx", "gopher_dup_paragraphs", 0.0),  # a line with a space divides no paragraphs
        # n-grams: "a b" twice is 2 x 3 characters, "a b c" once is the first of all
        ("a b c a b", "gopher_top_2gram", 6 / 9),
        ("a b c a b", "gopher_top_3gram", 5 / 9),
        ("a b", "gopher_top_3gram", 0.0),
        ("é é é é é é", "gopher_top_2gram", 15 / 11),  # overlapping, so more than the whole
        ("a b c d e f a b c d e", "gopher_dup_5gram", 5 / 21),
        ("a b c d e f a b c d e", "gopher_dup_6gram", 0.0),
        ("x x x x x x x x x x x x", "gopher_dup_5gram", 10 / 23),  # at word 1 and, read on behind it, at word 6
        # FineWeb
        ("One.\n\ntwo\n   \nThree!\nfour。", "fineweb_ended_lines", 0.75),
        ('ends with a quote."', "fineweb_ended_lines", 0.0),
        ("One.\r\nTwo.\r\n", "fineweb_ended_lines", 0.0),  # the carriage return belongs to the line
        (f"{'x' * 30}\n{'é' * 31}\n{'é' * 30}", "fineweb_short_lines", 2 / 3),
        ("aa\n  \nbb\naa\n  ", "fineweb_dup_line_chars", 0.2),  # of ten characters, blank lines left out
        ("a b\nc\n\nd", "fineweb_newlines", 0.75),
        # C4
        ('One two three. Four five six! Is it J. S. Bach? "Yes." No.', "c4_sentences", 5),
        ("Version 2.0 of e.g. this. And so on", "c4_sentences", 0),
        ("And ... so .. on . . . Then it ends.", "c4_sentences", 1),
        ("a b c.\x0bd e f.\u2028g h i.\r\nj k l.\x85m n o.\n", "c4_lines", 5),
        ('A line of text.\nno end here\nOh no.\nAnd so it goes...\nQuoted "as this"', "c4_unended_lines", 2),
        ('A line of text.\nno end here\nOh no.\nAnd so it goes...\nQuoted "as this"', "c4_short_lines", 1),
        ('A line of text.\nno end here\nOh no.\nAnd so it goes...\nQuoted "as this"', "c4_kept_lines", 2),
        ("It is so.[12][edit]\nAnd so.[citation needed] [1]", "c4_kept_lines", 1),  # a space is left of the second
        ("Please enable JavaScript now.", "c4_javascript_lines", 1),
        ("We use cookies here.\nThe Terms of Use apply.\nA cookie jar is here.", "c4_policy_lines", 2),
        ("No { in here.\nno end {", "c4_curly_lines", 1),
        ("There is Lorem[1] ipsum in javascript {.", "c4_lorem_ipsum_lines", 1),
        ("No { in here.\nno end {\nno end { here\nLorem ipsum {\nI am Lorem ipsum {", "fineweb_curly_lines", 3),
        ("No { in here.\nno end {\nno end { here\nLorem ipsum {\nI am Lorem ipsum {", "fineweb_lorem_ipsum_lines", 2),
        ("It ends. And not\ntwo words\nThree words here.", "fineweb_sentences", 3),
        ("It ends. And not\ntwo words\nThree words here.", "c4_sentences", 1),
        (f"long {'é' * 1001} word.\nlong {'é' * 1000} word.", "c4_long_word_lines", 1),
    ],
)
def test_a_value_by_hand(text: str, column: str, value: float) -> None:
    assert numbers(text)[column] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    "text", [None, "", " ", "\n", "\n\n\n", "\r\n", "\x1c\u3000", "a", "é", "漢\n", "...", "\ufeff"]
)
def test_edges_have_a_value_for_every_column(text: str | None) -> None:
    found = numbers(text)
    assert sorted(found) == sorted(
        c.name for c in columns_of("quality") if c.name.split("_")[0] not in {"language", "pii"}
    )
    assert all(np.isfinite(value) for value in found.values())
    assert found["c4_lines"] == sum(found[name] for name in OUTCOMES) == len((text or "").splitlines())
    assert found["gopher_words"] == (1 if text and text.strip() in {"a", "é", "漢", "\ufeff"} else 0)


def duplicated(words: list[str], size: int) -> int:
    """datatrove's `find_all_duplicate`, as its behaviour is described."""
    seen, characters, at = set(), 0, 0
    while at <= len(words) - size:
        gram = tuple(words[at : at + size])
        characters += sum(map(len, gram)) if gram in seen else 0
        at += size if gram in seen else 1
        seen.add(gram)
    return characters


def top(words: list[str], size: int) -> int:
    grams = Counter(" ".join(words[at : at + size]) for at in range(len(words) - size + 1))
    return max((len(gram) * count for gram, count in grams.items() if count == max(grams.values())), default=0)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(["a", "b", "cc", "é"]), max_size=60))
def test_ngrams_are_those_of_the_plain_loops(words: list[str]) -> None:
    text = " ".join(words)
    found, length = numbers(text), max(1, len(text))
    for size in range(5, 11):
        assert found[f"gopher_dup_{size}gram"] == pytest.approx(duplicated(words, size) / length, rel=1e-6)
    for size in (2, 3, 4):  # of several most frequent ones the first counts, which may be shorter
        assert found[f"gopher_top_{size}gram"] <= top(words, size) / length + 1e-6
        first = Counter(" ".join(words[at : at + size]) for at in range(len(words) - size + 1)).most_common(1)
        expected = len(first[0][0]) * first[0][1] if first else 0
        assert found[f"gopher_top_{size}gram"] == pytest.approx(expected / length, rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.sampled_from([".", "..", "...", "\n", "\n\n", " ", "a", "the be", "é", "…", "•", "\u2028", "[1]"]),
        max_size=40,
    )
)
def test_a_text_is_measured_as_if_it_were_alone(pieces: list[str]) -> None:
    texts = ["".join(pieces[at : at + 4]) for at in range(0, len(pieces), 4)]
    together = rule_numbers(*text_bytes(pa.array(texts, pa.string())), STOP_WORDS)
    alone = [rule_numbers(*text_bytes(pa.array([text])), STOP_WORDS) for text in texts]
    assert {name: array.tolist() for name, array in together.items()} == {
        name: [one[name].item() for one in alone] for name in together
    }


def test_an_ellipsis_does_not_begin_in_the_text_before() -> None:
    assert rule_numbers(*text_bytes(pa.array(["a.", ".."])), STOP_WORDS)["gopher_ellipsis_lines"].tolist() == [0.0, 0.0]


def test_stop_words_are_those_asked_for() -> None:
    words = (*(f"w{number}" for number in range(63)), "été")
    assert numbers("été w0 w62 w1 W1 the", words)["gopher_stop_words"] == 4
    for wrong in (("two words",), ("",), ("a", "a"), tuple(f"w{number}" for number in range(65))):
        with pytest.raises(ConfigError, match="stop_words"):
            QualityConfig(stop_words=wrong)


@pytest.mark.parametrize(
    ("text", "emails", "ips"),
    [
        ("Mail John.Smith@example.com or a@b.c-d.org, now.", 2, 0),
        ("a@b and @c.de and a.@b.cd and a..b@c.de", 1, 0),  # of the last one b@c.de
        ("é.x@y.zz", 1, 0),
        ("x@[8.8.8.8]", 1, 0),
        ("x@y-.com a@b.c-.com", 1, 0),  # a@b.c
        ("8.8.8.8 and 127.0.0.1 and 10.1.2.3 and 192.168.0.1", 0, 1),
        ("08.8.8.8 1.2.3.4.5 256.1.1.1.1", 0, 2),  # 1.2.3.4, and 56.1.1.1
        ("nobody@8.8.8.8 at 3.14159 or 1.2.3", 1, 0),
        ("", 0, 0),
        (None, 0, 0),
    ],
)
def test_addresses_are_counted(text: str | None, emails: int, ips: int) -> None:
    texts = pa.array(["none here", text])
    found = pii.pii_numbers(texts, *text_bytes(texts))
    assert [found["pii_emails"].tolist(), found["pii_ips"].tolist()] == [[0, emails], [0, ips]]


LOCAL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
PIECES = st.sampled_from(["a", "Z9", ".", "@", "-", "é", " ", "b.c", "!", "[8.8.8.8]", "_", "x@y.z"])


@settings(deadline=None, max_examples=150)
@given(st.lists(PIECES, max_size=14).map("".join))
def test_the_search_from_each_at_sign_finds_what_the_whole_pattern_finds(text: str) -> None:
    whole = re.compile(rf"\b{LOCAL}(?:\.{LOCAL})*{pii.DOMAIN.pattern}")
    assert list(pii.emails(text)) == [match.span() for match in whole.finditer(text)]


def test_replacements_are_taken_in_turn_within_a_document() -> None:
    text = "a@b.cc, d@e.ff and g@h.ii from 8.8.8.8 and 9.9.9.9"
    assert pii.mask_text(text, ("<1>", "<2>"), ("<ip>",)) == ("<1>, <2> and <1> from <ip> and <ip>", 5)
    assert pii.mask_text(text, ("",), ("",)) == (",  and  from  and ", 5)


def test_addresses_are_found_in_linear_time() -> None:
    million = "a-" * 500_000  # where the whole pattern would take hours
    assert list(pii.emails(million)) == []
    assert list(pii.emails(f"{million}a@b.cc")) == [(0, 1_000_006)]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["x" * 50_000_000, "x " * 25_000_000, "\n" * 50_000_000, "a-" * 25_000_000 + "@."])
def test_field_21_a_document_of_50_mb(text: str) -> None:
    measure = measuring(QualityConfig(), Worker(num_threads=1, device="cpu"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    arrays = measure(pa.RecordBatch.from_arrays([pa.array([text])], ["text"]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    found = dict(zip([f.name for f in outputs(QualityConfig())], [array[0].as_py() for array in arrays], strict=True))
    assert found["gopher_words"] == len(text.split())
    assert found["c4_lines"] == (len(text) if text[0] == "\n" else 1)
    assert peak - before < 40 * len(text)


TEXTS = {
    "en": "It is a truth universally acknowledged, that a single man in possession of a good fortune must be in want.",
    "de": "Es ist eine allgemein anerkannte Wahrheit, dass ein Junggeselle mit einem Vermögen eine Frau braucht.",
    "fr": "C'est une vérité universellement reconnue qu'un célibataire pourvu d'une belle fortune doit avoir envie.",
    "ru": "Все знают, что молодой человек, располагающий средствами, должен подыскивать себе жену.",
    "zh": "凡是有钱的单身汉，总想娶位太太，这已经成了一条举世公认的真理。",
    "und": "\n \u3000",
}


def test_languages() -> None:
    languages, probabilities = telling("eldc", 1_000)(pa.array([*TEXTS.values(), "", None, "12 34", "a\0b"]))
    assert languages[:8] == [*TEXTS, "und", "und"]
    assert all(0.5 < probability <= 1 for probability in probabilities[:5]) and probabilities[5:8] == [0.0] * 3
    assert languages[8] == "und"


def test_only_the_beginning_tells_the_language() -> None:
    text = pa.array([TEXTS["en"] + TEXTS["ru"] * 20])
    assert telling("eldc", len(TEXTS["en"]))(text)[0] == ["en"]
    assert telling("eldc", 1_000)(text)[0] == ["ru"]


def test_a_model_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("pretrain_assets.curate.language", fromlist=["x"]).PACKAGES, "lid.176", "no-such")
    with pytest.raises(ConfigError, match=r"pip install 'pretrain-assets\[lid176\]'"):
        telling("lid.176", 2_000)
    with pytest.raises(ConfigError, match="language_model"):
        QualityConfig(language_model="langid")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def texts() -> list[str | None]:
    random.seed(0)
    lines = [*TEXTS.values(), "• one", "x@y.zz", "the same line again.", "A { b c.", "...", "", "\r\n", "1.1.1.1"]
    made: list[str | None] = ["\n".join(random.choices(lines, k=random.randint(0, 12))) for _ in range(120)]
    return [None, "", *made]


@pytest.mark.parametrize("batches", [1, 3, 20])
def test_field_27_batches_give_the_columns_of_one_batch(tmp_path: Path, texts: list[str | None], batches: int) -> None:
    size = -(-len(texts) // batches)
    location = make_table(tmp_path, texts[:size])
    for start in range(0, len(texts), size):
        if start:
            append(location, texts[start : start + size])
        run(location, batch_bytes=1024)
    measure = measuring(QualityConfig(), Worker(num_threads=1, device="cpu"))
    expected = measure(pa.RecordBatch.from_arrays([pa.array(texts)], ["text"]))
    table = open_dataset(location).to_table(columns=[c.name for c in columns_of("quality")]).combine_chunks()
    assert [column.combine_chunks().equals(array) for column, array in zip(table.columns, expected, strict=True)] == [
        True
    ] * len(expected)
    assert lines_add_up(open_dataset(location)).passed


def test_the_stage_names_what_made_its_columns(tmp_path: Path) -> None:
    location = make_table(tmp_path, [None, "", " \n", "Hello world."])
    first = run(location)
    assert (first.changed, first.record.ledger) == (True, {"in": 4, "measured": 1, "wordless": 3})
    field = open_dataset(location).schema.field("gopher_words")
    assert b'"splitter":"str.split"' in field.metadata[b"pretrain.parameters"].replace(b" ", b"")
    assert not run(location).changed
    again = run(location, stop_words=("world.",))
    assert (again.changed, again.record.rows) == (True, 4)
    assert values(location, "gopher_stop_words") == [0, 0, 0, 1]
    assert [f.name for f in outputs(QualityConfig())] == [c.name for c in columns_of("quality")]


def of_fifty(replaced: int, by: str) -> str:
    """Fifty words, in lines of five, that every rule keeps; the last `replaced` of them others."""
    words = [f"{word}{'abcdefghij'[at % 10]}" for at, word in zip(range(48), cycle(["wend", "harp", "nook"]))]
    words = ["the", "of", *words]
    words[50 - replaced :] = [by] * replaced
    return "\n".join(" ".join(words[at : at + 5]) for at in range(0, 50, 5))


def test_published_thresholds_keep_what_lies_on_them(tmp_path: Path) -> None:
    texts = [
        of_fifty(0, ""),
        of_fifty(5, "x#y"),  # 5 # in 50 words: exactly 0.1, which is kept
        of_fifty(6, "x#y"),
        of_fifty(10, "99"),  # exactly 80% of the words have a letter
        of_fifty(11, "99"),
        of_fifty(1, "--"),  # 49 words
        of_fifty(0, "").replace("of", "if"),  # one stop word
    ]
    location = make_table(tmp_path, texts)
    run(location)
    dataset = open_dataset(location)
    rules = RULES["gopher_quality"]
    kept = dataset.to_table(columns=["id"], filter=keeps(rules)).column(0).to_pylist()
    by_sql = dataset.sql(f"SELECT id, {reason(rules)} AS reason FROM dataset ORDER BY id").build().to_batch_records()
    reasons = [row["reason"] for batch in by_sql for row in batch.to_pylist()]
    assert kept == [0, 1, 3]
    assert reasons[2:] == [
        "gopher_too_many_hashes",
        None,
        "gopher_below_alpha_threshold",
        "gopher_short_doc",
        "gopher_enough_stop_words",
    ]
    failing = rows_failing(dataset)
    assert failing["gopher_quality"][""] == 4
    assert failing["gopher_quality"]["gopher_too_many_hashes"] == 1
    assert list(failing) == ["gopher_quality", "gopher_repetition", "c4", "fineweb_c4", "fineweb"]
    assert failing["c4"][""] == failing["c4"]["too_few_sentences"] == 7


def test_every_rule_reads_a_column_of_the_table() -> None:
    known = {c.name for c in [*columns_of("quality"), *columns_of("ingested")]}
    assert {rule.column for rules in RULES.values() for rule in rules} <= known


def test_masked_text_beside_the_text(tmp_path: Path) -> None:
    texts = [None, "", "nothing here", "a@b.cc from 8.8.8.8 or 10.0.0.1", "x@y.zz"]
    location = make_table(tmp_path, texts[:3])
    for more in (texts[3:4], texts[4:]):
        append(location, more)
        mask(location, MaskConfig(), input_pin=newest(location), engine=ONE)
    assert values(location, "text") == texts
    masked = [None, "", "nothing here", "email@example.com from 192.0.2.1 or 10.0.0.1", "email@example.com"]
    assert (values(location, "text_masked"), values(location, "n_masked")) == (masked, [0, 0, 0, 2, 1])
    assert not mask(location, MaskConfig(), input_pin=newest(location), engine=ONE).changed
    result = mask(location, MaskConfig(emails=("<mail>",)), input_pin=newest(location), engine=ONE)
    assert result.record.ledger == {"in": 5, "masked": 2, "unchanged": 3}
    assert values(location, "text_masked")[3:] == ["<mail> from 192.0.2.1 or 10.0.0.1", "<mail>"]


PIECES_OF_PAGES = [
    *(
        "\n",
        "\n\n",
        " ",
        ".",
        "...",
        "…",
        "#",
        "•",
        "-",
        "{",
        "[1]",
        "[",
        "\r\n",
        "\x1c",
        "\u2028",
        "\x85",
        "é",
        "漢字",
    ),
    *(
        "lorem ipsum",
        "Javascript",
        "[edit]",
        "[citation needed]",
        "Use of Cookies",
        "x" * 1001,
        '"',
        "?",
        "１",
        "\u3000",
    ),
    *("a b c.", "the of", "a a a a a a a", "one two three four five six seven."),
]


@pytest.mark.optional
@pytest.mark.slow
def test_verdicts_and_reasons_are_those_of_datatrove(tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    pytest.importorskip("spacy")
    random.seed(1)
    pages = ["".join(random.choices(PIECES_OF_PAGES, k=random.randint(0, 60))) for _ in range(2_000)]
    corpus = curation_quality.debian_corpus.write_bundled(tmp_path / "bundled.parquet", 1 << 20)
    texts = [*pq.read_table(corpus)["text"].to_pylist(), *pages, "", "\n", " "]
    corpus = tmp_path / "corpus.parquet"
    pq.write_table(
        pa.table({"doc_id": [str(i) for i in range(len(texts))], "text": texts, "source": [""] * len(texts)}), corpus
    )
    ours = curation_quality.our_reasons(texts, tmp_path)
    for splitter in ("spaCy", "str.split"):
        found = tmp_path / f"{splitter}.json"
        curation_quality.datatrove_filters(str(corpus), 1 << 30, splitter, str(found))()
        theirs = json.loads(found.read_text())
        if splitter == "spaCy":
            for name in curation_quality.BY_SENTENCES:  # which other rules tell there
                pairs = zip(ours[name], theirs[name], strict=True)
                assert sum((one is None) == (other is None) for one, other in pairs) / len(texts) > 0.995, name
            continue
        for name, reasons in theirs.items():
            rows = [row for row, text in enumerate(texts) if text.strip() or name == "gopher_quality"]
            assert [ours[name][row] for row in rows] == [reasons[row] for row in rows], name
