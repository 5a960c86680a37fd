"""What recipes add to a training step: each is a part of an engine (`engine.parts`), and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.engines import DEEPSPEED, MEGATRON, engine_name
from llmrecipes.recipe.rules.distill_rules import has_teacher
from llmrecipes.recipe.schema import Recipe

_BOTH = (MEGATRON, DEEPSPEED)


@dataclass(frozen=True)
class StepPart:
    """A part of a training step."""

    part: str
    """`module:class` of its `engine.parts.base.Part`, imported on demand."""
    key: str | None = None
    """Of the recipe, that switches it on; None: every run has it, on engines that take it."""
    engines: tuple[str, ...] = (MEGATRON,)
    """Those that take it; the others refuse the key."""
    what: str | None = None
    """What these do not support; None: the name of the key."""
    where: Callable[[Recipe], bool] = lambda recipe: True
    """Which recipes with the key have it."""
    in_dry_run: bool = True
    """Whether a step on tensors without data has it."""

    def wanted(self, recipe: Recipe) -> bool:
        """Whether a recipe has it."""
        return (self.key is None or bool(attrgetter(self.key)(recipe))) and self.where(recipe)


_PARTS = "llmrecipes.engine.parts."
PARTS = (
    StepPart(_PARTS + "accuracy:Accuracy", engines=_BOTH),
    StepPart(_PARTS + "gradient_check:GradientCheck", engines=_BOTH, in_dry_run=False),
    StepPart(_PARTS + "router_balance:RouterBalance", "model.num_moe_experts", _BOTH),
    StepPart(_PARTS + "router_losses:RouterLosses"),
    StepPart(_PARTS + "source_losses:SourceLosses", "tracking.loss_by_source", _BOTH),
    StepPart(_PARTS + "layer_norms:LayerNorms", "tracking.layers_interval", what="measuring layers"),
    StepPart(_PARTS + "averaging:Average", "optimizer.ema_decay", what="a moving average of the weights"),
    StepPart(_PARTS + "qk_clip:QkClip", "optimizer.qk_clip", what="QK-clip", in_dry_run=False),
    StepPart(_PARTS + "zeros:KeptZeros", "train.keep_zeros"),
    StepPart(_PARTS + "distillation:Teacher", "distill", what="distillation", where=has_teacher),
    StepPart(
        _PARTS + "distillation:PrecomputedTargets",
        "distill",
        what="distillation",
        where=lambda recipe: not has_teacher(recipe),
    ),
    StepPart(_PARTS + "adversary:Adversary", "train.adversarial", what="adversarial training"),
    StepPart(_PARTS + "preference:PreferenceLoss", "dpo", what="preference losses"),
    StepPart(_PARTS + "layer_drop:LayerDrop", "model.layer_drop", what="skipping layers", in_dry_run=False),
)
"""In the order in which they take a step's batches, and their hooks run."""


def unsupported(recipe: Recipe) -> Iterator[Problem]:
    """Parts that the engine of a recipe does not have."""
    name = engine_name(recipe)
    for each in PARTS:
        if each.key is not None and name not in each.engines and each.wanted(recipe):
            key = each.key.rpartition(".")[2]
            value = attrgetter(each.key)(recipe)
            shown = str(value).lower() if isinstance(value, bool | int | float) else "set"
            yield Problem(
                each.key,
                f"{shown} with engine {name}",
                f"the engine {name} does not support {each.what or key}",
                f"remove {key}, or engine megatron without layout.zero.stage 2, 3 and offload",
            )
