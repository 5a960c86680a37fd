"""`llmrecipes report`: the page of a run, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmrecipes import webpage
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.profile import Costs
from llmrecipes.io import write_atomic
from llmrecipes.plan import drawing
from llmrecipes.report import charts, machine_sections, model, training_sections
from llmrecipes.report.material import Material
from llmrecipes.rundir import Run

PAGE = "report.html"
COMPARISON = "comparison.html"
MEDIANS = ("tokens_per_second", "step_seconds", "mfu")

STYLE = """\
.box {
  border: 2px solid var(--line); border-left-width: .6rem; border-radius: 4px;
  margin: 1rem 0; padding: .25rem 1rem .75rem;
}
.box h2 { border: 0; margin: 0; padding-top: .5rem; }
.box.bad { background: var(--bad-page); border-color: var(--bad); }
.box.warn { background: var(--warn-page); border-color: var(--warn); }
.box.good { border-color: var(--good); }
.findings { margin: .25rem 0; padding-left: 1.1rem; }
.findings li { margin: .6rem 0; overflow-wrap: anywhere; }
.findings .error b:first-child { color: var(--bad); }
.findings .warning b:first-child { color: var(--warn); }
.findings p { margin: .1rem 0; }
.figures { display: grid; gap: .5rem; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); margin: 1rem 0; }
.figures div { background: var(--panel); border-radius: 4px; padding: .5rem .75rem; }
.figures dt { color: var(--muted); font-size: .85rem; }
.figures dd { font-size: 1.15rem; font-variant-numeric: tabular-nums; margin: 0; overflow-wrap: anywhere; }
nav ul { columns: 10rem auto; list-style: none; margin: .5rem 0; padding: 0; }
nav li { break-inside: avoid; padding: .1rem 0; }
details { margin: .5rem 0; }
summary { cursor: pointer; padding: .2rem 0; }
"""

Section = Callable[[Material], str]
SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("loss", "Loss", training_sections.loss),
    ("stages", "Stages", training_sections.stages),
    ("speed", "Speed", training_sections.speed),
    ("held-out", "Held-out text", training_sections.held_out),
    ("time", "Time line", training_sections.time_line),
    ("causes", "Where the time went", training_sections.causes),
    ("memory", "Memory", machine_sections.memory),
    ("plan", "Plan beside measured", machine_sections.planned),
    ("stragglers", "Stragglers", machine_sections.stragglers),
    ("nodes", "Nodes", machine_sections.nodes),
    ("model", "Model", model.picture),
    ("experts", "Experts", machine_sections.experts),
    ("layers", "Layers", model.layers),
    ("energy", "Energy and carbon", machine_sections.energy),
    ("cost", "Cost", machine_sections.cost),
    ("environment", "Environment", machine_sections.environment),
    ("doctor", "Checks of nodes and network", machine_sections.doctor),
    ("data", "Data", machine_sections.data),
    ("recipe", "Recipe", machine_sections.recipe),
    ("events", "Events", machine_sections.events),
    ("logs", "Logs", machine_sections.logs),
)


def report(run: Run, data_dir: Path, costs: Costs | None = None, refresh: int | None = None) -> tuple[str, Material]:
    """The page of a run, whatever its state.

    Args:
        data_dir: where its prepared data is, for the counts of its sources.
        costs: prices and power; None: they are left out.
        refresh: seconds after which a browser loads the page of a running run again; None: never.
    """
    material = Material.read(run, data_dir, costs)
    return page(material, refresh if material.running else None), material


def page(material: Material, refresh: int | None = None) -> str:
    """The page about what was read."""
    run, summary = material.run, material.summary
    again = "this page refreshes itself" if refresh else "run the same command again for a newer page"
    state = training_sections.STATES.get(summary.state, summary.state)
    about = f"{state}; last report {training_sections.when(summary.updated)}{machine_sections.age(material)}"
    body = [
        f"<h1>{webpage.text(run.name)}</h1>",
        f"<p>The run is {webpage.text(about)}.{f' Training continues: {again}.' if material.running else ''}</p>",
    ]
    if material.recipe is not None and material.recipe.description:
        body.append(f'<p class="muted">{webpage.text(material.recipe.description)}</p>')
    body.append(training_sections.problems(material))
    tiles = "".join(
        f"<div><dt>{webpage.text(name)}</dt><dd>{webpage.text(value)}</dd></div>"
        for name, value in training_sections.figures(material)
    )
    body.append(f'<dl class="figures">{tiles}</dl>')
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in SECTIONS)
    body.append(f'<nav aria-label="Sections"><ul>{links}</ul></nav>')
    body.append("<main>")
    body += [f'<section id="{name}"><h2>{title}</h2>\n{make(material)}</section>' for name, title, make in SECTIONS]
    body.append(
        f'</main><p class="muted">Written {training_sections.when(material.now)} from {webpage.text(run.path)}.</p>'
    )
    return webpage.page(
        f"Report of {run.name}", "\n".join(body), style=charts.STYLE + drawing.STYLE + STYLE, refresh=refresh
    )


def as_dict(material: Material) -> dict[str, Any]:
    """The numbers of a page, as JSON values."""
    past = material.history
    return {
        "run": material.run.name,
        **material.summary.as_dict(),
        "medians": {name: material.records.median(name) for name in MEDIANS},
        "findings": [finding.as_dict() for finding in material.findings],
        "unread": material.unread,
        "seconds": {"wall": past.wall, **past.causes},
        "starts": [vars(start) for start in past.starts],
        "rank_hours": past.rank_hours,
        "energy": {} if (used := machine_sections.used_energy(material)) is None else used.values(),
        "events": dict(material.records.events),
        "doctor": material.examined[-1] if material.examined else None,
    }


def write(path: Path, html: str) -> None:
    """Replace a page.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_atomic(path, html.encode("utf-8", "replace"), durable=False)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}",
            where=str(path),
            rule="by default, the page is written to the run directory",
            fix="--out FILE",
            code=ExitCode.BAD_INPUT,
        ) from error


def default_path(runs: Sequence[Run]) -> Path:
    """Where a page is written: in the folder of its run, a comparison in that of the first."""
    return runs[0].path / (PAGE if len(runs) == 1 else COMPARISON)
