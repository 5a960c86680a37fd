"""The `llmrecipes` program: its commands, help and exit codes.

A command's module is imported when it is run or listed, and its implementation when it runs, so that all start fast.
"""

from __future__ import annotations

import errno
import gc
import importlib
import inspect
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from llmrecipes import __version__
from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import expanded
from llmrecipes.commandline import PROGRAM
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.signals import StoppedEarly
from llmrecipes.launch.launcher_options import OPTIONS
from llmrecipes.loading import announce_silence
from llmrecipes.redact import guard_streams

if TYPE_CHECKING:
    from typer._click import Context
    from typer._click.formatting import HelpFormatter

ABOUT = "Pretrain language models with Megatron-core, each run from one recipe file."
FIRST_STEPS = (
    ("train gpt-tiny", "train a small model on this machine; no GPU needed"),
    ("list", "list recipes"),
    ("plan gpt-1b --cluster h100-ib", "plan a recipe for a cluster: time, memory, cost"),
)

SECTIONS: dict[str, dict[str, str]] = {
    "Start here": {
        "new": "recipes.new",
        "plan": "plan.plan",
        "train": "training.train",
        "report": "reporting.report",
        "export": "models.export",
        "submit": "submitting.submit",
    },
    "Recipes": {
        "list": "recipes.list_recipes",
        "show": "recipes.show",
        "dryrun": "dry_running.dryrun",
        "schema": "recipes.schema",
    },
    "Training": {
        "prepare": "training.prepare",
        "data": "data.app",
        "precompute": "precomputing.precompute",
        "search": "searching.search",
        "lr-range": "training.lr_range",
        "smoke": "training.smoke",
        "verify": "training.verify",
        "coordinates": "training.coordinates",
        "finetune": "models.finetune",
    },
    "Models": {
        "import": "models.import_model",
        "convert": "training.convert",
        "upcycle": "training.upcycle",
        "grow": "growing.grow",
        "prune": "pruning.prune",
        "merge": "merging.merge",
        "quantize": "quantizing.quantize",
        "generate": "runs.generate",
        "eval": "evaluating.evaluate",
        "serve": "serving.serve",
    },
    "Runs": {
        "runs": "runs.runs",
        "diagnose": "runs.diagnose",
        "compare": "comparison.compare",
        "bundle": "bundling.bundle",
        "rerun": "bundling.rerun",
        "scaling": "comparison.scaling",
        "ui": "runs.ui",
        "tensorboard": "runs.tensorboard",
    },
    "Clusters": {
        "clusters": "recipes.clusters",
        "cancel": "submitting.cancel",
        "doctor": "doctor.doctor",
        "bench": "benchmarking.app",
    },
    "Tools": {
        "completion": "completion.completion",
        "docs": "recipes.docs",
    },
}
"""Every command, in the order of `--help`: module in `cli` and function, which are imported on demand."""


MOST = {
    "nodes": 100_000,
    "nnodes": 100_000,
    "nproc": 1_000_000,
    "ranks_per_node": 1_000_000,
    "tensor": 1_000_000,
    "flops": 1e35,
}
"""Largest values of options by the names of their parameters: beyond what any cluster has, and small enough to plan."""
MOST_OTHERS = 1_000_000_000
MOST_SEED = 2**63 - 1


class Command(TyperCommand):
    """A command whose numbers are finite and of a size that can be computed with."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the arguments of the command.

        Raises:
            UserError: a number is out of range, or not a number.
        """
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            value = ctx.params.get(parameter.name or "")
            for item in value if isinstance(value, list | tuple) else [value]:
                if isinstance(item, int | float) and not isinstance(item, bool):
                    _require_sane(parameter.opts[0], parameter.name or "", item)
        return rest


def _require_sane(option: str, name: str, value: float) -> None:
    most = MOST_SEED if name == "seed" else MOST.get(name, MOST_OTHERS)
    if not -most <= value <= most:  # nan is neither
        raise UserError(f"{value}", where=option, rule=f"must be a number of at most {most:,}")


class Program(TyperGroup):
    """The group of all commands, with the sections of `SECTIONS` in its help."""

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        wide = max(map(len, self.commands))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                limit = formatter.width - wide - 6
                formatter.write_dl(
                    [(name.ljust(wide), self.commands[name].get_short_help_str(limit)) for name in commands]
                )


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    import platform
    from importlib import metadata

    print(f"{PROGRAM} {__version__}")
    for name in ("megatron-core", "torch"):
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:  # a login node may only plan and submit
            print(f"{name} is not installed")
    print(f"Python {platform.python_version()}")
    raise typer.Exit


def program(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Print the purpose and the first steps, if no command is named."""
    if ctx.invoked_subcommand is not None:
        return
    wide = max(len(words) for words, _ in FIRST_STEPS)
    steps = (f"  {PROGRAM} {words:{wide}}  {text}" for words, text in FIRST_STEPS)
    print(ABOUT, "", *steps, "", f"All commands: {PROGRAM} --help", sep="\n")


def build(only: str | None = None) -> typer.Typer:
    """The program with all its commands.

    Args:
        only: the command that is run; the others have their names only, because importing them and making their
            options takes most of the time. Empty: all have their help but no options; None: all have all.
    """
    built = typer.Typer(
        name=PROGRAM,
        cls=Program,
        add_completion=False,  # `llmrecipes completion` prints a better script for bash
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    built.callback(invoke_without_command=True, help=ABOUT)(program)
    for name, place in (item for commands in SECTIONS.values() for item in commands.items()):
        if only and name != only:
            built.command(name)(_unbuilt)
            continue
        command = _imported(place)
        if only is not None and name != only:
            text = command.info.help if isinstance(command, typer.Typer) else inspect.getdoc(command)
            built.command(name, help=text)(_unbuilt)
        elif isinstance(command, typer.Typer):
            for registered_command in command.registered_commands:
                registered_command.cls = Command
            built.add_typer(command, name=name)
        else:
            built.command(name, cls=Command)(expanded(command))
    return built


def _imported(place: str) -> Any:
    """The function of a command, or the Typer of a group of commands."""
    module, _, name = place.partition(".")
    return getattr(importlib.import_module(f"llmrecipes.cli.{module}"), name)


def _unbuilt() -> None:
    raise AssertionError("this command was built for its name and help only")


def _command(arguments: Sequence[str]) -> str | None:
    """The command that arguments name; empty if they name none (`--help`), None if the shell asks for completions."""
    if completion.VARIABLE in os.environ:
        return None
    return next((word for word in arguments if not word.startswith("-")), "")


@cache
def _parser(only: str | None) -> Callable[..., Any]:
    """Parser of one command, or of all: a process that runs many commands builds each once."""
    return typer.main.get_command(build(only))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; a `UserError` is printed as one message, without a traceback."""
    completion.enable()
    name = _command(arguments)
    if name in MOVED:
        return _fail(UserError("no such command any more", where=name, fix=MOVED[name]), "--json" in arguments)
    parser = _list if tuple(arguments) in LISTS else _parser(name)
    return dispatch(parser, arguments, PROGRAM)


LISTS = ("list",), ("list", "--json")
"""Command lines that are not parsed: that would take half of their time, for an import of pydantic."""


def _list(args: Sequence[str], **_: object) -> None:
    from llmrecipes.cli.recipes import list_recipes

    list_recipes("--json" in args)


def dispatch(parser: Callable[..., Any], arguments: Sequence[str], name: str) -> int:
    """Let a parser run a command, print what a user can cause as one message, and return the exit code.

    Args:
        parser: made by typer.
        arguments: those of the command line.
        name: of the program, for its help.
    """
    as_json = "--json" in itertools.takewhile("--".__ne__, arguments)
    try:
        code = parser(args=list(arguments), prog_name=name, standalone_mode=False)
    except UserError as error:
        return _fail(error, as_json)
    except typer.TyperException as error:
        return _fail(_usage_error(error), as_json)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _fail(_too_long(str(error.filename)), as_json)
    except StoppedEarly as stopped:
        if as_json:
            print(json.dumps(UserError(str(stopped), code=ExitCode.REQUEUE).as_dict()))
        else:
            print(stopped, file=sys.stderr)
        return ExitCode.REQUEUE
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else ExitCode.DONE


REMOVED = {
    ("prepare", "--tasks"): "--on ray, for several nodes; without it all cores of this machine work",
    ("submit", "--prepare-tasks"): "--prepare-nodes N, which prepares with --on ray",
    ("show", "--plan"): "llmrecipes plan RECIPE --details",
    ("show", "--step-seconds"): "llmrecipes plan RECIPE --details --step-seconds S",
    ("show", "--speed"): "llmrecipes plan RECIPE --speed",
    **{("show", option): f"llmrecipes plan RECIPE {option}" for option in ("--cluster", "--nodes", "--nproc")},
}
"""What replaces options that earlier versions had, by command."""
MOVED = {
    **{name: f"python -m lab {name}, in a checkout" for name in ("card", "gpu-report", "punish")},
    "layout": "llmrecipes plan RECIPE --placement",
}
"""What replaces commands that earlier versions had."""


def _usage_error(error: typer.TyperException) -> UserError:
    """An error in options or arguments; for an option such as Megatron-LM's `--num-layers`, with the recipe key."""
    context = getattr(error, "ctx", None)
    option: str = getattr(error, "option_name", "")
    if context is not None and (fix := REMOVED.get((str(context.info_name), option))):
        return UserError("no such option any more", where=option, fix=fix)
    parameters = [] if context is None else [each.name for each in context.command.params]
    if "submit" in parameters and option.removeprefix("--") in OPTIONS:
        rule = "options of llmrecipes submit are passed on"
        return UserError("no such option", where=option, rule=rule, fix=f"--submit {option.removeprefix('--')}=VALUE")
    takes_keys = "overrides" in parameters
    if option.startswith("--") and takes_keys:
        from llmrecipes.recipe.reading.keys import namesake

        namesakes = namesake(option)
        if namesakes.keys:
            rule = "recipe keys are set without dashes, as KEY=VALUE"
            fix = " or ".join(f"{key}=..." for key in namesakes.keys)
            return UserError("no such option", where=option, rule=rule, fix=fix)
    command = PROGRAM if context is None else context.command_path
    return UserError(error.format_message().rstrip("."), fix=f"{command} --help")


def _too_long(path: str) -> UserError:
    """The error for a name that no file can have; such a name always comes from the user."""
    longest = max(len(os.fsencode(part)) for part in path.split("/"))
    what = f"a name of {longest:,} bytes" if longest > 255 else f"a path of {len(os.fsencode(path)):,} bytes"
    return UserError(
        f"{what} is too long",
        where=f"{path[:80]}…",
        rule="file names may have at most 255 bytes, and paths 4,096",
        fix="a shorter name",
    )


def _fail(error: UserError, as_json: bool) -> int:
    if as_json:
        print(json.dumps(error.as_dict()))
    else:
        print(f"error: {error}", file=sys.stderr)
    return int(error.code)


def main() -> None:
    """Entry point of the `llmrecipes` program."""
    guard_streams()
    announce_silence()
    gc.set_threshold(50_000)  # imports and schemas leave no cycles behind; looking for some takes a tenth of `list`
    # Plugins observe validation; looking for some among all installed packages takes longer than reading a recipe.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (`head`) has exited; typer ends longer output the same way
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter prints an error at exit
        code = 1
    gc.freeze()  # the interpreter looks for cycles once more at its end, for a tenth of the time of `list`
    sys.exit(code)
