"""The protocol of a launcher: it renders a planned run for a target, submits it, and reports on the job afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol

from llmrecipes.errors import ExitCode
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.hardware.profile import Profile
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.schema import Recipe
from llmrecipes.runfiles import RunFiles

LauncherOptions = Mapping[str, Any]
"""Options of `submit` by their names on the command line, with defaults filled in."""


class JobState(StrEnum):
    """State of a job, the same for every launcher; a requeued job is pending again."""

    PENDING = "pending"
    HELD = "held"
    """Pending until its user or an administrator releases it."""
    RUNNING = "running"
    COMPLETED = "completed"
    SAVED = "saved"
    """It ended with 75 and will not be restarted: the same command resumes it."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The scheduler no longer knows the job, and its run has not recorded how it ended."""

    @property
    def ended(self) -> bool:
        return self not in (JobState.PENDING, JobState.HELD, JobState.RUNNING)


EXIT_CODES = {
    JobState.COMPLETED: int(ExitCode.DONE),
    JobState.SAVED: int(ExitCode.REQUEUE),
    JobState.CANCELLED: int(ExitCode.TERMINATED),
    JobState.HELD: int(ExitCode.STOP),
}
"""Exit codes of jobs if the scheduler reports none; 1 for all other states."""


@dataclass(frozen=True)
class JobRef:
    """Reference to a job, valid in any process: see `launch.record`."""

    launcher: str
    job_id: str
    run_dir: Path


@dataclass(frozen=True)
class JobStatus:
    """Status of a job: `reason` is the scheduler's own state if that is more specific.

    `restarts` counts restarts by the scheduler, if it reports them.
    """

    state: JobState
    exit_code: int | None = None
    reason: str = ""
    restarts: int = 0


@dataclass(frozen=True)
class JobResult:
    """Result of a job, with the last numbers that its run has recorded."""

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
    """Location of a job's output: local files, or a command that prints it."""

    files: tuple[Path, ...] = ()
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """A recipe on a number of nodes, checked.

    `asked` and `cluster` are the user's input. `profile` is None for this machine; `site` is all nodes together.
    """

    asked: tuple[str, ...]
    cluster: str | None
    profile: Profile | None
    site: Cluster
    plan: RunPlan
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
    """A planned run and its directories; all paths are absolute."""

    planned: Planned
    run_id: str
    runs_dir: Path
    data_dir: Path
    options: RunOptions = field(default_factory=RunOptions)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of a local job besides those of this process."""
    prepared: bool = True
    """Whether the data is prepared; False if it is missing, or if only a job can check."""

    @property
    def run_dir(self) -> Path:
        return RunFiles.of(self.runs_dir, self.planned.recipe.name, self.run_id).path

    @property
    def planned_for_cluster(self) -> PlannedForCluster:
        """For launchers with `needs_cluster`."""
        if not isinstance(self.planned, PlannedForCluster):
            raise TypeError("this launcher needs a plan for a cluster profile")
        return self.planned


@dataclass(frozen=True)
class Rendering:
    """What a launcher submits: rendered without side effects, and shown by `--dry-run`.

    Attributes:
        command: the command that submits it.
        text: standard input of the command.
        first: a command that has to run before it; empty: none.
        first_text: standard input of that command.
        shown: human-readable form.
        details: the same for `--json`.
        place: name of the queue; for the preview.
        time_limit: in the scheduler's format; None: the default of the queue.
        has_token: whether the job has `HF_TOKEN`.
        notes: what else the preview shows, by a short name.
        warnings: of the launcher; for the preview.
    """

    command: tuple[str, ...]
    text: str = ""
    first: tuple[str, ...] = ()
    first_text: str = ""
    shown: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    place: Mapping[str, str | None] = field(default_factory=dict)
    time_limit: str | None = None
    has_token: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


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
            timeout: seconds; None: no timeout.
            changed: receives the initial status and every change.

        Returns:
            The state; not a final one after a timeout, or if the job was held after it had started.
        """
        ...

    def cancel(self) -> None:
        """Cancel the job; does nothing if it has ended. The run keeps its checkpoints."""
        ...

    def logs(self) -> Logs: ...

    def result(self) -> JobResult:
        """How the job ended, or its progress."""
        ...


class Launcher(Protocol):
    """A target that runs can be submitted to. `launch.registry` lists all launchers.

    Every method raises UserError if the scheduler's programs are missing, fail or do not answer.
    """

    takes: ClassVar[frozenset[str]]
    """Options of `submit` that this launcher supports besides `JOB_OPTIONS`; the others are rejected."""
    needs_cluster: ClassVar[bool]
    """Whether a run is planned for a cluster profile, rather than for this machine."""
    shares_disk: ClassVar[bool]
    """Whether the run's directory is created here, before the job starts."""
    poll_seconds: ClassVar[float]
    """Seconds between status queries of one process, to limit the load."""

    def render(self, submission: Submission, chosen: LauncherOptions) -> Rendering:
        """Without side effects. UserError for a value that the scheduler would reject."""
        ...

    def require(self) -> None:
        """UserError if nothing can be submitted from this machine."""
        ...

    def submit(self, submission: Submission, rendering: Rendering) -> JobHandle:
        """Submit the run."""
        ...

    def statuses(self, refs: Sequence[JobRef]) -> dict[JobRef, JobStatus]:
        """Status of many jobs, in one query; jobs that the scheduler does not know are omitted."""
        ...

    def cancel(self, ref: JobRef) -> None:
        """End a job that has not ended."""
        ...

    def logs(self, ref: JobRef) -> Logs:
        """Location of a job's output."""
        ...

    def names_job(self, text: str) -> bool:
        """Whether a text has the form of this launcher's job ids."""
        ...
