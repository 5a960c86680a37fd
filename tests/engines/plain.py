"""A second engine, as small as one can be: plain PyTorch, one process, a bigram model. It shows that the seam holds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F

from llmrecipes.checkpoint.manifest import digest
from llmrecipes.checkpoint.state_format import StateDict, Written
from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import (
    Accept,
    Batch,
    Implementation,
    Platform,
    Progress,
    Rank,
    Slice,
    StepResult,
    StopCheck,
    WeightSource,
    World,
)
from llmrecipes.engine.core.checkpoint.reading import load_plain, open_inside
from llmrecipes.engine.parts.base import Parts
from llmrecipes.engine.sampling import Sampling, draw
from llmrecipes.faults.numerics import named_gradients
from llmrecipes.hardware.profile import Group
from llmrecipes.io import sync
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.schema import Recipe

STATE = "state.pt"


class Cpu:
    """See `engine.base.Platform`."""

    name = "cpu"
    backend = "gloo"
    device = torch.device("cpu")

    def install(self) -> None: ...

    def connect(self, timeout: timedelta) -> None:
        dist.init_process_group(self.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)

    def peak_memory(self) -> int:
        return 0

    def synchronize(self) -> None: ...


class OneFile:
    """See `checkpoint.format.CheckpointFormat`."""

    def reserve(self, state: StateDict) -> None: ...

    def snapshot(self, state: StateDict) -> StateDict:
        return copy.deepcopy(state)

    def prepare(self, taken: StateDict, directory: Path, rank: int) -> StateDict:
        directory.mkdir(parents=True)
        return taken

    def planned_bytes(self, prepared: StateDict) -> int:
        return sum(tensor.nbytes for tensor in prepared["model"].values())

    def write(self, prepared: StateDict, directory: Path, rank: int) -> Written:
        torch.save(prepared, directory / STATE)
        sync(directory / STATE)
        return Written({STATE: digest(directory / STATE)}, b"")

    def finish(self, directory: Path, indexes: list[bytes]) -> None: ...

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}


class PlainEngine:
    """See `engine.base.Engine`."""

    name = "plain"
    implementation = Implementation("torch", "there is nothing else")
    parts = Parts()

    def __init__(self, plan: Plan, platform: Platform) -> None:
        self.recipe, self.plan, self.platform = plan.recipe, plan, platform
        recipe = plan.recipe
        torch.manual_seed(recipe.train.seed)
        width, vocabulary = recipe.model.hidden_size, recipe.model.vocab_size
        self.model = torch.nn.Sequential(torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, vocabulary))
        self.modules = (self.model,)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=recipe.optimizer.lr)
        self.local_loss = 0.0
        self._see: Callable[[list[Slice], list[Slice]], None] | None = None

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def train_step(
        self,
        batches: Iterator[Batch],
        *,
        num_microbatches: int | None = None,
        stop: StopCheck | None = None,
        accept: Accept | None = None,
        redo: Callable[[], None] | None = None,
    ) -> StepResult:
        self.optimizer.zero_grad()
        total, tokens = torch.zeros(()), torch.zeros(())
        for _ in range(num_microbatches or self.plan.num_microbatches):
            loss, count = self._loss(next(batches))
            total, tokens = total + loss, tokens + count
        (total / tokens).backward()
        self.local_loss = float((total / tokens).detach())
        bound = self.recipe.optimizer.clip_grad or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), bound))
        if self._see is not None:
            gradients = [self._shard(name, parameter.grad) for name, parameter in self.model.named_parameters()]
            self._see(self.weights(), gradients)
        is_finite = math.isfinite(self.local_loss) and math.isfinite(norm)
        if is_finite and accept is not None and not accept(self.local_loss, norm):
            stops = stop is not None and stop()
            return StepResult(self.local_loss, norm, self.learning_rate, None, False, stops, rejected=True)
        if is_finite:
            self.optimizer.step()
        return StepResult(self.local_loss, norm, self.learning_rate, None, False, stop is not None and stop())

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], global_batches: int, stop: StopCheck | None = None) -> float | None:
        sums = [self._loss(next(batches)) for _ in range(global_batches * self.plan.num_microbatches)]
        if stop is not None and stop():
            return None
        return float(sum(loss for loss, _ in sums) / sum(count for _, count in sums))

    def params_synced(self) -> AbstractContextManager[None]:
        return nullcontext()

    def replica_fault(self) -> None:
        return None

    def result_fault(self) -> None:
        return None

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from named_gradients(self.model)

    def weights(self) -> list[Slice]:
        return [self._shard(name, parameter) for name, parameter in self.model.named_parameters()]

    def watch_gradients(self, see: Callable[[list[Slice], list[Slice]], None]) -> None:
        self._see = see

    def checkpoint_format(self) -> OneFile:
        return OneFile()

    def state(self, progress: Progress) -> StateDict:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(progress),
        }

    def load_state(self, entry: Entry) -> Progress:
        with open_inside(entry.path, STATE) as stream:
            loaded = load_plain(stream, entry.path / STATE)
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        return Progress(**loaded["progress"])

    @torch.no_grad()
    def generate(
        self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, vocab_size: int, eod: int | None
    ) -> Iterator[int]:
        random = torch.Generator().manual_seed(sampling.seed)
        token = prompt[-1]
        for _ in range(max_new_tokens):
            token = draw(self.model(torch.tensor(token))[:vocab_size], sampling, random)
            if token == eod:
                return
            yield token

    def scorer(self) -> NoReturn:
        raise NotImplementedError

    def close(self) -> None: ...

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        losses = F.cross_entropy(self.model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return (losses * batch["loss_mask"].flatten()).sum(), batch["loss_mask"].sum()

    def _shard(self, name: str, tensor: torch.Tensor | None) -> Slice:
        values = torch.zeros(0) if tensor is None else tensor.detach().clone()
        return Slice(name, (0,) * values.dim(), tuple(values.shape), values)


class PlainBackend:
    """See `engine.base.Backend`."""

    def platform(self, local_rank: int = 0) -> Platform:
        return Cpu()

    @contextmanager
    def connect(self, platform: Platform) -> Iterator[Rank]:
        dist.init_process_group(platform.backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield Rank(rank=0, size=1)
        finally:
            dist.destroy_process_group()

    @contextmanager
    def lay_out(self, recipe: Recipe) -> Iterator[World]:
        yield World(rank=0, size=1, data_parallel_rank=0, data_parallel_size=1, holds_whole_model=True)

    @contextmanager
    def join(self, recipe: Recipe, platform: Platform) -> Iterator[World]:
        with self.connect(platform), self.lay_out(recipe) as world:
            yield world

    def require(self, plan: Plan, platform: Platform) -> None: ...

    def build(self, plan: Plan, platform: Platform, weights: WeightSource | None = None) -> PlainEngine:
        assert weights is None, "a bigram model has no given weights"
        return PlainEngine(plan, platform)

    def construct(self, plan: Plan, platform: Platform, base: object = None) -> PlainEngine:
        return PlainEngine(plan, platform)

    def load_weights(
        self, plan: Plan, platform: Platform, entry: Entry, base: object = None, *, averaged: bool = False
    ) -> PlainEngine:
        engine = PlainEngine(plan, platform)
        engine.load_state(entry)
        return engine

    def load_given(self, *_: Any) -> NoReturn:
        raise NotImplementedError

    def upcycle(self, *_: Any) -> NoReturn:
        raise NotImplementedError

    def write_weights(self, *_: Any) -> NoReturn:
        raise NotImplementedError

    def learning_rate(self, recipe: Recipe, step: int) -> float:
        return recipe.optimizer.lr

    def process_groups(self) -> Mapping[Group, dist.ProcessGroup]:
        return {}
