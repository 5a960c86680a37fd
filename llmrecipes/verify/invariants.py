"""What one step of one process must not depend on: a recipe against itself, without another layout.

Layouts can agree on a wrong number. These compare the gradients of the same tokens computed in two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe
from llmrecipes.verify.observe import readable
from llmrecipes.verify.result import Invariant, relative

if TYPE_CHECKING:
    from llmrecipes.engine.base import Backend, Batch, Platform, World

Change = Callable[["Batch"], "Batch"]
SMALLEST = 1e-2
"""Share of the norm of all gradients below which that of a weight counts as this share: some are zero but for
rounding."""


@dataclass(frozen=True)
class _Step:
    """What a step computed, and the number of tokens that counted in it."""

    loss: float
    gradients: dict[str, torch.Tensor]
    counted: float


def invariants(recipe: Recipe, data_dir: Path) -> tuple[Invariant, ...]:
    """Compute the first step of a recipe in several ways, in this process.

    Args:
        recipe: of one process, whose data is prepared; see `reference_recipe`.
        data_dir: folder of prepared data.
    """
    from llmrecipes.engine.backends import backend

    engines = backend(recipe)
    platform = engines.platform()
    with engines.join(recipe, platform) as world:
        return tuple(_rows(_Computer(engines, platform, world, data_dir), recipe))


@dataclass(frozen=True)
class _Computer:
    engines: Backend
    platform: Platform
    world: World
    data_dir: Path

    def step(self, recipe: Recipe, change: Change = lambda batch: batch) -> _Step:
        """The first step of a recipe, of micro-batches that `change` has changed.

        Raises:
            UserError: the recipe breaks a rule.
        """
        from llmrecipes.data.folder.prepared import open_prepared
        from llmrecipes.hardware.cluster import detect
        from llmrecipes.plan.derive import derive
        from llmrecipes.recipe.rules.recipe_rules import check
        from llmrecipes.train.loaders import open_loaders

        if problems := check(recipe):
            raise UserError(problems[0].what, where=problems[0].key, rule=problems[0].rule, fix=problems[0].fix)
        loaders = open_loaders(recipe, open_prepared(recipe, self.data_dir), self.world, pin_memory=False)
        engine = self.engines.build(derive(recipe, 1, detect()), self.platform)
        counted: list[float] = []
        kept: dict[str, torch.Tensor] = {}

        def changed(batches: Iterator[Batch]) -> Iterator[Batch]:
            for batch in batches:
                new = change(batch)
                counted.append(float(new["loss_mask"].sum()))
                yield new

        try:
            engine.watch_gradients(lambda _, slices: kept.update({each.name: each.tensor.clone() for each in slices}))
            with closing(loaders.train(0)) as batches:
                loss = engine.train_step(changed(batches)).loss
        finally:
            engine.close()
        return _Step(loss, kept, sum(counted))


def _rows(compute: _Computer, recipe: Recipe) -> Iterator[Invariant]:
    model, train = recipe.model, recipe.train
    base = compute.step(recipe)
    if recipe.dpo is not None or recipe.model.mtp_num_layers is not None:
        what = "pairs" if recipe.dpo is not None else "multi-token prediction"
        yield Invariant("masked tokens", None, reason=f"{what}: the mask has another meaning")
    else:
        first, second = (compute.step(recipe, _masked(start)) for start in (0, 1))
        yield _compared("masked tokens", base, _sum(first, second))
        yield _compared("labels under the mask", first, compute.step(recipe, lambda b: _relabelled(_masked(0)(b))))
    by_batch = model.moe_router_load_balancing_type in ("aux_loss", "global_aux_loss")
    balanced = model.num_moe_experts is not None and by_batch
    other = 2 if recipe.layout.micro_batch_size == 1 else 1
    ways: list[tuple[str, str | None, dict[str, Any]]] = [
        (
            "micro-batch size",
            _by_micro_batch(recipe) or ("one micro-batch in a step" if train.global_batch_size % other else None),
            {"model": {"moe_aux_loss_coeff": 0.0} if balanced else {}, "layout": {"micro_batch_size": other}},
        ),
        (
            "recomputation",
            None,
            {"layout": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
        ),
    ]
    if model.num_moe_experts is not None and model.moe_expert_capacity_factor is None:
        factor = model.num_moe_experts / model.moe_router_topk
        ways.append(("capacity for all tokens", None, {"model": {"moe_expert_capacity_factor": factor}}))
    for name, why, sections in ways:
        if why is not None:
            yield Invariant(name, None, reason=why)
            continue
        try:
            against = base
            if "moe_aux_loss_coeff" in sections.get("model", {}):
                against = compute.step(_with(recipe, {"model": sections["model"]}))
            yield _compared(name, against, compute.step(_with(recipe, sections)))
        except UserError as error:
            yield Invariant(name, None, reason=f"{error.where}: {error.rule}")


def _by_micro_batch(recipe: Recipe) -> str | None:
    """What a recipe computes of a micro-batch by definition."""
    model = recipe.model
    if model.moe_expert_capacity_factor is not None and model.num_moe_experts is not None:
        return "moe_expert_capacity_factor drops tokens of a micro-batch"
    if model.layer_drop:
        return "layer_drop skips layers of a micro-batch"
    return None


def _with(recipe: Recipe, sections: dict[str, dict[str, Any]]) -> Recipe:
    changed = {name: getattr(recipe, name).model_copy(update=keys) for name, keys in sections.items()}
    return recipe.model_copy(update=changed)


def _masked(start: int) -> Change:
    """Count only every second token of those that count, from the first or the second one."""

    def change(batch: Batch) -> Batch:
        mask = batch["loss_mask"].clone()
        mask[..., 1 - start :: 2] = 0
        return {**batch, "loss_mask": mask}

    return change


def _relabelled(batch: Batch) -> Batch:
    """Token 1 as the label of all that do not count."""
    return {**batch, "labels": batch["labels"].masked_fill(batch["loss_mask"] == 0, 1)}


def _sum(*parts: _Step) -> _Step:
    """The step of all tokens that count in one of several: each is a mean over its own."""
    counted = sum(part.counted for part in parts)
    shares = [part.counted / counted for part in parts]
    gradients = {
        name: torch.stack([share * part.gradients[name] for share, part in zip(shares, parts, strict=True)]).sum(0)
        for name in parts[0].gradients
    }
    return _Step(sum(share * part.loss for share, part in zip(shares, parts, strict=True)), gradients, counted)


def _compared(name: str, one: _Step, other: _Step) -> Invariant:
    worst = relative(other.loss, one.loss)
    weight = ""
    whole = torch.stack([value.norm() for value in one.gradients.values()]).norm().item()
    for key, value in one.gradients.items():
        least = max(value.norm().item(), SMALLEST * whole)
        difference = (other.gradients[key] - value).norm().item() / least if least else 0.0
        if not difference <= worst:  # also of a number that is not finite
            worst = difference
            weight = readable(key)[0]
    return Invariant(name, worst, weight)
