"""The table on the ranks of a launcher: GPUs with NCCL, or a CPU with gloo where torch sees no GPU.

One process writes the references; then each number of ranks runs the rows that take so many:

    for ranks in 1 2 4 8; do torchrun --nproc-per-node $ranks -m tests.dist.under_torchrun --out parity; done

Ends with 0 if all rows are within their bounds, 1 if one is not, 2 if it was started wrongly.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from llmrecipes.engine.core.platform import select
from llmrecipes.recipe.schema import Recipe
from tests.dist.table import ROWS
from tests.dist.training import Outcome, compare, train


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows of this number of ranks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of references and results")
    parser.add_argument("--only", default="", help="only rows with this text in their names")
    options = parser.parse_args(arguments)
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun")
    platform = select(int(os.environ.get("LOCAL_RANK", "0")))
    platform.install()
    size = int(os.environ["WORLD_SIZE"])
    rows = [row for row in ROWS if options.only in row.name and (platform.backend == "nccl" or not row.nccl)]
    options.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group(platform.backend)
    try:
        if size == 1:
            for recipe in {row.reference_recipe.model_dump_json(): row.reference_recipe for row in rows}.values():
                _write(_file(options.out, recipe), train(recipe))
            return 0
        rows = [row for row in rows if row.ranks == size]
        missing = [row.name for row in rows if not _file(options.out, row.reference_recipe).is_file()]
        if missing:
            print(f"no reference of {', '.join(missing)}: run with one rank first", file=sys.stderr)
            return 2
        results = {}
        for row in rows:
            outcome = train(row.recipe)
            if outcome is None:
                continue
            difference = compare(outcome, _read(_file(options.out, row.reference_recipe)))
            ok = difference.largest <= row.bound
            results[row.name] = {"ok": ok, "bound": row.bound, "difference": str(difference)}
            print(f"{'ok  ' if ok else 'FAIL'} {row.name}: {difference}", flush=True)
        if dist.get_rank() == 0:
            (options.out / f"ranks-{size}.json").write_text(json.dumps(results, indent=2) + "\n", "utf-8")
        return 0 if all(result["ok"] for result in results.values()) else 1
    finally:
        dist.destroy_process_group()


def _file(folder: Path, recipe: Recipe) -> Path:
    return folder / f"reference-{hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()[:16]}.npz"


def _write(path: Path, outcome: Outcome | None) -> None:
    assert outcome is not None, "a world of one is its own first rank"
    tensors = {f"tensor {name}": value for name, value in outcome.tensors.items()}
    gradients = {f"gradient {name}": np.float64(norm) for name, norm in outcome.gradients.items()}
    scales = [math.nan if scale is None else scale for scale in outcome.scales]
    np.savez(
        path,
        losses=outcome.losses,
        norms=outcome.norms,
        valid=outcome.valid,
        scales=scales,
        allow_pickle=False,
        **tensors,
        **gradients,
    )


def _read(path: Path) -> Outcome:
    with np.load(path, allow_pickle=False) as stored:
        return Outcome(
            stored["losses"].tolist(),
            stored["norms"].tolist(),
            float(stored["valid"]),
            [None if math.isnan(scale) else scale for scale in stored["scales"].tolist()],
            {name.removeprefix("tensor "): stored[name] for name in stored.files if name.startswith("tensor ")},
            gradients={
                name.removeprefix("gradient "): float(stored[name])
                for name in stored.files
                if name.startswith("gradient ")
            },
        )


if __name__ == "__main__":
    sys.exit(main())
