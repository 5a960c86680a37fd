"""Arguments and options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from llmrecipes.cli import completion
from llmrecipes.commandline import DATA_DIR, DATA_VARIABLE, RUNS_DIR, RUNS_VARIABLE
from llmrecipes.launch.launcher_options import LauncherOption

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
        "--nproc", metavar="N", help="Use N ranks; default: all GPUs, or the fewest ranks that the layout needs."
    ),
]
StageOption = Annotated[
    str | None,
    typer.Option("--in", metavar="STAGE", help="Use this stage of a recipe with stages; default: the largest."),
]
FirstStageOption = Annotated[
    str | None,
    typer.Option("--in", metavar="STAGE", help="Use this stage of a recipe with stages; default: the first."),
]
RunIdOption = Annotated[
    str | None,
    typer.Option("--run-id", metavar="ID", help="Start or resume the run with this id; default: a new id."),
]
NewRunIdOption = Annotated[
    str | None, typer.Option("--run-id", metavar="ID", help="Give the new run this id; default: a new id.")
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
    typer.Option("--nodes", metavar="N", min=1, help="Use N nodes; default: the fewest that fit the layout."),
]
NodeCountOption = Annotated[
    int, typer.Option("--nnodes", metavar="N", min=1, help="Use N nodes; start the command on every node.")
]
NodeRankOption = Annotated[
    int | None,
    typer.Option("--node-rank", metavar="K", help="Number of this node, from 0; default in pods: the pod's index."),
]
RendezvousOption = Annotated[
    str | None,
    typer.Option("--rdzv", metavar="HOST:PORT", help="Address of node 0; default in pods: the first pod."),
]
HostsOption = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        metavar="HOST,...",
        help="Check these nodes (n[0-3] for a range); start the command on all of them at once. Default: the Slurm "
        "step's.",
    ),
]
PatienceOption = Annotated[
    float, typer.Option("--patience", metavar="S", min=1, help="Wait at most S seconds for the other nodes.")
]


def with_options(**tables: Mapping[str, LauncherOption]) -> Callable[[T], T]:
    """Mark a command that takes several options as one parameter, a mapping from their names to their values.

    Args:
        tables: by parameter, each option by its name on the command line; its default is None.
    """

    def mark(command: T) -> T:
        command.tables = tables  # type: ignore[attr-defined]
        return command

    return mark


def with_run_options(*, in_jobs: bool) -> Callable[[T], T]:
    """Mark a command whose parameter `options` stands for the options of a start.

    They are read when the command is built (`expanded`), because pydantic is slow to import.

    Args:
        in_jobs: only those that a job passes on.
    """

    def mark(command: T) -> T:
        command.in_jobs = in_jobs  # type: ignore[attr-defined]
        return command

    return mark


def expanded(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command with an option for each of its marks (`with_run_options`, `with_options`); else the same."""
    in_jobs: bool | None = getattr(command, "in_jobs", None)
    tables: Mapping[str, Mapping[str, LauncherOption]] = getattr(command, "tables", {})
    if in_jobs is None:
        return command
    from llmrecipes.launch.run_options import RunOptions

    inserted = {"options": _run_parameters(in_jobs), **{name: _parameters(table) for name, table in tables.items()}}
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        parameters += inserted.get(parameter.name, [parameter])

    @wraps(command)
    def decorated(**arguments: Any) -> Any:
        chosen = {option.name: arguments.pop(option.name) for option in inserted["options"]}
        options = RunOptions(**({"sample": False} if in_jobs else {}), **chosen)
        values = {
            name: {option: arguments.pop(_identifier(option)) for option in table} for name, table in tables.items()
        }
        return command(**arguments, options=options, **values)

    decorated.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    decorated.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return decorated


def _run_parameters(in_jobs: bool) -> list[Parameter]:
    from llmrecipes.launch.run_options import RunOptions, declared, flag

    options: list[Parameter] = []
    for name, option in declared(in_jobs=in_jobs):
        field = RunOptions.model_fields[name]
        word = flag(name, option)
        words = [f"--{word}/--no-{word}" if field.default is True else f"--{word}"]
        shown = typer.Option(*words, help=option.help, metavar=option.metavar, min=_least(field.metadata))
        kind = Annotated[field.annotation, shown]  # type: ignore[name-defined]
        options.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=field.default, annotation=kind))
    return options


def _parameters(table: Mapping[str, LauncherOption]) -> list[Parameter]:
    parameters: list[Parameter] = []
    for name, option in table.items():
        shown = typer.Option(f"--{name}", help=option.text, metavar=option.metavar, min=option.least, max=option.most)
        kind: Any = list[str] if option.kind is list else option.kind
        annotation = Annotated[kind | None, shown]
        parameters.append(
            Parameter(_identifier(name), Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)
        )
    return parameters


def _identifier(option: str) -> str:
    return option.replace("-", "_")


def _least(metadata: Sequence[object]) -> int | None:
    return next((int(least) for constraint in metadata if (least := getattr(constraint, "ge", None)) is not None), None)
