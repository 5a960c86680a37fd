"""The plan of a run: one for each of its stages, and the numbers of all of them together."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.plan.layout import layout
from llmrecipes.plan.parameters import Parameters
from llmrecipes.plan.plan_table import stage_facts, text
from llmrecipes.recipe.derived.degrees import smallest_world
from llmrecipes.recipe.derived.stage_runs import in_stage, stage_of, stage_recipes
from llmrecipes.recipe.derived.stages import span_of
from llmrecipes.recipe.schema import Recipe


@dataclass(frozen=True)
class RunPlan:
    """The plans of a run's stages, in order; a run without stages has one plan, of its recipe.

    `recipe` is that of the run. With stages it is as it was given: each plan has what was chosen for its stage.
    """

    recipe: Recipe
    stages: tuple[Plan, ...]
    chosen: Mapping[str, Any] | None = None
    """What `layout: auto` has chosen, with its reason as `text`; None: nothing."""

    def __str__(self) -> str:
        """The table of `llmrecipes plan --details`."""
        return text(self)

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    @property
    def largest(self) -> Plan:
        """The plan of the stage whose ranks need the most memory."""
        return max(self.stages, key=lambda plan: plan.memory.total)

    def of_step(self, steps: int, *, ending: bool = False) -> Plan:
        """The plan of the stage of the step that follows this many; arguments as of `stage_of`."""
        span = span_of(stage_of(self.recipe, steps, ending=ending))
        return next(plan for plan in self.stages if plan.span == span)

    @property
    def cluster(self) -> Cluster:
        return self.stages[0].cluster

    @property
    def world_size(self) -> int:
        return self.stages[0].layout.world_size

    @property
    def num_parameters(self) -> Parameters:
        return self.stages[0].num_parameters

    @property
    def total_tokens(self) -> int:
        """Training tokens of all stages."""
        return sum(plan.total_tokens for plan in self.stages)

    @property
    def full_steps(self) -> float:
        """Steps of the largest stage's `global_batch_size` with as many tokens as the run."""
        return self.total_tokens / self.largest.tokens_per_step

    @property
    def checkpoint_bytes(self) -> int:
        """Size of the largest checkpoint of all stages, which freeze different parameters."""
        return max(plan.checkpoint_bytes for plan in self.stages)

    @property
    def fits(self) -> bool:
        return all(plan.fits for plan in self.stages)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of any stage."""
        return tuple(dict.fromkeys(warning for plan in self.stages for warning in plan.warnings))

    def facts(self) -> dict[str, Any]:
        """What all ranks of a run must derive alike, as JSON values; not what depends on free memory."""
        stages = {"stages": [plan.facts() for plan in self.stages]} if self.recipe.stages else {}
        return {**self.largest.facts(), "total_tokens": self.total_tokens, **stages}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for plan.json and `show --json`: the largest stage, with the totals of the run."""
        stages = {"stages": [stage_facts(plan) for plan in self.stages]} if self.recipe.stages else {}
        of_run = {"total_tokens": self.total_tokens, "fits": self.fits, "warnings": list(self.warnings)}
        return {**self.largest.as_dict(), **of_run, **stages, "chosen": self.chosen}


def derive_run(recipe: Recipe, world_size: int, cluster: Cluster) -> RunPlan:
    """Derive the plan of each stage.

    Raises:
        UserError: as `derive`; it names the stage.
    """
    if not recipe.stages:
        plan = derive(recipe, world_size, cluster)
        return RunPlan(plan.recipe, (plan,))
    stages = stage_recipes(recipe)
    plans = []
    widest = max(stages, key=lambda stage: smallest_world(stage.layout))
    with in_stage(widest):  # of ranks that are too few, the stage that needs the most is named
        layout(widest, world_size, cluster)
    for stage in stages:
        with in_stage(stage):
            plans.append(derive(stage, world_size, cluster))
    return RunPlan(recipe, tuple(plans))
