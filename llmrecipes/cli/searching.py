"""`llmrecipes search`: parsing and printing only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrecipes.cli.shared_options import (
    DATA,
    NO_OVERRIDES,
    RUNS,
    DataOption,
    JsonOption,
    OverridesArgument,
    RecipeArgument,
    RunsOption,
    site_option,
)
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.signals import early_signals

if TYPE_CHECKING:
    from llmrecipes.recipe.schema import Recipe
    from llmrecipes.search.command import SearchResult


OF_A_LIST = ("sbatch", "secret")
OF_A_NUMBER = ("warning", "max-restarts")


@early_signals()
def search(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    workers: Annotated[int, typer.Option("--workers", metavar="N", min=1, help="Run N trials at a time.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the study, or join other processes working on it.")
    ] = False,
    to: Annotated[str, typer.Option("--to", metavar="WHERE", help="Run trials on local, slurm or k8s.")] = "local",
    cluster: Annotated[str | None, site_option("Plan for this cluster profile or YAML file (slurm, k8s).")] = None,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="Run a trial on N nodes.")] = 1,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", min=1, help="Start N ranks per trial; with --cluster, per node."),
    ] = None,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="Tune the recipe at model.mup_base_hidden_size; needs model.use_mup.")
    ] = False,
    submit: Annotated[
        list[str] | None,
        typer.Option(
            "--submit",
            metavar="NAME=VALUE",
            help="Pass an option to llmrecipes submit, such as time=2:00:00; repeatable.",
        ),
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Only write the HTML report of the study.")] = False,
    ui: Annotated[bool, typer.Option("--ui", help="Only show the study in optuna-dashboard.")] = False,
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="PORT", min=1, max=65535, help="Serve --ui on this port, or a free one if it is taken."
        ),
    ] = 8080,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Search hyperparameters; every trial is a run.

    The recipe's section search defines the space, the sampler and the limits.
    """
    from llmrecipes.console import setup_logging
    from llmrecipes.recipe.load import load
    from llmrecipes.recipe.variants.width import base_width
    from llmrecipes.search import command
    from llmrecipes.search.target import target_of
    from llmrecipes.workflow.run import Paths

    setup_logging()
    if report and ui:
        raise UserError("set with --ui", where="--report", rule="use one of them at a time", fix="remove one of them")
    changed = overrides

    def recipes() -> tuple[Recipe, Recipe]:
        """The recipe, and the one whose keys are searched."""
        goal = load(recipe, changed).recipe
        return goal, base_width(goal) if proxy else goal

    goal, loaded = recipes()
    if resume or report:
        earlier = command.earlier_overrides(loaded, runs_dir)
        keys = {text.partition("=")[0] for text in changed}
        changed = [*(text for text in earlier if text.partition("=")[0] not in keys), *changed]
        goal, loaded = recipes()
    if ui:
        command.show(loaded, runs_dir, port)
        return 0
    if report:
        path = command.report(loaded, runs_dir, data_dir)
        print(json.dumps({"report": str(path)}) if as_json else path)
        return 0
    submit_options = _given(submit or [])
    result = command.search(
        loaded,
        lambda: target_of(to, submit_options, Paths(runs_dir, data_dir), workers, cluster, nodes, nproc),
        resume=resume,
        log=_silent if as_json else _say,
        goal=goal,
        overrides=changed,
    )
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        _print(result, runs_dir, data_dir)
    return int(result.code if result.best or result.code != ExitCode.DONE else 1)


def _given(options: list[str]) -> dict[str, Any]:
    """Options of `submit`, by name; those that may be repeated are lists."""
    options_by_name: dict[str, Any] = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals or not name or (name in OF_A_NUMBER and not value.isdecimal()):
            raise UserError(
                f"{text!r}",
                where="--submit",
                rule="must be NAME=VALUE, an option of llmrecipes submit",
                fix="--submit time=2:00:00",
            )
        if name in OF_A_LIST:
            options_by_name.setdefault(name, []).append(value)
        else:
            options_by_name[name] = int(value) if name in OF_A_NUMBER else value
    return options_by_name


def _print(result: SearchResult, runs_dir: Path, data_dir: Path) -> None:
    from llmrecipes.commandline import command_line

    counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(result.trials.items()))
    _say(f"study    {result.study} in {result.storage}: {counts}")
    for best in result.best:
        values = " ".join(f"{key}={value}" for key, value in best["values"].items())
        measured = ", ".join(f"{name} {value:.5g}" for name, value in best.items() if name not in ("number", "values"))
        _say(f"best     trial {best['number']}: {measured}  {values}")
    for path in result.recipes:
        _say(f"train    {command_line('train', path, runs_dir=runs_dir, data_dir=data_dir)}")


def _say(line: str) -> None:
    from llmrecipes.console import console

    console().print(line, markup=False)


def _silent(_line: str) -> None:
    pass
