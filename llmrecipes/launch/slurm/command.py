"""sbatch's command line for a run: pure rendering, from the plan, the cluster profile and the user's options.

The batch script, slurm/train.sbatch, is a file that does not change; everything that varies is an argument.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.hardware.profile import Profile
from llmrecipes.launch.record import EXIT_FILE
from llmrecipes.plan.derive import Plan

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@=+,-]*")
TIME = re.compile(r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+(:\d+)?)?|UNLIMITED|INFINITE", re.IGNORECASE)
TIME_RULE = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"
)
WARNING_SECONDS = 180
RUNTIMES = ("pyxis", "apptainer", "none")


@dataclass(frozen=True)
class Options:
    """Options of the user; None is the default of the profile or the site.

    `image` is for srun's `--container-image` or Apptainer. The run saves `warning` seconds before the time limit.
    `more` are further options of sbatch, each as one `--name=value`. `python` runs the ranks.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    runtime: str | None = None
    image: str | None = None
    python: str | None = None
    warning: int = WARNING_SECONDS
    max_restarts: int | None = None
    accept_changes: bool = False
    allow_socket: bool = False
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """A run and its nodes.

    `asked` is the recipe and its overrides, and `cluster` the profile, as the user wrote them; paths are absolute.
    """

    asked: tuple[str, ...]
    cluster: str
    nodes: int
    run_id: str
    runs_dir: Path
    data_dir: Path
    run_dir: Path


def command(request: Request, plan: Plan, profile: Profile, options: Options, script: Path) -> tuple[str, ...]:
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
    check(request, profile, options)
    site = profile.slurm
    runtime = options.runtime or (site.container_runtime if options.image else "none")
    wanted = {
        "job-name": plan.recipe.name,
        "nodes": str(request.nodes),
        "partition": options.partition or site.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "gres": site.gres,
        "constraint": site.constraint,
        "switches": f"{site.switches}@{site.switches_wait}" if site.switches else None,
        "segment": None if site.segment is None else str(_segment(request.nodes, site.segment)),
        "signal": f"USR1@{options.warning}",
        # Slurm does not create its directory, and % starts a replacement symbol.
        "output": str(request.run_dir / "logs" / "slurm-").replace("%", "%%") + "%j.out",
    }
    own: dict[str, str | None] = {
        "cluster": request.cluster,
        "runtime": runtime,
        "image": options.image,
        "python": options.python,
        "ranks-per-node": str(plan.layout.world_size // request.nodes),
        "run-id": request.run_id,
        "runs-dir": str(request.runs_dir),
        "data-dir": str(request.data_dir),
        "exit-file": str(request.run_dir / EXIT_FILE),
        "max-restarts": None if options.max_restarts is None else str(options.max_restarts),
        "accept-changes": "yes" if options.accept_changes else None,
        "allow-socket": "yes" if options.allow_socket else None,
    }
    mounts = [word for mount in site.mounts for word in ("--mount", _mount(mount))] if runtime != "none" else []
    return (
        "sbatch",
        "--parsable",
        *(f"--{name}={value}" for name, value in wanted.items() if value is not None),
        *options.more,
        str(script),
        *(word for name, value in own.items() if value is not None for word in (f"--{name}", value)),
        *mounts,
        *request.asked,
    )


def as_text(words: Sequence[str]) -> str:
    """The command for a shell, one option per line; values are quoted only here."""
    lines = [words[0]]
    for word, before in zip(words[1:], words, strict=False):
        starts_line = word.startswith("--") or not before.startswith("--") or "=" in before or before == "--parsable"
        lines.append(("\\\n    " if starts_line else "") + shlex.quote(word))
    return " ".join(lines)


def check(request: Request, profile: Profile, options: Options) -> None:
    """Reject values that sbatch would reject or misinterpret.

    Raises:
        UserError: the first such value.
    """
    for name in ("partition", "account", "qos"):
        value = getattr(options, name)
        if value is not None and not WORD.fullmatch(value):
            raise UserError(f"{value!r}", where=f"--{name}", rule="letters, digits and . _ : / @ = + , - only")
    if options.time is not None and not TIME.fullmatch(options.time):
        raise UserError(f"{options.time!r}", where="--time", rule=TIME_RULE, fix="--time 8:00:00")
    if options.runtime is not None and options.runtime not in RUNTIMES:
        raise UserError(f"{options.runtime!r}", where="--runtime", rule=f"one of {', '.join(RUNTIMES)}")
    runtime = options.runtime or profile.slurm.container_runtime
    if options.runtime not in (None, "none") and not options.image:
        raise UserError(f"{runtime} without an image", where="--runtime", fix="--image IMAGE, or --runtime none")
    if options.image and runtime == "none":
        raise UserError(
            f"{options.image!r}, but cluster profile {profile.name} has no container runtime",
            where="--image",
            fix="--runtime pyxis or --runtime apptainer, where the site has it",
        )
    if options.image is not None and (options.image.startswith("-") or not _is_plain(options.image)):
        raise UserError(f"{options.image!r}", where="--image", rule="one word of printable characters")
    for option in options.more:
        name = option.partition("=")[0]
        if not option.startswith("--") or not option.isprintable():
            raise UserError(f"{option!r}", where="--sbatch", rule="one option of sbatch, as --name=value")
        if name == "--array":
            raise UserError(
                option,
                where="--sbatch",
                rule="a training is one job: the tasks of an array would share its run directory",
                fix="submit each run by itself",
            )
    for path in (request.runs_dir, request.data_dir):
        if not str(path).isprintable() or "\\" in str(path):
            raise UserError("not printable", where=f"{str(path)!r}",
                            rule="paths in Slurm's --output are printable and have no backslash")  # fmt: skip
        if runtime != "none" and options.image and set(str(path)) & set(":,"):
            raise UserError("cannot be mounted", where=str(path),
                            rule="a path that is mounted into a container has neither : nor ,")  # fmt: skip


def _segment(nodes: int, segment: int) -> int:
    """The largest size up to `segment` that divides the number of nodes, as Slurm requires."""
    return next(size for size in range(min(nodes, segment), 0, -1) if nodes % size == 0)


def _mount(mount: str) -> str:
    return mount if ":" in mount else f"{mount}:{mount}"


def _is_plain(text: str) -> bool:
    return text.isprintable() and not set(text) & set(" \"'`$\\;|&<>()")
