"""`llmrecipes plan --speed`: every feature that decides on a run's speed, why it is on or off, and what it gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.profile import Profile
from llmrecipes.launch.environment import explained
from llmrecipes.plan.derive import MOST_LOGITS, Plan, derive, gpu_memory, with_chunks
from llmrecipes.plan.layout import expected_layers
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.plan.speed.device import SpeedUnknownError
from llmrecipes.plan.speed.forecast import forecast
from llmrecipes.recipe.rules.recipe_rules import check, obstacle_to_chunks
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.features import FEATURES, FeatureChoice
from llmrecipes.units import GIB

PLANNED = ("bias_activation_fusion", "tp_comm_overlap", "overlap_moe_expert_parallel_comm", "fp8", "cuda_graph_impl")
"""Keys whose effect the planner knows."""
BY_NAME = {"fp8": "e4m3", "cuda_graph_impl": "transformer_engine"}
"""Values that switch on what no rule chooses."""
CHUNK = 1024
"""Tokens of a chunk of the loss that the report compares with all tokens at once."""
FIGURE = re.compile(r"[0-9](%| s )")


@dataclass(frozen=True)
class FeatureRow:
    """A feature of a run.

    Attributes:
        key: dotted, in a recipe.
        value: what the run has.
        reason: why.
        gives: what it is expected to give; None: unknown.
        source: source of that: `calculated` for some recipe and GPU, `planned` for this one, or only `expected`.
        change: an override that changes it; None if nothing does on this machine.
    """

    key: str
    value: Any
    reason: str
    gives: str | None
    source: str | None
    change: str | None


@dataclass(frozen=True)
class SpeedReport:
    """The features of a run, and its environment: value and reason of each variable."""

    rows: tuple[FeatureRow, ...]
    environment: Mapping[str, tuple[str, str]]

    def as_dict(self) -> dict[str, Any]:
        """Output of `plan --speed --json`."""
        variables = [
            {"name": name, "value": value, "reason": reason} for name, (value, reason) in self.environment.items()
        ]
        return {"features": [asdict(row) for row in self.rows], "environment": variables}


def speed(run: RunPlan, cluster: str | None) -> SpeedReport:
    """What a planned run has, in its largest stage.

    Args:
        cluster: name or path of the profile; None: this machine.
    """
    plan = run.largest
    profile = None if cluster is None else load_profile(cluster)
    rows = (*_elsewhere(plan, profile), *(_of(choice, plan, profile) for choice in plan.features))
    return SpeedReport(rows, explained(profile, run.cluster, run))


def _of(choice: FeatureChoice, plan: Plan, profile: Profile | None) -> FeatureRow:
    name = choice.key.rpartition(".")[2]
    gives = FEATURES[name].gain
    source = "calculated" if FIGURE.search(gives) else "expected"
    change = None if choice.ruled_out else f"{choice.key}={_text(not choice.value)}"
    if not isinstance(choice.value, bool):
        change = None if choice.ruled_out else f"{choice.key}=VALUE"
    if name in PLANNED and not choice.ruled_out:
        switched: Any = not choice.value
        if name in BY_NAME:
            switched = None if choice.value else BY_NAME[name]
            change = f"{choice.key}={_text(switched)}"
        if effect := _effect(plan, _with(plan.recipe, {choice.key: switched}), profile):
            gives = f"{gives}; here, with {choice.key}={_text(switched)}: {effect}"
            source = "calculated; planned for this run"
    return FeatureRow(choice.key, choice.value, choice.reason, gives, source, change)


def _elsewhere(plan: Plan, profile: Profile | None) -> Iterator[FeatureRow]:
    """Keys of other sections that decide on speed."""
    recipe, target = plan.recipe, plan.target
    layers, other = ("transformer_engine", "local") if target.transformer_engine else ("local", "auto")
    chosen, _ = expected_layers(_with(recipe, {"model.transformer_impl": other}), plan.device)
    yield FeatureRow(
        "model.transformer_impl",
        layers,
        target.layers_reason,
        "3 to 5% of gpt-1b's step on one GPU, against megatron-core's own layers with compiled functions",
        "calculated",
        f"model.transformer_impl={other}" if chosen is not target.transformer_engine else None,
    )
    recomputed = plan.recompute_granularity
    yield _planned(
        plan,
        profile,
        "layout.recompute_granularity",
        recomputed,
        "auto: the least that fits" if plan.recompute_auto else "set in the recipe" if recomputed else "default",
        dict.fromkeys(("granularity", "method", "num_layers", "modules")) if recomputed else None,
        prefix="layout.recompute_",
    )
    yield FeatureRow(
        "layout.torch_compile",
        recipe.layout.torch_compile,
        "set in the recipe"
        if recipe.layout.torch_compile
        else f"default{'; kernels of TransformerEngine are fused already' if target.transformer_engine else ''}",
        "fuses the rest of megatron-core's own layers",
        "expected",
        f"layout.torch_compile={_text(not recipe.layout.torch_compile)}",
    )
    chunks = plan.loss_chunk_tokens
    fixed = obstacle_to_chunks(recipe) or recipe.train.z_loss_coeff
    yield _planned(
        plan,
        profile,
        "layout.loss_chunk_tokens",
        chunks,
        _why_chunks(plan),
        None if fixed else {"loss_chunk_tokens": 0 if chunks else CHUNK},
        prefix="layout.",
    )
    for name in ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer", "grad_reduce_in_fp32"):
        section = "train" if name == "grad_reduce_in_fp32" else "layout"
        keys = getattr(recipe, section)
        value = getattr(keys, name)
        default = type(keys).model_fields[name].default
        change = {name: not value}
        if name in ("overlap_grad_reduce", "use_distributed_optimizer") and value:
            change["overlap_param_gather"] = False
        if name == "overlap_param_gather" and not value:
            change["overlap_grad_reduce"] = True
        yield _planned(
            plan,
            profile,
            f"{section}.{name}",
            value,
            "default" if value == default else "set in the recipe",
            change,
            prefix=f"{section}.",
        )


def _why_chunks(plan: Plan) -> str:
    """Why the loss is computed in chunks, or at once."""
    recipe, cluster = plan.recipe, plan.cluster
    if obstacle := obstacle_to_chunks(recipe):
        return obstacle[1]
    if recipe.train.z_loss_coeff:
        return "train.z_loss_coeff is computed by the loss in chunks"
    if recipe.layout.loss_chunk_tokens is None:
        return "chosen on GPUs only" if plan.device == "cpu" else f"logits take at most {MOST_LOGITS:.0%} of the GPU"
    unset = _with(recipe, {"layout.loss_chunk_tokens": None})
    if (
        cluster.gpus
        and with_chunks(unset, plan.shape, plan.layout, gpu_memory(cluster, plan.layout.world_size)) == recipe
    ):
        return f"the logits of a micro-batch would take more than {MOST_LOGITS:.0%} of the GPU"
    return "set in the recipe"


def _planned(
    plan: Plan, profile: Profile | None, key: str, value: Any, reason: str, other: Mapping[str, Any] | None, prefix: str
) -> FeatureRow:
    """A key whose effect the planner knows; `other` has the values of another setting."""
    if other is None:
        return FeatureRow(key, value, reason, None, None, None)
    changes = {f"{prefix}{name}": each for name, each in other.items()}
    changed = [f"{name}={_text(each)}" for name, each in changes.items()]
    effect = _effect(plan, _with(plan.recipe, changes), profile)
    gives = None if effect is None else f"with {' '.join(changed[:1])}: {effect}"
    return FeatureRow(key, value, reason, gives, None if gives is None else "planned", " ".join(changed))


def _effect(plan: Plan, other: Recipe, profile: Profile | None) -> str | None:
    """Step time and memory of another recipe, relative to the plan's; None where it cannot run."""
    if check(other):
        return None
    try:
        changed = derive(other, plan.layout.world_size, plan.cluster)
    except UserError:
        return None
    memory = (changed.memory.total - plan.memory.total) / GIB
    effect = f"{memory:+.1f} GiB a rank"
    try:
        ratio = forecast(changed, profile).step.seconds / forecast(plan, profile).step.seconds
    except SpeedUnknownError:
        return effect
    return f"step time {ratio - 1:+.1%}, {effect}" if round(ratio - 1, 3) else effect


def _with(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with dotted keys of its sections changed."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        recipe = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update={name: value})})
    return recipe


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
