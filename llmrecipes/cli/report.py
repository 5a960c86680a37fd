"""`report`: parsing and printing only."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.options import DATA, RUNS, DataOption, JsonOption, RunsOption, site_option
from llmrecipes.errors import UserError

if TYPE_CHECKING:
    from llmrecipes.hardware.profile import Profile
    from llmrecipes.rundir import Run

SECONDS_BETWEEN_PAGES = 30
MOST_RUNS = 6


def report(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, recipe/run-ids, run ids, or recipe names (their newest runs); several are compared.",
            autocompletion=completion.runs,
        ),
    ],
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write to FILE; default: report.html in the run's directory."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help=f"Write it every {SECONDS_BETWEEN_PAGES} s until the run ends.")
    ] = False,
    cluster: Annotated[str | None, site_option("Use prices and power of this cluster profile.")] = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Write a page about a run: what looks wrong, curves, cost.

    The page is one HTML file that needs no network. A run that still trains can be reported too.
    """
    from llmrecipes.hardware.load import load_profile
    from llmrecipes.report import build
    from llmrecipes.rundir import Run

    runs = [Run.find(name, runs_dir) for name in names]
    if len(runs) > MOST_RUNS:
        raise UserError(f"{len(runs)} runs", where="RUN", rule=f"a page compares at most {MOST_RUNS} runs")
    if watch and len(runs) > 1:
        raise UserError(f"{len(runs)} runs", where="--watch", rule="--watch follows one run", fix="name one run")
    profile = None if cluster is None else load_profile(cluster)
    path = build.default_path(runs) if out is None else out
    running = _write(runs, path, data_dir, profile, watch=watch, as_json=as_json)
    if open_page:
        _open(path)
    try:
        while watch and running:
            time.sleep(SECONDS_BETWEEN_PAGES)
            running = _write(runs, path, data_dir, profile, watch=watch, as_json=True, silent=True)
    except KeyboardInterrupt:
        return


def _write(
    runs: list[Run],
    path: Path,
    data_dir: Path,
    profile: Profile | None,
    *,
    watch: bool,
    as_json: bool,
    silent: bool = False,
) -> bool:
    """Write the page; returns whether a run still trains."""
    from llmrecipes.report import build, comparison

    if len(runs) > 1:
        html, values = comparison.report([run.path for run in runs], data_dir, profile)
        running = False
    else:
        html, material = build.report(runs[0], data_dir, profile, SECONDS_BETWEEN_PAGES if watch else None)
        values, running = build.as_dict(material), material.running
    build.write(path, html)
    if silent:
        return running
    if as_json:
        print(json.dumps({"page": str(path), **values}, indent=2))
    else:
        print(f"{path}: {len(html) / 1e3:,.0f} KB; open it in a browser, or repeat the command with --open")
    return running


def _open(path: Path) -> None:
    import sys
    import webbrowser

    if not webbrowser.open(path.resolve().as_uri()):
        print(f"no browser on this machine; copy {path} to one that has a browser", file=sys.stderr)
