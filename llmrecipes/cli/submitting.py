"""`llmrecipes submit` and `cancel`: parsing and printing only."""

from __future__ import annotations

import json
import shlex
import sys
import time as clock
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import (
    DATA,
    NO_OVERRIDES,
    RUNS,
    DataOption,
    JsonOption,
    OverridesArgument,
    RecipeArgument,
    RunsOption,
    site_option,
    with_options,
)
from llmrecipes.commandline import command_line
from llmrecipes.errors import UserError
from llmrecipes.launch.launcher_options import OPTIONS

if TYPE_CHECKING:
    from llmrecipes.launch.base import JobHandle, JobResult, JobStatus, Launcher, Logs
    from llmrecipes.workflow.submit import Preview, Submitted

LONGEST_REASON = 200
LAST_LINES = 15
"""Of the log of a job that has failed or is held."""


@with_options(in_jobs=True, launcher_options=OPTIONS, options="launch.run_options.RunOptions")
def submit(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="WHERE",
            help="Submit to slurm, k8s or local (this machine); skypilot with --dry-run prints a task.",
        ),
    ] = "slurm",
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, help="Use N nodes; extra nodes add data-parallel ranks.")
    ] = 1,
    cluster: Annotated[str | None, site_option("Plan for this cluster profile or YAML file.")] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-node",
            metavar="N",
            min=1,
            help="Start N ranks on a node; default: one per GPU, or one without GPUs.",
        ),
    ] = None,
    launcher_options: Any = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run-id", metavar="ID", help="Start or resume the run with this id; default: a new id."),
    ] = None,
    options: Any = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the job and exit with its code; Ctrl-C leaves it running.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; submit nothing.")] = False,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Submit a recipe to a scheduler, if its plan fits the nodes."""
    from llmrecipes.console import setup_logging
    from llmrecipes.launch.registry import launcher
    from llmrecipes.workflow.run import Paths
    from llmrecipes.workflow.submit import plan_for, plan_on_this_machine
    from llmrecipes.workflow.submit import submit as hand_over

    setup_logging()
    place = launcher(to)
    _require_options_of(to, place, launcher_options)
    if dry_run and wait:
        raise UserError("not valid with --dry-run", where="--wait", rule="a dry run submits nothing", fix="remove it")
    if cluster is None and not place.needs_cluster:
        planned = plan_on_this_machine(recipe, overrides, nodes, ranks_per_node)
    else:
        planned = plan_for(recipe, overrides, cluster, nodes, ranks_per_node, runs_dir)
    done = hand_over(
        planned, place, {name: value for name, value in launcher_options.items() if name in place.takes},
        Paths(runs_dir, data_dir), run_id=run_id, options=options, dry_run=dry_run,
        prepare=True,
    )  # fmt: skip
    return _as_json(done, wait) if as_json else _as_text(done, wait, dry_run)


def _as_json(done: Submitted, wait: bool) -> int:
    from llmrecipes.workflow.submit import preview

    result = _wait(done.job, _tell) if wait and done.job is not None else None
    state = None if done.job is None else result.state if result else done.job.state
    values = {**done.as_dict(state), "summary": preview(done).as_dict()}
    print(json.dumps(values if result is None else {**values, "result": result.as_dict()}, indent=2))
    return 0 if result is None else result.exit_code


def _as_text(done: Submitted, wait: bool, dry_run: bool) -> int:
    from llmrecipes.workflow.submit import preview

    if done.job is None:
        print(done.rendering.shown, end="")
    else:
        _print_job(done, done.job)
    _print_preview(preview(done), dry_run)
    if done.job is None or not wait:
        return 0
    result = _wait(done.job, _tell)
    if result.state in ("failed", "held"):
        _print_ends(done.job.logs())
    if result.state == "held":
        print(f"the job waits until it is released: scontrol release {done.job.ref.job_id}", file=sys.stderr)
    print(_summary(result))
    return result.exit_code


def cancel(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_JOB",
            help="Run directory, recipe/run-id, run id, or job id.",
            autocompletion=completion.runs,
        ),
    ],
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Cancel the job of a run; its checkpoints are kept."""
    from llmrecipes.workflow.submit import find_job

    job = find_job(name, runs_dir)
    before = job.state
    job.cancel()
    if as_json:
        values = {"job_id": job.ref.job_id, "launcher": job.ref.launcher, "run_dir": str(job.ref.run_dir)}
        print(json.dumps({**values, "state": before, "cancelled": not before.ended}))
    elif before.ended:
        print(f"job {job.ref.job_id} has already ended: {before}")
    else:
        print(f"job {job.ref.job_id} is being cancelled (was {before})")


def _require_options_of(to: str, place: Launcher, launcher_options: dict[str, Any]) -> None:
    """Raise UserError for an option of a different launcher, which would have no effect."""
    foreign = [f"--{name}" for name, value in launcher_options.items() if value is not None and name not in place.takes]
    if foreign:
        raise UserError(f"not valid with --to {to}", where=foreign[0], rule="this option is for a different launcher",
                        fix="remove it")  # fmt: skip


def _wait(job: JobHandle, changed: Callable[[JobStatus], None]) -> JobResult:
    """The result of a job; Ctrl-C only stops waiting."""
    try:
        job.wait(changed=changed)
    except KeyboardInterrupt:
        print(
            f"job {job.ref.job_id} keeps running; to cancel it: {command_line('cancel', job.ref.run_dir)}",
            file=sys.stderr,
        )
        raise
    return job.result()


def _tell(status: JobStatus) -> None:
    """Print to stderr, so that stdout is the result."""
    restarts = f", restart {status.restarts}" if status.restarts else ""
    reason = f" ({status.reason[:LONGEST_REASON]})" if status.reason else ""
    print(f"{clock.strftime('%H:%M:%S')} {status.state}{restarts}{reason}", file=sys.stderr, flush=True)


def _summary(result: JobResult) -> str:
    numbers = {"loss": result.loss, "valid loss": result.valid_loss}
    losses = "".join(f", {name} {value:.4f}" for name, value in numbers.items() if value is not None)
    steps = "" if result.step is None else f" at step {result.step}/{result.total}"
    return f"{result.state}{steps}, exit code {result.exit_code}{losses}"


def _print_ends(logs: Logs) -> None:
    """Print the last lines of a job's files to stderr."""
    from llmrecipes.tracking.run_list import tail

    for path in logs.files:
        for line in tail(path)[-LAST_LINES:]:
            print(f"  {line.decode('utf-8', 'replace')}", file=sys.stderr)
        print(f"log  {path}", file=sys.stderr)


def _print_job(done: Submitted, job: JobHandle) -> None:
    planned = done.planned
    logs = job.logs()
    print(f"job {job.ref.job_id}: {_count(planned.plan.world_size, 'rank')} on {_count(planned.nodes, 'node')}")
    print(f"run  {done.submission.run_dir}" if not logs.command else f"run  {done.submission.run_id}")
    for log in (*map(str, logs.files), *([shlex.join(logs.command)] if logs.command else [])):
        print(f"log  {log}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _print_preview(preview: Preview, dry_run: bool) -> None:
    """Print to stderr, so that a dry run's output can be piped; after a submission, only the layout and warnings."""
    sys.stdout.flush()
    chosen = [] if preview.layout is None else [f"layout auto: {preview.layout}"]
    lines = preview.lines() if dry_run else (*chosen, *(f"warning: {text}" for text in preview.warnings))
    for line in lines:
        print(line, file=sys.stderr)
