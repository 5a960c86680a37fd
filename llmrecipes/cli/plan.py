"""`plan`: parsing and printing only."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

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
    with_options,
)
from llmrecipes.cli.tables import show
from llmrecipes.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llmrecipes.cli.plan_options import PlanOptions
    from llmrecipes.cli.tables import TextTable
    from llmrecipes.plan.derive import Plan
    from llmrecipes.plan.speed.search import Candidate
    from llmrecipes.workflow.speed_forecast import LayoutDryRun
    from llmrecipes.workflow.whatif import TrainingGoal

_SHOWN = 5


@with_options(options="cli.plan_options.PlanOptions")
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
    options: Any = None,
    runs_dir: RunsOption = RUNS,
) -> int:
    """Predict time, memory and cost, or search layouts.

    Times come from a model fitted to published runs, not from this cluster; with --calibration, runs on the cluster
    correct them. Where nothing is known of the machine's speed, the rest is planned, as with --details. A plan that
    does not fit ends with exit code 2.
    """
    asked = _Asked(recipe or "", overrides, cluster_name, nodes, _counts(options), as_json, runs_dir, options)
    mode = _mode(asked)
    if recipe is None and mode != "--calibration":
        raise UserError("missing", where="RECIPE", fix="llmrecipes list")
    return _MODES[mode](asked)


class _Asked(NamedTuple):
    """The recipe, the machine that it is planned for, and the options."""

    recipe: str
    overrides: Sequence[str]
    cluster: str | None
    nodes: int | None
    gpus: Sequence[int]
    as_json: bool
    runs_dir: Path
    options: PlanOptions

    @property
    def ranks(self) -> int | None:
        """The number of ranks, where only one was asked for."""
        return self.gpus[0] if self.gpus else None

    @property
    def price(self) -> float | None:
        """US dollars for an hour of a GPU; None: those of the profile."""
        return None if self.options.prices is None else usd(self.options.prices)

    @property
    def machine(self) -> tuple[str, Sequence[str], str | None, int | None, int | None]:
        """The recipe and what it is planned for, as `speed_forecast` takes them."""
        return self.recipe, self.overrides, self.cluster, self.nodes, self.ranks


_ONE_LAYOUT = ("", "--search", "--scaling-curve", "--details", "--placement", "--speed", "--pin")
_OF_MODES: dict[str, tuple[str, ...]] = {
    "--clusters": ("--what-if",),
    "--usd-per-gpu-hour": ("", "--search", "--what-if"),
    "--loss": ("--what-if",),
    "--tokens": ("--what-if",),
    "--by": ("--what-if",),
    "--law": ("--what-if",),
    "--experiment": ("--calibration", "--what-if"),
    "--dryrun": ("--search",),
    "--write": ("--search", "--calibration"),
    "--plot": ("",),
    "--step-seconds": ("--details",),
    "--in": ("--placement",),
    "--nodes": _ONE_LAYOUT,
    "--gpus": (*_ONE_LAYOUT, "--what-if"),
}
"""Options, and the modes that have each."""


def _mode(asked: _Asked) -> str:
    """The only option that is a mode; empty for a forecast. The other options must be of that mode."""
    from llmrecipes.options import declared

    values = {f"--{field.word}": getattr(asked.options, name) for name, field in declared(type(asked.options)).items()}
    given = {option for option, value in {**values, "--nodes": asked.nodes}.items() if value not in (None, False, ())}
    modes = [mode for mode in _MODES if mode in given]
    if len(modes) > 1:
        raise UserError(
            f"set with {modes[1]}",
            where=modes[0],
            rule="plan does only one of them at a time",
            fix="remove one of them",
        )
    mode = modes[0] if modes else ""
    for option, of in _OF_MODES.items():
        if option in given and mode not in of:
            raise UserError(
                f"set with {mode}" if mode else f"set without {of[0]}",
                where=option,
                rule=f"only valid with {', '.join(owner or 'a plan of one layout' for owner in of)}",
                fix=of[0] or f"plan without {mode}",
            )
    return mode


def _print(as_json: bool, values: Any, lines: Callable[[], Iterable[str | TextTable]]) -> None:
    """Values as JSON, or lines for people, which are only made then."""
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        show(*lines())


def _forecast(asked: _Asked) -> int:
    from llmrecipes.cli.predictions import forecast_text
    from llmrecipes.plan.speed.device import SpeedUnknownError
    from llmrecipes.workflow import speed_forecast as workflow

    options = asked.options
    try:
        forecast = workflow.of_recipe(*asked.machine, asked.price, asked.runs_dir)
    except SpeedUnknownError:
        if asked.as_json or options.prices is not None or options.picture is not None:
            raise
        return _details(asked)
    if options.picture is not None:
        workflow.plot(forecast, options.picture)
    print(json.dumps(forecast.as_dict(), indent=2) if asked.as_json else forecast_text(forecast))
    if options.picture is not None and not asked.as_json:
        print(f"{'picture':19}{options.picture}")
    return exit_code(forecast.plans, explained=not asked.as_json)


def _search(asked: _Asked) -> int:
    from llmrecipes.cli.predictions import search_lines
    from llmrecipes.workflow import speed_forecast as workflow

    options = asked.options
    if options.out is not None:
        workflow.require_new(options.out)
    if sys.stderr.isatty():
        print("comparing layouts ...", file=sys.stderr)
    listed = workflow.search(*asked.machine, asked.price, _SHOWN)
    candidates: list[tuple[Candidate, LayoutDryRun | None]] = [(layout, None) for layout in listed]
    if options.dryrun:
        candidates = workflow.checked(listed, asked.cluster, asked.nodes, lambda line: print(line, file=sys.stderr))
    fitting = [(each, check) for each, check in candidates if check is None or check.fits]
    if options.out is not None:
        workflow.write(fitting[0][0], options.out)
    if asked.as_json:
        rows = [
            {**each.forecast.as_dict(), "dryrun": None if check is None else check.as_dict()} for each, check in fitting
        ]
        print(json.dumps(rows, indent=2))
        return 0
    show(*search_lines(candidates))
    if not options.dryrun:
        print("not checked by a dry run: --dryrun")
    if options.out is not None:
        print(f"wrote  {options.out}")
    return 0


def _curve(asked: _Asked) -> int:
    from llmrecipes.cli.predictions import curve_lines
    from llmrecipes.workflow.speed_forecast import scaling_curve

    points = scaling_curve(*asked.machine, cast(Path, asked.options.curve))
    values = [point.as_dict() for point in points]
    _print(asked.as_json, values, lambda: (*curve_lines(points), f"picture  {asked.options.curve}"))
    return 0


def _details(asked: _Asked) -> int:
    from llmrecipes.cli import plan_text
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.plan import communication_on, plan_on, preparation
    from llmrecipes.workflow.speed_forecast import seconds_of

    options = asked.options
    loaded = load(asked.recipe, asked.overrides)
    plan, cluster = plan_on(
        loaded.recipe, nproc=asked.ranks, cluster=asked.cluster, nodes=asked.nodes, runs_dir=asked.runs_dir
    )
    sent = communication_on(plan, cluster, asked.cluster)
    data = preparation(loaded.recipe, cluster)
    if asked.as_json:
        print(json.dumps(plan_text.details_as_dict(loaded, plan, cluster, options.step_seconds, sent, data), indent=2))
    else:
        plan_text.print_details(
            loaded,
            plan,
            cluster,
            (asked.recipe, *asked.overrides),
            step_seconds=options.step_seconds,
            sent=sent,
            data=data,
            predicted=seconds_of(plan, asked.cluster),
        )
    return exit_code(plan.stages, explained=not asked.as_json)


def _placement(asked: _Asked) -> int:
    from llmrecipes.cli import plan_text
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.plan import placement

    options = asked.options
    placed = placement(
        load(asked.recipe, asked.overrides).recipe, asked.ranks, asked.cluster, asked.nodes, options.stage
    )
    _print(asked.as_json, plan_text.layout_as_dict(*placed), lambda: plan_text.layout_lines(*placed))
    return 0


def _speed(asked: _Asked) -> int:
    from llmrecipes.cli import plan_text
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.feature_table import speed
    from llmrecipes.workflow.plan import plan_on

    recipe = load(asked.recipe, asked.overrides).recipe
    plan, _ = plan_on(recipe, nproc=asked.ranks, cluster=asked.cluster, nodes=asked.nodes, runs_dir=asked.runs_dir)
    report = speed(plan, asked.cluster)
    print(json.dumps(report.as_dict(), indent=2) if asked.as_json else plan_text.speed_as_text(report))
    return 0


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


def _counts(options: PlanOptions) -> list[int]:
    """Numbers of GPUs of `--gpus`."""
    text = options.gpus
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 9 and 1 <= int(word) <= _MOST_GPUS for word in words):
        raise UserError(f"{text!r}", where="--gpus", rule=f"must be a number from 1 to {_MOST_GPUS:,}", fix="--gpus 64")
    if len(words) > 1 and not options.what_if:
        raise UserError(f"{text!r}", where="--gpus", rule="only --what-if compares several numbers", fix="--what-if")
    return [int(word) for word in words]


def _goal(asked: _Asked) -> TrainingGoal:
    from llmrecipes.workflow.whatif import TrainingGoal

    options = asked.options
    if options.loss is not None and options.tokens is not None:
        raise UserError(
            "set with --tokens", where="--loss", rule="the loss determines the tokens", fix="remove one of them"
        )
    number = None
    if options.tokens is not None:
        try:
            number = float(options.tokens)
        except ValueError:
            number = 0.0
        if not 1 <= number <= 1e18:
            raise UserError(
                f"{options.tokens!r}",
                where="--tokens",
                rule="must be a number from 1 to 1e18",
                fix="--tokens 15e12",
            )
    return TrainingGoal(options.loss, number, options.by, options.law, options.experiment)


def _words(text: str | None) -> list[str]:
    return [] if text is None else [word.strip() for word in text.split(",")]


def _what_if(asked: _Asked) -> int:
    from llmrecipes.cli.predictions import what_if_lines
    from llmrecipes.workflow.whatif import what_if

    options = asked.options
    goal = _goal(asked)
    if options.clusters is not None and asked.cluster is not None:
        raise UserError(
            "set with --cluster",
            where="--clusters",
            rule="with --what-if, profiles are set by --clusters",
            fix="--clusters",
        )
    names = _words(options.clusters) or ([] if asked.cluster is None else [asked.cluster])
    answer = what_if(asked.recipe, asked.overrides, names, asked.gpus, _words(options.prices), goal, asked.runs_dir)
    _print(asked.as_json, answer.as_dict(), lambda: what_if_lines(answer))
    return 0


def _pin(asked: _Asked) -> int:
    from llmrecipes.recipe.document import dump_for_people
    from llmrecipes.recipe.load import changed_values, load
    from llmrecipes.workflow.plan import plan_on

    recipe = load(asked.recipe, asked.overrides).recipe
    plan, _ = plan_on(recipe, nproc=asked.ranks, cluster=asked.cluster, nodes=asked.nodes, runs_dir=asked.runs_dir)
    if plan.chosen is None:
        raise UserError(
            "nothing is chosen",
            where="--pin",
            rule="layout: auto chooses what the recipe does not set, for GPUs of known speed",
            fix="layout=auto" if recipe.layout.name is None else "--cluster NAME; llmrecipes clusters lists them",
        )
    section = {"layout": changed_values(plan.recipe)["layout"]}
    if asked.as_json:
        print(json.dumps({**section, "chosen": plan.chosen}, indent=2))
    else:
        print(dump_for_people(section, {}, plan.chosen["text"]), end="")
    return 0


def _calibration(asked: _Asked) -> int:
    from llmrecipes.cli.predictions import calibration_lines
    from llmrecipes.workflow.calibrated_profile import calibration, write

    options = asked.options
    if options.out is not None and asked.cluster is None:
        raise UserError("no profile to copy", where="--write", fix="--cluster NAME; llmrecipes clusters lists them")
    runs = [asked.recipe, *asked.overrides] if asked.recipe else []
    report = calibration(runs, asked.runs_dir, options.experiment)
    if options.out is not None and asked.cluster is not None:
        write(report, asked.cluster, options.out)
    _print(asked.as_json, report.as_dict(), lambda: calibration_lines(report))
    if options.out is not None and not asked.as_json:
        print(f"written to {options.out}: --cluster {options.out}")
    return 0


_MODES: dict[str, Callable[[_Asked], int]] = {
    "": _forecast,
    "--details": _details,
    "--placement": _placement,
    "--speed": _speed,
    "--search": _search,
    "--pin": _pin,
    "--calibration": _calibration,
    "--what-if": _what_if,
    "--scaling-curve": _curve,
}
