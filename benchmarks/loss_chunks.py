"""The loss in chunks of tokens: CPU time and resident memory of a step, by the size of a chunk.

    python -m benchmarks.loss_chunks --json loss_chunks.json

Every row is a process of its own with one thread. CPU time, because a shared machine's clock measures its other work.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks.common import ROOT, close, machine, parser, show
from llmrecipes.units import GIB

MODELS: dict[str, dict[str, Any]] = {
    "gpt-tiny": {},
    "14M GPT": {
        "model.num_layers": 6, "model.hidden_size": 192, "model.num_attention_heads": 6, "model.vocab_size": 50257,
        "model.seq_length": 512, "layout.micro_batch_size": 8, "train.global_batch_size": 8,
    },
}  # fmt: skip
CHUNKS = (0, 2048, 512, 128)


def measure(model: str, tokens: int, steps: int) -> dict[str, Any]:
    """A row, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.loss_chunks", "--child", model, "--tokens", str(tokens)]
    done = subprocess.run([*command, "--steps", str(steps)], cwd=ROOT, check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def child(model: str, tokens: int, steps: int) -> dict[str, Any]:
    """Seconds of CPU time of a step, the resident memory that steps add, and the last loss."""
    import torch

    from llmrecipes.bench.measure import random_tokens
    from llmrecipes.engine.backends import backend
    from llmrecipes.hardware.cluster import detect
    from llmrecipes.plan.derive import derive
    from llmrecipes.recipe.load import load

    torch.set_num_threads(1)
    changes = {**MODELS[model], "layout.loss_chunk_tokens": tokens}
    recipe = load("gpt-tiny", [f"{key}={value}" for key, value in changes.items()]).recipe
    engines = backend(recipe)
    platform = engines.platform()
    with engines.join(recipe, platform):
        plan = derive(recipe, 1, detect())
        engine = engines.build(plan, platform)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        batches = random_tokens(recipe, 0)
        engine.train_step(batches)
        times = []
        for _ in range(steps):
            start = time.process_time()
            result = engine.train_step(batches)
            times.append(time.process_time() - start)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        engine.close()
    return {"seconds": min(times), "gib": (after - before) * 1024 / GIB, "loss": result.loss}


def main() -> None:
    """Print a table."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--child", choices=list(MODELS))
    options.add_argument("--tokens", type=int, default=0)
    given = options.parse_args()
    if given.child:
        print(json.dumps(child(given.child, given.tokens, given.steps)))
        return
    rows, started_on = [], machine()
    for name in MODELS:
        for tokens in CHUNKS:
            rows.append({"model": name, "tokens": tokens, **measure(name, tokens, given.steps)})
            print(rows[-1], flush=True)
    columns = ("model", "tokens of a chunk", "CPU seconds", "GiB added", "loss")
    show("Loss in chunks", columns, [list(row.values()) for row in rows])
    close({"rows": rows}, started_on, given.json)


if __name__ == "__main__":
    main()
