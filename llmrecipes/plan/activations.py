"""Bytes that a rank stores between the forward and the backward pass.

After Korthikanti et al. 2022 (arXiv 2205.05198), counted tensor by tensor so that grouped queries, gated MLPs, experts,
latent attention, other precisions and other head sizes are covered; the attention matrix (their s² term) is absent
because the attention kernels in use do not store it. For the classic GPT layer in 16 bits with dropout the count is
their 34 s b h plus the kernel's log-sum-exp. On a CPU a test compares it with what autograd actually saves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from llmrecipes.plan.kernels import copies_keys, keeps_gathered, keeps_scores, kept_of_a_row, modules, own_layers
from llmrecipes.plan.layout import Layout
from llmrecipes.plan.machine_features import expected
from llmrecipes.recipe.derived.adapters import adapted, is_target
from llmrecipes.recipe.derived.shape import Shape
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.features import value_of
from llmrecipes.recipe.speedups.fp8 import in_bf16


@dataclass(frozen=True)
class Discarded:
    """Bytes per token that a layer would keep, but recomputes: of its attention, and of its MLP or experts.

    `twice` of each is there in two copies while it is restored.
    """

    attention: float = 0.0
    mlp: float = 0.0
    twice_in_attention: float = 0.0
    twice_in_mlp: float = 0.0

    @property
    def total(self) -> float:
        return self.attention + self.mlp

    @property
    def most(self) -> float:
        """There at a time: attention is recomputed after the backward pass of the MLP."""
        return max(self.attention + self.twice_in_attention, self.mlp + self.twice_in_mlp)


@dataclass(frozen=True)
class PerToken:
    """Bytes per token of the parts of the model on one rank."""

    recipe: Recipe
    shape: Shape
    layout: Layout
    device: str
    inputs_only: bool = False
    """Whether core attention keeps its inputs only, because it is recomputed."""
    bf16: bool = False
    """Whether the layer's products are in bf16 although those of others are in fp8."""

    @cached_property
    def element(self) -> int:
        return 4 if self.recipe.train.precision == "fp32" else 2

    @cached_property
    def input_element(self) -> float:
        """Bytes of a value that a product keeps as its input: in fp8 one, and a scale of 32 values in a byte, or of 128
        in four."""
        in_fp8 = self.recipe.train.fp8 is not None and self.device == "cuda" and not self.bf16
        return 1 + 1 / 32 if in_fp8 else self.element

    @cached_property
    def edge(self) -> float:
        """One residual stream, which is also what is stored between layers."""
        return self.element * self.shape.hidden_size / self.sequence_ranks

    @cached_property
    def norm(self) -> float:
        """Saved by a norm: its input; for torch's unfused RMSNorm on a CPU also an fp32 copy and the result."""
        return self._norm(self.shape.hidden_size) / self.sequence_ranks

    @cached_property
    def mask(self) -> float:
        """One dropout mask: one byte per channel."""
        return self.shape.hidden_size / self.sequence_ranks if self.recipe.model.hidden_dropout else 0.0

    @cached_property
    def core(self) -> float:
        """Saved by core attention besides its inputs; freed by recomputing it."""
        s = self.shape
        model = self.recipe.model
        ranks = self.layout.context_parallel_size
        size = s.num_attention_heads * kept_of_a_row(self.recipe, s, self.layout, self.device)
        if self._in_parts:
            # Scores in fp32; with dropout also the mask, of one byte, and the product. A rank has the first and the
            # last of the chunks that it could have, on average.
            seen = s.seq_length * ((2 * ranks + 1) / (4 * ranks) if ranks > 1 else 1.0)
            size = s.num_attention_heads * seen * (4 + 1 + 4 if model.attention_dropout else 4)
            size += 4 * (s.query_size + s.num_attention_heads * s.query_channels * self._chunks)
            if not self._value_is_view:
                size += 4 * s.context_size * self._chunks
        return size / self.layout.tensor_model_parallel_size

    def layer(self, number: int) -> float:
        """One of the decoder's layers, from 0."""
        per = self.of(number)
        return per.expert_layer if self.has_experts(number) else per.dense_layer

    def of(self, number: int) -> PerToken:
        """The parts of one of the decoder's layers, from 0."""
        return self._in_bf16 if in_bf16(self.recipe, number) else self

    @cached_property
    def _in_bf16(self) -> PerToken:
        return replace(self, bf16=True)

    def has_experts(self, number: int) -> bool:
        """Whether one of the decoder's layers, from 0, has experts."""
        return self.shape.moe_layers(number, number + 1) > 0

    def discarded(self, *, experts: bool) -> Discarded:
        """What a layer recomputes of what it would keep, module by module."""
        recomputed = modules(self.recipe, self.shape, self.device)
        if not recomputed:
            return Discarded()
        attention = mlp = twice = twice_in_mlp = 0.0
        latent = self.recipe.model.multi_latent_attention
        tensor = self.layout.tensor_model_parallel_size
        inside = self
        if "core_attn" in recomputed:
            inside = replace(self, inputs_only=True)
            attention += self._attention - (inside._attention - inside.core)
        if "mla_up_proj" in recomputed:
            projected = self.element * inside._projected(gathered=False) / tensor
            attention += projected + self._angles_of_a_layer
            twice += projected
        if "layernorm" in recomputed:
            # The result, and what the norm keeps besides its input.
            if self._separate_norms or latent:
                attention = attention + self.norm
                twice = twice + self.edge
            if self._separate_norms or experts:
                mlp = mlp + self.norm
                twice_in_mlp = twice_in_mlp + self.edge
        if "mlp" in recomputed and not experts:
            mlp += self._dense_inner
        if experts:
            router, moved, hidden, shared = self.expert_parts
            if "moe" in recomputed:
                mlp += router + moved + hidden + shared
            elif "shared_experts" in recomputed:
                mlp += shared
            if "moe_act" in recomputed:
                # All but the result of the first product.
                first = 2 if self.recipe.model.gated_linear_unit else 1
                activation = hidden * (1 - first / self._scored)
                mlp = mlp + activation
                twice_in_mlp = twice_in_mlp + hidden / self._scored
        return Discarded(attention, mlp, twice, twice_in_mlp)

    @cached_property
    def _separate_norms(self) -> bool:
        """Whether norms are not fused with the product after them."""
        return own_layers(self.recipe, self.device)

    @cached_property
    def dense_layer(self) -> float:
        """A layer with a dense MLP."""
        edge = self.edge_as_input * keeps_input(self.recipe, "linear_fc1")
        adapters = kept_by_adapters(*self._of, experts=False)
        return self._attention + self.norm + edge + self._dense_inner + self.mask + adapters

    @cached_property
    def _dense_inner(self) -> float:
        each = self.element * (self._wide - 1) + self.input_element * keeps_input(self.recipe, "linear_fc2")
        return each * self.shape.ffn_hidden_size / self.layout.tensor_model_parallel_size

    @property
    def gathered(self) -> float:
        """With sequence parallelism, the tokens of all ranks: they have a buffer, and are gathered again."""
        return self.element * self.shape.hidden_size * (self.sequence_ranks > 1)

    @cached_property
    def gathered_tokens(self) -> float:
        """The buffer in which experts have the tokens of all ranks, with the dispatcher that gathers them."""
        ranks = self.layout.expert_model_parallel_size * self.layout.expert_tensor_parallel_size
        gathers = self.recipe.model.moe_token_dispatcher_type == "allgather"  # noqa: S105 - no password
        return self.edge * ranks if gathers and ranks > 1 and self.shape.num_moe_experts else 0.0

    def inside(self, *, experts: bool) -> float:
        """What is kept inside the MLP or the experts."""
        return sum(self.expert_parts) if experts else self._dense_inner

    @cached_property
    def edge_as_input(self) -> float:
        """The residual stream, normalised, as the input of a product."""
        return self.edge * self.input_element / self.element

    @cached_property
    def expert_layer(self) -> float:
        """A layer with experts: router, dispatched tokens, the experts' and the shared experts' MLPs."""
        adapters = kept_by_adapters(*self._of, experts=True)
        # The router's input; in fp8 shared experts have a copy.
        edge = self.edge + self.edge_as_input * (
            self.input_element < self.element and self.shape.moe_shared_ffn_hidden_size > 0
        )
        return self._attention + self.norm + edge + self.mask + adapters + sum(self.expert_parts)

    @cached_property
    def expert_parts(self) -> tuple[float, float, float, float]:
        """Bytes in the router, of tokens as they are dispatched, inside the experts and inside the shared experts."""
        s = self.shape
        model = self.recipe.model
        element = self.element
        visits = float(model.moe_router_topk)
        if model.moe_expert_capacity_factor is not None and model.moe_pad_expert_input_to_capacity:
            visits *= model.moe_expert_capacity_factor
        # The router's scores and its map; for each assignment two indices and two scores.
        router = (1 + (8 if model.moe_router_dtype == "fp64" else 4)) * s.num_moe_experts + 24 * visits
        moved = visits * self.input_element * s.hidden_size * keeps_input(self.recipe, "experts.linear_fc1")
        wide = element * (self._scored - 1) + self.input_element * keeps_input(self.recipe, "experts.linear_fc2")
        experts = visits * wide * s.moe_ffn_hidden_size
        wide = element * (self._wide - 1) + self.input_element * keeps_input(self.recipe, "linear_fc2")
        shared = wide * s.moe_shared_ffn_hidden_size
        moved *= self.layout.expert_tensor_parallel_size  # whose ranks have each other's tokens too
        ranks = self.sequence_ranks
        gathered = self.gathered * (shared > 0 and keeps_gathered(self.recipe, self.device))
        shared = shared / self.layout.tensor_model_parallel_size + gathered
        return router / ranks, moved / ranks, experts / ranks, shared

    @cached_property
    def tables(self) -> float:
        """Rotary angles in fp32, with their cosines and sines; all sequences and layers have the same."""
        model = self.recipe.model
        if model.position_embedding_type == "learned_absolute" or model.multi_latent_attention:
            return 0.0
        return (4.0 + self._cosine_and_sine) * self.shape.kv_channels / self.recipe.layout.micro_batch_size

    @cached_property
    def _cosine_and_sine(self) -> float:
        """Bytes of both for an angle: in fp32 in a compiled kernel, none in TransformerEngine's."""
        if own_layers(self.recipe, self.device):
            fused = value_of("apply_rope_fusion", self.recipe, expected(self.recipe, self.device))
            return 8.0 if fused else 2.0 * self.element
        return 0.0

    @cached_property
    def _of(self) -> tuple[Recipe, Shape, Layout, str]:
        return self.recipe, self.shape, self.layout, self.device

    @cached_property
    def sequence_ranks(self) -> int:
        """Ranks that share the tokens outside of attention and MLP."""
        return self.layout.tensor_model_parallel_size if self.layout.sequence_parallel else 1

    @cached_property
    def _wide(self) -> int:
        """Saved widths of an MLP: the output of the first projection and the input of the second; a gate adds its other
        half and, if unfused, both factors and the clamped gate, quick GELU its sigmoid."""
        model = self.recipe.model
        sigmoid = model.activation_func == "quick_gelu"
        if not model.gated_linear_unit:
            return 2 + sigmoid
        return 3 if self.is_fused else 5 + sigmoid + (model.activation_func_clamp_value is not None)

    @cached_property
    def _scored(self) -> int:
        """Saved widths of an expert's MLP: the scores are multiplied into its hidden values, by a fused activation in
        the same kernel."""
        return self._wide + (not self.is_fused)

    @cached_property
    def is_fused(self) -> bool:
        """Whether one kernel computes the gated activation."""
        return bool(value_of("bias_activation_fusion", self.recipe, expected(self.recipe, self.device)))

    @cached_property
    def _in_parts(self) -> bool:
        """Whether torch has no fused kernel: it keeps scaled copies of queries and keys, and scores, all in fp32."""
        return self.device == "cpu" and not self.inputs_only and keeps_scores(self.recipe, self.shape, self.device)

    @cached_property
    def _chunks(self) -> float:
        """Keys that attention reads, in parts, for each of a rank's own: of two chunks under context parallelism."""
        ranks = self.layout.context_parallel_size
        return (2 * ranks + 1) / 2 if ranks > 1 else 1.0

    @cached_property
    def _value_is_view(self) -> bool:
        """Whether attention in parts reads values in the projection of queries, keys and values itself."""
        s = self.shape
        model = self.recipe.model
        return (
            self.recipe.train.precision == "fp32"
            and s.num_query_groups == s.num_attention_heads
            and self.layout.context_parallel_size == 1
            and not model.multi_latent_attention
        )

    @cached_property
    def _attention(self) -> float:
        model = self.recipe.model
        s = self.shape
        element = self.element
        tensor = self.layout.tensor_model_parallel_size
        # Inputs of the norm and the projection, then the tensors split by heads, with the output projection's input.
        down = ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj")
        outside = self.norm + self.edge_as_input * max(keeps_input(self.recipe, name) for name in down) + self.mask
        if self.input_element < element and model.q_lora_rank and model.multi_latent_attention:
            outside += self.edge_as_input  # each of the two projections down keeps its copy in fp8
        split = self.layout.context_parallel_size > 1 and own_layers(self.recipe, self.device)
        gathered = split and not self._in_parts and not self.inputs_only
        rope = model.position_embedding_type != "learned_absolute"
        copied = copies_keys(self.recipe, s, self.device)
        keys_and_values = (s.query_size + s.context_size) * copied  # a key and a value for each query
        inner = float(element * (s.context_size + keys_and_values + self._projected(gathered=gathered or copied)))
        if model.multi_latent_attention:
            outside += self._latent / self.sequence_ranks
        else:
            # Rotation or norm allocate new queries and keys, while the values keep the full projection alive.
            if not self._in_parts and (rope or model.qk_layernorm):
                inner += element * (s.query_size + (0 if gathered or copied else s.key_size))
            inner += self._heads(rotated=rope)
        if gathered:
            # Our attention gathers keys and values of the full sequence, and has an output for each of two chunks;
            # TransformerEngine's uses a ring.
            inner += element * (s.key_size + s.value_size) * self.layout.context_parallel_size
            inner += element * s.context_size
        return outside + inner / tensor + self._angles_of_a_layer + self.core

    @cached_property
    def _angles_of_a_layer(self) -> float:
        """Rotary angles of latent attention, with their cosines and sines: each layer has its own."""
        if not self.recipe.model.multi_latent_attention:
            return 0.0
        return 2.0 * self.element * self.recipe.model.qk_pos_emb_head_dim / self.recipe.layout.micro_batch_size

    def _projected(self, *, gathered: bool) -> int:
        """Width of queries, keys and values as they are projected that is kept: by attention, or by a norm of heads."""
        s = self.shape
        model = self.recipe.model
        whole = s.query_size + s.key_size + s.value_size
        if model.multi_latent_attention:
            return 0 if self._in_parts else s.query_size if gathered else whole
        if model.qk_layernorm:
            return whole
        if self._in_parts:
            return whole if self._value_is_view else 0
        return whole if not gathered or model.position_embedding_type == "learned_absolute" else 0

    def _heads(self, *, rotated: bool) -> float:
        """Queries and keys that are kept besides those that attention reads and the projection they come from."""
        s = self.shape
        model = self.recipe.model
        size = 0
        groups = s.num_query_groups // self.layout.tensor_model_parallel_size
        # Queries of several heads for each of several groups are not contiguous in the projection, and are copied.
        if 1 < groups < s.num_attention_heads // self.layout.tensor_model_parallel_size:
            size += s.query_size if model.qk_layernorm or not (rotated or self._in_parts) else 0
        if model.qk_layernorm and self.device == "cpu" and model.normalization == "RMSNorm":
            # The norm's result, which the multiplication by its weight saves; in fp32, with a copy of its input.
            size += (s.query_size + s.key_size) * (1 if self.element == 4 else 4)
        return float(self.element * size)

    @cached_property
    def _latent(self) -> float:
        """Compressed queries, keys and values, as they come and normalised."""
        model = self.recipe.model
        ranks = (model.kv_lora_rank, model.q_lora_rank or 0)
        size = self.element * (sum(ranks) + model.qk_pos_emb_head_dim)
        if model.qk_layernorm:
            size += sum(self._norm(rank) for rank in ranks)
        return size - (self.element - self.input_element) * sum(ranks)  # the inputs of the products up

    def _norm(self, width: int) -> int:
        composite = self.device == "cpu" and self.recipe.model.normalization == "RMSNorm"
        return (8 if composite else self.element) * width


def keeps_input(recipe: Recipe, name: str) -> int:
    """1 if the input of the matrices of a name is kept, for their gradient or that of their adapter, else 0."""
    return int(recipe.lora is None or is_target(recipe.lora, name))


def kept_by_adapters(recipe: Recipe, s: Shape, layout: Layout, device: str, *, experts: bool) -> float:
    """Bytes per token that the adapters of a layer keep besides their inputs: what is between A and B, and masks."""
    lora, kept = recipe.lora, 0.0
    if lora is None:
        return kept
    element = 4 if recipe.train.precision == "fp32" else 2
    tensor = layout.tensor_model_parallel_size
    tokens = tensor if layout.sequence_parallel else 1
    for matrix in adapted(lora, recipe.model, s, experts=experts):
        visits = recipe.model.moe_router_topk if matrix.of_experts else 1
        kept += visits * element * lora.rank / tokens
        if lora.dropout:
            # The input is kept after dropout; attention keeps its output, the input of linear_proj, itself.
            size = (element if device == "cpu" else 1) + (element if matrix.name == "linear_proj" else 0)
            kept += visits * size * matrix.width / (tokens if matrix.by_columns or matrix.of_experts else tensor)
    return kept
