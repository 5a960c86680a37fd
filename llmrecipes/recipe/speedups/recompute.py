"""Keys of recomputation: what each of megatron-core's modules needs, and what goes with what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from llmrecipes.recipe.derived.freezing import frozen_weights
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.graphs import not_recomputed


@dataclass(frozen=True)
class Module:
    """One value of `layout.recompute_modules`; with the names of megatron-core.

    Attributes:
        needs: a setting without which there is nothing of the kind in the model.
        applies: whether a recipe has it.
        inside: modules that recompute it already.
        discards: its result is discarded as well as what it keeps inside, and restored in the backward pass before
            the next module needs it.
    """

    needs: str
    applies: Callable[[Recipe], bool]
    inside: tuple[str, ...] = ()
    discards: bool = False


MODULES: dict[str, Module] = {
    "core_attn": Module("", lambda recipe: True),
    "layernorm": Module("", lambda recipe: True, discards=True),
    "mla_up_proj": Module(
        "model.multi_latent_attention true", lambda recipe: recipe.model.multi_latent_attention, discards=True
    ),
    "mlp": Module("a dense layer", lambda recipe: _dense_layers(recipe) > 0),
    "moe_act": Module(
        "model.num_moe_experts", lambda recipe: bool(recipe.model.num_moe_experts), inside=("moe",), discards=True
    ),
    "shared_experts": Module(
        "model.moe_shared_expert_intermediate_size",
        lambda recipe: bool(recipe.model.num_moe_experts and recipe.model.moe_shared_expert_intermediate_size),
        inside=("moe",),
    ),
    "moe": Module("model.num_moe_experts", lambda recipe: bool(recipe.model.num_moe_experts)),
}


def recomputation(granularity: str | None = None, **keys: object) -> dict[str, object]:
    """All keys of recomputation, of which `method`, `num_layers` and `modules` are null unless given."""
    others = {f"recompute_{name}": keys.get(name) for name in ("method", "num_layers", "modules")}
    return {"recompute_granularity": granularity, **others}


ALL_LAYERS = recomputation("full", method="uniform", num_layers=1)


def _dense_layers(recipe: Recipe) -> int:
    s = shape(recipe.model)
    return s.num_layers - s.moe_layers(0, s.num_layers)


def rules(recipe: Recipe) -> Iterator[Problem]:
    """What is wrong with the keys of recomputation."""
    keys = recipe.layout
    parts = {"recompute_method": keys.recompute_method, "recompute_num_layers": keys.recompute_num_layers}
    if keys.recompute_granularity == "full":
        yield from _full(recipe, parts)
    else:
        for name, value in parts.items():
            if value is not None:
                yield _only_with(recipe, name, "full")
    if keys.recompute_modules is None:
        return
    if keys.recompute_granularity == "selective":
        yield from _modules(recipe, keys.recompute_modules)
    else:
        yield _only_with(recipe, "recompute_modules", "selective")


def _only_with(recipe: Recipe, name: str, granularity: str) -> Problem:
    return Problem(
        f"layout.{name}",
        f"set with recompute_granularity {recipe.layout.recompute_granularity or 'null'}",
        f"{name} is only used with recompute_granularity {granularity}",
        f"remove {name}, or recompute_granularity {granularity}",
    )


def _full(recipe: Recipe, parts: Mapping[str, str | int | None]) -> Iterator[Problem]:
    for name, value in parts.items():
        if value is None:
            yield Problem(
                "layout.recompute_granularity",
                f"full without {name}",
                "full recomputation needs recompute_method and recompute_num_layers",
                "recompute_method uniform" if name == "recompute_method" else "recompute_num_layers 1",
            )
    layers = recipe.layout.recompute_num_layers
    if layers is not None and layers > recipe.model.num_layers:
        yield Problem(
            "layout.recompute_num_layers",
            f"{layers} of {recipe.model.num_layers} layers",
            "recompute_num_layers must be at most model.num_layers",
            f"recompute_num_layers {recipe.model.num_layers}",
        )


def possible(recipe: Recipe) -> list[str]:
    """Modules that may be recomputed in the recipe, if nothing else is."""
    overlapped = {"shared_experts", "moe"} if recipe.layout.moe_shared_expert_overlap else set()
    overlapped |= {"moe"} if recipe.layout.overlap_moe_expert_parallel_comm else set()
    overlapped |= not_recomputed(recipe)
    return [name for name in MODULES if name not in overlapped and next(_modules(recipe, (name,)), None) is None]


def _modules(recipe: Recipe, names: tuple[str, ...]) -> Iterator[Problem]:
    key = "layout.recompute_modules"
    if len(set(names)) < len(names):
        different = ", ".join(dict.fromkeys(names))
        yield Problem(key, f"[{', '.join(names)}]", "a module may appear only once", f"recompute_modules [{different}]")
    for name in dict.fromkeys(names):
        module = MODULES[name]
        left = f"remove {name} from recompute_modules"
        if not module.applies(recipe):
            yield Problem(key, f"{name} without {module.needs}", f"{name} needs {module.needs}", left)
        for outer in module.inside:
            if outer in names:
                yield Problem(key, f"{name} with {outer}", f"{outer} already recomputes {name}", left)
        if name != "core_attn" and (obstacle := obstacle_to_modules(recipe)):
            yield Problem(key, f"{name} with {obstacle[0]}", obstacle[1], f"{left}, or recompute_granularity full")
    if "mlp" in names and recipe.model.add_bias_linear:
        yield Problem(
            key,
            "mlp with model.add_bias_linear true",
            "the MLP also returns its bias, and megatron-core's backward pass hangs on a recomputed parameter",
            "add_bias_linear false, remove mlp from recompute_modules, or recompute_granularity full",
        )
    if "moe_act" in names and recipe.model.transformer_impl == "local":
        yield Problem(
            key,
            "moe_act with transformer_impl local",
            "moe_act needs TransformerEngine's grouped GEMMs",
            "moe, or transformer_impl auto",
        )


def obstacle_to_modules(recipe: Recipe) -> tuple[str, str] | None:
    """A key with which core attention is the only module that can be recomputed, and the reason."""
    if recipe.layout.torch_compile:
        return "layout.torch_compile true", "compiled layers can only be recomputed as a whole or in core attention"
    if key := frozen_weights(recipe):
        return key, "the input of a frozen layer has no gradient to trigger the recomputation"
    if recipe.layout.zero is not None and recipe.layout.zero.stage == 3:
        return "layout.zero.stage 3", "ZeRO 3 gathers the weights of a module only in its own forward and backward pass"
    return None
