"""What changes during a training, tried on gpt-tiny: held-out loss against tokens, several seeds.

    python -m benchmarks.recipes_tried ramp --json ramp.json --svg docs/images/tried-ramp.svg

Ways of a trial train the same number of tokens with the same data. `muon` first chooses the
learning rate of each optimizer by the last loss of seed 1. Figures in the JSON file are not measured again: the
measurement can be interrupted.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich

from benchmarks.common import close, machine, parser, show
from benchmarks.former import FORMER

BASE = (
    "search=null",
    "train.train_iters=320",
    "scheduler.lr_decay_iters=320",
    "train.eval_interval=40",
    "tracking.mlflow=false",
    "tracking.tensorboard=false",
)
"""Half of gpt-tiny's steps."""


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        overrides: of gpt-tiny.
        grown: options of `llmrecipes grow` and overrides of the grown run, which trains on; None: one run.
        rates: learning rates to choose from, by the lowest last loss of seed 1; none: the recipe's.
    """

    overrides: tuple[str, ...] = ()
    grown: tuple[str, ...] | None = None
    rates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """Ways that are compared, overrides of all of them, and the label of the held-out set whose loss is shown.

    Without a label it is the valid split.
    """

    ways: Mapping[str, Way]
    shared: tuple[str, ...] = ()
    label: str | None = None


def _of_steps(steps: int, *others: str) -> tuple[str, ...]:
    return (f"train.train_iters={steps}", f"scheduler.lr_decay_iters={steps}", *others)


def _stages(weights: str) -> tuple[str, ...]:
    """Four fifths of the steps on the mixture, and a linear decay on sources with these weights."""
    end = f"data: {{weights: {weights}}}, optimizer: {{lr: 6e-3, min_lr: 0.0}}, scheduler: {{lr_decay_style: linear}}"
    return (f"stages=[{{name: mixed, train_iters: 256, data: {{weights: [1, 1]}}}}, {{name: end, {end}}}]",)


_GROWN = (*_of_steps(160, "scheduler.lr_warmup_iters=20", "optimizer.lr=5e-3"),)
TRIALS: dict[str, Trial] = {
    "ramp": Trial(
        {
            "batch 16": Way(),
            "batch 32": Way(_of_steps(160, "train.global_batch_size=32")),
            "batch 8 to 32": Way(_of_steps(276, "train.global_batch_size=32", "train.rampup_batch_size=[8, 8, 2560]")),
        }
    ),
    "grow": Trial(
        {
            "4 layers": Way(("model.num_layers=4",)),
            "2 layers": Way(),
            "2 layers, then 4 by identity": Way(("train.train_iters=160",), ("--layers", "4", *_GROWN)),
            "2 layers, then 4 by stacking": Way(
                ("train.train_iters=160",), ("--layers", "4", "--by", "stack", *_GROWN)
            ),
        }
    ),
    "anneal": Trial(
        {"the mixture to the end": Way(_stages("[1, 1]")), "code in the last fifth": Way(_stages("[1, 0]"))},
        shared=(
            "data.sources=[{type: stdlib}, {type: machine, max_tokens: 1000000}]",
            f"data.valid_sources=[{{type: text, path: '{Path(rich.__file__).parent}/*.py', label: code}}]",
            "optimizer.lr=6e-3",
            "scheduler.lr_decay_style=constant",
            "scheduler.lr_decay_iters=null",
        ),
        label="code",
    ),
    "muon": Trial(
        {
            "AdamW": Way(rates=("5e-3", "1e-2", "2e-2", "4e-2")),
            "Muon": Way(
                ("optimizer.optimizer=muon", "layout.use_distributed_optimizer=false"),
                rates=("5e-3", "1e-2", "2e-2", "4e-2"),
            ),
        }
    ),
}


def curve(file: Path, label: str | None) -> list[tuple[int, float]]:
    """(tokens, held-out loss) of each evaluation in a metrics.jsonl; the last of each step counts."""
    points: dict[int, float] = {}
    tokens = 0
    for line in file.read_text("utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        tokens = row.get("consumed_tokens", tokens)
        loss = row.get("valid_loss") if label is None else (row.get("valid_source_loss") or {}).get(label)
        if loss is not None:
            points[tokens] = loss
    return sorted(points.items())


class Runner:
    """Trains ways with the program's commands, in folders of its own."""

    def __init__(self, arguments: Namespace) -> None:
        self._runs = arguments.runs_dir
        self._data = ["--data-dir", str(arguments.data_dir)]

    def _call(self, *words: str) -> None:
        command = [sys.executable, "-m", "llmrecipes.cli", *words, "--runs-dir", str(self._runs)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def train(
        self, name: str, overrides: tuple[str, ...], label: str | None, recipe: str = "gpt-tiny"
    ) -> list[tuple[int, float]]:
        """Train, or continue, the run of this name."""
        self._call("train", recipe, *overrides, "--run-id", name, "--no-sample", *self._data)
        (file,) = self._runs.glob(f"*/{name}/metrics.jsonl")
        return curve(file, label)

    def way(self, name: str, way: Way, more: tuple[str, ...], label: str | None) -> list[tuple[int, float]]:
        """Train a way, and what has grown of it."""
        first = self.train(name, (*FORMER, *BASE, *way.overrides, *more), label)
        if way.grown is None:
            return first
        (folder,) = self._runs.glob(f"*/{name}")
        self._call("grow", str(folder), *way.grown, "--run-id", f"{name}-grown")
        (recipe,) = self._runs.glob(f"*/{name}-grown/recipe.yaml")
        second = self.train(f"{name}-grown", (), label, str(recipe))
        last = first[-1][0]
        return first + [(last + tokens, loss) for tokens, loss in second]


def draw(
    trial: Trial, ways: Sequence[str], curves: Mapping[str, list[tuple[int, float]]], seeds: int, file: Path
) -> None:
    """A line for each run, in the colour of its way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    for number, way in enumerate(ways):
        for seed in range(1, seeds + 1):
            tokens, losses = zip(*curves[f"{way}, seed {seed}"], strict=True)
            label = way if seed == 1 else None
            panel.plot([value / 1e6 for value in tokens], losses, color=f"C{number}", linewidth=1, label=label)
    held_out = "valid split" if trial.label is None else trial.label
    panel.set(xlabel="million tokens", ylabel=f"held-out loss ({held_out}) [nats/token]")
    panel.legend()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def options() -> Namespace:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("trial", choices=TRIALS)
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--data-dir", type=Path, default=Path("data"))
    made.add_argument("--runs-dir", type=Path, default=Path("runs/tried"))
    made.add_argument("--svg", type=Path, metavar="FILE", help="write the picture there")
    return made.parse_args()


def main() -> None:
    """Measure what the file lacks, and show all of it."""
    arguments = options()
    trial = TRIALS[arguments.trial]
    started_on, runner = machine(), Runner(arguments)
    curves: dict[str, list[tuple[int, float]]] = {}
    if arguments.json is not None and arguments.json.exists():
        curves = json.loads(arguments.json.read_text("utf-8"))["curves"]

    def measure(name: str, way: Way, *more: str) -> float:
        """The last loss of a run; its curve is kept."""
        if name not in curves:
            identity = f"{arguments.trial}-{name}".replace(", ", "-").replace(" ", "-")
            curves[name] = runner.way(identity, way, (*trial.shared, *more), trial.label)
            print(f"{name}: {curves[name][-1][1]:.4f}", flush=True)
            if arguments.json is not None:
                kept = json.dumps({"machine": started_on, "curves": curves}, indent=1)
                arguments.json.write_text(kept + "\n", "utf-8")
        return curves[name][-1][1]

    rows: list[list[str]] = []
    shown: dict[str, str] = {}
    for title, way in trial.ways.items():
        ways: dict[str, tuple[str, ...]] = {f"{title} at {rate}": (f"optimizer.lr={rate}",) for rate in way.rates}
        ways = ways or {title: ()}
        first = {name: measure(f"{name}, seed 1", way, "train.seed=1", *more) for name, more in ways.items()}
        best = min(first, key=first.__getitem__)
        rows += [[name, "", f"{loss:.4f}", *[""] * arguments.seeds] for name, loss in first.items() if name != best]
        last = [
            measure(f"{best}, seed {seed}", way, f"train.seed={seed}", *ways[best])
            for seed in range(1, arguments.seeds + 1)
        ]
        tokens = f"{curves[f'{best}, seed 1'][-1][0]:,}"
        rows.append([best, tokens, *(f"{loss:.4f}" for loss in last), f"{statistics.mean(last):.4f}"])
        shown[title] = best
    columns = ["way", "tokens", *(f"seed {seed}" for seed in range(1, arguments.seeds + 1)), "mean"]
    show(f"{arguments.trial}: held-out loss [nats/token]", columns, rows)
    if arguments.svg is not None:
        draw(trial, list(shown.values()), curves, arguments.seeds, arguments.svg)
    close({"curves": curves}, started_on, arguments.json)


if __name__ == "__main__":
    main()
