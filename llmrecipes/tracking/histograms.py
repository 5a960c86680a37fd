"""Histograms of gradients and weights (`StepMetrics.histograms`) for trackers.

TensorBoard and W&B have histograms. MLflow has none: its run gets pictures and the counts as files, renewed during the
run. Their number and size do not grow with the run.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmrecipes.untrusted import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow.tracking import MlflowClient
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

LEAST_EXPONENT, MOST_EXPONENT = -200, 200
"""Of bins that are drawn; a file may say anything."""
MOST_SAMPLES = 64
"""Steps in the files of MLflow; every second is dropped when there are more."""
SECONDS_BETWEEN = 60.0
"""Between two versions of these files."""
FOLDER = "histograms"
COUNTS = "histograms/histograms.json"
_COLUMNS = 3


def edges(bins: Mapping[str, Any]) -> tuple[list[float], list[int]]:
    """Upper ends of the bins of a histogram, from the lowest, and their counts."""
    powers = [2.0 ** (bins["low"] + place) for place in range(len(bins["positive"]) + 1)]
    limits = [*(-power for power in powers[-2::-1]), powers[0], *powers[1:]]
    return limits, [*bins["negative"][::-1], bins["zero"], *bins["positive"]]


def lowest(bins: Mapping[str, Any], limits: list[float]) -> float:
    """The lower end of the first bin."""
    return 2 * limits[0] if bins["negative"] else -limits[0]


def sizes(histogram: Any) -> Counter[int]:
    """Values by the exponent of their magnitude, of either sign, without those that count as zero."""
    counts: Counter[int] = Counter()
    for place, value in _bins(histogram):
        counts[place] += value
    return counts


def _bins(histogram: Any) -> Iterator[tuple[int, int]]:
    low = number(histogram.get("low")) if isinstance(histogram, Mapping) else None
    if low is None:
        return
    for side in ("negative", "positive"):
        values = histogram.get(side)
        for place, value in enumerate(values if isinstance(values, list) else [], int(low)):
            if LEAST_EXPONENT <= place <= MOST_EXPONENT and (known := number(value)) is not None and known > 0:
                yield place, int(known)


class HistogramFiles:
    """The files of a run: a picture of each measure (`gradient`, `weight`) and the counts as JSON.

    They are made again from the run's record, so that what could not be sent is in the next version, and steps that a
    resumed run computes again replace those of the earlier start.

    Args:
        failed: called once with the reason, if the artifact store does not take them.
    """

    def __init__(self, failed: Callable[[str], None]) -> None:
        self._failed = failed
        self._has_failed = False
        self._kept: dict[int, Mapping[str, Any]] = {}
        self._last: tuple[int, Mapping[str, Any]] | None = None
        self._every, self._seen = 1, 0
        self._new, self._next = False, 0.0

    def add(self, values: Mapping[str, Any]) -> None:
        """Take in a line of metrics.jsonl; one that was seen before, which could not be sent, counts once."""
        step = values["step"]
        histograms = values.get("histograms")
        if not isinstance(histograms, Mapping) or (self._last is not None and step <= self._last[0]):
            return
        self._last = (step, histograms)
        self._new = True
        if self._seen % self._every == 0:
            self._kept[step] = histograms
            if len(self._kept) > MOST_SAMPLES:
                self._kept = dict(list(self._kept.items())[::2])
                self._every *= 2
        self._seen += 1

    def samples(self) -> dict[int, Mapping[str, Any]]:
        """Histograms by step, spread evenly over the run, and the newest."""
        return self._kept | ({} if self._last is None else dict([self._last]))

    def upload(self, client: MlflowClient, run_id: str, *, last: bool = False) -> None:
        """Send the files if there are new values and it is time, or the run ends; a failure is not an error."""
        now = time.monotonic()
        if not self._new or (not last and now < self._next):
            return
        self._next = now + SECONDS_BETWEEN
        samples = self.samples()
        try:
            client.log_text(run_id, json.dumps(_by_kind(samples)), COUNTS)
            for measure in ("gradient", "weight"):
                if (figure := picture(measure, samples)) is not None:
                    client.log_figure(run_id, figure, f"{FOLDER}/{measure}.png")
        except Exception as error:  # a store without its library or permissions must not block metrics
            logger.warning("histograms were not uploaded", exc_info=True)
            if not self._has_failed:
                self._failed(f"{type(error).__name__}: {error}")
            self._has_failed = True
            return
        self._new = False


def _by_kind(samples: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """`gradient` and `weight`: by kind a list with `step`, `low`, `zero`, `negative`, `positive`."""
    by_kind: dict[str, dict[str, list[Any]]] = {}
    for step, histograms in samples.items():
        for measure, kinds in histograms.items():
            for kind, bins in kinds.items():
                by_kind.setdefault(measure, {}).setdefault(kind, []).append({"step": step, **bins})
    return by_kind


def picture(measure: str, samples: Mapping[int, Mapping[str, Any]]) -> Figure | None:
    """The values of a measure by size: a map of each kind, steps from left to right, darker for more of its values.

    Args:
        measure: `gradient` or `weight`.
        samples: histograms by step.

    Returns:
        None if nothing was measured.
    """
    from matplotlib.figure import Figure

    of_kinds = {step: each.get(measure, {}) for step, each in samples.items()}
    counts = {step: {kind: sizes(bins) for kind, bins in each.items()} for step, each in of_kinds.items()}
    kinds = list(dict.fromkeys(kind for count in counts.values() for kind, size in count.items() if size))
    if not kinds:
        return None
    places = [place for count in counts.values() for size in count.values() for place in size]
    low, high = min(places), max(places)
    rows = -(-len(kinds) // _COLUMNS)
    figure = Figure(figsize=(4 * _COLUMNS, 2.6 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False)
    steps = list(counts)
    for place, (axes, kind) in enumerate(zip(grid.flat, kinds, strict=False)):
        axes.tick_params(labelbottom=place + _COLUMNS >= len(kinds))  # the lowest of its column
        shares = _shares([counts[step].get(kind) or Counter() for step in steps], low, high)
        axes.imshow(shares, origin="lower", aspect="auto", cmap="Blues", vmin=0, interpolation="nearest",
                    extent=(-0.5, len(steps) - 0.5, low, high + 1))  # fmt: skip
        zeros = _zeros(of_kinds[steps[-1]].get(kind))
        axes.set_title(kind.replace("_", " ") + (f" ({zeros:.1%} zeros)" if zeros >= 0.001 else ""), fontsize="medium")
        shown = sorted({0, len(steps) // 2, len(steps) - 1})
        axes.set_xticks(shown, [f"{steps[column]:,}" for column in shown])
        axes.yaxis.set_major_formatter(lambda value, _: f"$2^{{{value:.0f}}}$")
        axes.yaxis.get_major_locator().set_params(integer=True)
    for axes in list(grid.flat)[len(kinds) :]:
        axes.set_visible(False)
    figure.suptitle(f"{measure.capitalize()}s by size, of either sign, over the steps: share of each kind")
    return figure


def _shares(columns: Sequence[Counter[int]], low: int, high: int) -> NDArray[Any]:
    """The share of each exponent from `low` to `high` in each column; NaN: no value has it."""
    import numpy as np

    shares = np.full((high - low + 1, len(columns)), np.nan)
    for column, size in enumerate(columns):
        for exponent, count in size.items():
            shares[exponent - low, column] = count / size.total()
    return shares


def _zeros(bins: Any) -> float:
    """The share of values that count as zero."""
    zeros = (number(bins.get("zero")) if isinstance(bins, Mapping) else None) or 0
    return zeros / (zeros + sizes(bins).total()) if zeros else 0.0
