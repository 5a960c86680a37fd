"""Arguments and options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin

import typer

from llmrecipes.cli import completion
from llmrecipes.commandline import DATA_DIR, DATA_VARIABLE, RUNS_DIR, RUNS_VARIABLE
from llmrecipes.launch.launcher_options import LauncherOption
from llmrecipes.options import Field, declared, made

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
    list[str],
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Override recipe keys, for example train.train_iters=50.",
        autocompletion=completion.overrides,
    ),
]
NO_OVERRIDES: list[str] = []
"""Of a command without any."""
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


def with_options(*, in_jobs: bool = False, **sources: str | Mapping[str, LauncherOption]) -> Callable[[T], T]:
    """Mark a command with parameters that stand for several options each.

    Args:
        in_jobs: of the options of a start, only those that a job passes on.
        sources: by parameter, the place in the package of a model (`llmrecipes.options`), which is imported when the
            command is built; or a table of options, whose values the command gets by their names.
    """

    def mark(command: T) -> T:
        command.sources, command.in_jobs = sources, in_jobs  # type: ignore[attr-defined]
        return command

    return mark


def expanded(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command with the options of `with_options`; else the same."""
    sources: Mapping[str, str | Mapping[str, LauncherOption]] = getattr(command, "sources", {})
    if not sources:
        return command
    inserted: dict[str, list[Parameter]] = {}
    makers: dict[str, Callable[[dict[str, Any]], Any]] = {}
    models: dict[str, Any] = {}
    for name, source in sources.items():
        if isinstance(source, str):
            module, _, model_name = source.rpartition(".")
            model = models[model_name] = getattr(import_module(f"llmrecipes.{module}"), model_name)
            fields = {each: field for each, field in declared(model).items() if _shown(field, command)}
            inserted[name] = [_parameter(field) for field in fields.values()]
            makers[name] = partial(_made, model, fields)
        else:
            inserted[name] = _parameters(source)
            makers[name] = partial(_by_name, source)
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True, locals=models).parameters.values():
        parameters += inserted.get(parameter.name, [parameter.replace(kind=Parameter.KEYWORD_ONLY)])

    @wraps(command)
    def decorated(**arguments: Any) -> Any:
        for name, make in makers.items():
            arguments[name] = make({option.name: arguments.pop(option.name) for option in inserted[name]})
        return command(**arguments)

    decorated.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    decorated.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return decorated


def _shown(field: Field, command: Callable[..., Any]) -> bool:
    in_jobs: bool = getattr(command, "in_jobs", False)
    return not in_jobs or field.option.in_jobs


def _made(model: type, fields: Mapping[str, Field], values: Mapping[str, Any]) -> Any:
    return made(model, dict(_read(fields, values)), words=True)


def _read(fields: Mapping[str, Field], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        read = fields[name].option.read
        if read is None:
            yield name, tuple(value or ()) if get_origin(fields[name].kind) is tuple else value
        elif value is not None:
            yield name, read(value)


def _by_name(table: Mapping[str, LauncherOption], values: Mapping[str, Any]) -> dict[str, Any]:
    return {option: values[_identifier(option)] for option in table}


def _parameter(field: Field) -> Parameter:
    option, default, kind = field.option, field.default, field.kind
    word = f"--{field.word}/--no-{field.word}" if default is True or kind == bool | None else f"--{field.word}"
    least = option.least
    if option.read is not None:
        kind = str | None
        default = None
        least = None
    elif get_origin(kind) is tuple:
        kind = list[str] | None
        default = None
    words = (word, f"--{option.also}") if option.also else (word,)
    shown = typer.Option(*words, help=option.help, metavar=option.metavar, min=least)
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown])


def _parameters(table: Mapping[str, LauncherOption]) -> list[Parameter]:
    parameters: list[Parameter] = []
    for name, option in table.items():
        shown = typer.Option(f"--{name}", help=option.text, metavar=option.metavar, min=option.least, max=option.most)
        kind: Any = list[str] if option.kind is list else option.kind
        annotation = Annotated[kind | None, shown]
        parameters.append(Parameter(_identifier(name), Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return parameters


def _identifier(option: str) -> str:
    return option.replace("-", "_")
