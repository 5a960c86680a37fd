"""`llmrecipes plan`: time, memory and cost of a recipe on a machine, and its fastest layouts."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.profile import Profile
from llmrecipes.io import write_atomic
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.plan.speed.device import SpeedUnknownError
from llmrecipes.plan.speed.forecast import Forecast, device_of, forecast_run
from llmrecipes.plan.speed.search import Candidate, fastest
from llmrecipes.recipe.load import load, short
from llmrecipes.recipe.schema import NAME
from llmrecipes.units import GIB
from llmrecipes.workflow.plan import plan_on

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from llmrecipes.plan.speed.curve import CurvePoint

Log = Callable[[str], None]


def of_recipe(
    recipe: str,
    overrides: Sequence[str],
    cluster: str | None,
    nodes: int | None,
    gpus: int | None,
    usd_per_gpu_hour: float | None = None,
    runs_dir: Path | None = None,
) -> Forecast:
    """Speed, memory and cost of a recipe as it is.

    Args:
        usd_per_gpu_hour: price; None: that of the profile.
        runs_dir: see `plan.laid_out`.

    Raises:
        SpeedUnknownError: nothing is known of the machine's speed.
        UserError: the recipe, the profile or the layout is wrong.
    """
    loaded = load(recipe, overrides).recipe
    plan, _ = plan_on(loaded, nproc=gpus, cluster=cluster, nodes=nodes, runs_dir=runs_dir)
    predicted = replace(forecast_run(plan, None if cluster is None else load_profile(cluster)), chosen=plan.chosen)
    return _priced(predicted, usd_per_gpu_hour)


def _priced(predicted: Forecast, price: float | None) -> Forecast:
    return predicted if price is None else replace(predicted, cost_usd=price * predicted.gpu_hours)


def seconds_of(plan: RunPlan, cluster: str | None) -> tuple[float, float] | None:
    """Predicted seconds of a step and of all; None on a machine without GPUs, or with one without coefficients."""
    try:
        predicted = forecast_run(plan, None if cluster is None else load_profile(cluster))
    except SpeedUnknownError:
        return None
    return predicted.step.seconds, predicted.seconds


def record_of(plan: RunPlan, profile: Profile | None) -> dict[str, Any] | None:
    """What a run records of its prediction; None where nothing is known of the machine's speed."""
    try:
        return {**forecast_run(plan, profile).record(), "profile": None if profile is None else profile.name}
    except SpeedUnknownError:
        return None


def search(
    recipe: str,
    overrides: Sequence[str],
    cluster: str | None,
    nodes: int | None,
    gpus: int | None,
    usd_per_gpu_hour: float | None,
    number: int,
) -> list[Candidate]:
    """The fastest layouts of a recipe, best first.

    Args:
        usd_per_gpu_hour: as of `of_recipe`.

    Raises:
        UserError: as `of_recipe`; or no layout fits.
    """
    from llmrecipes.hardware.machine import planned

    loaded = load(recipe, overrides).recipe
    machine = planned(cluster, nodes, gpus or 1)
    if not machine.gpus:
        raise UserError(
            "no GPU",
            where="--cluster",
            rule="layouts are searched for GPUs only",
            fix="--cluster NAME; llmrecipes clusters lists them",
        )
    profile = None if cluster is None else load_profile(cluster)
    found = fastest(loaded, machine, gpus or len(machine.gpus), profile, number)
    return [replace(each, forecast=_priced(each.forecast, usd_per_gpu_hour)) for each in found]


@dataclass(frozen=True)
class LayoutDryRun:
    """A dry run of the fullest rank of a layout.

    Attributes:
        bytes: at its peak, with what no dry run has: workspaces, buffers of communicators, a copy for saves.
        fits: whether that is less than a GPU has.
        seconds: seconds of the dry run, torch's start included.
    """

    rank: int
    bytes: int
    fits: bool
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Key `dryrun` of `plan --search --json`."""
        return {"rank": self.rank, "peak_gib": self.bytes / GIB, "fits": self.fits, "seconds": round(self.seconds, 1)}


def checked(
    candidates: list[Candidate], cluster: str | None, nodes: int | None, log: Log
) -> list[tuple[Candidate, LayoutDryRun | None]]:
    """Dry run layouts, the fastest first, until one fits; those after it are not checked.

    Raises:
        UserError: a layout does not take all GPUs of its nodes, a dry run failed, or none of them fits.
    """
    checks: list[tuple[Candidate, LayoutDryRun | None]] = []
    for number, candidate in enumerate(candidates):
        check = _dry_run(candidate, cluster, nodes, log)
        checks.append((candidate, check))
        if check.fits:
            return [*checks, *((other, None) for other in candidates[number + 1 :])]
    raise UserError(
        f"none of the {len(candidates)} fastest layouts fits in its dry run",
        where="--dryrun",
        rule="the winner must fit in its dry run",
        fix="leave --dryrun out to see them, or use more --nodes",
    )


def _dry_run(candidate: Candidate, cluster: str | None, nodes: int | None, log: Log) -> LayoutDryRun:
    from llmrecipes.workflow.dryrun import dry_run

    plan = candidate.forecast.plan
    stages = candidate.forecast.memory
    world = plan.layout.world_size
    nodes = plan.cluster.nodes if cluster is not None and nodes is None else nodes
    taken, _ = plan_on(candidate.recipe, nproc=None, cluster=cluster, nodes=nodes)
    if taken.world_size != world:
        raise UserError(
            f"{world} of {taken.world_size} GPUs",
            where="--gpus",
            rule="a dry run uses all GPUs of its nodes",
            fix="--nodes N instead of --gpus",
        )
    fullest = max(range(len(stages)), key=lambda stage: stages[stage].total)
    rank = fullest * (world // len(stages))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (report,) = dry_run(candidate.recipe, Path(folder), log, cluster=cluster, nodes=nodes, rank=rank).reports
    unseen = stages[fullest].total - sum(report.planned.values())
    peak = sum(report.memory.values()) + unseen
    return LayoutDryRun(rank, peak, peak <= plan.memory_capacity_bytes, time.perf_counter() - started)


def require_new(path: Path) -> None:
    """Refuse a file that a recipe would not be written to, before time is spent on it.

    Raises:
        UserError: it exists, is not YAML, or its stem is not the name of a recipe.
    """
    if path.exists():
        raise UserError(
            "already exists",
            where=str(path),
            rule="an existing recipe is not overwritten",
            fix="use another --write FILE",
        )
    if path.suffix not in (".yaml", ".yml") or not re.fullmatch(NAME, path.stem):
        raise UserError(
            f"{path.name!r} is not a valid file name",
            where="--write",
            rule="NAME.yaml, of lower-case letters, digits, `.`, `_` and `-`",
            fix="--write my-recipe.yaml",
        )


def write(candidate: Candidate, path: Path) -> None:
    """Save a layout as a recipe.

    Raises:
        UserError: as `require_new`, or it cannot be written.
    """
    require_new(path)
    recipe = candidate.recipe.model_copy(update={"name": path.stem})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            path,
            short(
                recipe,
                header=f"{candidate.recipe.name} in the layout that llmrecipes plan --search predicts fastest: "
                f"{candidate.key}",
            ),
        )
    except OSError as error:
        raise UserError(f"cannot write: {error.strerror}", where=str(path), fix="--write FILE") from error


def plot(prediction: Forecast, path: Path) -> None:
    """Draw a prediction as SVG or PNG, by the suffix.

    Raises:
        UserError: another suffix, or the file cannot be written.
    """
    _require_picture(path, "--plot")
    from llmrecipes.plan.speed.figure import draw

    _save(draw(prediction), path, "--plot")


def scaling_curve(
    recipe: str, overrides: Sequence[str], cluster: str | None, nodes: int | None, gpus: int | None, path: Path
) -> list[CurvePoint]:
    """Search 8 to 16,384 GPUs of a cluster, and draw strong and weak scaling.

    Args:
        gpus, nodes: where the weak curve has the recipe's global batch; default: the fewest GPUs of its layout.

    Raises:
        UserError: as `of_recipe`; there is no profile, or the file cannot be written.
    """
    _require_picture(path, "--scaling-curve")
    if cluster is None:
        raise UserError(
            "missing",
            where="--cluster",
            rule="a curve over GPUs needs a profile of their nodes",
            fix="--cluster NAME; llmrecipes clusters lists them",
        )
    from llmrecipes.plan.speed.curve import COUNTS, curve
    from llmrecipes.plan.speed.figure import draw_curve

    loaded = load(recipe, overrides).recipe
    profile = load_profile(cluster)
    device = device_of(profile)
    plan, _ = plan_on(loaded, nproc=gpus, cluster=cluster, nodes=nodes)
    points = curve(loaded, profile, plan.world_size, COUNTS)
    _save(draw_curve(loaded.name, device.name, points), path, "--scaling-curve")
    return points


def _require_picture(path: Path, option: str) -> None:
    if path.suffix not in (".svg", ".png"):
        raise UserError(
            f"{path.suffix or 'no suffix'}", where=option, rule="FILE.svg or FILE.png", fix=f"{option} plan.svg"
        )


def _save(figure: Figure, path: Path, option: str) -> None:
    from llmrecipes.figures import svg

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".svg":
            write_atomic(path, svg(figure))
        else:
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"cannot write: {error.strerror}", where=str(path), fix=f"{option} FILE") from error
