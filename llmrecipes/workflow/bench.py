"""`llmrecipes bench`: start ranks, measure, and combine the results."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from llmrecipes.bench.results import ANSWER, BenchSpec
from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.hardware.load import clusters_dir, load_profile
from llmrecipes.hardware.nics import CHOICE, nccl_ib_hca
from llmrecipes.hardware.profile import MeasuredLinks, Profile
from llmrecipes.io import write_atomic
from llmrecipes.launch.environment import detected_environment, missing
from llmrecipes.launch.local import run_ranks
from llmrecipes.launch.ranks import from_slurm
from llmrecipes.plan.derive import default_world_size
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import NAME
from llmrecipes.units import GIB, KIB, MIB
from llmrecipes.workflow.plan import laid_out

LATENCY, LINK = "64KiB,1MiB,16MiB", "256MiB"
"""Default sizes; the last one measures links, and takes seconds over those of a laptop."""


def default_sizes(profile: Profile | None) -> str:
    """Sizes to measure where the user names none: on a site with GPUs one that can be compared with its links.

    Args:
        profile: to compare with; None: nothing is compared.
    """
    return f"{LATENCY},{LINK}" if profile is not None and profile.gpu is not None else LATENCY


def use_site(profile: Profile) -> None:
    """Set the site's variables, as in a training, so that the same adapters are measured; the user's win."""
    adapters = nccl_ib_hca(profile)
    choice = {} if adapters is None else {CHOICE: adapters}
    choice |= {name: str(value) for name, value in profile.environment.items()}
    os.environ.update(missing(choice, os.environ))


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several ranks."""
    return int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment


def measure(spec: BenchSpec, nproc: int | None) -> str | None:
    """Run a measurement on this machine, or as one rank of a Slurm step.

    Args:
        spec: what to measure; `out` is replaced.
        nproc: ranks; None: the default of a run.

    Returns:
        The result as JSON; None on ranks other than the first.

    Raises:
        UserError: the layout cannot run on this machine, or a rank failed, and has printed its error.
    """
    with tempfile.TemporaryDirectory() as name:
        if is_task(os.environ):
            rank = from_slurm(os.environ)
            os.environ.update(rank.variables())
            cluster = detect().times(rank.world_size // rank.local_world_size)
            plan = laid_out(spec.recipe, rank.world_size, cluster, None)
            local_spec = spec.model_copy(update={"out": Path(name), "recipe": plan.largest.recipe})
            os.environ.update(missing(detected_environment(cluster, plan), os.environ))
            from llmrecipes.bench.bench_worker import run

            run(local_spec)
            return (local_spec.out / ANSWER).read_text("utf-8") if rank.rank == 0 else None
        cluster = detect()
        ranks = default_world_size(spec.recipe, cluster) if nproc is None else nproc
        require_packages(spec.recipe)
        plan = laid_out(spec.recipe, ranks, cluster, None)  # rejects inconsistent settings before a process starts
        local_spec = spec.model_copy(update={"out": Path(name), "recipe": plan.largest.recipe})
        path = local_spec.out / "spec.json"
        path.write_text(local_spec.model_dump_json(), "utf-8")
        threads = max(1, int(cluster.cpu_cores) // ranks)
        code = run_ranks(
            "llmrecipes.bench.bench_worker",
            [str(path)],
            world_size=ranks,
            threads=threads,
            logs=local_spec.out,
            environment=detected_environment(cluster, plan),
        )
        if code:
            raise UserError(f"the ranks exited with code {code}", where="bench", fix="see the messages above")
        return (local_spec.out / ANSWER).read_text("utf-8")


def sizes(text: str) -> tuple[int, ...]:
    """Sizes such as `4KiB,1MiB` in bytes.

    Raises:
        UserError: one of them is not a size.
    """
    units = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB}
    byte_sizes = []
    for word in text.split(","):
        number = word.strip().rstrip("BKMGibkmgI")
        unit = word.strip()[len(number) :].lower()
        if not number.isdecimal() or int(number) == 0 or unit not in units:
            rule = "a comma-separated list of sizes"
            raise UserError(f"{word!r} is not a size", where="--sizes", rule=rule, fix="--sizes 4KiB,1MiB")
        byte_sizes.append(int(number) * units[unit])
    return tuple(byte_sizes)


def machine_profile(cluster: str, repeats: int, name: str) -> dict[str, Any]:
    """Measure this machine, and describe it as a cluster profile without GPUs.

    Args:
        cluster: profile with what is not measured here.
        name: name of the new one.

    Raises:
        UserError: the machine or the profile has GPUs, or a rank failed.
    """
    here = detect()
    profile = load_profile(cluster)
    if here.gpus or profile.gpus_per_node:
        raise UserError(
            "this machine has a GPU",
            where="bench machine",
            rule="it measures processors only; the planner has coefficients for GPUs",
            fix="llmrecipes plan RECIPE --cluster NAME",
        )
    recipe = load("gpt-tiny", []).recipe
    answer = measure(BenchSpec(what="machine", recipe=recipe, data_dir=Path(), out=Path(), repeats=repeats), 2)
    if answer is None:
        raise UserError(
            "it runs in a Slurm step",
            where="bench machine",
            rule="it measures a single machine",
            fix="run it without srun",
        )
    rates = {key: float(f"{value:.4g}") for key, value in json.loads(answer).items()}
    cores = max(1, round(here.cpu_cores))
    return profile.model_dump(mode="json", exclude_defaults=True) | {
        "name": name,
        "description": f"{cores} processor cores, measured by bench machine",
        "cpu_cores": cores,
        "memory_gib": round(here.memory_bytes / GIB, 1),
        "intra_node": {"kind": "memory", "gb_per_s": rates.pop("link_gb_per_s")},
        "rates": rates,
    }


def require_new(target: Path) -> None:
    """Refuse a file that a profile would not be written to, before time is spent on its figures.

    Raises:
        UserError: it exists, is not YAML, or its stem is not the name of a profile.
    """
    if target.suffix != ".yaml" or target.exists() or not re.fullmatch(NAME, target.stem):
        raise UserError(
            f"cannot write to {target}",
            where="--write",
            rule="a new .yaml file, named in lower-case letters, digits, `.`, `_` and `-`",
            fix="--write my-machine.yaml",
        )


def save_profile(data: Mapping[str, Any], target: Path) -> None:
    """Write a profile to a new YAML file.

    Raises:
        UserError: it exists, or cannot be written.
    """
    require_new(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", where=str(target), fix="--write FILE in a writable folder"
        ) from error
    load_profile(str(target))


def require_own(target: Path) -> None:
    """Refuse a file that measurements would not be written to, before they are made.

    Raises:
        UserError: it is a shipped profile, or not a YAML file named as a profile.
    """
    shipped = (clusters_dir() / target.name).resolve() == target.resolve()
    if target.suffix != ".yaml" or target.is_dir() or shipped or not re.fullmatch(NAME, target.stem):
        rule = "a .yaml file that is not a shipped profile, named in lower-case letters, digits, `.`, `_` and `-`"
        raise UserError(f"cannot write to {target}", where="--write", rule=rule, fix="--write my-cluster.yaml")


def write_profile(cluster: str, rows: Sequence[MeasuredLinks], target: Path) -> None:
    """Copy a cluster profile, with measurements added.

    Args:
        cluster: name or path of the profile.
        rows: the measurements; they replace older ones of the same operation, group and size.
        target: YAML file to write, for `--cluster`; its stem becomes the profile's name.

    Raises:
        UserError: the target is a shipped profile, or cannot be written.
    """
    profile = load_profile(cluster)
    require_own(target)
    data = profile.model_dump(mode="json", exclude_defaults=True)
    data["name"] = target.stem
    replaced = {result.key for row in rows for result in (row, row.unplaced)}
    kept = [row for row in profile.measured if row.key not in replaced]
    data["measured"] = [row.model_dump(mode="json", exclude_none=True) for row in (*kept, *rows)]
    try:
        target.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), "utf-8")
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", where=str(target), fix="--write FILE in a writable folder"
        ) from error
    load_profile(str(target))
