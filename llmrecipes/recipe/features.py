"""Features of megatron-core that change the speed of a run: what each needs, and which ones a run has on a machine.

A key of the section `speed` that is unset is chosen by rule; one that is set and cannot be had is refused: by `rules`
where the recipe itself rules it out, else where its machine is known (the plan, and each rank before it builds the
model).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llmrecipes.errors import UserError
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.engines import MEGATRON, engine_name
from llmrecipes.recipe.schema import Recipe

Version = tuple[int, int]


@dataclass(frozen=True)
class Target:
    """What decides on features besides the recipe: as expected of a machine (`plan.features`), or as a rank has it.

    Attributes:
        device: of the ranks.
        transformer_engine: whether the layers are TransformerEngine's.
        layers_reason: why they are, or are not.
        version: of TransformerEngine; None: unknown, taken for new enough.
        no_compiler: why functions cannot be compiled; None if they can.
        spans_nodes: whether data-parallel ranks are on several nodes.
    """

    device: Literal["cpu", "cuda"]
    transformer_engine: bool
    layers_reason: str = ""
    version: Version | None = None
    no_compiler: str | None = None
    spans_nodes: bool = False


@dataclass(frozen=True)
class Choice:
    """A feature of a run.

    Attributes:
        key: dotted, in a recipe.
        value: what megatron-core gets.
        reason: why it has this value.
        by: whether the recipe sets it, or a rule chooses.
        refused: the recipe asks for it, and the reason is why it cannot be had.
    """

    key: str
    value: Any
    reason: str
    by: Literal["recipe", "rule"]
    refused: bool = False

    @property
    def on(self) -> bool:
        """Whether the run has it."""
        return self.value not in (None, False)

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"key": self.key, "value": self.value, "reason": self.reason, "by": self.by}


@dataclass(frozen=True)
class Feature:
    """A key of `speed`.

    Attributes:
        field: megatron-core's, as `Class.field`.
        recipe: what of a recipe rules it out; None if nothing does.
        target: what of a machine rules it out.
        default: the value that a rule chooses where nothing rules it out, and why.
        gain: what it is expected to give.
    """

    field: str
    recipe: Callable[[Recipe], str | None]
    target: Callable[[Target], str | None]
    default: Callable[[Recipe, Target], tuple[Any, str]]
    gain: str


def _swiglu(recipe: Recipe) -> str | None:
    model = recipe.model
    if model.activation_func == "silu" and model.gated_linear_unit:
        return None
    return "only SwiGLU (activation_func silu, gated_linear_unit true): its fused GELU is the tanh approximation"


def _something_to_add(recipe: Recipe) -> str | None:
    model = recipe.model
    return None if model.add_bias_linear or model.hidden_dropout else "the model has neither biases nor hidden_dropout"


def _rotation(recipe: Recipe) -> str | None:
    model = recipe.model
    if model.multi_latent_attention:
        return None if model.rope_type == "yarn" else "the kernel of latent attention needs rope_type yarn"
    return None if model.position_embedding_type == "rope" else "only position_embedding_type rope"


def _megatron(recipe: Recipe) -> str | None:
    return None if engine_name(recipe) == MEGATRON else "the gradient buffers are those of the engine megatron"


def _transformer_engine(target: Target) -> str | None:
    if target.transformer_engine:
        return None
    return "needs TransformerEngine's layers; these are megatron-core's own" + (
        f" ({target.layers_reason})" if target.layers_reason else ""
    )


def _compiler(target: Target) -> str | None:
    return target.no_compiler


def _compiled(recipe: Recipe, target: Target) -> tuple[bool, str]:
    """On where torch compiles for the device anyway, or where that is worth it."""
    if recipe.train.torch_compile:
        return True, "train.torch_compile"
    if target.device == "cuda":
        return True, "on a GPU, and a compiler is there"
    return False, "on a CPU compiling takes longer than it saves, unless train.torch_compile does it anyway"


def _in_place_of_biases(recipe: Recipe, target: Target) -> tuple[bool, str]:
    if (idle := _something_to_add(recipe)) and not recipe.train.torch_compile:
        return False, idle
    return _compiled(recipe, target)


def _rotated(recipe: Recipe, _target: Target) -> tuple[bool, str]:
    if recipe.model.multi_latent_attention:
        return False, "megatron-core calls its kernel for latent attention experimental"
    return True, "TransformerEngine's layers"


def _with_layers(_recipe: Recipe, _target: Target) -> tuple[bool, str]:
    return True, "TransformerEngine's layers"


def _anything(_recipe: Recipe) -> None:
    return None


FEATURES: Mapping[str, Feature] = {
    "bias_activation_fusion": Feature(
        "TransformerConfig.bias_activation_fusion", _swiglu, _compiler, _compiled,
        "3% of gpt-1b's step, 10% of mixtral-8x7b's, and activations of 3 widths of the MLP instead of 5",
    ),
    "bias_dropout_fusion": Feature(
        "TransformerConfig.bias_dropout_fusion", _anything, _compiler, _in_place_of_biases,
        "one pass over the residual stream instead of three",
    ),
    "apply_rope_fusion": Feature(
        "TransformerConfig.apply_rope_fusion", _rotation, _transformer_engine, _rotated,
        "with fused norms 4% of gpt-1b's step",
    ),
    "gradient_accumulation_fusion": Feature(
        "TransformerConfig.gradient_accumulation_fusion", _megatron, _transformer_engine, _with_layers,
        "2.4% of llama3-8b's step, 2 to 4% with experts; gradients are added unrounded",
    ),
}  # fmt: skip
"""Keys of `speed` by name. Gains are calculated from bytes and FLOPs, within a factor of 1.5, not measured."""


def resolve(recipe: Recipe, target: Target) -> tuple[Choice, ...]:
    """The features of a run on a machine, in the order of `FEATURES`; what is refused is off."""
    return tuple(_choice(name, feature, recipe, target) for name, feature in FEATURES.items())


def _choice(name: str, feature: Feature, recipe: Recipe, target: Target) -> Choice:
    key, wanted = f"speed.{name}", getattr(recipe.speed, name)
    obstacle = feature.recipe(recipe) or feature.target(target)
    if wanted is None:
        if obstacle:
            return Choice(key, _off(name), obstacle, "rule")
        return Choice(key, *feature.default(recipe, target), "rule")
    if obstacle and wanted != _off(name):
        return Choice(key, _off(name), obstacle, "recipe", refused=True)
    return Choice(key, wanted, "set in the recipe", "recipe")


def _off(_name: str) -> Any:
    return False


def needing_a_gpu() -> list[str]:
    """Keys of `speed` that a CPU without a compiler cannot give."""
    bare = Target("cpu", transformer_engine=False, no_compiler="none")
    return [name for name, feature in FEATURES.items() if feature.target(bare)]


def fields(choices: Iterable[Choice], kind: str) -> dict[str, Any]:
    """Values for one of megatron-core's classes, by its field."""
    values = {}
    for choice in choices:
        owner, _, field = FEATURES[choice.key.removeprefix("speed.")].field.partition(".")
        if owner == kind:
            values[field] = choice.value
    return values


def require(choices: Iterable[Choice]) -> None:
    """Refuse what a recipe asks for and cannot have.

    Raises:
        UserError: there is such a key.
    """
    for choice in choices:
        if choice.refused:
            raise UserError(
                "set, and cannot be had on this machine",
                where=choice.key,
                rule=choice.reason,
                fix=f"{choice.key}=null, which leaves it to the rule for the machine",
            )


def rules(recipe: Recipe) -> Iterator[Problem]:
    """Keys of `speed` that no machine can give the recipe."""
    for name, feature in FEATURES.items():
        wanted = getattr(recipe.speed, name)
        if wanted is not None and wanted != _off(name) and (obstacle := feature.recipe(recipe)):
            yield Problem(f"speed.{name}", f"{wanted!r}".lower(), obstacle, f"leave {name} out")
