"""Fits the coefficients of the time model to measured runs, and cross-validates them.

    python benchmarks/fit_planner.py ROWS.csv… [--write]
    python benchmarks/fit_planner.py ROWS.csv… --cross source|model|group [--json OUT]

Fitted are the shares of the peaks that kernels and links of a GPU reach, latencies, host time of a launch, and how far
a framework is from them. A framework's factors are drawn towards those of the default, so that one with few rows stays
near it and one without any has them; the default and the GPUs are drawn, more weakly, towards neutral values. The loss
grows linearly with large errors, and a source with many rows counts less than their number.

A cross-validation fits again without some rows and predicts them: those of a source (with the default's factors, where
no other source has its framework), of a model of the sweeps, or of a fifth of the sweeps' groups. What a framework
does (`sharded`, `flash` and other switches of stacks.json that are not fitted) is known in all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import planner
from llmrecipes.plan.speed import device as devices
from llmrecipes.plan.speed.device import Device, Stack
from llmrecipes.plan.speed.step import predict

Name = tuple[str, str, str]
"""Kind (device, default or stack), which, and a coefficient."""

NEUTRAL = {
    "gemm": (0.8, 0.15), "gemm_fp8": (0.65, 0.2), "gemm_depth": (150, 0.5), "attention": (0.5, 0.3),
    "memory": (0.8, 0.1), "launch": (1e-5, 0.6), "links": (0.8, 0.2), "hop_near": (4e-6, 0.3), "hop_far": (2e-5, 0.3),
}  # fmt: skip
"""Of every GPU: a value that owes nothing to the rows, and the standard deviation of its logarithm."""
DEFAULT = {"passes": (1.6, 0.3), "host": (2.0, 0.6), "links": (0.8, 0.3)}
"""Of a framework of which nothing is known; `gemm` and `attention` are 1, a GPU's shares."""
SPREAD = {"gemm": 0.12, "attention": 0.25, "passes": 0.3, "host": 0.7, "links": 0.3}
"""How far a framework's logarithm may be from the default's: a standard deviation."""
STACK = {
    "nanotron": ("stall", "hop", "rails", "crowd", "overlap_gradients"),
    "llm-foundry": ("overlap_gradients",),
    "megatron": ("overlap_tensor",),
    "moe-zoo": ("overlap_expert", "overlap_tensor"),
}
"""What else is fitted of a framework, around its present value."""
ALIKE = {"moe-zoo": "megatron", "megatron-2021": "megatron-deepspeed", "megatron-2022": "megatron-deepspeed"}
"""A framework that has another one's factors."""
SHARES = {"overlap_gradients", "overlap_tensor", "overlap_expert"}
LIMITS = {"gemm": 1.0, "gemm_fp8": 1.0, "attention": 1.2, "memory": 0.95, "links": 1.0, "rails": 1.0}
SCALE = 0.06
"""Relative error at which the loss begins to be linear."""
ROWS = 30
"""A source of more rows than these has the weight of their square root."""


def _to(name: str, value: float) -> float:
    if name in SHARES:
        value = min(max(value, 0.02), 0.98)
        return math.log(value / (1 - value))
    return math.log(max(value, 1e-9))


def _from(name: str, value: float) -> float:
    return 1 / (1 + math.exp(-value)) if name in SHARES else math.exp(value)


def _family(stack: Stack) -> str:
    return ALIKE.get(stack.name, stack.name)


class Fit:
    """Rows, and the coefficients that they depend on."""

    def __init__(self, rows: Sequence[planner.Row]) -> None:
        self.rows: list[planner.Row] = []
        self.readings: list[planner.Reading] = []
        measured, mfus = [], []
        for row in rows:
            tokens = planner.number(row, "tokens_per_s_per_gpu")
            # Hybrids of state spaces and attention are not modelled.
            if not tokens or "nemotron-h" in row["model"].lower():
                continue
            reading = planner.read(row)
            self.rows.append(row)
            self.readings.append(reading)
            measured.append(math.log(tokens))
            mfus.append(tokens * reading.work.flops(causal=False) / reading.device.peak["bf16"])
        self.measured, self.mfu = np.array(measured), np.array(mfus)
        self.source = [planner.source_of(row) for row in self.rows]
        self.names: list[Name] = []
        self.start, self.spread = np.zeros(0), np.zeros(0)
        start, spread = [], []

        def add(name: Name, value: float, deviation: float) -> None:
            self.names.append(name)
            start.append(value)
            spread.append(deviation)

        for gpu in sorted({reading.device.name for reading in self.readings}):
            for key, (value, deviation) in NEUTRAL.items():
                add(("device", gpu, key), _to(key, value), deviation)
        for key, (value, deviation) in DEFAULT.items():
            add(("default", "", key), _to(key, value), deviation)
        present = {_family(reading.stack): reading.stack for reading in self.readings}
        exact = {reading.stack.name: reading.stack for reading in self.readings}
        for stack in sorted(present):
            for key, deviation in SPREAD.items():
                if stack != "default":
                    add(("stack", stack, key), 0.0, deviation)
        for stack, keys in STACK.items():
            for key in keys:
                if stack in exact:
                    add(("stack", stack, key), _to(key, float(getattr(exact[stack], key))), 0.5)
        self.start, self.spread = np.array(start), np.array(spread)

    def present(self) -> np.ndarray:
        """The package's coefficients."""
        default = devices.stack_of("default")
        gpus = {reading.device.name: devices.device(reading.device.name) for reading in self.readings}
        values = []
        for kind, which, key in self.names:
            if kind == "device":
                values.append(_to(key, getattr(gpus[which], key)))
            elif kind == "default":
                values.append(_to(key, getattr(default, key)))
            elif key in SPREAD:
                values.append(math.log(getattr(devices.stack_of(which), key) / getattr(default, key)))
            else:
                values.append(_to(key, getattr(devices.stack_of(which), key)))
        return np.array(values)

    def weights(self, which: Sequence[int]) -> np.ndarray:
        """Of rows in a fit: runs far below a GPU's possibilities have causes that no formula has."""
        counts = Counter(self.source[index] for index in which)
        many = np.array([max(1.0, counts[self.source[index]] / ROWS) ** -0.25 for index in which])
        mfu = self.mfu[which]
        return many * np.where(mfu > 0.2, 1.0, np.where(mfu > 0.08, 0.5, 0.2))

    def coefficients(self, vector: np.ndarray) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """Of GPUs and of frameworks; those of the default are under `default`."""
        gpus: dict[str, dict[str, float]] = defaultdict(dict)
        default: dict[str, float] = {"gemm": 1.0, "attention": 1.0}
        stacks: dict[str, dict[str, float]] = {"default": default}
        for (kind, which, key), value in zip(self.names, vector, strict=True):
            if kind == "device":
                gpus[which][key] = _from(key, value)
            elif kind == "default":
                default[key] = _from(key, value)
            else:
                factors = stacks.setdefault(which, dict(default))
                factors[key] = default[key] * math.exp(value) if key in SPREAD else _from(key, value)
        for values in stacks.values():
            for key in values.keys() & LIMITS.keys() - {"gemm", "attention"}:
                values[key] = min(values[key], LIMITS[key])
        return gpus, stacks

    def predictions(
        self, vector: np.ndarray, which: Sequence[int], unknown: frozenset[str] = frozenset()
    ) -> np.ndarray:
        """Logarithm of the throughput of some rows; frameworks in `unknown` have the default's factors."""
        gpus, stacks = self.coefficients(vector)
        made: dict[Any, Any] = {}
        result = np.empty(len(which))
        for place, index in enumerate(which):
            reading = self.readings[index]
            gpu = made.get(id(reading.device))
            if gpu is None:
                gpu = made[id(reading.device)] = _changed(reading.device, gpus[reading.device.name])
            software = made.get(reading.stack)
            if software is None:
                family = _family(reading.stack)
                changes = dict(stacks["default"] if family in unknown else stacks.get(family, stacks["default"]))
                if reading.stack.name != family:
                    changes |= {key: stacks[reading.stack.name][key] for key in STACK.get(reading.stack.name, ())
                                if reading.stack.name in stacks}  # fmt: skip
                software = made[reading.stack] = replace(reading.stack, **_words(reading.stack, changes))
            work = reading.work
            seconds = predict(gpu, software, work).seconds
            result[place] = math.log(work.gbs * work.seq / work.gpus / seconds)
        return result

    def run(self, which: Sequence[int], evaluations: int, begin: np.ndarray | None = None) -> np.ndarray:
        """The best coefficients for some rows, in logarithms; the search begins at neutral values or at `begin`."""
        weights, measured = self.weights(which), self.measured[which]

        def soft(predicted: np.ndarray) -> np.ndarray:
            errors = (predicted - measured) * weights / SCALE
            result: np.ndarray = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
            return result

        def residuals(vector: np.ndarray) -> np.ndarray:
            return np.concatenate([soft(self.predictions(vector, which)), (vector - self.start) / self.spread])

        def jacobian(vector: np.ndarray) -> np.ndarray:
            values = self.predictions(vector, which)
            base = soft(values)
            result = np.zeros((len(which) + len(vector), len(vector)))
            for column, (kind, name, _) in enumerate(self.names):
                result[len(which) + column, column] = 1 / self.spread[column]
                places = [p for p, index in enumerate(which) if self._concerns(index, kind, name)]
                if not places:
                    continue
                moved = vector.copy()
                moved[column] += 0.02
                changed = values.copy()
                changed[places] = self.predictions(moved, [which[p] for p in places])
                result[: len(which), column] = (soft(changed) - base) / 0.02
            return result

        upper = np.array(
            [
                _to(key, LIMITS[key]) if key in LIMITS and (kind != "stack" or key == "rails") else np.inf
                for kind, _, key in self.names
            ]
        )
        from scipy.optimize import least_squares  # not at the top: it takes a third of a second

        # Launches that are too slow show in every row, those that are hidden in none.
        slow = np.array([2.0 * (key == "launch") for _, _, key in self.names])
        start = np.minimum(self.start + slow if begin is None else begin, upper - 1e-3)
        done = least_squares(residuals, start, jac=jacobian, bounds=(-np.inf, upper), max_nfev=evaluations)
        return np.asarray(done.x)

    def _concerns(self, index: int, kind: str, name: str) -> bool:
        reading = self.readings[index]
        if kind == "device":
            return reading.device.name == name
        return kind == "default" or name in (reading.stack.name, _family(reading.stack))

    def store(self, vector: np.ndarray) -> None:
        """Write the coefficients into the package's data files."""
        folder = Path(devices.__file__).with_name("data")
        gpus, stacks = self.coefficients(vector)
        for name, values in gpus.items():
            path = folder / f"{name}.json"
            data = json.loads(path.read_text(encoding="utf-8"))
            before = dict(data["values"])
            data["values"] |= {key: float(f"{value:.3g}") for key, value in values.items()}
            for variant in data["variants"].values():
                for key in variant.keys() & {"gemm", "gemm_fp8"}:
                    variant[key] = float(f"{variant[key] * values[key] / before[key]:.3g}")
            path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        path = folder / "stacks.json"
        data = json.loads(path.read_text(encoding="utf-8"))
        for name, entry in [("default", data["default"]), *((n, e["values"]) for n, e in data["stacks"].items())]:
            factors = dict(stacks.get(ALIKE.get(name, name), stacks["default"]))
            factors |= {key: stacks[name][key] for key in STACK.get(name, ()) if name in stacks}
            factors = {key: value for key, value in factors.items() if key in SPREAD or key in STACK.get(name, ())
                       or key in STACK.get(ALIKE.get(name, ""), ())}  # fmt: skip
            entry.update({key: float(f"{value:.3g}") for key, value in factors.items()})
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _changed(gpu: Device, values: dict[str, float]) -> Device:
    """A variant that is slower by its data file, as with a lower limit of power, stays so."""
    ratio = {key: getattr(gpu, key) / getattr(devices.device(gpu.name), key) for key in ("gemm", "gemm_fp8")}
    return replace(gpu, **{key: value * ratio.get(key, 1.0) for key, value in values.items()})


def _words(stack: Stack, changes: dict[str, float]) -> dict[str, Any]:
    """Without what single words of the source say, which no fit changes."""
    plain = devices.stack_of(stack.name)
    return {key: value for key, value in changes.items() if key in SPREAD or getattr(stack, key) == getattr(plain, key)}


def _folds(fit: Fit, by: str) -> list[tuple[str, list[int]]]:
    """Parts of the rows that are left out together: sources (those of single runs in six parts), models or groups."""
    parts: dict[str, list[int]] = defaultdict(list)
    sources = Counter(source for source, row in zip(fit.source, fit.rows, strict=True) if row["model"] not in _SWEPT)
    sixths = {
        source: f"sixth {place % 6 + 1} of the sources" for place, (source, _) in enumerate(sources.most_common())
    }
    for index, row in enumerate(fit.rows):
        swept = row["model"] in _SWEPT
        if by == "source":
            parts[fit.source[index] if swept else sixths[fit.source[index]]].append(index)
        elif swept and by == "model":
            parts[row["model"]].append(index)
        elif swept:
            group = (row["model"], row["gpus"], row["gbs"])
            parts[f"fifth {sum(map(ord, ''.join(group))) % 5 + 1} of the groups"].append(index)
    return sorted(parts.items(), key=lambda item: -len(item[1]))


def _thinned(fit: Fit, which: Sequence[int], every: int) -> list[int]:
    """Fewer rows of models with many."""
    counts: Counter[str] = Counter()
    kept = []
    for index in which:
        name = fit.rows[index]["model"]
        counts[name] += 1
        if counts[name] % every == 0 or counts[name] <= 20:
            kept.append(index)
    return kept


def cross(
    fit: Fit, by: str, every: int, evaluations: int, say: Callable[[str], None]
) -> dict[str, list[planner.Result]]:
    """Predictions of all rows that were left out, each by a fit without its part.

    `known` are those with the factors of the framework, where other rows have it, `unknown` those with the default's.
    The search begins at the package's coefficients, which is faster; it ends where the rest is fitted best.
    """
    results: dict[str, list[planner.Result]] = {"known": [], "unknown": []}
    present = fit.present()
    missed: dict[str, list[float]] = defaultdict(list)
    say(f"{'left out':50}{'rows':>5}{'median':>8}{'p90':>8}{'bias':>8}{'as an unknown program':>32}")
    for name, part in _folds(fit, by):
        out = set(part)
        rest = [index for index in range(len(fit.rows)) if index not in out]
        programs = {_family(fit.readings[index].stack) for index in part}
        new = programs - {_family(fit.readings[index].stack) for index in rest}
        vector = fit.run(_thinned(fit, rest, every), evaluations, present)
        line = f"{name[:50]:50}{len(part):5}"
        for label, unknown in (("known", new), ("unknown", programs)):
            made = fit.predictions(vector, part, frozenset(unknown))
            replayed = planner.replay([fit.rows[index] for index in part], [fit.readings[index] for index in part])
            for result, value in zip(replayed, made, strict=True):
                result.tokens = math.exp(value)
            results[label] += replayed
            if label == "known":
                for index, value in zip(part, made, strict=True):
                    missed[fit.source[index]].append(math.exp(value - fit.measured[index]) - 1)
            ratios = np.exp(made - fit.measured[part]) - 1
            line += f"{np.median(abs(ratios)):8.1%}{np.quantile(abs(ratios), 0.9):8.1%}{np.median(ratios):+8.1%}"
        say(f"{line}  {'new: ' + ', '.join(sorted(new)) if new else ''}".rstrip())
    say(f"\n{'source':50}{'rows':>5}{'median':>8}{'p90':>8}{'bias':>8}")
    for name, errors in sorted(missed.items(), key=lambda item: -len(item[1])):
        say(f"{name[:50]:50}{len(errors):5}{np.median(np.abs(errors)):8.1%}{np.quantile(np.abs(errors), 0.9):8.1%}"
            f"{np.median(errors):+8.1%}")  # fmt: skip
    return results


def main() -> int:
    """Fit, print, and on request write; or cross-validate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--evaluations", type=int, default=12, help="of the residuals; 4 in a cross-validation")
    parser.add_argument("--every", type=int, default=4, help="one of so many rows of a model with more than 20")
    parser.add_argument("--cross", choices=("source", "model", "group"), help="leave out parts, and predict them")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures of a cross-validation")
    parser.add_argument("--write", action="store_true", help="store the coefficients in the package")
    options = parser.parse_args()
    fit = Fit([row for path in options.rows for row in planner.load(path)])
    if options.cross:
        results = cross(fit, options.cross, options.every, min(4, options.evaluations), partial(print, flush=True))
        parts = {
            "NVIDIA's programs, known program": [result for result in results["known"] if "NVIDIA" in result.source]
        }
        for label, made in results.items():
            parts[f"published, {label} program"] = [each for each in made if each.group[0] not in _SWEPT]
            parts[f"sweeps, {label} program"] = [each for each in made if each.group[0] in _SWEPT]
        figures = {name: planner.summary(part) for name, part in parts.items() if part}
        for name, figure in figures.items():
            print(f"\n{name}")
            for key in _SHOWN:
                value = figure[key]
                print(f"  {key:30}{value:10.4g}" if isinstance(value, float) else f"  {key:30}{value!s:>10}")
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        return 0
    every = list(range(len(fit.rows)))
    vector = fit.run(_thinned(fit, every, options.every), options.evaluations)
    gpus, stacks = fit.coefficients(vector)
    for name, values in [*gpus.items(), *stacks.items()]:
        print(f"{name:22}" + "  ".join(f"{key} {value:.3g}" for key, value in values.items()))
    errors = np.abs(np.expm1(fit.predictions(vector, every) - fit.measured))
    print(f"{len(errors)} rows, median error {np.median(errors):.3f}, p90 {np.quantile(errors, 0.9):.3f}")
    if options.write:
        fit.store(vector)
    return 0


_SWEPT = {
    "Llama-1B (nanotron)", "Llama-8B (nanotron)", "GPT-0.20B", "GPT-0.30B", "GPT-0.71B", "GPT-1.11B", "GPT-18.44B",
    "GPT-174.60B",
}  # fmt: skip
_SHOWN = (
    "timed", "median_error", "p90_error", "spearman", "mfu25_rows", "mfu25_median_error", "mfu25_p90_error", "groups",
    "rank_correlation_median", "regret_median", "regret_mean", "regret_max",
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
