"""What do adapters save against training all weights: trained parameters, memory of model states, and time?

    python -m benchmarks.lora [--steps 4] [--layers 4] [--json lora.json]

Trains a Llama shape of width 512 in fp32 both ways in turns in one process. Bytes are those of the engine's own
tensors; a checkpoint's are the plan's, which a test compares with real ones.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.common import close, machine, parser, show
from llmrecipes.engine.backends import backend
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe
from tests.helpers import LLAMA, random_batches

TURNS = 3


def recipe(layers: int, lora: dict[str, Any] | None) -> Recipe:
    """A Llama shape of width 512."""
    model = {
        **LLAMA, "num_layers": layers, "hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 1408,
        "seq_length": 256, "vocab_size": 8192,
    }  # fmt: skip
    train = {"train_iters": 1000, "global_batch_size": 4, "precision": "fp32"}
    return Recipe.model_validate(
        {
            "name": "lora-bench", "model": model, "train": train, "optimizer": {"lr": 1e-4}, "lora": lora,
            "layout": {"micro_batch_size": 2},
        }
    )  # fmt: skip


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=4, help="steps of a turn")
    arguments.add_argument("--layers", type=int, default=4)
    options = arguments.parse_args()
    started_on = machine()
    ways = {
        "all weights": None,
        "rank 16": {"rank": 16},
        "rank 16, attention": {"rank": 16, "target_modules": ["linear_qkv", "linear_proj"]},
    }
    recipes = {name: recipe(options.layers, lora) for name, lora in ways.items()}
    first = next(iter(recipes.values()))
    engines = backend(first)
    platform = engines.platform()
    results: dict[str, Any] = {}
    with engines.join(first, platform):
        built = {name: engines.build(derive(each, 1, detect()), platform) for name, each in recipes.items()}
        sources = {name: random_batches(each) for name, each in recipes.items()}
        rates: dict[str, list[float]] = {name: [] for name in built}
        for turn in range(TURNS + 1):
            for name, engine in built.items():
                start = time.perf_counter()
                for _ in range(options.steps):
                    engine.train_step(sources[name])
                if turn:
                    tokens = options.steps * engine.plan.tokens_per_step
                    rates[name].append(tokens / (time.perf_counter() - start))
        for name, engine in built.items():
            plan: Any = engine.plan
            states = engine.model_states()  # type: ignore[attr-defined]
            results[name] = {
                "trained parameters": plan.num_adapter_parameters or plan.num_parameters.total,
                "tokens/s": round(statistics.median(rates[name]), 1),
                **{f"{part} MiB": round(sum(t.nbytes for t in found) / 2**20, 1) for part, found in states.items()},
                "activations MiB (plan)": round(plan.memory.activations / 2**20, 1),
                "checkpoint MiB": round(plan.checkpoint_bytes / 2**20, 1),
            }
            engine.close()
    columns = list(next(iter(results.values())))
    show(
        "LoRA against all weights",
        ["", *results],
        [[column, *(found[column] for found in results.values())] for column in columns],
    )
    close(results, started_on, options.json)


if __name__ == "__main__":
    main()
