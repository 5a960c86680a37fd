"""What a launcher is: it renders a planned run for a place, hands it over, and answers for the job from then on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol

from llmrecipes.errors import ExitCode
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.hardware.profile import Profile
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.schema import Recipe

Given = Mapping[str, Any]
"""Options of `submit` by their names on the command line, those that were given and those with a default."""


class JobState(StrEnum):
    """The same for every launcher; a job that was requeued is pending again."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    SAVED = "saved"
    """It ended with 75 and nobody starts it again: the same command resumes it."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The scheduler no longer knows the job, and its run has not recorded how it ended."""

    @property
    def ended(self) -> bool:
        return self not in (JobState.PENDING, JobState.RUNNING)


EXIT_CODES = {
    JobState.COMPLETED: int(ExitCode.DONE),
    JobState.SAVED: int(ExitCode.REQUEUE),
    JobState.CANCELLED: int(ExitCode.TERMINATED),
}
"""Exit codes of jobs whose scheduler has none to tell; 1 for all other states."""


@dataclass(frozen=True)
class JobRef:
    """What it takes to find a job again, from any process: see `launch.record`."""

    launcher: str
    job_id: str
    run_dir: Path


@dataclass(frozen=True)
class JobStatus:
    """What is known of a job: `reason` is the scheduler's word where its own state says more."""

    state: JobState
    exit_code: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class JobResult:
    """How a job ended, with the last numbers that its run has recorded."""

    state: JobState
    exit_code: int
    reason: str = ""
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    valid_loss: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "state": self.state.value}


@dataclass(frozen=True)
class Logs:
    """Where a job's output is: files on this machine's disks, or the command that prints it."""

    files: tuple[Path, ...] = ()
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """A recipe on a number of nodes, checked.

    `asked` and `cluster` are what the user wrote. `profile` is None for this machine; `site` is all nodes together.
    """

    asked: tuple[str, ...]
    cluster: str | None
    profile: Profile | None
    site: Cluster
    plan: Plan
    nodes: int

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe


@dataclass(frozen=True)
class PlannedForCluster(Planned):
    """The same for nodes of a cluster profile."""

    cluster: str
    profile: Profile


@dataclass(frozen=True)
class Submission:
    """A planned run and where it is kept; all paths are absolute."""

    planned: Planned
    run_id: str
    runs_dir: Path
    data_dir: Path
    accept_changes: bool = False

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.planned.recipe.name / self.run_id

    @property
    def planned_for_cluster(self) -> PlannedForCluster:
        """For launchers with `needs_cluster`."""
        if not isinstance(self.planned, PlannedForCluster):
            raise TypeError("this launcher needs a plan for a cluster profile")
        return self.planned


@dataclass(frozen=True)
class Rendering:
    """What a launcher hands over: made before anything happens, and shown by `--dry-run`.

    Attributes:
        command: the words of the program that takes it.
        text: what the program reads from its standard input.
        shown: the same for people.
        details: the same for `--json`.
        place: where the job waits, by name; for the preview.
        time_limit: as the scheduler is told it; None: the place's own.
        has_token: whether the job is given `HF_TOKEN`.
    """

    command: tuple[str, ...]
    text: str = ""
    shown: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    place: Mapping[str, str | None] = field(default_factory=dict)
    time_limit: str | None = None
    has_token: bool = False


class JobHandle(Protocol):
    """A job that was submitted."""

    @property
    def ref(self) -> JobRef: ...

    @property
    def state(self) -> JobState: ...

    def wait(
        self, timeout: float | None = None, changed: Callable[[JobStatus], None] = lambda _status: None
    ) -> JobState:
        """Wait until the job has ended.

        Args:
            timeout: seconds; None: as long as it takes.
            changed: is told the status at first and whenever its state or reason changes.

        Returns:
            The state; one that has not ended after the timeout.
        """
        ...

    def cancel(self) -> None:
        """Ask the scheduler to end the job; does nothing where it has ended. The run keeps its checkpoints."""
        ...

    def logs(self) -> Logs: ...

    def result(self) -> JobResult:
        """How the job ended, or how far it is."""
        ...


class Launcher(Protocol):
    """A place where runs are started. `launch.registry` names all of them.

    Every method raises UserError where the scheduler's programs are missing, refuse or do not answer.
    """

    takes: ClassVar[frozenset[str]]
    """Options of `submit` that mean something here; the others are refused."""
    needs_cluster: ClassVar[bool]
    """Whether a run is planned for a cluster profile, rather than for this machine."""
    shares_disk: ClassVar[bool]
    """Whether the run's directory is made here, before the job starts."""
    poll_seconds: ClassVar[float]
    """How often one process may ask for states without being a burden."""

    def render(self, submission: Submission, given: Given) -> Rendering:
        """Pure: nothing is asked, run or written. UserError for a value that the scheduler would refuse."""
        ...

    def require(self) -> None:
        """UserError where nothing can be submitted from here."""
        ...

    def submit(self, submission: Submission, rendering: Rendering) -> JobHandle:
        """Hand the run over."""
        ...

    def statuses(self, refs: Sequence[JobRef]) -> dict[JobRef, JobStatus]:
        """What the scheduler knows of many jobs, asked at once; those it does not know are left out."""
        ...

    def cancel(self, ref: JobRef) -> None:
        """End a job that has not ended."""
        ...

    def logs(self, ref: JobRef) -> Logs:
        """Where a job's output is."""
        ...

    def names_job(self, text: str) -> bool:
        """Whether a text has the form of this launcher's job ids."""
        ...
