"""The page of silent errors: generated, and each line names a test that exists."""

from __future__ import annotations

import ast

import pytest

from tests.dist.table import RESUMES, ROWS
from tests.helpers import ROOT
from tests.silent_errors import CLAIMS, FOUND, HERE, LAYOUTS, PAGE, RESUMED, Claim, page

EVERY = [claim for claims in CLAIMS.values() for claim in claims]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.silent_errors"


@pytest.mark.parametrize("claim", EVERY, ids=lambda claim: claim.reports)
def test_a_claim_has_its_answer(claim: Claim) -> None:
    assert claim.here in HERE
    assert bool(claim.test) == (claim.here in ("equal", "refused"))
    assert claim.test or claim.note, "a line needs a test or a reason"


@pytest.mark.parametrize("test", sorted({claim.test for claim in EVERY if claim.test} | {test for *_, test in FOUND}))
def test_every_named_test_exists(test: str) -> None:
    path, _, name = test.partition("::")
    function, _, case = name.partition("[")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if case:
        cases = {LAYOUTS: [row.name for row in ROWS], RESUMED: [resume.name for resume in RESUMES]}
        assert case.removesuffix("]") in cases[f"{path}::{function}"]
