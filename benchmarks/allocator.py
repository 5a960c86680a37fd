"""What `llmrecipes.engine.core.platform.cpu`'s settings of glibc's allocator do for a training step.

    python -m benchmarks.allocator --json allocator.json

The same training as in `throughput_cpu`, in three processes that take turns: glibc's defaults, freed memory kept, freed
memory kept in huge pages (which is what the platform sets).
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from typing import Any

from benchmarks.common import close, machine, parser, show
from benchmarks.throughput_cpu import recipe
from benchmarks.turns import Contender, write_job

DEFAULT = "glibc's defaults"
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    DEFAULT: ("llmrecipes-allocator", {}),
    "freed memory kept": ("llmrecipes", {"THP_MEM_ALLOC_ENABLE": "0"}),
    "and huge pages": ("llmrecipes", {}),
}


def measure(precision: str, *, rounds: int, steps: int, threads: int) -> dict[str, dict[str, Any]]:
    """Seconds of a step in each variant, round by round."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = str(write_job(folder, "recipe.json", recipe(precision).model_dump_json()))
        running = {}
        for name, (contender, environment) in VARIANTS.items():
            process = Contender(
                "benchmarks.contenders", [contender, path], environment | {"OMP_NUM_THREADS": str(threads)}
            )
            running[name] = stack.enter_context(process)
            process.take(3)
        found: dict[str, dict[str, Any]] = {name: {"seconds": [], "peak_memory": 0} for name in VARIANTS}
        for _ in range(rounds):
            for name, process in running.items():
                turn = process.take(steps)
                found[name]["seconds"].append(statistics.median(turn["seconds"]))
                found[name]["peak_memory"] = turn["peak_memory"]
    for values in found.values():
        pairs = zip(values["seconds"], found[DEFAULT]["seconds"], strict=True)
        values["share_of_default"] = statistics.median(mine / default for mine, default in pairs)
    return found


def main() -> None:
    """Print one table a precision."""
    options = parser(__doc__)
    options.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=6, help="steps in a turn")
    options.add_argument("--threads", type=int, default=2)
    chosen = options.parse_args()
    started_on = machine()
    figures = {}
    for precision in chosen.precision:
        found = measure(precision, rounds=chosen.rounds, steps=chosen.steps, threads=chosen.threads)
        rows = [
            [
                name,
                f"{1000 * statistics.median(values['seconds']):.0f}",
                f"{100 * values['share_of_default']:.0f} %",
                f"{values['peak_memory'] / 2**30:.2f}",
            ]
            for name, values in found.items()
        ]
        show(f"{precision}, {chosen.threads} threads", ("", "step ms", "of default", "GiB"), rows)
        figures[precision] = found
    close(figures, started_on, chosen.json)


if __name__ == "__main__":
    main()
