"""`llmrecipes plan`: what a recipe takes on a machine, and its fastest layouts there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.profile import Profile
from llmrecipes.io import write_atomic
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.speed.forecast import Forecast, forecast
from llmrecipes.plan.speed.search import Found, fastest
from llmrecipes.recipe.load import load, short
from llmrecipes.workflow.plan import plan_on


def of_recipe(recipe: str, overrides: list[str], cluster: str | None, nodes: int | None, gpus: int | None) -> Forecast:
    """Speed, memory and cost of a recipe as it is.

    Raises:
        UserError: the recipe, the profile or the layout is wrong, or nothing is known of the GPU.
    """
    plan, _ = plan_on(load(recipe, overrides).recipe, nproc=gpus, cluster=cluster, nodes=nodes)
    return forecast(plan, None if cluster is None else load_profile(cluster))


def step_seconds_of(plan: Plan, cluster: str | None) -> float | None:
    """Predicted seconds of a step; None on a machine without GPUs, or with one without coefficients."""
    try:
        return forecast(plan, None if cluster is None else load_profile(cluster)).step.seconds
    except UserError:
        return None


def record_of(plan: Plan, profile: Profile | None) -> dict[str, Any] | None:
    """What a run records of its prediction; None where nothing is known of the machine's speed."""
    try:
        return forecast(plan, profile).record()
    except UserError:
        return None


def search(
    recipe: str, overrides: list[str], cluster: str | None, nodes: int | None, gpus: int | None, number: int
) -> list[Found]:
    """The fastest layouts of a recipe, best first.

    Raises:
        UserError: as `of_recipe`; or no layout fits.
    """
    from llmrecipes.hardware.machine import planned

    loaded = load(recipe, overrides).recipe
    machine = planned(cluster, nodes, gpus or 1)
    if not machine.gpus:
        raise UserError(
            "no GPU", where="--cluster", rule="layouts are searched for GPUs only",
            fix="--cluster NAME; llmrecipes clusters lists them",
        )  # fmt: skip
    return fastest(
        loaded, machine, gpus or len(machine.gpus), None if cluster is None else load_profile(cluster), number
    )


def write(found: Found, path: Path) -> None:
    """Save a layout as a recipe.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    if path.exists():
        raise UserError(
            "already exists", where=str(path), rule="a recipe is not overwritten", fix="another --write FILE"
        )
    recipe = found.recipe.model_copy(update={"name": path.stem})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            path,
            short(
                recipe,
                header=f"{found.recipe.name} in the layout that llmrecipes plan --search predicts fastest: {found.key}",
            ),
        )
    except OSError as error:
        raise UserError(f"cannot write: {error.strerror}", where=str(path), fix="--write FILE") from error


def plot(made: Forecast, path: Path) -> None:
    """Draw a prediction as SVG or PNG, by the suffix.

    Raises:
        UserError: another suffix, or the file cannot be written.
    """
    if path.suffix not in (".svg", ".png"):
        raise UserError(f"{path.suffix or 'no suffix'}", where="--plot", rule="FILE.svg or FILE.png", fix="plan.svg")
    from llmrecipes.figures import svg
    from llmrecipes.plan.speed.figure import draw

    figure = draw(made)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".svg":
            write_atomic(path, svg(figure))
        else:
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"cannot write: {error.strerror}", where=str(path), fix="--plot FILE") from error
