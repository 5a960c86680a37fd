"""Rows of the table, run in the worlds of the pool and compared with one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe
from tests.dist.table import Resume, Row, Staged
from tests.dist.training import Difference, Outcome, compare, go_on, save_midway, train, train_staged
from tests.dist.worlds import GlooWorld


class Suite:
    """Runs rows; references and checkpoints are made once.

    Args:
        worlds: of the pool.
        folder: for checkpoints.
    """

    def __init__(self, worlds: dict[int, GlooWorld], folder: Path) -> None:
        self._worlds, self._folder = worlds, folder
        self._references: dict[str, Outcome] = {}
        self._checkpoints: dict[str, Path] = {}
        self._staged: list[Staged] = []

    def row(self, row: Row) -> Difference:
        """A layout against one process."""
        return compare(self._worlds[row.ranks].run(train, self.runnable(row)), self.reference(row.reference_recipe))

    def resume(self, case: Resume) -> Difference:
        """The steps after a checkpoint of another layout against the same steps of one process without one."""
        row = case.resumed_row
        outcome = self._worlds[row.ranks].run(go_on, self.runnable(row), self._checkpoint(case.saved_row))
        assert len(outcome.losses) == 1
        return compare(outcome, self.reference(row.reference_recipe))

    def staged(self, case: Staged) -> Difference:
        """A run whose stages have other layouts against one process."""
        first = case.rows[0]
        folder = self._folder / f"staged-{len(self._staged)}"
        self._staged.append(case)
        recipes = [self.runnable(row) for row in case.rows]
        outcome = self._worlds[first.ranks].run(train_staged, recipes, folder)
        return compare(outcome, self.reference(first.reference_recipe))

    def reference(self, recipe: Recipe) -> Outcome:
        """Training in one process."""
        key = recipe.model_dump_json()
        if key not in self._references:
            self._references[key] = self._worlds[1].run(train, recipe)
        return self._references[key]

    def runnable(self, row: Row) -> Recipe:
        """The recipe of a row on this machine; skips, and says why, where its offload cannot run."""
        recipe = row.recipe
        if recipe.layout.zero is not None and recipe.layout.zero.nvme_path is not None:
            nvme = recipe.layout.zero.model_copy(update={"nvme_path": str(self._folder / recipe.layout.zero.nvme_path)})
            recipe = recipe.with_layout(zero=nvme)
        try:
            require_packages(recipe)
        except UserError as error:
            pytest.skip(str(error))
        return recipe

    def _checkpoint(self, row: Row) -> Path:
        key = row.recipe.model_dump_json()
        if key not in self._checkpoints:
            path = self._folder / f"checkpoint-{len(self._checkpoints)}"
            self._worlds[row.ranks].run(save_midway, self.runnable(row), path)
            self._checkpoints[key] = path
        return self._checkpoints[key]
