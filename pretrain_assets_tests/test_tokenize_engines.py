"""Engines of byte-level BPE: the same ids as the `tokenizers` package on hard texts, and aloud about it when not."""

from __future__ import annotations

import json
import logging
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenizers

from pretrain_assets.config import TokenizeConfig, TokenizerIdentity
from pretrain_assets.errors import ConfigError, TableError, TokenizerError
from pretrain_assets.table.schema import making_parameters, tokenizer_identity
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.tokenize import Tokenizer, bytelevel, engines, load_tokenizer
from pretrain_assets.tokenize.columns import encoding, tokenize
from pretrain_assets.tokenize.engines import FAST, Choice, choose, first_difference, hard_texts
from pretrain_assets_tests.tables import append, make_table, newest, values

DATA = Path(str(files("pretrain_assets"))) / "data"
EOS = "<|endoftext|>"
LLAMA, QWEN, GPT4O = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""As the files of Llama 3, Qwen 2 and gpt-oss have them."""
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
ALONE = {**BYTES, "use_regex": True}


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    one = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}
    return {"type": "Sequence", "pretokenizers": [one, BYTES]}


@pytest.fixture(scope="module")
def documents() -> list[str]:
    texts: list[str] = pq.read_table(DATA / "public_domain_docs.parquet", columns=["text"])["text"].to_pylist()
    return texts[::200]


@pytest.fixture(scope="module")
def trained(documents: list[str]) -> dict[str, Any]:
    """A `tokenizer.json` with 800 merges, learned with the pattern of GPT-2."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1057,
        special_tokens=[EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*documents, *hard_texts()], trainer)
    stored: dict[str, Any] = json.loads(tokenizer.to_str())
    return stored


def save(folder: Path, stored: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


def shuffled(stored: dict[str, Any]) -> dict[str, Any]:
    """The same merges with other ids."""
    ids = list(range(len(stored["model"]["vocab"])))
    random.Random(5).shuffle(ids)
    vocabulary = {token: ids[at] for token, at in stored["model"]["vocab"].items()}
    added = [{**entry, "id": vocabulary[entry["content"]]} for entry in stored["added_tokens"]]
    return {**stored, "added_tokens": added, "model": {**stored["model"], "vocab": vocabulary}}


def all_pairs(stored: dict[str, Any]) -> dict[str, Any]:
    """Merges as Llama 3's are: every pair of tokens that makes a token, one token after the other."""
    model = stored["model"]
    made = ["".join(merge) for merge in bytelevel.merges_of(model)]
    pairs = [
        [token[:at], token[at:]]
        for token in made
        for at in range(1, len(token))
        if token[:at] in model["vocab"] and token[at:] in model["vocab"]
    ]
    return {**stored, "model": {**model, "merges": pairs, "ignore_merges": True}}


def with_words(stored: dict[str, Any], *words: str, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False, **flags}
    first = len(stored["model"]["vocab"])
    added = [{"id": first + at, "content": word, **plain} for at, word in enumerate(words)]
    return {**stored, "added_tokens": [*stored["added_tokens"], *added]}


VARIANTS = {
    "gpt2": lambda stored: stored,
    "llama": lambda stored: {**all_pairs(stored), "pre_tokenizer": split(LLAMA)},
    "llama as converted": lambda stored: {**all_pairs(stored), "pre_tokenizer": split(LLAMA, "Removed", True)},
    "qwen": lambda stored: {
        **with_words(stored, "<tool_call>", "</tool_call>"),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": split(QWEN),
    },
    "a word that only the normalised text has": lambda stored: {
        **with_words(stored, "caf\u00e9"),
        "normalizer": {"type": "NFC"},
    },
    "gpt-4o": lambda stored: {**stored, "pre_tokenizer": split(GPT4O)},
    "smollm": lambda stored: {
        **stored,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, ALONE],
        },
    },
    "other ids": lambda stored: with_words(shuffled(stored), "<word>"),
    "a pattern nobody knows": lambda stored: {**stored, "pre_tokenizer": split(r"[a-z]+|[^a-z]")},
}
MORE = [
    "a <tool_call>e\u0301</tool_call>\u0338 é <word> x<word>y <tool_call",
    f"{EOS}{EOS} a{EOS}",
    "e\u0301 \u1100\u1161 \u2126 <tool_call>",
    "cafe\u0301 x caf\u00e9 e\u0301",
    "cafe\u0301 x",
    f"a {engines.NO_WORD}{engines.NO_WORD} b",
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_engine_gives_the_ids_of_the_tokenizers_package(
    variant: str, trained: dict[str, Any], documents: list[str], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(save(tmp_path / "t", VARIANTS[variant](trained)))
    alphabet = "aé\u0301日1٣ \n\r\t\xa0'.,s-<🙂T"
    fuzz = ["".join(random.Random(at).choices(alphabet, k=40)) for at in range(200)]
    texts = [*hard_texts(), *MORE, *fuzz, *documents]
    oracle = tokenizers.Tokenizer.from_file(str(tmp_path / "t" / "tokenizer.json"))
    oracle.encode_special_tokens = True
    expected = [found.ids for found in oracle.encode_batch(texts, add_special_tokens=False)]
    for name in ("transformers", *FAST):
        ids, offsets = tokenizer.engine(name)(texts, 2)
        assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
        for text, ours, theirs in zip(texts, np.split(ids, offsets[1:-1]), expected, strict=True):
            assert ours.tolist() == theirs, (name, text[:80])


def damaged(stored: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**stored, "model": {**stored["model"], **changes}}


def inconsistent(stored: dict[str, Any]) -> dict[str, Any]:
    """`abc` is made of `a` and `bc`, but `ab` comes first: `abc` stays `ab`, `c`, while ranks would merge it."""
    bytes_only = {token: at for token, at in stored["model"]["vocab"].items() if len(token) == 1}
    vocabulary = {**{token: at for at, token in enumerate(bytes_only)}, "ab": 256, "bc": 257, "abc": 258, EOS: 259}
    added = [{**stored["added_tokens"][0], "id": 259}]
    merges = [["a", "b"], ["b", "c"], ["a", "bc"]]
    return damaged({**stored, "added_tokens": added}, vocab=vocabulary, merges=merges)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (inconsistent, "token 'abc' is not what its bytes are merged to"),
        (lambda s: {**s, "normalizer": {"type": "Lowercase"}}, "normalises texts with Lowercase"),
        (lambda s: {**s, "pre_tokenizer": {**ALONE, "add_prefix_space": True}}, "puts a space before texts"),
        (lambda s: {**s, "pre_tokenizer": {"type": "Whitespace"}}, "does not end with ByteLevel"),
        (lambda s: {**s, "pre_tokenizer": split("a", "MergedWithNext")}, "nor one regular expression"),
        (lambda s: with_words(s, "<w>", rstrip=True), "takes white space along"),
        (lambda s: with_words(s, "<w>", "x<w>"), "part of another one"),
        (lambda s: damaged(s, dropout=0.5), "its model has dropout"),
        (lambda s: damaged(s, vocab={**s["model"]["vocab"], "zqzq": 1057}, ignore_merges=True), "made by no merge"),
        (lambda s: damaged(s, merges=[*s["model"]["merges"], ["t", "he"], ["Ġ", "t"]]), "at several ranks"),
    ],
)
def test_what_ranks_and_a_pattern_cannot_say_is_refused_with_the_reason(
    change: Any, reason: str, trained: dict[str, Any]
) -> None:
    stored = change(trained)
    with pytest.raises(TokenizerError, match=reason):
        bytelevel.byte_level(stored)
        bytelevel.check_merges(stored)


def test_an_inconsistent_vocabulary_is_left_to_transformers(trained: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path / "t", inconsistent(trained)))
    choice = choose(tokenizer, "auto", ["abc"])
    assert choice.engine == "transformers" and len(choice.refused) == 2
    assert tokenizer.encode_batch(["abc"])[0].tolist() == [256, tokenizer.encode_batch(["c"])[0][0]]


def test_all_kinds_of_characters_are_among_the_hard_texts() -> None:
    import unicodedata

    kinds = {unicodedata.category(character) for text in hard_texts() for character in text}
    assert len(kinds) == 29 and "Cs" not in kinds


# --- choosing ----------------------------------------------------------------------------------------------------


class Wrong:
    """An engine that gives another id for every text with an `x`."""

    def __init__(self, right: Any) -> None:
        self._right = right

    def __call__(self, texts: list[str], num_threads: int = 1) -> Any:
        ids, offsets = self._right(texts, num_threads)
        ids = ids.copy()
        for at, text in enumerate(texts):
            if "x" in text and text != "x":
                ids[offsets[at] + 1] += 1
        return ids, offsets


@pytest.fixture
def gpt2(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bundled tokenizer, with engines to be replaced."""
    tokenizer = load_tokenizer("gpt2")
    own = type(tokenizer).engine

    def replace(**replaced: Any) -> Tokenizer:
        def engine(self: Any, name: str) -> Any:
            return replaced[name](own(self, name)) if name in replaced else own(self, name)

        monkeypatch.setattr(type(tokenizer), "engine", engine)
        return tokenizer

    return replace


def test_the_fastest_engine_that_is_installed_and_right_is_taken(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = gpt2()
    texts = len(hard_texts()) + 1
    assert choose(tokenizer, "auto", ["own"]) == Choice(engine="fastokens", checked_texts=texts)
    assert choose(tokenizer, "tiktoken", ["own"]) == Choice(engine="tiktoken", checked_texts=texts)
    assert choose(tokenizer, "transformers", ["own"]) == Choice(engine="transformers")
    monkeypatch.setattr(engines, "find_spec", lambda name: None if name == "fastokens" else True)
    assert choose(tokenizer, "auto", ["own"]).engine == "tiktoken"
    with pytest.raises(TokenizerError, match=r"fastokens is not installed: pip install 'pretrain-assets\[fast\]'"):
        choose(tokenizer, "fastokens", ["own"])


def test_other_ids_are_said_aloud_and_the_next_engine_is_taken(gpt2: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    choice = choose(gpt2(fastokens=Wrong), "auto", ["fine", "one x two"])
    assert choice.engine == "tiktoken"
    (warning,) = [record.message for record in caplog.records]
    assert warning == f"tokenizer gpt2 is not run by {choice.refused[0]}"
    assert "fastokens: other ids for '\\x85x': at position 1 228 instead of 227" in choice.refused[0]
    choice = choose(gpt2(fastokens=Wrong, tiktoken=Wrong), "auto", [])
    assert (choice.engine, len(choice.refused)) == ("transformers", 2)


def test_a_difference_on_the_runs_own_texts_is_found(gpt2: Any, tmp_path: Path) -> None:
    class OnlyThere(Wrong):
        def __call__(self, texts: list[str], num_threads: int = 1) -> Any:
            ids, offsets = self._right(texts, num_threads)
            if "planted" in texts[-1]:
                return np.append(ids, 7), np.append(offsets[:-1], offsets[-1] + 1)
            return ids, offsets

    gpt2(fastokens=OnlyThere)
    location = make_table(tmp_path, ["plain", "planted"])
    record = tokenize(location, TokenizeConfig(), input_pin=newest(location)).record
    found = record.details["tokenizer_engine"]
    assert found["engine"] == "tiktoken" and found["checked_texts"] == len(hard_texts()) + 2
    assert found["refused"][0].endswith("other ids for 'planted': at position 2 7 instead of the end")
    assert values(location, "input_ids") == [[25638], [489, 4126]]


def test_a_difference_names_text_position_and_both_ids() -> None:
    one = (np.array([1, 2, 3, 4], np.int32), np.array([0, 2, 4]))
    other = (np.array([1, 2, 3, 9], np.int32), np.array([0, 2, 4]))
    assert first_difference(["ab", "c" * 99], one, one) is None
    words = first_difference(["ab", "c" * 99], one, other)
    assert words == f"other ids for {'c' * 60 + '...'!r}: at position 1 4 instead of 9"


def test_the_engine_is_no_part_of_the_column(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["Hello world", "x", None])
    first = tokenize(location, TokenizeConfig(engine="tiktoken"), input_pin=newest(location))
    again = tokenize(location, TokenizeConfig(engine="fastokens"), input_pin=newest(location))
    assert (again.changed, again.record) == (False, first.record)
    append(location, ["Hello world"])
    more = tokenize(location, TokenizeConfig(engine="fastokens"), input_pin=newest(location))
    assert (more.record.rows, more.record.details["tokenizer_engine"]["engine"]) == (1, "fastokens")
    assert values(location, "input_ids") == [[15496, 995], [87], [], [15496, 995]]


def test_a_worker_uses_the_engine_that_was_checked(gpt2: Any) -> None:
    import pyarrow as pa

    from pretrain_assets.table.filler.spec import Worker

    tokenizer = gpt2(tiktoken=Wrong)
    worker = Worker(num_threads=1, device="cpu")
    batch = pa.record_batch({"text": ["x 7"]})
    made = {
        name: encoding("gpt2", name, tokenizer.identity, worker)(batch)[0].to_pylist()
        for name in ("tiktoken", "transformers")
    }
    assert made == {"tiktoken": [[87, 768]], "transformers": [[87, 767]]}


@pytest.mark.parametrize("settings", [{"engine": "rust"}, {"text_column": " "}])
def test_settings_that_cannot_work(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"engine|text_column"):
        TokenizeConfig(**settings)


# --- another column ----------------------------------------------------------------------------------------------


def test_a_masked_text_column_is_encoded_and_named_in_the_metadata(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["to a@b.c", None])
    with pytest.raises(TableError, match=r"no column text_masked: run the stage that makes it first"):
        tokenize(location, TokenizeConfig(text_column="text_masked"), input_pin=newest(location))
    open_dataset(location).add_columns({"text_masked": "replace(text, 'a@b.c', 'M')"})
    config = TokenizeConfig(tokenizer="byte", text_column="text_masked")
    result = tokenize(location, config, input_pin=newest(location))
    assert values(location, "input_ids") == [list(b"to M"), []]
    dataset = open_dataset(location)
    assert making_parameters(dataset.schema.field("input_ids"))["text_column"] == "text_masked"
    assert tokenizer_identity(dataset) == load_tokenizer("byte").identity
    assert result.record.parameters == {**vars(load_tokenizer("byte").identity), "text_column": "text_masked"}
    plain = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location))
    assert plain.changed and values(location, "input_ids")[0] == list(b"to a@b.c")
    assert set(making_parameters(open_dataset(location).schema.field("n_tokens"))) == set(
        TokenizerIdentity.__dataclass_fields__
    )


def test_tokens_follow_a_text_column_that_was_made_anew(tmp_path: Path) -> None:
    from pretrain_assets.config import MaskConfig
    from pretrain_assets.curate.masking import mask

    location = make_table(tmp_path, ["to a@b.cc"])
    config = TokenizeConfig(tokenizer="byte", text_column="text_masked")
    for word in ("M", "NN"):
        mask(location, MaskConfig(emails=(word,)), input_pin=newest(location))
        assert tokenize(location, config, input_pin=newest(location)).changed
        assert values(location, "input_ids") == [list(f"to {word}".encode())]
        assert not tokenize(location, config, input_pin=newest(location)).changed
    dataset = open_dataset(location)
    making = making_parameters(dataset.schema.field("input_ids"))
    version, made = making["text_made_by"]
    assert (making["text_column"], version, json.loads(made)["emails"]) == ("text_masked", "1", ["NN"])
    assert tokenizer_identity(dataset) == load_tokenizer("byte").identity


def test_a_forgotten_option_keeps_the_text_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pretrain_assets.cli import cli
    from pretrain_assets.config import DedupConfig, IngestConfig
    from pretrain_assets.curate.dedup import dedup
    from pretrain_assets.ingest.append import ingest

    location = Location(database_uri=str(tmp_path / "db"))
    (tmp_path / "a.jsonl").write_text('{"text": "to a@b.c"}\n')
    ingest(location, IngestConfig(sources=(str(tmp_path / "a.jsonl"),)))
    open_dataset(location).add_columns({"text_masked": "replace(text, 'a@b.c', 'M')"})
    dedup(location, DedupConfig(), input_pin=newest(location))
    base = ["--database", str(tmp_path / "db"), "tokenize", "--tokenizer", "byte"]
    for more in (["--text-column", "text_masked"], [], ["--text-column", "text"]):
        cli.main([*base, *more, "--bpe-engine", "tiktoken"], standalone_mode=False)
    made, kept, remade = capsys.readouterr().out.splitlines()
    assert made.startswith("tokenized-v4: 1 row,") and kept == "tokenized-v4: nothing to do, no new version"
    assert remade.startswith("tokenized-v5: 1 row,") and values(location, "input_ids") == [list(b"to a@b.c")]


# --- long texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["transformers", *FAST])
def test_long_texts_are_cut_where_pieces_end_anyway(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_tokenizer("gpt2").engine(name)
    texts = ["one two  three 'll\n four\xa0 five 6 7 \x1c x" * 9, "no-space" * 40, " \n" * 200, "日本 語" * 70]
    whole = engine(texts, 1)
    monkeypatch.setattr(engines, "PART_CHARS", 7)
    parts = engine(texts, 1)
    assert np.array_equal(whole[0], parts[0]) and np.array_equal(whole[1], parts[1])


def test_parts_of_a_text_make_it_up_and_end_before_a_space() -> None:
    text = "word " * 50 + "a\u2003b " + "x" * 90 + " y"
    parts = list(bytelevel.pieces(text, bytelevel.GPT2_PATTERN, 20))
    assert "".join(parts) == text and len(parts) > 5
    assert all(part[0] == " " and part[1] != " " for part in parts[1:])
    assert list(bytelevel.pieces(text, r"\w+|\W+", 20)) == [text]


RUNS = {
    "a": ("a", 250_000, 24_794),
    "=": ("=", 15_625, None),
    "newline": ("\n", 500_000, 628),
    "space": (" ", 1_000_000, 220),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["transformers", *FAST])
def test_a_million_equal_characters(name: str, run: str) -> None:
    character, count, one = RUNS[run]
    ids, _ = load_tokenizer("gpt2").engine(name)([character * 1_000_000], 1)
    assert len(ids) == count and set(ids.tolist()) == {one or ids[0]}
    short = load_tokenizer("gpt2").engine("transformers")([character * 6_400], 1)[0]
    assert set(short.tolist()) == set(ids.tolist())
    assert load_tokenizer("gpt2").decode(ids[:3].tolist()) == character * (3_000_000 // count)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("transformers", marks=pytest.mark.minutes), *FAST])
def test_field_21_a_document_of_50_mb_in_bounded_memory(name: str) -> None:
    import resource

    engine = load_tokenizer("gpt2").engine(name)
    engine(["word"], 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ids, _ = engine(["word " * 10_000_000], 1)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert (len(ids), ids[0], ids[-1]) == (10_000_001, 4775, 220) and (ids[1:-1] == 1573).all()
    assert grown < 600_000_000


# --- the benchmark -----------------------------------------------------------------------------------------------


def test_the_benchmark_counts_documents_with_other_ids(tmp_path: Path) -> None:
    import pyarrow as pa

    from benchmarks import curation_tokens
    from benchmarks.harness import Round

    lists = [[1, 2], [], [3], [4, 5, 6]]
    whole = pa.chunked_array([pa.array(lists, pa.list_(pa.int32()))])
    cut = pa.chunked_array([pa.array(lists[:1], pa.list_(pa.int32())), pa.array(lists[1:], pa.list_(pa.int32()))])
    found = list(curation_tokens.digests(whole, [0, 2, 3]))
    assert found == list(curation_tokens.digests(cut, [0, 2, 3])) and len(set(found)) == 3

    def took(cpu_seconds: float, digests: list[str]) -> list[Round]:
        numbers = {"bytes_written": 0, "peak_pss_bytes": 0, "sum_of_peaks_bytes": 0, "processes": 1}
        answer = {"bytes": 1_000_000, "tokens": 250_000, "digests": digests}
        return [Round(seconds=1.0, cpu_seconds=cpu_seconds, answer=answer, **numbers)]

    rounds = {
        curation_tokens.DEFAULT: took(0.5, found),
        curation_tokens.FAST: took(0.1, [*found[:2], "other"]),
        curation_tokens.PUBLISHED: took(4.0, found),
    }
    facts, ratios, targets = curation_tokens.compare(rounds, tmp_path)
    assert ratios == pytest.approx(
        {"tokenize_default_vs_transformers": 8, "tokenize_fast_vs_transformers": 40, "tokenize_same_ids": 2 / 3}
    )
    assert facts["tokens: results"]["first_documents_that_differ"] == {curation_tokens.FAST: [2]}
    assert {key: ratios[key] >= least for key, least in targets.items()} == {
        "tokenize_default_vs_transformers": True,
        "tokenize_fast_vs_transformers": True,
        "tokenize_same_ids": False,
    }
