"""Sources: what is read, and what a user is told when it cannot be."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from llmrecipes.data.sources import file_parts, json_rows, sources
from llmrecipes.data.sources.file_parts import MOST_BYTES, FilePart, parts_of
from llmrecipes.data.sources.machine_corpus import machine_documents
from llmrecipes.data.sources.sources import documents
from llmrecipes.data.steps import contamination
from llmrecipes.data.steps.steps import Unreadable
from llmrecipes.recipe.sections.source import AnySource, make_source
from llmrecipes.units import GIB, MIB
from tests.refusals import refused


def _jsonl(path: Path, lines: list[str]) -> AnySource:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return make_source(type="jsonl", path=str(path))


def on_disk(source: AnySource) -> list[Path]:
    return [file for file in sources.files(source) if isinstance(file, Path)]


def test_stdlib_is_sorted_source_without_installed_packages() -> None:
    source = make_source(type="stdlib")
    files = on_disk(source)
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
    source = make_source(type="text", path=str(tmp_path))
    assert list(sources.documents(source)) == [None, "zwölf\r\nBoxkämpfer 🥊\n", ""]
    glob = make_source(type="text", path=str(tmp_path / "**" / "*.md"))
    assert [file.name for file in sources.files(glob)] == ["d.md"]


def test_the_size_of_text_is_known_from_files_or_from_max_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 9000)
    text = make_source(type="text", path=str(tmp_path))
    assert sources.text_bytes(text) == 9000
    assert sources.text_bytes(text.model_copy(update={"max_tokens": 100}), 3.0) == 300
    assert sources.text_bytes(text.model_copy(update={"max_tokens": 10**6})) == 9000
    rows = pa.table({"text": [f"{n} " * 200 for n in range(1000)], "more": ["y" * 9000] * 1000})
    pq.write_table(rows, tmp_path / "rows.parquet", compression="zstd")
    parquet = make_source(type="parquet", path=str(tmp_path / "rows.parquet"))
    assert sources.text_bytes(parquet) == pytest.approx(sum(len(row) for row in rows["text"].to_pylist()), rel=0.05)
    assert sources.text_bytes(parquet.model_copy(update={"text_key": "body"})) is None
    hub = make_source(type="hub", path="no/such")
    assert sources.text_bytes(hub) is None
    assert sources.text_bytes(hub.model_copy(update={"max_tokens": 100}), 3.0) == 300


def test_a_hub_dataset_is_read_file_by_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(
            pa.table({"text": [f"{name}{n}" for n in range(3)], "n": [1, 2, 3]}), tmp_path / f"{name}.parquet"
        )
    source = make_source(type="hub", path=str(tmp_path))
    reading = sources.documents(source)
    assert next(reading) == "a0"
    (tmp_path / "b.parquet").unlink()  # read as a whole, it would be in the cache
    assert [next(reading), next(reading)] == ["a1", "a2"]
    with refused(tmp_path / "b.parquet"):
        next(reading)


def test_jsonl_rows_may_differ_in_their_other_keys(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"row {n}", "n": n}) for n in range(3)]
    source = _jsonl(tmp_path / "a.jsonl", [*rows, "", '{"text": null}', '{"other": {"deep": 1}, "text": "last"}'])
    assert list(sources.documents(source)) == ["row 0", "row 1", "row 2", "", "last"]


def test_bad_jsonl_of_another_encoding_is_refused_at_its_first_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes('{"text": "a"}\n{"text": "b"}\n'.encode("utf-16"))
    with refused(f"{file}:1", rule="UTF-16") as caught:
        list(sources.documents(make_source(type="jsonl", path=str(file))))
    assert caught.value.fix.startswith(f"iconv -f UTF-16 -t UTF-8 {file} ")
    file.write_text('\ufeff{"text": "a"}\n{"text": "b"}\n', "utf-8")
    assert list(sources.documents(make_source(type="jsonl", path=str(file)))) == ["a", "b"]


@pytest.mark.parametrize(("indent", "command"), [(None, """jq -c '.["my rows"][]'"""), (1, "jq -c .")])
def test_an_object_around_the_rows_is_refused_with_the_command_that_unwraps_it(
    tmp_path: Path, indent: int | None, command: str
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"my rows": [{"text": "a"}]}, indent=indent))
    with refused(f"{file}:1") as caught:
        list(sources.documents(make_source(type="jsonl", path=str(file))))
    assert caught.value.fix.startswith(f"{command} {file} ")
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    with refused(f"{packed}:1") as caught:
        list(sources.documents(make_source(type="jsonl", path=str(packed))))
    assert caught.value.fix.startswith(f"{command} FILE ")


def test_jsonl_reads_compressed_files_of_a_folder(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as stream:
        stream.write('{"body": "packed"}\n')
    _jsonl(tmp_path / "a.jsonl", ['{"body": "plain"}'])
    (tmp_path / "readme.txt").write_text("not data")
    source = make_source(type="jsonl", path=str(tmp_path), text_key="body")
    assert list(sources.documents(source)) == ["plain", "packed"]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{not json", ()),
        ("[1, 2]", ()),
        ('{"text": 5}', "'text'"),
        ('{"body": "x", "row_id": 1}', ("'text'", "row_id")),
        ('{"text": ' + "[" * 200_000, ()),
    ],
    ids=["no JSON", "a list", "a number", "another column", "nested"],
)
def test_a_bad_jsonl_row_is_named_by_file_and_line(tmp_path: Path, line: str, rule: str | tuple[str, ...]) -> None:
    source = _jsonl(tmp_path / "a.jsonl", ['{"text": "fine"}', line])
    with refused(f"{tmp_path / 'a.jsonl'}:2", rule=rule):
        list(sources.documents(source))


ENDINGS = [".gz", ".bz2", ".xz", ".zst"]


def _in_two_frames(content: bytes) -> bytes:
    half, codec = len(content) // 2, pa.Codec("zstd")
    return b"".join(codec.compress(part, asbytes=True) for part in (content[:half], content[half:]))


def _packed(file: Path, text: str) -> AnySource:
    packers: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": _in_two_frames
    }  # fmt: skip
    file.write_bytes(packers.get(file.suffix, bytes)(text.encode()))
    return make_source(type="jsonl", path=str(file.parent))


@pytest.mark.parametrize("packed", ENDINGS)
@pytest.mark.parametrize("array", [False, True])
def test_a_compressed_file_that_ends_early_is_named_with_its_last_row(tmp_path: Path, packed: str, array: bool) -> None:
    rows = [{"text": random.Random(n).randbytes(300).hex()} for n in range(300)]
    text = json.dumps(rows) if array else "\n".join(map(json.dumps, rows))
    file = tmp_path / f"a.jsonl{packed}"
    reading = sources.documents(_packed(file, text))
    assert len(list(reading)) == len(rows)
    os.truncate(file, file.stat().st_size - 3)
    found: list[str | None] = []
    with refused(file, rule="data.max_unreadable") as caught:
        found.extend(sources.documents(make_source(type="jsonl", path=str(file))))
    assert caught.value.where == (str(file) if array else f"{file}:{len(found)}")


@pytest.mark.parametrize("packed", ["", *ENDINGS])
def test_a_file_that_is_one_json_array_is_read(tmp_path: Path, packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["", "a", 'b"]}[{\\', "ä\n🥊", "long " * 30, None]
    rows: list[dict[str, Any]] = [{"n": 1.5e3, "deep": [[], {}], "text": text} for text in texts]
    expected = ["" if text is None else text for text in texts]
    for indent in (None, 1):
        for chunk in (1, 7, json_rows._CHUNK):  # also cut within a character, a number and an escape
            monkeypatch.setattr(json_rows, "_CHUNK", chunk)
            source = _packed(tmp_path / f"a.json{packed}", f"\ufeff \n{json.dumps(rows, indent=indent)} \n")
            assert list(sources.documents(source)) == expected
    assert list(sources.documents(_packed(tmp_path / f"a.json{packed}", "[ ]"))) == []


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ('[{"text": "a"}', 2),
        ('[{"text": "a"},', 2),
        ('[{"text": "a"},]', 2),
        ('[{"text": "a"} {"text": "b"}]', 2),
        ('[{"text": "a"}, {"text": tru}, {"text": "c"}]', 2),
        ('[{"text": "a"}, {"text": "b}]', 2),
        ('[{"text": "a"}] {"text": "b"}', 2),
        ('[{"text": "a"}, 5]', 2),
        ('[{"text": "a"}, {"text": 5}]', 2),
        ("[" * 200_000, 1),
    ],
)
@pytest.mark.parametrize("chunk", [1, json_rows._CHUNK])
def test_a_bad_row_of_an_array_is_named(
    tmp_path: Path, text: str, row: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "_CHUNK", max(chunk, len(text) // 100))
    source = _packed(tmp_path / "a.json", text)
    with refused(f"{tmp_path / 'a.json'}: row {row}"):
        list(sources.documents(source))


def test_an_array_is_read_in_bounded_memory_and_in_one_part(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with file.open("w") as stream:
        stream.write("[" + ", ".join(json.dumps({"text": "word " * 100}) for _ in range(40_000)) + "]")
    assert not file_parts.can_cut("jsonl", file)
    assert list(file_parts.parts_of("jsonl", [file], 1 << 20)) == [FilePart(file)]
    tracemalloc.start()
    assert sum(1 for _ in sources.documents(make_source(type="jsonl", path=str(file)))) == 40_000
    assert tracemalloc.get_traced_memory()[1] < file.stat().st_size / 2
    tracemalloc.stop()


def test_an_object_of_several_lines_is_told_from_rows(tmp_path: Path) -> None:
    source = _packed(tmp_path / "a.json", json.dumps({"data": [{"text": "a"}]}, indent=1))
    with refused(f"{tmp_path / 'a.json'}:1"):
        list(sources.documents(source))


def test_zstandard_is_not_cut_and_its_damage_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(bytes.fromhex("28b52ffd"))
    assert not file_parts.can_cut("jsonl", file)
    with refused(file):
        list(sources.documents(make_source(type="jsonl", path=str(file))))
    with refused(file):
        contamination.decontaminate([str(file)], 13)


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
    source = make_source(type="parquet", path=str(file))
    assert list(sources.documents(source)) == [*rows, ""]

    with refused(file, rule="'body'"):
        list(sources.documents(make_source(type="parquet", path=str(file), text_key="body")))
    with refused(f"{file}: row 1", rule="'n'"):
        list(sources.documents(make_source(type="parquet", path=str(file), text_key="n")))

    file.write_bytes(file.read_bytes()[:-100])
    with refused(file, rule="data.max_unreadable"):
        list(sources.documents(source))


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_a_missing_source_is_reported_with_its_path(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "nowhere"
    with refused("data.sources", rule=str(path)):
        list(sources.documents(make_source(type=kind, path=str(path))))


def test_hub_reads_a_dataset_and_names_missing_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["one", None, "three"]}), folder / "train.parquet")
    assert list(sources.documents(make_source(type="hub", path=str(folder)))) == ["one", "", "three"]
    with refused(folder / "train.parquet", rule="'body'"):
        list(sources.documents(make_source(type="hub", path=str(folder), text_key="body")))


def test_an_unreachable_hub_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused("data.sources", rule=("'no-such/set'", "HF_ENDPOINT")) as caught:
        list(sources.documents(make_source(type="hub", path="no-such/set")))
    assert len(str(caught.value).splitlines()) <= 3


def test_the_corpus_of_this_machine_has_everything_that_steps_are_for(tmp_path: Path) -> None:
    """Of a few files: a page, wrongly decoded text, copies, junk; the same documents every time."""
    for number in range(40):
        words = " ".join(f"word{number}x{place}" for place in range(400))
        (tmp_path / f"{number:02d}.txt").write_text(f"It's the text {number}.\n\n{words}\n")
    (tmp_path / "40.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "41.txt").write_bytes(b"\xff")
    files = sorted(tmp_path.iterdir())
    made = list(machine_documents(files))
    assert made == list(machine_documents(files)) and len(made) == 42 + 3 * 4
    texts = [text for text in made if text]
    assert sum(text.startswith("<!DOCTYPE html>") and "<nav>" in text for text in texts) == 4
    assert sum("â€™" in text for text in texts) == 4
    assert [text.lower() for text in texts if text.isupper()] == [files[n].read_text().lower() for n in (3, 13, 23, 33)]
    edited = [text for text in texts if " The text" in text or (text.startswith("It's the text") and "\n" not in text)]
    assert [len(text.split()) for text in edited] == [404] * 4
    assert {"packed", None} <= set(made) and any(text.startswith("Buy cheap") for text in texts)


@pytest.mark.rotating
def test_this_machine_has_such_a_corpus() -> None:
    found = on_disk(make_source(type="machine"))
    assert found == on_disk(make_source(type="machine")) and len(found) > 200
    assert sum(file.stat().st_size for file in found) < 6 * (8 << 20)
    assert {".py", ""} <= {file.suffix for file in found}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("size", [50, 333, 4000])
def test_the_parts_of_a_file_have_its_documents_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Literal["jsonl", "parquet"], size: int
) -> None:
    """Wherever a border falls: in a line, at its end, in one that is longer than a part."""
    texts = [f"row {n} " + "ü" * (n * n % 37) for n in range(60)]
    texts[7] = "long " * 100
    file = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
        file.write_text("\n".join([*lines[:20], "", *lines[20:]]), encoding="utf-8")
    else:
        pq.write_table(pa.table({"text": texts}), file, row_group_size=7)
    source = make_source(type=kind, path=str(file))
    monkeypatch.setattr(file_parts, "PART_BYTES", size)
    made = list(file_parts.parts_of(kind, sources.files(source)))
    assert len(made) == -(-file.stat().st_size // size)
    by_part = [list(sources.documents(source, parts=[part])) for part in made]
    assert [text for part in by_part for text in part] == texts == list(sources.documents(source))
    if size == 333:
        assert sum(map(bool, by_part)) > 3
        with gzip.open(tmp_path / "b.jsonl.gz", "wt") as stream:
            stream.write('{"text": "packed"}\n' * 500)
        assert [part.end for part in file_parts.parts_of("jsonl", [tmp_path / "b.jsonl.gz"])] == [None]


_MEMBER = 16 * MIB
PACKED: dict[str, Callable[[bytes], bytes] | None] = {
    "a.jsonl": None,
    "a.txt": None,
    "a.jsonl.gz": partial(gzip.compress, compresslevel=1),
    "a.jsonl.bz2": partial(bz2.compress, compresslevel=1),
    "a.jsonl.xz": partial(lzma.compress, preset=0),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_document_of_a_gibibyte_is_refused_where_its_line_begins(tmp_path: Path, name: str) -> None:
    file, pack, rows = tmp_path / name, PACKED[name], b"" if name == "a.txt" else b'{"text": "short"}\n'
    with file.open("wb") as stream:
        stream.write(pack(rows) if pack else rows)
        if pack:
            member = pack(b" " * _MEMBER)
            stream.writelines([member] * (GIB // _MEMBER))
        else:
            stream.truncate(200 * MIB)  # zeros that take no space; one part
    source = make_source(type="text" if name == "a.txt" else "jsonl", path=str(file))
    tracemalloc.start()
    try:
        with refused(f"{file}:2" if rows else file, rule=f"{MOST_BYTES:,}"):
            list(documents(source))
        assert tracemalloc.get_traced_memory()[1] < 4 * MOST_BYTES
    finally:
        tracemalloc.stop()
    skipped = list(documents(source, skip=True))
    assert skipped[:-1] == (["short"] if rows else [])
    assert isinstance(skipped[-1], Unreadable)


def test_a_document_of_a_parquet_file_has_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["short", "x" * (MOST_BYTES + 1)]}), file)
    with refused(f"{file}: row 2", rule=f"{MOST_BYTES:,}"):
        list(documents(make_source(type="parquet", path=str(file))))


def test_a_long_line_does_not_fill_the_parts_behind_it(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with file.open("wb") as stream:
        stream.truncate(GIB)
        stream.seek(GIB)
        stream.write(b'\n{"text": "last"}\n')
    first, *_, last = parts_of("jsonl", [file])
    source = make_source(type="jsonl", path=str(file))
    tracemalloc.start()
    try:
        assert list(documents(source, parts=[last])) == ["last"]
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    with refused(f"{file}: byte 0", rule=f"{MOST_BYTES:,}"):
        list(documents(source, parts=[first]))


def test_a_border_between_two_lines_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{n:03}" for n in range(60)]
    source = _jsonl(tmp_path / "a.jsonl", [json.dumps({"text": text}) for text in texts])
    monkeypatch.setattr(file_parts, "PART_BYTES", (tmp_path / "a.jsonl").stat().st_size // 10)
    made = list(file_parts.parts_of("jsonl", sources.files(source)))
    by_part = [list(sources.documents(source, parts=[part])) for part in made]
    assert by_part == [texts[first : first + 6] for first in range(0, 60, 6)]


def test_the_place_of_a_bad_row_in_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _jsonl(tmp_path / "a.jsonl", [json.dumps({"text": "x" * 90})] * 5 + ["{not json"])
    monkeypatch.setattr(file_parts, "PART_BYTES", 300)
    with refused(f"{tmp_path / 'a.jsonl'}: byte 515"):
        list(sources.documents(source))
