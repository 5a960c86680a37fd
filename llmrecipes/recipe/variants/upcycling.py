"""Which mixtures of experts a dense model can become without changing what it computes.

Every expert starts as a copy of the dense MLP (sparse upcycling, arXiv 2212.05055). Whichever experts a token is routed
to, it then gets the dense MLP's output, if none is dropped and their probabilities sum to one (arXiv 2410.07524,
section 3, on the order of softmax and top-k).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.load import Loaded, load
from llmrecipes.recipe.rules.extra_rules import inexact
from llmrecipes.recipe.schema import Model, Recipe
from llmrecipes.recipe.variants.proxy import suffixed

SUFFIX = "-moe"


def load_upcycled(path: Path, overrides: Sequence[str]) -> tuple[Recipe, Recipe]:
    """The recipe of a dense run, and that of the mixture of experts after the overrides.

    Args:
        path: the dense run's resolved recipe.
        overrides: `key.path=value`; without a `name` the new recipe has the name of the dense one with `-moe`.

    Raises:
        UserError: the result is not a valid recipe, or does not continue the dense model exactly; all problems at once.
    """
    dense = load(str(path)).recipe
    name = f"name={suffixed(dense.name, SUFFIX)}"
    loaded = load(str(path), [name, *overrides])
    if problems := list(check(dense, loaded.recipe)):
        raise problems_error(problems, loaded, "this run cannot be upcycled")
    return dense, loaded.recipe


def check(dense: Recipe, moe: Recipe) -> Iterator[Problem]:
    """Differences that keep the new model from computing the same as the dense one."""
    if dense.model.num_moe_experts is not None:
        yield Problem(
            "model.num_moe_experts",
            f"the run already has {dense.model.num_moe_experts} experts",
            "only dense models can be upcycled",
        )
        return
    if dense.lora is not None:
        yield Problem(
            "lora",
            "the run has adapters only",
            "only a full model can be upcycled",
            "llmrecipes export RUN --to hf --merge-adapter, and llmrecipes import of the result",
        )
        return
    if moe.model.num_moe_experts is None:
        yield Problem(
            "model.num_moe_experts",
            "not set",
            "the new recipe must have experts",
            "model.num_moe_experts=8 model.moe_router_topk=2",
        )
        return
    if moe.name == dense.name:
        yield Problem(
            "name", f"{moe.name!r} is the dense run's name", "the new model needs a different name", "remove name"
        )
    yield from inexact(moe.model, "upcycle")
    yield from _router(moe.model)
    yield from _experts(moe.model)
    yield from _unchanged(dense, moe)


def _router(model: Model) -> Iterator[Problem]:
    all_experts = model.moe_router_topk == model.num_moe_experts
    sums = "the probabilities of a token's experts must sum to one"
    if model.moe_router_score_function == "softmax" and model.moe_router_pre_softmax and not all_experts:
        yield Problem(
            "model.moe_router_pre_softmax",
            f"true with {model.moe_router_topk} of {model.num_moe_experts} experts",
            sums,
            "model.moe_router_pre_softmax=false",
        )
    if model.moe_router_score_function == "sigmoid" and model.moe_router_topk == 1:
        yield Problem("model.moe_router_topk", "1 with sigmoid scores", sums, "model.moe_router_topk=2")
    if model.moe_router_topk_scaling_factor not in (None, 1.0):
        yield Problem(
            "model.moe_router_topk_scaling_factor",
            f"{model.moe_router_topk_scaling_factor:g}",
            sums,
            "model.moe_router_topk_scaling_factor=null",
        )


def _experts(model: Model) -> Iterator[Problem]:
    sizes = shape(model)
    if sizes.moe_ffn_hidden_size != sizes.ffn_hidden_size:
        yield Problem(
            "model.moe_ffn_hidden_size",
            f"{sizes.moe_ffn_hidden_size} for a dense MLP of {sizes.ffn_hidden_size}",
            "every expert is a full copy of the dense MLP",
            f"model.moe_ffn_hidden_size={sizes.ffn_hidden_size}",
        )
    if sizes.moe_shared_ffn_hidden_size:
        yield Problem(
            "model.moe_shared_expert_intermediate_size",
            f"{sizes.moe_shared_ffn_hidden_size}",
            "shared experts would add to the output of the copied MLPs",
            "model.moe_shared_expert_intermediate_size=null",
        )
    if model.moe_expert_capacity_factor is not None:
        yield Problem(
            "model.moe_expert_capacity_factor",
            f"{model.moe_expert_capacity_factor:g}",
            "a full expert drops tokens, which then lose part of their MLP output",
            "model.moe_expert_capacity_factor=null",
        )


def _unchanged(dense: Recipe, moe: Recipe) -> Iterator[Problem]:
    """Upcycling changes MLPs, not the rest of the model nor the meaning of token ids."""
    for name in Model.model_fields:
        before, after = getattr(dense.model, name), getattr(moe.model, name)
        if before == after or name.startswith("moe_") or name in ("num_moe_experts", "transformer_impl"):
            continue
        yield Problem(
            f"model.{name}",
            f"{after} in the new recipe, {before} in the dense run",
            "everything except the experts must be the same as in the dense model",
            f"remove it, or train the dense model with model.{name}={str(after).lower()}",
        )
    yield from unchanged_tokens(dense, moe, "upcycle a run that uses a Hugging Face tokenizer")


def unchanged_tokens(before: Recipe, after: Recipe, otherwise: str) -> Iterator[Problem]:
    """Differences that change which token a number stands for.

    Args:
        otherwise: what else the user may do than leave out the change.
    """
    same = ["tokenizer"]
    if after.data.tokenizer.type == "bpe":
        same += ["sources", "split"]  # it is trained on them
    for name in same:
        if getattr(before.data, name) != getattr(after.data, name):
            yield Problem(
                f"data.{name}",
                "different from the run's",
                "token ids must keep their meaning, so the tokenizer and its training data must stay the same",
                f"remove it, or {otherwise}",
            )


def problems_error(problems: list[Problem], loaded: Loaded, title: str) -> UserError:
    """One error of all problems, with their places in the recipe."""
    errors = [
        UserError(problem.what, where=f"{loaded.where(problem.key)}: {problem.key}", rule=problem.rule, fix=problem.fix)
        for problem in problems
    ]
    if len(errors) == 1:
        return errors[0]
    what = "\n".join([f"{len(errors)} problems: {title}", *(str(error) for error in errors)])
    return UserError(what, where=str(loaded.path), parts=errors)
