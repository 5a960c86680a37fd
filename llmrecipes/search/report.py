"""The report of a study: Optuna's plots in one HTML page that needs no network."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna import visualization
from optuna.trial import FrozenTrial, TrialState

from llmrecipes.io import write_atomic
from llmrecipes.recipe.schema import Recipe
from llmrecipes.search.best import best_trials
from llmrecipes.search.space import values_of
from llmrecipes.search.study import is_infeasible, own_trials, require_section

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

FEWEST = 2
"""Completed trials without which a plot says nothing."""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
td, th {{ border-bottom: 1px solid #ddd; padding: .2rem .8rem .2rem 0; text-align: left; }}
th {{ font-weight: 600; }}
section {{ margin: 2rem 0; }}
.scroll {{ overflow-x: auto; }}
</style>
<script>{plotly}</script>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


@dataclass(frozen=True)
class Plot:
    """A plot of the report."""

    title: str
    draw: Callable[[], Figure]


def write_report(study: optuna.Study, recipe: Recipe, path: Path) -> None:
    """Write the report.

    Raises:
        OSError: it cannot be written.
    """
    from plotly.offline import get_plotlyjs

    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"{study.study_name}: search of {recipe.name}"
    body = "\n".join([_summary(study, recipe), *_sections(study), _table(study, recipe)])
    write_atomic(path, PAGE.format(title=html.escape(title), plotly=get_plotlyjs(), body=body))


def plots(study: optuna.Study) -> list[Plot]:
    """The plots that the trials of a study are enough for."""
    names = study.metric_names or ["objective"]
    trials = study.get_trials(deepcopy=False)
    complete = [each for each in trials if each.state == TrialState.COMPLETE]
    found: list[Plot] = []
    if len(complete) >= FEWEST:
        for index, name in enumerate(names):
            found += _of_objective(study, complete, name, None if len(names) == 1 else index)
        if len(names) > 1:
            found.append(Plot("Trade-offs", partial(visualization.plot_pareto_front, study)))
    if any(each.intermediate_values for each in trials):
        found.append(Plot("Curves, pruned ones among them", partial(visualization.plot_intermediate_values, study)))
    found.append(Plot("Timeline", partial(visualization.plot_timeline, study)))
    return found


def _of_objective(study: optuna.Study, complete: list[FrozenTrial], name: str, index: int | None) -> Iterator[Plot]:
    told: dict[str, Any] = {"target_name": name}
    if index is not None:
        told["target"] = partial(_value, index)
    yield Plot(f"History of {name}", partial(visualization.plot_optimization_history, study, **told))
    searched = {key for each in complete for key in each.params}
    if not any(len({str(each.params.get(key)) for each in complete}) > 1 for key in searched):
        return
    drawn: dict[str, Callable[..., Figure]] = {
        f"Importance for {name}": visualization.plot_param_importances,
        f"Parallel coordinates, {name}": visualization.plot_parallel_coordinate,
        f"Slices, {name}": visualization.plot_slice,
    }
    for title, plot in drawn.items():
        yield Plot(title, partial(plot, study, **told))


def _value(index: int, trial: FrozenTrial) -> float:
    return float(trial.values[index])


def _sections(study: optuna.Study) -> Iterator[str]:
    for number, plot in enumerate(plots(study)):
        try:
            drawn = plot.draw().to_html(full_html=False, include_plotlyjs=False, div_id=f"plot-{number}")
        except (ValueError, RuntimeError) as error:  # Optuna refuses, for example, an importance of equal values
            drawn = f"<p>{html.escape(str(error))}</p>"
        yield f"<section><h2>{html.escape(plot.title)}</h2>\n{drawn}</section>"


def _summary(study: optuna.Study, recipe: Recipe) -> str:
    search = require_section(recipe)
    trials = list(own_trials(study))
    done = sum(each.state == TrialState.COMPLETE for each in trials)
    infeasible = sum(map(is_infeasible, trials))
    pruned = sum(each.state == TrialState.PRUNED for each in trials) - infeasible
    failed = sum(each.state == TrialState.FAIL for each in trials)
    rows = [
        ("recipe", recipe.name),
        ("sampler, pruner", f"{search.sampler.type}, {search.pruner.type if search.pruner else 'default'}"),
        ("trials", f"{done} complete, {pruned} pruned, {infeasible} that cannot run, {failed} failed"),
    ]
    for best in best_trials(study):
        values = ", ".join(f"{key}={value}" for key, value in values_of(best.params, search).items())
        measured = ", ".join(f"{name} {value:.5g}" for name, value in zip(search.objectives, best.values, strict=True))
        rows.append((f"best: trial {best.number}", f"{measured} with {values}"))
    cells = "\n".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in rows)
    return f"<table>{cells}</table>"


def _table(study: optuna.Study, recipe: Recipe) -> str:
    search = require_section(recipe)
    keys = [each.key for each in search.space]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("trial", "outcome", *search.objectives, *keys))
    rows = "\n".join(f"<tr>{_row(each, keys, len(search.objectives))}</tr>" for each in own_trials(study))
    return f'<section><h2>Trials</h2><div class="scroll"><table><tr>{head}</tr>\n{rows}</table></div></section>'


def _row(trial: FrozenTrial, keys: list[str], objectives: int) -> str:
    values = [f"{value:.5g}" for value in trial.values] if trial.values else []
    params = [trial.params.get(key, "") for key in keys]
    shown = [f"{each:.5g}" if isinstance(each, float) else str(each) for each in params]
    outcome = str(trial.user_attrs.get("outcome", trial.state.name.lower()))
    cells = [str(trial.number), outcome, *values, *[""] * (objectives - len(values)), *shown]
    return "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
