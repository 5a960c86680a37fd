"""The process group of a run: ranks, model-parallel groups and random states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
import yaml
from megatron.core import parallel_state, tensor_parallel

from llmrecipes.engine.base import Platform, Rank, World
from llmrecipes.engine.core.platform import patching
from llmrecipes.engine.core.platform.process_group import TIMEOUT
from llmrecipes.errors import UserError
from llmrecipes.hardware.profile import Group
from llmrecipes.recipe.schema import LayoutKeys

EXPERT_BUFFERS = "megatron.core.transformer.moe.fused_a2a"
AUX_LOSS_SCALER = "megatron.core.transformer.moe.moe_utils.MoEAuxLossAutoScaler"
RANK_ORDER = "tp-cp-ep-dp-pp"
"""Megatron's: tensor-parallel ranks are neighbours, so they share a node; pipeline stages are farthest apart."""


@contextmanager
def connect(platform: Platform) -> Iterator[Rank]:
    """Join the ranks that a launcher started (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, …), or form a world of one.

    Args:
        platform: already installed.

    Raises:
        UserError: some ranks have a GPU and others do not.
    """
    platform.connect(TIMEOUT)
    with _torn_down(dist.destroy_process_group, after_errors=is_alone()):
        yield Rank(dist.get_rank(), dist.get_world_size())


def is_alone() -> bool:
    """Whether this rank tears its groups down after an error too: there are no others.

    Tearing NCCL down may wait for collectives that the other ranks never join, because they wait for a failed one. Its
    process is about to end, which they notice.
    """
    return dist.get_world_size() == 1


@contextmanager
def join(platform: Platform, seed: int, layout: LayoutKeys) -> Iterator[World]:
    """`connect`, and `model_parallel` for one layout."""
    with connect(platform), model_parallel(seed, layout, after_errors=is_alone()) as world:
        yield world


_OF_A_GROUP: dict[str, type] = {
    "is_high_priority_stream": bool,
    "cga_cluster_size": int,
    "max_ctas": int,
    "min_ctas": int,
    "net_name": str,
}
"""What megatron-core reads for a group (`parallel_state.get_nccl_options`)."""


def require_communicators(path: Path) -> None:
    """Refuse a file that would end in an exception, or without effect, while groups are created.

    Raises:
        UserError: it is not a file, not YAML, or has something else than NCCL's settings by group.
    """
    where = "layout.nccl_communicator_config_path"
    if not path.is_file():
        raise UserError(
            f"{path} is not a file", where=where, rule="every rank reads it", fix="a path that all nodes see"
        )
    try:
        groups = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        what = f"{path} cannot be read: {str(error).splitlines()[0]}"
        raise UserError(what, where=where, rule="a YAML file", fix="tp: {max_ctas: 16}") from error
    usable = isinstance(groups, dict) and all(
        isinstance(settings, dict)
        and all(type(value) is _OF_A_GROUP.get(key) for key, value in settings.items())
        and settings.get("net_name", "ib").lower() in ("ib", "socket")
        for settings in groups.values()
    )
    if not usable:
        rule = f"settings by group: {', '.join(_OF_A_GROUP)}; net_name is IB or Socket"
        raise UserError(f"{path} has other contents", where=where, rule=rule, fix="tp: {max_ctas: 16}")


@contextmanager
def model_parallel(seed: int, layout: LayoutKeys, *, after_errors: bool = True) -> Iterator[World]:
    """Create model-parallel groups over the process group, and destroy them at the end.

    Args:
        seed: for dropout: the same on every data-parallel rank, different on tensor-parallel ranks and stages.
        layout: degrees, and settings of the process groups.
        after_errors: whether to destroy the groups after an error too.

    Raises:
        UserError: the file `layout.nccl_communicator_config_path` cannot be used.
    """
    settings = layout.nccl_communicator_config_path
    groups = layout.high_priority_stream_groups
    if settings is not None:
        require_communicators(Path(settings))
    hierarchy = layout.hierarchical_context_parallel_sizes
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        hierarchical_context_parallel_sizes=hierarchy and list(hierarchy),
        nccl_communicator_config_path=settings,
        high_priority_stream_groups=groups and list(groups),
        order=RANK_ORDER,
        # Only for its way of saving by gathering, on the first data-parallel rank.
        create_gloo_process_groups=False,
    )
    with _torn_down(_take_away_groups, after_errors=after_errors):
        # A graph records a generator, not the state that it has at that moment.
        tensor_parallel.random.initialize_rng_tracker(
            use_te_rng_tracker=layout.cuda_graph_impl is not None, force_reset=True
        )
        seed_random_states(seed)
        yield World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            holds_whole_model=dist.get_world_size() == parallel_state.get_data_parallel_world_size()
            and layout.expert_model_parallel_size == 1,
            has_loss=parallel_state.get_pipeline_model_parallel_rank()
            == parallel_state.get_pipeline_model_parallel_world_size() - 1,
        )


@contextmanager
def _torn_down(teardown: Callable[[], None], *, after_errors: bool) -> Iterator[None]:
    """A block with a teardown at its end, also after an error if requested."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if after_errors or not failed:
            teardown()


def _take_away_groups() -> None:
    """Destroy the model-parallel groups; megatron-core only drops them, which leaks each gloo group's threads."""
    groups = [group for group in parallel_state._global_process_group_list or [] if group is not None]
    parallel_state.destroy_model_parallel()
    for buffer in ("_buffer", "_hybrid_ep_buffer"):  # of a group of ranks that share experts
        patching.replace(EXPERT_BUFFERS, buffer, None)
    # Of whatever shape the first backward pass gave it; megatron-core copies later scales into it.
    patching.replace(AUX_LOSS_SCALER, "main_loss_backward_scale", None)
    for group in groups:
        # A group can serve several purposes, and is then listed several times.
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def seed_random_states(seed: int) -> None:
    """Seed the random states of dropout."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())


def process_groups() -> dict[Group, dist.ProcessGroup]:
    """Process groups of the layout with more than one rank, by name, and all ranks."""
    named: dict[Group, dist.ProcessGroup] = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "expert": parallel_state.get_expert_model_parallel_group(),
        "world": dist.distributed_c10d._get_default_group(),
    }
    return {name: group for name, group in named.items() if group.size() > 1}
