"""The section `lora`: low-rank adapters on a model whose own weights stay as they are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.section import PosFloat, PosInt, Probability, Section

Target = Literal[
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "experts.linear_fc1", "experts.linear_fc2",
]  # fmt: skip


class Lora(Section):
    """Low-rank adaptation (arXiv 2106.09685): a matrix W becomes W + `alpha` / `rank` · B · A, of which A and B
    alone are trained and saved."""

    rank: PosInt
    """Rows of A and columns of B; at most the shorter side of every adapted matrix."""
    alpha: PosFloat | None = None
    """Scale of the adapters, divided by `rank`; unset: `rank`."""
    dropout: Probability = 0.0
    """Dropout of the adapters' inputs."""
    target_modules: Annotated[tuple[Target, ...], Field(min_length=1, strict=False)] | None = None
    """Adapted matrices, by Megatron's names: `linear_qkv`, `linear_proj`, `linear_fc1` and `linear_fc2` (of dense MLPs
    and shared experts), `linear_q_proj` or `linear_q_down_proj` and `linear_q_up_proj`, `linear_kv_down_proj` and
    `linear_kv_up_proj` of latent attention, `experts.linear_fc1` and `experts.linear_fc2` of routed experts, each of
    which gets adapters of its own. Unset: all that the model has but those of routed experts."""

    @property
    def scale(self) -> float:
        """Factor of B · A."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank
