"""The fastest layouts of a recipe that fit, by the time model and the plan's memory."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import chain, count
from typing import Any, Self

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.hardware.profile import Profile
from llmrecipes.plan.derive import (
    LEAST_HEADROOM,
    Plan,
    capacity,
    derive,
    gpu_memory,
    least_recomputation_of_first_stage,
    most_recomputation,
    with_chunks,
)
from llmrecipes.plan.kernels import recomputed_layers
from llmrecipes.plan.layout import Layout, layout
from llmrecipes.plan.memory import model_states, of_stage
from llmrecipes.plan.speed.device import Device
from llmrecipes.plan.speed.forecast import Forecast, forecast, gpu, software, work
from llmrecipes.plan.speed.stage_cuts import stage_cuts
from llmrecipes.plan.speed.step import predict
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.engines import DEEPSPEED, engine_name
from llmrecipes.recipe.rules import recipe_rules, zero_rules
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.zero import Zero
from llmrecipes.recipe.speedups.recompute import ALL_LAYERS, recomputation

MOST_MICRO_BATCH = 8
MOST_OF_ONE_RANK = 64
"""Sequences of a micro-batch of a model that is not divided, which may be small."""
MOST_PIPELINE = 64
MOST_CONTEXT = 16
ZERO = "zero"
SHORTEST = 8192
"""Tokens of a sequence below which context parallelism is not tried: it would leave too few on a rank."""


@dataclass(frozen=True)
class Candidate:
    """A layout: the recipe with it, and what it takes."""

    recipe: Recipe
    forecast: Forecast

    @property
    def offloads(self) -> bool:
        """Whether it keeps optimizer state or parameters in main memory or on a disk."""
        zero = self.recipe.layout.zero
        return zero is not None and (zero.offload_optimizer, zero.offload_param) != ("none", "none")

    @property
    def key(self) -> str:
        """Its degrees in short."""
        parallel = self.recipe.layout
        degrees = {
            "TP": parallel.tensor_model_parallel_size,
            "PP": parallel.pipeline_model_parallel_size,
            "VPP": parallel.virtual_pipeline_model_parallel_size or 1,
            "CP": parallel.context_parallel_size,
            "EP": parallel.expert_model_parallel_size,
        }
        if self.recipe.model.num_moe_experts:
            degrees["ETP"] = self.forecast.plan.layout.expert_tensor_parallel_size
        words = [f"{name}{size}" for name, size in degrees.items() if size > 1]
        written = [parallel.pipeline_model_parallel_layout] if parallel.pipeline_model_parallel_layout else []
        batch = f"MBS{parallel.micro_batch_size}"
        return " ".join([*words, batch, *self._sharded(), *self._recomputed(), *written])

    def _sharded(self) -> list[str]:
        zero = self.recipe.layout.zero
        if zero is None:
            return [] if self.recipe.layout.use_distributed_optimizer else ["unsharded optimizer"]
        return [f"ZeRO {zero.stage}", *(["offload"] if self.offloads else [])]

    def _recomputed(self) -> list[str]:
        plan = self.forecast.plan
        if plan.recompute_granularity == "full":
            layers = max(chunk for stage in plan.layout.layers_per_stage for chunk in stage)
            return [f"recompute {recomputed_layers(plan.recipe, layers)}/{layers}"]
        return [f"recompute {'+'.join(plan.recompute_modules)}"] if plan.recompute_modules else []


def powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [1 << exponent for exponent in range(max(1, most).bit_length())]


def candidates(
    recipe: Recipe, ranks: int, near: int, *, offload: bool = False, kept: Collection[str] = ()
) -> Iterator[Recipe]:
    """Layouts with the recipe's global batch, not yet checked against rules or memory; `auto` changes none of them.

    Args:
        recipe: what to lay out.
        ranks: that all candidates use.
        near: GPUs of an NVLink domain, the most for tensor parallelism.
        offload: keep optimizer state in main memory, with ZeRO of a stage from 1 on.
        kept: see `fastest`.
    """
    for shards in [recipe] if ZERO in kept else _sharded(recipe, offload):
        yield from _degrees(shards, ranks, near, kept)


def _sharded(recipe: Recipe, offload: bool) -> Iterator[Recipe]:
    """The recipe with what its data-parallel ranks shard.

    All of the optimizer's state on every rank takes more memory and sends more bytes than its shards, so it is tried
    only where the recipe has it. So is stage 0.
    """
    zero, parallel = recipe.layout.zero, recipe.layout
    if zero is None:
        yield recipe
        if not parallel.use_distributed_optimizer:
            yield recipe.with_layout(use_distributed_optimizer=True)
        return
    for stage in sorted({1, 2, 3, zero.stage} - ({0} if offload else set())):
        yield with_zero(recipe, zero, stage, offload)


def with_zero(recipe: Recipe, zero: Zero, stage: int, offload: bool) -> Recipe:
    moved = "none" if not offload else "cpu" if zero.offload_optimizer == "none" else zero.offload_optimizer
    kept = {"offload_param": "none", "nvme_path": None} if not offload else {}
    changed = zero.model_copy(update={"stage": stage, "offload_optimizer": moved, **kept})
    sharded, _ = zero_rules.selected(recipe.with_layout(zero=changed), ())
    parallel: dict[str, Any] = {"use_distributed_optimizer": stage >= 1}
    if engine_name(sharded) == DEEPSPEED:
        parallel |= {"overlap_grad_reduce": False, "overlap_param_gather": False}
    return sharded.with_layout(**parallel)


def _degrees(recipe: Recipe, ranks: int, near: int, kept: Collection[str] = ()) -> Iterator[Recipe]:
    for candidate in _all_degrees(recipe, ranks, near, keep_recomputed="recompute_granularity" in kept):
        if all(getattr(candidate.layout, name) == getattr(recipe.layout, name) for name in kept if name != ZERO):
            yield candidate


def _all_degrees(recipe: Recipe, ranks: int, near: int, *, keep_recomputed: bool) -> Iterator[Recipe]:
    model = recipe.model
    recomputations = [{}] if keep_recomputed else [recomputation(), recomputation("auto")]
    batch = recipe.train.global_batch_size
    contexts = [c for c in powers(MOST_CONTEXT) if c == 1 or model.seq_length // c >= SHORTEST // 2]
    contexts = sorted({*contexts, recipe.layout.context_parallel_size})
    experts = [e for e in powers(model.num_moe_experts or 1) if (model.num_moe_experts or 1) % e == 0]
    stages = sorted({*powers(min(MOST_PIPELINE, model.num_layers)), recipe.layout.pipeline_model_parallel_size})
    if engine_name(recipe) == DEEPSPEED:  # which has neither
        contexts = stages = [1]
    cuts = {stage: list(stage_cuts(recipe, stage)) for stage in stages}
    for tensor in powers(near):
        # Without expert parallelism experts are split as the dense layers are.
        shares = [(e, inner) for e in experts for inner in (sorted({1, tensor}) if e > 1 else [None])]
        for stage in stages:
            for context in contexts:
                dense = tensor * stage * context
                if ranks % dense or batch % (ranks // dense):
                    continue
                for expert, inner in shares:
                    for cut in cuts[stage]:
                        degrees = {
                            "tensor_model_parallel_size": tensor,
                            "pipeline_model_parallel_size": stage,
                            "context_parallel_size": context,
                            "expert_model_parallel_size": expert,
                            "expert_tensor_parallel_size": inner,
                            "sequence_parallel": tensor > 1,
                            **cut,
                        }
                        most = MOST_OF_ONE_RANK if dense == 1 else MOST_MICRO_BATCH
                        for micro in sorted({*powers(most), recipe.layout.micro_batch_size}):
                            if (batch // (ranks // dense)) % micro:
                                continue
                            for recomputed in recomputations:
                                yield recipe.with_layout(name=None, **degrees, micro_batch_size=micro, **recomputed)


def fastest(
    recipe: Recipe,
    cluster: Cluster,
    ranks: int,
    profile: Profile | None,
    number: int,
    kept: Collection[str] = (),
    within: float = math.inf,
) -> list[Candidate]:
    """The fastest layouts that fit with `LEAST_HEADROOM`, best first; at most `number`.

    Offload by a recipe with `zero` is tried only where nothing fits without it: the time of its copies and of the
    update on the CPU is not known.

    Args:
        kept: names of keys of `layout` that all layouts have as the recipe has them.
        within: none after the first that takes longer than the fastest by this fraction.

    Raises:
        UserError: none does, with the least number of GPUs found for which one does; or the recipe has stages.
    """
    if recipe.stages:
        raise UserError(
            "a recipe with stages has no single step by which to compare layouts",
            where="--search",
            rule="--search compares layouts of a run without stages",
            fix="stages=[] with the model and train keys of the longest stage",
        )
    near = cluster.gpus_per_domain
    tried = candidates(recipe, ranks, near, kept=kept)
    results = _fitting(recipe, tried, cluster, ranks, profile, number, within)
    if not results and recipe.layout.zero is not None and ZERO not in kept:
        offloaded = candidates(recipe, ranks, near, offload=True, kept=kept)
        results = _fitting(recipe, offloaded, cluster, ranks, profile, number)
    if not results:
        if next(candidates(recipe, ranks, near), None) is None:
            raise UserError(
                f"no layout of {ranks} GPUs",
                where="--search",
                rule=f"the data-parallel size must divide global_batch_size {recipe.train.global_batch_size}",
                fix=_smallest(recipe, cluster, ranks, profile),
            )
        raise UserError(
            f"no layout of {ranks} GPUs fits",
            where="--search",
            rule="a rank's state and activations must fit on its GPU",
            fix=f"{_smallest(recipe, cluster, ranks, profile)}{_zero_hint(recipe, cluster, ranks, profile)}",
        )
    return results


def _zero_hint(recipe: Recipe, cluster: Cluster, ranks: int, profile: Profile | None) -> str:
    candidate = by_zero(recipe, cluster, ranks, profile)
    if candidate is None:
        return ""
    keys = " ".join(chain.from_iterable(changes(recipe, candidate.recipe).values()))
    unknown = " (offload time is unknown)" if candidate.offloads else ""
    return f"; or DeepSpeed on these GPUs: {keys}{unknown}"


def by_zero(
    recipe: Recipe, cluster: Cluster, ranks: int, profile: Profile | None, kept: Collection[str] = ()
) -> Candidate | None:
    """How a recipe without `zero` fits with it on the same GPUs, by DeepSpeed; None: it does not, or has `zero`."""
    if recipe.layout.zero is not None:
        return None
    for offload in (False, True):
        sharded = with_zero(recipe, Zero(stage=3, extra={}), 3, offload)
        degrees = _degrees(sharded, ranks, cluster.gpus_per_domain, kept)
        for candidate in _fitting(sharded, degrees, cluster, ranks, profile, 1):
            return candidate
    return None


def _fitting(
    recipe: Recipe,
    recipes: Iterable[Recipe],
    cluster: Cluster,
    ranks: int,
    profile: Profile | None,
    number: int,
    within: float = math.inf,
) -> list[Candidate]:
    fitting: list[Candidate] = []
    order = count()
    timed = _LeastTimes.of(recipe, cluster, ranks, profile)
    if timed is None:
        return fitting
    # By the least time that they may take, and as if they recomputed nothing; then by their time.
    queue: list[tuple[float, int, Recipe, Forecast | None]] = [
        (seconds, next(order), candidate, None) for seconds, candidate in timed.each(recipes)
    ]
    heapify(queue)
    bounded: set[int] = set()
    while queue and len(fitting) < number:
        seconds, place, candidate, prediction = heappop(queue)
        if prediction is None:
            if place not in bounded:
                if not _may_fit(candidate, cluster, ranks):
                    continue
                if candidate.layout.recompute_granularity == "auto":
                    # Most take longer than what is looked for by what their first stage alone has to recompute.
                    bounded.add(place)
                    heappush(queue, (max(seconds, timed.recomputing(candidate)), place, candidate, None))
                    continue
            plan = plan_of(candidate, cluster, ranks)
            if plan is None or not plan.fits or plan.memory_headroom < LEAST_HEADROOM:
                continue
            # What chooses by itself to recompute nothing is in the queue without a choice, too.
            if not plan.recompute_auto or plan.recompute_granularity:
                prediction = forecast(plan, profile)
                heappush(queue, (prediction.step.seconds, next(order), candidate, prediction))
            continue
        fitting.append(Candidate(candidate, prediction))
        if prediction.step.seconds > fitting[0].forecast.step.seconds * (1 + within):
            break
    return fitting


def nearest(plan: Plan, number: int) -> list[tuple[str, Forecast]]:
    """Changes with which a plan that does not fit would, on the same GPUs, fastest first; as overrides of its recipe.

    Of the layouts that `fastest` tries those with one change, else those with two, else all; each is planned and fits
    with `LEAST_HEADROOM`. The links are those of the GPU's data file.

    Raises:
        UserError: nothing is known of the GPU; or no layout fits, with the least number of nodes found.
    """
    recipe = plan.recipe
    cluster = plan.cluster
    ranks = plan.layout.world_size
    gpu(plan, None)
    offload = recipe.layout.zero is not None and recipe.layout.zero.offload_optimizer != "none"
    recipes = [
        _as_before(candidate, recipe)
        for candidate in candidates(recipe, ranks, cluster.gpus_per_domain, offload=offload)
    ]
    differences = [len(changes(recipe, candidate)) for candidate in recipes]
    for most in (1, 2):
        few = [candidate for candidate, changed in zip(recipes, differences, strict=True) if changed <= most]
        if results := _fitting(recipe, few, cluster, ranks, None, number):
            break
    else:
        results = fastest(recipe, cluster, ranks, None, number)
    return [
        (" ".join(chain.from_iterable(changes(recipe, candidate.recipe).values())), candidate.forecast)
        for candidate in results
    ]


_TOGETHER = {
    "sequence_parallel": "tensor_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "account_for_embedding_in_pipeline_split": "pipeline_model_parallel_size",
    "account_for_loss_in_pipeline_split": "pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage": "pipeline_model_parallel_size",
    "num_layers_in_last_pipeline_stage": "pipeline_model_parallel_size",
    "pipeline_model_parallel_layout": "pipeline_model_parallel_size",
    "expert_tensor_parallel_size": "expert_model_parallel_size",
    **dict.fromkeys(("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), "stage"),
    **dict.fromkeys(ALL_LAYERS, "recompute_granularity"),
}
"""Keys that change as one with another."""


def changes(recipe: Recipe, candidate: Recipe) -> dict[str, list[str]]:
    """Overrides that make a candidate of the recipe, those that change together under one name.

    Not its `name`: what `auto` would choose beside them may be faster, and fits as well.
    """
    by_section: dict[str, list[str]] = {}
    for name, value in recipe.layout:
        wanted = getattr(candidate.layout, name)
        if name not in ("name", ZERO) and wanted != value:
            shown = "null" if wanted is None else str(wanted).lower() if isinstance(wanted, bool) else str(wanted)
            by_section.setdefault(_TOGETHER.get(name, name), []).append(shlex.quote(f"layout.{name}={shown}"))
    # Its other keys follow from these when the recipe is loaded.
    before = recipe.layout.zero
    after = candidate.layout.zero
    if after is not None:
        if before is None or after.stage != before.stage:
            by_section.setdefault("stage", []).append(f"layout.zero.stage={after.stage}")
        for name in ("offload_optimizer", "offload_param", "nvme_path"):
            value = getattr(after, name)
            if value != ("none" if before is None and name != "nvme_path" else getattr(before, name, None)):
                shown = "null" if value is None else value
                by_section.setdefault("offload_optimizer", []).append(shlex.quote(f"layout.zero.{name}={shown}"))
    return by_section


def _as_before(candidate: Recipe, recipe: Recipe) -> Recipe:
    """With the recipe's own selective recomputation and expert tensor parallelism where only those would differ."""
    keys, before = candidate.layout, recipe.layout
    if not keys.recompute_granularity and before.recompute_granularity == "selective":
        candidate = candidate.with_layout(**{name: getattr(before, name) for name in ALL_LAYERS})
    if (
        keys.expert_tensor_parallel_size == keys.tensor_model_parallel_size
        and before.expert_tensor_parallel_size is None
    ):
        candidate = candidate.with_layout(expert_tensor_parallel_size=None)
    return candidate


def _smallest(recipe: Recipe, cluster: Cluster, ranks: int, profile: Profile | None) -> str:
    per_node = len(cluster.gpus) // cluster.nodes
    more, near = max(ranks, per_node), min(per_node, cluster.gpus_per_domain)
    near = 1 << (near.bit_length() - 1)
    while more <= 16_384:
        more *= 2
        nodes = -(-more // per_node)
        larger = cluster.with_nodes(nodes)
        for candidate in candidates(recipe, more, larger.gpus_per_domain):
            keys = candidate.layout
            if keys.micro_batch_size > 1 or not keys.recompute_granularity:
                continue
            if keys.virtual_pipeline_model_parallel_size or keys.tensor_model_parallel_size < near:
                continue
            try:
                plan = plan_of(candidate, larger, more) if _may_fit(candidate, larger, more) else None
            except UserError:  # there is no layout
                continue
            if plan is not None and plan.fits and plan.memory_headroom >= LEAST_HEADROOM:
                return f"{nodes} nodes, {more} GPUs ({Candidate(candidate, forecast(plan, profile)).key})"
    return "a smaller global batch, a shorter sequence, or GPUs with more memory"


def _may_fit(candidate: Recipe, cluster: Cluster, ranks: int) -> bool:
    """Whether the first stage may fit, which keeps the most activations: quicker than a plan of all stages.

    With all layers recomputed where the plan may choose how many, and its loss in the chunks that the plan gives it.
    """
    laid_out = layout(candidate, ranks, cluster)
    sizes = shape(candidate.model)
    most = capacity(cluster, ranks) * (1 - LEAST_HEADROOM)
    if model_states(candidate, sizes, laid_out, 0, cluster.device) > most:
        return False
    number = candidate.train.global_batch_size // (laid_out.data_parallel_size * candidate.layout.micro_batch_size)
    memory = gpu_memory(cluster, ranks) if cluster.gpus else None
    least = with_chunks(most_recomputation(candidate), sizes, laid_out, memory)
    return of_stage(least, sizes, laid_out, number, 0, cluster.device).total <= most


def plan_of(candidate: Recipe, cluster: Cluster, ranks: int) -> Plan | None:
    if recipe_rules.check(candidate):
        return None
    try:
        return derive(candidate, ranks, cluster)
    except UserError:
        return None


@dataclass(frozen=True)
class _LeastTimes:
    """The least seconds of a step. One plan serves all candidates, with what the time model reads replaced."""

    base: Plan
    device: Device
    cluster: Cluster
    ranks: int

    @classmethod
    def of(cls, recipe: Recipe, cluster: Cluster, ranks: int, profile: Profile | None) -> Self | None:
        """None: no layout has a plan."""
        near = cluster.gpus_per_domain
        offload = recipe.layout.zero is not None
        offloaded = candidates(recipe, ranks, near, offload=True) if offload else ()
        of_shape = chain(candidates(recipe, ranks, near), offloaded)
        base = next((plan for candidate in of_shape if (plan := plan_of(candidate, cluster, ranks))), None)
        return None if base is None else cls(base, gpu(base, profile), cluster, ranks)

    def each(self, every: Iterable[Recipe]) -> Iterator[tuple[float, Recipe]]:
        """Candidates that differ, with the seconds that they take at least."""
        known: dict[Any, float] = {}
        seen: set[Any] = set()
        for candidate in every:
            try:
                laid_out = layout(candidate, self.ranks, self.cluster)
            except UserError:
                continue
            zero, parallel = candidate.layout.zero, candidate.layout
            sharding = (parallel.use_distributed_optimizer, zero and (zero.stage, zero.offload_optimizer))
            micro = parallel.micro_batch_size
            plan = self._plan(candidate, laid_out)
            chunks = laid_out.virtual_pipeline_model_parallel_size
            if chunks > 1 and plan.num_microbatches % laid_out.pipeline_model_parallel_size:
                continue
            key = (laid_out, micro, parallel.recompute_granularity, parallel.recompute_modules, sharding)
            if key in seen:
                continue
            seen.add(key)
            shapes = work(plan)
            stack = software(plan, self.device)
            if (shapes, stack) not in known:
                known[shapes, stack] = predict(self.device, stack, shapes, at_least=True).seconds
            if math.isfinite(known[shapes, stack]):
                yield known[shapes, stack], candidate

    def recomputing(self, candidate: Recipe) -> float:
        """The least seconds of one with `recompute_granularity: auto`, with what its first stage has to recompute."""
        laid_out = layout(candidate, self.ranks, self.cluster)
        plan = self._plan(least_recomputation_of_first_stage(candidate, laid_out, self.cluster), laid_out)
        return predict(self.device, software(plan, self.device), work(plan), at_least=True).seconds

    def _plan(self, candidate: Recipe, laid_out: Layout) -> Plan:
        number = candidate.train.global_batch_size // (laid_out.data_parallel_size * candidate.layout.micro_batch_size)
        return replace(self.base, recipe=candidate, layout=laid_out, num_microbatches=number)
