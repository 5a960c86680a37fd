"""Parallel degrees of a recipe compared with those of its scaled-down version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmrecipes.recipe.schema import Recipe, Zero

SHORT = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
    "data_parallel_size": "DP",
}
"""Common abbreviations of degrees."""

UNEVEN = "gloo, which joins CPU ranks, cannot gather uneven numbers of tokens; verify it on GPUs"
SPREAD = "experts are spread over the tensor-parallel ranks, because they cannot be split on a CPU"


@dataclass(frozen=True)
class Degree:
    """A degree that ran with a different value than in the recipe."""

    degree: str
    """Its key in the recipe, or `data_parallel_size`."""
    asked: int | None
    """None: the recipe does not set it."""
    ran: int
    reason: str | None = None

    @property
    def change(self) -> str:
        """Such as `TP 8 to 2`."""
        return f"{SHORT[self.degree]} {self.asked} to {self.ran}"


@dataclass(frozen=True)
class Scaled:
    """The recipe's degrees compared with those that ran."""

    asked: dict[str, int]
    """Degrees of the recipe by key; an unset `expert_tensor_parallel_size` is that of tensor parallelism."""
    reduced: tuple[Degree, ...]
    """Still above 1: the same kind of parallelism on fewer ranks."""
    added: tuple[Degree, ...]
    """Larger than in the recipe."""
    not_run: tuple[Degree, ...]
    """Above 1 in the recipe, and 1 here: this kind of parallelism was not tested."""

    def without(self, degree: Degree) -> Scaled:
        """The same with one more degree that did not run."""
        return replace(self, not_run=(*self.not_run, degree))

    def lines(self, not_run: str) -> list[tuple[str, str]]:
        """Human-readable (heading, text); none if all ran as in the recipe.

        Args:
            not_run: heading for degrees that did not run.
        """
        found = [("reduced", ", ".join(degree.change for degree in self.reduced))] if self.reduced else []
        found += [("added", f"{degree.change}: {degree.reason}") for degree in self.added]
        for degree in self.not_run:
            number = "" if degree.asked is None else f" {degree.asked}"
            found.append((not_run, f"{degree.degree}{number}: {degree.reason}"))
        return found

    def as_dict(self, not_run: str) -> dict[str, Any]:
        """JSON values: `asked`, `reduced`, `added`, and degrees that did not run under the given name."""
        return {
            "asked": self.asked,
            "reduced": [_without_reason(degree) for degree in self.reduced],
            "added": [asdict(degree) for degree in self.added],
            not_run: [asdict(degree) for degree in self.not_run],
        }


def with_zero(layout: str, zero: Zero | None) -> str:
    """The name of a layout with its ZeRO stage: `DP2, ZeRO 3`."""
    return layout if zero is None else f"{layout}, ZeRO {zero.stage}"


def asked(recipe: Recipe) -> dict[str, int]:
    """The parallel degrees of a recipe by key."""
    parallel = recipe.parallelism
    degrees = {name: getattr(parallel, name, None) or 1 for name in SHORT if name != "data_parallel_size"}
    if recipe.model.num_moe_experts:
        inner = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
        return {**degrees, "expert_tensor_parallel_size": inner}
    return {name: size for name, size in degrees.items() if not name.startswith("expert_")}


def scaled(recipe: Recipe, ran: Mapping[str, int]) -> Scaled:
    """Compare a recipe's degrees with those of a plan.

    Args:
        recipe: the full recipe.
        ran: degrees by name, of the plan of its small version.
    """
    wanted = asked(recipe)
    other = [Degree(name, size, ran[name]) for name, size in wanted.items() if ran[name] != size]
    return Scaled(
        asked=wanted,
        reduced=tuple(degree for degree in other if 1 < degree.ran < wanted[degree.degree]),
        added=tuple(replace(degree, reason=SPREAD) for degree in other if degree.ran > wanted[degree.degree]),
        # Only expert-tensor parallelism is ever disabled: see `small_layout`.
        not_run=tuple(replace(degree, reason=UNEVEN) for degree in other if degree.ran == 1),
    )


def _without_reason(degree: Degree) -> dict[str, Any]:
    return {"degree": degree.degree, "asked": degree.asked, "ran": degree.ran}
