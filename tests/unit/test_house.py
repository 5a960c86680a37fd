"""The sizes of the package and its docs keep to their budgets."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import house  # noqa: E402  the folder is no package


def test_each_package_keeps_to_its_budget() -> None:
    code = house.code_by_package(ROOT)
    assert code.keys() == house.CODE_BUDGET.keys()
    assert not {name: lines for name, lines in code.items() if lines > house.CODE_BUDGET[name]}


def test_docs_keep_to_their_budget() -> None:
    words = house.words(ROOT)
    assert not {name: words[name] for name, most in house.WORD_BUDGET.items() if words[name] > most}


def test_code_is_what_remains_without_imports_docstrings_and_comments() -> None:
    text = '''"""Docs."""

import os  # a comment


def f() -> str:
    """More
    docs."""
    # Why.
    return """a
# text"""
'''
    assert house.code_lines(text, house.ast.parse(text)) == {6, 10}
