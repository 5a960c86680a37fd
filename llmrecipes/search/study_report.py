"""The report of a study: best trial, how to train it, Optuna's plots; one HTML page that needs no network."""

from __future__ import annotations

import html
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna import visualization
from optuna.trial import FrozenTrial, TrialState

from llmrecipes.console import duration, number
from llmrecipes.io import write_atomic
from llmrecipes.recipe.schema import Recipe
from llmrecipes.redact import redact
from llmrecipes.search.best import best_trials
from llmrecipes.search.budget import Budget, used
from llmrecipes.search.samplers import pruner
from llmrecipes.search.space import evaluations, own_point, parameters, tokens_of_point
from llmrecipes.search.starting import REASON
from llmrecipes.search.study import Place, changes, recipe_of_study, require_section
from llmrecipes.search.trial import measured
from llmrecipes.search.trials import STANDARD_ERRORS, continues, own_trials

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


MOST_BEST = 12
"""Trade-offs next to each other; all of them are in the plot and the list of trials."""
# The policy lets a browser load nothing, whatever a name in the study contains.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; background: #fff; }}
h1, h2 {{ line-height: 1.2; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.2rem; margin-bottom: .3rem; }}
table {{ border-collapse: collapse; }}
td, th {{ border-bottom: 1px solid #ddd; padding: .2rem 1.2rem .2rem 0; text-align: left; vertical-align: top; }}
th {{ font-weight: 600; }}
pre {{ background: #f4f4f4; padding: .6rem .8rem; overflow-x: auto; }}
section {{ margin: 2rem 0; }}
.headline {{ font-size: 1.3rem; margin: .5rem 0 1rem; }}
.note {{ color: #666; margin: 0; }}
.scroll {{ overflow-x: auto; }}
.trials td {{ white-space: nowrap; }}
tr.best {{ background: #eef4fb; }}
tr.other td {{ color: #767676; }}
</style>
<script>{plotly}</script>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""  # noqa: E501
CONFIG = {"responsive": True, "displaylogo": False}


def write_report(
    study: optuna.Study, recipe: Recipe, path: Path, commands: Sequence[str] = (), place: Place | None = None
) -> None:
    """Write the report.

    Numbers are those of the recipe that the study was searched with, its overrides and limits included.

    Args:
        study: the study.
        recipe: as it is now, with the section `search`; the page says what has changed.
        path: path of the page.
        commands: that train the best recipes.
        place: place of the study, for what the runs of trials have recorded.

    Raises:
        OSError: it cannot be written.
    """
    from plotly.offline import get_plotlyjs

    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"Hyperparameter search {study.study_name}"
    then = recipe_of_study(study) or recipe
    body = [_headline(study, then), _best(study, then), *_training(commands), _facts(study, then, recipe, place)]
    body += [*_sections(study), _table(study)]
    write_atomic(path, PAGE.format(title=html.escape(title), plotly=get_plotlyjs(), body="\n".join(body)))


def _names(study: optuna.Study) -> list[str]:
    return study.metric_names or ["objective"]


def _own_trial(study: optuna.Study, recipe: Recipe) -> FrozenTrial | None:
    """The trial with the recipe's values, if it is complete."""
    point = own_point(recipe, require_section(recipe))
    done = (trial for trial in own_trials(study) if trial.state == TrialState.COMPLETE)
    return None if point is None else next((trial for trial in done if trial.params == parameters(point)), None)


def _headline(study: optuna.Study, recipe: Recipe) -> str:
    best = best_trials(study)
    own = _own_trial(study, recipe)
    if not best:
        return '<p class="headline">No trial is complete.</p>'
    if len(study.directions) > 1:
        return f'<p class="headline"><b>{len(best)} best trade-offs</b> of {html.escape(", ".join(_names(study)))}</p>'
    value = best[0].values[0]
    text = f"<b>{html.escape(labelled(_names(study)[0]))} {value:.5g}</b> in trial {best[0].number}"
    if own is not None and own.number == best[0].number:
        text += ", which has the recipe's values"
    elif own is not None:
        gain = (own.values[0] - value) / abs(own.values[0]) if own.values[0] else 0.0
        text += f", {gain:.1%} lower than with the recipe's own values ({own.values[0]:.5g})"
    return f'<p class="headline">{text}</p>'


def _best(study: optuna.Study, recipe: Recipe) -> str:
    best = best_trials(study)
    search = require_section(recipe)
    if not best:
        return ""
    point = own_point(recipe, search)
    trial = _own_trial(study, recipe)
    shown = best[:MOST_BEST]
    head = ["", *(f"trial {trial.number}" for trial in shown), "recipe"]
    rows = [
        [
            labelled(name),
            *(_measured(trial)[index] for trial in shown),
            _measured(trial)[index] if trial else "",
        ]
        for index, name in enumerate(_names(study))
    ]
    compared = parameters(point or {})
    rows += [[key, *(_text(trial.params.get(key)) for trial in shown), _text(compared.get(key))] for key in _keys(best)]
    lines = "".join(f"<tr><th>{html.escape(first)}</th>{_cells(rest)}</tr>\n" for first, *rest in rows)
    left_out = f'<p class="note">and {len(best) - MOST_BEST} more</p>' if len(best) > MOST_BEST else ""
    return f'<div class="scroll"><table class="best"><tr>{_cells(head, "th")}</tr>\n{lines}</table></div>{left_out}'


def _training(commands: Sequence[str]) -> Iterator[str]:
    if commands:
        yield f"<p>To train it:</p><pre>{html.escape(chr(10).join(commands))}</pre>"


def _facts(study: optuna.Study, recipe: Recipe, recipe_now: Recipe, place: Place | None) -> str:
    search = require_section(recipe)
    trials = list(own_trials(study))
    tokens = tokens_of_point(recipe, search)
    now = used(trials, tokens, search.min_improvement, place.run_dir if place else None)
    starts = [trial.datetime_start for trial in trials if trial.datetime_start]
    ends = [trial.datetime_complete for trial in trials if trial.datetime_complete]
    spent = [f"{number(now.tokens)} tokens", f"{now.gpu_hours:.3g} rank-hours"]
    if starts and ends:
        spent.append(f"{duration((max(ends) - min(starts)).total_seconds())} from the first trial to the last")
    budget = Budget(search.model_copy(update={"timeout": None}), tokens)  # a timeout is one of each process
    length = evaluations(recipe)
    rows = [
        ("recipe", recipe.name),
        ("trials", ", ".join(f"{count} {name}" for name, count in Counter(map(_outcome, trials)).most_common())),
        ("each trial", f"{number(tokens)} tokens, {length} evaluation{'s'[: length != 1]}"),
        ("used", ", ".join(spent)),
        ("limits", budget.spent(now) or f"left: {budget.left(now)}"),
        ("sampler, pruner", f"{search.sampler.type}, {type(pruner(search, length)).__name__}"),
        ("written", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
    ]
    if changed := changes(study, recipe_now):
        rows.append(("recipe has changed", "; ".join(map(str, changed))))
    lines = "".join(f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>\n" for name, text in rows)
    return f'<section><h2>Study</h2><table class="facts">{lines}</table></section>'


def _sections(study: optuna.Study) -> Iterator[str]:
    for place, plot in enumerate(plots(study)):
        try:
            figure = plot.figure()
            drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id=f"plot-{place}", config=CONFIG)
        except (ValueError, RuntimeError) as error:
            drawn = f"<p>{html.escape(str(error))}</p>"
        note = f'<p class="note">{html.escape(plot.note)}</p>' if plot.note else ""
        yield (
            f"<section><h2>{html.escape(plot.title)}</h2>{note}\n"
            f'<div class="scroll"><div style="min-width: {plot.width}px">{drawn}</div></div></section>'
        )


def _table(study: optuna.Study) -> str:
    trials = list(own_trials(study))
    names = _names(study)
    keys = _keys(trials)
    curves = any(trial.intermediate_values for trial in trials)
    reasons = any(REASON in trial.user_attrs for trial in trials)
    best = {trial.number for trial in best_trials(study)}
    head = ["trial", "outcome", *map(labelled, names), *["evaluations"] * curves, *keys, *["reason"] * reasons]
    lines = []
    for trial in trials:
        values = _measured(trial)
        cells = [_number(trial), _outcome(trial), *values, *[""] * (len(names) - len(values))]
        cells += [str(len(trial.intermediate_values))] * curves
        cells += [_text(trial.params.get(key)) for key in keys]
        cells += [redact(str(trial.user_attrs.get(REASON, ""))).partition("\n")[0]] * reasons
        kind = "best" if trial.number in best else "complete" if trial.state == TrialState.COMPLETE else "other"
        lines.append(f'<tr class="{kind}">{_cells(cells)}</tr>\n')
    table = f'<table class="trials"><tr>{_cells(head, "th")}</tr>\n{"".join(lines)}</table>'
    note = "Grey: not completed; the value is that of the last evaluation."
    return f'<section><h2>Trials</h2><p class="note">{note}</p><div class="scroll">{table}</div></section>'


def _number(trial: FrozenTrial) -> str:
    """The number of a trial, with the first one that it continues."""
    earlier = continues(trial)
    return f"{trial.number} (continues {min(earlier)})" if earlier else str(trial.number)


def _measured(trial: FrozenTrial) -> list[str]:
    return measured(trial.values or (), trial.user_attrs.get(STANDARD_ERRORS, ()))


def _outcome(trial: FrozenTrial) -> str:
    return str(trial.user_attrs.get("outcome", trial.state.name.lower()))


def _keys(trials: Iterable[FrozenTrial]) -> list[str]:
    """Keys of these trials, which may be fewer than are searched, in the order of the space."""
    return list(dict.fromkeys(key for trial in trials for key in trial.params))


def _text(value: Any) -> str:
    """A value as in a recipe; nothing for a key that is not searched in a trial."""
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _cells(texts: Iterable[str], tag: str = "td") -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


FEWEST = 2
"""Trials without which a plot of all trials says nothing."""
HEIGHT, WIDTH, WIDTH_OF_A_KEY = 420, 640, 170
"""In pixels. A narrower page scrolls a plot, so that labels do not overlap."""
UNITS = {"valid_loss": "nats/token", "valid_bits_per_byte": "bits/byte", "train_seconds": "s"}
COLOURS = {"COMPLETE": "#3b6fb6", "PRUNED": "#e8a33d", "FAIL": "#c8382e", "RUNNING": "#3a9a5b"}
BEST = "#111111"
NAMES = {"FAIL": "failed"}
IMPORTANCE = "Of each key for reaching the best tenth of the completed trials (PED-ANOVA)."


@dataclass(frozen=True)
class Plot:
    """A plot of the report.

    Attributes:
        title: heading.
        draw: makes the figure.
        width: pixels that it needs.
        note: sentence below the heading.
    """

    title: str
    draw: Callable[[], Figure]
    width: int = WIDTH
    note: str = ""

    def figure(self) -> Figure:
        """The figure, in the style of the page.

        Raises:
            ValueError, RuntimeError: Optuna cannot draw it, such as importances where all values are equal.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # few trials for an importance: the reader sees how many
            figure = self.draw()
        figure.update_layout(
            title=None, template="plotly_white", width=None, height=HEIGHT, margin={"t": 40, "b": 60, "l": 70, "r": 30}
        )
        return figure


def plots(study: optuna.Study) -> list[Plot]:
    """The plots that the trials of a study are enough for."""
    names = study.metric_names or ["objective"]
    trials = study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    all_plots: list[Plot] = []
    if len(complete) >= FEWEST:
        for index, name in enumerate(names):
            all_plots += _of_objective(study, complete, name, None if len(names) == 1 else index)
        if len(names) > 1:
            all_plots.append(Plot("Trade-offs", partial(_trade_offs, study, names)))
    if any(trial.intermediate_values for trial in trials):
        all_plots.append(Plot("Learning curves", partial(_curves, study, names[0])))
    if sum(trial.datetime_start is not None for trial in trials) >= FEWEST:
        all_plots.append(Plot("Timeline", partial(_timeline, study)))
    return all_plots


def labelled(name: str) -> str:
    """An objective with its unit."""
    return f"{name} [{UNITS[name]}]" if name in UNITS else name


def _of_objective(study: optuna.Study, complete: list[FrozenTrial], name: str, index: int | None) -> Iterator[Plot]:
    options: dict[str, Any] = {"target_name": labelled(name)}
    if index is not None:
        options["target"] = partial(_value, index)
    yield Plot(f"History of {name}", partial(visualization.plot_optimization_history, study, **options))
    searched = sorted({key for trial in complete for key in trial.params})
    if not any(len({str(trial.params.get(key)) for trial in complete}) > 1 for key in searched):
        return
    width = WIDTH_OF_A_KEY * (len(searched) + 1)
    importance = partial(visualization.plot_param_importances, study, **options)
    yield Plot(f"Importance for {name}", importance, note=IMPORTANCE)
    yield Plot(f"Parallel coordinates, {name}", partial(_parallel, study, searched, options), width)
    yield Plot(f"Slices, {name}", partial(_slices, study, options), width)


def _value(index: int, trial: FrozenTrial) -> float:
    return float(trial.values[index])


def _parallel(study: optuna.Study, keys: list[str], options: dict[str, Any]) -> Figure:
    figure = visualization.plot_parallel_coordinate(study, **options)
    # Optuna cuts names after 17 characters; its axes are sorted by name.
    figure.update_xaxes(ticktext=[options["target_name"].replace(" ", "<br>"), *map(_in_two_lines, keys)])
    figure.update_layout(showlegend=False)  # of infeasible trials, of which none is complete
    return figure


def _slices(study: optuna.Study, options: dict[str, Any]) -> Figure:
    figure = visualization.plot_slice(study, **options)
    figure.for_each_xaxis(lambda axis: axis.update(title_text=_in_two_lines(axis.title.text)))
    for points in figure.data:
        axis = figure.layout[(points.xaxis or "x").replace("x", "xaxis")]
        if axis.type == "log" and max(points.x) >= 10 * min(points.x):
            axis.dtick = 1  # powers of ten; the labels between them overlap
    return figure


def _in_two_lines(key: str) -> str:
    section, dot, name = key.rpartition(".")
    return f"{section}{dot}<br>{name}" if dot else name


def _trade_offs(study: optuna.Study, names: list[str]) -> Figure:
    return visualization.plot_pareto_front(study, target_names=[labelled(name) for name in names])


def _curves(study: optuna.Study, name: str) -> Figure:
    """Optuna's curves, coloured by how the trial ended, the best one on top."""
    figure = visualization.plot_intermediate_values(study)
    trials = {f"Trial{trial.number}": trial for trial in study.get_trials(deepcopy=False)}
    best = {trial.number for trial in best_trials(study)}
    shown: set[str] = set()
    for curve in figure.data:
        trial = trials[curve.name]
        state = "best" if trial.number in best else trial.state.name
        curve.update(
            name=NAMES.get(state, state.lower()),
            legendgroup=state,
            showlegend=state not in shown,
            line={"color": COLOURS.get(state, BEST), "width": 3 if state == "best" else 1},
            marker={"color": COLOURS.get(state, BEST), "size": 5},
            opacity=1.0 if state == "best" else 0.6,
            hovertemplate=f"trial {trial.number}: %{{y:.5g}} at evaluation %{{x}}<extra></extra>",
        )
        shown.add(state)
    figure.data = sorted(figure.data, key=lambda curve: curve.name == "best")
    longest = max(max(trial.intermediate_values, default=0) for trial in trials.values())
    figure.update_layout(
        showlegend=True, yaxis_title=labelled(name), xaxis={"title": "evaluation", "dtick": -(-longest // 10) or 1}
    )
    return figure


def _timeline(study: optuna.Study) -> Figure:
    figure = visualization.plot_timeline(study)
    for bars in figure.data:
        colour = COLOURS.get(bars.name, "#999999")
        name = NAMES.get(bars.name, bars.name.lower())
        # Optuna's text has all attributes of a trial, such as the name of the machine it ran on.
        text = [f"trial {number} {name}" for number in bars.y]
        bars.update(name=name, text=text, hovertemplate="%{text}<extra></extra>", marker={"color": colour})
    figure.update_layout(xaxis_title="local time", yaxis_title="trial")
    return figure
