"""Benchmarks of optimizer steps, and of reading their batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import torch
import torch.distributed as dist

from llmrecipes.bench.spec import BenchSpec, Reading, StepTimes
from llmrecipes.data.prepared import open_prepared
from llmrecipes.engine.base import Backend, Batch, Platform, World
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.loaders import open_loaders

WARMUP = 2


def steps(spec: BenchSpec, engines: Backend, world: World, platform: Platform, cluster: Cluster) -> StepTimes:
    """Train on random tokens, without prepared data. A collective of all ranks."""
    recipe = spec.recipe
    plan = derive(recipe, world.size, cluster)
    engine = engines.build(plan, platform)
    batches = random_tokens(recipe, world.data_parallel_rank)
    times = []
    for number in range(WARMUP + spec.repeats):
        dist.barrier()
        started = time.perf_counter()
        engine.train_step(batches)
        if number >= WARMUP:
            times.append(time.perf_counter() - started)
    memory = torch.tensor([float(platform.peak_memory())], device=platform.device)
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    engine.close()
    return StepTimes(
        world_size=world.size,
        layout=plan.layout.as_dict(),
        seconds=_slowest(times, platform),
        tokens_per_step=plan.tokens_per_step,
        flops_per_token=plan.flops_per_token_causal,
        peak_memory_bytes=int(memory.item()),
        peak_tflops=cluster.gpus[0].peak_tflops if cluster.gpus else None,
    )


def reading(spec: BenchSpec, world: World, platform: Platform, cluster: Cluster) -> Reading:
    """Read global batches of prepared data to the device. A collective of all ranks.

    Raises:
        UserError: the data is not prepared.
    """
    recipe = spec.recipe
    plan = derive(recipe, world.size, cluster)
    started = time.perf_counter()
    loaders = open_loaders(recipe, open_prepared(recipe, spec.data_dir), world, pin_memory=platform.name == "cuda")
    with closing(loaders.train(0)) as batches:
        _to_device(next(batches), platform)
        first = time.perf_counter() - started
        for _ in range(plan.num_microbatches - 1):
            next(batches)
        times = []
        for _ in range(spec.repeats):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(plan.num_microbatches):
                _to_device(next(batches), platform)
            times.append(time.perf_counter() - started)
    return Reading(
        world_size=world.size,
        seconds=_slowest(times, platform),
        tokens_per_batch=plan.tokens_per_step,
        first_seconds=_slowest([first], platform)[0],
    )


def _to_device(batch: Batch, platform: Platform) -> None:
    for tensor in batch.values():
        tensor.to(platform.device, non_blocking=True)


def _slowest(times: list[float], platform: Platform) -> tuple[float, ...]:
    slowest = torch.tensor(times, dtype=torch.float64, device=platform.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return tuple(slowest.tolist())


def random_tokens(recipe: Recipe, data_parallel_rank: int) -> Iterator[Batch]:
    """Endless micro-batches: the same tokens on every rank of a model replica."""
    random = torch.Generator().manual_seed(data_parallel_rank)
    size, length = recipe.train.micro_batch_size, recipe.model.seq_length
    positions, mask = torch.arange(length).expand(size, length), torch.ones(size, length)
    while True:
        ids = torch.randint(recipe.model.vocab_size, (size, length + 1), generator=random)
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask, "position_ids": positions}
