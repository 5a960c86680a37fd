"""What an update of Muon reads and writes, against the operations of megatron-core's on tensors without data."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmrecipes.dryrun.dry_run_spec import DryRunSpec
from llmrecipes.plan.muon import elements_and_bytes
from tests.dist.worlds import GlooWorld
from tests.unit.test_dryrun import WIDE, plan_of, spec

TENSOR = ("layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true")
WORLDS = {
    "one rank": spec("gpt-tiny", *WIDE, "optimizer.muon_coefficient_type=simple", "optimizer.muon_num_ns_steps=3"),
    "no decay, no Nesterov, in bf16": spec(
        "gpt-tiny", *WIDE, "train.precision=bf16", "optimizer.muon_fp32_matmul_prec=medium",
        "optimizer.muon_nesterov=false", "optimizer.weight_decay=0",
    ),
    "put together": spec("gpt-tiny", *WIDE, "model.num_query_groups=2", *TENSOR, world=2),
    "on shards": spec(
        "gpt-tiny", *WIDE, *TENSOR, "optimizer.muon_tp_mode=distributed", "optimizer.muon_split_qkv=false", world=2
    ),
    "experts": spec(
        "moe-tiny", "optimizer={optimizer: muon, lr: 1e-3}", "layout.use_distributed_optimizer=false",
        "layout.expert_model_parallel_size=2", world=2,
    ),
}  # fmt: skip


UNCOUNTED = ("aten::mm", "aten::empty_like", "aten::detach", "aten::_unsafe_view")
"""Products, and what moves nothing."""


class Moved(TorchDispatchMode):
    """Counts bytes of what operations read and write; of products what they add to, which they copy to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        written = sum(map(_bytes, tree_leaves(result)))
        if name == "aten::addmm":
            self.bytes += 3 * written
        elif name == "c10d::allgather_":  # into a buffer, of which the tensors are copies
            self.bytes += 2 * written
        elif not (func.is_view or name in UNCOUNTED or "c10d" in name):
            read = {id(each): _bytes(each) for each in tree_leaves((args, kwargs))}
            self.bytes += written + sum(read.values())
        return result


def _bytes(value: object) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())


def moved_in_updates(specs: list[str]) -> list[int]:
    """Bytes of a step's updates of matrices, of the last step of a dry run of each; job of a process of its own."""
    from llmrecipes.dryrun.simulation import dry_run

    # It has no types.
    owner = import_module("emerging_optimizers.orthogonalized_optimizers").OrthogonalizedOptimizer
    plain = owner.step
    counted: dict[int, int] = {}  # of the optimizers of dense matrices and of experts

    def step(optimizer: Any, closure: Any = None) -> Any:
        with Moved() as moved:
            result = plain(optimizer, closure)
        counted[id(optimizer)] = moved.bytes
        return result

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "step", step)
        for text in specs:
            counted.clear()
            asked = DryRunSpec.model_validate_json(text)
            dry_run(asked, asked.ranks[0])
            found.append(sum(counted.values()))
    return found


@pytest.fixture(scope="module")
def process(worlds: object) -> Iterator[GlooWorld]:
    """One that only runs dry runs."""
    alone = GlooWorld(1)
    yield alone
    alone.close()


@pytest.fixture(scope="module")
def counted(process: GlooWorld) -> dict[str, int]:
    found: list[int] = process.start(moved_in_updates, list(WORLDS.values()), group=False).result()
    return dict(zip(WORLDS, found, strict=True))


@pytest.mark.parametrize("name", WORLDS)
def test_the_plan_moves_as_an_update_does(name: str, counted: dict[str, int]) -> None:
    plan = plan_of(WORLDS[name])
    elements, moved = elements_and_bytes(plan.recipe, plan.shape, plan.layout, plan.device, 0)
    assert counted[name] == pytest.approx(moved, rel=2e-2 if name == "experts" else 1e-4)  # routers are left out
    assert moved > 36 * elements
