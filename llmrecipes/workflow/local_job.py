"""The process of a `--to local` job: trains, and writes its exit code to the run's directory."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from llmrecipes.console import setup_logging
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.signals import StoppedEarly, early_signals
from llmrecipes.io import write_atomic
from llmrecipes.launch.lease import held
from llmrecipes.launch.local.launcher import KILLED
from llmrecipes.launch.run_options import RunOptions, add_arguments
from llmrecipes.recipe.load import load
from llmrecipes.redact import guard_streams
from llmrecipes.runfiles import run_of
from llmrecipes.workflow.run import Paths, TrainOptions
from llmrecipes.workflow.train import train


@early_signals()
def run(parsed: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    setup_logging()
    recipe = load(parsed.recipe, parsed.overrides).recipe
    options = TrainOptions(
        nproc=parsed.nproc,
        run_id=parsed.run_id,
        cluster=parsed.cluster,
        run=RunOptions.parsed(parsed).model_copy(update={"max_restarts": parsed.max_restarts}),
    )
    return train(recipe, Paths(parsed.runs_dir, parsed.data_dir), options, lambda line: print(line, flush=True))


def main(arguments: Sequence[str]) -> int:
    """Run one job; a `UserError` is printed as one message."""
    parser = argparse.ArgumentParser(prog="python -m llmrecipes.workflow.local_job", allow_abbrev=False)
    parser.add_argument("--token", required=True)
    parser.add_argument("--exit-file", type=Path, required=True)
    parser.add_argument("--cluster")
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--runs-dir", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--max-restarts", type=int, default=0)
    add_arguments(parser)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parsed = parser.parse_args(arguments)
    code = 1
    run_dir = run_of(parsed.exit_file.parent).path
    try:
        with held(run_dir, parsed.token, lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: os._exit(KILLED)):
            code = run(parsed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = int(error.code)
    except StoppedEarly as stopped:
        print(stopped, file=sys.stderr)
        code = int(ExitCode.REQUEUE)
    finally:
        write_atomic(parsed.exit_file, f"{parsed.token} {code}\n")
    return code


if __name__ == "__main__":
    guard_streams()
    sys.exit(main(sys.argv[1:]))
