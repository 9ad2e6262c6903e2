"""Tokenizers against an independent implementation, and the token columns' contract."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tokenizers

from pretrain_assets.config import IngestConfig, TokenizeConfig
from pretrain_assets.errors import TableError, TokenizerError
from pretrain_assets.ingest.append import ingest
from pretrain_assets.table.lineage import StageResult
from pretrain_assets.table.schema import tokenizer_identity
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.tokenize import Tokenizer, load_tokenizer
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets_tests.tables import append, make_table, newest, values

DATA = Path(str(files("pretrain_assets"))) / "data"
GPT2 = DATA / "gpt2"
EOS = "<|endoftext|>"
ORACLE_SHA256 = "4275bc1d386f4aeec2161f3a15212f21ca3f823b1f5f5e74a35c0bbf2cc72e53"
"""Of the ids (int32) and offsets (int64) that the `tokenizers` package gives for all bundled documents."""


@pytest.fixture(scope="module")
def bundled() -> list[str]:
    texts: list[str] = pq.read_table(DATA / "public_domain_docs.parquet", columns=["text"])["text"].to_pylist()
    return texts


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return load_tokenizer("gpt2")


@pytest.fixture(scope="module")
def hf_gpt2() -> Tokenizer:
    return load_tokenizer(f"hf:{GPT2}")


@pytest.fixture(scope="module")
def oracle() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(GPT2 / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def save_word_level(folder: Path, vocabulary: dict[str, int], **config: Any) -> str:
    """A word-level tokenizer in a directory, as a tokenizer name."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = [token for name, token in config.items() if name.endswith("_token")]
    tokenizer.add_special_tokens([token for token in special if token in vocabulary])
    if "cut" in config:
        tokenizer.enable_truncation(config.pop("cut"))
        tokenizer.enable_padding(length=8, pad_token="<unk>")
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    return f"hf:{folder}"


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    ids, offsets = tokenizer.encode_batch(texts)
    assert (ids.dtype, offsets.dtype, offsets[0], offsets[-1]) == (np.int32, np.int64, 0, len(ids))
    return [part.tolist() for part in np.split(ids, offsets[1:-1])]


def run(location: Location, tokenizer: str = "byte", **config: int) -> StageResult:
    return tokenize(location, TokenizeConfig(tokenizer=tokenizer, **config), input_pin=newest(location))


def digest(ids: Any, offsets: Any) -> str:
    return hashlib.sha256(ids.astype("<i4").tobytes() + offsets.astype("<i8").tobytes()).hexdigest()


def test_gpt2_on_all_bundled_documents(bundled: list[str], gpt2: Tokenizer) -> None:
    ids, offsets = gpt2.encode_batch(bundled)
    assert (len(bundled), len(ids), int(ids.max()) < gpt2.identity.eos_id) == (4361, 2_645_179, True)
    assert digest(ids, offsets) == ORACLE_SHA256
    counts = pq.read_table(DATA / "public_domain_docs.parquet", columns=["token_count"])["token_count"].to_numpy()
    assert np.array_equal(np.diff(offsets), counts)


@pytest.mark.slow
def test_parquet_and_jsonl_zst_of_the_same_documents_give_the_same_tokens(tmp_path: Path) -> None:
    """The whole way of all bundled documents, from two formats; totals as `tokenizers` gives them (ORACLE_SHA256)."""
    table = pq.read_table(DATA / "public_domain_docs.parquet")
    with pa.CompressedOutputStream(str(tmp_path / "docs.jsonl.zst"), "zstd") as out:
        for batch in table.select(["id", "text", "score", "source"]).to_batches():
            out.write("".join(json.dumps(row) + "\n" for row in batch.to_pylist()).encode())
    found = []
    for name in (str(DATA / "public_domain_docs.parquet"), str(tmp_path / "docs.jsonl.zst")):
        location = Location(database_uri=str(tmp_path / Path(name).suffix))
        ingested = ingest(location, IngestConfig(sources=(name,)))
        tokenize(location, TokenizeConfig(), input_pin=ingested.pin)
        found.append(open_dataset(location).to_table(columns=["doc_id", "text", "input_ids", "n_tokens"]))
    assert found[0] == found[1]
    assert found[0]["text"] == table["text"] and found[0]["n_tokens"].to_pylist() == table["token_count"].to_pylist()
    assert pc.sum(found[0]["n_tokens"]).as_py() == 2_645_179


@pytest.mark.slow
def test_the_digest_is_that_of_the_tokenizers_package(bundled: list[str], oracle: tokenizers.Tokenizer) -> None:
    lists = [np.array(e.ids) for e in oracle.encode_batch_fast(bundled, add_special_tokens=False)]
    assert digest(np.concatenate(lists), np.cumsum([0, *map(len, lists)])) == ORACLE_SHA256


def test_three_implementations_agree(
    bundled: list[str], gpt2: Tokenizer, hf_gpt2: Tokenizer, oracle: tokenizers.Tokenizer
) -> None:
    sample = bundled[::20]
    expected = [e.ids for e in oracle.encode_batch_fast(sample, add_special_tokens=False)]
    assert ids_of(gpt2, *sample) == expected
    assert ids_of(hf_gpt2, *sample[::4]) == expected[::4]


def test_published_ids(gpt2: Tokenizer) -> None:
    assert ids_of(gpt2, "Hello world", "", " \n") == [[15496, 995], [], [220, 198]]
    assert (gpt2.identity.vocab_size, gpt2.identity.eos_id, gpt2.identity.pad_id) == (50257, 50256, 50257)
    assert gpt2.decode([15496, 995, 50256, 50257]) == f"Hello world{EOS}"


@pytest.mark.parametrize("name", ["gpt2", "hf_gpt2"])
def test_field_15_a_spelled_special_token_is_ordinary_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    (ids,) = ids_of(tokenizer, f"one{EOS}two")
    assert ids == [505, 27, 91, 437, 1659, 5239, 91, 29, 11545]
    assert tokenizer.decode(ids) == f"one{EOS}two"


@pytest.mark.parametrize(
    "text",
    ["naïve 日本語 🙂\x00\r\n", "\ufeffbom", " " * 100_001 + "x", "x" + " \n" * 60_000, "\u3000" * 100_002 + "!"],
)
def test_gpt2_on_hard_text(text: str, gpt2: Tokenizer, oracle: tokenizers.Tokenizer) -> None:
    (ids,) = ids_of(gpt2, text)
    assert ids == oracle.encode(text).ids
    assert gpt2.decode(ids) == text


def test_a_million_spaces_do_not_overflow_the_regex(gpt2: Tokenizer) -> None:
    (ids,) = ids_of(gpt2, "a" + " " * 1_200_000 + "b")
    assert ids == [64, *[220] * 1_199_999, 275]


def test_byte_tokenizer_round_trip() -> None:
    byte = load_tokenizer("byte")
    text = f"naïve 日本\x00{EOS}"
    (ids,) = ids_of(byte, text)
    assert ids == list(text.encode())
    assert byte.decode([*ids, byte.identity.eos_id]) == text
    assert byte.decode([0xE6, 0x97]) == "\ufffd"


def test_field_17_ids_above_65535(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, 65_600)}
    name = save_word_level(tmp_path / "wide", vocabulary, eos_token="</s>", unk_token="<unk>")
    location = make_table(tmp_path, ["w65535 w65536", "w65599 nothing </s>"])
    run(location, name)
    assert values(location, "input_ids") == [[65535, 65536], [65599, 0, 0]]
    identity = tokenizer_identity(open_dataset(location))
    assert (identity.name, identity.vocab_size, identity.eos_id, identity.pad_id) == ("hf:wide", 65600, 1, 65600)


SMALL = {"<unk>": 0, "</s>": 1, "<pad>": 2, "a": 3}


@pytest.mark.parametrize(
    ("vocabulary", "config", "vocab_size", "pad_id"),
    [
        (SMALL, {"pad_token": "<pad>"}, 4, 2),
        (SMALL, {"pad_token": "</s>"}, 4, 4),
        (SMALL, {"pad_token": "<unk>"}, 4, 4),
        (SMALL | {"far": 9}, {}, 10, 10),
    ],
    ids=["own pad", "pad is eos", "pad is unknown", "gap in the ids"],
)
def test_pad_is_an_id_that_no_text_gives(
    tmp_path: Path, vocabulary: dict[str, int], config: dict[str, str], vocab_size: int, pad_id: int
) -> None:
    name = save_word_level(tmp_path / "t", vocabulary, eos_token="</s>", unk_token="<unk>", **config)
    identity = load_tokenizer(name).identity
    assert (identity.vocab_size, identity.eos_id, identity.pad_id) == (vocab_size, 1, pad_id)


def test_truncation_and_padding_of_a_tokenizer_file_are_off(tmp_path: Path) -> None:
    name = save_word_level(tmp_path / "t", SMALL, eos_token="</s>", unk_token="<unk>", cut=2)
    assert ids_of(load_tokenizer(name), "a a a", "a") == [[3, 3, 3], [3]]


def test_field_13_no_end_of_text_token_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"names no end-of-text token.*set eos_token"):
        load_tokenizer(save_word_level(tmp_path / "t", SMALL, unk_token="<unk>"))


def test_field_15_a_special_token_in_the_models_own_vocabulary_becomes_unknown(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_word_level(tmp_path / "t", SMALL, eos_token="</s>", unk_token="<unk>"))
    assert ids_of(tokenizer, "a </s> a", "<unk>") == [[3, 0, 3], [0]]
    tokenizer = load_tokenizer(save_word_level(tmp_path / "t", SMALL, eos_token="<unk>", unk_token="<unk>"))
    with pytest.raises(TokenizerError, match="special token '<unk>', and has no unknown token of its own"):
        tokenizer.encode_batch(["a", "b"])


def test_another_name_for_end_of_text_is_taken(tmp_path: Path) -> None:
    name = save_word_level(tmp_path / "t", SMALL, eos_token="<pad>", unk_token="<unk>")
    assert load_tokenizer(name).identity.eos_id == 2


@pytest.mark.parametrize("name", ["gpt3", "", "hf:", "GPT2"])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(TokenizerError, match="Known: gpt2"):
        load_tokenizer(name)


@pytest.mark.parametrize("content", [None, "{}", '{"model": 3'], ids=["no file", "no model", "torn"])
def test_an_unreadable_directory_names_the_remedy(tmp_path: Path, content: str | None) -> None:
    if content:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(TokenizerError, match=r"Cannot load tokenizer hf:.*Give a directory with tokenizer.json"):
        load_tokenizer(f"hf:{tmp_path}")


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_word_level(tmp_path / "mine", SMALL, eos_token="</s>", unk_token="<unk>")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_tokenizer("hf:~/mine").identity.name == "hf:mine"


def test_fingerprint_follows_the_vocabulary_and_not_the_place(tmp_path: Path) -> None:
    def make(place: str, vocabulary: dict[str, int]) -> str:
        name = save_word_level(tmp_path / place, vocabulary, eos_token="</s>", unk_token="<unk>")
        return load_tokenizer(name).identity.fingerprint

    assert make("x", SMALL) == make("y", SMALL) != make("z", SMALL | {"b": 4})


@pytest.mark.parametrize(
    "texts", [["", "ab", None], ["", ""], [None], ["é", "", "x"]], ids=["first empty", "all", "null", "middle"]
)
def test_field_11_empty_documents(tmp_path: Path, texts: list[str | None]) -> None:
    location = make_table(tmp_path, texts)
    record = run(location).record
    expected = [list((text or "").encode()) for text in texts]
    assert values(location, "input_ids") == expected
    assert values(location, "n_tokens") == [len(ids) for ids in expected]
    empty = sum(not text for text in texts)
    assert record.ledger == {"in": len(texts), "tokenized": len(texts) - empty, "empty": empty}


def test_small_batches_give_the_same_columns(tmp_path: Path) -> None:
    texts = [f"{i} " * (i % 90) for i in range(300)]
    location = make_table(tmp_path, texts[:200])
    run(location, "gpt2", batch_bytes=1024)
    append(location, texts[200:])
    run(location, "gpt2", batch_bytes=1024)
    assert values(location, "input_ids") == ids_of(load_tokenizer("gpt2"), *texts)
    assert values(location, "n_tokens") == [len(ids) for ids in values(location, "input_ids")]


def test_the_column_names_its_tokenizer_and_no_path(tmp_path: Path) -> None:
    location = make_table(tmp_path / "db", ["a"])
    name = save_word_level(tmp_path / "t", SMALL, eos_token="</s>", unk_token="<unk>")
    record = run(location, name).record
    dataset = open_dataset(location)
    assert tokenizer_identity(dataset) == load_tokenizer(name).identity
    metadata = {key: dataset.schema.field(key).metadata for key in ("input_ids", "n_tokens")}
    assert metadata["input_ids"] == metadata["n_tokens"]
    assert metadata["input_ids"][b"pretrain.stage"] == b"tokenized"
    assert str(tmp_path) not in str(metadata) + record.to_json()


def test_a_version_without_tokens_says_what_to_do(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["a"])
    with pytest.raises(TableError, match="version 1 has no input_ids: materialize corpus/tokenized first"):
        tokenizer_identity(open_dataset(location))


@pytest.mark.parametrize("name", ["gpt2", "hf_gpt2", "byte"])
def test_the_bytes_of_tokens_add_up_to_those_of_the_text(name: str, request: pytest.FixtureRequest) -> None:
    text = "Héllo wörld — 漢字, naïve 🎉\n\n  x <|endoftext|>"
    tokenizer: Tokenizer = load_tokenizer("byte") if name == "byte" else request.getfixturevalue(name)
    widths = tokenizer.token_bytes()
    assert widths is not None and widths.shape == (tokenizer.identity.vocab_size,)
    assert widths[ids_of(tokenizer, text)[0]].sum() == len(text.encode())
    assert widths[tokenizer.identity.eos_id] == 0 and (widths == 0).sum() == 1


def test_a_tokenizer_of_words_does_not_know_its_bytes(tmp_path: Path) -> None:
    name = save_word_level(tmp_path, {"<unk>": 0, "<end>": 1, "word": 2}, eos_token="<end>")
    assert load_tokenizer(name).token_bytes() is None


def test_field_14_exactly_one_end_of_text_per_document_of_every_source(tmp_path: Path, gpt2: Tokenizer) -> None:
    """Texts spell it and have none; the packer puts one after each."""
    from pretrain_assets.config import DataConfig
    from pretrain_assets.loader.stream import BlockLoader

    sources = ["wiki", "books", "code", "web"] * 3
    texts = [f"{word} {at}{EOS} {EOS}" for at, word in enumerate(sources)]
    location = make_table(tmp_path, texts, source=sources)
    pin = run(location, "gpt2").pin
    for source in set(sources):
        mine = [text for text in texts if text.startswith(source)]
        length = sum(len(ids) + 1 for ids in ids_of(gpt2, *mine))
        data = DataConfig(filter=f"source = '{source}'", seq_len=length, num_splits=1)
        (block,) = BlockLoader(location, pin, data, gpt2.identity).batches(0)
        stream = block.input_ids.flatten().numpy()
        ends = np.flatnonzero(stream == gpt2.identity.eos_id)
        found = [gpt2.decode(part[part != gpt2.identity.eos_id]) for part in np.split(stream, ends)]
        assert sorted(found) == sorted(["", *mine])


def test_field_16_odd_text_that_ingest_lets_through(tmp_path: Path, gpt2: Tokenizer) -> None:
    """NUL and noncharacters are text; lone surrogates and invalid UTF-8 are left out by reason, before any token."""
    lines = [
        rb'{"text": "nul\u0000 \uffff"}',
        rb'{"text": "lone \ud800"}',
        b'{"text": "bad \xff"}',
        b'{"text": "fine"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    location = Location(database_uri=str(tmp_path / "db"))
    ingested = ingest(location, IngestConfig(sources=(str(tmp_path / "a.jsonl"),), on_bad_row="skip")).record
    assert ingested.ledger == {"in": 4, "written": 2, "left_out:lone_surrogate": 1, "left_out:invalid_utf8": 1}
    run(location, "gpt2")
    texts = ["nul\x00 \uffff", "fine"]
    assert values(location, "input_ids") == ids_of(gpt2, *texts)
    assert [gpt2.decode(ids) for ids in values(location, "input_ids")] == texts
