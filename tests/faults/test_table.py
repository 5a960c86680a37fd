"""Every case of the table has tests that exist, and every fault of `punish` is a case."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from lab.punish.faults import FAULTS
from tests.faults.table import CASES, Case

TESTS = Path(__file__).parents[1]
OTHERS = {"exception", "flipped checkpoint bit", "deleted checkpoint file"}
"""Variants of a case whose row names another."""


@cache
def functions(module: str) -> set[str]:
    tree = ast.parse((TESTS / module).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_is_proved_by_tests(case: Case) -> None:
    assert case.tests and case.noticed and case.goes_on and case.holds
    for test in case.tests:
        module, _, name = test.partition("::")
        assert Path(module).name.startswith("test_") and name.startswith("test_")
        assert name in functions(module), test


def test_there_are_forty_cases_and_the_drawn_faults_are_among_them() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40
    assert {case.punish for case in CASES} - {""} | OTHERS == {fault.name for fault in FAULTS}
