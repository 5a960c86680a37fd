"""Does a learning rate transfer across widths? The best one at each width, with `model.use_mup` and without.

    python -m benchmarks.mup --json mup.json --svg docs/images/mup-transfer.svg

Trains a GPT (2 layers, heads of 16 channels, sequences of 64, a vocabulary of 512 on the standard library's source) at
each width with every learning rate of a grid, and compares the validation losses. The base width is the narrowest:
there both are the same model, which is trained once. Figures in the JSON file are not measured again: the measurement
can be interrupted, and `--widths` and `--rates` extend it.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.common import close, machine, parser, show
from benchmarks.curve import last_loss
from llmrecipes.recipe.schema import Recipe

WIDTHS = (64, 128, 256, 512)
RATES = tuple(range(-11, -3))
"""Exponents of 2."""
BASE, CHANNELS = 64, 16


def recipe(width: int, rate: float, *, use_mup: bool, steps: int, seed: int) -> Recipe:
    """One training."""
    mup = {"use_mup": True, "mup_base_hidden_size": BASE, "mup_base_head_dim": float(CHANNELS)} if use_mup else {}
    return Recipe.model_validate(
        {
            "name": "mup",
            "model": {
                "num_layers": 2, "hidden_size": width, "num_attention_heads": width // CHANNELS, "seq_length": 64,
                "vocab_size": 512, "position_embedding_type": "rope", "normalization": "RMSNorm",
                "add_bias_linear": False, "share_embeddings_and_output_weights": False, **mup,
            },
            "train": {
                "train_iters": steps, "global_batch_size": 8, "precision": "fp32",
                "eval_interval": steps, "eval_iters": 16, "seed": seed
            },
            "optimizer": {"lr": rate},
            "scheduler": {"lr_warmup_iters": steps // 10},
            "data": {"num_workers": 0},
            "tracking": {"mlflow": False, "tensorboard": False},"layout": {"micro_batch_size": 8}
        }
    )  # fmt: skip


def key(use_mup: bool, width: int, exponent: int, seed: int) -> str:
    """Name of a training in the JSON file. At the base width the parametrisation changes nothing."""
    return f"{'mup' if use_mup and width != BASE else 'standard'} {width} 2^{exponent} {seed}"


def best(losses: dict[str, float], use_mup: bool, width: int, seeds: int) -> tuple[int, float] | None:
    """(exponent, loss) of the rate with the lowest loss, averaged over seeds; None if there is no figure yet."""
    found = curves(losses, use_mup, [width], seeds).get(width)
    if not found:
        return None
    exponent = min(found, key=lambda each: found[each])
    return exponent, found[exponent]


def curves(losses: dict[str, float], use_mup: bool, widths: list[int], seeds: int) -> dict[int, dict[int, float]]:
    """Loss by width and exponent, averaged over seeds."""
    found: dict[int, dict[int, float]] = {}
    for width in widths:
        for exponent in range(-20, 5):
            values = [losses.get(key(use_mup, width, exponent, seed), math.nan) for seed in range(seeds)]
            if all(map(math.isfinite, values)):
                found.setdefault(width, {})[exponent] = sum(values) / seeds
    return found


def draw(losses: dict[str, float], widths: list[int], seeds: int, file: Path) -> None:
    """Loss over the learning rate for each width, one panel without and one with the parametrisation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, use_mup in zip(panels, (False, True), strict=True):
        for number, (width, losses_of) in enumerate(curves(losses, use_mup, widths, seeds).items()):
            colour = f"C{number}"
            panel.plot([2.0**each for each in losses_of], losses_of.values(), "-o", color=colour, label=str(width))
            lowest = min(losses_of, key=lambda each: losses_of[each])
            panel.plot(2.0**lowest, losses_of[lowest], "*", color=colour, markersize=16)
        panel.set(xscale="log", xlabel="learning rate", title="use_mup: true" if use_mup else "use_mup: false")
        panel.set_xscale("log", base=2)
    panels[0].set_ylabel("validation loss [nats/token]")
    panels[0].legend(title="hidden_size")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def options() -> Namespace:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), metavar="N")
    made.add_argument("--rates", type=int, nargs="+", default=list(RATES), metavar="K", help="learning rates 2^K")
    made.add_argument("--steps", type=int, default=100)
    made.add_argument("--seeds", type=int, default=1)
    made.add_argument("--data-dir", type=Path, default=Path("data"))
    made.add_argument("--svg", type=Path, metavar="FILE", help="write the figure there")
    return made.parse_args()


def main() -> None:
    """Measure what the file lacks, and show all of it."""
    arguments = options()
    started_on = machine()
    losses: dict[str, float] = {}
    if arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text("utf-8"))
        assert kept["steps"] == arguments.steps, f"{arguments.json} has trainings of {kept['steps']} steps"
        losses = kept["losses"]
    for width in arguments.widths:
        for use_mup in (False, True):
            for exponent in arguments.rates:
                for seed in range(arguments.seeds):
                    name = key(use_mup, width, exponent, seed)
                    if name in losses:
                        continue
                    job = recipe(width, 2.0**exponent, use_mup=use_mup, steps=arguments.steps, seed=seed)
                    losses[name] = last_loss(job, arguments.data_dir)
                    print(f"{name}: {losses[name]:.4f}", flush=True)
                    if arguments.json is not None:
                        kept = {"machine": started_on, "steps": arguments.steps, "losses": losses}
                        arguments.json.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")
    rows = []
    for width in arguments.widths:
        row: list[Any] = [width]
        for use_mup in (False, True):
            found = best(losses, use_mup, width, arguments.seeds)
            row += ["", ""] if found is None else [f"2^{found[0]}", f"{found[1]:.4f}"]
        rows.append(row)
    show(
        f"best learning rate after {arguments.steps} steps",
        ["hidden_size", "without", "loss", "use_mup", "loss"],
        rows,
    )
    if arguments.svg is not None:
        draw(losses, arguments.widths, arguments.seeds, arguments.svg)
    close({"steps": arguments.steps, "losses": losses}, started_on, arguments.json)


if __name__ == "__main__":
    main()
