"""Step time of mixture-of-experts models beside the dense model with the same active parameters.

    python -m benchmarks.moe_step [--rounds N]

The dense model is gpt-tiny in moe-tiny's shape, the others are moe-tiny with several numbers of experts: a token visits
two of half the dense width, so that it meets as many weights, and the router besides. All run in one process, one
thread each, in turns: their ratio holds where the machine is busy with something else. Processor time is what a step
takes where nobody else computes.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common import close, machine, parser, show
from benchmarks.ranks import run, small
from llmrecipes.plan.parameters import count
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.schema import Recipe

SAME = ("model.num_layers=4", "model.hidden_size=256", "model.seq_length=256", "layout.micro_batch_size=4",
        "train.global_batch_size=4")  # fmt: skip
EXPERTS = (2, 8, 32)


def models() -> dict[str, Recipe]:
    """The dense model first."""
    made = {"dense": small("gpt-tiny", *SAME)}
    for number in EXPERTS:
        keys = (f"model.num_moe_experts={number}", "layout.expert_model_parallel_size=1")
        made[f"2 of {number} experts"] = small("moe-tiny", *SAME, *keys)
    return made


def main() -> None:
    """Print one line a model."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=3, help="turns of each model, of which the median counts")
    made.add_argument("--steps", type=int, default=5, help="steps of a turn")
    arguments = made.parse_args()
    started_on = machine()
    recipes = models()
    turns: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "core_seconds": []} for name in recipes}
    for _ in range(arguments.rounds):
        for name, recipe in recipes.items():
            (report,) = run(recipe, 1, warmup=2, steps=arguments.steps)
            turns[name]["seconds"].append(statistics.median(report["wall"]))
            turns[name]["core_seconds"].append(statistics.median(report["core_seconds"]))
    found = {name: _figures(recipes[name], turns[name]) for name in recipes}
    dense = found["dense"]
    rows = [
        [
            name, f"{row['active']:,}", f"{row['total']:,}", f"{row['seconds'] * 1e3:.0f}",
            f"{row['core_seconds'] * 1e3:.0f}", f"{row['core_seconds'] / dense['core_seconds']:.2f}",
        ]
        for name, row in found.items()
    ]  # fmt: skip
    show("One step", ["model", "active parameters", "parameters", "ms", "core ms", "× dense"], rows)
    close({"models": found}, started_on, arguments.json)


def _figures(recipe: Recipe, turns: dict[str, list[float]]) -> dict[str, Any]:
    parameters = count(recipe.model, shape(recipe.model))
    times = {name: statistics.median(values) for name, values in turns.items()}
    return {"active": parameters.active, "total": parameters.total, **times}


if __name__ == "__main__":
    main()
