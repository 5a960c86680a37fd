"""Tables: plain and stable where output is not a terminal, laid out by rich on one."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from llmrecipes.cli import tables
from llmrecipes.cli.tables import TextTable

ROWS = (("name", "size"), ("a", "1,024"), ("longer [name]", "8"))


def test_plain_lines_are_aligned_and_end_without_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show("title", TextTable(ROWS, right=(1,)), TextTable([("x", "y"), ("1", "")]))
    assert capsys.readouterr().out.splitlines() == [
        "title",
        "name            size",
        "a              1,024",
        "longer [name]      8",
        "x  y",
        "1",
    ]


def test_cells_wrap_on_a_narrow_terminal() -> None:
    terminal = Console(file=io.StringIO(), width=14, force_terminal=True)
    terminal.print(TextTable(ROWS, right=(1,)))
    assert isinstance(terminal.file, io.StringIO)
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in terminal.file.getvalue().splitlines()]
    assert all(len(line) <= 14 for line in lines)
    assert "[name]" in " ".join(lines)  # no markup


def test_secrets_are_not_printed_in_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    terminal = Console(file=io.StringIO(), width=60, force_terminal=True)
    terminal.print(TextTable([("key", "value"), ("token", "hf_abcdefghijklmnop")]))
    assert isinstance(terminal.file, io.StringIO)
    assert "hf_abcdefghijklmnop" not in terminal.file.getvalue()
