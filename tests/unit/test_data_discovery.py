"""Which files of a folder or pattern are read, and what is named as left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmrecipes.data.prepare import prepare
from llmrecipes.data.sources.sources import files, left_out
from llmrecipes.recipe.sections.source import AnySource, make_source
from tests.refusals import refused
from tests.unit.test_data_prepare import recipe


def made(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'{{"text": "{name} {"word " * 99}"}}\n')


def names(source: AnySource, root: Path) -> list[str]:
    return [os.path.relpath(str(file), root) for file in files(source)]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    source = tmp_path / "src"
    made(source, "a/1.jsonl", "c/3.jsonl")
    made(tmp_path, "far/2.jsonl", "far/deep/4.jsonl")
    for name, target in {
        "b": "far",  # outside
        "deep": "far/deep",  # in it: which of the two is read first must not matter
        "a/loop": "src/a",
        "again": "src/c",
        "up": ".",  # the folder above the source
        "far": "far",
    }.items():
        (source / name).symlink_to(tmp_path / target)
    (tmp_path / "far" / "back").symlink_to(source)
    read = make_source(type="jsonl", path=str(source))
    assert names(read, source) == ["a/1.jsonl", "b/2.jsonl", "b/deep/4.jsonl", "c/3.jsonl"]
    said = left_out(read)
    assert "links to what is read already: 5" in said
    assert "links to a folder above the source: 1" in said
    assert "(up)" in said


def test_what_is_left_out_of_a_folder_is_counted_and_named(tmp_path: Path) -> None:
    made(tmp_path, "1.jsonl", "2.ndjson", "3.JSONL", "sub/4.txt", ".git/5.jsonl", ".6.jsonl")
    (tmp_path / "7.jsonl").symlink_to(tmp_path / "gone.jsonl")
    os.mkfifo(tmp_path / "8.jsonl")
    source = make_source(type="jsonl", path=str(tmp_path))
    assert names(source, tmp_path) == ["1.jsonl"]
    said = left_out(source)
    for part in (
        "files with other endings: 3 (2.ndjson)",
        "hidden: 2 (.6.jsonl)",
        "broken links: 1 (7.jsonl)",
        "8.jsonl",
    ):
        assert part in said, said
    lines: list[str] = []
    prepare(recipe(source), tmp_path / "data", progress=lines.append)
    assert sum("2.ndjson" in line for line in lines) == 1


def test_what_a_pattern_leaves_out_is_counted_and_named(tmp_path: Path) -> None:
    made(tmp_path, "1.jsonl", "sub/2.jsonl", "sub.jsonl/3.jsonl")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    flat = make_source(type="jsonl", path=str(tmp_path / "*.jsonl"))
    assert names(flat, tmp_path) == ["1.jsonl"]
    assert "folders: 1" in left_out(flat)
    assert "(gone.jsonl)" in left_out(flat)
    deep = make_source(type="jsonl", path=str(tmp_path / "**" / "*.jsonl"))
    assert names(deep, tmp_path) == ["1.jsonl", "sub/2.jsonl", "sub.jsonl/3.jsonl"]
    assert "links to what is read already" in left_out(deep)


def test_nothing_is_said_where_all_is_read(tmp_path: Path) -> None:
    made(tmp_path, "1.jsonl", "sub/2.jsonl")
    for path in (tmp_path, tmp_path / "1.jsonl", tmp_path / "**" / "*.jsonl", tmp_path.as_uri()):
        assert not left_out(make_source(type="jsonl", path=str(path)))
    made(tmp_path, "3.txt")
    assert "3.txt" in left_out(make_source(type="jsonl", path=f"{tmp_path.as_uri()}/"))


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "1.jsonl")
    monkeypatch.chdir(tmp_path)
    for _ in range(20):  # until its path is longer than the system takes
        Path("d" * 250).mkdir()
        monkeypatch.chdir("d" * 250)
    with refused(str(tmp_path)):
        files(make_source(type="jsonl", path=str(tmp_path)))
