"""Bytes that a rank stores between the forward and the backward pass.

After Korthikanti et al. 2022 (arXiv 2205.05198), counted tensor by tensor so that grouped queries, gated MLPs, experts,
latent attention, other precisions and other head sizes are covered; the attention matrix (their s² term) is absent
because the attention kernels in use do not store it. For the classic GPT layer in 16 bits with dropout the count is
their 34 s b h plus the kernel's log-sum-exp. On a CPU a test compares it with what autograd actually saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmrecipes.plan.layout import Layout
from llmrecipes.recipe.adapters import adapted, is_target
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.shape import Shape


@dataclass(frozen=True)
class Peak:
    """Bytes of a rank at the fullest moment of a step, besides model states.

    `activations` are kept for the backward pass; `logits` is what the loss has derived from the output layer's result,
    of which `kept_logits` is kept too; `outputs` are those of chunks that were sent to the next stage.
    """

    activations: int
    logits: int = 0
    kept_logits: int = 0
    outputs: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.outputs


def peak(recipe: Recipe, s: Shape, layout: Layout, num_microbatches: int, stage: int, device: str) -> Peak:
    """The fullest moment of a rank of one pipeline stage."""
    return max(_moments(recipe, s, layout, num_microbatches, stage, device), key=lambda moment: moment.total)


def most_activations(recipe: Recipe, s: Shape, layout: Layout, num_microbatches: int, stage: int, device: str) -> int:
    """Most bytes that a rank of one pipeline stage keeps for its backward passes at a time."""
    moments = _moments(recipe, s, layout, num_microbatches, stage, device)
    return max(moment.activations + moment.kept_logits for moment in moments)


def _moments(
    recipe: Recipe, s: Shape, layout: Layout, num_microbatches: int, stage: int, device: str
) -> Iterator[Peak]:
    """Moments of a step of a rank of one pipeline stage, the fullest among them.

    A stage stores several micro-batches at once, the first stage the most (`in_flight`). Tensor parallelism divides
    what is inside attention and MLP, sequence parallelism the rest, context parallelism everything. On the last stage
    it is the loss, or the recomputation of a layer after it; on the others the beginning of a backward pass.
    """
    per = _PerToken(recipe, s, layout, device)
    tokens = _tokens(recipe, layout)
    chunks = []
    for number, layers in enumerate(layout.layers_per_stage[stage]):
        first = layout.first_layer(stage, number)
        chunks.append(_chunk(recipe, per, [per.layer(index) for index in range(first, first + layers)]))
    if stage == 0:
        chunks[0] = chunks[0][0] + per.mask, chunks[0][1]
    chunks = [(kept + mask_per_token(recipe, device), again) for kept, again in chunks]
    last = stage == layout.pipeline_model_parallel_size - 1
    predictions, recomputed_prediction = _mtp(recipe, per)
    ends = per.norm + per.edge * (recipe.lora is None) + predictions
    kept_logits, logits = _logits(recipe, s, layout)
    tables = len(chunks) * per.tables if recipe.train.recompute_granularity == "full" else 0.0
    for pending, chunk, held in _pending(layout, num_microbatches, stage, experts=s.num_moe_experts > 0):
        stack = tables + sum(kept * number for (kept, _), number in zip(chunks, pending, strict=True))
        # One chunk's are freed once they are sent; the very last chunk sends nothing.
        sent = sum(pending[:-1] if last else pending) if len(chunks) > 1 else 0
        outputs = int(tokens * sent * per.edge)
        recomputed = chunks[chunk][1]
        if len(chunks) == 1:
            # The previous micro-batch's input is released before the backward pass.
            yield Peak(int(tokens * (stack + recomputed)), outputs=outputs)
            yield Peak(int(tokens * (stack + held * per.edge)), outputs=outputs)
        else:
            yield Peak(int(tokens * (stack + held * per.edge + recomputed)), outputs=outputs)
        if last and chunk == len(chunks) - 1:
            yield Peak(int(tokens * (stack + held * per.edge + ends)), logits, kept_logits, outputs)
            # The losses have been differentiated by then: they were computed after the layers.
            yield Peak(int(tokens * (stack + held * per.edge + ends + recomputed_prediction)), outputs=outputs)


def _logits(recipe: Recipe, s: Shape, layout: Layout) -> tuple[int, int]:
    """Bytes that the loss keeps for its backward pass, and at its peak.

    Kept is the log-softmax in fp32, of every prediction. In the backward pass torch has the gradients on both of its
    sides too; megatron-core, on logits that are split over ranks, computes in place and has a gradient in 16 bits.
    """
    rows = s.vocab_size // layout.tensor_model_parallel_size
    logits = _tokens(recipe, layout) * rows
    kept = 4 * logits * (1 + s.mtp_num_layers)
    if layout.tensor_model_parallel_size == 1:
        return int(kept), int(kept + 8 * logits)
    return int(kept), int(kept + (2 if recipe.train.precision != "fp32" else 0) * logits)


def _pending(
    layout: Layout, num_microbatches: int, stage: int, *, experts: bool
) -> Iterator[tuple[list[int], int, int]]:
    """Forward passes of each chunk whose backward pass is pending, and the chunk of the next one, through a step.

    Also the inputs that are there besides: that of the last backward pass, which megatron-core's 1F1B schedule and
    layers with experts hold until there is another one; with several chunks, the first that is received after the
    warm-up, the last of each chunk until it gets another one, and that of the next forward pass, which is there early.

    Chunks take turns in groups of as many micro-batches as there are stages (arXiv 2104.04473, figure 4).
    """
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    # A third group repeats what the second does.
    passes = min(num_microbatches, 3 * stages) * chunks
    ahead = in_flight(layout, num_microbatches, stage)
    pending, number = [0] * chunks, [0] * chunks
    done: list[tuple[int, int]] = []  # backward passes, each as its chunk and micro-batch
    for forward in range(passes + ahead - 1):
        if forward < passes:
            number[forward // stages % chunks] += 1
            pending[forward // stages % chunks] += 1
        if forward + 1 < ahead:
            continue
        held = set(done[-1:]) if chunks == 1 or experts else set()
        following = forward + 1
        if chunks > 1:
            held |= {_pass(ahead - 1, stages, chunks)} & set(done)
            held |= {(chunk, number[chunk] - 1) for chunk in range(chunks) if not pending[chunk]}
            held |= {_pass(following, stages, chunks)} if following < passes else set()
        chunk, micro_batch = _pass(len(done), stages, chunks)
        chunk = chunks - 1 - chunk
        yield pending, chunk, sum(stage > 0 or each > 0 for each, _ in held)
        pending[chunk] -= 1
        done.append((chunk, micro_batch))


def _pass(number: int, stages: int, chunks: int) -> tuple[int, int]:
    """Chunk and micro-batch of a forward pass, counted over all chunks; a backward pass has the opposite chunk."""
    return number // stages % chunks, number // (stages * chunks) * stages + number % stages


def in_flight(layout: Layout, num_microbatches: int, stage: int) -> int:
    """Peak number of chunk forward passes whose backward pass is pending, on one pipeline stage.

    Narayanan et al. 2021 (arXiv 2104.04473): in 1F1B, stage r of p has p - r micro-batches. With v chunks a stage the
    interleaved schedule warms up with 2 (p - r - 1) + (v - 1) p passes and then does one more.
    """
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    if chunks == 1:
        return min(num_microbatches, stages - stage)
    return min(num_microbatches * chunks, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1)


def recomputed_layers(recipe: Recipe, layers: int) -> int:
    """Layers of a chunk whose whole forward pass is repeated in the backward pass: its first ones."""
    train = recipe.train
    if train.recompute_granularity != "full" or not train.recompute_num_layers:
        return 0
    return layers if train.recompute_method == "uniform" else min(train.recompute_num_layers, layers)


def _tokens(recipe: Recipe, layout: Layout) -> float:
    """Tokens of a micro-batch on one rank."""
    return recipe.train.micro_batch_size * recipe.model.seq_length / layout.context_parallel_size


def _chunk(recipe: Recipe, per: _PerToken, layers: Sequence[float]) -> tuple[float, float]:
    """Bytes per token that the layers of one chunk store, and those that exist only during recomputation."""
    train = recipe.train
    if not layers:
        return 0.0, 0.0
    if recompute_granularity(recipe, per.shape, per.device) == "selective":
        return sum(layers) - len(layers) * per.core, per.core
    if train.recompute_granularity != "full" or not train.recompute_num_layers:
        return sum(layers), 0.0
    number = min(train.recompute_num_layers, len(layers))
    if train.recompute_method == "uniform":
        groups = [sum(layers[start : start + number]) for start in range(0, len(layers), number)]
        return len(groups) * per.edge, max(groups) - per.edge  # whose input is stored anyway
    # The layers after the block are freed by the time one inside it is recomputed.
    after = sum(layers[number:])
    return number * per.edge + after, max(max(layers[:number]) - per.edge - after, 0.0)


def _mtp(recipe: Recipe, per: _PerToken) -> tuple[float, float]:
    """Bytes per token that multi-token prediction layers keep, and those of the one that is being recomputed."""
    depth = per.shape.mtp_num_layers
    layer = per.expert_layer if per.shape.mtp_moe_layers else per.dense_layer
    # Both inputs and their norms, concatenated for the projection; the result's norm, and the output layer's input.
    around = 2 * per.norm + 2 * per.edge + per.norm + per.edge
    if recipe.train.recompute_granularity == "full":
        return depth * 3 * per.edge, layer + around if depth else 0.0
    return depth * (layer + around), 0.0


@dataclass(frozen=True)
class _PerToken:
    """Bytes per token of the parts of the model on one rank."""

    recipe: Recipe
    shape: Shape
    layout: Layout
    device: str

    @property
    def element(self) -> int:
        return 4 if self.recipe.train.precision == "fp32" else 2

    @property
    def edge(self) -> float:
        """One residual stream, which is also what is stored between layers."""
        return self.element * self.shape.hidden_size / self._sequence_ranks

    @property
    def norm(self) -> float:
        """Saved by a norm: its input; for torch's unfused RMSNorm on a CPU also an fp32 copy and the result."""
        return self._norm(self.shape.hidden_size) / self._sequence_ranks

    @property
    def mask(self) -> float:
        """One dropout mask: one byte per channel on a GPU, a full element on a CPU."""
        if not self.recipe.model.hidden_dropout:
            return 0.0
        return (self.element if self.device == "cpu" else 1) * self.shape.hidden_size / self._sequence_ranks

    @property
    def core(self) -> float:
        """Saved by core attention besides its inputs; freed by recomputing it."""
        s, model = self.shape, self.recipe.model
        ranks = self.layout.context_parallel_size
        size = 4.0 * s.num_attention_heads  # the log-sum-exp of each head's row in fp32
        if self._in_parts:
            # Scores in fp32; with dropout also the mask and the product. A rank has the first and the last of the
            # chunks that it could have, on average.
            seen = s.seq_length * ((2 * ranks + 1) / (4 * ranks) if ranks > 1 else 1.0)
            size = 4 * s.num_attention_heads * seen * (3 if model.attention_dropout else 1)
            size += 4 * (s.query_size + s.num_attention_heads * s.query_channels * self._chunks)
            if not self._value_is_view:
                size += 4 * s.context_size * self._chunks
        return size / self.layout.tensor_model_parallel_size

    def layer(self, number: int) -> float:
        """One of the decoder's layers, from 0."""
        return self.expert_layer if self.shape.moe_layers(number, number + 1) else self.dense_layer

    @property
    def dense_layer(self) -> float:
        """A layer with a dense MLP."""
        wide = self._wide - 1 + keeps_input(self.recipe, "linear_fc2")
        inner = self.element * wide * self.shape.ffn_hidden_size / self.layout.tensor_model_parallel_size
        edge = self.edge * keeps_input(self.recipe, "linear_fc1")
        return self._attention + self.norm + edge + inner + self.mask + kept_by_adapters(*self._of, experts=False)

    @property
    def expert_layer(self) -> float:
        """A layer with experts: router, dispatched tokens, the experts' and the shared experts' MLPs."""
        s, model, element = self.shape, self.recipe.model, self.element
        visits = float(model.moe_router_topk)
        if model.moe_expert_capacity_factor is not None and model.moe_pad_expert_input_to_capacity:
            visits *= model.moe_expert_capacity_factor
        # The router's scores and its map; for each assignment two indices and two scores.
        router = (1 + (8 if model.moe_router_dtype == "fp64" else 4)) * s.num_moe_experts + 24 * visits
        moved = visits * element * s.hidden_size * keeps_input(self.recipe, "experts.linear_fc1")
        # Plus one width: the scores are multiplied into the experts' hidden values.
        wide = self._wide + keeps_input(self.recipe, "experts.linear_fc2")
        experts = visits * element * wide * s.moe_ffn_hidden_size
        shared = element * (self._wide - 1 + keeps_input(self.recipe, "linear_fc2")) * s.moe_shared_ffn_hidden_size
        moved *= self.layout.expert_tensor_parallel_size  # whose ranks have each other's tokens too
        tensor = self.layout.tensor_model_parallel_size
        return (
            self._attention + self.norm + self.edge + self.mask + kept_by_adapters(*self._of, experts=True)
            + (router + moved + experts) / self._sequence_ranks + shared / tensor
        )  # fmt: skip

    @property
    def tables(self) -> float:
        """Rotary angles in fp32, which recomputed layers keep; all sequences have the same."""
        if self.recipe.model.position_embedding_type != "rope":
            return 0.0
        return 4.0 * self.shape.kv_channels / self.recipe.train.micro_batch_size

    @property
    def _of(self) -> tuple[Recipe, Shape, Layout, str]:
        return self.recipe, self.shape, self.layout, self.device

    @property
    def _sequence_ranks(self) -> int:
        """Ranks that share the tokens outside of attention and MLP."""
        return self.layout.tensor_model_parallel_size if self.layout.sequence_parallel else 1

    @property
    def _wide(self) -> int:
        """Saved widths of an MLP: the output of the first projection and the input of the second; a gate adds its other
        half and, if unfused, both factors."""
        if not self.recipe.model.gated_linear_unit:
            return 2
        return 3 if self.recipe.train.torch_compile else 5

    @property
    def _in_parts(self) -> bool:
        """Whether torch has no fused kernel: it keeps scaled copies of queries and keys, and scores, all in fp32."""
        return keeps_scores(self.recipe, self.shape, self.device)

    @property
    def _chunks(self) -> float:
        """Keys that attention reads, in parts, for each of a rank's own: of two chunks under context parallelism."""
        ranks = self.layout.context_parallel_size
        return (2 * ranks + 1) / 2 if ranks > 1 else 1.0

    @property
    def _value_is_view(self) -> bool:
        """Whether attention in parts reads values in the projection of queries, keys and values itself."""
        s, model = self.shape, self.recipe.model
        return (
            self.recipe.train.precision == "fp32"
            and s.num_query_groups == s.num_attention_heads
            and self.layout.context_parallel_size == 1
            and not model.multi_latent_attention
        )

    @property
    def _attention(self) -> float:
        model, s, element = self.recipe.model, self.shape, self.element
        tensor = self.layout.tensor_model_parallel_size
        # Inputs of the norm and the projection, then the tensors split by heads, with the output projection's input.
        down = ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj")
        outside = self.norm + self.edge * max(keeps_input(self.recipe, name) for name in down) + self.mask
        gathered = self.layout.context_parallel_size > 1 and own_layers(self.recipe, self.device) and not self._in_parts
        rope = model.position_embedding_type == "rope"
        copied = copies_keys(self.recipe, s, self.device)
        own = (s.query_size + s.context_size) * copied  # a key and a value for each query
        inner = float(element * (s.context_size + own + self._projected(gathered=gathered or copied)))
        if model.multi_latent_attention:
            outside += self._latent / self._sequence_ranks
            tables = 4.0 * element * model.qk_pos_emb_head_dim
        else:
            # Rotation or norm allocate new queries and keys, while the values keep the full projection alive.
            if not self._in_parts and (rope or model.qk_layernorm):
                inner += element * (s.query_size + (0 if gathered or copied else s.key_size))
            inner += self._heads(rotated=rope)
            tables = 4.0 * element * s.kv_channels if rope else 0.0  # cosines and sines, for queries and for keys
        tables /= self.recipe.train.micro_batch_size  # all sequences have the same
        if gathered:
            # Our attention gathers keys and values of the full sequence, and has an output for each of two chunks;
            # TransformerEngine's uses a ring.
            inner += element * (s.key_size + s.value_size) * self.layout.context_parallel_size
            inner += element * s.context_size
        return outside + inner / tensor + tables + self.core

    def _projected(self, *, gathered: bool) -> int:
        """Width of queries, keys and values as they are projected that is kept: by attention, or by a norm of heads."""
        s, model = self.shape, self.recipe.model
        whole = s.query_size + s.key_size + s.value_size
        if model.multi_latent_attention:
            return 0 if self._in_parts else s.query_size if gathered else whole
        if model.qk_layernorm:
            return whole
        if self._in_parts:
            return whole if self._value_is_view else 0
        return whole if not gathered or model.position_embedding_type != "rope" else 0

    def _heads(self, *, rotated: bool) -> float:
        """Queries and keys that are kept besides those that attention reads and the projection they come from."""
        s, model, size = self.shape, self.recipe.model, 0
        groups = s.num_query_groups // self.layout.tensor_model_parallel_size
        # Queries of several heads for each of several groups are not contiguous in the projection, and are copied.
        if 1 < groups < s.num_attention_heads // self.layout.tensor_model_parallel_size:
            size += s.query_size if model.qk_layernorm or not (rotated or self._in_parts) else 0
        if model.qk_layernorm and self.device == "cpu" and model.normalization == "RMSNorm":
            size += s.query_size + s.key_size  # the norm's result, which the multiplication by its weight saves
        return float(self.element * size)

    @property
    def _latent(self) -> float:
        """Compressed queries, keys and values, as they come and normalised."""
        model = self.recipe.model
        ranks = (model.kv_lora_rank, model.q_lora_rank or 0)
        size = self.element * (sum(ranks) + model.qk_pos_emb_head_dim)
        if model.qk_layernorm:
            size += sum(self._norm(rank) for rank in ranks)
        return size

    def _norm(self, width: int) -> int:
        composite = self.device == "cpu" and self.recipe.model.normalization == "RMSNorm"
        return (8 if composite else self.element) * width


def has_fused_kernel(s: Shape, device: str) -> bool:
    """Whether core attention has a fused kernel; on a CPU torch has none if keys and values differ in width."""
    return device == "cuda" or s.query_channels == s.value_channels


def keeps_scores(recipe: Recipe, s: Shape, device: str) -> bool:
    """Whether core attention keeps the score matrix of each head, so that recomputing it saves memory.

    Fused kernels (torch's, TransformerEngine's) keep the log-sum-exp of each row and recompute the scores themselves.
    On a CPU torch has none with dropout.
    """
    return (recipe.model.attention_dropout > 0 and device == "cpu") or not has_fused_kernel(s, device)


def mask_per_token(recipe: Recipe, device: str) -> int:
    """Bytes per token of the mask that keeps packed conversations apart, which all layers share: one for each token of
    the sequence. 0 on a CPU, where each conversation is attended to by itself, and where there is none."""
    chat = recipe.data.chat
    packed = chat is not None and chat.packing
    return recipe.model.seq_length if packed and (device == "cuda" or recipe.train.torch_compile) else 0


def copies_keys(recipe: Recipe, s: Shape, device: str) -> bool:
    """Whether keys and values of groups are copied for each query, because there is such a mask."""
    return mask_per_token(recipe, device) > 0 and s.num_query_groups < s.num_attention_heads


def recompute_granularity(recipe: Recipe, s: Shape, device: str) -> str | None:
    """What is recomputed: as in the recipe, but core attention only where that saves memory."""
    wanted = recipe.train.recompute_granularity
    return None if wanted == "selective" and not keeps_scores(recipe, s, device) else wanted


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
    for each in adapted(lora, recipe.model, s, experts=experts):
        visits = recipe.model.moe_router_topk if each.of_experts else 1
        kept += visits * element * lora.rank / tokens
        if lora.dropout:
            # The input is kept after dropout; attention keeps its output, the input of linear_proj, itself.
            size = (element if device == "cpu" else 1) + (element if each.name == "linear_proj" else 0)
            kept += visits * size * each.width / (tokens if each.by_columns or each.of_experts else tensor)
    return kept


def own_layers(recipe: Recipe, device: str) -> bool:
    """Whether layers are megatron-core's own, with our attention: on a CPU, and with adapters everywhere."""
    return device == "cpu" or recipe.lora is not None
