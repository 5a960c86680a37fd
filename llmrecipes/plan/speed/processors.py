"""A node without GPUs as a device of the time model, from the rates that `bench machine` measured on it."""

from __future__ import annotations

from llmrecipes.hardware.profile import Profile, Rates
from llmrecipes.plan.speed.device import Device, Stack
from llmrecipes.recipe.schema import Recipe
from llmrecipes.units import GIB

_REFERENCE_KEYS, _REFERENCE_LENGTH = 64, 512
"""Channels of a head and positions of the attention that was measured."""


def of_processors(profile: Profile, rates: Rates, ranks: int) -> Device:
    """One rank's share of a node.

    Args:
        ranks: on the node, which share its cores: a core each, or several threads where there are fewer ranks.
    """
    cores = max(1, profile.cpu_cores)
    threads = max(1, cores // ranks)
    gain = 1.0 if cores == 1 else 1 + (threads - 1) * (rates.gflops_all / rates.gflops - 1) / (cores - 1)
    # More ranks than cores take turns.
    share = gain * min(1.0, cores / ranks)
    flops = rates.gflops * 1e9 * share
    length = _REFERENCE_LENGTH / (_REFERENCE_LENGTH + 256)
    attention = rates.attention_gflops / rates.gflops / ((_REFERENCE_KEYS / 128) ** 0.3 * length)
    turns = max(1.0, ranks / cores)
    return Device(
        name=profile.name,
        multiprocessors=1,
        memory_bytes=profile.memory_gib * GIB,
        peak={"fp32": flops, "bf16": flops, "fp8": flops},
        bandwidth=rates.memory_gb_per_s * 1e9 * share,
        nvlink=profile.intra_node.gb_per_s * 1e9,
        nic=profile.inter_node.gb_per_s * 1e9,
        gpus_per_node=ranks,
        gemm=1.0,
        gemm_fp8=1.0,
        gemm_depth=rates.depth,
        attention=attention,
        memory=1.0,
        launch=rates.launch_us * 1e-6 * turns,
        links=1.0,
        hop_near=rates.latency_us * 1e-6 * turns,
        hop_far=rates.latency_us * 1e-6 * turns,
        queue=False,
    )


def of_local_layers(recipe: Recipe) -> Stack:
    """What the layers without TransformerEngine do on a CPU: unfused norms and activations, nothing overlaps."""
    parallel, zero = recipe.parallelism, recipe.zero
    return Stack(
        name="local layers",
        attention=1.0,
        gemm=1.0,
        passes=1.6,
        host=1.5,
        loss_bytes=24.0,
        overlap_gradients=0.0,
        sequence_parallel=parallel.sequence_parallel,
        sharded=zero is not None and zero.stage >= 3,
        zero=1 if parallel.use_distributed_optimizer or zero is not None else 0,
        gradient_bytes=4,
    )
