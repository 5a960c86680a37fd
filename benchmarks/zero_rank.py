"""One rank of `benchmarks.zero`: `python -m benchmarks.zero_rank <spec.json>`; writes its report next to the spec."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import counted
from llmrecipes.bench.measure import random_tokens
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import Platform, World
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe

TOO_MUCH, TOO_LONG = 3, 4
"""Exit codes: the rank exceeded the limit of memory, or of time."""
GRADIENTS = (
    "averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer", "offload_gradient_dict",
    "accumulated_grads_in_cpu", "fp32_groups_gradients_flat", "fp32_groups_gradients",
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
)  # fmt: skip
"""Where DeepSpeed's optimizers keep gradients, besides those of parameters and master weights."""
SMALL = 4096
Storages = dict[int, int]
"""Address and size of distinct memory."""


def resident_peak() -> int:
    """Bytes; unlike ru_maxrss without those of the process that started this one."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def return_freed_memory() -> None:
    """Undo what the CPU platform sets for speed, so that resident memory is what tensors take and not their holes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only in glibc
        m_trim_threshold, m_top_pad, m_mmap_threshold, m_mmap_max = -1, -2, -3, -4
        for name, value in ((m_trim_threshold, 2**17), (m_top_pad, 0), (m_mmap_threshold, 2**17), (m_mmap_max, 2**20)):
            mallopt(name, value)


def main() -> None:
    """Build the engine of each recipe in turn, train, measure what the spec asks for."""
    import logging

    from llmrecipes.console import setup_logging

    setup_logging(logging.ERROR)
    warnings.simplefilter("ignore")
    spec = Path(sys.argv[1])
    job = json.loads(spec.read_text("utf-8"))
    recipes = [Recipe.model_validate_json(each) for each in job["recipes"]]
    if job["tight"]:
        os.environ["THP_MEM_ALLOC_ENABLE"] = "0"
    engines = backend(recipes[0])
    platform = engines.platform(int(os.environ["LOCAL_RANK"]))
    _limit(platform, job["limit_bytes"], job["limit_seconds"])
    with engines.join(recipes[0], platform) as world:
        if job["tight"]:
            return_freed_memory()
        try:
            reports = [_measured(recipe, world, platform, job) for recipe in recipes]
        except torch.OutOfMemoryError:
            os._exit(TOO_MUCH)
        dist.barrier()
        (spec.parent / f"rank-{world.rank}.json").write_text(json.dumps(reports), "utf-8")


def _measured(recipe: Recipe, world: World, platform: Platform, job: dict[str, Any]) -> dict[str, Any]:
    """The report on one recipe; peaks of memory are those of the process so far."""
    gc.collect()  # the engine before
    report: dict[str, Any] = {"empty": resident_peak()}
    engine = backend(recipe).build(derive(recipe, world.size, detect()), platform)
    batches = random_tokens(recipe, world.data_parallel_rank)

    def step() -> None:
        engine.train_step(batches)

    for _ in range(job["warmup"]):
        step()
    report["seconds"] = [_timed(step, platform) for _ in range(job["steps"])]
    report["peak"] = platform.peak_memory() if platform.name == "cuda" else resident_peak()
    if job["count"]:
        report["calls"] = counted(step)
    if job["bytes"]:
        report["moments"] = moments(engine, step)
    engine.close()
    return report


def _limit(platform: Platform, memory: int | None, seconds: float | None) -> None:
    """End this process where it exceeds a limit; on a GPU the limit of memory is that of torch's allocator."""
    if memory is not None and platform.name == "cuda":
        total = torch.cuda.get_device_properties(platform.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), platform.device)
        memory = None
    started = time.monotonic()

    def watch() -> None:
        while True:
            if memory is not None and resident_peak() > memory:
                os._exit(TOO_MUCH)
            if seconds is not None and time.monotonic() - started > seconds:
                os._exit(TOO_LONG)
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()


def _timed(step: Callable[[], None], platform: Platform) -> float:
    dist.barrier()
    started = time.perf_counter()
    step()
    platform.synchronize()
    return time.perf_counter() - started


def moments(engine: Any, step: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """What an engine `deepspeed` holds at three moments of a step.

    `loss`: the output layer is about to run. `reduced`: gradients are ready, the update has not begun. `update`: the
    optimizer that ZeRO wraps is called, for the first of its groups of parameters.
    """
    found: dict[str, dict[str, Any]] = {}

    def at(name: str) -> None:
        if name not in found:
            found[name] = _held(engine)

    hook = engine.module.output_layer.register_forward_pre_hook(lambda *_: at("loss"))
    with (
        _before(engine._engine, "step", lambda: at("reduced")),
        _before(engine.partition.base, "step", lambda: at("update")),
    ):
        step()
    hook.remove()
    return found


@contextmanager
def _before(of: Any, name: str, see: Callable[[], None]) -> Iterator[None]:
    real = getattr(of, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        see()
        return real(*args, **kwargs)

    setattr(of, name, call)
    try:
        yield
    finally:
        delattr(of, name)


def _held(engine: Any) -> dict[str, Any]:
    """Bytes of distinct memory by what it is; `rest` is by attribute of the optimizer where it has one."""
    parameters = [parameter for module in engine.modules for parameter in module.parameters()]
    base = engine.partition.base
    # Stage 3 names them in the groups of the optimizer only while it updates them.
    masters = list(base.state)
    taken: set[int] = set()
    if any(hasattr(parameter, "ds_tensor") for parameter in parameters):
        weights = _new(taken, [parameter.ds_tensor.data for parameter in parameters])
        gathered = _new(taken, [parameter.data for parameter in parameters])
    else:
        weights, gathered = _new(taken, [parameter.data for parameter in parameters]), {}
    state = _new(taken, [*masters, *(each for _, each in tensors(dict(base.state), ""))])
    gradients = _new(taken, [
        gradient
        for each in (*parameters, *masters)
        for gradient in (each.grad, getattr(each, "grad_accum", None))
        if isinstance(gradient, torch.Tensor)
    ])  # fmt: skip
    for name in GRADIENTS:
        gradients |= _new(taken, [each for _, each in tensors(getattr(engine.optimizer, name, None), name)])
    rest: defaultdict[str, int] = defaultdict(int)
    for name, value in vars(engine.optimizer).items():
        for path, tensor in tensors(value, name):
            rest[path] += sum(_new(taken, [tensor]).values())
    everything = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    rest["other tensors"] = sum(_new(taken, everything).values())
    parts = {"weights": weights, "gathered": gathered, "gradients": gradients, "optimizer": state}
    return {
        **{name: sum(storages.values()) for name, storages in parts.items()},
        "rest": {name: size for name, size in rest.items() if size > SMALL},
    }


def _new(taken: set[int], found: list[torch.Tensor]) -> Storages:
    """The memory of tensors that was not taken before."""
    storages: Storages = {}
    for tensor in found:
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in taken:
                storages[storage.data_ptr()] = storage.nbytes()
    taken.update(storages)
    return storages


def tensors(value: Any, path: str, depth: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in nested containers and in objects of DeepSpeed, with the attributes that lead there."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth == 0:
        return
    if isinstance(value, dict):
        inside = [(path, each) for each in value.values()]
    elif isinstance(value, list | tuple | set):
        inside = [(path, each) for each in value]
        flat = getattr(value, "flat_partition", None)
        inside += [] if flat is None else [(path, flat)]
    elif type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__"):
        inside = [(f"{path}.{name}", each) for name, each in vars(value).items()]
    else:
        return
    for name, each in inside:
        yield from tensors(each, name, depth - 1)


if __name__ == "__main__":
    main()
