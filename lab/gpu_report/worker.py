"""What a GPU report measures; each item in a process of its own, which prints a JSON line for each row."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.gpu_report import right
from lab.gpu_report.report import Row, read
from lab.gpu_report.rivals import RIVALS
from llmrecipes.bench.measure import SIZE, measure_ranks, random_tokens
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.dryrun.dry_run_spec import DryRunSpec
from llmrecipes.dryrun.simulation import dry_run
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import Progress
from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.plan.speed.forecast import forecast
from llmrecipes.recipe.derived.batch_schedule import without_ramp
from llmrecipes.recipe.derived.degrees import undivided
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.zero import Zero
from llmrecipes.recipe.speedups.features import FeatureChoice, key_of, resolve
from llmrecipes.recipe.speedups.recompute import recomputation
from llmrecipes.recipe.variants.proxy import proxy
from llmrecipes.rundir import Run
from llmrecipes.train.observers.step_profile import profiled
from llmrecipes.units import GIB

FOLDER = "LLMRECIPES_REPORT"
"""Variable with the report's folder, on whose disk checkpoints are written."""
AIMS = {"gpt-125m": 0.39, "gpt-1b": 0.55}
"""Share of the data sheet's peak, with full attention, that whole models aim at; not reached by measurement yet."""
MEASURED = {"gpt-125m": ["layout.micro_batch_size=32"], "gpt-1b": ["layout.micro_batch_size=8"]}
"""Micro-batches of earlier reports, which a run has chosen for its machine."""
WARMUP, STEPS, PROFILED = 3, 10, 2

BIG: dict[str, dict[str, Any]] = {
    "llama3-8b": {},
    "mixtral-8x7b": {},
    "qwen3-30b-a3b": {},
    # 16 of 256 experts and a quarter of the vocabulary: with 32 and all of it, two layers need more than an H100 has.
    "deepseek-v3": {"num_moe_experts": 16, "vocab_size": 32768, "moe_layer_freq": 1, "mtp_num_layers": None},
}
"""Large models, and what is changed of them besides depth and layout."""
DEPTHS = (1, 2)
FUSIONS = (
    "bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion", "moe_permute_fusion", "moe_router_fusion",
)  # fmt: skip
MICRO_BATCHES = 4


def cut(name: str, depth: int, device: str) -> Recipe:
    """A large model of a few layers, without recomputation, on one GPU; on a CPU its tiny version."""
    full = load(name, []).recipe
    changes = {"num_layers": depth, **BIG[name]}
    if device == "cpu":
        full = proxy(full, "cpu")
        changes = {key: value for key, value in changes.items() if key not in ("num_moe_experts", "vocab_size")}
    batch = {"global_batch_size": MICRO_BATCHES * full.layout.micro_batch_size}
    changed = {"model": full.model.model_copy(update=changes), "train": without_ramp(full.train, **batch)}
    return undivided(full.model_copy(update=changed), **recomputation())


def whole(name: str, device: str) -> Recipe:
    """A model that one GPU trains, with a few micro-batches a step; on a CPU its tiny version."""
    full = load(name, MEASURED.get(name, [])).recipe
    if device == "cpu":
        full = proxy(full, "cpu")
    batch = {"global_batch_size": MICRO_BATCHES * full.layout.micro_batch_size}
    return undivided(full.model_copy(update={"train": without_ramp(full.train, **batch)}))


def compiled(name: str, device: str) -> Recipe:
    """`whole`, with `layout.torch_compile`."""
    recipe = whole(name, device)
    return recipe.with_layout(torch_compile=True)


def offloaded(name: str, device: str, where: str) -> Recipe:
    """A model that one GPU trains with DeepSpeed, its optimizer there (`none`) or in the host's memory (`cpu`)."""
    zero = Zero.model_validate({"stage": 2, "offload_optimizer": where})
    return whole(name, device).with_layout(engine="deepspeed", zero=zero)


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
            "compiled": self._compiled,
            "layers": self._layers,
            "saves": self._saves,
            "gemm": self._gemm,
            "dryrun": self._dry_run,
            "scalings": self._scalings,
            "fusions": self._fusions,
            "offload": self._offload,
            "resume": lambda _: right.resume(self.row, self.device),
            "waits": lambda name: right.waits(self.row, whole(name, self.device), self.device),
            "breaks": lambda _: right.breaks(self.row, self.device),
            **dict.fromkeys(RIVALS, self._rival),
        }
        yield from measures[kind](argument)

    def _parity(self, _argument: str) -> Iterator[Row]:
        from lab.gpu_report import parity

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

    def _compiled(self, name: str) -> Iterator[Row]:
        """The same with `layout.torch_compile`."""
        torch._dynamo.utils.counters.clear()
        yield from self._speed(compiled(name, self.device), "")
        yield right.graph_breaks(self.row)

    def _dry_run(self, name: str) -> Iterator[Row]:
        """Memory of the same step without a device, beside which that of the step is put."""
        spec = DryRunSpec(recipe=whole(name, self.device), cluster=detect(), world_size=1, ranks=(0,))
        report = dry_run(spec, 0)
        needed, planned = (sum(parts.values()) / GIB for parts in (report.memory, report.planned))
        yield self.row("memory", needed, "GiB", expected=planned, note="of tensors, without a GPU")

    def _rival(self, name: str) -> Iterator[Row]:
        """Another loop on the same model."""
        kind, recipe = self.name.partition(" ")[0], whole(name, self.device)
        session = Timed()
        RIVALS[kind](recipe, session)
        yield from self._of_step(
            derive(recipe, 1, detect()), statistics.median(session.seconds[WARMUP:]), "", "", ours=False
        )
        if session.peak_memory:
            yield self.row("memory", session.peak_memory / GIB, "GiB")

    def _scalings(self, name: str) -> Iterator[Row]:
        """A large model of two layers with each scaling of `train.fp8`, beside bf16."""
        bf16: list[float] = []
        plain = in_bf16(cut(name, DEPTHS[-1], self.device))
        yield from self._speed(plain, " (bf16)", bf16)
        for scaling in ("blockwise", "tensorwise", "mxfp8"):
            suffix, seconds = f" ({scaling})", list[float]()
            train = plain.train.model_copy(update={"fp8": "e4m3", "fp8_recipe": scaling})
            recipe = plain.model_copy(update={"train": train})
            try:
                yield from self._speed(recipe, suffix, seconds)
            except UserError as error:
                if not error.where.startswith("train.fp8"):
                    raise
                yield self.row(f"step{suffix}", status="skipped", note=error.rule)
                continue
            before, after = (planned_seconds(derive(variant, 1, detect())) for variant in (plain, recipe))
            expected = before / after if before and after else None
            yield self.row(f"speed beside bf16{suffix}", bf16[0] / seconds[0], "×", expected=expected)

    def _fusions(self, name: str) -> Iterator[Row]:
        """A layer of a large model with each fusion the other way; what the model has by rule is the first row."""
        recipe, plain = cut(name, DEPTHS[0], self.device), list[float]()
        yield from self._step(recipe, "step", plain)
        choices = self._features(recipe)
        for fusion in FUSIONS:
            choice, seconds = choices[key_of(fusion)], list[float]()
            if choice.ruled_out:
                yield self.row(f"step without {fusion}", status="skipped", note=choice.reason)
                continue
            other = not choice.value
            changed = recipe.with_layout(**{fusion: other})
            yield from self._step(changed, f"step {'with' if other else 'without'} {fusion}", seconds)
            if not seconds:
                continue
            share = 100 * (seconds[0] / plain[0] - 1)
            yield self.row(
                f"what {fusion} gives", -share if other else share, "%", note="of the step with it off or on"
            )

    def _features(self, recipe: Recipe) -> dict[str, FeatureChoice]:
        """What this process has of the features of `speed`, by key: the plan expects TransformerEngine on every GPU."""
        from llmrecipes.engine.core.model.gpt import software

        plan = derive(recipe, 1, detect())
        *_, target = software(plan, backend(recipe).platform())
        return {choice.key: choice for choice in resolve(plan.recipe, target)}

    def _step(self, recipe: Recipe, quantity: str, seconds: list[float]) -> Iterator[Row]:
        """Only the time of a step; a feature that the rank lacks is skipped, and no time appended."""
        try:
            for row in self._speed(recipe, "", seconds):
                if row.quantity == "step":
                    yield row.model_copy(update={"quantity": quantity})
        except UserError as error:
            if not error.where.startswith(("layout.", "train.")):
                raise
            yield self.row(quantity, status="skipped", note=error.rule)

    def _offload(self, name: str) -> Iterator[Row]:
        """Step and memory with the optimizer on the GPU and in the host's memory."""
        if self.device == "cpu":
            yield self.row("step with offload", status="skipped", note="offload moves state out of GPU memory")
            return
        for where in ("none", "cpu"):
            suffix = " without offload" if where == "none" else " with offload"
            for row in self._speed(offloaded(name, self.device, where), suffix):
                if row.quantity.startswith(("step", "memory")):
                    yield row

    def _layers(self, name: str) -> Iterator[Row]:
        seconds = []
        for depth in DEPTHS:
            median: list[float] = []
            yield from self._speed(cut(name, depth, self.device), f" ({depth} layers)", median)
            seconds.append(median[0])
        layer = _of_layer(seconds)
        planned = [planned_seconds(derive(cut(name, depth, self.device), 1, detect())) for depth in DEPTHS]
        of_plan = _of_layer([seconds for seconds in planned if seconds is not None])
        yield self.row(
            "layer", 1e3 * layer, "ms", expected=1e3 * of_plan if of_plan else None,
            note="of one micro-batch, forward, backward and update",
        )  # fmt: skip
        full = load(name, []).recipe.model.num_layers
        step = seconds[0] + (full - DEPTHS[0]) * layer * MICRO_BATCHES
        expected = planned[0] + (full - DEPTHS[0]) * of_plan * MICRO_BATCHES if planned[0] and of_plan else None
        yield self.row(
            "extrapolated step",
            step,
            "s",
            expected=expected,
            note=f"{full} layers on one GPU, {MICRO_BATCHES} micro-batches",
        )

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
                if number == 0 and recipe.layout.torch_compile:
                    yield self.row(f"first step{suffix}", time.perf_counter() - started, "s", note="compiles")
                if number >= WARMUP:
                    seconds.append(time.perf_counter() - started)
            memory = platform.peak_memory()
            layers = engine.implementation
            yield from self._of_step(plan, statistics.median(seconds), suffix, f"{layers.name}: {layers.reason}")
            # A GPU's figure is what torch has allocated: without CUDA's own memory, which is in the plan's workspace.
            # On a CPU the models are so small that the process is nearly all of it.
            planned = (plan.memory.total - plan.memory.workspace) / GIB if platform.name == "cuda" else None
            yield self.row(f"memory{suffix}", memory / GIB, "GiB", expected=planned, note=self._dry())
            with profiled(PROFILED, Path(folder), 0) as stepped:
                for _ in range(2 + PROFILED + 1):
                    engine.train_step(batches)
                    platform.synchronize()
                    stepped()
            kernels = json.loads((Path(folder) / "kernels-rank-0.json").read_text("utf-8"))
            for kind, each in sorted(kernels["kinds"].items(), key=lambda pair: -pair[1]):
                note = f"{each / kernels['seconds']:.1%} of the step, {kernels['calls'].get(kind, 0):,} calls"
                yield self.row(f"kernels: {kind}{suffix}", 1e3 * each, "ms", note=note)
            engine.close()
        if median is not None:
            median.append(statistics.median(seconds))
        gc.collect()

    def _dry(self) -> str:
        """What a dry run of the same model needs, where the report has it."""
        name = self.name.partition(" ")[2]
        memory = [row.value for row in self._known() if row.item == f"dryrun {name}" and row.quantity == "memory"]
        return f"dry run: {memory[0]:.4g} GiB" if self.name.startswith("model") and memory else ""

    def _known(self) -> list[Row]:
        """Measured rows of the report."""
        folder = os.environ.get(FOLDER)
        return [row for row in read(Path(folder)) if row.value is not None] if folder else []

    def _of_step(self, plan: Plan, seconds: float, suffix: str, note: str, *, ours: bool = True) -> Iterator[Row]:
        speed = plan.tokens_per_step / seconds
        planned = planned_seconds(plan) if ours else None
        yield self.row(
            f"step{suffix}", 1e3 * seconds, "ms", note=note, expected=None if planned is None else 1e3 * planned
        )
        products = next((row for row in self._known() if row.item == "gemm" and row.unit == "TFLOP/s"), None)
        if products is not None and products.value:
            share = 100 * speed * plan.flops_per_token_causal / (products.value * 1e12)
            yield self.row(f"share of measured products{suffix}", share, "%", note="FLOPs of causal attention")
        peak = _peak() if self.device != "cpu" else None
        aim = AIMS.get(plan.recipe.name) if ours else None
        expected = None if aim is None or peak is None else aim * peak * 1e12 / plan.flops_per_token_full
        yield self.row(f"speed{suffix}", speed, "tokens/s", expected=expected)
        if peak is None:
            return
        for name, flops in (("full", plan.flops_per_token_full), ("causal", plan.flops_per_token_causal)):
            of_plan = None if planned is None else 100 * plan.tokens_per_step / planned * flops / peak / 1e12
            yield self.row(f"MFU, {name} attention{suffix}", 100 * speed * flops / peak / 1e12, "%", expected=of_plan)

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
                    store.withdraw(0)  # one of gpt-1b takes 18 GB, and a disk may not have room for three
                    engine.train_step(batches)
                    platform.synchronize()
                    started = time.perf_counter()
                    saver.save(engine.state(Progress(step=step)), right.info(plan, engine, step))
                    waits.append(time.perf_counter() - started)
                    (saved,) = saver.wait()
                    if saved.error is not None:
                        raise RuntimeError(f"the save of step {step} failed: {saved.error}")
                    written.append(saved.seconds)
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


class Timed:
    """Asks a loop for steps, and times them; implements `rivals.Session`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peak_memory = 0
        self._last = 0.0

    def begin(self, **_facts: Any) -> bool:
        """See `Session`."""
        self._last = time.perf_counter()
        return True

    def stepped(self, loss: float, **facts: Any) -> bool:
        """See `Session`; a loss that is a number has come from the device."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last, self.peak_memory = now, facts.get("peak_memory", 0)
        return len(self.seconds) < WARMUP + STEPS


def in_bf16(recipe: Recipe) -> Recipe:
    """The recipe in bf16, as fp8 needs it."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": "bf16"})})


def _of_layer(seconds: Sequence[float]) -> float:
    """Seconds of a layer and micro-batch, from those of a step at both depths; 0 if they are unknown."""
    if len(seconds) < len(DEPTHS):
        return 0.0
    return (seconds[1] - seconds[0]) / (DEPTHS[1] - DEPTHS[0]) / MICRO_BATCHES


def planned_seconds(plan: Plan) -> float | None:
    """Seconds of a step by the time model; None without coefficients of the machine."""
    try:
        return forecast(plan, None).step.seconds
    except UserError:
        return None


def _peak() -> float | None:
    gpus = detect().gpus
    return gpus[0].peak_tflops if gpus else None


def main() -> None:
    """`python -m lab.gpu_report.worker STAGE ITEM DEVICE`: rows on stdout, everything else on stderr."""
    stage, name, device = sys.argv[1:]
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for row in Item(stage, name, device).rows():
            answers.write(row.model_dump_json() + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
