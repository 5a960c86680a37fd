"""`python -m lab COMMAND`: the tools of this folder, with the messages and exit codes of `llmrecipes`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
import typer.main

from lab.cards.command import card
from lab.gpu_report.command import gpu_report
from lab.punish.command import punish
from llmrecipes.cli.app import Command, dispatch
from llmrecipes.redact import guard_streams

NAME = "python -m lab"
program = typer.Typer(
    name=NAME, help="Tools that prove what llmrecipes claims.", add_completion=False, no_args_is_help=True,
    pretty_exceptions_enable=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
program.command("card", cls=Command)(card)
program.command("gpu-report", cls=Command)(gpu_report)
program.command("punish", cls=Command)(punish)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    return dispatch(typer.main.get_command(program), arguments, NAME)


if __name__ == "__main__":
    guard_streams()
    sys.exit(run(sys.argv[1:]))
