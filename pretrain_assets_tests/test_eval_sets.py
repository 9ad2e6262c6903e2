"""Reading evaluation sets: formats, fields, ids, fingerprints, and faults that people can mend."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pretrain_assets import project
from pretrain_assets.config import ContaminationConfig
from pretrain_assets.curate.eval_sets import EvalSource, parse_source, read_eval_sets
from pretrain_assets.errors import ConfigError, InputError

ROWS: list[dict[str, Any]] = [
    {"question": "What is it?", "choices": {"text": ["a cat", "a dog"], "label": ["A", "B"]}, "answer": "B"},
    {"question": "And this?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answer": None},
]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def texts(*written: str) -> dict[str, tuple[str, ...]]:
    return {item.id: item.texts for one in read_eval_sets(written) for item in one.items}


def test_the_bundled_set_is_the_default() -> None:
    (bundled,) = read_eval_sets(ContaminationConfig().eval_sets)
    assert (bundled.name, len(bundled.items)) == ("gsm8k_test_300", 300)
    first, last = bundled.items[0], bundled.items[-1]
    assert (first.id, last.id) == ("gsm8k_test_300/1", "gsm8k_test_300/300")
    assert first.texts[0].startswith("Janet\u2019s ducks lay 16 eggs per day.")
    assert first.texts[1].endswith("#### 18")


def test_every_format_gives_the_same_set(tmp_path: Path) -> None:
    content = lines(ROWS)
    (tmp_path / "plain.jsonl").write_bytes(content.replace(b"\n", b"\r\n\n"))
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + content)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as stream:
        stream.write(content)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=1)
    names = ("bom.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet")
    found = [read_eval_sets([f"exam={tmp_path / name}"])[0] for name in names]
    assert len({one.fingerprint for one in found}) == 1
    assert all(one.items == found[0].items for one in found)
    assert found[0].items[1].texts == ("And this?",)
    assert list(texts(f"exam={tmp_path / 'plain.jsonl'}")) == ["exam/1", "exam/3"]  # lines, blank ones counted


def test_fields_may_be_named_and_nested_and_stay_apart(tmp_path: Path) -> None:
    path = tmp_path / "exam.jsonl"
    path.write_bytes(lines(ROWS))
    assert texts(str(path))["exam/1"] == ("What is it?", "B")
    assert texts(f"{path}#choices.text")["exam/1"] == ("a cat", "a dog")
    assert texts(f"{path}#question+choices")["exam/2"] == ("And this?", "x", "y", "A", "B")
    assert texts(f"{path}#answer")["exam/2"] == ()


def test_ids_are_the_items_own_or_their_lines(tmp_path: Path) -> None:
    folder = tmp_path / "exams"
    folder.mkdir()
    rows = [{"text": "a", "id": "q7"}, {"text": "b", "task_id": 3}, {"text": "c"}, {"text": "d", "id": "q7"}]
    (folder / "one.jsonl").write_bytes(lines(rows))
    assert list(texts(str(folder / "one.jsonl"))) == ["one/q7", "one/3", "one/3:3", "one/q7:4"]
    (folder / "late.jsonl").write_bytes(lines([{"text": "a", "id": one} for one in ("a:3", "a", "a", "a")]))
    assert list(texts(str(folder / "late.jsonl"))) == ["late/a:3", "late/a", "late/a:3:3", "late/a:4"]
    (folder / "late.jsonl").unlink()
    (folder / "two.jsonl").write_bytes(lines(rows[2:3]))
    (folder / "README.md").write_text("not data")
    expected = ["exams/q7", "exams/3", "exams/one:3", "exams/q7:one:4", "exams/two:1"]
    assert list(texts(str(folder))) == list(texts(str(folder / "*.jsonl"))) == expected


def test_the_fingerprint_is_that_of_what_is_searched(tmp_path: Path) -> None:
    path = tmp_path / "exam.jsonl"

    def fingerprint(rows: list[dict[str, Any]], fields: str = "") -> str:
        path.write_bytes(lines(rows))
        return read_eval_sets([f"{path}{fields}"])[0].fingerprint

    first = fingerprint(ROWS)
    assert fingerprint([{**row, "license": "MIT"} for row in ROWS]) == first
    assert fingerprint(ROWS[::-1]) != first
    assert fingerprint(ROWS, "#question") != first
    assert fingerprint([ROWS[0], {**ROWS[1], "question": "And that?"}]) != first
    assert fingerprint([{"text": ["ab", "c"]}]) != fingerprint([{"text": ["a", "bc"]}])


@pytest.mark.parametrize(
    ("written", "name", "files", "fields"),
    [
        ("bundled", "gsm8k_test_300", "bundled", ()),
        ("exams/mmlu.jsonl.gz#question + choices.text", "mmlu", "exams/mmlu.jsonl.gz", ("question", "choices.text")),
        ("s3://bucket/exams/arc/*.parquet", "arc", "s3://bucket/exams/arc/*.parquet", ()),
        ("hf://datasets/openai/gsm8k@main/main/test*.parquet", "gsm8k", None, ()),
        ("arc=hf://datasets/allenai/ai2_arc/ARC-Easy#question", "arc", "hf://datasets/allenai/ai2_arc/ARC-Easy", None),
    ],
)
def test_how_a_set_is_written(written: str, name: str, files: str | None, fields: tuple[str, ...] | None) -> None:
    source = parse_source(written)
    assert source.name == name
    assert files in (None, source.files) and fields in (None, source.fields)
    assert parse_source(source.written("/home/me")).name == name


def test_the_environment_names_sets_from_the_projects_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", "/home/me")
    assert project.eval_sets() == ["gsm8k_test_300=bundled"]
    monkeypatch.setenv("PRETRAIN_EVAL_SETS", "bundled, mmlu=exams/m.jsonl#question,s3://b/x.parquet")
    wanted = ["gsm8k_test_300=bundled", "mmlu=/home/me/exams/m.jsonl#question", "x=s3://b/x.parquet"]
    assert project.eval_sets() == wanted
    assert parse_source(wanted[1]) == EvalSource(name="mmlu", files="/home/me/exams/m.jsonl", fields=("question",))


@pytest.mark.parametrize(
    ("content", "fields", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', "", "line 2: not JSON in UTF-8"),
        (b'{"text": "a"}\n\xff\xfe\n', "", "line 2: not JSON in UTF-8"),
        (b"[1, 2]\n", "", "line 1: not an object with fields but"),
        (b'{"text": "a"}\n{"body": "b"}\n', "", r"line 2: none of the fields .* \(found body\). Name those to search"),
        (b'{"text": "a"}\n', "#question", r"line 1: there is no field 'question' \(found text\)"),
        (b'{"text": "a"}\n', "#text.deep", r"there is no field 'text.deep' \(it lies in a str\)"),
        (b'{"text": 5}\n', "#text", "line 1, field 'text': no text in it"),
        (b'{"text": "\\ud800"}\n', "", "field 'text': half of a surrogate pair at character 0"),
        (
            b'{"text": "a", "task_id": "q\\udfff"}\n',
            "",
            "line 1, field 'task_id': half of a surrogate pair at character 1",
        ),
        (b"", "", "has no items"),
    ],
)
def test_faults_name_file_line_field_and_remedy(tmp_path: Path, content: bytes, fields: str, message: str) -> None:
    path = tmp_path / "exam.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        read_eval_sets([f"{path}{fields}"])
    assert "exam" in str(raised.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(lines(ROWS))[:-9])
    (tmp_path / "notes.txt").write_text("text")
    for written, message in (
        ("bad.parquet", "bad.parquet cannot be read as an eval set"),
        ("bad.jsonl.gz", "bad.jsonl.gz cannot be read as an eval set"),
        ("notes.txt", "notes.txt cannot be read as an eval set. Give files ending in .parquet"),
        ("none.jsonl", "matches no file"),
        ("*.csv", "matches no file"),
    ):
        with pytest.raises(InputError, match=message):
            read_eval_sets([str(tmp_path / written)])
    with pytest.raises(InputError, match=r"nothing://x.*cannot be opened"):
        read_eval_sets(["nothing://x/y.jsonl"])


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="Two eval sets are named 'gsm8k_test_300'"):
        read_eval_sets(["bundled", "bundled"])
    with pytest.raises(ConfigError, match=r"is not \[NAME=\]FILES"):
        read_eval_sets(["#question"])
    with pytest.raises(ConfigError, match="name of eval set"):
        read_eval_sets([".=bundled"])
    for wrong in ({"eval_sets": ()}, {"min_words": 14}, {"min_overlap": 0.0}, {"max_items": 0}, {"ngram": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
            ContaminationConfig(**wrong)


def test_a_set_on_the_hugging_face_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import hf_file_system

    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    name = "datasets/allenai/ai2_arc/ARC-Easy/test.parquet"
    entry = {"name": name, "size": len(content), "type": "file", "blob_id": "abc123"}

    def resolve_path(self: Any, path: str, revision: str | None = None) -> Any:
        inside = path.split("ai2_arc")[1].strip("/")
        return hf_file_system.HfFileSystemResolvedRepositoryPath("dataset", "allenai/ai2_arc", "main", inside)

    def info(self: Any, path: str, **_: Any) -> dict[str, Any]:
        return entry if path.endswith(".parquet") else {"name": path, "size": 0, "type": "directory"}

    def fetch_range(self: Any, start: int, end: int) -> bytes:
        return content[start:end]

    monkeypatch.setattr(hf_file_system.HfFileSystem, "resolve_path", resolve_path)
    monkeypatch.setattr(hf_file_system.HfFileSystem, "info", info)
    monkeypatch.setattr(hf_file_system.HfFileSystem, "find", lambda self, path, **_: [name])
    monkeypatch.setattr(hf_file_system.HfFileSystemFile, "_fetch_range", fetch_range)
    found = texts("hf://datasets/allenai/ai2_arc/ARC-Easy#question+choices.text")
    assert found["ai2_arc/1"] == ("What is it?", "a cat", "a dog")
