"""Draw a study of `llmrecipes search` for the documentation, and print its trials as a table.

python tools/draw_study.py JOURNAL STUDY FILE.svg
"""

from __future__ import annotations

import argparse
from itertools import accumulate
from pathlib import Path

import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

COMPLETE, PRUNED = "tab:blue", "tab:gray"


def draw(study: optuna.Study, file: Path) -> None:
    """Write history, curves and importances of a study with one objective."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    history, curves, importance = figure.subplots(1, 3)
    done = [each for each in study.trials if each.state == TrialState.COMPLETE]
    _history(history, done)
    _curves(curves, study.trials)
    found = optuna.importance.get_param_importances(study)
    names = list(reversed(found))
    bars = importance.barh(names, [found[name] for name in names], color=COMPLETE)
    importance.bar_label(bars, fmt="%.2f", padding=3)
    importance.set(title="Importance, over complete trials", xlim=(0, 1))
    figure.savefig(file, metadata={"Date": None})


def _history(axes: Axes, done: list[FrozenTrial]) -> None:
    numbers, values = [each.number for each in done], [each.values[0] for each in done]
    axes.plot(numbers, values, "o", color=COMPLETE, label="complete trial")
    axes.step(numbers, list(accumulate(values, min)), where="post", color="tab:orange", label="best so far")
    axes.set(title="History", xlabel="trial", ylabel="validation loss at its end")
    axes.legend()


def _curves(axes: Axes, trials: list[FrozenTrial]) -> None:
    for state, colour, style in ((TrialState.COMPLETE, COMPLETE, "-"), (TrialState.PRUNED, PRUNED, "x--")):
        for number, each in enumerate(trial for trial in trials if trial.state == state):
            found = sorted(each.intermediate_values.items())
            label = state.name.lower() if number == 0 else None
            axes.plot([key for key, _ in found], [value for _, value in found], style, color=colour, label=label)
    axes.set(title="Curves", xlabel="evaluation", ylabel="validation loss")
    axes.locator_params(axis="x", integer=True)
    axes.legend()


def table(study: optuna.Study) -> str:
    """The trials in Markdown."""
    keys = sorted({key for trial in study.trials for key in trial.params})
    rows = [["trial", "outcome", "evaluations", "last loss", *keys]]
    for each in study.trials:
        losses = [value for _, value in sorted(each.intermediate_values.items())]
        outcome = str(each.user_attrs.get("outcome", each.state.name.lower()))
        values = [f"{each.params[key]:.3g}" if key in each.params else "" for key in keys]
        rows.append([str(each.number), outcome, str(len(losses)), f"{losses[-1]:.4f}" if losses else "", *values])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("journal", type=Path)
    parser.add_argument("study")
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    storage = JournalStorage(JournalFileBackend(str(given.journal)))
    study = optuna.load_study(study_name=given.study, storage=storage)
    draw(study, given.file)
    print(table(study))


if __name__ == "__main__":
    main()
