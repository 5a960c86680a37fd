"""The page that compares runs: what differs in their recipes, their curves over one axis, their figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmrecipes import webpage
from llmrecipes.console import duration
from llmrecipes.errors import UserError
from llmrecipes.hardware.profile import Costs
from llmrecipes.report import charts, run_page, training_sections
from llmrecipes.report.charts import Line
from llmrecipes.report.machine_sections import flat, used_energy
from llmrecipes.report.material import Material
from llmrecipes.report.run_page import STYLE
from llmrecipes.report.starts import CAUSES
from llmrecipes.rundir import Run
from llmrecipes.tracking.energy import energy_rows
from llmrecipes.units import GIB, gib
from llmrecipes.workflow.compare import Curve, RunComparison, compare, figure_rows

BATCH_KEYS = ("train.global_batch_size", "model.seq_length")
MOST_RUNS = 6


def write(
    runs: Sequence[Run], path: Path | None, data_dir: Path, costs: Costs | None = None, refresh: int | None = None
) -> tuple[dict[str, Any], bool]:
    """Write the page of a run, or that of several; the arguments are those of `build.report`.

    Args:
        path: of the page; None: `build.default_path`.

    Returns:
        Its numbers and `page`, its path; and whether the run still trains.

    Raises:
        UserError: too many runs, the page cannot be written, or as `report`.
    """
    if len(runs) > MOST_RUNS:
        raise UserError(f"{len(runs)} runs", where="RUN", rule=f"a page can compare at most {MOST_RUNS} runs")
    running = False
    if len(runs) > 1:
        html, values = report([run.path for run in runs], data_dir, costs)
    else:
        html, material = run_page.report(runs[0], data_dir, costs, refresh)
        values = run_page.as_dict(material)
        running = material.running
    path = run_page.default_path(runs) if path is None else path
    run_page.write(path, html)
    return {"page": str(path), **values}, running


def report(run_dirs: Sequence[Path], data_dir: Path, costs: Costs | None = None) -> tuple[str, dict[str, Any]]:
    """The page of several runs, and its numbers as JSON values.

    What cannot be read of a run is named, and left out.
    """
    compared = compare(run_dirs, partial=True)
    materials = [Material.read(Run(run_dir), data_dir, costs) for run_dir in run_dirs]
    names = _names(run_dirs)
    body = [f"<h1>{webpage.text(' and '.join(names) if len(names) == 2 else f'{len(names)} runs')}</h1>"]
    sections = [
        ("problems", "What looks wrong", _problems(names, materials)),
        ("differences", "Differences in the recipes", _differences(names, compared)),
        ("figures", "Figures", _figures(names, compared, materials)),
        ("curves", "Curves", _curves(names, compared, materials)),
        ("causes", "Where the time went", _causes(names, materials)),
        ("environment", "Differences in the environment", _environments(names, materials)),
    ]
    body += [f'<section id="{key}"><h2>{title}</h2>\n{text}</section>' for key, title, text in sections]
    body.append(f'<p class="muted">Written {training_sections.when(materials[0].now)}.</p>')
    html = webpage.page(f"Comparison of {', '.join(names)}", "\n".join(body), style=charts.STYLE + STYLE)
    return html, compared.as_dict()


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """Names that differ: run ids if they do, else recipe/run-id, else paths."""
    for names in ([Run(path).run_id for path in run_dirs], [Run(path).name for path in run_dirs]):
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in run_dirs]


def _problems(names: Sequence[str], materials: Sequence[Material]) -> str:
    rows = [
        (
            name,
            training_sections.SEVERITY.get(finding.severity, finding.severity),
            finding.title,
            training_sections.steps_of(finding.first_step, finding.last_step),
            finding.text,
        )
        for name, material in zip(names, materials, strict=True)
        for finding in material.findings
    ]
    for name, material in zip(names, materials, strict=True):
        absent = material.unread if len(material.records) else [material.records.missing, *material.unread]
        rows += [(name, "note", "Missing or unreadable", "", text) for text in dict.fromkeys(absent)]
    if not rows:
        return training_sections.nothing("Nothing: no check found a problem in these runs.")
    return webpage.table(("run", "severity", "what", "where", "details"), rows)


def _differences(names: Sequence[str], compared: RunComparison) -> str:
    if not compared.differences:
        unread = [name for name, run in zip(names, compared.runs, strict=True) if run.recipe is None]
        but = f" The recipe of {', '.join(unread)} cannot be read." if unread else ""
        known = (
            "The recipes are the same."
            if len(names) - len(unread) > 1
            else "There are fewer than two recipes to compare."
        )
        return training_sections.nothing(known + but)
    rows = [
        (key, *(value if isinstance(value, str) else json.dumps(value) for value in values))
        for key, values in compared.differences.items()
    ]
    same = training_sections.nothing("The same experiment, executed otherwise.") if compared.same_experiment else ""
    return webpage.table(("key", *names), rows) + same


def _figures(names: Sequence[str], compared: RunComparison, materials: Sequence[Material]) -> str:
    rows: list[tuple[str, ...]] = [
        ("state", *(run.state for run in compared.runs)),
        ("steps", *(f"{run.figures['steps']:,.0f}" for run in compared.runs)),
        *figure_rows(compared.runs, "unknown"),
    ]
    memory = [run.figures["memory_bytes"] for run in compared.runs]
    rows.append(("memory, peak of rank 0", *("unknown" if not size else gib(int(size)) for size in memory)))
    rows.append(("time", *(duration(material.history.wall) for material in materials)))
    rows.append(("interruptions", *(str(material.history.interruptions) for material in materials)))
    hours = [material.history.rank_hours for material in materials]
    rows.append(("rank-hours", *("unknown" if hour is None else f"{hour:,.3g}" for hour in hours)))
    energies = [used_energy(material) for material in materials]
    tokens = [run.figures["tokens"] or 0 for run in compared.runs]
    rows += energy_rows(energies, tokens, "unknown")
    return webpage.table(("figure", *names), rows, numbers=range(1, len(names) + 1))


def _curves(names: Sequence[str], compared: RunComparison, materials: Sequence[Material]) -> str:
    along = "tokens" if any(key in compared.differences for key in BATCH_KEYS) else "step"
    loss = [_line(name, curve, along) for name, curve in zip(names, (run.train for run in compared.runs), strict=True)]
    valid = [
        _line(name, curve, along, points=True)
        for name, curve in zip(names, (run.valid for run in compared.runs), strict=True)
    ]
    drawn = [
        charts.curves("Training loss", loss, unit="nats a token", along=along),
        charts.curves("Held-out loss", valid, unit="nats a token", along=along),
    ]
    for title, key in (
        ("Tokens a second", "tokens_per_second"),
        ("Gradient norm before clipping", "grad_norm"),
        ("Memory, peak of rank 0, GiB", "memory_bytes"),
    ):
        lines = [
            Line(
                name,
                each.records["consumed_tokens"] if along == "tokens" else np.array(each.records.steps, float),
                each.records[key] / (GIB if key == "memory_bytes" else 1),
            )
            for name, each in zip(names, materials, strict=True)
        ]
        drawn.append(charts.curves(title, lines, along=along))
    return f'<div class="charts">{"".join(drawn)}</div>'


def _line(name: str, curve: Curve, along: str, *, points: bool = False) -> Line:
    x = np.array(curve.tokens if along == "tokens" else curve.steps, dtype=np.float64)
    return Line(name, x, np.array(curve.losses, dtype=np.float64), points=points and len(x) <= 100)


def _causes(names: Sequence[str], materials: Sequence[Material]) -> str:
    keys = [key for key in CAUSES if any(key in material.history.causes for material in materials)]
    rows = []
    for key in keys:
        cells = []
        for material in materials:
            seconds = material.history.causes.get(key, 0.0)
            share = seconds / material.history.wall if material.history.wall else math.nan
            cells.append(f"{duration(seconds)} ({share:.1%})" if seconds else "none")
        rows.append((CAUSES[key], *cells))
    return (
        webpage.table(("what", *names), rows, numbers=range(1, len(names) + 1))
        if rows
        else training_sections.nothing("No times were recorded.")
    )


def _environments(names: Sequence[str], materials: Sequence[Material]) -> str:
    environments = [dict(flat(material.environment)) for material in materials]
    keys = [
        key
        for key in dict.fromkeys(key for values in environments for key in values)
        if len({values.get(key, "") for values in environments}) > 1
    ]
    if not keys:
        return training_sections.nothing("No differences.")
    return webpage.table(("key", *names), [(key, *(values.get(key, "") for values in environments)) for key in keys])
