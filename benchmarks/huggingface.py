"""Seconds and memory of an export: of a checkpoint of gpt-1b, and of llama3-8b's shape with values made on the way.
And of an import: of a folder of gpt-1b, and of llama3-8b's shape, likewise.

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
    """Weights of a recipe's model that are made when they are read; see `hf.safetensors.TensorSource`."""

    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None:
        from llmrecipes.recipe.derived.weight_names import weights

        self._shapes = weights(load(recipe, changes).recipe.model)

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
    from llmrecipes.engine.core.checkpoint.format import write_file
    from llmrecipes.engine.core.checkpoint.index import INDEX_NAME, encode
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
            value, key = source.read(name), name
            row: tuple[int, ...] = ()
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
    from llmrecipes.models.export import ExportOptions, export

    started = time.perf_counter()
    made = export(
        f"{SMALL}/made@{STEP}", folder / "out", folder / "runs", folder / "data", ExportOptions(None, tokenizer=False)
    )
    return {"seconds": time.perf_counter() - started, "bytes": made.bytes, "shard": made.largest_shard}


def export_large(folder: Path) -> dict[str, float]:
    """The writer alone, on values made on the way."""
    from llmrecipes.hf.family import config_of, family_of
    from llmrecipes.hf.safetensors import write
    from llmrecipes.hf.weights import AsHuggingFace

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


class MadeBoxes(MadeWeights):
    """The same in boxes; see `engine.base.WeightSource`."""

    def read(self, name: str, offset: tuple[int, ...] = (), shape: tuple[int, ...] = ()) -> Any:
        import torch

        return torch.full(shape or self._shapes[name], 0.01, dtype=torch.bfloat16)


def import_small(folder: Path) -> dict[str, float]:
    """`llmrecipes import` of a folder that is written first, one tensor at a time; the peak is that of both."""
    from llmrecipes.hf.family import config_of, family_of
    from llmrecipes.hf.safetensors import write
    from llmrecipes.hf.weights import AsHuggingFace
    from llmrecipes.models.importing import import_model

    model = load(SMALL).recipe.model
    family = family_of(model)
    source = AsHuggingFace(MadeWeights(SMALL), family, model)
    (folder / "model").mkdir()
    written = write(source, config_of(family, model), folder / "model")
    started = time.perf_counter()
    made = import_model(str(folder / "model"), ["data.tokenizer.type=bpe"], folder / "runs", "made")
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "bytes": made.origin["checkpoint_bytes"], "shard": written.largest_shard}


def import_large(folder: Path) -> dict[str, float]:
    """The writer of the checkpoint alone, on values made on the way."""
    from llmrecipes.engine.backends import backend
    from llmrecipes.hardware.cluster import detect
    from llmrecipes.plan.derive import derive
    from llmrecipes.workflow.run import on_one_rank

    recipe = on_one_rank(load(LARGE).recipe)
    engines = backend(recipe)
    started = time.perf_counter()
    with engines.join(recipe, engines.platform()):
        written, _ = engines.write_weights(derive(recipe, 1, detect()), MadeBoxes(LARGE), folder / "checkpoint")
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "bytes": sum(file.size for file in written.files.values()), "shard": 5e9}


IMPORTS: dict[str, Callable[[Path], dict[str, float]]] = {
    f"llmrecipes import {SMALL}": import_small,
    f"{LARGE}, values made on the way": import_large,
}
CASES: dict[str, Callable[[Path], dict[str, float]]] = {
    f"llmrecipes export {SMALL}": export_small,
    f"save_pretrained of the same model ({SMALL})": save_pretrained,
    f"{LARGE}, values made on the way": export_large,
}


def run_case(name: str, folder: Path, *, imports: bool = False) -> dict[str, float]:
    """One case in a process of its own, with a folder that is deleted."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        if not imports and CASES[name] is export_small:
            subprocess.run([sys.executable, "-m", "benchmarks.huggingface", "--checkpoint", place], check=True)
        command = [sys.executable, "-m", "benchmarks.huggingface", "--case", name, "--folder", place]
        command += ["--imports"] if imports else []
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def main(arguments: argparse.Namespace) -> None:
    """Measure every case and print the figures."""
    started_on = machine()
    figures = {}
    if not arguments.imports:
        figures["export"] = {name: run_case(name, arguments.folder) for name in CASES}
        show_figures("Export to Hugging Face", "export, bf16", figures["export"])
    figures["import"] = {name: run_case(name, arguments.folder, imports=True) for name in IMPORTS}
    show_figures("Import from Hugging Face", "import, bf16", figures["import"])
    close(figures, started_on, arguments.json)


def show_figures(title: str, what: str, figures: dict[str, dict[str, float]]) -> None:
    """Print a table; of an import of made values, the shard is the largest that an export writes, 5 GB."""
    columns = [what, "seconds", "MiB/s", "GiB", "largest shard, GiB", "peak, GiB", "peak / largest shard"]
    show(
        title,
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


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where files are written")
    made.add_argument("--imports", action="store_true", help="the imports alone")
    made.add_argument("--case", help=argparse.SUPPRESS)
    made.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    given = made.parse_args()
    if given.checkpoint is not None:
        write_checkpoint(given.checkpoint)
    elif given.case is not None:
        figures = (IMPORTS if given.imports else CASES)[given.case](given.folder)
        print(json.dumps({**figures, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
    else:
        main(given)
