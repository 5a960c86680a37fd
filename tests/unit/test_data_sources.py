"""Sources: what is read, and what a user is told when it cannot be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from llmrecipes.data import sources
from llmrecipes.recipe.schema import Source
from tests.refusals import refused


def _jsonl(path: Path, lines: list[str]) -> Source:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Source(type="jsonl", path=str(path))


def test_stdlib_is_sorted_source_without_installed_packages() -> None:
    source = Source(type="stdlib")
    files = sources.files(source)
    assert files == sorted(files)
    assert len(files) > 500
    assert not any("site-packages" in file.parts or "dist-packages" in file.parts for file in files)
    assert any(text and "def " in text for text in sources.documents(source))


def test_text_reads_a_file_a_document_exactly_and_marks_what_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes("zwölf\r\nBoxkämpfer 🥊\n".encode())
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe latin")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.md").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"no")
    source = Source(type="text", path=str(tmp_path))
    assert list(sources.documents(source)) == [None, "zwölf\r\nBoxkämpfer 🥊\n", ""]
    glob = Source(type="text", path=str(tmp_path / "**" / "*.md"))
    assert [file.name for file in sources.files(glob)] == ["d.md"]


def test_the_size_of_text_is_known_from_files_or_from_max_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 9000)
    text = Source(type="text", path=str(tmp_path))
    assert sources.text_bytes(text) == 9000
    assert sources.text_bytes(text.model_copy(update={"max_tokens": 100}), 3.0) == 300
    assert sources.text_bytes(text.model_copy(update={"max_tokens": 10**6})) == 9000
    hub = Source(type="hub", path="no/such")
    assert sources.text_bytes(hub) is None
    assert sources.text_bytes(hub.model_copy(update={"max_tokens": 100}), 3.0) == 300


def test_a_limited_hub_dataset_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_ROWS", 3)
    for name in ("a", "b"):
        pq.write_table(
            pa.table({"text": [f"{name}{n}" for n in range(3)], "n": [1, 2, 3]}), tmp_path / f"{name}.parquet"
        )
    source = Source(type="hub", path=str(tmp_path), max_tokens=2)
    reading = sources.documents(source)
    assert next(reading) == "a0"
    (tmp_path / "b.parquet").unlink()  # downloaded whole, it would be in the cache
    assert [next(reading), next(reading)] == ["a1", "a2"]
    with refused("data.sources"):  # a connection that is lost in the middle
        next(reading)


def test_jsonl_rows_may_differ_in_their_other_keys(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"row {n}", "n": n}) for n in range(3)]
    source = _jsonl(tmp_path / "a.jsonl", [*rows, "", '{"text": null}', '{"other": {"deep": 1}, "text": "last"}'])
    assert list(sources.documents(source)) == ["row 0", "row 1", "row 2", "", "last"]


def test_jsonl_reads_compressed_files_of_a_folder(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as stream:
        stream.write('{"body": "packed"}\n')
    _jsonl(tmp_path / "a.jsonl", ['{"body": "plain"}'])
    (tmp_path / "readme.txt").write_text("not data")
    source = Source(type="jsonl", path=str(tmp_path), text_key="body")
    assert list(sources.documents(source)) == ["plain", "packed"]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{not json", ()),
        ("[1, 2]", ()),
        ('{"text": 5}', "'text'"),
        ('{"body": "x", "row_id": 1}', ("'text'", "row_id")),
    ],
)
def test_a_bad_jsonl_row_is_named_by_file_and_line(tmp_path: Path, line: str, rule: str | tuple[str, ...]) -> None:
    source = _jsonl(tmp_path / "a.jsonl", ['{"text": "fine"}', line])
    with refused(f"{tmp_path / 'a.jsonl'}:2", rule=rule):
        list(sources.documents(source))


def test_a_jsonl_line_that_is_not_utf8_and_a_lone_surrogate(tmp_path: Path) -> None:
    source = _jsonl(tmp_path / "a.jsonl", [r'{"text": "\ud800"}', '{"text": "ok"}'])
    assert list(sources.documents(source)) == [None, "ok"]
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n')
    with refused("a.jsonl:2"):
        list(sources.documents(source))


def test_parquet_columns_rows_and_damage(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    rows = [f"row {n} " + "x" * 50 for n in range(2500)]
    pq.write_table(pa.table({"text": [*rows, None], "n": range(2501)}), file, row_group_size=500)
    source = Source(type="parquet", path=str(file))
    assert list(sources.documents(source)) == [*rows, ""]

    with refused(file, rule="'body'"):
        list(sources.documents(Source(type="parquet", path=str(file), text_key="body")))
    with refused(f"{file}: row 1", rule="'n'"):
        list(sources.documents(Source(type="parquet", path=str(file), text_key="n")))

    file.write_bytes(file.read_bytes()[:-100])
    with refused(file):
        list(sources.documents(source))


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_a_missing_source_is_reported_with_its_path(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "nowhere"
    with refused("data.sources", rule=str(path)):
        list(sources.documents(Source(type=kind, path=str(path))))  # type: ignore[arg-type]
    with refused("data.sources", rule="data.sources[].path"):
        sources.files(Source(type=kind))  # type: ignore[arg-type]


def test_hub_reads_a_dataset_and_names_missing_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["one", None, "three"]}), folder / "train.parquet")
    assert list(sources.documents(Source(type="hub", path=str(folder)))) == ["one", "", "three"]
    with refused(folder, rule="'body'"):
        list(sources.documents(Source(type="hub", path=str(folder), text_key="body")))


def test_an_unreachable_hub_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused("data.sources", rule=("'no-such/set'", "HF_ENDPOINT")) as caught:
        list(sources.documents(Source(type="hub", path="no-such/set")))
    assert len(str(caught.value).splitlines()) <= 3
