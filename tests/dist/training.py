"""Training of one row on the ranks of a joined world, and what has to be the same in every layout."""

from __future__ import annotations

from llmrecipes.hardware.builds import import_megatron

import_megatron()  # as ranks do, before anything else imports it: in two thirds of the processor time

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import Batch, Engine, Progress, Slice, StepResult, World
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.world import model_parallel
from llmrecipes.engine.parts.gradient_check import GradientCheck
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.rules.preference_rules import needs_start_weights
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.resume import choose, resume
from llmrecipes.train.stage import layouts
from llmrecipes.verify import observe
from llmrecipes.verify.verify_spec import ReplicaDifference
from tests.helpers import ROOMY, random_batches

NOISE = 1e-3
"""Values of a tensor below which its differences count absolutely, as parts of this; weights begin at 2e-2."""

SMALL = 1e-4
"""Part of the global norm below which a gradient's differences count absolutely: some are nothing but noise."""


@dataclass(frozen=True)
class Outcome:
    """What a training came to: loss and gradient norm of each step, and the model after the last."""

    losses: list[float]
    norms: list[float]
    valid: float
    """Validation loss after the last step."""
    scales: list[float | None]
    """fp16 loss scale of each step."""
    tensors: dict[str, np.ndarray]
    """Every global parameter and buffer by name, put together from the ranks that hold it."""
    replicas: ReplicaDifference | None = None
    """First copy of a parameter or buffer that is not the one of the lowest rank, bit for bit."""
    gradients: dict[str, float] = field(default_factory=dict)
    """In fp32, norm of the gradient of each global parameter in the first step; empty after a resume."""
    lost: list[str] = field(default_factory=list)
    """Weights, master weights and moments that a resume did not restore bit for bit."""


@dataclass(frozen=True)
class Difference:
    """Largest relative differences of two outcomes."""

    loss: float
    """Of training and validation."""
    norm: float
    tensor: float
    worst: str
    """Name of the tensor that differs most."""
    gradient: float
    """Of a parameter in the first step: an update hides a small one that is wrong by a factor."""
    worst_gradient: str
    exact: str
    """What has to be the same bit for bit and is not; empty where all is."""
    first: float
    """Of the loss of the first step."""

    @property
    def largest(self) -> float:
        return math.inf if self.exact else max(self.loss, self.norm, self.tensor, self.gradient)

    def __str__(self) -> str:
        numbers = f"loss {self.loss:.1e}, gradient norm {self.norm:.1e}, parameters {self.tensor:.1e} ({self.worst})"
        numbers += f", first loss {self.first:.1e}, gradients {self.gradient:.1e} "
        numbers += f"({self.worst_gradient})"
        return f"{numbers}; {self.exact}" if self.exact else numbers


def compare(outcome: Outcome, reference: Outcome) -> Difference:
    """Differences from the reference; of as many steps from the end as the outcome has.

    A tensor's is ‖a - b‖ / ‖b‖ in the Frobenius norm.
    """
    assert outcome.tensors.keys() == reference.tensors.keys()
    tensors = {name: _distance(value, reference.tensors[name]) for name, value in outcome.tensors.items()}
    worst = max(tensors, key=lambda name: tensors[name])
    gradients = _of_gradients(outcome.gradients, reference)
    worst_gradient = max(gradients, key=lambda name: gradients[name], default="")
    count = len(outcome.losses)
    exact = [f"replicas differ: {outcome.replicas}"] if outcome.replicas else []
    if outcome.scales != reference.scales[-count:]:
        exact.append(f"loss scales are {outcome.scales}, not {reference.scales[-count:]}")
    if outcome.lost:
        exact.append(f"not restored bit for bit: {', '.join(outcome.lost)}")
    return Difference(
        _largest([*outcome.losses, outcome.valid], [*reference.losses[-count:], reference.valid]),
        _largest(outcome.norms, reference.norms[-count:]),
        tensors[worst],
        worst,
        gradients.get(worst_gradient, 0.0),
        worst_gradient,
        "; ".join(exact),
        _largest(outcome.losses[:1], reference.losses[-count:][:1]),
    )


def train(recipe: Recipe) -> Outcome | None:
    """Train from the beginning. Like `save_midway` and `go_on`, to be called on every rank; the first answers."""
    with training(recipe) as (engine, world):
        kept: list[list[Slice]] = []
        if recipe.train.precision != "fp32":
            return _run(engine, world)
        engine.watch_gradients(lambda _, gradients: kept.append(gradients))
        outcome = _run(engine, world)
        whole = _whole_tensors(kept[0], world)
    if outcome is None:
        return None
    return replace(outcome, gradients={name: float(np.linalg.norm(each)) for name, each in whole.items()})


def train_staged(recipes: Sequence[Recipe], folder: Path) -> Outcome | None:
    """Train from the beginning, each part of the steps in the layout of another recipe and from the checkpoint of the
    one before."""
    platform, store, before = select(), CheckpointStore(folder), list[StepResult]()
    steps = recipes[0].train.train_iters
    outcome, progress = None, Progress()
    with layouts(backend(recipes[0])) as lay_out:
        for number, recipe in enumerate(recipes, 1):
            world = lay_out(recipe)
            plan = derive(recipe, world.size, ROOMY)
            if number == 1:
                engine = backend(recipe).build(plan, platform)
            else:
                engine = backend(recipe).construct(plan, platform)
                entry = choose(store, world).entry
                assert entry is not None
                progress = resume(engine, entry, world)
            assert progress.step == steps * (number - 1) // len(recipes)
            try:
                if number == len(recipes):
                    outcome = _run(engine, world, progress)
                else:
                    before += _train(engine, world, progress, steps * number // len(recipes))
                    _save(engine, folder, len(before))
            finally:
                engine.close()
    if outcome is None:
        return None
    return replace(
        outcome,
        losses=[*(each.loss for each in before), *outcome.losses],
        norms=[*(each.grad_norm or math.nan for each in before), *outcome.norms],
        scales=[*(each.loss_scale for each in before), *outcome.scales],
    )


def save_midway(recipe: Recipe, folder: Path) -> None:
    """Train all steps but the last and write a checkpoint, from which other layouts go on."""
    step = recipe.train.train_iters - 1
    with training(recipe) as (engine, world):
        _train(engine, world, Progress(), step)
        _save(engine, folder, step)
        saved = everything(engine, world)
        if world.is_first:
            np.savez(_beside(folder), allow_pickle=False, **saved)


def _save(engine: Engine, folder: Path, step: int) -> None:
    """Write a checkpoint of this step."""
    recipe, samples = engine.recipe, engine.plan.batches.samples(step)
    progress = Progress(step, samples, samples * recipe.model.seq_length)
    info = CheckpointInfo(
        step=progress.step,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_tokens,
        layout=engine.plan.layout.as_dict(),
        recipe_hash="parity",
        engine=engine.name,
        recipe=recipe.model_dump(mode="json"),
    )
    with AsyncSaver(CheckpointStore(folder), saver_group(), engine.checkpoint_format()) as saver:
        saver.save(engine.state(progress), info)
        (report,) = saver.wait()
        assert report.error is None, report.error


def go_on(recipe: Recipe, folder: Path) -> Outcome | None:
    """Train the steps after a checkpoint, from a model that started elsewhere."""
    different: dict[str, float] = {"initial_loss_scale": recipe.train.initial_loss_scale * 4}
    # Frozen weights, which no checkpoint has, follow from the seed, and the masks of dropout do.
    if not (needs_start_weights(recipe) or recipe.model.hidden_dropout):
        different["seed"] = 99
    elsewhere = recipe.model_copy(update={"train": recipe.train.model_copy(update=different)})
    with training(elsewhere) as (engine, world):
        entry = choose(CheckpointStore(folder), world).entry
        assert entry is not None
        progress = resume(engine, entry, world)
        assert progress.step == entry.step
        loaded = everything(engine, world)
        outcome = _run(engine, world, progress)
    return None if outcome is None else replace(outcome, lost=_changed(loaded, _beside(folder)))


@contextmanager
def training(recipe: Recipe) -> Iterator[tuple[Engine, World]]:
    """An engine on ranks that have been joined."""
    platform = select()
    with model_parallel(recipe.train.seed, recipe.layout) as world:
        plan = derive(recipe, world.size, ROOMY)
        engine = backend(recipe).build(plan, platform)
        try:
            yield engine, world
        finally:
            engine.close()


def loaders(recipe: Recipe, world: World, consumed: int = 0) -> Iterator[Batch]:
    """Micro-batches of this rank."""
    return random_batches(recipe, consumed=consumed, rank=world.data_parallel_rank, ranks=world.data_parallel_size)


def _train(engine: Engine, world: World, progress: Progress, last: int) -> list[StepResult]:
    """The steps up to the last one."""
    batches = loaders(engine.recipe, world, progress.consumed_samples)
    numbers = map(engine.plan.num_microbatches_of, range(progress.step, last))
    results = [engine.train_step(batches, num_microbatches=number) for number in numbers]
    # Any layout, engine and precision: the norm counts each weight once, and copies have the same gradients.
    check = engine.parts.the(GradientCheck)
    assert check.fault() is None
    assert not check.due or not results, "the gradients of the first step were not compared"
    return results


def _run(engine: Engine, world: World, progress: Progress = Progress()) -> Outcome | None:  # noqa: B008 - frozen
    results = _train(engine, world, progress, engine.recipe.train.train_iters)
    with engine.params_synced():
        valid = engine.evaluate(loaders(engine.recipe, world), 1)
        assert valid is not None
        weights = engine.weights()
        tensors = _whole_tensors(weights, world)
        digests = observe.gathered(observe.digests(weights))
    if not world.is_first:
        return None
    apart = observe.first_replica_difference(digests, engine.recipe.train.train_iters)
    return Outcome(
        [r.loss for r in results],
        [r.grad_norm or math.nan for r in results],
        valid,
        [r.loss_scale for r in results],
        tensors,
        apart,
    )


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.npz")


def everything(engine: Engine, world: World) -> dict[str, np.ndarray]:
    """Weights, master weights and moments by name, on the first rank; layers are stacked, as in a checkpoint."""
    state = engine.state(Progress())
    del state["random"]
    apply_factories(state)
    parts = [
        Slice(value.key, value.global_offset, value.global_shape, value.data.detach().float().cpu().view(_full(value)))
        for value in nested_values(state)
        if isinstance(value, ShardedTensor) and is_main_replica(value.replica_id)
    ]
    return _whole_tensors(parts, world)


def _full(shard: ShardedTensor) -> tuple[int, ...]:
    return (*(1 for _ in range(shard.prepend_axis_num)), *shard.local_shape)


def _changed(loaded: dict[str, np.ndarray], saved: Path) -> list[str]:
    """Names whose tensors are not those that were saved, bit for bit."""
    with np.load(saved, allow_pickle=False) as before:
        # Master weights and two moments for each weight.
        assert sum(name.startswith("optimizer.state.") for name in before.files) >= len(before.files) // 2
        names = sorted({*loaded, *before.files})
        return [
            name
            for name in names
            if name not in loaded or name not in before or loaded[name].tobytes() != before[name].tobytes()
        ]


def _whole_tensors(parts: Sequence[Slice], world: World) -> dict[str, np.ndarray]:
    """Global tensors on the first rank, put together from all ranks' parts; empty on the others."""
    everyones: list[list[Slice]] | None = [[] for _ in range(world.size)] if world.is_first else None
    dist.gather_object(list(parts), everyones)
    whole: dict[str, np.ndarray] = {}
    for part in (each for one in everyones or () for each in one):
        place = tuple(slice(start, start + size) for start, size in zip(part.offset, part.tensor.shape, strict=True))
        # A part that no rank holds stays NaN, and so differs from everything.
        whole.setdefault(part.name, np.full(part.shape, np.nan, dtype=np.float32))[place] = part.tensor.numpy()
    return whole


def _of_gradients(norms: dict[str, float], reference: Outcome) -> dict[str, float]:
    """Relative differences by name; those of a small gradient count as parts of `SMALL`."""
    floor = SMALL * reference.norms[0]
    return {
        name: abs(norm - reference.gradients[name]) / max(reference.gradients[name], floor)
        for name, norm in norms.items()
    }


def _largest(one: list[float], other: list[float]) -> float:
    return max(
        abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) else math.inf
        for a, b in zip(one, other, strict=True)
    )


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    distance = float(np.linalg.norm(one - other))
    # Some tensors would stay zero in exact arithmetic (the bias of a key): there is only noise to compare.
    size = max(float(np.linalg.norm(other)), NOISE * math.sqrt(other.size))
    return distance / size if math.isfinite(distance) else math.inf
