"""A run directory that somebody renames while the run trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrecipes.engine.base import World
from llmrecipes.errors import ExitCode
from llmrecipes.faults.signals import StopRequest
from llmrecipes.rundir import Run
from llmrecipes.train.observers.folder import RunFolder
from tests.refusals import refused


def test_what_is_written_while_a_renamed_run_is_closed_goes_to_its_new_name(tmp_path: Path, world: World) -> None:
    """Whenever it is written: MLflow's process may be slower than the run."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    written = [Run(old).recipe_file, Run(old).metrics]
    for path in written:
        path.touch()

    def close() -> None:
        for name in (Run(old).status_file.name, "mlflow.json"):
            old.mkdir(exist_ok=True)
            (old / name).write_text(name, "utf-8")

    with RunFolder(old, StopRequest(), world) as folder:
        folder.require_exists(pytest.fail)
        old.rename(new)
        with refused(str(old), rule="--run-id new", code=ExitCode.STOP):
            folder.require_exists(close)
    assert not old.exists()
    assert {path.name for path in new.iterdir()} == {*(path.name for path in written), "status.json", "mlflow.json"}
