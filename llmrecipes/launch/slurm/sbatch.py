"""sbatch's command line for a run: pure rendering, from the plan, the cluster profile and the user's options.

The batch script, slurm/train.sbatch, is a file that does not change; everything that varies is an argument.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.hardware.profile import Profile, Slurm
from llmrecipes.launch.slurm.slurm_options import SlurmOptions, SlurmRequest, check
from llmrecipes.plan.check import gib
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.derived.degrees import elastic_nodes
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.run_list import LongestTimes, measured

SHORTEST = 120
"""Seconds: a step, the exit of all ranks, and the end of the job."""
LONGEST = 65535
"""sbatch takes no more."""
SAFETY = 2.0
"""A file system that others use, too, may be slower than it was."""
RUNS = 5
"""Earlier runs of a recipe that are looked at, newest first."""
GB = 1e9
OF_GPU_NODES = ("gres", "gpu", "constraint", "nodelist", "nodefile", "partition", "switches", "segment", "dependency")
"""Beginnings of further options of sbatch that are not for the nodes on which a job tokenizes."""


@dataclass(frozen=True)
class Notice:
    """Seconds before the time limit, and where they come from."""

    seconds: int
    reason: str


def notice(plan: RunPlan, profile: Profile, runs_dir: Path, fixed: int | None) -> Notice:
    """The time at which Slurm warns a job.

    Args:
        plan: of the run.
        profile: with the bandwidth of its file system.
        runs_dir: runs of the same recipe there are asked how long their steps and saves took.
        fixed: the user's own seconds.
    """
    if fixed is not None:
        return Notice(fixed, "--warning")
    earlier = _longest(measured(runs_dir / plan.recipe.name, RUNS))
    if earlier is None:
        seconds = plan.checkpoint_bytes / (profile.storage_gb_per_s * GB)
        reason = f"planned, {gib(plan.checkpoint_bytes)} at {profile.storage_gb_per_s:g} GB/s"
        return _warning(seconds, 0.0, reason)
    return _warning(earlier.save_seconds, earlier.step_seconds, f"measured in {earlier.run_id}")


def _longest(runs: Iterable[LongestTimes]) -> LongestTimes | None:
    return max(runs, key=lambda run: run.save_seconds + run.step_seconds, default=None)


def _warning(save: float, step: float, source: str) -> Notice:
    needed = SHORTEST + math.ceil(SAFETY * (save + step))
    return Notice(min(needed, LONGEST), f"a save takes {save:.0f} s ({source})")


def command(
    request: SlurmRequest, plan: RunPlan, profile: Profile, options: SlurmOptions, script: Path
) -> tuple[str, ...]:
    """The words of the sbatch command.

    Args:
        request: the run.
        plan: made for all ranks of `request.nodes`.
        profile: the site.
        options: of the user.
        script: slurm/train.sbatch.

    Raises:
        UserError: a value that Slurm would reject.
    """
    ranks_per_node = plan.world_size // request.nodes
    check(request, profile, options, ranks_per_node)
    site = profile.slurm
    counts = elastic_nodes(plan.recipe, request.nodes, ranks_per_node)
    wanted = {
        "job-name": f"{plan.recipe.name}/{request.run_id}",
        "nodes": _node_counts(counts),
        "partition": options.partition or site.partition,
        **_charged(site, options),
        "gres": site.gres,
        "constraint": site.constraint,
        "switches": _switches(request.nodes, site),
        "segment": None if site.segment is None else str(_segment(math.gcd(*counts), site.segment)),
        # B: to the batch script, which passes it on.
        "signal": None if options.warning is None else f"B:USR1@{options.warning}",
        "output": _output(request, "slurm"),
    }
    flags = {
        "cluster": request.cluster,
        **_started(site, options),
        "ranks-per-node": str(ranks_per_node),
        "run-id": request.run_id,
        "runs-dir": str(request.runs_dir),
        "data-dir": str(request.data_dir),
        "exit-file": str(RunFiles(request.run_dir).exit_code),
        "bad-nodes": str(RunFiles(request.run_dir).bad_nodes),
        "min-nodes": str(counts[0]) if len(counts) > 1 else None,
        "max-restarts": None if options.max_restarts is None else str(options.max_restarts),
    }
    return (
        "sbatch",
        "--parsable",
        *(f"--{name}={value}" for name, value in wanted.items() if value is not None),
        *site.sbatch,
        *options.more,
        str(script),
        *_flags(flags),
        *options.run.words("yes"),
        *_inside(request, profile, options),
    )


def prepare_command(request: SlurmRequest, profile: Profile, options: SlurmOptions, script: Path) -> tuple[str, ...]:
    """The words of the sbatch command of a job that tokenizes, on nodes without GPUs.

    Args:
        request, profile, options: of the run that needs the data, already checked.
        script: slurm/prepare.sbatch.
    """
    site = profile.slurm
    elsewhere = options.prepare_partition or site.cpu_partition
    if elsewhere is not None:  # where limits of the profile's partition do not hold
        site = site.model_copy(update={"qos": None, "time": None})
    wanted = {
        "job-name": f"{RunFiles(request.run_dir).recipe_name}/{request.run_id}-prepare",
        "partition": elsewhere or options.partition or site.partition,
        **_charged(site, options),
        "mem": "0",
        "nodes": str(options.prepare_nodes) if options.prepare_nodes > 1 else None,
        "output": _output(request, "prepare"),
    }
    return (
        "sbatch",
        "--parsable",
        "--exclusive",
        *(f"--{name}={value}" for name, value in wanted.items() if value is not None),
        *(word for word in (*site.sbatch, *options.more) if not word[2:].partition("=")[0].startswith(OF_GPU_NODES)),
        str(script),
        *_flags({**_started(site, options), "data-dir": str(request.data_dir)}),
        *_inside(request, profile, options),
    )


def _charged(site: Slurm, options: SlurmOptions) -> dict[str, str | None]:
    """What a job is charged to, and how long it may run."""
    return {
        "account": options.account or site.account,
        "qos": options.qos or site.qos,
        "time": options.time or site.time,
    }


def _runtime(site: Slurm, options: SlurmOptions) -> str:
    return options.runtime or (site.container_runtime if options.image else "none")


def _started(site: Slurm, options: SlurmOptions) -> dict[str, str | None]:
    """Options of both batch scripts: how Python is started."""
    return {
        "runtime": _runtime(site, options),
        "image": options.image,
        "python": options.python,
    }


def _flags(values: Mapping[str, str | None]) -> Iterator[str]:
    """Options of a batch script."""
    for name, value in values.items():
        if value is not None:
            yield from (f"--{name}", value)


def _inside(request: SlurmRequest, profile: Profile, options: SlurmOptions) -> Iterator[str]:
    """The last options of both batch scripts: mounts and lines of the shell; and the recipe."""
    site = profile.slurm
    if _runtime(site, options) != "none":
        for mount in site.mounts:
            yield from ("--mount", mount if ":" in mount else f"{mount}:{mount}")
    for line in site.setup:
        yield from ("--setup", line)
    yield from request.asked


def after(words: Sequence[str], job: str) -> tuple[str, ...]:
    """A command of sbatch whose job starts when another has succeeded, and is cancelled when that fails."""
    return (*words[:2], f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes", *words[2:])


def script_text(folder: Path, words: Sequence[str], first: Sequence[str]) -> str:
    """The command for a shell, which does the same as `submit`.

    Args:
        folder: of the logs; Slurm does not create it.
        words: of the run's sbatch.
        first: of the sbatch that tokenizes; empty: none.
    """
    lines = [f"mkdir -p {shlex.quote(str(folder))}"]
    if first:
        lines.append(f"prepare=$({as_text(first)})")
        waiting = after(words, "ID")
        lines.append(as_text(waiting).replace(waiting[2], waiting[2].replace(":ID", ":${prepare%%;*}"), 1))
    else:
        lines.append(as_text(words))
    return "\n".join(lines) + "\n"


def as_text(words: Sequence[str]) -> str:
    """The command for a shell, one option per line; values are quoted only here."""
    lines = [words[0]]
    for word, before in zip(words[1:], words, strict=False):
        starts_line = word.startswith("--") or not before.startswith("--") or "=" in before or before == "--parsable"
        lines.append(("\\\n    " if starts_line else "") + shlex.quote(word))
    return " ".join(lines)


def _output(request: SlurmRequest, name: str) -> str:
    """The log, whose directory Slurm does not create; % starts a replacement symbol."""
    return str(RunFiles(request.run_dir).logs / f"{name}-").replace("%", "%%") + "%j.out"


def _node_counts(counts: tuple[int, ...]) -> str:
    """The value of --nodes: a number, a range, or a list, which Slurm knows since 23.02."""
    if len(counts) > 1 and counts == tuple(range(counts[0], counts[-1] + 1)):
        return f"{counts[0]}-{counts[-1]}"
    return ",".join(map(str, counts))


def _switches(nodes: int, site: Slurm) -> str | None:
    """The value of --switches: as few as the nodes need."""
    count = site.switches
    if count is None and site.nodes_per_switch is not None and nodes > 1:
        count = -(-nodes // site.nodes_per_switch)
    return None if count is None else f"{count}@{site.switches_wait}"


def _segment(nodes: int, segment: int) -> int:
    """The largest size up to `segment` that divides the number of nodes, as Slurm requires."""
    return next(size for size in range(min(nodes, segment), 0, -1) if nodes % size == 0)
