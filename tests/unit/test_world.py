"""What a world of ranks leaves in its process, and what it takes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.world import join
from llmrecipes.recipe.schema import LayoutKeys


def network_threads() -> int:
    """Threads of this process that wait for the network in gloo."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def test_all_groups_of_a_rank_share_one_thread_of_the_network() -> None:
    select().install()
    before = network_threads()
    with join(select(), 1, LayoutKeys()):
        assert len(dist.distributed_c10d._world.pg_map) > 10
        assert network_threads() <= before + 1
        assert network_threads() >= 1


def test_a_second_world_takes_the_scale_of_losses_of_routers_anew() -> None:
    select().install()
    with join(select(), 1, LayoutKeys()):
        MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(
            3.0
        )  # so a backward pass before any step leaves it
    with join(select(), 1, LayoutKeys()):
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
        assert MoEAuxLossAutoScaler.main_loss_backward_scale.tolist() == [1.0]
