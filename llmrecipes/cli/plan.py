"""`plan`: parsing and printing only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.options import RUNS, ClusterOption, JsonOption, NodesOption, OverridesArgument, RunsOption
from llmrecipes.errors import UserError

if TYPE_CHECKING:
    from llmrecipes.plan.speed.forecast import Forecast
    from llmrecipes.plan.speed.saving import Saving

_SHOWN = 5


def plan(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="Recipe: a name in recipes/, or the path of a YAML file. With --calibration: runs.",
            autocompletion=completion.recipes,
        ),
    ] = None,
    overrides: OverridesArgument = None,
    as_json: JsonOption = False,
    cluster_name: ClusterOption = None,
    nodes: NodesOption = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, help="Number of GPUs; default: the fewest, or all of --nodes."),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Find the fastest layouts that fit instead of the recipe's.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="With --search: save the fastest as a recipe. With --calibration: save --cluster, corrected.",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw memory and passes of the stages as FILE.svg or FILE.png; not --search."
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibration", help="Compare predictions with what RUN... (default: all runs) measured.")
    ] = False,
    experiment: Annotated[
        str | None,
        typer.Option("--experiment", metavar="NAME", help="With --calibration: the runs of this MLflow experiment."),
    ] = None,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Predict time, memory and cost, or search the layout.

    With --search: the fastest layouts that fit. Times come from a model that was fitted to published runs, not from
    this cluster; with --calibration runs there correct them.
    """
    from llmrecipes.units import GIB
    from llmrecipes.workflow import forecast as workflow

    if calibrate:
        names = [*([] if recipe is None else [recipe]), *(overrides or [])]
        _calibration(names, experiment, runs_dir, cluster_name, out, as_json=as_json)
        return
    if recipe is None:
        raise UserError("missing", where="RECIPE", fix="llmrecipes list")
    if out is not None and not search:
        raise UserError(
            "set without --search", where="--write", rule="it saves what a search finds or --calibration corrects",
            fix="--search",
        )  # fmt: skip
    if picture is not None and search:
        raise UserError(
            "set with --search", where="--plot", rule="it draws one layout", fix="--search --write FILE, then plan FILE"
        )
    if not search:
        made = workflow.of_recipe(recipe, overrides or [], cluster_name, nodes, gpus)
        if picture is not None:
            workflow.plot(made, picture)
        print(json.dumps(made.as_dict(), indent=2) if as_json else text(made))
        if picture is not None and not as_json:
            print(f"{'picture':19}{picture}")
        return
    found = workflow.search(recipe, overrides or [], cluster_name, nodes, gpus, _SHOWN)
    if out is not None:
        workflow.write(found[0], out)
    if as_json:
        print(json.dumps([each.forecast.as_dict() for each in found], indent=2))
        return
    best = found[0].forecast.tokens_per_second_per_gpu
    for each in found:
        made = each.forecast
        memory = f"{made.plan.memory.total / GIB:5.1f} GiB"
        speed = made.tokens_per_second_per_gpu
        print(f"{each.key:44}{speed:10,.0f} tokens/s/GPU {speed / best - 1:+7.1%}  {memory}  {made.limit}")
    if out is not None:
        print(f"wrote  {out}")


def _calibration(
    names: list[str], experiment: str | None, runs_dir: Path, cluster: str | None, out: Path | None, *, as_json: bool
) -> None:
    from llmrecipes.cli.render.predictions import calibration_lines
    from llmrecipes.workflow.calibration import calibration, write

    if out is not None and cluster is None:
        raise UserError("no profile to copy", where="--write", fix="--cluster NAME; llmrecipes clusters lists them")
    made = calibration(names, runs_dir, experiment)
    if out is not None and cluster is not None:
        write(made, cluster, out)
    if as_json:
        print(json.dumps(made.as_dict(), indent=2))
        return
    print("\n".join(calibration_lines(made)))
    if out is not None:
        print(f"written to {out}: --cluster {out}")


def text(made: Forecast) -> str:
    """Lines of name and value."""
    from llmrecipes.console import duration

    values = made.as_dict()
    peak, error = values["mfu_full"], values["error"]
    speed = values["tokens_per_second_per_gpu"]
    world = values["world_size"]
    layout = ", ".join(f"{name} {size}" for name, size in values["parallelism"].items() if size not in (1, None))
    lines = [
        ("GPUs", f"{world} × {made.device.name}"),
        ("layout", layout or "data 1"),
        ("memory of a rank", f"{values['memory_gib']['max']:.1f} GiB, {'fits' if values['fits'] else 'does NOT fit'}"),
        ("time of a step", f"{values['step_seconds']:.3g} s"),
        ("tokens a second", f"{speed:,.0f} a GPU ({speed * (1 - error):,.0f} to {speed * (1 + error):,.0f})"),
        *([] if made.calibration is None else [("calibrated", f"by {made.calibration.runs} runs")]),
        ("MFU", f"{peak:.1%}, {values['mfu_causal']:.1%} with causal attention"),
        ("all steps", f"{duration(made.seconds)}, {made.gpu_hours:,.1f} GPU-hours"),
        ("limit", values["limit"]),
    ]
    if made.cost_usd is None:
        lines.append(("cost", "left out: the profile has no costs.usd_per_gpu_hour"))
    else:
        lines.append(("cost", f"{made.cost_usd:,.0f} USD"))
    if made.energy_mwh is not None:
        carbon = f", {made.co2_t:,.2f} t CO2" if made.co2_t is not None else ""
        lines.append(("energy", f"{made.energy_mwh:,.2f} MWh{carbon}"))
    if made.saving is not None:
        lines += _saves(made, made.saving)
    lines += [("problem", each) for each in made.problems]
    return "\n".join(f"{name:19}{value}" for name, value in lines)


def _saves(made: Forecast, saving: Saving) -> list[tuple[str, str]]:
    from llmrecipes.console import duration
    from llmrecipes.units import gib

    written = f"training waits {saving.stall:.2g}s, complete after {duration(saving.write)}"
    lines = [("checkpoint", f"{gib(saving.bytes)}, {written}")]
    best, share = saving.best_interval, saving.effective(saving.interval)
    most = saving.effective(best)
    if saving.mtbf is None or best is None or share is None or most is None:
        return [*lines, ("failures", "left out: the profile has no failures.gpu_hours_per_failure")]
    steps = max(1, round(best / made.step.seconds))
    days = saving.days(made.seconds)
    lasts = "no end: failures leave no time" if days is None else f"{duration(days * 86400)} for all steps"
    return [
        *lines,
        ("failures", f"one in {duration(saving.mtbf)}"),
        ("effective time", f"{share:.1%}, {lasts}"),
        ("best save_interval", f"{steps:,} steps ({duration(best)}): {most:.1%} effective"),
    ]
