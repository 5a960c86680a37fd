"""The command line: parsing and printing. Every command imports its work when it runs, so that all start fast."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrecipes import __version__
from llmrecipes.cli import bench, commands, compare, doctor, submit, tensorboard
from llmrecipes.cli.commands import (
    ClusterOption,
    JsonOption,
    NodesOption,
    OverridesArgument,
    RanksOption,
    RecipeArgument,
)
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.signals import StoppedEarly

app = typer.Typer(
    name="llmrecipes",
    help="Pretraining runs of GPT models on Megatron-core, each from one recipe file.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    import platform
    from importlib import metadata

    print(f"llmrecipes {__version__}")
    for name in ("megatron-core", "torch"):
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:  # a login node may only plan and submit
            print(f"{name} is not installed")
    print(f"Python {platform.python_version()}")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Pretraining runs of GPT models on Megatron-core, each from one recipe file."""


@app.command("list")
def list_recipes(as_json: JsonOption = False) -> None:
    """The recipes there are, with their size."""
    from llmrecipes.cli import show
    from llmrecipes.recipe.load import names, recipes_dir

    rows = show.summaries(names(recipes_dir()))
    print(json.dumps(rows, indent=2) if as_json else show.summary_table(rows))


@app.command("show")
def show_recipe(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    as_json: JsonOption = False,
    nproc: RanksOption = None,
    cluster_name: ClusterOption = None,
    nodes: NodesOption = None,
    plan_only: Annotated[bool, typer.Option("--plan", help="The plan alone, without the recipe.")] = False,
    step_seconds: Annotated[
        float | None,
        typer.Option(
            "--step-seconds", metavar="S", min=1e-6, help="Time of a step where you know it, for the time of all."
        ),
    ] = None,
) -> None:
    """The resolved recipe and everything that follows from it on this machine, or on a cluster."""
    from llmrecipes.cli import show
    from llmrecipes.hardware.machine import planned
    from llmrecipes.plan.derive import default_world_size, derive
    from llmrecipes.recipe.degrees import smallest_world
    from llmrecipes.recipe.load import load

    loaded = load(recipe, overrides or [])
    cluster = planned(cluster_name, nodes, nproc or smallest_world(loaded.recipe.parallelism))
    ranks = default_world_size(loaded.recipe, cluster) if nproc is None else nproc
    plan = derive(loaded.recipe, ranks, cluster)
    if as_json:
        print(json.dumps(show.as_dict(loaded, plan, cluster, step_seconds), indent=2))
    else:
        show.print_plan(loaded, plan, cluster, plan_only=plan_only, step_seconds=step_seconds)


@app.command("layout")
def show_layout(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    as_json: JsonOption = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", min=1, help="Ranks; default: the fewest the layout takes.")
    ] = None,
    cluster_name: ClusterOption = None,
    nodes: NodesOption = None,
) -> None:
    """Which rank holds what, on any number of GPUs."""
    from llmrecipes.cli import show_layout as show
    from llmrecipes.hardware.machine import planned
    from llmrecipes.plan.placement import place
    from llmrecipes.recipe.degrees import smallest_world
    from llmrecipes.recipe.load import load

    loaded = load(recipe, overrides or []).recipe
    ranks = smallest_world(loaded.parallelism) if nproc is None else nproc
    found = place(loaded, ranks, None if cluster_name is None else planned(cluster_name, nodes, ranks))
    print(json.dumps(show.as_dict(*found), indent=2) if as_json else show.as_text(*found))


@app.command("clusters")
def list_clusters(as_json: JsonOption = False) -> None:
    """The cluster profiles there are."""
    from llmrecipes.cli import show_clusters as show
    from llmrecipes.hardware.load import clusters_dir, names

    rows = show.summaries(names(clusters_dir()))
    print(json.dumps(rows, indent=2) if as_json else show.summary_table(rows))


@app.command("schema")
def schema() -> None:
    """The JSON Schema of recipe files, for editors."""
    from llmrecipes.recipe.reference import json_schema

    print(json_schema(), end="")


@app.command("docs")
def docs(check: Annotated[bool, typer.Option("--check", help="Only say whether they are up to date.")] = False) -> None:
    """Write the generated files of this checkout: docs/reference.md and recipes/schema.json."""
    from llmrecipes.recipe.reference import generated

    root = Path(__file__).parents[2]
    stale = [path for path, text in generated(root).items() if not path.is_file() or path.read_text("utf-8") != text]
    if check and stale:
        raise UserError(
            f"out of date: {', '.join(str(path.relative_to(root)) for path in stale)}", fix="llmrecipes docs"
        )
    for path in stale:
        path.write_text(generated(root)[path], "utf-8")
        print(f"wrote {path.relative_to(root)}")
    if not stale:
        print("up to date")


commands.register(app)
app.command("submit")(submit.submit)
app.command("cancel")(submit.cancel)
app.command("compare")(compare.compare)
app.command("tensorboard")(tensorboard.tensorboard)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; what users do wrong becomes one message and no traceback."""
    as_json = "--json" in arguments
    try:
        code = app(args=list(arguments), prog_name="llmrecipes", standalone_mode=False)
    except UserError as error:
        return _fail(error.as_dict(), str(error), error.code, as_json)
    except typer.TyperException as error:
        key = _meant_as_key(error)
        if key:
            return _fail(key.as_dict(), str(key), key.code, as_json)
        message = f"{error.format_message().rstrip('.')}. See llmrecipes --help."
        return _fail({"error": message, "exit_code": int(ExitCode.BAD_INPUT)}, message, ExitCode.BAD_INPUT, as_json)
    except StoppedEarly as stopped:
        print(stopped, file=sys.stderr)
        return ExitCode.REQUEUE
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else ExitCode.DONE


def _meant_as_key(error: typer.TyperException) -> UserError | None:
    """What to say about an unknown option that is a recipe key here, as Megatron-LM's `--num-layers` is."""
    option: str = getattr(error, "option_name", "")
    if not option.startswith("--"):
        return None
    from llmrecipes.recipe.hints import namesake

    found = namesake(option)
    if not found.keys:
        return None
    rule = "recipe keys are set without dashes, as key.path=value"
    return UserError(f"no option {option}", rule=rule, fix=" or ".join(f"{key}=..." for key in found.keys))


def _fail(details: dict[str, Any], message: str, code: int, as_json: bool) -> int:
    if as_json:
        print(json.dumps(details))
    else:
        print(f"error: {message}", file=sys.stderr)
    return int(code)


def main() -> None:
    """Entry point of the `llmrecipes` program."""
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (`head`) has seen enough; typer ends a longer output the same way
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
