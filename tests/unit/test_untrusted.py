"""Files of others: FIFOs, devices, links, sizes and nesting are refused before anything waits for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrecipes import untrusted
from llmrecipes.untrusted import Refused
from tests.refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    (made / "inner").mkdir(parents=True)
    (made / "file").write_bytes(b"12345")
    (tmp_path / "outside").write_bytes(b"secret")
    return made


def test_a_regular_file_is_read(folder: Path) -> None:
    assert untrusted.read(folder / "file", root=folder, most=5) == b"12345"


def test_no_other_kind_of_file_is_opened(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero", "inner"):
        for root in (None, folder):
            with refused(str(folder / name)):
                untrusted.open_file(folder / name, root=root)


def test_a_link_inside_is_followed_and_one_out_of_the_folder_is_not(folder: Path, tmp_path: Path) -> None:
    (folder / "inner/relative").symlink_to("../file")
    (folder / "inner/absolute").symlink_to(folder / "file")
    (tmp_path / "alias").symlink_to(folder)
    for name in ("relative", "absolute"):
        assert untrusted.read(folder / "inner" / name, root=folder) == b"12345"
        assert untrusted.real(tmp_path / "alias/inner" / name, root=tmp_path / "alias") == folder / "file"
    (folder / "out").symlink_to("../outside")
    (folder / "through").symlink_to(tmp_path)
    for name in ("out", "through/outside", "../outside"):
        with refused(str(folder / name), rule=str(folder)):
            untrusted.read(folder / name, root=folder)
    assert untrusted.read(folder / "out") == b"secret", "a path that the user has named may be a link"


def test_a_neighbour_whose_name_begins_alike_is_outside(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "folder-2").mkdir()
    (tmp_path / "folder-2/file").write_bytes(b"")
    with refused(str(folder / "x")):
        (folder / "x").symlink_to(tmp_path / "folder-2/file")
        untrusted.read(folder / "x", root=folder)


def test_a_size_is_refused_before_it_is_read(folder: Path) -> None:
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with refused(str(folder / "sparse"), rule="4"):
        untrusted.read(folder / "sparse", most=4)


@pytest.mark.parametrize(
    "text", [b"[" * 65 + b"]" * 65, b"[" * 10**5, b'{"a":' * 10**5, b'"\\ud800"', b"{", b"\xff", b"9" * 5000]
)
def test_json_that_would_be_a_traceback_is_refused(folder: Path, text: bytes) -> None:
    (folder / "file").write_bytes(text)
    with refused(str(folder / "file")):
        untrusted.read_json(folder / "file")


def test_json_at_the_limits_is_read() -> None:
    assert untrusted.parse_json(b"[" * 64 + b"]" * 64)
    assert untrusted.parse_json(b'"\\ud83d\\ude00"') == "\U0001f600"
    assert untrusted.parse_line(b"[" * 64 + b"]" * 64)


LINES = (
    b'{"a": [1, -2.5e-3, true, null, "\\u00e9"], "b": {"c": []}}\n',
    b'{"a": NaN, "b": [Infinity, -Infinity]}', b"12" * 40,
    b'{"a": 1, "a": 2}', b"\xef\xbb\xbf{}", b'"\\ud83d\\ude00"', b"1e999",
)  # fmt: skip


@pytest.mark.parametrize("text", LINES)
def test_a_line_has_the_value_of_json(text: bytes) -> None:
    assert repr(untrusted.parse_line(text)) == repr(untrusted.parse_json(text))


@pytest.mark.parametrize(
    "text", [b"{", b"", b'"\xff"', b'"\\ud83d"', b"[" * 65 + b"]" * 65, b"[" * 10**6, b"[1]" + b"[" * 70, b"9" * 5000]
)
def test_a_line_is_refused_as_other_json_is(text: bytes) -> None:
    with pytest.raises(untrusted.Refused):
        untrusted.parse_json(text)
    with pytest.raises(untrusted.Refused):
        untrusted.parse_line(text)
    with pytest.raises(ValueError):
        untrusted.parse_json(b"{")


def test_a_long_line_is_cut(folder: Path) -> None:
    (folder / "file").write_bytes(b"a\n" + b"b" * 100 + b"\nc\n" + b"d" * 8)
    assert list(untrusted.lines(folder / "file", longest=8)) == [b"a\n", b"b" * 8, b"c\n", b"d" * 8]


@pytest.mark.parametrize("name", ["null\0byte", "half\ud800"])
def test_what_is_not_a_name_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(Refused):
        untrusted.read(folder / name)


def test_an_action_that_ends_is_let_through_whatever_it_raises() -> None:
    before = os.getpid()
    for action in (lambda: None, lambda: 1 / 0, sys.exit):
        untrusted.require_ends(action, 10, "x", "y")
    assert os.getpid() == before


@pytest.mark.parametrize("action", [lambda: bytearray(4 << 30), os.abort])
def test_an_action_that_takes_too_much_memory_is_refused(action: Callable[[], object]) -> None:
    with refused("data.x", rule="2"):
        untrusted.require_ends(action, 10, "data.x", "")


def test_an_action_that_does_not_end_is_refused() -> None:
    def forever() -> None:
        while True:
            pass

    with refused("data.x", rule="1"):
        untrusted.require_ends(forever, 1, "data.x", "")
