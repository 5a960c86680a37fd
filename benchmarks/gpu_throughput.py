"""tokens/s, MFU and peak memory on one GPU in bf16, beside Hugging Face's Trainer, litgpt and compiled plain PyTorch.

    python -m benchmarks.gpu_throughput --json gpu.json
    python -m benchmarks.gpu_throughput --recipes gpt-1b --set layout.micro_batch_size=4 --set layout.torch_compile=true

One process after the other, so that each has the GPU's memory to itself. A step is `--accumulate` micro-batches of the
recipe's size. MFU counts matrix products only (`flops_per_token`): `full` with all attention positions, `causal`
with half of them, against the dense bf16 peak of the data sheet.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from importlib.util import find_spec
from typing import Any

from benchmarks.common import close, machine, parser, show
from benchmarks.former import MICRO_BATCH
from benchmarks.throughput_cpu import NEEDS
from benchmarks.turns import Contender, write_job
from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.launch.environment import detected_environment
from llmrecipes.plan.parameters import flops_per_token
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe

CONTENDERS = ("llmrecipes", "llmrecipes+compile", "hf-trainer", "hf-trainer+compile", "litgpt", "plain")
COLUMNS = ("", "parameters", "tokens/s", "MFU full", "MFU causal", "peak GiB", "loss", "first step s")


def sized(recipe_name: str, changes: list[str], accumulate: int) -> Recipe:
    """A recipe whose step is some micro-batches."""
    changes = [*MICRO_BATCH.get(recipe_name, ()), *changes]
    recipe = load(recipe_name, changes).recipe
    batch = recipe.layout.micro_batch_size * accumulate
    return load(recipe_name, [*changes, f"train.global_batch_size={batch}"]).recipe


def measure(
    name: str, recipe: Recipe, environment: dict[str, str], *, steps: int, warmup: int, peak_flops: float | None
) -> dict[str, Any]:
    """Run one contender.

    Args:
        name: of `benchmarks.contenders`.
        recipe: what to train.
        environment: variables that are set before it imports torch.
        steps, warmup: measured steps, and steps before them.
        peak_flops: of the device; None leaves MFU out.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_job(folder, "recipe.json", recipe.model_dump_json()))
        with Contender("benchmarks.contenders", [name, path], environment) as contender:
            first = contender.take(warmup)
            turn = contender.take(steps)
    rate = recipe.train.global_batch_size * recipe.model.seq_length / statistics.median(turn["seconds"])
    found = {
        **contender.facts,
        "tokens_per_second": rate,
        "peak_memory": turn.get("peak_memory", 0),
        "first_step_seconds": first["seconds"][0],
        "losses": [first["losses"][0], turn["losses"][-1]],
        "micro_batch_size": recipe.layout.micro_batch_size,
    }
    for key, causal in (("mfu_full", False), ("mfu_causal", True)):
        found[key] = (
            None
            if peak_flops is None
            else rate * flops_per_token(recipe.model, shape(recipe.model), causal=causal) / peak_flops
        )
    return found


def first_gpu() -> dict[str, str]:
    """Variables of a process that sees one GPU: transformers' Trainer would split batches over all of them."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


def run(recipe: Recipe, *, steps: int, warmup: int, peak_flops: float | None) -> dict[str, dict[str, Any]]:
    """All contenders on one recipe; one that fails (memory, most likely) is reported and the others go on."""
    found = {}
    cluster = detect()
    environment = {**detected_environment(cluster, derive_run(recipe, 1, cluster)), **first_gpu()}
    for name in CONTENDERS:
        absent = [package for package in NEEDS.get(name, ()) if find_spec(package) is None]
        if absent:
            print(f"{recipe.name}, {name}: needs {', '.join(absent)}", file=sys.stderr)
            continue
        try:
            found[name] = measure(name, recipe, environment, steps=steps, warmup=warmup, peak_flops=peak_flops)
        except RuntimeError as error:
            print(f"{recipe.name}, {name}: {error}", file=sys.stderr)
    return found


def main() -> int:
    """Print one table a recipe; 2 where there is no GPU."""
    options = parser(__doc__)
    options.add_argument("--recipes", nargs="+", default=["gpt-125m", "gpt-1b"])
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change of every recipe")
    options.add_argument("--accumulate", type=int, default=4, help="micro-batches in a step")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--warmup", type=int, default=5)
    options.add_argument("--on-cpu", action="store_true", help="run where there is no GPU, to try the benchmark itself")
    chosen = options.parse_args()
    cluster = detect()
    if not cluster.gpus and not chosen.on_cpu:
        print("error: nvidia-smi lists no GPU; this benchmark measures one GPU", file=sys.stderr)
        return 2
    tflops = cluster.gpus[0].peak_tflops if cluster.gpus else None
    peak = None if tflops is None else tflops * 1e12
    try:
        recipes = [sized(name, chosen.set, chosen.accumulate) for name in chosen.recipes]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    started_on = machine()
    figures: dict[str, Any] = {}
    for recipe in recipes:
        found = run(recipe, steps=chosen.steps, warmup=chosen.warmup, peak_flops=peak)
        rows = [
            [
                name,
                f"{values['parameters']:,}",
                f"{values['tokens_per_second']:,.0f}",
                *("-" if values[key] is None else f"{100 * values[key]:.1f} %" for key in ("mfu_full", "mfu_causal")),
                f"{values['peak_memory'] / 2**30:.1f}",
                f"{values['losses'][0]:.2f} -> {values['losses'][1]:.2f}",
                f"{values['first_step_seconds']:.1f}",
            ]
            for name, values in found.items()
        ]
        batch = f"{recipe.layout.micro_batch_size} x {chosen.accumulate}"
        show(f"{recipe.name}: {recipe.train.precision}, micro-batch {batch}", COLUMNS, rows)
        figures[recipe.name] = found
    close(figures, started_on, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
