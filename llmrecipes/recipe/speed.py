"""The section `speed`: features of megatron-core that change how fast a run trains, not what it trains (`fp8` rounds).

Names are Megatron's. A key that is unset is chosen by rule for the machine (`recipe.features`); one that is set and
cannot be had is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.section import NonNegInt, PosInt, Section

Switch = bool | None
ProcessGroup = Literal["tp", "cp", "pp", "dp", "dp_cp", "tp_cp", "ep", "ep_dp", "ep_tp", "hcp"]


class Speed(Section):
    """Features of megatron-core that change the speed of a run, not its training; `llmrecipes show --speed` lists what
    a run has, and why. Unset keys are chosen by rule for the machine."""

    bias_activation_fusion: Switch = None
    """Compute the gated activation of the MLP (SwiGLU only) in one kernel. Unset: on GPUs with a compiler, and with
    `train.torch_compile`."""
    bias_dropout_fusion: Switch = None
    """Add bias, dropout and residual in one kernel. Unset: on GPUs with a compiler where the model has biases or
    `hidden_dropout`, and with `train.torch_compile`."""
    apply_rope_fusion: Switch = None
    """Apply rotary embeddings in one kernel (TransformerEngine). Unset: with `position_embedding_type: rope`; of latent
    attention, whose kernel needs `rope_type: yarn`, only if it is set."""
    gradient_accumulation_fusion: Switch = None
    """Add the gradient of a weight to the gradient buffer in the kernel of its product (TransformerEngine). Unset: on
    with its layers."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] | None = None
    """Kernel of TransformerEngine's attention: FlashAttention, cuDNN's, or unfused. Unset: `auto`, its own choice."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] | None = None
    """How context-parallel ranks of TransformerEngine's attention exchange keys and values: in a ring (`p2p`), gathered
    before the attention, by heads (`a2a`), or by heads in small groups and in a ring over these (`a2a+p2p`). Unset: in
    a ring; megatron-core's own layers gather."""
    hierarchical_context_parallel_sizes: Annotated[tuple[PosInt, PosInt], Field(strict=False)] | None = None
    """For `a2a+p2p`: ranks that exchange heads, and ranks of the ring; their product is `context_parallel_size`."""
    ddp_bucket_size: PosInt | None = None
    """Parameters of a bucket of gradients, with `overlap_grad_reduce`. Unset: megatron-core's, the larger of 40 million
    and 1 million × data-parallel size."""
    ddp_pad_buckets_for_high_nccl_busbw: Switch = None
    """Pad buckets to a multiple of 65,536 parameters, so that messages of NCCL have the size of a power of two. Unset:
    on where data-parallel ranks are on several nodes."""
    align_param_gather: Switch = None
    """With virtual pipeline stages and `overlap_param_gather`: all stages gather the parameters of a chunk at the same
    time. Unset: on there."""
    reduce_scatter_with_fp32_accumulation: Switch = None
    """Send gradients in 16 bits and add them in fp32; needs `grad_reduce_in_fp32: false`. Unset: off."""
    moe_permute_fusion: Switch = None
    """Order tokens by experts in one kernel (TransformerEngine 2.1). Unset: on with its layers."""
    moe_router_fusion: Switch = None
    """Choose experts and compute the balancing loss in one kernel each (TransformerEngine 2.7). Unset: on with its
    layers and `moe_router_dtype: fp32`."""
    moe_shared_expert_overlap: Switch = None
    """Compute shared experts while the dispatcher communicates; needs `moe_token_dispatcher_type: alltoall`. Unset: on
    on GPUs where ranks share experts."""
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] | None = None
    """Library of `moe_token_dispatcher_type: flex`: DeepEP or its branch HybridEP. Unset: `deepep`."""
    manual_gc: Switch = None
    """Collect Python's garbage at the same step on all ranks, not when each has enough of it. Unset: on with several
    GPUs."""
    manual_gc_interval: PosInt | None = None
    """Steps between these collections. Unset: 100."""
    deterministic_mode: Switch = None
    """Use kernels whose result is the same bit for bit each time; slower. Unset: off."""
    high_priority_stream_groups: Annotated[tuple[ProcessGroup, ...], Field(min_length=1, strict=False)] | None = None
    """Process groups whose NCCL kernels the GPU starts before computation. Unset: none."""
    nccl_communicator_config_path: str | None = None
    """YAML file with settings of NCCL for each process group (`min_ctas`, `max_ctas`, `cga_cluster_size`, `net_name`).
    Unset: none."""
    tp_comm_overlap: Switch = None
    """Hide tensor-parallel communication behind products of TransformerEngine 2.7, in user buffers on NVLink; needs
    `sequence_parallel`. Unset: off."""
    tp_comm_overlap_ag: Switch = None
    """With `tp_comm_overlap`: gathers. Unset: on."""
    tp_comm_overlap_rs: Switch = None
    """With `tp_comm_overlap`: scatters of the forward pass. Unset: on."""
    tp_comm_bulk_dgrad: Switch = None
    """With `tp_comm_overlap`: the gather beside the gradient of an input. Unset: on."""
    tp_comm_bulk_wgrad: Switch = None
    """With `tp_comm_overlap`: the scatter beside the gradient of a weight. Unset: on."""
    overlap_moe_expert_parallel_comm: Switch = None
    """Hide the experts' all-to-all behind the computation of another micro-batch; keeps one more in memory. With
    pipeline stages it needs `virtual_pipeline_model_parallel_size`. Unset: off."""
    delay_wgrad_compute: Switch = None
    """With `overlap_moe_expert_parallel_comm`: compute gradients of weights apart from those of inputs, where there is
    something to hide (TransformerEngine 2.8). Unset: off."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """Multiply in 8 bits in TransformerEngine's layers, on GPUs since Hopper: `e4m3`, or `hybrid` with gradients in
    `e5m2`. It rounds otherwise than bf16, so it is another training. Unset: off."""
    fp8_recipe: Literal["blockwise", "tensorwise", "mxfp8", "delayed"] | None = None
    """With `fp8`, what shares a scale: blocks of 128 values, a tensor, or 32 values (Blackwell). `delayed`, with scales
    of earlier steps, is refused. Unset: `mxfp8` on Blackwell, else `blockwise`."""
    first_last_layers_bf16: Switch = None
    """With `fp8`: the first and the last layers multiply in bf16. Unset: off."""
    num_layers_at_start_in_bf16: NonNegInt | None = None
    """Number of the first, with `first_last_layers_bf16`. Unset: 1."""
    num_layers_at_end_in_bf16: NonNegInt | None = None
    """Number of the last, with `first_last_layers_bf16`. Unset: 1."""
    cuda_graph_impl: Literal["transformer_engine", "local", "full_iteration"] | None = None
    """Record the kernels of each layer, so that the GPU starts them without the host: `transformer_engine` (2.7). The
    other two of megatron-core are refused. Unset: off."""
    cuda_graph_modules: (
        Annotated[
            tuple[Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess"], ...],
            Field(min_length=1, strict=False),
        ]
        | None
    ) = None
    """With `cuda_graph_impl`: parts of layers to record, `attn` and `mlp`; those of experts are refused. Unset: whole
    layers, or `attn` of models with experts. `cuda_graph_scope` in megatron-core 0.16."""
    cuda_graph_warmup_steps: PosInt | None = None
    """With `cuda_graph_impl`: steps before kernels are recorded. Unset: 3."""
