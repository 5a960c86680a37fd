"""The section `speed`: features of megatron-core that change how fast a run trains, not what it trains (`fp8` rounds).

Names are Megatron's. A key that is unset is chosen by rule for the machine (`recipe.features`); one that is set and
cannot be had is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.sections.section import EXECUTION, LEARNED, NonNegInt, PosInt, Section

Switch = bool | None
ProcessGroup = Literal["tp", "cp", "pp", "dp", "dp_cp", "tp_cp", "ep", "ep_dp", "ep_tp", "hcp"]


class Speed(Section):
    """Features of megatron-core that change the speed of a run, not its training; `llmrecipes plan --speed` lists what
    a run uses, and why. Unset keys are chosen by rule for the machine."""

    half = EXECUTION

    bias_activation_fusion: Switch = None
    """Fuse the activation of the MLP into one kernel: SwiGLU, or bias and exact GELU. Unset: on for GPUs with a
    compiler, and with `train.torch_compile`."""
    bias_dropout_fusion: Switch = None
    """Fuse bias, dropout and residual addition into one kernel. Unset: on for GPUs with a compiler where the model has
    biases or `hidden_dropout`, and with `train.torch_compile`."""
    apply_rope_fusion: Switch = None
    """Apply rotary embeddings in one kernel. Unset: on for GPUs with `position_embedding_type: rope`, but off for
    latent attention, whose kernel needs TransformerEngine's layers and `rope_type: yarn`."""
    cross_entropy_loss_fusion: Switch = None
    """Compute the loss in compiled kernels, with logits in the precision of the model. Unset: on for GPUs with a
    compiler, and with `train.torch_compile`."""
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
    reduce_scatter_with_fp32_accumulation: Annotated[Switch, LEARNED] = None
    """Send gradients in 16 bits and accumulate them in fp32; needs `grad_reduce_in_fp32: false`. Unset: off."""
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
    fp8: Annotated[Literal["e4m3", "hybrid"] | None, LEARNED] = None
    """8-bit format of the GEMMs in TransformerEngine's layers, on Hopper GPUs or newer: `e4m3`, or `hybrid` with
    gradients in `e5m2`. It rounds differently from bf16 and so changes the training. Unset: off."""
    fp8_recipe: Annotated[Literal["blockwise", "tensorwise", "mxfp8", "delayed"] | None, LEARNED] = None
    """With `fp8`, which values share a scale: blocks of 128 values (`blockwise`), a tensor (`tensorwise`), or 32
    values (`mxfp8`, Blackwell); `delayed` is refused. Unset: `mxfp8` on Blackwell, otherwise `blockwise`."""
    first_last_layers_bf16: Annotated[Switch, LEARNED] = None
    """With `fp8`: compute the first and the last layers in bf16. Unset: off."""
    num_layers_at_start_in_bf16: Annotated[NonNegInt | None, LEARNED] = None
    """Number of first layers in bf16, with `first_last_layers_bf16`. Unset: 1."""
    num_layers_at_end_in_bf16: Annotated[NonNegInt | None, LEARNED] = None
    """Number of last layers in bf16, with `first_last_layers_bf16`. Unset: 1."""
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
