"""Fits the coefficients of the time model to measured runs, and cross-validates by leaving out sources and models.

    python benchmarks/fit_planner.py ROWS.csv… [--without WORD] [--write]

The coefficients are those that physics does not fix: shares of the peaks that kernels and links reach, latencies, host
time of a launch, and for each framework what its switches do not say. They are fitted in logarithms, with a prior at
their present values, so that few rows move them little, and with a loss that a few outliers do not lead.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import planner
from llmrecipes.plan.speed import device as devices
from llmrecipes.plan.speed.step import predict

DEVICE = ("gemm", "gemm_fp8", "gemm_depth", "attention", "memory", "launch", "links", "hop_near", "hop_far")
STACK = {
    "nanotron": ("gemm", "attention", "passes", "host", "links", "hop", "stall", "overlap_gradients", "rails"),
    "megatron-deepspeed": ("gemm", "passes", "host", "links"),
    "llm-foundry": ("gemm", "attention", "passes", "links", "host", "overlap_gradients"),
    "torchtitan": ("gemm", "links", "overlap_tensor"),
    "xla": ("gemm", "links"),
    "fsdp": ("gemm", "links"),
    "internevo": ("gemm", "passes"),
    "megatron": ("overlap_tensor", "passes"),
    "moe-zoo": ("overlap_expert",),
}
NEUTRAL = {
    "A100": {"gemm": 0.8, "gemm_fp8": 0.65, "gemm_depth": 150, "attention": 0.5, "memory": 0.8, "launch": 6e-6,
             "links": 0.8, "hop_near": 4e-6, "hop_far": 2e-5},
}  # fmt: skip
NEUTRAL["H100"] = NEUTRAL["A100"]
"""Coefficients that owe nothing to the rows, from which a cross-validation starts."""
SHARES = {"overlap_gradients", "overlap_tensor", "overlap_expert"}
LIMITS = {"gemm": 1.0, "gemm_fp8": 1.0, "attention": 1.2, "memory": 0.95, "links": 1.0}
PRIOR = 0.25
"""Standard deviation of a coefficient's logarithm around its present value."""


def _to(name: str, value: float) -> float:
    if name in SHARES:
        value = min(max(value, 0.02), 0.98)
        return math.log(value / (1 - value))
    return math.log(max(value, 1e-9))


def _from(name: str, value: float) -> float:
    return 1 / (1 + math.exp(-value)) if name in SHARES else math.exp(value)


class Fit:
    """Rows, and the coefficients that they depend on."""

    def __init__(self, rows: Sequence[planner.Row]) -> None:
        self.readings, self.measured, self.weights = [], [], []
        for row in rows:
            reading = planner.read(row)
            tokens = planner.number(row, "tokens_per_s_per_gpu")
            if not tokens or "hybrid" in row["model"].lower() or "nemotron-" in row["model"].lower():
                continue
            self.readings.append(reading)
            self.measured.append(math.log(tokens))
            mfu = tokens * reading.work.flops(causal=False) / reading.device.peak["bf16"]
            self.weights.append(1.0 if mfu > 0.2 else 0.5 if mfu > 0.08 else 0.2)
        stacks = {reading.stack.name for reading in self.readings}
        names = {reading.device.name for reading in self.readings}
        self.names = [("device", name, key) for name in sorted(names) for key in DEVICE]
        self.names += [("stack", name, key) for name in sorted(stacks) for key in STACK.get(name, ())]
        self.start = np.array([_to(key, self.value(kind, name, key)) for kind, name, key in self.names])
        self.cached: dict[Any, float] = {}

    def value(self, kind: str, name: str, key: str) -> float:
        """A coefficient's present value."""
        part = "device" if kind == "device" else "stack"
        thing = next(getattr(each, part) for each in self.readings if getattr(each, part).name == name)
        return float(getattr(thing, key))

    def forget(self) -> None:
        """Start from values that owe nothing to any row."""
        plain = devices.stack("")
        self.start = np.array(
            [
                _to(key, NEUTRAL[name][key] if kind == "device" else float(getattr(plain, key)))
                if key not in ("stall", "hop")
                else start
                for (kind, name, key), start in zip(self.names, self.start, strict=True)
            ]
        )

    def predictions(self, vector: np.ndarray, which: Sequence[int]) -> list[float]:
        """Logarithm of the throughput of some rows."""
        changes: dict[tuple[str, str], dict[str, Any]] = {}
        for (kind, name, key), value in zip(self.names, vector, strict=True):
            changes.setdefault((kind, name), {})[key] = _from(key, value)
        made: dict[Any, Any] = {}
        result = []
        for index in which:
            reading = self.readings[index]
            gpu = made.get(id(reading.device))
            if gpu is None:
                gpu = made[id(reading.device)] = replace(
                    reading.device, **changes.get(("device", reading.device.name), {})
                )
            software = made.get(reading.stack)
            if software is None:
                software = made[reading.stack] = replace(
                    reading.stack, **changes.get(("stack", reading.stack.name), {})
                )
            work = reading.work
            seconds = predict(gpu, software, work).seconds
            result.append(math.log(work.gbs * work.seq / work.gpus / seconds))
        return result

    def residuals(self, vector: np.ndarray) -> np.ndarray:
        """Weighted errors in logarithms, then distances from the prior."""
        every = range(len(self.readings))
        errors = (np.array(self.predictions(vector, every)) - self.measured) * self.weights
        # Soft L1 here, so that the prior keeps its square.
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + (errors / 0.08) ** 2) - 1)) * 0.08
        return np.concatenate([soft / 0.08, (vector - self.start) / PRIOR])

    def jacobian(self, vector: np.ndarray) -> np.ndarray:
        """Differences, each over the rows that a coefficient matters to."""
        base = self.residuals(vector)
        result = np.zeros((len(base), len(vector)))
        rows = len(self.readings)
        values = np.array(self.predictions(vector, range(rows)))
        for column, (kind, name, _) in enumerate(self.names):
            which = [i for i, each in enumerate(self.readings) if getattr(each, kind).name == name]
            moved = vector.copy()
            moved[column] += 0.02
            changed = values.copy()
            changed[which] = self.predictions(moved, which)
            errors = (changed - self.measured) * self.weights
            soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + (errors / 0.08) ** 2) - 1)) * 0.08
            result[:rows, column] = (soft / 0.08 - base[:rows]) / 0.02
            result[rows + column, column] = 1 / PRIOR
        return result

    def run(self, evaluations: int) -> np.ndarray:
        """The best coefficients, in logarithms."""
        upper = np.array([_to(key, LIMITS[key]) if key in LIMITS else np.inf for _, _, key in self.names])
        start = np.minimum(self.start, upper - 1e-3)
        done = least_squares(self.residuals, start, jac=self.jacobian, bounds=(-np.inf, upper), max_nfev=evaluations)
        return np.asarray(done.x)

    def store(self, vector: np.ndarray) -> None:
        """Write the coefficients into the package's data files."""
        folder = Path(devices.__file__).with_name("data")
        for (kind, name, key), value in zip(self.names, vector, strict=True):
            path = folder / (f"{name}.json" if kind == "device" else "stacks.json")
            data = json.loads(path.read_text(encoding="utf-8"))
            values = data["values"] if kind == "device" else data["stacks"][name]["values"]
            values[key] = float(f"{_from(key, value):.3g}")
            path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Fit, print, and on request write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--evaluations", type=int, default=8)
    parser.add_argument("--every", type=int, default=1, help="take one of so many rows of a model with more than 40")
    parser.add_argument("--without", metavar="WORD", help="leave out rows with it in model or source, and predict them")
    parser.add_argument("--write", action="store_true", help="store the coefficients in the package")
    options = parser.parse_args()
    rows = [row for path in options.rows for row in planner.load(path)]
    left_out = [row for row in rows if options.without and options.without in row["model"] + " " + row["source"]]
    rows = [row for row in rows if row not in left_out] if left_out else rows
    counts: dict[str, int] = {}
    kept = []
    for row in rows:
        counts[row["model"]] = counts.get(row["model"], 0) + 1
        if counts[row["model"]] % options.every == 0 or counts[row["model"]] < 15:
            kept.append(row)
    fit = Fit(kept)
    if options.without:
        fit.forget()
    vector = fit.run(options.evaluations)
    for (_, name, key), before, after in zip(fit.names, fit.start, vector, strict=True):
        print(f"{name:22}{key:20}{_from(key, before):12.4g}{_from(key, after):12.4g}")
    errors = np.abs(np.expm1(np.array(fit.predictions(vector, range(len(fit.readings)))) - fit.measured))
    print(f"{len(errors)} rows, median error {np.median(errors):.3f}, p90 {np.quantile(errors, 0.9):.3f}")
    if left_out:
        others = Fit(left_out)
        values = dict(zip(fit.names, vector, strict=True))
        others.forget()
        moved = np.array([values.get(name, start) for name, start in zip(others.names, others.start, strict=True)])
        made = others.predictions(moved, range(len(others.readings)))
        errors = np.abs(np.expm1(np.array(made) - others.measured))
        print(f"without {options.without}: {len(errors)} rows, median {np.median(errors):.3f}, "
              f"p90 {np.quantile(errors, 0.9):.3f}")  # fmt: skip
    if options.write:
        fit.store(vector)
    return 0


if __name__ == "__main__":
    sys.exit(main())
