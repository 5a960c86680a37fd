"""The options of a Slurm job, and what sbatch would reject, misinterpret or accept against the plan."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.hardware.profile import Profile
from llmrecipes.hardware.slurm_words import TIME, TIME_RULE, gpus_of, limit_seconds
from llmrecipes.launch.run_options import RunOptions

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@=+,-]*")
RUNTIMES = ("pyxis", "apptainer", "none")
EARLY = 60
"""Seconds by which Slurm may send its warning before it is due."""


@dataclass(frozen=True)
class SlurmOptions:
    """Options of the user; None is the default of the profile or the site.

    `image` is for srun's `--container-image` or Apptainer. The run saves `warning` seconds before the time limit.
    `more` are further options of sbatch, each as one `--name=value`. `python` runs the ranks. `prepare_partition` is
    that of the job that tokenizes, on `prepare_nodes` nodes. `run` is passed on to the ranks.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    runtime: str | None = None
    image: str | None = None
    python: str | None = None
    warning: int | None = None
    prepare_partition: str | None = None
    prepare_nodes: int = 1
    max_restarts: int | None = None
    run: RunOptions = field(default_factory=RunOptions)
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlurmRequest:
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


def check(request: SlurmRequest, profile: Profile, options: SlurmOptions, ranks_per_node: int) -> None:
    """Reject values that sbatch would reject or misinterpret, and those that contradict the plan.

    Args:
        request, profile: of the run.
        options: of the user.
        ranks_per_node: planned.

    Raises:
        UserError: the first such value.
    """
    for name in ("partition", "account", "qos", "prepare_partition"):
        value = getattr(options, name)
        if value is not None and not WORD.fullmatch(value):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{value!r}", where=option, rule="only letters, digits and . _ : / @ = + , - are allowed")
    if options.time is not None and not TIME.fullmatch(options.time):
        raise UserError(f"{options.time!r}", where="--time", rule=TIME_RULE, fix="--time 8:00:00")
    _check_container(profile, options)
    for where, option in _sbatch_options(profile, options):
        _check_sbatch(where, option)
    _check_gpus(profile, options, request.nodes, ranks_per_node)
    if options.warning is not None:
        where, limit = time_limit(profile, options)
        require_time(limit, options.warning, where)
    for path in (request.runs_dir, request.data_dir):
        _check_path(path, mounted=bool(options.image))


def _check_container(profile: Profile, options: SlurmOptions) -> None:
    """Refuse an image or a runtime that cannot be used."""
    runtime = options.runtime or profile.slurm.container_runtime
    if options.runtime is not None and options.runtime not in RUNTIMES:
        raise UserError(f"{options.runtime!r}", where="--runtime", rule=f"one of {', '.join(RUNTIMES)}")
    if options.image is None:
        if options.runtime not in (None, "none"):
            raise UserError(f"{runtime} without an image", where="--runtime", fix="--image IMAGE, or --runtime none")
        return
    if runtime == "none":
        raise UserError(
            f"{options.image!r}, but cluster profile {profile.name} has no container runtime",
            where="--image",
            fix="--runtime pyxis or --runtime apptainer, if the site has it",
        )
    if options.image.startswith("-") or not _is_plain(options.image):
        raise UserError(f"{options.image!r}", where="--image", rule="must be one word of printable characters")
    _check_image(options.image, runtime)


def _check_path(path: Path, *, mounted: bool) -> None:
    """Refuse a folder that Slurm's --output, or a container, cannot name."""
    if not str(path).isprintable() or "\\" in str(path):
        raise UserError(
            "not printable",
            where=f"{str(path)!r}",
            rule="paths in Slurm's --output must be printable and have no backslash",
        )
    if mounted and set(str(path)) & set(":,"):
        raise UserError(
            "cannot be mounted", where=str(path), rule="paths mounted into a container must not contain : or ,"
        )


REFUSED = {
    "array": (
        "a run is a single job: the tasks of an array would share its run directory",
        "submit every run separately",
    ),
    "nodes": ("the plan is made for the nodes of --nodes", "--nodes N"),
    "ntasks": ("each step of the job starts its own tasks", "--ranks-per-node N"),
    "ntasks-per-node": ("each step of the job starts its own tasks", "--ranks-per-node N"),
    "output": ("the log belongs to the run's directory", "--runs-dir DIR"),
    "signal": ("the job needs the planned warning, as USR1, to save before its time limit", "--warning S"),
    "test-only": ("nothing would be submitted", "--dry-run"),
    "wait": ("submit returns when the job is queued", "--wait"),
    "wrap": ("the job runs slurm/train.sbatch", "remove it"),
}
"""sbatch options that contradict what submit sets, with the rule and the fix; sbatch takes beginnings of names too."""


def _sbatch_options(profile: Profile, options: SlurmOptions) -> list[tuple[str, str]]:
    """Further options with the key or option that they come from, in the order in which sbatch gets them."""
    site = [(f"cluster profile {profile.name}: slurm.sbatch", option) for option in profile.slurm.sbatch]
    return [*site, *(("--sbatch", option) for option in options.more)]


def value_of(name: str, options: Iterable[str]) -> str | None:
    """The value of an sbatch option, the last one given; empty for one without a value; None if it is not given."""
    values = [value for word, _, value in (option[2:].partition("=") for option in options) if word == name]
    return values[-1] if values else None


def time_limit(profile: Profile, options: SlurmOptions) -> tuple[str, str | None]:
    """Where the time limit of the job comes from, and its value; None: the partition's."""
    for where, option in reversed(_sbatch_options(profile, options)):
        if (value := value_of("time", [option])) is not None:
            return where, value
    if options.time is not None:
        return "--time", options.time
    return f"cluster profile {profile.name}: slurm.time", profile.slurm.time


def require_time(limit: str | None, warning: int, where: str) -> None:
    """Refuse a time limit that leaves no time before the warning: the job would save nothing and be requeued forever.

    Args:
        limit: in Slurm's notation; None: unknown.
        warning: seconds before the limit.
        where: the option or key of the limit.

    Raises:
        UserError: the limit is too short.
    """
    seconds = None if limit is None else limit_seconds(limit)
    needed = warning + EARLY
    if seconds is not None and seconds <= needed:
        raise UserError(
            f"{limit} is {seconds} s, but the job is warned {warning} s before its time limit",
            where=where,
            rule=f"the limit must be longer than the warning and the {EARLY} s by which Slurm may send it early",
            fix=f"--time {needed // 60 + 10}, or a shorter --warning",
        )


def _check_sbatch(where: str, option: str) -> None:
    name = option[2:].partition("=")[0]
    if not option.startswith("--") or not name or not option.isprintable():
        raise UserError(f"{option!r}", where=where, rule="must be a single sbatch option, as --name=value")
    value = value_of("time", [option])
    if value is not None and not TIME.fullmatch(value):
        raise UserError(f"{option!r}", where=where, rule=TIME_RULE, fix="--time 8:00:00")
    for refused, (rule, fix) in REFUSED.items():
        if refused.startswith(name):
            raise UserError(option, where=where, rule=rule, fix=fix)


def _check_gpus(profile: Profile, options: SlurmOptions, nodes: int, ranks_per_node: int) -> None:
    """Refuse options that request fewer GPUs than the planned ranks need."""
    if not profile.gpus_per_node:
        return
    for where, option in _sbatch_options(profile, options):
        name, _, value = option[2:].partition("=")
        gpus = {"gres": gpus_of(value), "gpus-per-node": gpus_of(f"gpu:{value}"), "gpus": gpus_of(f"gpu:{value}")}
        if name not in gpus or (name == "gres" and profile.slurm.gres is None and gpus[name] is None):
            continue
        wanted = ranks_per_node * (nodes if name == "gpus" else 1)
        if (gpus[name] or 0) < wanted:
            raise UserError(
                f"{option} for {wanted} ranks {'of the job' if name == 'gpus' else 'per node'}",
                where=where,
                rule="every rank has a GPU, and this option replaces slurm.gres of the profile",
                fix="remove it, or --ranks-per-node N",
            )


def _check_image(image: str, runtime: str) -> None:
    if runtime == "pyxis" and image.endswith(".sqsh") and not image.startswith("/"):
        raise UserError(
            f"{image!r} with pyxis",
            where="--image",
            rule="a .sqsh file needs an absolute path; pyxis looks up other names in a registry",
            fix=f"--image {Path(image).absolute()}",
        )
    suffix = {"pyxis": ".sif", "apptainer": ".sqsh"}.get(runtime)
    if suffix is not None and image.endswith(suffix):
        raise UserError(
            f"{image!r} with {runtime}",
            where="--image",
            rule="pyxis takes REGISTRY#NAME:TAG or a .sqsh file, Apptainer a .sif file or docker://NAME:TAG",
        )


def _is_plain(text: str) -> bool:
    return text.isprintable() and not set(text) & set(" \"'`$\\;|&<>()")
