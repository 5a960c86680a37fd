"""Predicted utilisation beside published runs on 3,000 to 16,384 GPUs, as the planner predicts it for a recipe there.

    python benchmarks/weak_scaling.py [--json OUT]

Each run is a recipe of this repository with the published shape, batch and layout, planned as `llmrecipes plan` plans
it: with the default software, not with switches fitted to the source. What was not published is searched, or assumed
and said. MFU counts all attention positions, as the formula of Megatron-LM does.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine
from llmrecipes.plan.speed.forecast import forecast_run
from llmrecipes.plan.speed.search import fastest
from llmrecipes.recipe.load import load
from llmrecipes.workflow.plan import plan_on

_LLAMA = (
    "layout.context_parallel_size=1", "layout.pipeline_model_parallel_size=16",
    "layout.virtual_pipeline_model_parallel_size=8", "layout.recompute_granularity=null",
    "layout.recompute_method=null", "layout.recompute_num_layers=null",
)  # fmt: skip
_MEGASCALE = (
    "model.num_attention_heads=128", "model.vocab_size=64000", "layout.tensor_model_parallel_size=8",
    "layout.pipeline_model_parallel_size=8", "layout.virtual_pipeline_model_parallel_size=6",
    "train.global_batch_size=6144",
)  # fmt: skip
_MEGATRON = (
    "model.num_layers=96", "model.hidden_size=20480", "model.num_attention_heads=160", "model.seq_length=4096",
    "model.vocab_size=131072", "layout.tensor_model_parallel_size=8",
    "layout.pipeline_model_parallel_size=16",
    "layout.virtual_pipeline_model_parallel_size=6", "train.global_batch_size=1536",
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A run, and the recipe that stands for it."""

    source: str
    recipe: str
    overrides: tuple[str, ...]
    cluster: str
    gpus: int
    mfu: float
    assumed: str = ""


RUNS = (
    Published("Llama 3 405B, table 4", "llama3-405b", _LLAMA, "h100-ib", 8192, 0.43, "chunks of a layer"),
    Published("Llama 3 405B, table 4", "llama3-405b", _LLAMA, "h100-ib", 16384, 0.41, "chunks of a layer"),
    Published(
        "MegaScale 175B, abstract", "gpt-175b", _MEGASCALE, "a100-roce", 12288, 0.552,
        "batch of 6,144 and layout; its changes of the model are not made",
    ),
    Published(
        "Megatron-LM, README, 462B", "gpt-175b", _MEGATRON, "h100-ib", 6144, 0.47, "layers, batch of 1,536 and layout"
    ),
)  # fmt: skip
AIM = 0.03


def compare(run: Published) -> dict[str, object]:
    """Predicted with the published layout, and with the one that a search finds."""
    recipe = load(run.recipe, list(run.overrides)).recipe
    profile = load_profile(run.cluster)
    plan, _ = plan_on(recipe, nproc=run.gpus, cluster=run.cluster, nodes=None)
    made = forecast_run(plan, profile).as_dict()
    try:
        found = fastest(recipe, machine(profile, run.gpus // profile.gpus_per_node), run.gpus, profile, 1)[0]
        best, layout = found.forecast.as_dict()["mfu_full"], found.key
    except UserError as error:
        best, layout = None, error.what
    return {
        "source": run.source,
        "gpus": run.gpus,
        "gpu": profile.gpu.name if profile.gpu else None,
        "published": run.mfu,
        "predicted": made["mfu_full"],
        "points": 100 * (made["mfu_full"] - run.mfu),
        "parts": made["step_parts"],
        "fits": made["fits"],
        "assumed": run.assumed,
        "best": best,
        "best_layout": layout,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    rows = [compare(run) for run in RUNS]
    print("| run | GPUs | published | predicted | difference | fastest of the search |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        best = "none fits" if row["best"] is None else f"{row['best']:.1%} ({row['best_layout']})"
        print(
            f"| {row['source']} | {row['gpus']:,} | {row['published']:.1%} | {row['predicted']:.1%} | "
            f"{row['points']:+.1f} points | {best} |"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
