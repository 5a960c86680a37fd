"""The section `layout`: how a run is executed, not what it learns. All of it is optional.

Names are Megatron's. Features of megatron-core that are unset are chosen by rule for the machine
(`recipe.speedups.features`); one that is set and cannot be had is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from llmrecipes.recipe.sections.section import EXECUTION, NonNegInt, PosInt, Section
from llmrecipes.recipe.sections.zero import Zero

AUTO = "auto"
"""The layout that is chosen for the machine, and the engine that follows from the other keys."""
Switch = bool | None
ProcessGroup = Literal["tp", "cp", "pp", "dp", "dp_cp", "tp_cp", "ep", "ep_dp", "ep_tp", "hcp"]
RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts", "moe"]
"""What `recipe/speedups/recompute.py` has rules for."""


class LayoutKeys(Section):
    """How the work is spread over ranks and computed there. The data-parallel size is derived: world size divided by
    the model-parallel degrees."""

    half = EXECUTION

    name: Annotated[str, Field(min_length=1)] | None = AUTO
    """What sets the keys that are not set here; `layout: NAME` is short for it. `auto`: degrees, micro-batch and
    recomputation are chosen for the GPUs of the run, the fastest that fit. Or the name of one of `layouts`; set on the
    command line (`layout=NAME`), it replaces keys of the file. null: nothing, they have their defaults."""
    engine: str = AUTO
    """Training engine: `auto`, `megatron` or `deepspeed`. `auto` selects deepspeed for `layout.zero.stage` 2 and 3 and
    for offload, otherwise megatron."""
    tensor_model_parallel_size: PosInt = 1
    """Tensor-parallel size: ranks that share every layer's matrices and heads (Megatron-LM, arXiv 1909.08053)."""
    pipeline_model_parallel_size: PosInt = 1
    """Pipeline-parallel size: stages into which the layers are split (1F1B, arXiv 2104.04473)."""
    virtual_pipeline_model_parallel_size: Annotated[int, Field(gt=1)] | None = None
    """Chunks of layers per pipeline stage: a smaller bubble at the cost of more communication (interleaved schedule,
    arXiv 2104.04473); unset: one."""
    context_parallel_size: PosInt = 1
    """Context-parallel size: ranks that share every sequence, two chunks each (Llama 3, arXiv 2407.21783, section
    3.3.2)."""
    expert_model_parallel_size: PosInt = 1
    """Expert-parallel size: ranks that share the experts of a layer. These are the tensor-, context- and
    data-parallel ranks, not additional ones (arXiv 2504.14960)."""
    expert_tensor_parallel_size: PosInt | None = None
    """Ranks that share the matrices of each expert; unset: `tensor_model_parallel_size`."""
    sequence_parallel: bool = False
    """Split norms, dropout and the residual stream by tokens over the tensor-parallel ranks (arXiv 2205.05198)."""
    num_layers_in_first_pipeline_stage: PosInt | None = None
    """Layers in the first pipeline stage; stages without an explicit number share the remaining layers evenly."""
    num_layers_in_last_pipeline_stage: PosInt | None = None
    """Layers in the last pipeline stage."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage, which then has one layer fewer."""
    account_for_loss_in_pipeline_split: bool = False
    """Count output layer and loss as a layer of the last stage, which then has one layer fewer."""
    pipeline_model_parallel_layout: Annotated[str, Field(min_length=1)] | None = None
    """Contents of every pipeline stage in megatron-core's notation: `|` separates stages, with virtual stages chunk
    by chunk; `E` is the embedding, `t` a transformer layer, `m` a layer of multi-token prediction, `L` the loss,
    `(tt|)*2` is `tt|tt|`. Unset: as set by the keys above, or evenly."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state and master weights over data-parallel ranks (ZeRO-1, arXiv 1910.02054)."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket during the backward pass."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward pass; needs `overlap_grad_reduce` and the distributed
    optimizer."""
    zero: Zero | None = None
    micro_batch_size: PosInt = 1
    """Sequences per forward pass of a data-parallel rank."""
    recompute_granularity: Literal["selective", "full", "auto"] | None = None
    """Recompute parts of layers (`selective`, see `recompute_modules`) or whole layers (`full`) in the backward pass
    instead of storing activations (arXiv 2205.05198), except core attention whose kernel stores no scores, as on all
    GPUs. `auto`: the least that fits the machine with 5% of its memory free."""
    recompute_method: Literal["uniform", "block"] | None = None
    """For `full`: recompute all layers in chunks (`uniform`), or only the first layers (`block`)."""
    recompute_num_layers: PosInt | None = None
    """For `full`: layers per chunk (`uniform`), or number of recomputed layers (`block`)."""
    recompute_modules: Annotated[tuple[RecomputeModule, ...], Field(min_length=1, strict=False)] | None = None
    """For `selective`: parts of each layer to recompute; unset: `core_attn`. `layernorm`: the norms before attention
    and MLP, unless fused with the next GEMM. `mla_up_proj`: queries, keys and values of latent attention. `mlp`:
    dense MLPs. `moe_act`: the activation of experts (TransformerEngine only). `shared_experts`. `moe`: experts with
    router and dispatch."""
    torch_compile: bool = False
    """Compile the transformer layers and the loss with torch.compile; in layers with experts, only the attention."""
    loss_chunk_tokens: NonNegInt | None = None
    """Tokens per chunk in which the output layer and the loss are computed, so that the logits of a micro-batch are
    never all in memory; 0: no chunks. Unset: chunks only if the logits would take more than 1/16 of a GPU's memory,
    or 256 MiB on a CPU."""
    bias_activation_fusion: Switch = None
    """Fuse the activation of the MLP into one kernel: SwiGLU, or bias and exact GELU. Unset: on for GPUs with a
    compiler, and with `layout.torch_compile`."""
    bias_dropout_fusion: Switch = None
    """Fuse bias, dropout and residual addition into one kernel. Unset: on for GPUs with a compiler where the model has
    biases or `hidden_dropout`, and with `layout.torch_compile`."""
    apply_rope_fusion: Switch = None
    """Apply rotary embeddings in one kernel. Unset: on for GPUs with `position_embedding_type: rope`, but off for
    latent attention, whose kernel needs TransformerEngine's layers and `rope_type: yarn`."""
    cross_entropy_loss_fusion: Switch = None
    """Compute the loss in compiled kernels, with logits in the precision of the model. Unset: on for GPUs with a
    compiler, and with `layout.torch_compile`."""
    gradient_accumulation_fusion: Switch = None
    """Add weight gradients to the gradient buffer in the kernel of their GEMM (TransformerEngine). Unset: on with
    TransformerEngine's layers."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] | None = None
    """Attention kernel of TransformerEngine: FlashAttention (`flash`), cuDNN's (`fused`), or unfused. Unset: `auto`,
    TransformerEngine's choice."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] | None = None
    """How context-parallel ranks exchange keys and values with TransformerEngine: in a ring (`p2p`), gathered
    (`all_gather`), by heads (`a2a`), or by heads in small groups and in a ring across these (`a2a+p2p`). Unset:
    `p2p`; megatron-core's own layers always gather."""
    hierarchical_context_parallel_sizes: Annotated[tuple[PosInt, PosInt], Field(strict=False)] | None = None
    """For `a2a+p2p`: ranks that exchange heads, and ranks in the ring; their product must be
    `context_parallel_size`."""
    ddp_bucket_size: PosInt | None = None
    """Parameters per gradient bucket, with `overlap_grad_reduce`. Unset: megatron-core's default, the larger of 40
    million and 1 million × data-parallel size."""
    ddp_pad_buckets_for_high_nccl_busbw: Switch = None
    """Pad buckets to a multiple of 65,536 parameters, so that NCCL's message sizes are powers of two. Unset: on if
    data-parallel ranks are on several nodes."""
    align_param_gather: Switch = None
    """Gather the parameters of a chunk on all stages at the same time; with virtual pipeline stages and
    `overlap_param_gather`. Unset: on there."""
    moe_permute_fusion: Switch = None
    """Sort tokens by expert in one kernel (TransformerEngine 2.1). Unset: on with TransformerEngine's layers."""
    moe_router_fusion: Switch = None
    """Fuse expert selection and the balancing loss into one kernel each (TransformerEngine 2.7). Unset: on with
    TransformerEngine's layers and `moe_router_dtype: fp32`."""
    moe_shared_expert_overlap: Switch = None
    """Compute shared experts while the dispatcher communicates; needs `moe_token_dispatcher_type: alltoall`. Unset: on
    for GPUs that share the experts of a layer."""
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] | None = None
    """Library for `moe_token_dispatcher_type: flex`: DeepEP or its HybridEP branch. Unset: `deepep`."""
    manual_gc: Switch = None
    """Run Python's garbage collector at the same step on all ranks. Unset: on with several GPUs."""
    manual_gc_interval: PosInt | None = None
    """Steps between garbage collections, with `manual_gc`. Unset: 100."""
    deterministic_mode: Switch = None
    """Use kernels whose results are bitwise reproducible; slower. Unset: off."""
    high_priority_stream_groups: Annotated[tuple[ProcessGroup, ...], Field(min_length=1, strict=False)] | None = None
    """Process groups whose NCCL kernels the GPU schedules before computation. Unset: none."""
    nccl_communicator_config_path: str | None = None
    """YAML file with NCCL settings per process group (`min_ctas`, `max_ctas`, `cga_cluster_size`, `net_name`). Unset:
    none."""
    tp_comm_overlap: Switch = None
    """Overlap tensor-parallel communication with TransformerEngine 2.7's GEMMs, in user buffers on NVLink; needs
    `sequence_parallel`. Unset: off."""
    tp_comm_overlap_ag: Switch = None
    """With `tp_comm_overlap`: overlap all-gathers. Unset: on."""
    tp_comm_overlap_rs: Switch = None
    """With `tp_comm_overlap`: overlap reduce-scatters of the forward pass. Unset: on."""
    tp_comm_bulk_dgrad: Switch = None
    """With `tp_comm_overlap`: overlap the all-gather with the GEMM of an input gradient. Unset: on."""
    tp_comm_bulk_wgrad: Switch = None
    """With `tp_comm_overlap`: overlap the reduce-scatter with the GEMM of a weight gradient. Unset: on."""
    overlap_moe_expert_parallel_comm: Switch = None
    """Overlap the experts' all-to-all with the computation of another micro-batch, whose memory it takes. With
    pipeline stages it needs `virtual_pipeline_model_parallel_size`. Unset: off."""
    delay_wgrad_compute: Switch = None
    """With `overlap_moe_expert_parallel_comm`: compute weight gradients separately from input gradients, where there is
    communication to hide (TransformerEngine 2.8). Unset: off."""
    cuda_graph_impl: Literal["transformer_engine", "local", "full_iteration"] | None = None
    """Capture the kernels of each layer in CUDA graphs, so that the GPU runs them without the host:
    `transformer_engine` (2.7); the others are refused. Unset: off."""
    cuda_graph_modules: (
        Annotated[
            tuple[Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess"], ...],
            Field(min_length=1, strict=False),
        ]
        | None
    ) = None
    """With `cuda_graph_impl`: parts of layers to capture, `attn` and `mlp`; those of experts are refused. Unset: whole
    layers, or `attn` in models with experts."""
    cuda_graph_warmup_steps: PosInt | None = None
    """With `cuda_graph_impl`: steps before graphs are captured. Unset: 3."""


class NamedLayout(LayoutKeys):
    """Keys of `layout`, those that are set."""

    @model_serializer(mode="wrap")
    def _as_written(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = plain(self)
        return {key: value for key, value in values.items() if key in self.model_fields_set}
