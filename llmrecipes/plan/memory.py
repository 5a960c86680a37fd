"""Memory of the rank that needs most, part by part, and the size of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil, prod
from typing import Self

from llmrecipes.plan import parameters
from llmrecipes.plan.kernels import own_layers
from llmrecipes.plan.layout import Layout
from llmrecipes.plan.losses import tokens_of_a_micro_batch
from llmrecipes.plan.muon import update_bytes
from llmrecipes.plan.parameters import RankParameters, count_on_rank, count_vectors, largest_gathered, vectors_on_rank
from llmrecipes.plan.peak import peak
from llmrecipes.plan.sharding import States, sharded
from llmrecipes.recipe.derived.shape import Shape, shape
from llmrecipes.recipe.derived.stage_layout import layer_places, layers_per_stage
from llmrecipes.recipe.derived.weight_names import weights
from llmrecipes.recipe.engines import ENGINES, MEGATRON, engine_name
from llmrecipes.recipe.rules.distill_rules import has_teacher, section, teacher_recipe
from llmrecipes.recipe.rules.optimizer_kinds import matrix_bytes, other_bytes
from llmrecipes.recipe.rules.preference_rules import has_reference, has_second_model
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.fp8 import in_bf16
from llmrecipes.recipe.speedups.graphs import covered
from llmrecipes.units import GIB, MIB

# Resident after importing everything that a CPU run imports: 0.84 GiB. A loader process is forked and shares most of
# it.
_CPU_PROCESS = int(0.9 * GIB)
_CPU_LOADER = int(0.1 * GIB)
# Pinned copies are in buffers of powers of two: 1.09 times the files in a dry run of gpt-1b, 1.00 of gpt-7b.
_SLABS = 1.1
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

    With `train.fp8`, `weights` has copies in fp8 too, and with `qat` the rounded matrices.
    `logits` are what the loss derives from the output layer's result, where that is the peak; `checkpoint_copy` is the
    snapshot of a save (in a CPU run it uses the ranks' memory; of others see `HostMemory`); `workspace` is the process
    without a model; `buffers` are those in which ZeRO gathers weights and reduces gradients, TransformerEngine's user
    buffers, and what recorded layers take and return (`layout.cuda_graph_impl`); `teacher` are the weights of a teacher
    (`distill`) or of a reference (`dpo`), and what is kept of its passes; `movements` are those of embeddings, and
    their gradients (`train.adversarial`); `update` is what an update takes beyond all of a pass, which is freed by
    then.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    checkpoint_copy: int
    workspace: int
    buffers: int = 0
    teacher: int = 0
    movements: int = 0
    update: int = 0
    host: int = 0
    """Offloaded from a GPU to the node's main memory; not in `total`."""

    @property
    def total(self) -> int:
        return sum(self._parts().values())

    def as_dict(self) -> dict[str, int]:
        """Parts and their sum, in bytes."""
        return {**self._parts(), "total": self.total}

    def _parts(self) -> dict[str, int]:
        rare = {"teacher", "movements", "update"}  # left out where there is none
        return {name: size for name, size in asdict(self).items() if name != "host" and (size or name not in rare)}


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a node's main memory that a run on GPUs keeps from its first save on.

    `offloaded` are the states that ZeRO keeps there; `staged` are the copies from which the ranks write checkpoints;
    `processes` are the ranks, their loaders, the warm spares of `--max-restarts`, and that of `also_export`.
    """

    offloaded: int
    staged: int
    processes: int

    @property
    def total(self) -> int:
        return self.offloaded + self.staged + self.processes

    @classmethod
    def of(cls, recipe: Recipe, memory: Memory, checkpoint: int, world_size: int, on_node: int) -> Self:
        """Estimate it.

        Args:
            recipe: for its loaders and local checkpoints.
            memory: of a rank.
            checkpoint: bytes of one checkpoint, of which every rank writes about the same share.
            world_size: ranks of the run.
            on_node: ranks of the node; 0: they run on a CPU, where all of this is in `memory`.
        """
        of_rank = checkpoint / world_size
        if recipe.checkpoint.non_persistent_save_interval is not None:
            of_rank += min(memory.weights + memory.optimizer, checkpoint)  # each rank writes all that it has
        processes = (2 * _CPU_PROCESS + _CPU_LOADER * recipe.data.num_workers) * on_node
        if recipe.checkpoint.also_export is not None and on_node:
            # It has the largest tensor about twice, in fp32.
            processes += _CPU_PROCESS + 2 * 4 * max(map(prod, weights(recipe.model).values()))
        return cls(memory.host * on_node, int(of_rank * on_node * _SLABS), processes)


def estimate(recipe: Recipe, s: Shape, layout: Layout, num_microbatches: int, device: str) -> Memory:
    """Estimate the memory of a rank of the pipeline stage that needs the most; `device` is `cuda` or `cpu`."""
    return max(
        (of_stage(recipe, s, layout, num_microbatches, stage, device) for stage in differing_stages(recipe, s, layout)),
        key=lambda each: each.total,
    )


def differing_stages(recipe: Recipe, s: Shape, layout: Layout) -> Iterator[int]:
    """Stages of which one needs the most memory and has the most parameters: without those like an earlier one.

    Of two inner stages with the same layers the later one has fewer micro-batches in flight, so that a plan of 64
    stages examines three.
    """
    last = layout.pipeline_model_parallel_size - 1
    seen = set()
    differ = bool(recipe.train.freeze) or recipe.distill is not None  # by the layers' numbers
    apart = {0, last, layout.final_norm(s.mtp_num_layers)[0]}
    for stage in range(last + 1):
        kinds = []
        for chunk, layers in enumerate(layout.layers_per_stage[stage]):
            first = layout.first_layer(stage, chunk)
            numbers = range(first, first + layers)
            kinds.append(tuple((s.moe_layers(number, number + 1), in_bf16(recipe, number)) for number in numbers))
        if differ or stage in apart or not all(kinds) or tuple(kinds) not in seen:
            yield stage
        if stage not in apart:
            seen.add(tuple(kinds))


def of_stage(recipe: Recipe, s: Shape, layout: Layout, num_microbatches: int, stage: int, device: str) -> Memory:
    """Estimate the memory of a rank of one pipeline stage; `device` is `cuda` or `cpu`."""
    states, host = _states(recipe, s, layout, stage, device)
    copied = _copied_gradients(recipe, _trained(recipe, s, layout, stage, device), layout)
    moment = peak(recipe, s, layout, num_microbatches, stage, device)
    if device == "cuda":
        groups = len(communicators(recipe, s, layout))
        if recipe.layout.tp_comm_overlap:
            groups += USER_BUFFER_GROUPS
        copy = 0
        process = _CUDA_PROCESS + COMMUNICATOR * groups
        rest = _CUDA_REST
    else:
        states = states + host
        host = States()
        copy = states.weights + states.optimizer  # the snapshot is taken, and kept, without async_save too
        process = _CPU_PROCESS + _CPU_LOADER * recipe.data.num_workers
        rest = _CPU_REST[recipe.train.precision]
    return Memory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=moment.activations + moment.outputs + moment.gradients,
        logits=moment.logits,
        checkpoint_copy=copy,
        workspace=process + int(rest * moment.total),
        buffers=states.buffers
        + (
            user_buffers(recipe, s, layout) + graph_buffers(recipe, s, layout, num_microbatches, stage)
            if device == "cuda"
            else 0
        ),
        teacher=teacher_bytes(recipe, layout, num_microbatches, stage, device),
        movements=movements(recipe, s, layout, num_microbatches) if stage == 0 else 0,
        update=max(0, update_bytes(recipe, s, layout, device) + copied - moment.total),
        host=host.total,
    )


def model_states(recipe: Recipe, s: Shape, layout: Layout, stage: int, device: str) -> int:
    """Bytes of weights, gradients and optimizer of a rank of one pipeline stage, on its device: the part of `of_stage`
    that depends on neither micro-batch nor recomputation."""
    states, host = _states(recipe, s, layout, stage, device)
    return states.total if device == "cuda" else states.total + host.total


def teacher_bytes(recipe: Recipe, layout: Layout, num_microbatches: int, stage: int, device: str) -> int:
    """Bytes of a teacher on a rank of one stage: its weights, on the last stage the last hidden states, and those of
    the layers that are compared there (`distill.layers`), of all micro-batches of a step where there are stages.

    Its passes keep nothing for a backward pass, and no activations of the student exist then. States of a compared
    layer are replaced by a gradient of the same size, which is kept until the student's backward pass has added it.
    """
    if has_reference(recipe):
        return _reference_bytes(recipe, layout, num_microbatches, stage, device)
    if not has_teacher(recipe):
        return 0
    teacher = teacher_recipe(recipe)
    s = shape(teacher.model)
    stages = layout.pipeline_model_parallel_size
    layout = replace(layout, layers_per_stage=layers_per_stage(teacher))
    weights = count_on_rank(teacher.model, s, layout, stage, device, local=own_layers(teacher, device)).total
    tokens = tokens_of_a_micro_batch(recipe, layout) * (num_microbatches if stages > 1 else 1)
    ranks = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
    places = layer_places(recipe)
    kept = sum(places[layer - 1][0] == stage for layer, _ in section(recipe).layers) + (stage == stages - 1)
    hidden = kept * tokens * s.hidden_size / ranks
    return int((4 if recipe.train.precision == "fp32" else 2) * (weights + hidden))


def movements(recipe: Recipe, s: Shape, layout: Layout, num_microbatches: int) -> int:
    """Bytes of the movements of a step's embeddings on a rank that has some, and of their gradients; with one movement
    from nothing, its gradient becomes it."""
    section = recipe.train.adversarial
    if section is None:
        return 0
    ranks = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
    elements = num_microbatches * tokens_of_a_micro_batch(recipe, layout) * s.hidden_size / ranks
    return int((4 if recipe.train.precision == "fp32" else 2) * elements * (1 if section.type == "fgm" else 2))


def _reference_bytes(recipe: Recipe, layout: Layout, num_microbatches: int, stage: int, device: str) -> int:
    """As `teacher_bytes`, of a reference (`dpo`): weights of a second model, and log-probabilities in fp32."""
    model = recipe.model
    stages = layout.pipeline_model_parallel_size
    weights = 0
    if has_second_model(recipe):
        weights = count_on_rank(model, shape(model), layout, stage, device, local=own_layers(recipe, device)).total
    kept = 0.0
    if stage == stages - 1:
        kept = tokens_of_a_micro_batch(recipe, layout) * (num_microbatches if stages > 1 else 1)
    return int((4 if recipe.train.precision == "fp32" else 2) * weights + 4 * kept)


USER_BUFFERS = 10
"""Products that TransformerEngine 2.20 has a user buffer for: forward and gradients of the four linear layers, but for
the weight gradients of the two that scatter."""
USER_BUFFER_GROUPS = 2
"""Process groups over which it creates them: all ranks, and the tensor-parallel ones."""


def user_buffers(recipe: Recipe, s: Shape, layout: Layout) -> int:
    """Bytes of the buffers of `layout.tp_comm_overlap`: each has the tokens of a micro-batch of all TP ranks."""
    if not recipe.layout.tp_comm_overlap:
        return 0
    tokens = recipe.model.seq_length * recipe.layout.micro_batch_size // layout.context_parallel_size
    return USER_BUFFERS * tokens * s.hidden_size * 2


STATIC = 4
"""Tensors of a micro-batch's width at a fixed address for each recorded layer: input, output, and their gradients.
What it keeps for the backward pass is `activations`, as without. An estimate, not measured: TransformerEngine shares
some between layers, and a graph's kernels take memory of the driver."""


def graph_buffers(recipe: Recipe, s: Shape, layout: Layout, num_microbatches: int, stage: int) -> int:
    """Bytes of what layers recorded as CUDA graphs take and return on one stage.

    With pipeline stages there is a graph for each micro-batch, whose buffers are shared once a micro-batch's backward
    pass is over: as many are in flight as in 1F1B. Without `gradient_accumulation_fusion` each has the gradients of
    its weights, too.
    """
    parts = covered(recipe)
    if not parts:
        return 0
    layers = sum(layout.layers_per_stage[stage])
    in_flight = min(num_microbatches, layout.pipeline_model_parallel_size - stage)
    shared = layout.context_parallel_size
    if recipe.layout.sequence_parallel:
        shared *= layout.tensor_model_parallel_size
    tokens = recipe.model.seq_length * recipe.layout.micro_batch_size // shared
    buffers = STATIC * layers * in_flight * tokens * s.hidden_size * 2
    if recipe.layout.gradient_accumulation_fusion is False:
        buffers += in_flight * 2 * parameters.count_products_on_rank(recipe, s, layout, stage)
    return buffers


def communicators(recipe: Recipe, s: Shape, layout: Layout) -> dict[str, int]:
    """Ranks of each group in which a rank of the first or last stage communicates, by megatron-core's name.

    Each has a communicator, even if another has the same ranks.
    """
    tensor = layout.tensor_model_parallel_size
    stages = layout.pipeline_model_parallel_size
    context = layout.context_parallel_size
    sharded = recipe.layout.use_distributed_optimizer
    sizes = {
        "world": layout.world_size,
        **({"optimizer": layout.world_size} if sharded else {"model_parallel_group": tensor * stages}),
        "tp": tensor,
        "cp": context,
        "pp": stages,
        "dp-cp": layout.data_parallel_size * context,
    }
    if recipe.model.share_embeddings_and_output_weights or s.mtp_num_layers:
        sizes["embedding"] = min(stages, 2)
    if s.moe_layers(0, s.num_layers):
        inner = layout.expert_tensor_parallel_size
        experts = layout.expert_model_parallel_size
        sizes |= {
            "tensor_and_context_parallel_group": tensor * context,
            "ep": experts,
            "expert_tp": inner,
            "expert_tp-ep": inner * experts,
            "expert_dp": layout.expert_data_parallel_size,
        }
        if not sharded:
            sizes["expert_tensor_model_pipeline_parallel_group"] = inner * experts * stages
    return {name: ranks for name, ranks in sizes.items() if ranks > 1}


def _states(recipe: Recipe, s: Shape, layout: Layout, stage: int, device: str) -> tuple[States, States]:
    """Model states of a rank on its device, and in host memory."""
    zero = recipe.layout.zero
    n = _trained(recipe, s, layout, stage, device)
    frozen = count_on_rank(recipe.model, s, layout, stage, device, local=own_layers(recipe, device)).total
    frozen -= n.total if recipe.lora is None else 0
    if zero is not None and zero.stage >= 1 and ENGINES[engine_name(recipe)].all_of_zero:
        share = ceil(n.dense / layout.data_parallel_size) + ceil(n.experts / layout.expert_data_parallel_size)
        layer = largest_gathered(recipe.model, s, layout)
        return sharded(recipe, zero, n.total, share, layer, layout.data_parallel_size, device)
    half = recipe.train.precision != "fp32"
    element = 2 if half else 4
    # AdamW's two moments or another momentum, fp32 master weights if the model's weights are not fp32, their average.
    state = matrix_bytes(recipe.optimizer) + 4 * half + (4 if recipe.optimizer.ema_decay is not None else 0)
    if recipe.tracking.layers_interval is not None:
        state += 4  # the weights before the update that is measured
    optimizer = _of_own(recipe, n, layout, state)
    if more := other_bytes(recipe.optimizer) - matrix_bytes(recipe.optimizer):
        optimizer += more * vectors_on_rank(recipe.model, s, layout, stage)
    reduced = 4 if recipe.train.grad_reduce_in_fp32 or not half else element
    weights = element * (frozen + n.total)
    if device == "cuda" and recipe.train.fp8 is not None:
        weights += int(_FP8_COPIES * parameters.count_products_on_rank(recipe, s, layout, stage))
    if recipe.qat is not None:
        weights += element * parameters.count_rounded_on_rank(recipe, s, layout, stage)
    return States(weights=weights, gradients=reduced * n.total, optimizer=optimizer), States()


def _trained(recipe: Recipe, s: Shape, layout: Layout, stage: int, device: str) -> RankParameters:
    """Parameters of a rank that are trained."""
    if recipe.lora is not None:
        return parameters.count_adapters_on_rank(recipe.lora, recipe.model, s, layout, stage)
    return parameters.count_trained_on_rank(recipe, s, layout, stage, device, local=own_layers(recipe, device))


def _of_own(recipe: Recipe, n: RankParameters, layout: Layout, size: int) -> int:
    """Bytes of what a rank of megatron-core's optimizer has of the parameters that it updates, `size` of each."""
    if not recipe.layout.use_distributed_optimizer:
        return size * n.total
    # Dense parameters are replicated on all data- and context-parallel ranks, experts only on some of them.
    dense_ranks = layout.data_parallel_size * layout.context_parallel_size
    return size * n.dense // dense_ranks + size * n.experts // layout.expert_data_parallel_size


def _copied_gradients(recipe: Recipe, n: RankParameters, layout: Layout) -> int:
    """Bytes of the copies in fp32 of gradients in 16 bits, from which megatron-core updates master weights."""
    train = recipe.train
    in_fp32 = train.precision == "fp32" or train.grad_reduce_in_fp32
    if in_fp32 or recipe.optimizer.use_precision_aware_optimizer or engine_name(recipe) != MEGATRON:
        return 0
    return _of_own(recipe, n, layout, 4)


_FP8_COPIES = 2 * (1 + 1 / 32)
"""Bytes of a weight in fp8 for as long as it is not updated: by rows and by columns, with scales, for products forward
and backward. megatron-core's layers let TransformerEngine keep them between micro-batches."""
# The master weight in fp32, per parameter; a checkpoint has it in fp32 runs too.
_SAVED_MASTER = 4
# The moving average of the weights.
_SAVED_AVERAGE = 4


def checkpoint_bytes(recipe: Recipe, s: Shape, parameters: int, frozen: int = 0) -> int:
    """Bytes of one checkpoint: weights in their training precision, and the optimizer state.

    Every tensor is written once, whatever the layout. Random states and metadata (20 KiB a rank or less) are left out.

    Args:
        recipe: for the precision of the weights.
        s: of its model.
        parameters: of the full model, or of the adapters if only they are trained.
        frozen: those of them that have no optimizer state.
    """
    matrix = matrix_bytes(recipe.optimizer)
    other = other_bytes(recipe.optimizer)
    state = _SAVED_MASTER + matrix + (_SAVED_AVERAGE if recipe.optimizer.ema_decay is not None else 0)
    size = parameters * (4 if recipe.train.precision == "fp32" else 2) + (parameters - frozen) * state
    return size + (other - matrix) * count_vectors(recipe.model, s) if other != matrix else size
