"""Looking up a submitted job by run or job id."""

from __future__ import annotations

from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.launch import record
from llmrecipes.launch.base import JobHandle, JobRef
from llmrecipes.launch.job import handle
from llmrecipes.launch.registry import LAUNCHERS, launcher


def find_job(name: str, runs_dir: Path) -> JobHandle:
    """The newest job of a run, or a job by its id.

    Args:
        name: run directory, recipe/run-id, run id, or the id that `submit` printed.
        runs_dir: where runs are kept.

    Raises:
        UserError: there is no such run or job, or several runs have that id.
    """
    folders = list(record.submitted(runs_dir))
    for folder in (Path(name), runs_dir / name):
        if (found := record.read(folder)) is not None:
            return handle(found.ref)
        if (folder / "recipe.yaml").is_file():
            raise UserError(
                "the run was not submitted as a job",
                where=str(folder),
                rule="a training in a terminal ends with Ctrl-C, and saves",
            )
    named = [folder for folder in folders if folder.name == name]
    if len(named) > 1:
        raise UserError(f"several runs are called {name}: {', '.join(map(str, named))}", fix="give recipe/run-id")
    for folder in named or folders:
        found = record.read(folder)
        if found is not None and (named or found.ref.job_id == name):
            return handle(found.ref)
    for each in LAUNCHERS:
        if launcher(each).names_job(name):
            ref = JobRef(each, name, runs_dir / ".unknown")
            if ref in launcher(each).statuses([ref]):
                return handle(ref)
    raise UserError(
        f"no run and no job {name}",
        where=str(runs_dir),
        rule="a job is named by its run (directory, recipe/run-id or run id), or by the id that submit printed",
        fix="llmrecipes runs lists the runs; --runs-dir DIR if they are kept elsewhere",
    )
