"""The command line: parsing and printing. Every command imports its work when it runs, so that all start fast."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrecipes import commands
from llmrecipes.errors import ExitCode, UserError

app = typer.Typer(
    name="llmrecipes",
    help="Pretraining runs of GPT models on Megatron-core, each from one recipe file.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="Name in recipes/, or path of a YAML file.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, for example train.train_iters=50.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RanksOption = Annotated[
    int | None, typer.Option("--nproc", metavar="N", help="Ranks; default: the GPUs the batch divides over, else one.")
]
RunsOption = Annotated[Path, typer.Option("--runs-dir", envvar="LLMRECIPES_RUNS", help="Where runs are kept.")]
DataOption = Annotated[Path, typer.Option("--data-dir", envvar="LLMRECIPES_DATA", help="Where prepared data is kept.")]


@app.command("list")
def list_recipes(as_json: JsonOption = False) -> None:
    """The recipes there are, with their size."""
    from llmrecipes import show
    from llmrecipes.recipe.load import names, recipes_dir

    rows = show.summaries(names(recipes_dir()))
    print(json.dumps(rows, indent=2) if as_json else show.summary_table(rows))


@app.command("show")
def show_recipe(
    recipe: RecipeArgument, overrides: OverridesArgument = None, as_json: JsonOption = False, nproc: RanksOption = None
) -> None:
    """The resolved recipe and everything that follows from it on this machine."""
    from llmrecipes import show
    from llmrecipes.cluster import detect
    from llmrecipes.plan.derive import default_world_size, derive
    from llmrecipes.recipe.load import load

    loaded = load(recipe, overrides or [])
    cluster = detect()
    ranks = default_world_size(loaded.recipe, cluster) if nproc is None else nproc
    plan = derive(loaded.recipe, ranks, cluster)
    if as_json:
        print(json.dumps(show.as_dict(loaded, plan, cluster), indent=2))
    else:
        show.print_plan(loaded, plan, cluster)


@app.command("layout")
def show_layout(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    as_json: JsonOption = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", min=1, help="Ranks; default: the fewest the layout takes.")
    ] = None,
) -> None:
    """Which rank holds what, on any number of GPUs."""
    from llmrecipes import show_layout as show
    from llmrecipes.plan.placement import place
    from llmrecipes.recipe.degrees import smallest_world
    from llmrecipes.recipe.load import load

    loaded = load(recipe, overrides or []).recipe
    found = place(loaded, smallest_world(loaded.parallelism) if nproc is None else nproc)
    print(json.dumps(show.as_dict(*found), indent=2) if as_json else show.as_text(*found))


@app.command("schema")
def schema() -> None:
    """The JSON Schema of recipe files, for editors."""
    from llmrecipes.recipe.reference import json_schema

    print(json_schema(), end="")


@app.command("docs")
def docs(check: Annotated[bool, typer.Option("--check", help="Only say whether they are up to date.")] = False) -> None:
    """Write the generated files of this checkout: docs/reference.md and recipes/schema.json."""
    from llmrecipes.recipe.reference import generated

    root = Path(__file__).parents[1]
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


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; what users do wrong becomes one message and no traceback."""
    as_json = "--json" in arguments
    try:
        code = app(args=list(arguments), prog_name="llmrecipes", standalone_mode=False)
    except UserError as error:
        return _fail(error.as_dict(), str(error), error.code, as_json)
    except typer.TyperException as error:
        message = f"{error.format_message().rstrip('.')}. See llmrecipes --help."
        return _fail({"error": message, "exit_code": int(ExitCode.BAD_INPUT)}, message, ExitCode.BAD_INPUT, as_json)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else ExitCode.DONE


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
