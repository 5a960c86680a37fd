"""Rules of optimizer and schedule, and what an optimizer whose state has several types needs."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Literal

from llmrecipes.errors import UserError
from llmrecipes.recipe.derived.freezing import parameters
from llmrecipes.recipe.derived.stages import decay_iters, schedule_iters
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.engines import MEGATRON, engine_name
from llmrecipes.recipe.schema import Model, Optimizer, Recipe

KEY = "optimizer.use_precision_aware_optimizer"


def small(optimizer: Optimizer, model: Model) -> Optimizer:
    """The same for a small model: moments in fp32, which every machine has, and groups of parameters that it has."""
    used = _used(optimizer, model)
    update = {"use_precision_aware_optimizer": False, "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"}
    groups = tuple(each for each in optimizer.groups if each.pattern in used)
    return optimizer.model_copy(update={**update, "groups": groups})


def _used(optimizer: Optimizer, model: Model) -> set[str]:
    """Patterns of the groups that parameters of the model belong to, each to the first that it matches."""
    patterns = [each.pattern for each in optimizer.groups]
    first = (next((each for each in patterns if fnmatchcase(name, each)), None) for name in parameters(model))
    return {each for each in first if each is not None} if patterns else set()


def types(recipe: Recipe) -> Iterator[Problem]:
    """What no machine can give."""
    optimizer = recipe.optimizer
    if not optimizer.use_precision_aware_optimizer:
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            if (value := getattr(optimizer, name)) != "fp32":
                yield Problem(f"optimizer.{name}", f"{value} with use_precision_aware_optimizer false",
                              "only the precision-aware optimizer supports other types than fp32",
                              "use_precision_aware_optimizer true, or fp32")  # fmt: skip
        return
    off = "use_precision_aware_optimizer false"
    if optimizer.optimizer != "adam":
        yield Problem(KEY, f"true with optimizer.optimizer {optimizer.optimizer}",
                      "only AdamW supports other types of moments", off)  # fmt: skip
    if engine_name(recipe) != MEGATRON:
        yield Problem(KEY, "true with engine deepspeed", "DeepSpeed uses its own optimizers", off)
    elif not recipe.layout.use_distributed_optimizer:
        yield Problem(KEY, "true with use_distributed_optimizer false",
                      "needs megatron-core's distributed optimizer",
                      f"use_distributed_optimizer true, or {off}")  # fmt: skip
    if recipe.train.precision != "bf16":
        yield Problem(KEY, f"true with precision {recipe.train.precision}",
                      "the precision-aware optimizer needs bf16 weights", f"precision bf16, or {off}")  # fmt: skip


def require_fused_adam(recipe: Recipe, device: Literal["cpu", "cuda"]) -> None:
    """Refuse a machine that has no FusedAdam of TransformerEngine, which computes on GPUs.

    Raises:
        UserError: it has none, and the recipe needs it.
    """
    if recipe.optimizer.use_precision_aware_optimizer and device == "cpu":
        raise UserError(
            "on a CPU", where=KEY, rule="TransformerEngine's FusedAdam needs a GPU", fix=f"{KEY}=false",
        )  # fmt: skip


def qk_clip(recipe: Recipe) -> Iterator[Problem]:
    """What goes with scaling queries and keys."""
    optimizer = recipe.optimizer
    model = recipe.model
    chat = recipe.data.chat
    if not optimizer.qk_clip:
        return
    obstacles = {
        "lora": (recipe.lora is not None, "the weights that QK-clip would scale are frozen", "remove qk_clip or lora"),
        "model.qk_layernorm": (
            model.qk_layernorm and not model.multi_latent_attention,
            "the norm of queries and keys undoes the scaling, and already bounds the logits", "qk_clip false",
        ),
        "model.mtp_num_layers": (
            model.mtp_num_layers is not None, "QK-clip does not scale multi-token prediction layers",
            "remove mtp_num_layers",
        ),
        "data.chat.packing": (
            chat is not None and chat.packing, "the logits of packed conversations cannot be measured",
            "packing false",
        ),
        "layout.torch_compile": (
            recipe.layout.torch_compile, "the queries of a compiled layer cannot be read", "remove torch_compile",
        ),
        "layout.cuda_graph_impl": (
            recipe.layout.cuda_graph_impl is not None, "the queries of a captured layer cannot be read",
            "remove cuda_graph_impl",
        ),
        KEY: (
            optimizer.use_precision_aware_optimizer, "its kernel updates weights and master weights together",
            "use_precision_aware_optimizer false",
        ),
    }  # fmt: skip
    for key, (wrong, rule, fix) in obstacles.items():
        if wrong:
            yield Problem(key, "set with optimizer.qk_clip", rule, fix)


def learning_rate(recipe: Recipe) -> Iterator[Problem]:
    optimizer = recipe.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield Problem(
            "optimizer.min_lr",
            f"{optimizer.min_lr:g} is above lr {optimizer.lr:g}",
            "min_lr must be at most lr",
            f"min_lr {optimizer.lr / 10:g}",
        )


def schedule(recipe: Recipe) -> Iterator[Problem]:
    keys = recipe.scheduler
    decay = decay_iters(recipe)
    decay_name = "lr_decay_iters" if keys.lr_decay_iters else "train.train_iters"
    warmup = keys.lr_warmup_iters
    if warmup >= decay:
        yield Problem(
            "scheduler.lr_warmup_iters",
            f"{warmup} is not less than {decay_name} {decay}",
            "the warm-up must end before the decay",
            f"lr_warmup_iters {decay // 10}",
        )
    wsd = keys.lr_wsd_decay_iters
    if keys.lr_decay_style != "WSD":
        if wsd is not None:
            yield Problem(
                "scheduler.lr_wsd_decay_iters",
                f"set with lr_decay_style {keys.lr_decay_style}",
                "lr_wsd_decay_iters is only used with lr_decay_style WSD",
                "remove it, or lr_decay_style WSD",
            )
    elif wsd is None:
        yield Problem(
            "scheduler.lr_decay_style",
            "WSD without lr_wsd_decay_iters",
            "WSD needs lr_wsd_decay_iters, the length of its final decay",
            f"lr_wsd_decay_iters {max(1, (decay - warmup) // 5)}",
        )
    elif wsd > decay - warmup > 0:
        yield Problem(
            "scheduler.lr_wsd_decay_iters",
            f"{wsd} is more than {decay_name} {decay} minus lr_warmup_iters {warmup}",
            "WSD's final decay must begin after the warm-up",
            f"at most {decay - warmup}",
        )
    yield from _warmup(recipe)
    if (
        keys.lr_decay_style != "polynomial"
        and keys.lr_polynomial_power != type(keys).model_fields["lr_polynomial_power"].default
    ):
        yield Problem(
            "scheduler.lr_polynomial_power",
            f"{keys.lr_polynomial_power:g} with lr_decay_style {keys.lr_decay_style}",
            "lr_polynomial_power is only used with lr_decay_style polynomial",
            "remove it, or lr_decay_style polynomial",
        )
    yield from _inverse_square_root(recipe)


def _inverse_square_root(recipe: Recipe) -> Iterator[Problem]:
    keys, optimizer = recipe.scheduler, recipe.optimizer
    if keys.lr_decay_style != "inverse-square-root":
        return
    decay = decay_iters(recipe)
    steps = schedule_iters(recipe)
    warmup = keys.lr_warmup_iters
    if not warmup:
        yield Problem(
            "scheduler.lr_warmup_iters",
            "0 with lr_decay_style inverse-square-root",
            "the inverse square root needs a warm-up: without one, the rate halves within 4 steps",
            f"lr_warmup_iters {max(1, decay // 10)}",
        )
    # This decay does not reach min_lr by itself, so that megatron-core's rate falls at once.
    last = optimizer.lr * (warmup / decay) ** 0.5
    if decay < steps and last > optimizer.min_lr:
        yield Problem(
            "scheduler.lr_decay_iters",
            f"{decay} of {steps} steps with lr_decay_style inverse-square-root",
            f"after lr_decay_iters the rate is min_lr: it would fall from {last:.2g} to {optimizer.min_lr:g} at once",
            f"remove it, or lr_decay_iters {steps}",
        )


def groups(recipe: Recipe) -> Iterator[Problem]:
    """What parameter groups go with."""
    all_groups = recipe.optimizer.groups
    if all_groups and recipe.model.use_mup:
        yield Problem(
            "optimizer.groups",
            "set with model.use_mup",
            "the maximal-update parametrisation already sets learning rates by parameter",
            "remove one of them",
        )
    for number, each in enumerate(all_groups):
        if each.lr_mult == each.wd_mult == 1.0:
            yield Problem(
                f"optimizer.groups.{number}",
                "lr_mult and wd_mult are both 1",
                "a group must change the learning rate or weight decay",
                "set one of them, or remove the group",
            )
        if [other.pattern for other in all_groups].index(each.pattern) != number:
            yield Problem(
                f"optimizer.groups.{number}.pattern",
                f"{each.pattern!r} appears twice",
                "a parameter belongs to the first group whose pattern it matches",
                "remove it",
            )
    if not all_groups or recipe.lora is not None or recipe.model.mtp_num_layers is not None:
        return  # ranks compare what they build, also adapters and layers of multi-token prediction
    used = _used(recipe.optimizer, recipe.model)
    names = list(parameters(recipe.model))
    for number, each in enumerate(all_groups):
        if each.pattern not in used and [other.pattern for other in all_groups].index(each.pattern) == number:
            yield Problem(
                f"optimizer.groups.{number}.pattern",
                f"no parameter belongs to {each.pattern!r}",
                "a pattern must match a parameter that no earlier pattern matches",
                f"a pattern of names such as {', '.join(names[:: max(1, len(names) // 4)])}",
            )


def _warmup(recipe: Recipe) -> Iterator[Problem]:
    keys = recipe.scheduler
    if keys.lr_warmup_init > recipe.optimizer.lr:
        yield Problem(
            "scheduler.lr_warmup_init",
            f"{keys.lr_warmup_init:g} is above optimizer.lr {recipe.optimizer.lr:g}",
            "the learning rate must rise to optimizer.lr in the warm-up",
            f"lr_warmup_init {recipe.optimizer.lr / 100:g}",
        )
    if keys.lr_warmup_style == "exponential" and not keys.lr_warmup_init:
        yield Problem(
            "scheduler.lr_warmup_style",
            "exponential from 0",
            "an exponential warm-up must start above 0",
            f"lr_warmup_init {recipe.optimizer.lr / 100:g}",
        )
