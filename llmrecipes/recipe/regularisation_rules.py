"""Rules of what is added to training against overfitting: moved embeddings, and layers that are left out."""

from __future__ import annotations

from collections.abc import Iterator

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.engines import MEGATRON, engine_name
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
                f"train.adversarial.{key}", f"{value} with type fgm", "fgm moves once, by epsilon",
                f"leave {key} out, or type pgd",
            )  # fmt: skip
        if section.type != "fgm" and value is None:
            yield Problem(
                f"train.adversarial.{key}", f"unset with type {section.type}",
                f"{section.type} makes steps movements of length alpha", f"{key} {3 if key == 'steps' else 0.1}",
            )  # fmt: skip
    if section.type == "freelb" and section.steps == 1:
        yield Problem(
            "train.adversarial.steps", "1 with type freelb", "the last movement of freelb is not trained on",
            "steps 2, or type pgd",
        )  # fmt: skip
    for key, (wrong, rule, fix) in _obstacles(recipe).items():
        if wrong:
            yield Problem(key, "set with train.adversarial", rule, fix)


def _obstacles(recipe: Recipe) -> dict[str, tuple[bool, str, str]]:
    model, speed = recipe.model, recipe.speed
    return {
        "engine": (
            engine_name(recipe) != MEGATRON, "the engine megatron makes the passes of a step",
            "engine megatron without zero.stage 2, 3 and offload",
        ),
        "dpo": (recipe.dpo is not None, "the reference passes each micro-batch once", "leave dpo out"),
        "distill": (recipe.distill is not None, "a teacher passes each micro-batch once", "leave distill out"),
        "model.num_moe_experts": (
            model.num_moe_experts is not None,
            "routers balance over the sequences of a micro-batch, so that one moves the others",
            "leave num_moe_experts out",
        ),
        "model.mtp_num_layers": (
            model.mtp_num_layers is not None, "multi-token prediction embeds the tokens a second time",
            "leave mtp_num_layers out",
        ),
        "speed.cuda_graph_impl": (
            speed.cuda_graph_impl is not None, "recorded layers pass each micro-batch once",
            "leave cuda_graph_impl out",
        ),
        "speed.align_param_gather": (
            bool(speed.align_param_gather), "only the first pass of a step gathers parameters",
            "leave align_param_gather out",
        ),
        "tracking.layers_interval": (
            recipe.tracking.layers_interval is not None, "layers are measured in one pass",
            "leave layers_interval out",
        ),
    }  # fmt: skip


def layer_drop(recipe: Recipe) -> Iterator[Problem]:
    """What goes with `model.layer_drop`."""
    if not recipe.model.layer_drop:
        return
    speed, parallel = recipe.speed, recipe.parallelism
    obstacles = {
        "engine": (
            engine_name(recipe) != MEGATRON, "the engine megatron leaves layers out",
            "engine megatron without zero.stage 2, 3 and offload",
        ),
        "dpo": (recipe.dpo is not None, "the reference has all layers", "leave dpo out"),
        "model.num_moe_experts": (
            recipe.model.num_moe_experts is not None,
            "ranks that share experts have different micro-batches, and would wait for one that left the layer out",
            "leave num_moe_experts out",
        ),
        "parallelism.overlap_grad_reduce": (
            parallel.overlap_grad_reduce, "a gradient is reduced once the last micro-batch has computed it",
            "overlap_grad_reduce false",
        ),
        "train.torch_compile": (
            recipe.train.torch_compile, "a compiled layer is always there", "leave torch_compile out",
        ),
        "speed.cuda_graph_impl": (
            speed.cuda_graph_impl is not None, "a recorded layer is always there", "leave cuda_graph_impl out",
        ),
        "speed.fp8": (
            speed.fp8 is not None, "ranks share the scales of the layers that all of them have", "leave fp8 out",
        ),
    }  # fmt: skip
    for key, (wrong, rule, fix) in obstacles.items():
        if wrong:
            yield Problem(key, "set with model.layer_drop", rule, fix)
