"""A plan's speed: the time model for the layout, precision and batch of a recipe on the links of its machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmrecipes.console import duration
from llmrecipes.errors import UserError
from llmrecipes.hardware.profile import Calibration, Profile, Rates
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.frozen import reference_plan, teacher_plan
from llmrecipes.plan.kernels import recomputed_layers
from llmrecipes.plan.memory import Memory, of_stage
from llmrecipes.plan.muon import collectives, elements_and_bytes, products
from llmrecipes.plan.parameters import count_rounded_on_rank
from llmrecipes.plan.plan_table import stage_facts
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.plan.speed.device import Device, SpeedUnknownError, Stack, device, kernels_on, stack, stack_of
from llmrecipes.plan.speed.network import gather, reduce
from llmrecipes.plan.speed.saving import Saving, as_dict, saving
from llmrecipes.plan.speed.step import ADAMW_BYTES, StepTime, forward_seconds, linked, predict, with_attack
from llmrecipes.plan.speed.work import Work, product
from llmrecipes.recipe.engines import DEEPSPEED, engine_name
from llmrecipes.recipe.rules.distill_rules import has_teacher
from llmrecipes.recipe.rules.preference_rules import has_reference
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.adversarial import passes
from llmrecipes.recipe.speedups.fp8 import bf16_layers
from llmrecipes.units import GIB

ERROR = 0.26
"""Nine of ten published runs are predicted at least this well by coefficients fitted without their sources
(benchmarks/RESULTS.md, from `fit_planner.py --cross source`); of NVIDIA's programs 17 %."""
_SECONDS_OF_A_DAY = 86400
_REFERENCE_KEYS, _REFERENCE_LENGTH = 64, 512
"""Channels of a head and positions of the attention that `bench machine` measures."""


@dataclass(frozen=True)
class Forecast:
    """What a run will take.

    Costs are None where the profile has no price, `saving` where there is no profile. `memory` has the parts of each
    pipeline stage; `chosen` is that of `RunPlan`.
    """

    plan: Plan
    step: StepTime
    device: Device
    memory: tuple[Memory, ...]
    cost_usd: float | None
    energy_mwh: float | None
    co2_t: float | None
    saving: Saving | None
    calibration: Calibration | None = None
    stages: tuple[Forecast, ...] = ()
    """Of a run with stages, of each; plan, step and memory are then those of the largest."""
    chosen: Mapping[str, Any] | None = None
    slower: float = 1.0
    """On a GPU without fitted runs: how many times as long a step takes with the slowest shares that it may have."""
    faster: float = 1.0
    """The same with the fastest, at most 1."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each stage, or of a run without stages."""
        return tuple(stage.plan for stage in self.stages) or (self.plan,)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Training tokens."""
        return self.plan.tokens_per_step / self.step.seconds / self.plan.layout.world_size

    @property
    def speed_range(self) -> tuple[float, float]:
        """Least and most tokens per second of a GPU: nine of ten published runs are within such a range."""
        speed = self.tokens_per_second_per_gpu
        return speed / self.slower * (1 - ERROR), speed / self.faster * (1 + ERROR)

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        if self.stages:
            return sum(stage.seconds for stage in self.stages)
        return self.step.seconds * self.plan.full_steps

    @property
    def gpu_hours(self) -> float:
        """GPU hours of all steps."""
        return self.seconds * self.plan.layout.world_size / 3600

    @property
    def limit(self) -> str:
        """What takes the most time besides the kernels, and what the time leaves out."""
        parts = {
            "tensor-parallel communication": self.step.tensor,
            "the experts' all-to-all": self.step.expert,
            "context-parallel communication": self.step.context,
            "the pipeline's bubble": self.step.bubble,
            "the reduction of gradients": self.step.gradients,
            "the optimizer": self.step.optimizer,
        }
        name, seconds = max(parts.items(), key=lambda item: item[1])
        share = self.step.compute / self.step.seconds
        zero = self.plan.recipe.layout.zero
        unknown = ""
        if zero is not None and (zero.offload_optimizer, zero.offload_param) != ("none", "none"):
            unknown = "; not counted: copies to and from main memory, and updates there"
        if seconds < 0.03 * self.step.seconds:
            return f"compute: kernels take {share:.0%} of a step; communication and bubbles less than 3% each{unknown}"
        return f"kernels take {share:.0%} of a step, {name} {seconds / self.step.seconds:.0%}{unknown}"

    @property
    def problems(self) -> list[str]:
        """Why it does not fit, and what may go wrong although it does."""
        plan = self.plan
        if not all(stage.fits for stage in self.plans):
            need = plan.memory.total / GIB
            have = plan.memory_capacity_bytes / GIB
            return [f"does not fit: a rank needs {need:.1f} GiB of {have:.1f} GiB"]
        saving = self.saving
        if saving is None or saving.interval >= saving.write:
            return list(plan.warnings)
        late = (
            f"writing a checkpoint takes {duration(saving.write)} at the profile's storage_gb_per_s, longer than the "
            f"{duration(saving.interval)} of checkpoint.save_interval {plan.recipe.checkpoint.save_interval}: training "
            "waits for it"
        )
        return [*plan.warnings, late]

    def record(self) -> dict[str, Any]:
        """What a run keeps of it, to be compared with what it measures.

        On a GPU that is what torch allocates: without CUDA's context and NCCL's buffers, which are in `workspace`.
        """
        memory = self.plan.memory
        unseen = memory.workspace if self.plan.device == "cuda" else 0
        return {
            "device": self.device.name,
            "step_seconds": self.step.seconds,
            "compute_seconds": self.step.seconds - self.step.communication,
            "communication_seconds": self.step.communication,
            "memory_bytes": memory.total - unseen,
            "calibration": None if self.calibration is None else self.calibration.model_dump(mode="json"),
            **({"stages": [stage.record() for stage in self.stages]} if self.stages else {}),
        }

    def as_dict(self) -> dict[str, Any]:
        """Output of `plan --json`."""
        plan = self.plan
        speed = self.tokens_per_second_per_gpu
        zero = self.plan.recipe.layout.zero
        layout = plan.layout
        peak = self.device.peak_of(plan.recipe.train.precision)
        offload = None if zero is None else zero.offload_optimizer
        full = speed * plan.flops_per_token_full
        causal = speed * plan.flops_per_token_causal
        return {
            "recipe": plan.recipe.name,
            "cluster": plan.cluster.name or None,
            "world_size": layout.world_size,
            "parallelism": {
                "tensor": layout.tensor_model_parallel_size,
                "pipeline": layout.pipeline_model_parallel_size,
                "virtual_pipeline": layout.virtual_pipeline_model_parallel_size,
                "pipeline_layout": plan.recipe.layout.pipeline_model_parallel_layout,
                "context": layout.context_parallel_size,
                "expert": layout.expert_model_parallel_size,
                "expert_tensor": layout.expert_tensor_parallel_size,
                "data": layout.data_parallel_size,
                "distributed_optimizer": plan.recipe.layout.use_distributed_optimizer,
                "zero_stage": None if zero is None else zero.stage,
                "offload_optimizer": None if offload == "none" else offload,
                "micro_batch_size": plan.recipe.layout.micro_batch_size,
                "recompute_granularity": plan.recompute_granularity,
                "recompute_modules": ", ".join(plan.recompute_modules) or None,
                "recompute_num_layers": plan.recipe.layout.recompute_num_layers,
            },
            "num_parameters": plan.num_parameters.total,
            "num_active_parameters": plan.num_parameters.active,
            "memory_gib": {"max": plan.memory.total / GIB, "stages": [_parts(stage) for stage in self.memory]},
            "fits": all(stage.fits for stage in self.plans),
            "tokens_per_second_per_gpu": speed,
            "tflops_per_gpu_full": full / 1e12,
            "tflops_per_gpu_causal": causal / 1e12,
            "mfu_full": full / peak,
            "mfu_causal": causal / peak,
            "step_seconds": self.step.seconds,
            "step_parts": self.step.parts(),
            "error": ERROR,
            "tokens_per_second_per_gpu_range": self.speed_range,
            "fitted": not self.device.alike,
            "calibration": None if self.calibration is None else self.calibration.model_dump(mode="json"),
            "days": self.seconds / _SECONDS_OF_A_DAY,
            **as_dict(self.saving, self.step.seconds, self.seconds),
            "gpu_hours": self.gpu_hours,
            "cost_usd": self.cost_usd,
            "energy_mwh": self.energy_mwh,
            "co2_t": self.co2_t,
            "limit": self.limit,
            "problems": self.problems,
            "chosen": self.chosen,
            **({"stages": [_of_stage(stage) for stage in self.stages]} if self.stages else {}),
        }


def _of_stage(stage: Forecast) -> dict[str, Any]:
    """A stage of a run, in short."""
    return {
        **{name: stage_facts(stage.plan)[name] for name in ("name", "layout")},
        "step_seconds": stage.step.seconds,
        "tokens_per_second_per_gpu": stage.tokens_per_second_per_gpu,
        "days": stage.seconds / _SECONDS_OF_A_DAY,
    }


def _parts(memory: Memory) -> dict[str, float]:
    shown = {name: getattr(memory, name) for name in ("weights", "gradients", "optimizer", "activations")}
    parts = {**shown, "other": memory.total - sum(shown.values()), "total": memory.total}
    return {name: size / GIB for name, size in parts.items()}


def gpu(plan: Plan, profile: Profile | None) -> Device:
    """The GPU of a plan, with the links of its profile.

    Raises:
        SpeedUnknownError: the machine has no GPU, or one without coefficients.
    """
    if not plan.cluster.gpus:
        if profile is None or profile.rates is None:
            raise SpeedUnknownError(
                "no GPU, and no measured rates of the processors",
                where="--cluster",
                rule="the time model needs coefficients of the machine",
                fix="--cluster NAME; bench machine --write FILE measures this machine; plan --details needs no speed",
            )
        processors = _processors(profile, profile.rates, -(-plan.layout.world_size // plan.cluster.nodes))
        return processors if profile.calibration is None else _calibrated(processors, profile.calibration)
    known = device(plan.cluster.gpus[0].name)
    near = plan.cluster.gpus_per_domain
    if profile is None:
        return replace(known, gpus_per_node=near)
    linked = replace(
        known,
        alike=() if profile.calibration is not None else known.alike,
        gpus_per_node=near,
        nvlink=profile.intra_node.gb_per_s * 1e9,
        nic=profile.inter_node.gb_per_s * 1e9,
    )
    return linked if profile.calibration is None else _calibrated(linked, profile.calibration)


def _processors(profile: Profile, rates: Rates, ranks: int) -> Device:
    """One rank's share of a node without GPUs, from the rates that `bench machine` measured on it.

    Args:
        ranks: on the node, which share its cores: a core each, or several threads where there are fewer ranks.
    """
    cores = max(1, profile.cpu_cores)
    threads = max(1, cores // ranks)
    gain = 1.0 if cores == 1 else 1 + (threads - 1) * (rates.gflops_all / rates.gflops - 1) / (cores - 1)
    # More ranks than cores take turns.
    share = gain * min(1.0, cores / ranks)
    flops = rates.gflops * 1e9 * share
    length = _REFERENCE_LENGTH / (_REFERENCE_LENGTH + 256)
    attention = rates.attention_gflops / rates.gflops / ((_REFERENCE_KEYS / 128) ** 0.3 * length)
    turns = max(1.0, ranks / cores)
    return Device(
        name=profile.name,
        multiprocessors=1,
        memory_bytes=profile.memory_gib * GIB,
        peak={"fp32": flops, "bf16": flops, "fp8": flops},
        bandwidth=rates.memory_gb_per_s * 1e9 * share,
        nvlink=profile.intra_node.gb_per_s * 1e9,
        nic=profile.inter_node.gb_per_s * 1e9,
        gpus_per_node=ranks,
        gemm=1.0,
        gemm_fp8=1.0,
        gemm_depth=rates.depth,
        attention=attention,
        memory=1.0,
        launch=rates.launch_us * 1e-6 * turns,
        links=1.0,
        hop_near=rates.latency_us * 1e-6 * turns,
        hop_far=rates.latency_us * 1e-6 * turns,
        queue=False,
    )


def _calibrated(device: Device, by: Calibration) -> Device:
    """With shares of the peaks, and latencies, that measured runs have; the peaks of MFU stay."""
    slower, farther = by.compute, by.communication
    return replace(
        device,
        gemm=device.gemm / slower,
        gemm_fp8=device.gemm_fp8 / slower,
        attention=device.attention / slower,
        memory=device.memory / slower,
        launch=device.launch * slower,
        links=device.links / farther,
        hop_near=device.hop_near * farther,
        hop_far=device.hop_far * farther,
    )


def device_of(profile: Profile) -> Device:
    """What a profile's machine has: a GPU, or processors with one rank.

    Raises:
        UserError: nothing is known of it.
    """
    if profile.gpu is not None:
        return device(profile.gpu.name)
    if profile.rates is not None:
        return _processors(profile, profile.rates, 1)
    raise UserError(
        f"{profile.name} has neither a GPU nor measured rates",
        where="--cluster",
        rule="predictions need one of the two",
        fix="bench machine --write FILE",
    )


def software(plan: Plan, device: Device) -> Stack:
    """What megatron-core overlaps and splits, by the recipe's switches; its kernels' factors on the device."""
    if plan.device == "cpu":
        return _local_layers(plan.recipe)
    parallel = plan.recipe.layout
    zero = plan.recipe.layout.zero
    sharded = zero is not None and zero.stage >= 3
    by_deepspeed = zero is not None and engine_name(plan.recipe) == DEEPSPEED
    overlapped = zero.overlap_comm if zero is not None and by_deepspeed else parallel.overlap_grad_reduce
    megatron = kernels_on(device, stack("megatron"))
    return replace(
        megatron,
        overlap_tensor=megatron.overlap_tensor if plan.recipe.layout.tp_comm_overlap else 0.0,
        overlap_expert=stack_of("moe-zoo").overlap_expert
        if plan.recipe.layout.overlap_moe_expert_parallel_comm
        else 0.0,
        overlap_gradients=megatron.overlap_gradients if overlapped or sharded else 0.0,
        sequence_parallel=parallel.sequence_parallel,
        sharded=sharded,
        zero=2 if zero is not None and zero.stage == 2 else 1 if parallel.use_distributed_optimizer else 0,
        gradient_bytes=4 if plan.recipe.train.grad_reduce_in_fp32 else 2,
    )


def _local_layers(recipe: Recipe) -> Stack:
    """What the layers without TransformerEngine do on a CPU: unfused norms and activations, nothing overlaps."""
    parallel, zero = recipe.layout, recipe.layout.zero
    return Stack(
        name="local layers",
        attention=1.0,
        gemm=1.0,
        passes=1.6,
        host=1.5,
        loss_bytes=24.0,
        overlap_gradients=0.0,
        sequence_parallel=parallel.sequence_parallel,
        sharded=zero is not None and zero.stage >= 3,
        zero=1 if parallel.use_distributed_optimizer or zero is not None else 0,
        gradient_bytes=4,
    )


def _recomputed(plan: Plan) -> float:
    """Share of its layers that the stage with the most recomputes whole."""
    stages = plan.layout.layers_per_stage
    return max(sum(recomputed_layers(plan.recipe, chunk) for chunk in stage) / max(1, sum(stage)) for stage in stages)


def work(plan: Plan) -> Work:
    """The shapes of a plan."""
    s = plan.shape
    layout = plan.layout
    model = plan.recipe.model
    train = plan.recipe.train
    latent = (0, 0, 0, 0, 0)
    if model.multi_latent_attention:
        rotated = model.qk_pos_emb_head_dim
        latent = (model.q_lora_rank or 0, model.kv_lora_rank, s.query_channels - rotated, rotated, s.value_channels)
    return Work(
        layers=s.num_layers,
        hidden=s.hidden_size,
        ffn=s.ffn_hidden_size,
        heads=s.num_attention_heads,
        kv_heads=s.num_query_groups,
        vocab=s.vocab_size,
        seq=s.seq_length,
        gpus=layout.world_size,
        tp=layout.tensor_model_parallel_size,
        pp=layout.pipeline_model_parallel_size,
        cp=layout.context_parallel_size,
        dp=layout.data_parallel_size,
        mbs=plan.recipe.layout.micro_batch_size,
        gbs=train.global_batch_size,
        head_dim=s.query_channels,
        gated=model.gated_linear_unit,
        tied=model.share_embeddings_and_output_weights,
        experts=s.num_moe_experts,
        topk=model.moe_router_topk if s.num_moe_experts else 0,
        moe_ffn=s.moe_ffn_hidden_size,
        shared_ffn=s.moe_shared_ffn_hidden_size,
        dense_layers=s.num_layers - s.moe_layers(0, s.num_layers) if s.num_moe_experts else 0,
        latent=latent,
        keys=s.keys_seen(causal=True) / (s.num_layers + s.mtp_num_layers),
        mtp=s.mtp_num_layers,
        vpp=layout.virtual_pipeline_model_parallel_size,
        ep=layout.expert_model_parallel_size,
        etp=layout.expert_tensor_parallel_size if s.num_moe_experts else 1,
        precision="fp8" if plan.recipe.train.fp8 else train.precision if train.precision == "fp32" else "bf16",
        bf16_layers=sum(bf16_layers(plan.recipe)),
        recomputed=_recomputed(plan),
        recomputed_modules=plan.recompute_modules,
        stage_layers=layout.layers_per_stage,
    )


def _orthogonalizing(plan: Plan, accelerator: Device, stage: int) -> float:
    """Seconds that an update of one stage with Muon takes longer than one with AdamW: its products, in TF32 (`high`),
    which CPUs lack, twice as long as in bf16; what it reads and writes besides; and what tensor-parallel ranks send."""
    recipe, layout = plan.recipe, plan.layout
    if recipe.optimizer.optimizer != "muon":
        return 0.0
    which = recipe, plan.shape, layout, plan.device, stage
    precision = recipe.optimizer.muon_fp32_matmul_prec
    tf32 = precision == "high" and plan.device == "cuda"
    kind, longer = ("bf16", 2) if tf32 else ("bf16" if precision == "medium" else "fp32", 1)
    seconds = longer * sum(times * product(accelerator, m, n, k, kind) for m, n, k, times in products(*which))
    elements, moved = elements_and_bytes(*which)
    seconds += (moved - ADAMW_BYTES * elements) / (accelerator.bandwidth * accelerator.memory)
    links = linked(accelerator, software(plan, accelerator))
    local = (plan.shape.num_moe_experts or 0) // layout.expert_model_parallel_size
    for matrix, ranks, collective, size in collectives(*which):
        one = (gather if collective == "all-gather" else reduce)(links, size, ranks, links.gpus_per_node)
        seconds += one * (local if matrix.of_experts else 1)
    return seconds


_ROUNDED_BYTES = 48
"""Bytes that are read and written to round a weight of 16 bits: 4 for the largest value of its group, 6 to convert it,
8 each to divide, round, bound and multiply it, and 6 to store it."""


def forecast(plan: Plan, profile: Profile | None) -> Forecast:
    """Speed, memory by pipeline stage, and cost of a plan.

    Args:
        profile: for links and prices; None: those of the GPU's data file, and no cost.

    Raises:
        UserError: as `gpu`.
    """
    accelerator = gpu(plan, profile)
    step = _step(plan, accelerator)
    others = [accelerator.with_shares(name) for name in accelerator.alike]
    times = [1.0, *(_step(plan, other).seconds / step.seconds for other in others)]
    if has_teacher(plan.recipe):
        step = replace(step, teacher=forward_seconds(_step(teacher_plan(plan), accelerator), plan.num_microbatches))
    if has_reference(plan.recipe):
        step = replace(step, teacher=forward_seconds(_step(reference_plan(plan), accelerator), plan.num_microbatches))
    step = with_attack(step, passes(plan.recipe.train))
    stages = range(plan.layout.pipeline_model_parallel_size)
    if plan.recipe.qat is not None:
        weights = max(count_rounded_on_rank(plan.recipe, plan.shape, plan.layout, stage) for stage in stages)
        rate = accelerator.bandwidth * accelerator.memory
        step = replace(step, rounding=weights * _ROUNDED_BYTES / rate)
    step = replace(step, optimizer=step.optimizer + max(_orthogonalizing(plan, accelerator, each) for each in stages))
    memory = tuple(
        of_stage(plan.recipe, plan.shape, plan.layout, plan.num_microbatches, stage, plan.device) for stage in stages
    )
    spent = _spent(step.seconds * plan.full_steps * plan.layout.world_size / 3600, profile)
    saves = None if profile is None else saving(plan, profile, step.seconds)
    known = None if profile is None else profile.calibration
    return Forecast(plan, step, accelerator, memory, *spent, saves, known, slower=max(times), faster=min(times))


def _step(plan: Plan, accelerator: Device) -> StepTime:
    return predict(accelerator, software(plan, accelerator), work(plan))


def forecast_run(run: RunPlan, profile: Profile | None) -> Forecast:
    """Forecast a run: time and cost of all stages, the rest of the largest; arguments and errors as of `forecast`."""
    stages = tuple(forecast(plan, profile) for plan in run.stages)
    largest = stages[run.stages.index(run.largest)]
    of_run = replace(largest, stages=stages if run.recipe.stages else ())
    usd, energy, carbon = _spent(of_run.gpu_hours, profile)
    return replace(of_run, cost_usd=usd, energy_mwh=energy, co2_t=carbon)


def _spent(hours: float, profile: Profile | None) -> tuple[float | None, float | None, float | None]:
    """US dollars, MWh and tonnes of CO2 of GPU-hours, as far as the profile knows them."""
    if profile is None or (costs := profile.costs) is None:
        return None, None, None
    usd = None if costs.usd_per_gpu_hour is None else hours * costs.usd_per_gpu_hour
    energy = None if costs.watts_per_gpu is None else hours * costs.watts_per_gpu * costs.pue / 1e6
    carbon = None if energy is None or costs.kg_co2_per_kwh is None else energy * costs.kg_co2_per_kwh
    return usd, energy, carbon
