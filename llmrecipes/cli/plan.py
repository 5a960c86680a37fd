"""`plan`: parsing and printing only."""

from __future__ import annotations

import json
import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import (
    NO_OVERRIDES,
    RUNS,
    ClusterOption,
    JsonOption,
    NodesOption,
    OverridesArgument,
    RunsOption,
)
from llmrecipes.cli.tables import show
from llmrecipes.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmrecipes.plan.derive import Plan
    from llmrecipes.plan.speed.search import Candidate
    from llmrecipes.workflow.speed_forecast import LayoutDryRun
    from llmrecipes.workflow.whatif import TrainingGoal

_SHOWN = 5


def plan(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="Recipe: a name in recipes/, or the path of a YAML file; with --calibration: runs.",
            autocompletion=completion.recipes,
        ),
    ] = None,
    overrides: OverridesArgument = NO_OVERRIDES,
    as_json: JsonOption = False,
    cluster_name: ClusterOption = None,
    nodes: NodesOption = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            "--nproc",
            metavar="N",
            help="Number of GPUs, or of ranks on processors; default: the fewest, or all of --nodes. With --what-if, "
            "several: 64,128.",
        ),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print all derived numbers: memory, FLOPs, communication, data.")
    ] = False,
    step_seconds: Annotated[
        float | None,
        typer.Option(
            "--step-seconds",
            metavar="S",
            min=1e-6,
            help="With --details: plan the total time from this measured step time.",
        ),
    ] = None,
    placement: Annotated[
        bool, typer.Option("--placement", help="Show which part of the model and data every rank holds.")
    ] = False,
    stage: Annotated[
        str | None,
        typer.Option("--in", metavar="STAGE", help="With --placement: this stage of a recipe; default: the first."),
    ] = None,
    speed: Annotated[
        bool,
        typer.Option("--speed", help="List features that affect speed: on or off, why, and what they give."),
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Find the fastest layouts that fit instead of the recipe's.")
    ] = False,
    dryrun: Annotated[
        bool, typer.Option("--dryrun", help="With --search: dry run the fastest layouts with torch, until one fits.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="With --search: save the fastest layout as a recipe. With --calibration: save the corrected "
            "--cluster.",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw memory and passes of the stages to FILE.svg or FILE.png; not with --search.",
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibration", help="Compare predictions with measurements of RUN... (default: all runs).")
    ] = False,
    experiment: Annotated[
        str | None,
        typer.Option(
            "--experiment",
            metavar="NAME",
            help="With --calibration or --what-if: use the runs of this MLflow experiment.",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--what-if", help="Compare clusters and numbers of GPUs: days, cost and energy.")
    ] = False,
    clusters: Annotated[
        str | None,
        typer.Option(
            "--clusters",
            metavar="NAME,...",
            help="With --what-if: cluster profiles to compare; default: three GPU types.",
        ),
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(
            "--usd-per-gpu-hour",
            metavar="PRICE",
            help="Price instead of the profile's; with --what-if also NAME=PRICE,... per profile of --clusters.",
        ),
    ] = None,
    loss: Annotated[
        float | None,
        typer.Option("--loss", metavar="X", help="With --what-if: train to this loss, in nats per token."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N", help="With --what-if: train on N tokens, such as 15e12.")
    ] = None,
    by: Annotated[
        datetime | None,
        typer.Option(
            "--by", metavar="DATE", formats=["%Y-%m-%d"], help="With --what-if: finish by this date, starting now."
        ),
    ] = None,
    law: Annotated[
        list[str] | None,
        typer.Option(
            "--law",
            metavar="RUN",
            help="With --what-if: fit the loss to these runs; repeatable. Default: Chinchilla's.",
        ),
    ] = None,
    curve: Annotated[
        Path | None,
        typer.Option(
            "--scaling-curve", metavar="FILE", help="Draw MFU and speed from 8 to 16,384 GPUs to FILE.svg or FILE.png."
        ),
    ] = None,
    runs_dir: RunsOption = RUNS,
) -> int:
    """Predict time, memory and cost, or search layouts.

    Times come from a model fitted to published runs, not from this cluster; with --calibration, runs on the cluster
    correct them. Where nothing is known of the machine's speed, the rest is planned, as with --details. A plan that
    does not fit ends with exit code 2.
    """
    from llmrecipes.plan.speed.device import SpeedUnknownError
    from llmrecipes.workflow import speed_forecast as workflow

    chosen = {
        "--details": details,
        "--placement": placement,
        "--speed": speed,
        "--search": search,
        "--calibration": calibrate,
        "--what-if": compare,
        "--scaling-curve": curve is not None,
    }
    modes = [option for option, is_set in chosen.items() if is_set]
    if len(modes) > 1:
        raise UserError(
            f"set with {modes[1]}",
            where=modes[0],
            rule="plan does only one of them at a time",
            fix="remove one of them",
        )
    mode = modes[0] if modes else ""
    one_layout = ("", "--search", "--scaling-curve", "--details", "--placement", "--speed")
    belongs: dict[str, tuple[object, tuple[str, ...]]] = {
        "--clusters": (clusters, ("--what-if",)),
        "--usd-per-gpu-hour": (prices, ("", "--what-if")),
        "--loss": (loss, ("--what-if",)),
        "--tokens": (tokens, ("--what-if",)),
        "--by": (by, ("--what-if",)),
        "--law": (law, ("--what-if",)),
        "--experiment": (experiment, ("--calibration", "--what-if")),
        "--dryrun": (dryrun or None, ("--search",)),
        "--write": (out, ("--search", "--calibration")),
        "--plot": (picture, ("",)),
        "--step-seconds": (step_seconds, ("--details",)),
        "--in": (stage, ("--placement",)),
        "--nodes": (nodes, one_layout),
        "--gpus": (gpus, (*one_layout, "--what-if")),
    }
    for option, (value, of) in belongs.items():
        if value is not None and mode not in of:
            raise UserError(
                f"set with {mode}" if mode else f"set without {of[0]}",
                where=option,
                rule=f"only valid with {', '.join(owner or 'a plan of one layout' for owner in of)}",
                fix=of[0] or f"plan without {mode}",
            )
    counts = _counts(gpus, several=compare)
    if calibrate:
        names = [*([] if recipe is None else [recipe]), *overrides]
        _calibration(names, experiment, runs_dir, cluster_name, out, as_json=as_json)
        return 0
    if recipe is None:
        raise UserError("missing", where="RECIPE", fix="llmrecipes list")
    if compare:
        wanted = _wanted(loss, tokens, by, law, experiment)
        _what_if(recipe, overrides, clusters, cluster_name, counts, prices, wanted, runs_dir, as_json=as_json)
        return 0
    number = counts[0] if counts else None
    if curve is not None:
        points = workflow.scaling_curve(recipe, overrides, cluster_name, nodes, number, curve)
        if as_json:
            print(json.dumps([point.as_dict() for point in points], indent=2))
        else:
            from llmrecipes.cli.predictions import curve_lines

            show(*curve_lines(points), f"picture  {curve}")
        return 0
    asked = _Asked(recipe, tuple(overrides), cluster_name, nodes, number)
    if placement:
        _placement(asked, stage, as_json=as_json)
        return 0
    if speed:
        _speed(asked, as_json=as_json)
        return 0
    if details:
        return _details(asked, step_seconds, as_json=as_json)
    if not search:
        price = None if prices is None else usd(prices)
        try:
            forecast = workflow.of_recipe(recipe, overrides, cluster_name, nodes, number, price)
        except SpeedUnknownError:
            if as_json or price is not None or picture is not None:
                raise
            return _details(asked, None, as_json=False)
        from llmrecipes.cli.predictions import forecast_text

        if picture is not None:
            workflow.plot(forecast, picture)
        print(json.dumps(forecast.as_dict(), indent=2) if as_json else forecast_text(forecast))
        if picture is not None and not as_json:
            print(f"{'picture':19}{picture}")
        return exit_code(forecast.plans, explained=not as_json)
    if out is not None:
        workflow.require_new(out)
    if sys.stderr.isatty():
        print("comparing layouts ...", file=sys.stderr)
    listed = workflow.search(recipe, overrides, cluster_name, nodes, number, _SHOWN)
    candidates: list[tuple[Candidate, LayoutDryRun | None]] = [(layout, None) for layout in listed]
    if dryrun:
        candidates = workflow.checked(listed, cluster_name, nodes, lambda line: print(line, file=sys.stderr))
    fitting = [(each, check) for each, check in candidates if check is None or check.fits]
    if out is not None:
        workflow.write(fitting[0][0], out)
    if as_json:
        rows = [
            {**each.forecast.as_dict(), "dryrun": None if check is None else check.as_dict()} for each, check in fitting
        ]
        print(json.dumps(rows, indent=2))
        return 0
    from llmrecipes.cli.predictions import search_lines

    show(*search_lines(candidates))
    if not dryrun:
        print("not checked by a dry run: --dryrun")
    if out is not None:
        print(f"wrote  {out}")
    return 0


class _Asked(NamedTuple):
    """A recipe, its overrides, and the machine that it is planned for."""

    recipe: str
    overrides: tuple[str, ...]
    cluster: str | None
    nodes: int | None
    ranks: int | None


def _details(asked: _Asked, step_seconds: float | None, *, as_json: bool) -> int:
    from llmrecipes.cli import plan_text
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.plan import communication_on, plan_on, preparation
    from llmrecipes.workflow.speed_forecast import seconds_of

    loaded = load(asked.recipe, asked.overrides)
    plan, cluster = plan_on(loaded.recipe, nproc=asked.ranks, cluster=asked.cluster, nodes=asked.nodes)
    sent = communication_on(plan, cluster, asked.cluster)
    data = preparation(loaded.recipe, cluster)
    if as_json:
        print(json.dumps(plan_text.details_as_dict(loaded, plan, cluster, step_seconds, sent, data), indent=2))
    else:
        plan_text.print_details(
            loaded,
            plan,
            cluster,
            (asked.recipe, *asked.overrides),
            step_seconds=step_seconds,
            sent=sent,
            data=data,
            predicted=seconds_of(plan, asked.cluster),
        )
    return exit_code(plan.stages, explained=not as_json)


def _placement(asked: _Asked, stage: str | None, *, as_json: bool) -> None:
    from llmrecipes.cli import plan_text
    from llmrecipes.hardware.machine import planned
    from llmrecipes.plan.placement import place
    from llmrecipes.recipe.derived.degrees import least_ranks
    from llmrecipes.recipe.derived.stage_runs import stage_named, stage_recipes
    from llmrecipes.recipe.load import load

    loaded = load(asked.recipe, asked.overrides).recipe
    ranks = least_ranks(loaded) if asked.ranks is None else asked.ranks
    laid_out = stage_recipes(loaded)[0] if stage is None else stage_named(loaded, stage)
    machine = None if asked.cluster is None else planned(asked.cluster, asked.nodes, ranks)
    placed = place(laid_out, ranks, machine)
    if as_json:
        print(json.dumps(plan_text.layout_as_dict(*placed), indent=2))
    else:
        show(*plan_text.layout_lines(*placed))


def _speed(asked: _Asked, *, as_json: bool) -> None:
    from llmrecipes.cli import plan_text
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.feature_table import speed
    from llmrecipes.workflow.plan import plan_on

    recipe = load(asked.recipe, asked.overrides).recipe
    plan, _ = plan_on(recipe, nproc=asked.ranks, cluster=asked.cluster, nodes=asked.nodes)
    report = speed(plan, asked.cluster)
    print(json.dumps(report.as_dict(), indent=2) if as_json else plan_text.speed_as_text(report))


def exit_code(plans: Sequence[Plan], *, explained: bool) -> int:
    """Exit code of a command that shows a plan.

    Args:
        plans: of the stages.
        explained: raise what fits instead, for people.

    Raises:
        UserError: it does not fit; with what does.
    """
    from llmrecipes.errors import ExitCode
    from llmrecipes.plan.check import check

    for plan in plans if explained else ():
        check(plan, plan.cluster)
    return ExitCode.DONE if all(plan.fits for plan in plans) else ExitCode.BAD_INPUT


def usd(text: str) -> float:
    """The price of `--usd-per-gpu-hour`.

    Raises:
        UserError: it is not one.
    """
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not (math.isfinite(price) and price > 0):
        raise UserError(
            f"{text!r}",
            where="--usd-per-gpu-hour",
            rule="must be a positive number of US dollars",
            fix="--usd-per-gpu-hour 2.5",
        )
    return price


_MOST_GPUS = 1_000_000


def _counts(text: str | None, *, several: bool) -> list[int]:
    """Numbers of GPUs of `--gpus`."""
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 9 and 1 <= int(word) <= _MOST_GPUS for word in words):
        raise UserError(f"{text!r}", where="--gpus", rule=f"must be a number from 1 to {_MOST_GPUS:,}", fix="--gpus 64")
    if len(words) > 1 and not several:
        raise UserError(f"{text!r}", where="--gpus", rule="only --what-if compares several numbers", fix="--what-if")
    return [int(word) for word in words]


def _wanted(
    loss: float | None, tokens: str | None, by: datetime | None, law: list[str] | None, experiment: str | None
) -> TrainingGoal:
    from llmrecipes.workflow.whatif import TrainingGoal

    if loss is not None and tokens is not None:
        raise UserError(
            "set with --tokens", where="--loss", rule="the loss determines the tokens", fix="remove one of them"
        )
    number = None
    if tokens is not None:
        try:
            number = float(tokens)
        except ValueError:
            number = 0.0
        if not 1 <= number <= 1e18:
            raise UserError(
                f"{tokens!r}", where="--tokens", rule="must be a number from 1 to 1e18", fix="--tokens 15e12"
            )
    return TrainingGoal(loss, number, None if by is None else by.replace(tzinfo=UTC), tuple(law or ()), experiment)


def _words(text: str | None) -> list[str]:
    return [] if text is None else [word.strip() for word in text.split(",")]


def _what_if(
    recipe: str,
    overrides: list[str],
    clusters: str | None,
    cluster: str | None,
    gpus: list[int],
    prices: str | None,
    wanted: TrainingGoal,
    runs_dir: Path,
    *,
    as_json: bool,
) -> None:
    from llmrecipes.cli.predictions import what_if_lines
    from llmrecipes.workflow.whatif import what_if

    if clusters is not None and cluster is not None:
        raise UserError(
            "set with --cluster",
            where="--clusters",
            rule="with --what-if, profiles are set by --clusters",
            fix="--clusters",
        )
    names = _words(clusters) or ([] if cluster is None else [cluster])
    answer = what_if(recipe, overrides, names, gpus, _words(prices), wanted, runs_dir)
    if as_json:
        print(json.dumps(answer.as_dict(), indent=2))
    else:
        show(*what_if_lines(answer))


def _calibration(
    names: list[str], experiment: str | None, runs_dir: Path, cluster: str | None, out: Path | None, *, as_json: bool
) -> None:
    from llmrecipes.cli.predictions import calibration_lines
    from llmrecipes.workflow.calibrated_profile import calibration, write

    if out is not None and cluster is None:
        raise UserError("no profile to copy", where="--write", fix="--cluster NAME; llmrecipes clusters lists them")
    report = calibration(names, runs_dir, experiment)
    if out is not None and cluster is not None:
        write(report, cluster, out)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
        return
    show(*calibration_lines(report))
    if out is not None:
        print(f"written to {out}: --cluster {out}")
