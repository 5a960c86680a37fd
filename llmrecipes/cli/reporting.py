"""`report`: parsing and printing only."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import DATA, RUNS, DataOption, JsonOption, RunsOption, site_option
from llmrecipes.errors import UserError

SECONDS_BETWEEN_PAGES = 30


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
        bool, typer.Option("--watch", help=f"Rewrite the page every {SECONDS_BETWEEN_PAGES} s until the run ends.")
    ] = False,
    cluster: Annotated[str | None, site_option("Use prices and power of this cluster profile.")] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--usd-per-gpu-hour", metavar="PRICE", min=1e-6, help="Price instead of that of the cluster profile."
        ),
    ] = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Write a page about a run: what looks wrong, curves, cost.

    The page is a single HTML file that needs no network. The run may still be training.
    """
    from llmrecipes.hardware.load import load_profile
    from llmrecipes.hardware.profile import Costs
    from llmrecipes.report.comparison_page import write
    from llmrecipes.rundir import Run

    runs = [Run.find(name, runs_dir) for name in names]
    if watch and len(runs) > 1:
        raise UserError(f"{len(runs)} runs", where="--watch", rule="--watch follows a single run", fix="a single run")
    costs = None if cluster is None else load_profile(cluster).costs
    if price is not None:
        costs = (costs or Costs()).model_copy(update={"usd_per_gpu_hour": price})
    refresh = SECONDS_BETWEEN_PAGES if watch else None
    values, running = write(runs, out, data_dir, costs, refresh)
    path = Path(values["page"])
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        size = path.stat().st_size / 1e3
        print(f"{path}: {size:,.0f} KB; open it in a browser, or use --open")
    if open_page:
        _open(path)
    try:
        while watch and running:
            time.sleep(SECONDS_BETWEEN_PAGES)
            _, running = write(runs, path, data_dir, costs, refresh)
    except KeyboardInterrupt:
        return


def _open(path: Path) -> None:
    import sys
    import webbrowser

    if not webbrowser.open(path.resolve().as_uri()):
        print(f"no browser on this machine; copy {path} to one that has a browser", file=sys.stderr)
