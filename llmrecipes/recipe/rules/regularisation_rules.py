"""Rules of what is added to training against overfitting: moved embeddings, and layers that are left out."""

from __future__ import annotations

from collections.abc import Iterator

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Recipe


def adversarial(recipe: Recipe) -> Iterator[Problem]:
    """What goes with `train.adversarial`."""
    section = recipe.train.adversarial
    if section is None:
        return
    for key in ("alpha", "steps"):
        value = getattr(section, key)
        if section.type == "fgm" and value is not None:
            yield Problem(
                f"train.adversarial.{key}",
                f"{value} with type fgm",
                "fgm makes a single step of length epsilon",
                f"remove {key}, or type pgd",
            )
        if section.type != "fgm" and value is None:
            yield Problem(
                f"train.adversarial.{key}",
                f"unset with type {section.type}",
                f"{section.type} makes `steps` steps of length alpha",
                f"{key} {3 if key == 'steps' else 0.1}",
            )
    if section.type == "freelb" and section.steps == 1:
        yield Problem(
            "train.adversarial.steps",
            "1 with type freelb",
            "freelb does not train on its last step, so it needs at least 2",
            "steps 2, or type pgd",
        )
    for key, (wrong, rule, fix) in _obstacles(recipe).items():
        if wrong:
            yield Problem(key, "set with train.adversarial", rule, fix)


def _obstacles(recipe: Recipe) -> dict[str, tuple[bool, str, str]]:
    model, layout = recipe.model, recipe.layout
    return {
        "dpo": (recipe.dpo is not None, "the reference model computes every micro-batch only once", "remove dpo"),
        "distill": (recipe.distill is not None, "the teacher computes every micro-batch only once", "remove distill"),
        "model.num_moe_experts": (
            model.num_moe_experts is not None,
            "routers balance over the sequences of a micro-batch, so a perturbed sequence would affect the others",
            "remove num_moe_experts",
        ),
        "model.mtp_num_layers": (
            model.mtp_num_layers is not None,
            "multi-token prediction embeds the tokens again",
            "remove mtp_num_layers",
        ),
        "layout.cuda_graph_impl": (
            layout.cuda_graph_impl is not None,
            "captured layers compute every micro-batch only once",
            "remove cuda_graph_impl",
        ),
        "layout.align_param_gather": (
            bool(layout.align_param_gather),
            "parameters are only gathered in the first pass of a step",
            "remove align_param_gather",
        ),
        "tracking.layers_interval": (
            recipe.tracking.layers_interval is not None,
            "layers can only be measured with a single pass per step",
            "remove layers_interval",
        ),
    }


def layer_drop(recipe: Recipe) -> Iterator[Problem]:
    """What goes with `model.layer_drop`."""
    if not recipe.model.layer_drop:
        return
    layout = recipe.layout
    obstacles = {
        "dpo": (recipe.dpo is not None, "the reference model uses all layers", "remove dpo"),
        "model.num_moe_experts": (
            recipe.model.num_moe_experts is not None,
            "ranks that share experts have different micro-batches, and would wait for a rank that skipped the layer",
            "remove num_moe_experts",
        ),
        "layout.overlap_grad_reduce": (
            layout.overlap_grad_reduce,
            "gradients are reduced when the last micro-batch has computed them, which a skipped layer never does",
            "overlap_grad_reduce false",
        ),
        "layout.torch_compile": (
            recipe.layout.torch_compile,
            "compiled layers cannot be skipped",
            "remove torch_compile",
        ),
        "layout.cuda_graph_impl": (
            layout.cuda_graph_impl is not None,
            "captured layers cannot be skipped",
            "remove cuda_graph_impl",
        ),
        "train.fp8": (
            recipe.train.fp8 is not None,
            "ranks share scales, so all of them must compute every layer",
            "remove fp8",
        ),
    }
    for key, (wrong, rule, fix) in obstacles.items():
        if wrong:
            yield Problem(key, "set with model.layer_drop", rule, fix)
