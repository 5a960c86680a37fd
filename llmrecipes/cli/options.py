"""Arguments and options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from llmrecipes.cli import completion
from llmrecipes.commandline import DATA_DIR, DATA_VARIABLE, RUNS_DIR, RUNS_VARIABLE

T = TypeVar("T")

RUNS, DATA = RUNS_DIR, DATA_DIR

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Recipe: a name in recipes/, or the path of a YAML file.",
        autocompletion=completion.recipes,
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Override recipe keys, for example train.train_iters=50.",
        autocompletion=completion.overrides,
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run directory, recipe/run-id, run id, or recipe name (its newest run).",
        autocompletion=completion.runs,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
RunsOption = Annotated[
    Path, typer.Option("--runs-dir", metavar="DIR", envvar=RUNS_VARIABLE, help="Keep runs in this directory.")
]
DataOption = Annotated[
    Path, typer.Option("--data-dir", metavar="DIR", envvar=DATA_VARIABLE, help="Keep prepared data in this directory.")
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--nproc", metavar="N", help="Number of ranks; default: all GPUs, else the fewest that the layout needs."
    ),
]
RunIdOption = Annotated[
    str | None,
    typer.Option("--run-id", metavar="ID", help="Run id; an existing run is resumed. Default: a new id."),
]
NewRunIdOption = Annotated[
    str | None, typer.Option("--run-id", metavar="ID", help="Run id of the new run; default: a new id.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="Plan for this cluster profile (or YAML file) instead of this machine.",
        autocompletion=completion.clusters,
    ),
]


def site_option(text: str) -> Any:
    """`--cluster` of a command that runs on the site itself, which may set LLMRECIPES_CLUSTER for its users."""
    return typer.Option(
        "--cluster", metavar="NAME", envvar="LLMRECIPES_CLUSTER", help=text, autocompletion=completion.clusters
    )


NodesOption = Annotated[
    int | None,
    typer.Option("--nodes", metavar="N", min=1, help="Number of nodes; default: the fewest that fit the layout."),
]
HostsOption = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        metavar="HOST,...",
        help="All nodes of the job, n[0-3] for a range; start the command on all at once. Default: the Slurm step's.",
    ),
]
PatienceOption = Annotated[
    float, typer.Option("--patience", metavar="S", min=1, help="Wait at most S seconds for the other nodes.")
]


def with_run_options(*, in_jobs: bool) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a command the options of a start in the place of its parameter `options`.

    Args:
        in_jobs: only those that a job passes on.
    """

    from llmrecipes.launch.run_options import RunOptions, declared, flag  # pydantic is slow to import

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        parameters: list[Parameter] = []
        for parameter in signature(command, eval_str=True).parameters.values():
            if parameter.name != "options":
                parameters.append(parameter)
                continue
            for name, option in declared(in_jobs=in_jobs):
                field = RunOptions.model_fields[name]
                word = flag(name, option)
                words = [f"--{word}/--no-{word}" if field.default is True else f"--{word}"]
                shown = typer.Option(*words, help=option.help, metavar=option.metavar, min=_least(field.metadata))
                kind = Annotated[field.annotation, shown]  # type: ignore[name-defined]
                parameters.append(parameter.replace(name=name, default=field.default, annotation=kind))

        @wraps(command)
        def decorated(**given: Any) -> T:
            names = {name for name, _ in declared(in_jobs=in_jobs)}
            chosen = {name: given.pop(name) for name in names & given.keys()}
            if in_jobs:
                chosen["sample"] = False
            return command(**given, options=RunOptions(**chosen))

        decorated.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        decorated.__annotations__ = {each.name: each.annotation for each in parameters}
        return decorated

    return decorate


def _least(metadata: Sequence[object]) -> int | None:
    return next((int(least) for each in metadata if (least := getattr(each, "ge", None)) is not None), None)
