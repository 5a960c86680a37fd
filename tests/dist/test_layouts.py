"""Every row of the table computes what one process computes, and goes on where another layout stopped."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from llmrecipes.recipe import rules
from llmrecipes.recipe.schema import Recipe
from tests.dist.table import BOUND, RESUMES, ROWS, Resume, Row
from tests.dist.training import Outcome, compare, go_on, save_midway, train
from tests.dist.worlds import GlooWorld

pytestmark = pytest.mark.dist

Worlds = dict[int, GlooWorld]
HERE = [row for row in ROWS if not row.nccl]


@pytest.fixture(scope="session")
def reference(worlds: Worlds) -> Callable[[Recipe], Outcome]:
    """Training in one process, each recipe once."""
    known: dict[str, Outcome] = {}

    def of(recipe: Recipe) -> Outcome:
        key = recipe.model_dump_json()
        if key not in known:
            known[key] = worlds[1].run(train, recipe)
        return known[key]

    return of


@pytest.fixture(scope="session")
def checkpoint(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], Path]:
    """Checkpoints, each layout's written once."""
    known: dict[str, Path] = {}

    def of(row: Row) -> Path:
        if row.name not in known:
            known[row.name] = tmp_path_factory.mktemp("checkpoint")
            worlds[row.ranks].run(save_midway, row.recipe, known[row.name])
        return known[row.name]

    return of


@pytest.mark.parametrize("row", HERE, ids=lambda row: row.name)
def test_a_layout_changes_nothing(row: Row, worlds: Worlds, reference: Callable[[Recipe], Outcome]) -> None:
    one = reference(row.reference_recipe)
    assert max(one.losses) - min(one.losses) > 1e-3, "the reference does not learn"
    difference = compare(worlds[row.ranks].run(train, row.recipe), one)
    assert difference.largest <= row.bound, str(difference)


@pytest.mark.parametrize("case", RESUMES, ids=lambda case: case.name)
def test_a_checkpoint_goes_on_in_another_layout(
    case: Resume, worlds: Worlds, reference: Callable[[Recipe], Outcome], checkpoint: Callable[[Row], Path]
) -> None:
    saved, resumed = Row(case.variant, case.saved), Row(case.variant, case.resumed, case.changes)
    outcome = worlds[resumed.ranks].run(go_on, resumed.recipe, checkpoint(saved))
    difference = compare(outcome, reference(resumed.reference_recipe))
    assert difference.largest <= BOUND, str(difference)


def test_every_row_is_a_recipe_that_users_may_write() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert not rules.check(row.recipe), row.name
        assert not rules.check(row.reference_recipe), row.name
        assert row.why or (row.bound == BOUND and not row.reference), row.name


def test_the_table_has_every_pair_of_degrees() -> None:
    there = {pair for row in HERE for pair in combinations(sorted(row.degrees), 2)}
    missing = [pair for pair in combinations(("cp", "dp", "ep", "pp", "tp"), 2) if pair not in there]
    missing += [pair for pair in (("cp", "vpp"), ("dp", "vpp"), ("ep", "vpp"), ("tp", "vpp")) if pair not in there]
    assert not missing
