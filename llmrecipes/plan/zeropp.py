"""What ZeRO++ (arXiv 2306.10209) needs of the ranks and of the device.

DeepSpeed 0.19.8 asserts some of it while the model is built; with the rest it trains something else, or without it.
"""

from __future__ import annotations

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.recipe.fixes import divisors
from llmrecipes.recipe.schema import Recipe


def check(recipe: Recipe, world_size: int, cluster: Cluster) -> None:
    """Refuse ZeRO++ where it cannot work.

    Raises:
        UserError: quantization on a CPU, hpZ groups that do not divide the ranks, or quantized gradients on fewer than
            two whole nodes.
    """
    zero = recipe.zero
    if zero is None:
        return
    quantized = [key for key in ("zero_quantized_weights", "zero_quantized_gradients") if getattr(zero, key)]
    if quantized and not cluster.gpus:
        raise UserError(
            "true on a CPU",
            where=f"zero.{quantized[0]}",
            rule="DeepSpeed quantizes with CUDA kernels",
            fix=f"leave {' and '.join(quantized)} out here",
        )
    size = zero.zero_hpz_partition_size
    if world_size % size:
        raise UserError(
            f"{size} with {world_size} {'rank' if world_size == 1 else 'ranks'}",
            where="zero.zero_hpz_partition_size",
            rule="every zero_hpz_partition_size adjacent ranks share a copy of the parameters: it divides the ranks",
            fix=f"zero_hpz_partition_size {divisors(world_size, size)}",
        )
    if zero.zero_quantized_gradients:
        node = len(cluster.gpus) // cluster.nodes
        if world_size % node or world_size < 2 * node:
            raise UserError(
                f"true with {world_size} ranks on nodes of {node} GPUs",
                where="zero.zero_quantized_gradients",
                rule="DeepSpeed quantizes gradients between nodes: on two or more nodes, with a rank on every GPU",
                fix=f"{2 * node} ranks or another multiple of {node}, or leave zero_quantized_gradients out",
            )
