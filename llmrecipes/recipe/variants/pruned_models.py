"""Which smaller models a run can be pruned to, and the recipe of the result.

The sizes of the new recipe say what is removed: layers, MLP width, groups of attention heads, width of the residual
stream, experts. A ratio only writes these sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Annotated

from llmrecipes.errors import UserError
from llmrecipes.options import Option
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Model, Recipe
from llmrecipes.recipe.sections.model_section import TRAINING_ONLY
from llmrecipes.recipe.variants.proxy import suffixed
from llmrecipes.recipe.variants.upcycling import problems_error, unchanged_tokens

SUFFIX = "-pruned"
STRUCTURED = {
    "depth": "remove layers by block influence (ShortGPT, arXiv 2403.03853)",
    "width": "remove neurons, heads and channels by activations (Minitron, arXiv 2407.14679)",
    "experts": "remove experts by router probability",
}
UNSTRUCTURED = {
    "magnitude": "remove weights by magnitude",
    "wanda": "remove weights by magnitude times the norm of their input (arXiv 2306.11695)",
    "sparsegpt": "remove weights that the others compensate for best (arXiv 2301.00774)",
}
METHODS = {**STRUCTURED, **UNSTRUCTURED}
AXES = ("ffn", "heads", "hidden")
PATTERNS = {"2:4": (2, 4)}
"""Of zeros among neighbours in a row, as the sparse tensor cores of GPUs multiply them."""
SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
)
"""Keys of `model` that pruning makes smaller."""
_FREE = (TRAINING_ONLY - {"make_vocab_size_divisible_by"}) | {*SIZES, "kv_channels", "moe_layer_freq"}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


@dataclass(frozen=True)
class PruneOptions:
    """What to remove; every field is an option of `prune`."""

    method: Annotated[
        str | None,
        Option("Remove depth, width or experts, or weights by magnitude, wanda or sparsegpt.", metavar="NAME"),
    ] = None
    ratio: Annotated[float | None, Option("Fraction to remove.", metavar="R")] = None
    axes: Annotated[
        tuple[str, ...],
        Option("Prune these widths: ffn, heads, hidden; default: ffn,heads.", metavar="A,...", read=_names),
    ] = ("ffn", "heads")
    pattern: Annotated[str | None, Option("Remove 2 of 4 neighbouring weights.", metavar="2:4")] = None
    into: Annotated[str | None, Option("Prune to the sizes of this recipe.", metavar="RECIPE")] = None

    @property
    def unstructured(self) -> bool:
        """Whether weights become zero and stay in their places."""
        return self.method in UNSTRUCTURED

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises:
            UserError: the first that does not.
        """
        if self.into is not None:
            for option, value in (("--method", self.method), ("--ratio", self.ratio), ("--pattern", self.pattern)):
                if value is not None:
                    raise UserError(
                        f"{value} with --into {self.into}",
                        where=option,
                        rule="with --into, the recipe sets the sizes",
                        fix=f"remove {option}, or --into",
                    )
            return
        if self.method not in METHODS:
            what = "not set" if self.method is None else repr(self.method)
            raise UserError(what, where="--method", rule=f"one of {', '.join(METHODS)}; or --into RECIPE")
        if unknown := [axis for axis in self.axes if axis not in AXES] or not self.axes:
            raise UserError(f"{unknown}", where="--axes", rule=f"a comma-separated list of {', '.join(AXES)}")
        if self.pattern is not None and (self.pattern not in PATTERNS or not self.unstructured):
            raise UserError(
                f"{self.pattern!r} with --method {self.method}",
                where="--pattern",
                rule=f"{', '.join(PATTERNS)} with --method {' or '.join(UNSTRUCTURED)}",
                fix="--ratio 0.5",
            )
        if self.pattern is not None and self.ratio is not None:
            raise UserError(
                f"{self.ratio:g} with --pattern {self.pattern}",
                where="--ratio",
                rule="the pattern determines the ratio",
                fix="remove --ratio",
            )
        if self.pattern is None and (self.ratio is None or not 0 < self.ratio < 1):
            what = "not set" if self.ratio is None else f"{self.ratio:g}"
            raise UserError(what, where="--ratio", rule="the fraction to remove, between 0 and 1", fix="--ratio 0.3")


def load_pruned(path: Path, overrides: Sequence[str], options: PruneOptions) -> tuple[Recipe, Recipe]:
    """The recipe of a run, and that of the pruned model after the overrides.

    Args:
        path: the run's resolved recipe.
        overrides: `key.path=value`; without a `name` the new recipe has the run's name with `-pruned`.
        options: what to remove.

    Raises:
        UserError: options that do not go together, or a result that is not a valid recipe or has parts that the run
            does not have; all problems at once.
    """
    options.check()
    before = load(str(path)).recipe
    if before.lora is not None:
        raise UserError(
            "the run has adapters only",
            where="lora",
            rule="only a full model can be pruned",
            fix="llmrecipes export RUN --to hf --merge-adapter, and llmrecipes import of the result",
        )
    if before.model.mtp_num_layers is not None:
        raise UserError(
            f"{before.model.mtp_num_layers}",
            where="model.mtp_num_layers",
            rule="multi-token prediction layers cannot be pruned",
            fix="train the model without them",
        )
    if options.into is not None:
        loaded = load(options.into, overrides)
    else:
        name = f"name={suffixed(before.name, SUFFIX)}"
        loaded = load(str(path), [name, *_sizes(before, options), *overrides])
    problems = list(check(before, loaded.recipe, unstructured=options.unstructured))
    if problems:
        raise problems_error(problems, loaded, "this run cannot be pruned")
    return before, loaded.recipe


def _sizes(recipe: Recipe, options: PruneOptions) -> list[str]:
    """Overrides that write the sizes a ratio leaves.

    Raises:
        UserError: nothing of something would be left, or the ratio removes nothing.
    """
    if options.unstructured:
        return ["train.keep_zeros=true"]
    model = recipe.model
    sizes = shape(recipe.model)
    kept = 1 - (options.ratio or 0)
    if options.method == "depth":
        return [f"model.num_layers={_left('layers', sizes.num_layers, kept)}"]
    if options.method == "experts":
        if model.num_moe_experts is None:
            raise UserError(
                "experts, but the model is dense",
                where="--method",
                rule="experts needs model.num_moe_experts",
                fix="--method width",
            )
        return [f"model.num_moe_experts={_left('experts', model.num_moe_experts, kept)}"]
    # Unset, they would follow from sizes that change.
    keys = {} if model.multi_latent_attention else {"kv_channels": sizes.kv_channels}
    keys["ffn_hidden_size"] = sizes.ffn_hidden_size
    if "ffn" in options.axes:
        parts = recipe.layout.tensor_model_parallel_size
        keys["ffn_hidden_size"] = _left("neurons", sizes.ffn_hidden_size, kept, lcm(8, parts))
        if model.num_moe_experts:
            parts = recipe.layout.expert_tensor_parallel_size or parts
            keys["moe_ffn_hidden_size"] = _left("neurons of an expert", sizes.moe_ffn_hidden_size, kept, lcm(8, parts))
    if "heads" in options.axes:
        groups = _left("groups of heads", sizes.num_query_groups, kept)
        keys["num_attention_heads"] = groups * (sizes.num_attention_heads // sizes.num_query_groups)
        if model.num_query_groups is not None:
            keys["num_query_groups"] = groups
    if "hidden" in options.axes:
        keys["hidden_size"] = _left("channels", sizes.hidden_size, kept, 8)
    return [f"model.{key}={value}" for key, value in keys.items()]


def _left(what: str, number: int, share: float, multiple: int = 1) -> int:
    """How many of `number` stay, rounded to a multiple."""
    left = round(number * share / multiple) * multiple
    if left < 1:
        raise UserError(
            f"removing {1 - share:g} of {number} {what} leaves none",
            where="--ratio",
            rule=f"at least {multiple} {what} must remain",
            fix=f"--ratio {max(0.0, 1 - multiple / number):.2f}",
        )
    if left >= number:
        raise UserError(
            f"{1 - share:g} of {number} {what} rounds to none",
            where="--ratio",
            rule=f"the number of remaining {what} must be a multiple of {multiple}",
            fix="a larger --ratio",
        )
    return left


def check(before: Recipe, after: Recipe, *, unstructured: bool) -> Iterator[Problem]:
    """What keeps the new model from being made of parts of the run's."""
    old = shape(before.model)
    new = shape(after.model)
    ours = before.model
    theirs = after.model
    if before.name == after.name:
        yield Problem(
            "name", f"{after.name!r} is the run's name", "the new model needs a different name", "remove name"
        )
    pairs = {
        "num_layers": (old.num_layers, new.num_layers),
        "hidden_size": (old.hidden_size, new.hidden_size),
        "ffn_hidden_size": (old.ffn_hidden_size, new.ffn_hidden_size),
        "num_query_groups": (old.num_query_groups, new.num_query_groups),
        "num_moe_experts": (old.num_moe_experts, new.num_moe_experts),
        "moe_ffn_hidden_size": (old.moe_ffn_hidden_size, new.moe_ffn_hidden_size),
        "moe_shared_expert_intermediate_size": (old.moe_shared_ffn_hidden_size, new.moe_shared_ffn_hidden_size),
    }
    for key, (was, now) in pairs.items():
        if key.startswith("moe_") and not old.num_moe_experts:
            continue
        optional = key == "moe_shared_expert_intermediate_size" or not was
        if now > was or (was and not now and not optional):
            yield Problem(f"model.{key}", f"{now} in the new recipe, {was} in the run", "pruning can only reduce sizes")
    if not unstructured and all(was == now for was, now in pairs.values()):
        yield Problem(
            "model", "same sizes as the run", "pruning must remove something", "--ratio, or a recipe with smaller sizes"
        )
    share = old.num_attention_heads // old.num_query_groups
    if new.num_attention_heads != new.num_query_groups * share:
        yield Problem(
            "model.num_attention_heads",
            f"{new.num_attention_heads} with {new.num_query_groups} groups",
            f"heads are removed in groups of {share}, with their key and value head",
            f"num_attention_heads {new.num_query_groups * share}",
        )
    if old.kv_channels != new.kv_channels:
        yield Problem(
            "model.kv_channels",
            f"{new.kv_channels} in the new recipe, {old.kv_channels} in the run",
            "the channels per head cannot change",
            f"kv_channels {old.kv_channels}",
        )
    if ours.multi_latent_attention and (old.num_attention_heads, old.hidden_size) != (
        new.num_attention_heads,
        new.hidden_size,
    ):
        yield Problem(
            "model.multi_latent_attention",
            "true with fewer heads or channels",
            "with latent attention, only layers, neurons and experts can be removed",
            "--axes ffn",
        )
    if ours.softmax_type == "learnable" and old.num_attention_heads != new.num_attention_heads:
        yield Problem("model.softmax_type", "learnable with fewer heads", "sinks are not removed", "--axes ffn,hidden")
    if ours.use_mup and old.hidden_size != new.hidden_size:
        yield Problem(
            "model.hidden_size",
            f"{new.hidden_size} with use_mup",
            "the scaling factors of use_mup depend on the width",
            "--axes ffn,heads",
        )
    if ours.moe_router_num_groups and old.num_moe_experts != new.num_moe_experts:
        yield Problem(
            "model.num_moe_experts",
            f"{new.num_moe_experts} with moe_router_num_groups",
            "experts cannot be removed from expert groups",
            "--method width",
        )
    kinds = ours.moe_layer_freq if isinstance(ours.moe_layer_freq, list) else [0, 1][: ours.moe_layer_freq]
    if ours.num_moe_experts and old.num_layers != new.num_layers and len(set(kinds)) > 1:
        yield Problem(
            "model.num_layers",
            f"{new.num_layers} with moe_layer_freq {ours.moe_layer_freq}",
            "layers can only be removed if all layers are of one kind",
            "--method width or experts",
        )
    by_layer = [name for name in ("window_attn_skip_freq", "no_rope_freq") if getattr(ours, name) is not None]
    if by_layer and old.num_layers != new.num_layers:
        yield Problem(
            "model.num_layers",
            f"{new.num_layers} with {by_layer[0]} {getattr(ours, by_layer[0])}",
            "layers can only be removed if all layers are of one kind",
            "--method width or experts",
        )
    learned = ours.position_embedding_type == "learned_absolute"
    if learned and old.max_position_embeddings != new.max_position_embeddings:
        yield Problem(
            "model.max_position_embeddings",
            f"{new.max_position_embeddings}, but {old.max_position_embeddings} in the run",
            "the table of positions cannot change",
            f"max_position_embeddings {old.max_position_embeddings}",
        )
    yield from _unchanged(ours, theirs)
    yield from unchanged_tokens(before, after, "prune a run that uses a Hugging Face tokenizer")


def _unchanged(ours: Model, theirs: Model) -> Iterator[Problem]:
    for key in type(ours).model_fields:
        was, now = getattr(ours, key), getattr(theirs, key)
        if was != now and key not in _FREE and not (key.startswith("moe_") and theirs.num_moe_experts is None):
            yield Problem(
                f"model.{key}",
                f"{now} in the new recipe, {was} in the run",
                "everything that is not removed must stay the same",
                f"{key} {str(was).lower() if isinstance(was, bool) else was}",
            )
    if ours.num_moe_experts and ours.moe_layer_freq != theirs.moe_layer_freq:
        yield Problem(
            "model.moe_layer_freq",
            f"{theirs.moe_layer_freq} in the new recipe",
            "experts must stay in the same layers",
            f"moe_layer_freq {ours.moe_layer_freq}",
        )
