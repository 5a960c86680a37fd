"""A small recipe, batches without a corpus, the program as users start it, and the output of a run."""

from __future__ import annotations

from llmrecipes.hardware.builds import import_megatron

import_megatron()  # as ranks do, before anything else imports it: in half of the processor time

import gc
import json
import math
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import psutil
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.utils.data import Dataset

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.data.read.batches import batches
from llmrecipes.engine.core.model.gpt import BuiltModel, build
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.megatron.engine import Batch, MegatronEngine, StepResult
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.derived.batch_schedule import batch_schedule
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.schema import Model, Recipe

ROOT = Path(__file__).parents[1]
ROOMY = Cluster(gpus=(), cpu_cores=1, memory_bytes=1 << 40, memory_available_bytes=1 << 40, disk_free_bytes=1 << 40)

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 512}
LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "activation_func": "silu",
    "gated_linear_unit": True, "add_bias_linear": False, "num_query_groups": 2, "ffn_hidden_size": 176,
    "share_embeddings_and_output_weights": False,
}  # fmt: skip
TRAIN = {
    "train_iters": 12, "global_batch_size": 8, "precision": "fp32", "eval_interval": 5,
    "eval_iters": 2,
}  # fmt: skip


TRANSFORMER_ENGINES = (
    "models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb",
    *(f"transformer.moe.moe_utils.fused_{name}" for name in (
        "permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute",
    )),
)  # fmt: skip
"""Functions of TransformerEngine that megatron-core's configurations look for, inside `megatron.core`."""


def tiny(name: str = "tiny", **sections: dict[str, Any]) -> Recipe:
    """A recipe of 150,000 parameters; sections and keys extend or override the defaults here."""
    base: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "train": TRAIN,
        "layout": {"micro_batch_size": 2},
        "optimizer": {"lr": 1e-3},
        "tracking": {"mlflow": False, "tensorboard": False},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in base.keys() | sections.keys()}
    return Recipe.model_validate({"name": name, **merged})


def another(model: Model, key: str) -> Any:
    """Another value of a key of a model, which its rules may refuse."""
    value = getattr(model, key)
    if key == "window_size":
        return (2, 0) if value is None else (value[0] + 1, 0)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value
    if isinstance(value, float):
        return value / 2 or 0.5
    if isinstance(value, list):
        return value[::-1]
    if isinstance(value, dict):
        return {"softmax_scale": 0.5}
    if value is None:
        return 2
    values = get_args(Model.model_fields[key].annotation)
    return None if type(None) in values else next(each for each in values if each != value)


def tiny_on(corpus: Path, name: str = "tiny", **sections: dict[str, Any]) -> Recipe:
    """`tiny` on a folder of texts."""
    data = {"sources": [{"type": "text", "path": str(corpus)}], "split": [90.0, 5.0, 5.0], **sections.pop("data", {})}
    return tiny(name, data=data, **sections)


def write_recipe(recipe: Recipe, folder: Path) -> str:
    """Path of the recipe's file in a folder."""
    path = folder / f"{recipe.name}.yaml"
    path.write_text(to_yaml(recipe), "utf-8")
    return str(path)


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Samples that depend only on their index; a varying part of each is masked from the loss.

    Where conversations share a sequence, there are some in each, of varying lengths; of pairs two.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._length, self._vocab = recipe.model.seq_length, recipe.model.vocab_size
        self._size = recipe.train.global_batch_size * recipe.train.train_iters
        self._pairs = recipe.dpo is not None
        self._packed = recipe.data.chat is not None and not (self._pairs and not recipe.data.chat.packing)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(index)
        ids = torch.randint(self._vocab // 8, (self._length + 1,), generator=random)
        mask = torch.ones(self._length)
        mask[: index % 7 * self._length // 8] = 0
        positions = torch.arange(self._length)
        if self._packed and self._pairs:
            for begin in (self._length // 4 - index % 3, self._length // 2, 3 * self._length // 4 + index % 3):
                positions[begin:] = torch.arange(self._length - begin)
            mask = (positions > 1 + index % 3).float()
            worse = ((positions == 0).cumsum(0) - 1) % 2 * self._vocab // 2
        elif self._pairs:
            worse = torch.full((self._length,), index % 2 * self._vocab // 2)
        elif self._packed:
            for begin in (1 + index % 5, self._length // 2 + index % 3):
                positions[begin:] = torch.arange(self._length - begin)
        if self._pairs:
            ids[1:] += worse  # so that there is something to learn
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask, "position_ids": positions}


def random_batches(recipe: Recipe, *, consumed: int = 0, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
    """Micro-batches of a rank from `RandomTokens`."""
    sizes = batch_schedule(recipe)
    return batches(
        RandomTokens(recipe),
        sizes=None if sizes.is_constant else sizes,
        consumed_samples=consumed,
        micro_batch_size=recipe.layout.micro_batch_size,
        global_batch_size=recipe.train.global_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        num_workers=0,
        prefetch_factor=1,
        pin_memory=False,
    )


def built(recipe: Recipe) -> BuiltModel:
    """The initialised model; requires a joined world."""
    return build(derive(recipe, torch.distributed.get_world_size(), ROOMY), select())


_engines: list[MegatronEngine] = []


def engine_of(recipe: Recipe) -> MegatronEngine:
    """An engine; requires a joined world."""
    plan = derive(recipe, torch.distributed.get_world_size(), ROOMY)
    platform = select()
    _engines.append(MegatronEngine(plan, build(plan, platform), platform))
    return _engines[-1]


def close_engines() -> None:
    """Close what `engine_of` has made: an engine that is only dropped keeps its model and the threads of its groups."""
    while _engines:
        engine = _engines.pop()
        if vars(engine.chunks[0]):
            engine.close()
    gc.collect()


def steps(engine: MegatronEngine, number: int, batches_of_rank: Iterator[Batch] | None = None) -> list[StepResult]:
    """A number of optimizer steps, by default on random tokens."""
    source = random_batches(engine.recipe) if batches_of_rank is None else batches_of_rank
    return [engine.train_step(source) for _ in range(number)]


def environment() -> dict[str, str]:
    """Environment of a child process that imports this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start_command(*arguments: str) -> subprocess.Popen[str]:
    """Start `llmrecipes …` as a user does."""
    return subprocess.Popen(
        [sys.executable, "-m", "llmrecipes.cli", *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def finish(process: subprocess.Popen[str], code: int, timeout: float = 240) -> str:
    """Output of a command, which must exit with `code`."""
    try:
        printed, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == code, printed
    return printed


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int, timeout: float = 240) -> None:
    """Wait until metrics.jsonl has a step; the command must still be running then."""
    deadline = time.monotonic() + timeout
    while not any(line["step"] >= step for line in train_lines(run_dir)):
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode} before step {step}: {process.communicate()[0]}")
        assert time.monotonic() < deadline, f"no step {step} after {timeout} s"
        time.sleep(0.01)
    assert process.poll() is None, "the run is too short for this test: it has ended already"


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of a run's published checkpoints."""
    return [entry.step for entry in CheckpointStore(run_dir / "checkpoints").entries()]


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool], timeout: float = 240) -> None:
    """Wait for a condition; the command must not end before."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def not_waiting_for(process: psutil.Process) -> Iterator[None]:
    """A block that must not wait for a process: it is stopped meanwhile, for at most a minute."""
    process.suspend()
    resumed = threading.Timer(60, process.resume)
    resumed.start()
    try:
        yield
        assert resumed.is_alive()
    finally:
        resumed.cancel()
        process.resume()


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """All complete lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def train_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of optimizer steps."""
    return [line for line in lines(run_dir) if "grad_norm" in line]


def steps_done(printed: str) -> int:
    """The step that a command resumes from, in the row `steps` of its summary."""
    found = re.search(r"\bsteps +(\d+) ", printed)
    assert found, printed
    return int(found[1])


def curve(run_dir: Path) -> list[tuple[Any, ...]]:
    """Values that must not depend on interruptions: those of every step and evaluation, in file order."""
    numbers = (
        "step", "loss", "grad_norm", "lr", "consumed_samples", "consumed_tokens", "source_loss",
        "valid_source_loss", "valid_loss",
    )  # fmt: skip
    return [
        tuple(line.get(key) for key in numbers) for line in lines(run_dir) if "loss" in line or "valid_loss" in line
    ]


def require_same_checkpoints(one: Path, other: Path) -> None:
    """Two checkpoints are equal bit for bit: every tensor (weights, optimizer, random states) and every number."""
    first, second = checkpoint_values(one), checkpoint_values(other)
    assert first.keys() == second.keys()
    assert any(name.startswith("optimizer.state.exp_avg_sq.") for name in first)
    for name, value in first.items():
        same = torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        assert same, name


def checkpoint_values(checkpoint: Path) -> dict[str, Any]:
    """Every tensor and number of a checkpoint, by name."""
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()  # requests all entries
    _load_state_dict(found, storage_reader=FileSystemReader(checkpoint), planner=planner, no_dist=True)
    return dict(_flat(found))


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def largest_difference(one: list[float], other: list[float]) -> float:
    """Largest relative difference of two lists."""
    assert len(one) == len(other) > 0
    assert all(map(math.isfinite, one + other))
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Every write beyond `size` bytes of a file fails, as on a full disk (EFBIG instead of ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
