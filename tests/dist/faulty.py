"""Ranks of a verification that compute something wrong on purpose, each in one way that happens in practice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from llmrecipes.engine.base import Progress
from llmrecipes.engine.core.model.gpt import BuiltModel
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.world import model_parallel
from llmrecipes.engine.megatron.backend import MegatronBackend
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.recipe.schema import Recipe
from llmrecipes.verify.verify_spec import VerifySpec
from llmrecipes.verify.verify_worker import train
from tests.dist.training import Outcome

Patch = pytest.MonkeyPatch


def train_with(fault: str | None, spec: VerifySpec) -> None:
    """Train as the spec says, with the named fault. To be called on every rank of a joined world."""
    with (
        model_parallel(spec.recipe.train.seed, spec.recipe.layout) as world,
        pytest.MonkeyPatch.context() as patch,
    ):
        if fault is not None:
            FAULTS[fault](patch)
        train(spec, MegatronBackend(), world, select())


def resume_without_masters(recipe: Recipe, folder: Path) -> Outcome | None:
    """`go_on`, with master weights rebuilt from those of the model. To be called on every rank of a joined world."""
    from tests.dist import training

    plain = training.resume

    def rebuilt(engine: MegatronEngine, *args: Any) -> Progress:
        progress = plain(engine, *args)
        engine.optimizer.reload_model_params()
        return progress

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "resume", rebuilt)
        return training.go_on(recipe, folder)


def _norms_not_reduced(patch: Patch) -> None:
    # The package has a function of this module's name.
    module = import_module("megatron.core.distributed.finalize_model_grads")
    patch.setattr(module, "_allreduce_non_tensor_model_parallel_grads", lambda *_a, **_k: None)


def _loss_over_micro_batches(patch: Patch) -> None:
    from llmrecipes.engine.megatron import engine

    whole = engine.sum_over_tokens

    def part(*arguments: Any) -> Any:
        total, tokens, report = whole(*arguments)
        return total / 2, tokens, report

    patch.setattr(engine, "sum_over_tokens", part)


def _micro_batch_dropped(patch: Patch) -> None:
    from llmrecipes.data.read import batches

    whole = batches.sample_ids

    def without_the_first(*args: Any, **kwargs: Any) -> Iterator[list[int]]:
        return islice(whole(*args, **kwargs), 1 if kwargs["data_parallel_rank"] == 1 else 0, None)

    patch.setattr(batches, "sample_ids", without_the_first)


def _replicas_averaged(patch: Patch) -> None:
    from llmrecipes.engine.core import update

    finalize = update.finalize

    def divided(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
        finalize(chunks, *args, **kwargs)
        for chunk in chunks:
            chunk.scale_gradients(1 / parallel_state.get_data_parallel_world_size())

    patch.setattr(update, "finalize", divided)


def _chunks_in_order(patch: Patch) -> None:
    def contiguous(batch: dict[str, torch.Tensor], size: int, rank: int) -> dict[str, torch.Tensor]:
        return {name: tensor.chunk(size, dim=1)[rank] for name, tensor in batch.items()}

    patch.setattr("llmrecipes.engine.megatron.engine.own_chunks", contiguous)


def _to_routers(change: Callable[[torch.nn.Parameter], None]) -> Callable[[Patch], None]:
    def fault(patch: Patch) -> None:
        from llmrecipes.engine.megatron import backend

        build = backend.build

        def changed(*args: Any, **kwargs: Any) -> BuiltModel:
            built = build(*args, **kwargs)
            for module in built.modules:
                for name, parameter in module.named_parameters():
                    if name.endswith("router.weight"):
                        change(parameter)
            return built

        patch.setattr(backend, "build", changed)

    return fault


def _own_values(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight.add_(0.3 * dist.get_rank() * torch.randn_like(weight))


def _own_gradient(weight: torch.nn.Parameter) -> None:
    weight.sequence_parallel = False  # type: ignore[attr-defined]


def _twice_the_rate(patch: Patch) -> None:
    from llmrecipes.engine.megatron import optimizer

    plain = optimizer.optimizer_config

    def faster(recipe: Recipe) -> Any:
        config = plain(recipe)
        config.lr *= 2
        return config

    patch.setattr(optimizer, "optimizer_config", faster)


def _replica_drifts(patch: Patch) -> None:
    """The last bit of one weight of the second replica: far below every tolerance."""
    step = MegatronEngine.train_step

    def drifting(engine: MegatronEngine, *args: Any, **kwargs: Any) -> Any:
        result = step(engine, *args, **kwargs)
        if dist.get_rank() == 1:
            weight = dict(engine.modules[0].named_parameters())[DRIFTING].detach()
            torch.nextafter(weight, torch.full_like(weight, torch.inf), out=weight)
        return result

    patch.setattr(MegatronEngine, "train_step", drifting)


DRIFTING = "decoder.layers.1.mlp.linear_fc1.weight"
DRIFT = "weights of one replica drift"
FAULTS: dict[str, Callable[[Patch], None]] = {
    "norm gradients not reduced over sequence-parallel ranks": _norms_not_reduced,
    "loss divided by the number of micro-batches": _loss_over_micro_batches,
    "one micro-batch dropped on one rank": _micro_batch_dropped,
    "gradients averaged, not summed, over replicas": _replicas_averaged,
    "chunks of context in another order": _chunks_in_order,
    "routers start from other weights": _to_routers(_own_values),
    "router gradients not reduced": _to_routers(_own_gradient),
    "another learning rate": _twice_the_rate,
    DRIFT: _replica_drifts,
}
