"""Seconds and memory of an export: of a checkpoint of gpt-1b, and of llama3-8b's shape with values made on the way.

    python -m benchmarks.huggingface [--folder DIR]

Beside it, what `save_pretrained` of transformers takes for the model of 1B parameters, which it holds in memory. Each
case is a new process; its peak is the kernel's largest resident size (VmHWM), libraries included. The folder needs 20
GiB, which are deleted after the case.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import close, machine, parser, show
from llmrecipes.recipe.load import load

SMALL, LARGE = "gpt-1b", "llama3-8b"
STEP = 1


class MadeWeights:
    """Weights of a recipe's model that are made when they are read; see `hf.tensors.TensorSource`."""

    def __init__(self, recipe: str) -> None:
        from llmrecipes.hf.megatron import weights

        self._shapes = weights(load(recipe).recipe.model)

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> Any:
        import torch

        return torch.bfloat16

    def read(self, name: str) -> Any:
        import torch

        return torch.full(self._shapes[name], 0.01, dtype=torch.bfloat16)


def write_checkpoint(folder: Path) -> None:
    """A run of `SMALL` with a checkpoint of weights alone, as one rank writes it."""
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from llmrecipes.checkpoint.manifest import CheckpointInfo
    from llmrecipes.checkpoint.store import CheckpointStore
    from llmrecipes.engine.megatron.checkpoint.index import INDEX_NAME
    from llmrecipes.engine.megatron.checkpoint.table import encode
    from llmrecipes.engine.megatron.checkpoint.writer import write_file
    from llmrecipes.recipe.load import to_yaml

    recipe = load(SMALL).recipe
    run = folder / "runs" / SMALL / "made"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(to_yaml(recipe), "utf-8")
    store = CheckpointStore(run / "checkpoints")
    temporary = store.temporary(STEP)
    source, layers = MadeWeights(SMALL), recipe.model.num_layers

    def shards() -> Any:
        for name in source.names():
            value, key, row = source.read(name), name, ()
            if name.startswith("decoder.layers."):
                row, key = (int(name.split(".")[2]),), name.replace(f"layers.{name.split('.')[2]}.", "layers.")
            yield ShardedTensor(
                key=key,
                data=value.normal_(std=0.02),
                dtype=torch.bfloat16,
                local_shape=tuple(value.shape),
                global_shape=(*((layers,) * len(row)), *value.shape),
                global_offset=(*row, *(0 for _ in value.shape)),
                axis_fragmentations=None,
                prepend_axis_num=len(row),
            )

    record, index = write_file(temporary / "__0_0.distcp", shards(), {})
    (temporary / INDEX_NAME).write_bytes(encode(index))
    info = CheckpointInfo(
        step=STEP, consumed_samples=0, consumed_tokens=0, layout={}, recipe_hash="", engine="megatron"
    )
    store.publish(temporary, info, versions={}, known={"__0_0.distcp": record})


def export_small(folder: Path) -> dict[str, float]:
    """`llmrecipes export`, without a tokenizer: there is no data."""
    from llmrecipes.workflow.export import Options, export

    started = time.perf_counter()
    made = export(
        f"{SMALL}/made@{STEP}", folder / "out", folder / "runs", folder / "data", Options(None, tokenizer=False)
    )
    return {"seconds": time.perf_counter() - started, "bytes": made.bytes, "shard": made.largest_shard}


def export_large(folder: Path) -> dict[str, float]:
    """The writer alone, on values made on the way."""
    from llmrecipes.hf.export import write
    from llmrecipes.hf.family import config_of, family_of
    from llmrecipes.hf.views import AsHuggingFace

    model = load(LARGE).recipe.model
    family = family_of(model)
    started = time.perf_counter()
    made = write(AsHuggingFace(MadeWeights(LARGE), family, model), config_of(family, model), folder)
    return {"seconds": time.perf_counter() - started, "bytes": made.bytes, "shard": made.largest_shard}


def save_pretrained(folder: Path) -> dict[str, float]:
    """transformers, once the model is in memory."""
    import torch
    import transformers

    from llmrecipes.hf.family import config_of, family_of

    model = load(SMALL).recipe.model
    config = transformers.AutoConfig.for_model(**config_of(family_of(model), model))
    held = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    started = time.perf_counter()
    held.save_pretrained(folder / "out", max_shard_size="5GB")
    files = [path.stat().st_size for path in (folder / "out").glob("*.safetensors")]
    return {"seconds": time.perf_counter() - started, "bytes": sum(files), "shard": max(files)}


CASES: dict[str, Callable[[Path], dict[str, float]]] = {
    f"llmrecipes export {SMALL}": export_small,
    f"save_pretrained of the same model ({SMALL})": save_pretrained,
    f"{LARGE}, values made on the way": export_large,
}


def run_case(name: str, folder: Path) -> dict[str, float]:
    """One case in a process of its own, with a folder that is deleted."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        if CASES[name] is export_small:
            subprocess.run([sys.executable, "-m", "benchmarks.huggingface", "--checkpoint", place], check=True)
        command = [sys.executable, "-m", "benchmarks.huggingface", "--case", name, "--folder", place]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def main(arguments: argparse.Namespace) -> None:
    """Measure every case and print the figures."""
    started_on = machine()
    figures = {name: run_case(name, arguments.folder) for name in CASES}
    columns = ["export, bf16", "seconds", "MiB/s", "GiB", "largest shard, GiB", "peak, GiB", "peak / largest shard"]
    show(
        "Export to Hugging Face",
        columns,
        [
            [
                name,
                f"{each['seconds']:.1f}",
                f"{each['bytes'] / 2**20 / each['seconds']:,.0f}",
                *(f"{each[key] / 2**30:.2f}" for key in ("bytes", "shard", "peak")),
                f"{each['peak'] / each['shard']:.2f}",
            ]
            for name, each in figures.items()
        ],
    )
    close({"export": figures}, started_on, arguments.json)


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where files are written")
    made.add_argument("--case", help=argparse.SUPPRESS)
    made.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    given = made.parse_args()
    if given.checkpoint is not None:
        write_checkpoint(given.checkpoint)
    elif given.case is not None:
        figures = CASES[given.case](given.folder)
        print(json.dumps({**figures, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
    else:
        main(given)
