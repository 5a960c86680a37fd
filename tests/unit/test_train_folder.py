"""A run directory that somebody renames while the run trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from llmrecipes.engine.base import World
from llmrecipes.errors import ExitCode
from llmrecipes.rundir import Run
from llmrecipes.train.observers.folder import RunFolder
from tests.helpers import tiny
from tests.observing import observer
from tests.refusals import refused


def test_what_is_written_while_a_renamed_run_is_closed_goes_to_its_new_name(tmp_path: Path, world: World) -> None:
    """Whenever it is written: MLflow's process may be slower than the run."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    written = [Run(old).recipe_file, Run(old).metrics]
    for path in written:
        path.touch()

    names = (Run(old).status_file.name, "mlflow.json")

    def close() -> None:
        for name in names:
            old.mkdir(exist_ok=True)
            (old / name).write_text(name, "utf-8")

    with observer(RunFolder, tiny(), old, world=world, tracker=SimpleNamespace(close=lambda status: close())) as folder:
        folder.begin()
        folder.end()
        assert not any((old / name).exists() for name in names), "it is there: nothing is closed"
        old.rename(new)
        with refused(str(old), rule="--run-id new", code=ExitCode.STOP):
            folder.end()
    assert not old.exists()
    assert {path.name for path in new.iterdir()} == {*(path.name for path in written), "status.json", "mlflow.json"}
