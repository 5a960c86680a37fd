"""Features of megatron-core that change the speed of a run: what each needs, and which ones a run has on a machine.

One that is unset is chosen by rule; one that is set and cannot be had is refused: by `rules`
where the recipe itself rules it out, else where its machine is known (the plan, and each rank before it builds the
model).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llmrecipes.errors import UserError
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import LayoutKeys, Recipe, Train
from llmrecipes.recipe.sections.layout_section import Switch
from llmrecipes.recipe.sections.section import Section
from llmrecipes.recipe.speedups import obstacles
from llmrecipes.recipe.speedups.fp8 import FP8, VERSION, obstacle_of_gpu
from llmrecipes.recipe.speedups.graphs import GRAPHS
from llmrecipes.recipe.speedups.graphs import VERSION as GRAPHS_VERSION
from llmrecipes.recipe.speedups.overlap import OVERLAP

Version = tuple[int, int]
SWITCHED_OFF = (None, False)
GC_INTERVAL = 100


@dataclass(frozen=True)
class SpeedTarget:
    """What decides on features besides the recipe: as a plan expects of a machine, or as a rank has it.

    Attributes:
        device: of the ranks.
        transformer_engine: whether the layers are TransformerEngine's.
        layers_reason: why they are, or are not.
        version: of TransformerEngine; None: unknown, taken for new enough.
        no_compiler: why functions cannot be compiled; None if they can.
        no_deep_ep: why DeepEP or HybridEP cannot be used; None if it can.
        ranks: of the run.
        spans_nodes: whether data-parallel ranks are on several nodes.
        capability: of the GPU; None: unknown, taken for new enough.
        cuda: with which torch was built; None: unknown, taken for new enough.
    """

    device: Literal["cpu", "cuda"]
    transformer_engine: bool
    layers_reason: str = ""
    version: Version | None = None
    no_compiler: str | None = None
    no_deep_ep: str | None = None
    ranks: int = 1
    spans_nodes: bool = False
    capability: Version | None = None
    cuda: Version | None = None


@dataclass(frozen=True)
class FeatureChoice:
    """A feature of a run.

    Attributes:
        key: dotted, in a recipe.
        value: what megatron-core gets.
        reason: why it has this value.
        by: whether the recipe sets it, or a rule chooses.
        ruled_out: the reason is why it cannot be had.
        refused: and the recipe asks for it.
    """

    key: str
    value: Any
    reason: str
    by: Literal["recipe", "rule"]
    ruled_out: bool = False
    refused: bool = False

    @property
    def on(self) -> bool:
        """Whether the run has it."""
        return self.value not in SWITCHED_OFF

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return {"key": self.key, "value": value, "reason": self.reason, "by": self.by}


Default = tuple[Any, str]


@dataclass(frozen=True)
class Feature:
    """A key of `layout` or `train`.

    Attributes:
        field: megatron-core's, as `Class.field`; empty for one that has an effect elsewhere.
        gain: what it is expected to give.
        recipe: what of a recipe rules it out; None if nothing does.
        target: what of a machine rules it out.
        default: the value that a rule chooses where nothing rules it out, and why.
        of_value: what of a recipe and a machine together rules one value out.
    """

    field: str
    gain: str
    recipe: Callable[[Recipe], str | None]
    target: Callable[[SpeedTarget], str | None]
    default: Callable[[Recipe, SpeedTarget], Default]
    of_value: Callable[[Any, Recipe, SpeedTarget], str | None] | None = None


# -- what a machine rules out ----------------------------------------------------------------------------------------


def _everywhere(_target: SpeedTarget) -> None:
    return None


def _gpu(target: SpeedTarget) -> str | None:
    return None if target.device == "cuda" else "a setting of NCCL, but CPU ranks use gloo"


def _transformer_engine(target: SpeedTarget) -> str | None:
    if target.transformer_engine:
        return None
    because = f" ({target.layers_reason})" if target.layers_reason else ""
    return f"needs TransformerEngine's layers; these are megatron-core's own{because}"


def _since(least: Version) -> Callable[[SpeedTarget], str | None]:
    def new_enough(target: SpeedTarget) -> str | None:
        if not (reason := _transformer_engine(target)) and target.version is not None and target.version < least:
            wanted, there = (".".join(map(str, version)) for version in (least, target.version))
            return f"needs TransformerEngine {wanted}; {there} is installed"
        return reason

    return new_enough


def _eight_bits(target: SpeedTarget) -> str | None:
    return _since(VERSION)(target) or obstacle_of_gpu(target)


def _recorded(target: SpeedTarget) -> str | None:
    return "CUDA graphs need a GPU" if target.device != "cuda" else _since(GRAPHS_VERSION)(target)


def _compiler(target: SpeedTarget) -> str | None:
    return target.no_compiler


def _rotating_kernel(target: SpeedTarget) -> str | None:
    return None if target.transformer_engine else target.no_compiler


def _latent_rotation(wanted: bool, recipe: Recipe, target: SpeedTarget) -> str | None:
    return _transformer_engine(target) if wanted and recipe.model.multi_latent_attention else None


def _deep_ep(target: SpeedTarget) -> str | None:
    return target.no_deep_ep if target.device == "cuda" else "DeepEP and HybridEP need GPUs"


# -- what a rule chooses ---------------------------------------------------------------------------------------------


def _compiled(recipe: Recipe, target: SpeedTarget) -> Default:
    """On where torch compiles for the device anyway, or where that is worth it."""
    if recipe.layout.torch_compile:
        return True, "layout.torch_compile"
    if target.device == "cuda":
        return True, "on a GPU, with a compiler"
    return False, "on a CPU, compiling takes longer than it saves unless layout.torch_compile compiles anyway"


def _compiled_if_needed(recipe: Recipe, target: SpeedTarget) -> Default:
    model = recipe.model
    if not (model.add_bias_linear or model.hidden_dropout or recipe.layout.torch_compile):
        return False, "the model has neither biases nor hidden_dropout"
    return _compiled(recipe, target)


def _rotated(recipe: Recipe, target: SpeedTarget) -> Default:
    if recipe.model.multi_latent_attention:
        return False, "megatron-core's kernel for latent attention is experimental"
    return _with_layers(recipe, target) if target.transformer_engine else _compiled(recipe, target)


def _with_layers(_recipe: Recipe, _target: SpeedTarget) -> Default:
    return True, "TransformerEngine's layers"


def _padded(_recipe: Recipe, target: SpeedTarget) -> Default:
    if target.device == "cuda" and target.spans_nodes:
        return True, "data-parallel ranks span several nodes"
    return False, "data-parallel ranks are on one node"


def _overlapped(recipe: Recipe, target: SpeedTarget) -> Default:
    parallel = recipe.layout
    split = parallel.expert_model_parallel_size > 1 or parallel.tensor_model_parallel_size > 1
    if target.device == "cuda" and split:
        return True, "experts are spread over ranks, so the dispatcher communicates"
    return False, "the dispatcher does not communicate" if not split else "on a CPU, nothing runs concurrently"


def _together(_recipe: Recipe, target: SpeedTarget) -> Default:
    if target.device == "cuda" and target.ranks > 1:
        return True, "a garbage collection on one rank makes all ranks wait"
    return False, "one rank" if target.ranks == 1 else "on a CPU, a step takes much longer than a collection"


def _every_hundredth(recipe: Recipe, target: SpeedTarget) -> Default:
    if recipe.layout.manual_gc or _together(recipe, target)[0]:
        return GC_INTERVAL, "Megatron-Bridge's"
    return None, "manual_gc is off"


def _value(value: Any, reason: str) -> Callable[[Recipe, SpeedTarget], Default]:
    return lambda _recipe, _target: (value, reason)


FEATURES: Mapping[str, Feature] = {
    "bias_activation_fusion": Feature(
        "TransformerConfig.bias_activation_fusion",
        "3% of gpt-1b's step, 10% of mixtral-8x7b's; SwiGLU keeps 3 widths of the MLP instead of 5",
        obstacles.activation, _compiler, _compiled,
    ),
    "bias_dropout_fusion": Feature(
        "TransformerConfig.bias_dropout_fusion", "one pass over the residual stream instead of three",
        obstacles.residual, _compiler, _compiled_if_needed,
    ),
    "apply_rope_fusion": Feature(
        "TransformerConfig.apply_rope_fusion",
        "3% of gpt-1b's step: one pass over queries and keys instead of three",
        obstacles.rotation, _rotating_kernel, _rotated, _latent_rotation,
    ),
    "cross_entropy_loss_fusion": Feature(
        "TransformerConfig.cross_entropy_loss_fusion",
        "7% of gpt-1b's step, 36% of gpt-125m's with megatron-core's layers: 6 bytes of traffic a logit instead of 44",
        obstacles.anything, _compiler, _compiled,
    ),
    "gradient_accumulation_fusion": Feature(
        "TransformerConfig.gradient_accumulation_fusion",
        "2.4% of llama3-8b's step, 2 to 4% with experts; gradients are added without rounding",
        obstacles.weight_gradients, _transformer_engine, _with_layers,
    ),
    "attention_backend": Feature(
        "TransformerConfig.attention_backend", "selects another kernel where TransformerEngine's choice is slow",
        obstacles.anything, _transformer_engine, _value(None, "TransformerEngine chooses by shape and GPU"),
    ),
    "cp_comm_type": Feature(
        "TransformerConfig.cp_comm_type", "a2a sends less than a ring if heads divide evenly over the ranks",
        obstacles.context, _transformer_engine, _value(None, "p2p, TransformerEngine's default"),
    ),
    "hierarchical_context_parallel_sizes": Feature(
        "initialize_model_parallel.hierarchical_context_parallel_sizes", "exchanges heads within a node only",
        obstacles.hierarchy, _transformer_engine, _value(None, "not needed by cp_comm_type"),
    ),
    "ddp_bucket_size": Feature(
        "DistributedDataParallelConfig.bucket_size", "fewer, larger messages; Megatron-Bridge uses 128Mi on H100",
        obstacles.buckets, _everywhere, _value(None, "megatron-core's default: max(40M, 1M × data-parallel size)"),
    ),
    "ddp_pad_buckets_for_high_nccl_busbw": Feature(
        "DistributedDataParallelConfig.pad_buckets_for_high_nccl_busbw", "bus bandwidth at large data-parallel sizes",
        obstacles.sharded, _everywhere, _padded,
    ),
    "align_param_gather": Feature(
        "DistributedDataParallelConfig.align_param_gather", "stages do not wait for each other's gathers",
        obstacles.interleaved, _everywhere, _value(True, "virtual pipeline stages with overlap_param_gather"),
    ),
    "reduce_scatter_with_fp32_accumulation": Feature(
        "DistributedDataParallelConfig.reduce_scatter_with_fp32_accumulation",
        "half the bytes of fp32 gradients, but sums in fp32",
        obstacles.short_gradients, _everywhere, _value(False,
                                                       "sums are rounded differently, so only if set explicitly"),
    ),
    "moe_permute_fusion": Feature(
        "TransformerConfig.moe_permute_fusion", "fewer passes over the dispatched tokens",
        obstacles.experts, _since((2, 1)), _with_layers,
    ),
    "moe_router_fusion": Feature(
        "TransformerConfig.moe_router_fusion", "fewer kernel launches per layer with experts",
        obstacles.fused_router, _since((2, 7)), _with_layers,
    ),
    "moe_shared_expert_overlap": Feature(
        "TransformerConfig.moe_shared_expert_overlap", "hides the smaller of shared experts and all-to-all",
        obstacles.shared_experts, _everywhere, _overlapped,
    ),
    "moe_flex_dispatcher_backend": Feature(
        "TransformerConfig.moe_flex_dispatcher_backend",
        "all-to-all of deepseek-v3: 10.7 s of a step with NCCL on 128 nodes, less with DeepEP's kernels",
        obstacles.flex, _deep_ep, _value("deepep", "moe_token_dispatcher_type flex"),
    ),
    "manual_gc": Feature(
        "", "avoids steps in which one rank collects garbage while the others wait", obstacles.anything, _everywhere,
        _together,
    ),
    "manual_gc_interval": Feature(
        "", "less frequent collections; reference cycles are freed later",
        obstacles.collections, _everywhere, _every_hundredth,
    ),
    "deterministic_mode": Feature(
        "TransformerConfig.deterministic_mode", "no gain: trades speed for bitwise reproducible results",
        obstacles.own_engine, _everywhere, _value(False, "slower"),
    ),
    "high_priority_stream_groups": Feature(
        "initialize_model_parallel.high_priority_stream_groups", "overlapped messages start at once",
        obstacles.anything, _gpu, _value(None, "only if set explicitly"),
    ),
    "nccl_communicator_config_path": Feature(
        "initialize_model_parallel.nccl_communicator_config_path", "fewer multiprocessors for overlapped messages",
        obstacles.anything, _gpu, _value(None, "only if set explicitly"),
    ),
    **{
        name: Feature(
            key.field, key.gain, key.recipe, _since(key.version) if key.version else _everywhere, _value(*key.default)
        )
        for name, key in OVERLAP.items()
    },
    **{
        name: Feature(f"TransformerConfig.{name}", key.gain, key.recipe, _eight_bits, key.default, key.of_value)
        for name, key in FP8.items()
    },
    **{
        name: Feature(key.field, key.gain, key.recipe, _recorded, key.default) for name, key in GRAPHS.items()
    },
}  # fmt: skip
"""Keys of `layout`, and those of `train` that change numbers, by name. Gains are calculated from bytes and
FLOPs, within a factor of 1.5, not measured."""


def _section(name: str) -> type[Section]:
    return LayoutKeys if name in LayoutKeys.model_fields else Train


def key_of(name: str) -> str:
    """The dotted key of a feature."""
    return f"{'layout' if _section(name) is LayoutKeys else 'train'}.{name}"


def wanted_of(name: str, recipe: Recipe) -> Any:
    """What the recipe says about a feature; None: nothing."""
    return getattr(recipe.layout if _section(name) is LayoutKeys else recipe.train, name)


def by_rule(recipe: Recipe, names: Collection[str]) -> Recipe:
    """The recipe with these features left to the rules."""
    layout = {name: None for name in names if _section(name) is LayoutKeys}
    train = {name: None for name in names if _section(name) is Train}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=train)}).with_layout(**layout)


def resolve(recipe: Recipe, target: SpeedTarget) -> tuple[FeatureChoice, ...]:
    """The features of a run on a machine, in the order of `FEATURES`; what is refused is off."""
    return tuple(_choice(name, feature, recipe, target) for name, feature in FEATURES.items())


def _choice(name: str, feature: Feature, recipe: Recipe, target: SpeedTarget) -> FeatureChoice:
    key = key_of(name)
    wanted = wanted_of(name, recipe)
    # A switch that does not apply is off; megatron-core has a default of its own for any other value.
    off = False if isinstance(wanted, bool) or _section(name).model_fields[name].annotation == Switch else None
    missing = feature.recipe(recipe)
    obstacle = missing or feature.target(target)
    if not obstacle and wanted is not None and feature.of_value is not None:
        obstacle = feature.of_value(wanted, recipe, target)
    if wanted is None:
        # The dispatcher is the request.
        asked = name == "moe_flex_dispatcher_backend" and missing is None
        if obstacle:
            key = "model.moe_token_dispatcher_type" if asked else key
            return FeatureChoice(key, off, obstacle, "rule", ruled_out=True, refused=asked)
        return FeatureChoice(key, *feature.default(recipe, target), "rule")
    if obstacle and wanted not in SWITCHED_OFF:
        return FeatureChoice(key, off, obstacle, "recipe", ruled_out=True, refused=True)
    return FeatureChoice(key, wanted, "set in the recipe", "recipe")


def needing_a_gpu() -> list[str]:
    """Features that a CPU without a compiler, or the small layout of a rehearsal in fp32, cannot give."""
    bare = SpeedTarget("cpu", transformer_engine=False, no_compiler="none")
    return [name for name, feature in FEATURES.items() if name in OVERLAP or feature.target(bare)]


def values(choices: Iterable[FeatureChoice], kind: str) -> dict[str, Any]:
    """Values for one of megatron-core's classes or functions, by its field; those that it does not choose itself."""
    chosen = {}
    for choice in choices:
        owner, _, field = FEATURES[choice.key.rpartition(".")[2]].field.partition(".")
        if owner == kind and choice.value is not None:
            chosen[field] = choice.value
    return chosen


def value_of(name: str, recipe: Recipe, target: SpeedTarget) -> Any:
    """What a run has of one feature on a machine, without the choice of the others."""
    return _choice(name, FEATURES[name], recipe, target).value


def value(choices: Iterable[FeatureChoice], name: str) -> Any:
    """What a run has of one feature."""
    return next(choice.value for choice in choices if choice.key == key_of(name))


def require(choices: Iterable[FeatureChoice]) -> None:
    """Refuse what a recipe asks for and cannot have.

    Raises:
        UserError: there is such a key.
    """
    for choice in choices:
        if choice.refused:
            instead = "alltoall" if choice.key.startswith("model.") else "null, to choose by rule"
            raise UserError(
                "not available on this machine",
                where=choice.key,
                rule=choice.reason,
                fix=f"{choice.key}={instead}",
            )


def rules(recipe: Recipe) -> Iterator[Problem]:
    """Features that no machine can give the recipe."""
    for name, feature in FEATURES.items():
        wanted = wanted_of(name, recipe)
        if wanted not in SWITCHED_OFF and (obstacle := feature.recipe(recipe)):
            yield Problem(key_of(name), "true" if wanted is True else f"{wanted}", obstacle, f"remove {name}")
