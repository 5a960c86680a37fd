"""`bundle` and `rerun`: parsing and printing only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrecipes.cli.shared_options import (
    DATA,
    RUNS,
    DataOption,
    JsonOption,
    RanksOption,
    RunArgument,
    RunIdOption,
    RunsOption,
    with_options,
)
from llmrecipes.cli.tables import TextTable, show
from llmrecipes.faults.signals import early_signals

if TYPE_CHECKING:
    from llmrecipes.bundle.bundle_options import BundleOptions, RerunOptions


@early_signals()
@with_options(options="bundle.bundle_options.BundleOptions")
def bundle(
    run: RunArgument,
    options: BundleOptions,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Write everything about a run into one file.

    It has recipe, versions, code, losses, report and what describes the data, for a look or for llmrecipes rerun.
    """
    from llmrecipes.bundle.make import bundle as make
    from llmrecipes.rundir import Run

    bundled = make(Run.find(run, runs_dir), options, data_dir)
    if as_json:
        print(json.dumps(bundled.as_dict(), indent=2))
        return
    size = f"{bundled.bytes / 2**20:,.1f} MiB in {len(bundled.members)} files"
    lines = [f"bundled {bundled.run}, {bundled.steps:,} steps", f"to      {bundled.path}, {size}"]
    if bundled.checkpoint is not None:
        lines.append(f"with    the checkpoint of step {bundled.checkpoint:,}")
    if bundled.copy is not None:
        lines.append(f"copy    {bundled.copy}")
    show(*lines, *(f"without {text}" for text in bundled.absent), f"again:  llmrecipes rerun {bundled.path}")


@early_signals()
@with_options(options="bundle.bundle_options.RerunOptions", run_options="launch.run_options.RunOptions")
def rerun(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="File that llmrecipes bundle has written.")],
    options: RerunOptions,
    run_options: Any = None,
    nproc: RanksOption = None,
    run_id: RunIdOption = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Train a bundle's run again, and compare the losses.

    First it says what differs on this machine: versions, hardware, code, data. Exit code 1: the losses differ.
    """
    from llmrecipes.bundle import rerun as again
    from llmrecipes.console import setup_logging
    from llmrecipes.workflow.run import Paths, TrainOptions

    setup_logging()
    paths = Paths(runs_dir, data_dir)
    train_options = TrainOptions(nproc=nproc, run_id=run_id, run=run_options)
    with _stdout_to_stderr() if as_json else nullcontext():
        ready = again.prepare(bundle, options, nproc, paths, _say)
        rows = [
            ("differs here", "bundle", "this machine"),
            *((name, *both) for name, both in ready.differences.items()),
        ]
        show(TextTable(rows) if len(rows) > 1 else "versions, code and hardware are those of the bundle")
        show(f"data: {ready.data}")
        result = again.rerun(ready, options, train_options, paths, _say)
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    elif result.losses is not None:
        show("", result.losses.text())
    return result.exit_code


def _say(line: str) -> None:
    show(line)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What this process and its ranks print goes to stderr, because stdout is for JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
