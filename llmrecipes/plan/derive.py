"""(recipe, number of ranks, machine) to a plan: every number of the run, derived once and visibly."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from llmrecipes.cluster import Cluster
from llmrecipes.errors import UserError
from llmrecipes.plan.flops import flops_per_token
from llmrecipes.plan.memory import Memory, estimate
from llmrecipes.plan.parameters import Parameters, count
from llmrecipes.plan.shape import shape
from llmrecipes.recipe.rules import multiples
from llmrecipes.recipe.schema import Recipe


@dataclass(frozen=True)
class Plan:
    """What follows from a recipe on a number of ranks of a machine.

    `tokens_per_step` and `total_tokens` count training tokens; FLOPs are per token, forward and backward, without
    recomputation (`full`: all attention positions, `causal`: half of them). `memory_capacity_bytes` is what one rank
    can have: its GPU's free memory, or an equal share of the machine's available memory. `fits` compares it with
    `memory.total`.
    """

    recipe: str
    device: str
    world_size: int
    data_parallel_size: int
    num_microbatches: int
    padded_vocab_size: int
    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    max_position_embeddings: int
    lr_decay_iters: int
    tokens_per_step: int
    total_tokens: int
    num_parameters: Parameters
    flops_per_token_full: float
    flops_per_token_causal: float
    memory: Memory
    memory_capacity_bytes: int

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory_capacity_bytes

    def as_dict(self) -> dict[str, Any]:
        """Plain data for plan.json."""
        return {**asdict(self), "memory": self.memory.as_dict(), "fits": self.fits}


def default_world_size(recipe: Recipe, cluster: Cluster) -> int:
    """Ranks of a run that names no number: as many of the machine's GPUs as its batch divides over; one on a CPU."""
    micro_batches = recipe.train.global_batch_size // recipe.train.micro_batch_size
    return next((ranks for ranks in range(len(cluster.gpus), 1, -1) if micro_batches % ranks == 0), 1)


def derive(recipe: Recipe, world_size: int, cluster: Cluster) -> Plan:
    """Derive the plan.

    Raises:
        UserError: the global batch does not divide over the ranks, or there are more ranks than GPUs.
    """
    data_parallel_size = _data_parallel_size(world_size, cluster)
    parameters = count(recipe.model)
    sizes = shape(recipe.model)
    tokens_per_step = recipe.train.global_batch_size * recipe.model.seq_length
    return Plan(
        recipe=recipe.name,
        device=cluster.device,
        world_size=world_size,
        data_parallel_size=data_parallel_size,
        num_microbatches=_num_microbatches(recipe, data_parallel_size),
        padded_vocab_size=sizes.vocab_size,
        ffn_hidden_size=sizes.ffn_hidden_size,
        num_query_groups=sizes.num_query_groups,
        kv_channels=sizes.kv_channels,
        max_position_embeddings=sizes.max_position_embeddings,
        lr_decay_iters=recipe.scheduler.lr_decay_iters or recipe.train.train_iters,
        tokens_per_step=tokens_per_step,
        total_tokens=tokens_per_step * recipe.train.train_iters,
        num_parameters=parameters,
        flops_per_token_full=flops_per_token(recipe.model, causal=False),
        flops_per_token_causal=flops_per_token(recipe.model, causal=True),
        memory=estimate(recipe, parameters, data_parallel_size, cluster.device),
        memory_capacity_bytes=_capacity(cluster, world_size),
    )


def _data_parallel_size(world_size: int, cluster: Cluster) -> int:
    if world_size < 1:
        raise UserError(f"{world_size} ranks", rule="a run has at least one rank")
    if cluster.gpus and world_size > len(cluster.gpus):
        raise UserError(
            f"{world_size} ranks on {len(cluster.gpus)} GPUs",
            rule="one rank a GPU",
            fix=f"at most {len(cluster.gpus)} ranks here",
        )
    return world_size


def _num_microbatches(recipe: Recipe, data_parallel_size: int) -> int:
    micro, whole = recipe.train.micro_batch_size, recipe.train.global_batch_size
    together = micro * data_parallel_size
    if whole % together == 0:
        return whole // together
    sizes = [size for size in range(1, data_parallel_size) if whole % (micro * size) == 0]
    ranks = f", or {sizes[-1]} data-parallel ranks" if sizes else ""
    raise UserError(
        f"{whole} is not a multiple of micro_batch_size {micro} × data-parallel size {data_parallel_size} = {together}",
        where="train.global_batch_size",
        rule="global_batch_size is a multiple of micro_batch_size × data-parallel size",
        fix=f"global_batch_size {multiples(whole, together)}{ranks}",
    )


def _capacity(cluster: Cluster, world_size: int) -> int:
    if cluster.gpus:
        return min(gpu.memory_free_bytes for gpu in cluster.gpus[:world_size])
    return cluster.memory_available_bytes // world_size
