"""The plots of a study: Optuna's own, labelled and sized for one page."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import optuna
from optuna import visualization
from optuna.trial import FrozenTrial, TrialState

from llmrecipes.search.best import best_trials

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

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
    complete = [each for each in trials if each.state == TrialState.COMPLETE]
    found: list[Plot] = []
    if len(complete) >= FEWEST:
        for index, name in enumerate(names):
            found += _of_objective(study, complete, name, None if len(names) == 1 else index)
        if len(names) > 1:
            found.append(Plot("Trade-offs", partial(_trade_offs, study, names)))
    if any(each.intermediate_values for each in trials):
        found.append(Plot("Learning curves", partial(_curves, study, names[0])))
    if sum(each.datetime_start is not None for each in trials) >= FEWEST:
        found.append(Plot("Timeline", partial(_timeline, study)))
    return found


def labelled(name: str) -> str:
    """An objective with its unit."""
    return f"{name} [{UNITS[name]}]" if name in UNITS else name


def _of_objective(study: optuna.Study, complete: list[FrozenTrial], name: str, index: int | None) -> Iterator[Plot]:
    told: dict[str, Any] = {"target_name": labelled(name)}
    if index is not None:
        told["target"] = partial(_value, index)
    yield Plot(f"History of {name}", partial(visualization.plot_optimization_history, study, **told))
    searched = sorted({key for each in complete for key in each.params})
    if not any(len({str(each.params.get(key)) for each in complete}) > 1 for key in searched):
        return
    width = WIDTH_OF_A_KEY * (len(searched) + 1)
    importance = partial(visualization.plot_param_importances, study, **told)
    yield Plot(f"Importance for {name}", importance, note=IMPORTANCE)
    yield Plot(f"Parallel coordinates, {name}", partial(_parallel, study, searched, told), width)
    yield Plot(f"Slices, {name}", partial(_slices, study, told), width)


def _value(index: int, trial: FrozenTrial) -> float:
    return float(trial.values[index])


def _parallel(study: optuna.Study, keys: list[str], told: dict[str, Any]) -> Figure:
    figure = visualization.plot_parallel_coordinate(study, **told)
    # Optuna cuts names after 17 characters; its axes are sorted by name.
    figure.update_xaxes(ticktext=[told["target_name"].replace(" ", "<br>"), *map(_in_two_lines, keys)])
    figure.update_layout(showlegend=False)  # of infeasible trials, of which none is complete
    return figure


def _slices(study: optuna.Study, told: dict[str, Any]) -> Figure:
    figure = visualization.plot_slice(study, **told)
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
    trials = {f"Trial{each.number}": each for each in study.get_trials(deepcopy=False)}
    best = {each.number for each in best_trials(study)}
    shown: set[str] = set()
    for curve in figure.data:
        trial = trials[curve.name]
        state = "best" if trial.number in best else trial.state.name
        curve.update(
            name=NAMES.get(state, state.lower()), legendgroup=state, showlegend=state not in shown,
            line={"color": COLOURS.get(state, BEST), "width": 3 if state == "best" else 1},
            marker={"color": COLOURS.get(state, BEST), "size": 5},
            opacity=1.0 if state == "best" else 0.6,
            hovertemplate=f"trial {trial.number}: %{{y:.5g}} at evaluation %{{x}}<extra></extra>",
        )  # fmt: skip
        shown.add(state)
    figure.data = sorted(figure.data, key=lambda curve: curve.name == "best")
    longest = max(max(each.intermediate_values, default=0) for each in trials.values())
    figure.update_layout(
        showlegend=True, yaxis_title=labelled(name), xaxis={"title": "evaluation", "dtick": -(-longest // 10) or 1}
    )
    return figure


def _timeline(study: optuna.Study) -> Figure:
    figure = visualization.plot_timeline(study)
    for bars in figure.data:
        colour, name = COLOURS.get(bars.name, "#999999"), NAMES.get(bars.name, bars.name.lower())
        # Optuna's text has all attributes of a trial, such as the name of the machine it ran on.
        text = [f"trial {number} {name}" for number in bars.y]
        bars.update(name=name, text=text, hovertemplate="%{text}<extra></extra>", marker={"color": colour})
    figure.update_layout(xaxis_title="local time", yaxis_title="trial")
    return figure
