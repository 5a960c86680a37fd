"""Distribution over ranks: degrees, data-parallel sizes and the layers of every pipeline stage."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.recipe.derived.adapters import needs_local_layers
from llmrecipes.recipe.derived.degrees import divisors, model_parallel_size, multiples, smallest_world
from llmrecipes.recipe.derived.stage_layout import layers_per_stage
from llmrecipes.recipe.engines import DEEPSPEED, engine_name
from llmrecipes.recipe.rules import qat_rules
from llmrecipes.recipe.rules.layout_rules import shared_sizes
from llmrecipes.recipe.rules.recipe_rules import packs_in_local_layers
from llmrecipes.recipe.schema import LayoutKeys, Recipe


@dataclass(frozen=True)
class Layout:
    """The parallel degrees of a run, all derived.

    Dense layers see world_size = tensor × context × data × pipeline, experts the same ranks as expert_tensor × expert ×
    expert_data × pipeline (arXiv 2504.14960). `layers_per_stage` has a list for each stage: the layers of each of its
    chunks, a single one without virtual stages. Chunk c of stage s comes after all stages' chunks c - 1.
    """

    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    sequence_parallel: bool
    data_parallel_size: int
    expert_data_parallel_size: int
    layers_per_stage: tuple[tuple[int, ...], ...]

    def as_dict(self) -> dict[str, int]:
        """The degrees by name, as in a checkpoint's manifest."""
        return {name: int(value) for name, value in asdict(self).items() if isinstance(value, int)}

    def first_layer(self, stage: int, chunk: int) -> int:
        """Index, from 0, of the first layer of a chunk."""
        return self._first_layers[chunk * self.pipeline_model_parallel_size + stage]

    @cached_property
    def _first_layers(self) -> tuple[int, ...]:
        """First layers in the order of the model: of all stages' first chunks, then of their second ones."""
        chunks = range(self.virtual_pipeline_model_parallel_size)
        return tuple(accumulate((layers[chunk] for chunk in chunks for layers in self.layers_per_stage), initial=0))

    def final_norm(self, predictions: int) -> tuple[int, int]:
        """Stage and chunk of the norm after the last layer.

        It is where the loss is, unless a model predicts `predictions` more tokens: then the last layer has it with it.
        """
        stages = self.pipeline_model_parallel_size
        chunks = self.virtual_pipeline_model_parallel_size
        places = [(stage, chunk) for chunk in range(chunks) for stage in range(stages)]
        with_layers = [(stage, chunk) for stage, chunk in places if self.layers_per_stage[stage][chunk]]
        return with_layers[-1] if predictions else places[-1]


def layout(recipe: Recipe, world_size: int, cluster: Cluster) -> Layout:
    """Lay a recipe out on a number of ranks.

    Raises:
        UserError: the degrees do not make up that number of ranks, or the machine cannot run them.
    """
    parallel = recipe.layout
    _check_machine(parallel, world_size, cluster)
    tensor = parallel.tensor_model_parallel_size
    stages = parallel.pipeline_model_parallel_size
    dense = model_parallel_size(parallel)
    if world_size % dense:
        raise UserError(
            f"{world_size} ranks are not a multiple of {_product(parallel, dense)}",
            where="layout",
            rule="the number of ranks must be tensor × pipeline × context × data-parallel size",
            fix=_ranks(recipe, world_size, dense),
        )
    experts = parallel.expert_model_parallel_size
    expert_tensor = parallel.expert_tensor_parallel_size or tensor
    if not recipe.model.num_moe_experts:
        expert_tensor = tensor
    of_experts = experts * expert_tensor * stages
    if recipe.model.num_moe_experts and world_size % of_experts:
        raise UserError(
            f"{world_size} ranks are not a multiple of expert_model_parallel_size {experts} × "
            f"expert_tensor_parallel_size {expert_tensor} × pipeline_model_parallel_size {stages} = {of_experts}",
            where="layout.expert_model_parallel_size",
            rule="the number of ranks must also be expert × expert-tensor × pipeline × expert-data-parallel size",
            fix=_ranks(recipe, world_size, math.lcm(dense, of_experts)),
        )
    if recipe.model.num_moe_experts and experts == 1 and expert_tensor != tensor:
        # megatron-core reduces expert gradients over a separate group only if expert parallelism is on.
        raise UserError(
            f"tensor_model_parallel_size {tensor} with expert_tensor_parallel_size {expert_tensor} and "
            "expert_model_parallel_size 1",
            where="layout.expert_model_parallel_size",
            rule="without expert parallelism, megatron-core silently sums the experts' gradients over too few ranks, "
            "unless experts are sharded like the dense layers",
            fix=f"expert_model_parallel_size 2 or more, or expert_tensor_parallel_size {tensor}",
        )
    even = recipe.model.moe_pad_expert_input_to_capacity
    if recipe.model.num_moe_experts and expert_tensor > 1 and not even and cluster.device == "cpu":
        unset = " (unset: tensor_model_parallel_size)" if not parallel.expert_tensor_parallel_size else ""
        raise UserError(
            f"expert_tensor_parallel_size {expert_tensor}{unset} on a CPU",
            where="layout.expert_tensor_parallel_size",
            rule="gloo, used by CPU ranks, cannot gather the uneven numbers of tokens of experts sharded over ranks",
            fix="expert_tensor_parallel_size 1, or even numbers with moe_pad_expert_input_to_capacity true",
        )
    _check_latent_attention(recipe, cluster)
    _check_attention(recipe, cluster)
    return Layout(
        world_size=world_size,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size or 1,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=expert_tensor,
        sequence_parallel=parallel.sequence_parallel,
        data_parallel_size=world_size // dense,
        expert_data_parallel_size=world_size // of_experts,
        layers_per_stage=layers_per_stage(recipe),
    )


def _check_machine(parallel: LayoutKeys, world_size: int, cluster: Cluster) -> None:
    if world_size < 1:
        raise UserError(f"{world_size} ranks", where="--nproc", rule="a run needs at least one rank")
    if not cluster.gpus:
        return
    gpus = len(cluster.gpus)
    tensor = parallel.tensor_model_parallel_size
    near = cluster.gpus_per_domain
    if tensor > near or (world_size > tensor and near % tensor):
        one, many = ("an NVLink domain", "NVLink domains") if cluster.nvlink_domain else ("a node", "nodes")
        raise UserError(
            f"{tensor} on {many} of {near} GPUs",
            where="layout.tensor_model_parallel_size",
            rule=f"tensor-parallel ranks communicate in every layer, so they must be in {one} and divide it evenly",
            fix=f"tensor_model_parallel_size {divisors(near, tensor)}",
        )
    if world_size > gpus:
        least = smallest_world(parallel)
        raise UserError(
            f"{world_size} ranks on {gpus} GPUs",
            where="--nproc" if least <= gpus else "layout",
            rule="at most one rank per GPU",
            fix=f"at most {gpus} ranks on this machine"
            if least <= gpus
            else f"smaller parallel degrees: these need a multiple of {least} ranks",
        )


def only_in_local_layers(recipe: Recipe) -> str | None:
    """What a recipe has that only megatron-core's own layers have; None if it has nothing of that kind."""
    if reason := needs_local_layers(recipe) or qat_rules.needs_local_layers(recipe):
        return reason
    if recipe.data.chat is not None and recipe.data.chat.packing and packs_in_local_layers(recipe):
        return "separates packed conversations"
    return None


def local_layers_reason(recipe: Recipe) -> str | None:
    """Why `transformer_impl: auto` takes megatron-core's own layers on every machine; None if the machine decides."""
    if reason := only_in_local_layers(recipe):
        return reason
    if engine_name(recipe) == DEEPSPEED:
        return "DeepSpeed is untested with TransformerEngine's layers"
    if recipe.train.precision == "fp32":
        return "fp32, which TransformerEngine would compute in TF32"
    return None


def expected_layers(recipe: Recipe, device: str) -> tuple[bool, str]:
    """Whether layers are TransformerEngine's on a machine that has it if it has GPUs, and why."""
    named = recipe.model.transformer_impl
    if named != "auto":
        return named == "transformer_engine", f"transformer_impl {named}"
    if device == "cpu":
        return False, "no GPU"
    reason = local_layers_reason(recipe)
    return reason is None, reason or "as in the CUDA image"


def _check_latent_attention(recipe: Recipe, cluster: Cluster) -> None:
    """TransformerEngine's layers do not sum the gradient of the key that all heads share; the local ones here do."""
    model, parallel = recipe.model, recipe.layout
    transformer_engine, _ = expected_layers(recipe, cluster.device)
    tensor = parallel.tensor_model_parallel_size
    if model.multi_latent_attention and transformer_engine and tensor > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"false with multi_latent_attention, tensor_model_parallel_size {tensor} and transformer_impl "
            f"{model.transformer_impl}",
            where="layout.sequence_parallel",
            rule="with TransformerEngine, only sequence parallelism sums the gradient of the rotated key shared by "
            "all heads "
            "over tensor-parallel ranks; without it, their weights silently diverge",
            fix="sequence_parallel true, or model.transformer_impl local",
        )


def _check_attention(recipe: Recipe, cluster: Cluster) -> None:
    """TransformerEngine's ring of keys and values knows no window, and only its kernels have sinks on a GPU."""
    model = recipe.model
    transformer_engine, reason = expected_layers(recipe, cluster.device)
    ranks = recipe.layout.context_parallel_size
    kind = recipe.layout.cp_comm_type
    sinks = model.softmax_type != "vanilla"
    if sinks and cluster.device == "cuda" and not transformer_engine:
        raise UserError(
            f"{model.softmax_type} in local layers on a GPU ({reason})",
            where="model.softmax_type",
            rule="torch has no kernel with sinks: all scores would be in memory",
            fix="model.transformer_impl transformer_engine, or softmax_type vanilla",
        )
    having = ("a2a",) if sinks else ("a2a", "all_gather")
    if (sinks or model.window_size) and transformer_engine and ranks > 1 and kind not in having:
        raise UserError(
            f"{kind or 'p2p'} with {'softmax_type' if sinks else 'window_size'}, context_parallel_size {ranks} and "
            f"transformer_impl {model.transformer_impl}",
            where="layout.cp_comm_type",
            rule="TransformerEngine has sinks only where ranks exchange heads, and windows also where they gather keys",
            fix=f"cp_comm_type {' or '.join(having)}",
        )


def _product(parallel: LayoutKeys, dense: int) -> str:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    parts = [f"{name} {getattr(parallel, name)}" for name in names if getattr(parallel, name) > 1]
    return f"{' × '.join(parts)} = {dense}" if len(parts) > 1 else parts[0]


def _ranks(recipe: Recipe, world_size: int, least: int) -> str:
    """Numbers of ranks that fit the degrees, and tensor-parallel sizes that fit the ranks and the model."""
    fix = f"{multiples(world_size, least)} ranks"
    parallel = recipe.layout
    others = parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    if world_size % others == 0 and not recipe.model.num_moe_experts:
        near = divisors(
            math.gcd(world_size // others, *shared_sizes(recipe).values()), parallel.tensor_model_parallel_size
        )
        fix += f", or tensor_model_parallel_size {near}" if near != "1" else ""
    return fix
