"""What a GPU report measures; each item in a process of its own, which prints a JSON line for each row."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmrecipes.bench.measure import SIZE, measure_ranks, random_tokens
from llmrecipes.bench.report import Row
from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import Engine, Progress
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.load import load
from llmrecipes.recipe.proxy import proxy
from llmrecipes.recipe.schema import Parallelism, Recipe
from llmrecipes.rundir import Run
from llmrecipes.train.profile import profiled
from llmrecipes.units import GIB

FOLDER = "LLMRECIPES_REPORT"
"""Variable with the report's folder, on whose disk checkpoints are written."""
AIMS = {"gpt-125m": 0.39, "gpt-1b": 0.55}
"""Share of the data sheet's peak, with full attention, that whole models aim at; not reached by measurement yet."""
WARMUP, STEPS, PROFILED = 3, 10, 2

BIG: dict[str, dict[str, Any]] = {
    "llama3-8b": {},
    "mixtral-8x7b": {},
    "qwen3-30b-a3b": {},
    # 32 of 256 experts: a layer with all of them does not fit on one GPU.
    "deepseek-v3": {"num_moe_experts": 32, "moe_layer_freq": 1, "mtp_num_layers": None},
}
"""Large models, and what is changed of them besides depth and layout."""
DEPTHS = (1, 2)
MICRO_BATCHES = 4


def cut(name: str, depth: int, device: str) -> Recipe:
    """A large model of a few layers, without recomputation, on one GPU; on a CPU its tiny version."""
    full = load(name, []).recipe
    changes = {"num_layers": depth, **BIG[name]}
    if device == "cpu":
        full = proxy(full, "cpu")
        changes = {key: value for key, value in changes.items() if key != "num_moe_experts"}
    batch = {"global_batch_size": MICRO_BATCHES * full.train.micro_batch_size}
    no_recomputation = dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"))
    changed = {
        "model": full.model.model_copy(update=changes),
        "train": full.train.model_copy(update={**batch, **no_recomputation}),
        "parallelism": Parallelism(),
    }
    return Recipe.model_validate(full.model_copy(update=changed).model_dump())


def whole(name: str, device: str) -> Recipe:
    """A model that one GPU trains, with a few micro-batches a step; on a CPU its tiny version."""
    full = load(name, []).recipe
    if device == "cpu":
        full = proxy(full, "cpu")
    batch = {"global_batch_size": MICRO_BATCHES * full.train.micro_batch_size}
    changed = {"train": full.train.model_copy(update=batch), "parallelism": Parallelism()}
    return Recipe.model_validate(full.model_copy(update=changed).model_dump())


@dataclass
class Item:
    """One item of a stage."""

    stage: str
    name: str
    device: str

    def row(self, quantity: str, value: float | None = None, unit: str = "", **more: Any) -> Row:
        return Row(stage=self.stage, item=self.name, quantity=quantity, value=value, unit=unit, **more)

    def rows(self) -> Iterator[Row]:
        """Measure."""
        kind, _, argument = self.name.partition(" ")
        measures: dict[str, Callable[[str], Iterator[Row]]] = {
            "parity": self._parity,
            "model": self._model,
            "layers": self._layers,
            "saves": self._saves,
            "gemm": self._gemm,
        }
        yield from measures[kind](argument)

    def _parity(self, _argument: str) -> Iterator[Row]:
        from llmrecipes.bench import parity

        expected = parity.goldens()
        for name in parity.MODELS:
            recipe = parity.recipe_of(name)
            apart, where = parity.difference(parity.train(recipe), expected[name])
            limit = parity.LIMITS[recipe.train.precision]
            yield self.row(name, apart, limit=limit, note=f"largest relative difference: {where}")

    def _gemm(self, _argument: str) -> Iterator[Row]:
        recipe = load("gpt-tiny", []).recipe
        engines = backend(recipe)
        platform = engines.platform()
        with engines.join(recipe, platform):
            speeds = measure_ranks(platform, 5)
        peak = _peak()
        tflops = speeds.flops / speeds.seconds[0] / 1e12
        share = {} if peak is None else {"note": f"{tflops / peak:.0%} of the data sheet's {peak:.0f}"}
        yield self.row(f"products of {SIZE[platform.name]} rows", tflops, "TFLOP/s", **share)

    def _model(self, name: str) -> Iterator[Row]:
        yield from self._speed(whole(name, self.device), "")

    def _layers(self, name: str) -> Iterator[Row]:
        seconds = []
        for depth in DEPTHS:
            median: list[float] = []
            yield from self._speed(cut(name, depth, self.device), f" ({depth} layers)", median)
            seconds.append(median[0])
        layer = (seconds[1] - seconds[0]) / (DEPTHS[1] - DEPTHS[0]) / MICRO_BATCHES
        yield self.row("layer", 1e3 * layer, "ms", note="of one micro-batch, forward, backward and update")
        full = load(name, []).recipe.model.num_layers
        step = seconds[0] + (full - DEPTHS[0]) * layer * MICRO_BATCHES
        yield self.row("extrapolated step", step, "s", note=f"{full} layers on one GPU, {MICRO_BATCHES} micro-batches")

    def _speed(self, recipe: Recipe, suffix: str, median: list[float] | None = None) -> Iterator[Row]:
        engines = backend(recipe)
        platform = engines.platform()
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        with engines.join(recipe, platform) as world, tempfile.TemporaryDirectory() as folder:
            plan = derive(recipe, world.size, detect())
            engine = engines.build(plan, platform)
            batches, seconds = random_tokens(recipe, 0), []
            for number in range(WARMUP + STEPS):
                started = time.perf_counter()
                engine.train_step(batches)
                platform.synchronize()
                if number >= WARMUP:
                    seconds.append(time.perf_counter() - started)
            memory = platform.peak_memory()
            layers = engine.implementation
            yield from self._of_step(plan, statistics.median(seconds), suffix, f"{layers.name}: {layers.reason}")
            # A GPU's figure is what torch has allocated: without CUDA's own memory, which is in the plan's workspace.
            # On a CPU the models are so small that the process is nearly all of it.
            planned = (plan.memory.total - plan.memory.workspace) / GIB if platform.name == "cuda" else None
            yield self.row(f"memory{suffix}", memory / GIB, "GiB", expected=planned)
            with profiled(PROFILED, Path(folder), 0) as stepped:
                for _ in range(2 + PROFILED + 1):
                    engine.train_step(batches)
                    platform.synchronize()
                    stepped()
            found = json.loads((Path(folder) / "kernels-rank-0.json").read_text("utf-8"))
            for kind, each in sorted(found["kinds"].items(), key=lambda pair: -pair[1]):
                note = f"{each / found['seconds']:.1%} of the step, {found['calls'].get(kind, 0):,} calls"
                yield self.row(f"kernels: {kind}{suffix}", 1e3 * each, "ms", note=note)
            engine.close()
        if median is not None:
            median.append(statistics.median(seconds))
        gc.collect()

    def _of_step(self, plan: Plan, seconds: float, suffix: str, note: str) -> Iterator[Row]:
        speed = plan.tokens_per_step / seconds
        yield self.row(f"step{suffix}", 1e3 * seconds, "ms", note=note)
        peak = _peak()
        aim = AIMS.get(plan.recipe.name)
        expected = None if aim is None or peak is None else aim * peak * 1e12 / plan.flops_per_token_full
        yield self.row(f"speed{suffix}", speed, "tokens/s", expected=expected)
        if peak is None:
            return
        for name, flops in (("full", plan.flops_per_token_full), ("causal", plan.flops_per_token_causal)):
            yield self.row(f"MFU, {name} attention{suffix}", 100 * speed * flops / peak / 1e12, "%")

    def _saves(self, name: str) -> Iterator[Row]:
        recipe = whole(name, self.device)
        engines = backend(recipe)
        platform = engines.platform()
        with (
            engines.join(recipe, platform) as world,
            tempfile.TemporaryDirectory(dir=os.environ[FOLDER]) as folder,
        ):
            plan = derive(recipe, world.size, detect())
            engine = engines.build(plan, platform)
            batches = random_tokens(recipe, 0)
            store = Run(Path(folder)).store()
            files = engine.checkpoint_format()
            engine.train_step(batches)
            waits, written = [], []
            with AsyncSaver(store, saver_group(), files) as saver:
                started = time.perf_counter()
                saver.reserve(engine.state(Progress(step=1)))
                reserve = time.perf_counter() - started
                for step in (2, 3, 4):
                    engine.train_step(batches)
                    platform.synchronize()
                    started = time.perf_counter()
                    saver.save(engine.state(Progress(step=step)), _info(plan, engine, step))
                    waits.append(time.perf_counter() - started)
                    written.append(saver.wait()[0].seconds)
            yield self.row("stall: allocation starts", 1e3 * reserve, "ms", note="after the first step")
            for number, wait in enumerate(waits, start=1):
                # The first save must not cost more than the others: its memory is allocated in advance.
                more = {} if number != 1 else {"note": "includes the rest of the allocation"}
                yield self.row(f"stall: save {number}", 1e3 * wait, "ms", **more)
            held = getattr(files, "held_bytes", 0)
            size = plan.checkpoint_bytes
            yield self.row(
                "host memory of a save", held / GIB, "GiB", expected=size / GIB, note="expected: a checkpoint"
            )
            yield self.row("written", size / statistics.median(written) / 1e9, "GB/s", note="in the background")
            entry = store.latest_valid()
            assert entry is not None  # noqa: S101
            started = time.perf_counter()
            engine.load_state(entry)
            platform.synchronize()
            seconds = time.perf_counter() - started
            yield self.row("load", size / seconds / 1e9, "GB/s", note=f"{seconds:.2f} s")
            engine.close()


def _info(plan: Plan, engine: Engine, step: int) -> CheckpointInfo:
    return CheckpointInfo(
        step=step, consumed_samples=step, consumed_tokens=step, layout=plan.layout.as_dict(), recipe_hash="report",
        engine=engine.name, recipe=plan.recipe.model_dump(mode="json"),
    )  # fmt: skip


def _peak() -> float | None:
    gpus = detect().gpus
    return gpus[0].peak_tflops if gpus else None


def main() -> None:
    """`python -m llmrecipes.bench.report_worker STAGE ITEM DEVICE`: rows on stdout, everything else on stderr."""
    stage, name, device = sys.argv[1:]
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for row in Item(stage, name, device).rows():
            answers.write(row.model_dump_json() + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
