"""Memory of the rank that needs most, part by part, and the size of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil

from llmrecipes.plan import parameters
from llmrecipes.plan.activations import peak
from llmrecipes.plan.layout import Layout
from llmrecipes.plan.parameters import count_on_rank, largest_gathered
from llmrecipes.plan.sharding import States, sharded
from llmrecipes.recipe.engines import ENGINES, engine_name
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.shape import Shape
from llmrecipes.units import GIB, MIB

# Resident after importing everything that a CPU run imports: 0.5 GiB with megatron-core 0.16, 0.84 GiB with 0.19. A
# loader process is forked and shares most of it.
_CPU_PROCESS = int(0.9 * GIB)
_CPU_LOADER = int(0.1 * GIB)
# CUDA context, loaded kernels, and workspaces of cuBLAS and cuDNN; an estimate, not measured.
_CUDA_PROCESS = int(1.0 * GIB)
COMMUNICATOR = 150 * MIB
"""Device memory of an NCCL communicator: 16 channels of 4 MiB (NCCL_BUFFSIZE), 4.7 MiB (LL128) and 0.5 MiB (LL), by
default. Calculated, not measured: off by up to a factor of 2 in either direction, because the channels depend on the
links; NVLink SHARP (NCCL_NVLS_ENABLE) adds to it."""
# Allocator overhead, as a share of the tensors that are allocated in every step. On a GPU unused parts of blocks; on a
# CPU measured as resident memory of gpt-tiny at several batch sizes (1.85 to 1.9 times the size of its tensors in fp32,
# 2.4 times in bf16).
_CUDA_REST = 0.05
_CPU_REST = {"fp32": 0.9, "bf16": 1.4, "fp16": 1.4}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step.

    `logits` are what the loss derives from the output layer's result, where that is the peak; `checkpoint_copy` is the
    snapshot of an asynchronous save (in a CPU run it uses the ranks' memory); `workspace` is the process without a
    model; `buffers` are those in which ZeRO gathers weights and reduces gradients, and TransformerEngine's user
    buffers.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    checkpoint_copy: int
    workspace: int
    buffers: int = 0
    host: int = 0
    """Offloaded from a GPU to the node's main memory; not in `total`."""

    @property
    def total(self) -> int:
        return sum(self._parts().values())

    def as_dict(self) -> dict[str, int]:
        """Parts and their sum, in bytes."""
        return {**self._parts(), "total": self.total}

    def _parts(self) -> dict[str, int]:
        return {name: size for name, size in asdict(self).items() if name != "host"}


def estimate(recipe: Recipe, s: Shape, layout: Layout, num_microbatches: int, device: str) -> Memory:
    """Estimate the memory of a rank of the pipeline stage that needs the most; `device` is `cuda` or `cpu`."""
    stages = range(layout.pipeline_model_parallel_size)
    return max(
        (of_stage(recipe, s, layout, num_microbatches, stage, device) for stage in stages), key=lambda each: each.total
    )


def of_stage(recipe: Recipe, s: Shape, layout: Layout, num_microbatches: int, stage: int, device: str) -> Memory:
    """Estimate the memory of a rank of one pipeline stage; `device` is `cuda` or `cpu`."""
    states, host = _states(recipe, s, layout, stage, device)
    moment = peak(recipe, s, layout, num_microbatches, stage, device)
    if device == "cuda":
        groups = len(communicators(recipe, s, layout))
        if recipe.speed.tp_comm_overlap:
            groups += USER_BUFFER_GROUPS
        copy, process, rest = 0, _CUDA_PROCESS + COMMUNICATOR * groups, _CUDA_REST
    else:
        states, host = states + host, States()
        copy = states.weights + states.optimizer if recipe.checkpoint.async_save else 0
        process = _CPU_PROCESS + _CPU_LOADER * recipe.data.num_workers
        rest = _CPU_REST[recipe.train.precision]
    return Memory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=moment.activations + moment.outputs,
        logits=moment.logits,
        checkpoint_copy=copy,
        workspace=process + int(rest * moment.total),
        buffers=states.buffers + (user_buffers(recipe, s, layout) if device == "cuda" else 0),
        host=host.total,
    )


USER_BUFFERS = 10
"""Products that TransformerEngine 2.20 has a user buffer for: forward and gradients of the four linear layers, but for
the weight gradients of the two that scatter."""
USER_BUFFER_GROUPS = 2
"""Process groups over which it creates them: all ranks, and the tensor-parallel ones."""


def user_buffers(recipe: Recipe, s: Shape, layout: Layout) -> int:
    """Bytes of the buffers of `speed.tp_comm_overlap`: each has a micro-batch's tokens of all tensor-parallel ranks."""
    if not recipe.speed.tp_comm_overlap:
        return 0
    tokens = recipe.model.seq_length * recipe.train.micro_batch_size // layout.context_parallel_size
    return USER_BUFFERS * tokens * s.hidden_size * 2


def communicators(recipe: Recipe, s: Shape, layout: Layout) -> dict[str, int]:
    """Ranks of each group in which a rank of the first or last stage communicates, by megatron-core's name.

    Each has a communicator, even if another has the same ranks.
    """
    tensor, stages = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    context = layout.context_parallel_size
    sizes = {
        "world": layout.world_size,
        "optimizer": layout.world_size if recipe.parallelism.use_distributed_optimizer else tensor * stages,
        "tp": tensor,
        "cp": context,
        "pp": stages,
        "dp-cp": layout.data_parallel_size * context,
    }
    if recipe.model.share_embeddings_and_output_weights or s.mtp_num_layers:
        sizes["embedding"] = min(stages, 2)
    if s.moe_layers(0, s.num_layers):
        inner, experts = layout.expert_tensor_parallel_size, layout.expert_model_parallel_size
        sizes |= {
            "tensor_and_context_parallel_group": tensor * context,
            "ep": experts,
            "expert_tp": inner,
            "expert_tp-ep": inner * experts,
            "expert_dp": layout.expert_data_parallel_size,
        }
    return {name: ranks for name, ranks in sizes.items() if ranks > 1}


def _states(recipe: Recipe, s: Shape, layout: Layout, stage: int, device: str) -> tuple[States, States]:
    """Model states of a rank on its device, and in host memory."""
    zero = recipe.zero
    n = count_on_rank(recipe.model, s, layout, stage, device, local=recipe.lora is not None)
    frozen = 0
    if recipe.lora is not None:
        frozen, n = n.total, parameters.count_adapters_on_rank(recipe.lora, recipe.model, s, layout, stage)
    if zero is not None and zero.stage >= 1 and ENGINES[engine_name(recipe)].all_of_zero:
        share = ceil(n.dense / layout.data_parallel_size) + ceil(n.experts / layout.expert_data_parallel_size)
        layer = largest_gathered(recipe.model, s, layout)
        return sharded(recipe, zero, n.total, share, layer, layout.data_parallel_size, device)
    half = recipe.train.precision != "fp32"
    element = 2 if half else 4
    # Adam's two moments in fp32, fp32 master weights if the model's weights are not fp32, and their average.
    state = (12 if half else 8) + (4 if recipe.optimizer.ema_decay is not None else 0)
    if recipe.parallelism.use_distributed_optimizer:
        # Dense parameters are replicated on all data- and context-parallel ranks, experts only on some of them.
        dense_ranks = layout.data_parallel_size * layout.context_parallel_size
        optimizer = state * n.dense // dense_ranks + state * n.experts // layout.expert_data_parallel_size
    else:
        optimizer = state * n.total
    reduced = 4 if recipe.parallelism.grad_reduce_in_fp32 or not half else element
    return States(weights=element * (frozen + n.total), gradients=reduced * n.total, optimizer=optimizer), States()


# Master weight and Adam's two moments in fp32, per parameter; a checkpoint has the master weight in fp32 runs too.
_SAVED_STATE = 12
# The moving average of the weights.
_SAVED_AVERAGE = 4


def checkpoint_bytes(recipe: Recipe, parameters: int) -> int:
    """Bytes of one checkpoint: weights in their training precision, and the optimizer state.

    Every tensor is written once, whatever the layout. Random states and metadata (20 KiB a rank or less) are left out.

    Args:
        recipe: for the precision of the weights.
        parameters: of the full model, or of the adapters if only they are trained.
    """
    average = _SAVED_AVERAGE if recipe.optimizer.ema_decay is not None else 0
    return parameters * (_SAVED_STATE + average + (4 if recipe.train.precision == "fp32" else 2))
