"""(recipe, number of ranks, machine) to a plan: every number of the run, derived once and shown to the user."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.kernels import emulated_bf16, idle_modules, modules, own_layers, recompute_granularity
from llmrecipes.plan.layout import Layout, layout
from llmrecipes.plan.losses import logits
from llmrecipes.plan.machine_features import expected
from llmrecipes.plan.memory import HostMemory, Memory, checkpoint_bytes, differing_stages, estimate, of_stage
from llmrecipes.plan.parameters import (
    Parameters,
    count,
    count_adapters,
    count_adapters_on_rank,
    count_frozen,
    count_on_rank,
    flops_per_token,
)
from llmrecipes.plan.sharding import check_zeropp
from llmrecipes.plan.trained import require_trained
from llmrecipes.recipe.derived.batch_schedule import BatchSchedule, batch_schedule, common, tokens_of, varies
from llmrecipes.recipe.derived.degrees import elastic_worlds, least_ranks, model_parallel_size, multiples
from llmrecipes.recipe.derived.shape import Shape, shape
from llmrecipes.recipe.derived.stage_runs import stage_recipes
from llmrecipes.recipe.derived.stages import Span, decay_iters, run_recipe, span_of
from llmrecipes.recipe.rules.batch_rules import require_divisible
from llmrecipes.recipe.rules.distill_rules import has_teacher, teacher_model
from llmrecipes.recipe.rules.extra_rules import not_verified
from llmrecipes.recipe.rules.optimizer_rules import require_fused_adam
from llmrecipes.recipe.rules.preference_rules import has_reference
from llmrecipes.recipe.rules.recipe_rules import obstacle_to_chunks
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.adversarial import passes
from llmrecipes.recipe.speedups import recompute
from llmrecipes.recipe.speedups.features import FeatureChoice, SpeedTarget, require, resolve, value
from llmrecipes.units import GIB, MIB

MOST_LOGITS, LOGITS_OF_CHUNK = 1 / 16, 1 / 64
"""Shares of a GPU's memory: with more logits than the first the loss is computed in chunks, whose logits in fp32 take
at most the second."""
MOST_CPU_LOGITS, CPU_LOGITS_OF_CHUNK = 256 * MIB, 64 * MIB
"""The same on a CPU, in bytes: its memory is shared, and chunks take no longer (benchmarks/RESULTS.md)."""

LEAST_HEADROOM = 0.05
"""Share of a rank's memory that should stay free, because the need is an estimate and allocators fragment."""


# Derived sizes of a model's unset keys, by key.
_SHAPE = ("ffn_hidden_size", "num_query_groups", "kv_channels", "max_position_embeddings")


@dataclass(frozen=True)
class Plan:
    """The layout of a recipe on a machine's ranks, and every number derived from it; of a run or of one of its stages.

    `batches` has the global batch of each step; if it grows, `num_microbatches` and `tokens_per_step` are of the last
    one. `tokens_per_step` and `total_tokens` count training tokens; FLOPs are per token, forward and backward, without
    recomputation (`full`: all attention positions, `causal`: half of them). `num_parameters_on_rank` and `memory` are
    those of the rank with the most. `memory_capacity_bytes` is available to one rank: its GPU's free memory, or an
    equal share of the machine's available memory. `fits` compares it with `memory.total`, and `memory_headroom` is the
    share of it that stays free, negative if the run does not fit. `host` is kept in the main memory of a node with
    GPUs, of which `host_capacity_bytes` are available. `checkpoint_bytes` is the size of one checkpoint.
    With adapters the parameters of the model are frozen; `num_adapter_parameters`, otherwise 0, are trained and saved.
    `recipe` has what is recomputed where the user's has `recompute_granularity: auto`, and `recompute_auto` says so; it
    has the size of the chunks of the loss where the user's has none and they are necessary.
    """

    recipe: Recipe
    recompute_auto: bool
    shape: Shape
    layout: Layout
    cluster: Cluster
    device: str
    batches: BatchSchedule
    num_microbatches: int
    tokens_per_step: int
    total_tokens: int
    num_parameters: Parameters
    num_adapter_parameters: int
    num_parameters_on_rank: int
    flops_per_token_full: float
    flops_per_token_causal: float
    memory: Memory
    memory_capacity_bytes: int
    host: HostMemory
    host_capacity_bytes: int
    checkpoint_bytes: int

    @property
    def span(self) -> Span | None:
        """Where the stage is in its run; None: the run has no stages."""
        return span_of(self.recipe)

    @property
    def run_recipe(self) -> Recipe:
        """The recipe of the run; of one with stages without what was derived for a stage."""
        return run_recipe(self.recipe)

    def facts(self) -> dict[str, Any]:
        """See `RunPlan.facts`."""
        return {
            "device": self.device,
            **self.layout.as_dict(),
            "layers_per_stage": [list(layers) for layers in self.layout.layers_per_stage],
            "num_microbatches": self.num_microbatches,
            "tokens_per_step": self.tokens_per_step,
            "total_tokens": self.total_tokens,
            "num_parameters": self.num_parameters.total,
            "recompute_granularity": self.recompute_granularity,
            "recompute_modules": list(self.recompute_modules),
            "loss_chunk_tokens": self.loss_chunk_tokens,
        }

    def num_microbatches_of(self, steps: int) -> int:
        """Micro-batches of one data-parallel rank in the step that follows this many steps."""
        return self.batches.of_step(steps) // (self.recipe.layout.micro_batch_size * self.layout.data_parallel_size)

    @property
    def full_steps(self) -> float:
        """Steps of `global_batch_size` with as many tokens."""
        return self.total_tokens / self.tokens_per_step

    @property
    def loss_chunk_tokens(self) -> int:
        """Tokens of which the loss is computed at a time; 0: all of a micro-batch."""
        return self.recipe.layout.loss_chunk_tokens or 0

    @property
    def fits(self) -> bool:
        """Whether a rank's memory, and a node's main memory, hold what the ranks keep there."""
        return self.memory.total <= self.memory_capacity_bytes and self.host.total <= self.host_capacity_bytes

    @property
    def lr_decay_iters(self) -> int:
        return decay_iters(self.recipe)

    @property
    def recompute_granularity(self) -> str | None:
        """What is recomputed in the backward pass: `full`, `selective` where that saves memory, or nothing."""
        return recompute_granularity(self.recipe, self.shape, self.device)

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        """Modules that `selective` recomputes: those of the recipe that have an effect on this device."""
        return modules(self.recipe, self.shape, self.device)

    @property
    def features(self) -> tuple[FeatureChoice, ...]:
        """Features of `speed` that the run is expected to have, and why."""
        return resolve(self.recipe, self.target)

    @property
    def target(self) -> SpeedTarget:
        """The machine that `features` expects."""
        return expected(self.recipe, self.device, self.layout, self.cluster)

    @property
    def memory_headroom(self) -> float:
        return 1 - self.memory.total / max(self.memory_capacity_bytes, 1)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Likely problems although it fits, one sentence each."""
        return (
            *self._no_headroom(),
            *idle_modules(self.recipe, self.recompute_modules),
            *self._not_in_the_image(),
            *emulated_bf16(self.recipe, self.cluster),
            *not_verified(self.recipe),
        )

    def _not_in_the_image(self) -> tuple[str, ...]:
        if not value(self.features, "moe_flex_dispatcher_backend"):
            return ()
        return (
            "model.moe_token_dispatcher_type flex needs the package deep_ep in the run's image, which "
            "docker/Dockerfile.cuda does not install; a rank without it does not start",
        )

    def _no_headroom(self) -> tuple[str, ...]:
        if not self.fits or self.memory_headroom >= LEAST_HEADROOM:
            return ()
        needed = self.memory.total / GIB
        capacity = self.memory_capacity_bytes / GIB
        return (
            f"memory headroom is {self.memory_headroom:.1%}: a rank needs an estimated {needed:.1f} of "
            f"{capacity:.1f} GiB; "
            f"below {LEAST_HEADROOM:.0%}, a run may run out of memory "
            "(smaller layout.micro_batch_size, more recomputation, or more ranks)",
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for plan.json and `show --json`, with names that stay compatible with older runs."""
        held = {"recipe", "shape", "layout", "cluster", "device", "batches", "num_microbatches", "host"}
        held |= set() if self.num_adapter_parameters else {"num_adapter_parameters"}
        stretches = [asdict(stretch) for stretch in self.batches.stretches]
        return {
            "recipe": self.recipe.name,
            "device": self.device,
            "world_size": self.layout.world_size,
            "degrees": asdict(self.layout),
            "data_parallel_size": self.layout.data_parallel_size,
            "num_microbatches": self.num_microbatches,
            **({} if self.batches.is_constant else {"batches": stretches}),
            "padded_vocab_size": self.shape.vocab_size,
            **{name: getattr(self.shape, name) for name in _SHAPE},
            "lr_decay_iters": self.lr_decay_iters,
            "recompute_granularity": self.recompute_granularity,
            "recompute_modules": list(self.recompute_modules),
            "loss_chunk_tokens": self.loss_chunk_tokens,
            **{field_.name: getattr(self, field_.name) for field_ in fields(self) if field_.name not in held},
            "num_parameters": asdict(self.num_parameters),
            "speed": [choice.as_dict() for choice in self.features],
            "memory": self.memory.as_dict(),
            "host_memory_bytes": self.host.total,
            "host_memory": asdict(self.host),
            "memory_headroom": round(self.memory_headroom, 4),
            "fits": self.fits,
            "warnings": list(self.warnings),
        }


def default_world_size(recipe: Recipe, cluster: Cluster) -> int:
    """Number of ranks if the user gives none.

    On GPUs as many of the machine's as layout and batch divide over; on a CPU the fewest that the layout needs (one
    for a recipe without one), and twice as many where gradients are sharded: with one replica nothing would be. Where
    `train.elastic` is set, of the numbers that it allows.
    """
    if recipe.train.elastic is not None:
        worlds = elastic_worlds(recipe)
        return max((ranks for ranks in worlds if ranks <= len(cluster.gpus)), default=worlds[0])
    least = least_ranks(recipe)
    shards = recipe.layout.zero is not None and recipe.layout.zero.stage >= 2
    most = len(cluster.gpus) // least * least if cluster.gpus else least * (1 + shards)
    shared = [
        (common(stage) // stage.layout.micro_batch_size, model_parallel_size(stage.layout))
        for stage in stage_recipes(recipe)
    ]
    divided = (n for n in range(most, least, -least) if all(batch % (n // dense) == 0 for batch, dense in shared))
    return next(divided, least)


def derive(recipe: Recipe, world_size: int, cluster: Cluster) -> Plan:
    """Derive the plan of a recipe without stages, which that of a stage is; see `derive_run` for others.

    Raises:
        UserError: the layout does not fit the ranks or the machine, or the global batch does not divide over them.
    """
    if recipe.stages:
        raise ValueError(f"{recipe.name} has a plan for each of its stages")
    laid_out = layout(recipe, world_size, cluster)
    check_zeropp(recipe, world_size, cluster)
    require(resolve(recipe, expected(recipe, cluster.device, laid_out, cluster)))
    require_fused_adam(recipe, cluster.device)
    micro_batches = num_microbatches(recipe, laid_out)
    sizes = shape(recipe.model)
    recipe = with_chunks(recipe, sizes, laid_out, gpu_memory(cluster, world_size) if cluster.gpus else None)
    automatic = recipe.layout.recompute_granularity == "auto"
    if automatic:
        recipe = _least_recomputation(recipe, sizes, laid_out, micro_batches, cluster)
    parameters = count(recipe.model, sizes)
    added, _ = count_adapters(recipe.lora, recipe.model, sizes)
    frozen, _ = count_frozen(recipe)
    require_trained(recipe, sizes, laid_out, cluster.device)
    memory = estimate(recipe, sizes, laid_out, micro_batches, cluster.device)
    tokens_per_step = recipe.train.global_batch_size * recipe.model.seq_length
    batches = batch_schedule(recipe)
    saved = checkpoint_bytes(recipe, sizes, added or parameters.total, frozen)
    on_node = min(world_size, len(cluster.gpus) // cluster.nodes)
    return Plan(
        recipe=recipe,
        recompute_auto=automatic,
        shape=sizes,
        layout=laid_out,
        cluster=cluster,
        device=cluster.device,
        batches=batches,
        num_microbatches=micro_batches,
        tokens_per_step=tokens_per_step,
        total_tokens=tokens_of(recipe),
        num_parameters=parameters,
        num_adapter_parameters=added,
        num_parameters_on_rank=max(
            _on_rank(recipe, sizes, laid_out, stage, cluster.device)
            for stage in differing_stages(recipe, sizes, laid_out)
        ),
        flops_per_token_full=_flops(recipe, sizes, causal=False),
        flops_per_token_causal=_flops(recipe, sizes, causal=True),
        memory=memory,
        memory_capacity_bytes=capacity(cluster, world_size),
        host=HostMemory.of(recipe, memory, saved, world_size, on_node),
        host_capacity_bytes=cluster.memory_available_bytes // cluster.nodes,
        checkpoint_bytes=saved,
    )


def with_chunks(recipe: Recipe, s: Shape, laid_out: Layout, memory: int | None) -> Recipe:
    """The recipe with the chunks of its loss, if their size is left to the plan and the logits take too much.

    Not where they are fewer bytes than the output weight's gradient in fp32, which chunks keep instead. A z-loss is
    computed by the loss in chunks only, of which one may have all tokens.

    Args:
        memory: bytes of a GPU, free or not; None: on a CPU.
    """
    device = "cpu"
    most = MOST_CPU_LOGITS
    of_chunk = CPU_LOGITS_OF_CHUNK
    if memory is not None:
        device = "cuda"
        most = int(MOST_LOGITS * memory)
        of_chunk = int(LOGITS_OF_CHUNK * memory)
    if recipe.layout.loss_chunk_tokens is not None or obstacle_to_chunks(recipe):
        return recipe
    whole = logits(recipe, s, laid_out, device)
    if whole <= most and not recipe.train.z_loss_coeff:
        return recipe
    tokens = of_chunk / (4 * s.vocab_size / laid_out.tensor_model_parallel_size)
    chunk = 1 << max(int(tokens).bit_length() - 1, 6)
    in_chunks = recipe.with_layout(loss_chunk_tokens=chunk)
    return in_chunks if recipe.train.z_loss_coeff or logits(in_chunks, s, laid_out, device) < whole else recipe


def least_recomputation_of_first_stage(recipe: Recipe, laid_out: Layout, cluster: Cluster) -> Recipe:
    """The recipe with what `auto` recomputes at least: what the first stage needs. Quicker than a plan of all stages.

    Raises:
        UserError: the global batch does not divide over the ranks.
    """
    sizes = shape(recipe.model)
    memory = gpu_memory(cluster, laid_out.world_size) if cluster.gpus else None
    in_chunks = with_chunks(recipe, sizes, laid_out, memory)
    number = num_microbatches(recipe, laid_out)
    least = _least_recomputation(in_chunks, sizes, laid_out, number, cluster, first_only=True)
    return least.with_layout(loss_chunk_tokens=recipe.layout.loss_chunk_tokens)


def _least_recomputation(
    recipe: Recipe, s: Shape, laid_out: Layout, micro_batches: int, cluster: Cluster, *, first_only: bool = False
) -> Recipe:
    """The recipe with the first of `_recomputations` that leaves `LEAST_HEADROOM`; else with all layers.

    By all of a GPU's memory, which all ranks see alike, not by what is free now.

    Args:
        first_only: on the first pipeline stage, which is usually the fullest, not on all.
    """
    most = (gpu_memory if cluster.gpus else capacity)(cluster, laid_out.world_size)

    def fits(tried: Recipe) -> bool:
        stages = (0,) if first_only else differing_stages(tried, s, laid_out)
        needed = (of_stage(tried, s, laid_out, micro_batches, stage, cluster.device).total for stage in stages)
        return all(bytes_needed <= most * (1 - LEAST_HEADROOM) for bytes_needed in needed)

    some, blocks, whole = _recomputations(recipe, s, laid_out, cluster.device)
    for tried in some:
        if fits(tried):
            return tried
    if not blocks or not fits(blocks[-1]):
        return whole
    return blocks[bisect_left(blocks, True, key=fits)]


def most_recomputation(recipe: Recipe) -> Recipe:
    """The recipe with the last choice of `auto`; any other as it is."""
    if recipe.layout.recompute_granularity != "auto":
        return recipe
    if recipe.layout.overlap_moe_expert_parallel_comm:  # its schedule runs the parts of a layer one by one
        names = recompute.possible(recipe)
        return _recomputing(recipe, "selective", modules=tuple(n for n in names if n not in ("moe_act", "mlp")))
    if recipe.layout.cuda_graph_impl is not None:  # a recorded layer is not recomputed as a whole
        parts = tuple(name for name in recompute.possible(recipe) if name != "moe_act")
        return _recomputing(recipe, "selective", modules=parts) if parts else _recomputing(recipe)
    return _recomputing(recipe, "full", method="uniform", num_layers=1)


def _recomputing(recipe: Recipe, granularity: str | None = None, **keys: object) -> Recipe:
    return recipe.with_layout(**recompute.recomputation(granularity, **keys))


def _recomputations(
    recipe: Recipe, s: Shape, laid_out: Layout, device: str
) -> tuple[list[Recipe], list[Recipe], Recipe]:
    """The recipe with nothing and some modules recomputed, the first layers of each chunk, and all layers.

    The least work first: norms cost some traffic of memory, latent attention's projections are products. Dense MLPs
    only where megatron-core recomputes all layers or none. All of a layer's experts would dispatch their tokens again,
    and are left out; so is their activation, which no dry run can have, because only TransformerEngine recomputes it.
    """
    possible = [
        name
        for name in recompute.possible(recipe)
        if modules(_recomputing(recipe, "selective", modules=(name,)), s, device)
    ]
    whole = most_recomputation(recipe)
    chunk = max(layers for stage in laid_out.layers_per_stage for layers in stage)
    blocks = [_recomputing(recipe, "full", method="block", num_layers=number) for number in range(1, chunk)]
    if whole.layout.recompute_granularity != "full":
        blocks = []
    some: list[tuple[str, ...]] = [()]
    chosen = {"core_attn"}
    for more in ({"layernorm"}, {"mla_up_proj"}, set() if blocks else {"mlp", "shared_experts"}):
        chosen |= more
        names = tuple(name for name in possible if name in chosen)
        if names != some[-1]:
            some.append(names)
    return (
        [_recomputing(recipe, "selective", modules=names) if names else _recomputing(recipe) for names in some],
        blocks,
        whole,
    )


def num_microbatches(recipe: Recipe, laid_out: Layout) -> int:
    """Micro-batches of one data-parallel rank in a step.

    Raises:
        UserError: the global batch does not divide over the ranks, or the micro-batches not over the stages of an
            interleaved pipeline.
    """
    micro = recipe.layout.micro_batch_size
    whole = recipe.train.global_batch_size
    ranks = laid_out.data_parallel_size
    stages = laid_out.pipeline_model_parallel_size
    together = micro * ranks
    if whole % together:
        sizes = [size for size in range(1, ranks) if whole % (micro * size) == 0]
        fewer = f", or {sizes[-1]} data-parallel ranks" if sizes else ""
        raise UserError(
            f"{whole} is not a multiple of micro_batch_size {micro} × data-parallel size {ranks} = {together}",
            where="train.global_batch_size",
            rule="global_batch_size must be a multiple of micro_batch_size × data-parallel size",
            fix=f"global_batch_size {multiples(whole, together)}{fewer}",
        )
    number = whole // together
    if varies(recipe):
        words = f"micro_batch_size {micro} × data-parallel size {ranks}"
        group = 1
        if laid_out.virtual_pipeline_model_parallel_size > 1:
            words = f"{words} × pipeline_model_parallel_size {stages}"
            group = stages
        require_divisible(recipe, together * group, words)
    if laid_out.virtual_pipeline_model_parallel_size > 1 and number % stages:
        raise UserError(
            f"{number} micro-batches are not a multiple of pipeline_model_parallel_size {stages}",
            where="train.global_batch_size",
            rule="the interleaved schedule of virtual stages needs a multiple of one micro-batch per stage",
            fix=f"global_batch_size {multiples(whole, together * stages)}, "
            "or remove virtual_pipeline_model_parallel_size",
        )
    return number


def _on_rank(recipe: Recipe, s: Shape, laid_out: Layout, stage: int, device: str) -> int:
    parameters = count_on_rank(recipe.model, s, laid_out, stage, device, local=own_layers(recipe, device)).total
    if recipe.lora is None:
        return parameters
    return parameters + count_adapters_on_rank(recipe.lora, recipe.model, s, laid_out, stage).total


def _flops(recipe: Recipe, s: Shape, *, causal: bool) -> float:
    """FLOPs of a token in all passes of a step, with the forward pass of a teacher or a reference."""
    _, frozen = count_frozen(recipe)
    own = passes(recipe.train) * (flops_per_token(recipe.model, s, causal=causal, lora=recipe.lora) - 2.0 * frozen)
    if has_reference(recipe):
        own += flops_per_token(recipe.model, s, causal=causal) / 3
    if not has_teacher(recipe):
        return own
    model = teacher_model(recipe)
    return own + flops_per_token(model, shape(model), causal=causal) / 3


def gpu_memory(cluster: Cluster, world_size: int) -> int:
    """All memory of a GPU, free or not: the same for all ranks, and in the next run."""
    return min(gpu.memory_bytes for gpu, _ in groupby(cluster.gpus[:world_size]))


def capacity(cluster: Cluster, world_size: int) -> int:
    """Bytes that a rank may use: of the GPU with the least free memory, or its share of the machine's."""
    if cluster.gpus:
        return min(gpu.memory_free_bytes for gpu, _ in groupby(cluster.gpus[:world_size]))
    return cluster.memory_available_bytes // world_size
