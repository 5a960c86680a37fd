"""Names and places in a run's directory, `<runs-dir>/<recipe>/<run-id>/`; no other module does arithmetic on its path.

`rundir.Run` is the same with what the files say.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from llmrecipes.errors import UserError

RECIPE = "recipe.yaml"
PLAN = "plan.json"
ENVIRONMENT = "env.json"
DOCUMENTS = (RECIPE, PLAN, ENVIRONMENT)
"""Written at every start; sinks have copies of them."""
REWINDS = "rewinds.json"
METRICS = "metrics.jsonl"
STATUS = "status.json"
EVALUATIONS = "evaluations.jsonl"
CHECKPOINTS, LOGS = "checkpoints", "logs"
SUBMISSION = f"{LOGS}/submission.json"
_ID = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_MOST = 64


@dataclass(frozen=True)
class RunFiles:
    """Where the files of a run are, whether they exist or not."""

    path: Path
    """The run's directory; relative or absolute, as the user wrote it."""

    @classmethod
    def of(cls, runs_dir: Path, recipe: str, run_id: str) -> Self:
        """A run by the name of its recipe and its id."""
        return cls(runs_dir / recipe / run_id)

    @classmethod
    def all(cls, runs_dir: Path, recipe: str | None = None, *, holding: str = RECIPE) -> list[Self]:
        """The runs that have a file, sorted by path.

        Args:
            recipe: name of the recipe whose runs are wanted; None: any.
            holding: the file, relative to a run's directory.
        """
        depth = len(Path(holding).parts)
        # A hidden folder is a run that is being written.
        pattern = f"[!.]*/{holding}"
        paths = runs_dir.glob(f"*/{pattern}") if recipe is None else (runs_dir / recipe).glob(pattern)
        return [cls(path.parents[depth - 1]) for path in sorted(paths)]

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def recipe_name(self) -> str:
        return self.path.parent.name

    @property
    def name(self) -> str:
        """`recipe/run-id`."""
        return f"{self.recipe_name}/{self.run_id}"

    @property
    def runs_dir(self) -> Path:
        return self.path.parent.parent

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe; a directory without it is not a run."""
        return self.path / RECIPE

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def status_file(self) -> Path:
        return self.path / STATUS

    @property
    def evaluations(self) -> Path:
        return self.path / EVALUATIONS

    @property
    def rewinds(self) -> Path:
        """The spikes that the run went back from, and the samples that it leaves out since."""
        return self.path / REWINDS

    @property
    def local_checkpoints(self) -> Path:
        """The token under which nodes keep the run's local checkpoints, and the step of the last it started from."""
        return self.path / "local.json"

    @property
    def checkpoints(self) -> Path:
        """The directory of `CheckpointStore`, which also has the lock of the run that writes."""
        return self.path / CHECKPOINTS

    @property
    def exports(self) -> Path:
        """The Hugging Face folders of `checkpoint.also_export`, kept as long as their checkpoints."""
        return self.path / "exported"

    def exported(self, step: int) -> Path:
        """The one of a step."""
        return self.exports / f"step-{step:08d}"

    @property
    def logs(self) -> Path:
        return self.path / LOGS

    @property
    def starts(self) -> Path:
        """The starts of a run, to detect restarts without progress."""
        return self.logs / "starts.json"

    @property
    def submission(self) -> Path:
        """The newest submission; a run that is submitted again gets a new job."""
        return self.path / SUBMISSION

    @property
    def choice(self) -> Path:
        """What `layout: auto` chose when the job was submitted, and why."""
        return self.logs / "layout.json"

    @property
    def exit_code(self) -> Path:
        """`JOB CODE`, which a job writes when it ends: schedulers forget jobs, Slurm within minutes."""
        return self.logs / "exit"

    @property
    def lease(self) -> Path:
        """Lease of the newest local job; a newer job replaces it, which ends the earlier one should it still run."""
        return self.logs / "lease.json"

    def hang(self, token: str) -> Path:
        """What the watchdogs of a start report when ranks hang; it exists only then."""
        return self.logs / f"hang-{token}"

    @property
    def doctor(self) -> Path:
        """What checks of the nodes said before each start."""
        return self.logs / "doctor.jsonl"

    @property
    def bad_nodes(self) -> Path:
        """The nodes that the run's Slurm job leaves out, and since when."""
        return self.logs / "bad-nodes"

    def spec(self, node: int | None = None) -> Path:
        """What the ranks of this machine read, or of one node of several."""
        return self.logs / ("spec.json" if node is None else f"spec-node-{node}.json")

    def exists(self) -> bool:
        """Whether the directory is a run."""
        return self.recipe_file.is_file()

    def remove_if_empty(self) -> None:
        """Remove the folders of a run that never started, up to the first one with something in it."""
        for folder in (self.logs, self.path, self.path.parent, self.runs_dir):
            try:
                folder.rmdir()
            except OSError:
                return


def run_of(folder: Path) -> RunFiles:
    """The run whose `checkpoints` or `logs` this is."""
    return RunFiles(folder.parent)


def new_run_id() -> str:
    """UTC time and six random characters, so that ids sort by age and do not collide."""
    import secrets  # not at the top: it takes a fiftieth of `llmrecipes list`, which makes no run

    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def checked_run_id(run_id: str | None) -> str:
    """A run id that is safe as the name of a directory; a new one for None.

    Raises:
        UserError: it is not safe.
    """
    if run_id is None:
        return new_run_id()
    if not 0 < len(run_id) <= _MOST or run_id[0] in "._-" or set(run_id) - _ID:
        raise UserError(
            f"{run_id!r} is not a valid run id",
            where="--run-id",
            rule=f"at most {_MOST} letters, digits, dots, dashes and underscores, starting with a letter or digit",
            fix="--run-id my-run-1",
        )
    return run_id
