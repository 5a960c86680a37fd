"""What to change when memory does not suffice: every way on its own, in order, with its memory and price in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from llmrecipes.errors import UserError
from llmrecipes.plan.derive import LEAST_HEADROOM, Plan, derive
from llmrecipes.plan.speed.forecast import forecast
from llmrecipes.plan.speed.search import MOST_PIPELINE, changes, with_zero
from llmrecipes.plan.speed.stage_cuts import stage_cuts
from llmrecipes.recipe.rules import recipe_rules
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.zero import Zero
from llmrecipes.recipe.speedups.recompute import ALL_LAYERS, recomputation
from llmrecipes.units import gib

ALLOCATOR = "expandable_segments:True"
LEAST_GAIN = 0.01
"""Share of the memory below which a change is not worth its name."""
_UNKNOWN = "copies to main memory and updates there are not counted"


@dataclass(frozen=True)
class Rung:
    """One way to need less memory.

    Attributes:
        change: as overrides of the recipe, or a variable; empty: there is nothing to change.
        memory: bytes of a rank with it; None: not predicted.
        seconds: of a step with it; None: the time model does not know this machine.
        fits: whether the plan with it fits with `LEAST_HEADROOM`.
        note: why there is nothing to change, or what the numbers leave out.
    """

    name: str
    change: str = ""
    memory: int | None = None
    seconds: float | None = None
    fits: bool = False
    note: str = ""


def ladder(plan: Plan, allocator: str = "") -> list[Rung]:
    """All rungs of a plan, the cheapest kind first; each is the only change.

    Of several values (micro-batches, degrees, stages of ZeRO) a rung has the least change that fits, else the one with
    the least memory.

    Args:
        allocator: the value of PYTORCH_ALLOC_CONF if a user has set it; a start sets it to `ALLOCATOR`.
    """
    rungs = [] if plan.device != "cuda" else [_allocator(allocator)]
    before = plan_seconds(plan)
    base = _asked(plan)
    for name, candidates, otherwise in _kinds(plan, base):
        rungs.append(_rung(plan, base, before, name, candidates, otherwise))
    return rungs


def _allocator(value: str) -> Rung:
    if not value or ALLOCATOR in value:
        return Rung("allocator", note=f"{ALLOCATOR} is set")
    return Rung("allocator", f"PYTORCH_ALLOC_CONF={ALLOCATOR}", note="less fragmentation, which plans do not count")


def plan_seconds(plan: Plan) -> float | None:
    """Predicted seconds of a step; None where the time model does not know the machine."""
    try:
        return forecast(plan, None).step.seconds
    except UserError:
        return None


def _rung(
    plan: Plan, base: Recipe, before: float | None, name: str, candidates: Iterator[Recipe], otherwise: str
) -> Rung:
    """The first candidate that fits, else that with the least memory."""
    best, refusal = None, ""
    for candidate in candidates:
        if problems := recipe_rules.check(candidate):
            refusal = refusal or f"{problems[0].key}: {problems[0].rule}"
            continue
        try:
            tried = derive(candidate, plan.layout.world_size, plan.cluster)
        except UserError as error:
            refusal = refusal or error.rule or error.what
            continue
        less = tried.memory.total <= (1 - LEAST_GAIN) * plan.memory.total
        if less and (best is None or tried.memory.total < best[1].memory.total):
            best = candidate, tried
        if less and tried.fits and tried.memory_headroom >= LEAST_HEADROOM:
            break
        refusal = refusal or ("" if less else f"saves less than {LEAST_GAIN:.0%}")
    if best is None:
        return Rung(name, note=otherwise or refusal or "not possible with this layout")
    candidate, tried = best
    zero = candidate.layout.zero
    moved = zero is not None and (zero.offload_optimizer, zero.offload_param) != ("none", "none")
    return Rung(
        name,
        " ".join(chain.from_iterable(changes(base, candidate).values())),
        tried.memory.total,
        None if before is None or moved else plan_seconds(tried),
        tried.fits and tried.memory_headroom >= LEAST_HEADROOM,
        _UNKNOWN if moved else "",
    )


def _asked(plan: Plan) -> Recipe:
    """The recipe without what the plan has chosen for it, so that each rung chooses by itself."""
    recipe = plan.recipe
    if plan.recompute_auto:
        recipe = recipe.with_layout(**recomputation("auto"))
    if plan.loss_chunk_tokens:
        free = recipe.with_layout(loss_chunk_tokens=None)
        chosen = derive(free, plan.layout.world_size, plan.cluster).loss_chunk_tokens
        recipe = free if chosen == plan.loss_chunk_tokens else recipe
    return recipe


def _kinds(plan: Plan, recipe: Recipe) -> Iterator[tuple[str, Iterator[Recipe], str]]:
    """Name, candidates from the least change on, and why there is none where the recipe has it already."""
    ranks = plan.layout.world_size
    parallel, model = recipe.layout, recipe.model
    tensor = parallel.tensor_model_parallel_size
    stages = parallel.pipeline_model_parallel_size
    micro = recipe.layout.micro_batch_size
    smaller = (size for size in range(micro - 1, 0, -1) if micro % size == 0)
    yield (
        "micro-batch",
        (recipe.with_layout(micro_batch_size=size) for size in smaller),
        "it is 1" if micro == 1 else "",
    )
    yield "recomputation", _recomputed(recipe), _all_recomputed(plan.recipe)
    sequence = iter(() if tensor == 1 or parallel.sequence_parallel else [recipe.with_layout(sequence_parallel=True)])
    yield (
        "sequence parallelism",
        sequence,
        "only with tensor parallelism" if tensor == 1 else ("on" if parallel.sequence_parallel else ""),
    )
    near = plan.cluster.gpus_per_domain if plan.cluster.gpus else ranks
    degrees = _doubled(tensor, min(near, ranks))
    wider = (recipe.with_layout(tensor_model_parallel_size=size, sequence_parallel=True) for size in degrees)
    yield "tensor parallelism", wider, f"over all {near} GPUs that are near" if tensor >= near else ""
    longer = (
        recipe.with_layout(pipeline_model_parallel_size=size, **cut)
        for size in _doubled(stages, min(ranks, MOST_PIPELINE, model.num_layers))
        for cut in stage_cuts(recipe, size)
        if (cut.get("virtual_pipeline_model_parallel_size") or 1) == 1
    )
    yield "pipeline parallelism", longer, f"{ranks} ranks in {stages} stages" if stages >= ranks else ""
    sharded = parallel.use_distributed_optimizer
    yield (
        "distributed optimizer",
        iter(() if sharded else [recipe.with_layout(use_distributed_optimizer=True)]),
        "on" if sharded else "",
    )
    zero = recipe.layout.zero or Zero(stage=1, extra={})
    now = 1 if recipe.layout.zero is None else recipe.layout.zero.stage
    later = [stage for stage in (2, 3) if stage > now]
    yield "ZeRO", (with_zero(recipe, zero, stage, False) for stage in later), "" if later else "stage 3"
    moved = zero.offload_optimizer != "none"
    yield "offload", iter(() if moved else _offloaded(recipe, zero, now)), "on" if moved else ""


def _offloaded(recipe: Recipe, zero: Zero, stage: int) -> Iterator[Recipe]:
    for zero_stage in sorted({max(stage, 2), 3}):
        yield with_zero(recipe, zero, zero_stage, True)
    last = with_zero(recipe, zero, 3, True)
    if last.layout.zero is not None:
        yield last.with_layout(zero=last.layout.zero.model_copy(update={"offload_param": "cpu"}))


def _recomputed(recipe: Recipe) -> Iterator[Recipe]:
    """The next choices: `auto` takes the least that fits, which is nothing for a plan that fits already."""
    granularity = recipe.layout.recompute_granularity
    if granularity is None:
        yield recipe.with_layout(**recomputation("selective"))
    if granularity in (None, "selective"):
        yield recipe.with_layout(**recomputation("auto"))
    if not _all_recomputed(recipe):
        yield recipe.with_layout(**ALL_LAYERS)


def _all_recomputed(recipe: Recipe) -> str:
    keys = recipe.layout
    whole = keys.recompute_granularity == "full" and keys.recompute_method == "uniform"
    return "of all layers" if whole and keys.recompute_num_layers == 1 else ""


def _doubled(now: int, most: int) -> list[int]:
    sizes = []
    while 2 * now <= most:
        now *= 2
        sizes.append(now)
    return sizes


def lines(plan: Plan, rungs: list[Rung], *, fits: bool = True) -> list[str]:
    """A line for each rung that changes something.

    Args:
        fits: whether to say which fit: not after a run that was planned to fit ran out of memory.
    """
    before = plan_seconds(plan)
    return [f"{rung.change}: {_price(plan, before, rung, fits)}" for rung in rungs if rung.change]


def others(rungs: list[Rung]) -> str:
    """The rungs without a change, and why; empty without one."""
    names: dict[str, list[str]] = {}
    for rung in rungs:
        if not rung.change:
            names.setdefault(rung.note, []).append(rung.name)
    return "; ".join(f"{', '.join(of_note)} ({note})" for note, of_note in names.items())


def _price(plan: Plan, before: float | None, rung: Rung, fits: bool) -> str:
    if rung.memory is None:
        return rung.note
    words = [f"{gib(rung.memory)} a rank (-{gib(plan.memory.total - rung.memory)})"]
    if rung.seconds is not None and before is not None:
        words.append(f"step {rung.seconds / before - 1:+.0%}")
    else:
        words.append(f"time unknown{f': {rung.note}' if rung.note else ''}")
    return ", ".join([*words, *(["fits"] if fits and rung.fits else [])])
