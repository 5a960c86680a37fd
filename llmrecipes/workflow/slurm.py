"""What runs inside a Slurm job, started by slurm/train.sbatch: `begin` once, then `rank` in every task.

    python -m llmrecipes.workflow.slurm begin … -- RECIPE [KEY=VALUE]...
    python -m llmrecipes.workflow.slurm rank JOB.json

`begin` prints the ranks per node and the path of the file that ranks read, or nothing if the run has finished. Both
exit with this program's exit codes, except for ranks that have saved: they exit with 0, because Slurm ends all tasks
when one fails, and the first rank writes its code to `logs/outcome`, which is `started` until then.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel, ConfigDict

from llmrecipes.console import setup_logging
from llmrecipes.doctor.doctor_log import adopt
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware import binding
from llmrecipes.hardware.cluster import detect
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine
from llmrecipes.launch import record
from llmrecipes.launch.base import JobRef
from llmrecipes.launch.environment import missing, threads
from llmrecipes.launch.ranks import Rank, from_slurm
from llmrecipes.launch.run_options import RunOptions, add_arguments
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.redact import guard_streams
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow.restarts import newest_step, require_progress
from llmrecipes.workflow.run import Paths, TrainOptions, is_prepared
from llmrecipes.workflow.start import Finished, Machine, prepare_start

JOB, OUTCOME = "job.json", "outcome"
STARTED = "started"
"""In the file of the outcome while ranks run: without it, an exit code of srun comes from before they started."""
MAX_RESTARTS = 100
HELD = (signal.SIGUSR1, signal.SIGTERM)


class SlurmJob(BaseModel):
    """Parameters of a job's ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunSpec
    environment: dict[str, str]
    """Variables of every rank, except those it already has."""
    bind: bool = False
    """Whether ranks bind themselves to the cores and memory next to their GPU."""


def begin(arguments: argparse.Namespace, variables: Mapping[str, str]) -> tuple[int, Path] | None:
    """Check the run against the nodes, prepare its data, and write the parameters of the ranks.

    Args:
        arguments: arguments of `begin`.
        variables: the environment, with Slurm's variables.

    Returns:
        Ranks per node and the file, or None if the run has finished.

    Raises:
        UserError: the run cannot be started or resumed; with `ExitCode.STOP` where restarts make no progress.
    """
    recipe = load(arguments.recipe, arguments.overrides).recipe
    profile = None if arguments.cluster is None else load_profile(arguments.cluster)
    on_cpus = arguments.ranks_by_gpus and profile is not None and not profile.gpus_per_node
    ranks_per_node = 1 if on_cpus else arguments.ranks_per_node
    ranks = arguments.nodes * ranks_per_node
    cluster = detect().times(arguments.nodes) if profile is None else machine(profile, arguments.nodes)
    paths = Paths(arguments.runs_dir, arguments.data_dir)
    options = TrainOptions(run_id=arguments.run_id, run=RunOptions.parsed(arguments))
    restart = int(variables.get("SLURM_RESTART_COUNT") or 0)
    job_id = variables.get("SLURM_JOB_ID", "")

    examined = paths.runs_dir / f".doctor-{job_id}.jsonl"  # by train.sbatch, which does not know the recipe's name

    def check(spec: RunSpec, plan: RunPlan) -> None:
        step = newest_step(spec.run, spec.recipe, plan.world_size)
        require_progress(spec.run, job_id, restart, step, arguments.max_restarts)
        if plan.cluster.device == "cuda" and not arguments.prepare:
            require_prepared(recipe, paths.data_dir)

    place = Machine(cluster, ranks, arguments.nodes, profile)
    try:
        ready = prepare_start(recipe, paths, options, place, _to_stderr, skip_finished=True, check=check)
    except Finished:
        examined.unlink(missing_ok=True)
        return None
    tags = {
        "slurm.job_id": job_id,
        "slurm.restart_count": str(restart),
        "slurm.nodes": variables.get("SLURM_JOB_NODELIST", ""),
    }
    # A profile has its own number of cores.
    omp_threads = threads(int(variables.get("SLURM_CPUS_ON_NODE") or 1), ranks_per_node, on_gpus=ready.spec.on_gpus)
    job = SlurmJob(
        run=ready.spec.model_copy(update={"restart": restart, "tags": tags}),
        environment={"OMP_NUM_THREADS": str(omp_threads), **ready.variables},
        bind=arguments.bind,
    )
    logs = ready.spec.run.logs
    adopt(examined, ready.spec.run)
    (logs / OUTCOME).unlink(missing_ok=True)
    path = (logs / JOB).resolve()
    path.write_text(job.model_dump_json(indent=2) + "\n", "utf-8")
    record_job(ready.spec.run.path, job_id)
    return ranks_per_node, path


def record_job(run_dir: Path, job_id: str) -> None:
    """Record a job that was submitted with sbatch itself, so that `runs` and `cancel` know it."""
    recorded = record.read(run_dir)
    if job_id and (recorded is None or recorded.ref.job_id.partition(";")[0] != job_id):
        record.write(JobRef("slurm", job_id, run_dir))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def require_prepared(recipe: Recipe, data_dir: Path) -> None:
    """Refuse to tokenize while the GPUs of a job wait.

    Raises:
        UserError: the data is not prepared.
    """
    if not is_prepared(recipe, data_dir):
        raise UserError(
            f"the data of recipe {recipe.name} is not prepared in {data_dir}",
            where="data",
            rule="text is tokenized on CPUs, not while the GPUs of a job wait",
            fix="sbatch slurm/prepare.sbatch RECIPE, then this job; or --prepare yes, to tokenize within it",
        )


def rank(path: Path) -> NoReturn:
    """Run one rank of a job, and end this process."""
    job = SlurmJob.model_validate_json(path.read_text("utf-8"))
    identity = from_slurm(os.environ)
    if identity.rank == 0:
        (path.parent / OUTCOME).write_text(f"{STARTED}\n", "utf-8")
    # All of this must be set before torch is loaded.
    os.environ.update(missing(job.environment, os.environ))
    os.environ.update(identity.variables())
    setup_logging(rank=identity.rank)
    if job.bind:
        bind(identity)
    from llmrecipes.train.rank import leave, process_exit_code
    from llmrecipes.train.worker import run

    code = process_exit_code(run, job.run)
    if identity.rank == 0:
        (path.parent / OUTCOME).write_text(f"{code}\n", "utf-8")
    leave(ExitCode.DONE if code == ExitCode.REQUEUE else code)


def bind(this: Rank) -> None:
    """Bind this rank next to its GPU. All ranks of the first node say how, and one of another node if it is not."""
    bound = binding.bind(this.local_rank, this.local_world_size)
    if this.rank < this.local_world_size or (this.local_rank == 0 and not bound.cores):
        print(f"rank {this.rank}: {bound}", flush=True)


def hold_signals() -> None:
    """Block the signals that stop a run until training handles them.

    The batch script has them ignored until here, and they are ignored again after training: a rank that is closing must
    not be killed by a warning that is repeated. Linux keeps a blocked signal even if it is ignored.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


def main(arguments: Sequence[str]) -> int:
    """Run `begin` or `rank`; a `UserError` is printed as one message."""
    parser = argparse.ArgumentParser(prog="python -m llmrecipes.workflow.slurm", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("begin", allow_abbrev=False)
    first.add_argument("--nodes", type=int, required=True)
    first.add_argument("--ranks-per-node", type=int, required=True)
    first.add_argument("--ranks-by-gpus", action="store_true")
    first.add_argument("--runs-dir", type=Path, required=True)
    first.add_argument("--data-dir", type=Path, required=True)
    first.add_argument("--run-id", required=True)
    first.add_argument("--cluster")
    first.add_argument("--max-restarts", type=int, default=MAX_RESTARTS)
    add_arguments(first)
    first.add_argument("--bind", action="store_true")
    first.add_argument("--prepare", action="store_true")
    first.add_argument("recipe")
    first.add_argument("overrides", nargs="*")
    commands.add_parser("rank", allow_abbrev=False).add_argument("job", type=Path)
    parsed = parser.parse_args(arguments)
    try:
        if parsed.command == "rank":
            hold_signals()
            rank(parsed.job)
        setup_logging()
        with redirect_stdout(sys.stderr):
            begun = begin(parsed, os.environ)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)
    if begun is None:
        print("the run has already finished; nothing to do", file=sys.stderr)
        return ExitCode.DONE
    print(*begun)
    return ExitCode.DONE


if __name__ == "__main__":
    guard_streams()
    sys.exit(main(sys.argv[1:]))
