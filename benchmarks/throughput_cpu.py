"""Training tokens/s on a CPU: this project, Hugging Face Trainer, litgpt and a compiled plain PyTorch loop.

    pip install accelerate==1.15.0
    pip install --no-deps litgpt==0.5.13 lightning==2.6.6 pytorch-lightning==2.6.6 lightning-utilities torchmetrics \
        jsonargparse docstring_parser typeshed_client
    python -m benchmarks.throughput_cpu --json throughput.json

All train the same GPT (6 layers, hidden 384, 6 heads, vocabulary 8,192, sequence 256, batch 16, AdamW, clipping) on the
same tokens with the same number of threads. Every contender is a process of its own; they take turns, a few steps each.
The first steps (compilation) are reported apart. Ratios are medians over rounds of rates measured in the same round.
Core seconds (processor time of a step, all threads) tell work from waiting where the machine is not quiet.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from benchmarks.common import close, machine, parser, show
from benchmarks.contenders import CONTENDERS
from benchmarks.turns import Contender, write_job
from llmrecipes.recipe.schema import LayoutKeys, Model, Optimizer, Recipe, Scheduler, Train

OURS = "llmrecipes"
NEEDS = {"hf-trainer": ["accelerate"], "hf-trainer+compile": ["accelerate"], "litgpt": ["lightning", "litgpt"]}
"""Packages of contenders that are no dependency of this project."""


def recipe(precision: str) -> Recipe:
    """The 14M-parameter GPT of the comparison."""
    return Recipe(
        name="benchmark",
        model=Model(
            num_layers=6, hidden_size=384, ffn_hidden_size=1536, num_attention_heads=6, seq_length=256, vocab_size=8192
        ),
        train=Train.model_validate({"train_iters": 10**6, "global_batch_size": 16, "precision": precision}),
        layout=LayoutKeys(micro_batch_size=16),
        optimizer=Optimizer(lr=1e-3, weight_decay=0.1, clip_grad=1.0),
        scheduler=Scheduler(lr_decay_style="constant"),
    )


def compare(
    names: list[str], job: Recipe, *, rounds: int, steps: int, warmup: int, threads: int
) -> dict[str, dict[str, Any]]:
    """Let the contenders take turns.

    Args:
        names: of `CONTENDERS`.
        job: what to train.
        rounds, steps: turns of each, and steps in a turn.
        warmup: steps before the first round.
        threads: of each process.
    """
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    per_step = job.train.global_batch_size * job.model.seq_length
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = str(write_job(folder, "recipe.json", job.model_dump_json()))
        running: dict[str, Contender] = {}
        for name in names:
            contender = Contender("benchmarks.contenders", [name, path], environment)
            running[name] = stack.enter_context(contender)
            first = contender.take(warmup)
            found[name] = {
                **contender.facts,
                "start_seconds": contender.start_seconds,
                "first_step_seconds": first["seconds"][0],
                "first_loss": first["losses"][0],
                "rates": [],
                "core_seconds": [],
            }
        for _ in range(rounds):
            for name, contender in running.items():
                turn = contender.take(steps)
                found[name]["rates"].append(per_step * steps / sum(turn["seconds"]))
                found[name]["core_seconds"].append(turn["core_seconds"] / steps)
                found[name] |= {"last_loss": turn["losses"][-1], "peak_memory": turn["peak_memory"]}
    for name, values in found.items():
        values["tokens_per_second"] = statistics.median(values["rates"])
        if OURS in found:
            values["ours_over_it"] = statistics.median(
                mine / its for mine, its in zip(found[OURS]["rates"], found[name]["rates"], strict=True)
            )
    return found


def rows(found: dict[str, dict[str, Any]]) -> list[list[object]]:
    """Table rows; see `COLUMNS`."""
    return [
        [
            name,
            f"{values['parameters']:,}",
            f"{values['tokens_per_second']:,.0f}",
            f"{min(values['rates']):,.0f}-{max(values['rates']):,.0f}",
            f"{values['ours_over_it']:.2f}" if "ours_over_it" in values else "",
            f"{statistics.median(values['core_seconds']):.2f}",
            f"{values['first_loss']:.2f} -> {values['last_loss']:.2f}",
            f"{values['first_step_seconds']:.1f}",
            f"{values['peak_memory'] / 2**30:.2f}",
        ]
        for name, values in found.items()
    ]


COLUMNS = ("", "parameters", "tokens/s", "range", "ours / it", "core s / step", "loss", "first step s", "GiB")


def installed(name: str) -> bool:
    """Whether a contender can run here; says what it lacks."""
    missing = [package for package in NEEDS.get(name, []) if find_spec(package) is None]
    if missing:
        print(f"{name} is left out: {' and '.join(missing)} not installed (python -m benchmarks.throughput_cpu --help)")
    return not missing


def main() -> None:
    """Print one table a precision."""
    options = parser(__doc__)
    options.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    options.add_argument(
        "--contenders",
        nargs="+",
        choices=list(CONTENDERS),
        metavar="NAME",
        default=[OURS, "hf-trainer", "litgpt", "plain"],
        help=", ".join(CONTENDERS),
    )
    options.add_argument("--rounds", type=int, default=16)
    options.add_argument("--steps", type=int, default=3, help="steps in a turn")
    options.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    options.add_argument("--threads", type=int, default=2)
    chosen = options.parse_args()
    contenders = [name for name in chosen.contenders if installed(name)]
    started_on = machine()
    figures: dict[str, Any] = {}
    for precision in chosen.precision:
        figures[precision] = compare(
            contenders,
            recipe(precision),
            rounds=chosen.rounds,
            steps=chosen.steps,
            warmup=chosen.warmup,
            threads=chosen.threads,
        )
        show(
            f"{precision}, {chosen.threads} threads, {chosen.rounds} rounds of {chosen.steps} steps",
            COLUMNS,
            rows(figures[precision]),
        )
        assert all(values["last_loss"] < values["first_loss"] for values in figures[precision].values())
    close(figures, started_on, chosen.json)


if __name__ == "__main__":
    main()
