"""Exact parameter counts of the models that megatron-core builds, of their adapters, and model FLOPs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from llmrecipes.plan.layout import Layout
from llmrecipes.recipe.derived.adapters import Matrix, adapted, matrices
from llmrecipes.recipe.derived.freezing import frozen
from llmrecipes.recipe.derived.shape import Shape
from llmrecipes.recipe.schema import Lora, Model, Recipe
from llmrecipes.recipe.speedups.fp8 import in_bf16


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of the full model.

    `embedding` has the (padded) word embeddings, the learned positions and an untied output layer; `non_embedding` the
    layers and the final norm, which is the N of scaling laws (arXiv 2001.08361). `experts` are all routed experts;
    `active` are the parameters that one token uses, without the experts it is not routed to and the multi-token
    prediction layers; `mtp` are the latter. `total` has everything.
    """

    total: int
    active: int
    embedding: int
    non_embedding: int
    experts: int
    mtp: int


@dataclass(frozen=True)
class RankParameters:
    """Parameters on one rank: `dense` are the same on all its data-parallel ranks, `experts` on fewer of them."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class _Part:
    """A part of the model: split over tensor-parallel ranks, replicated on them (`whole`), or experts."""

    shared: int = 0
    whole: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.shared + self.whole + self.experts

    def __add__(self, other: _Part) -> _Part:
        return _Part(self.shared + other.shared, self.whole + other.whole, self.experts + other.experts)

    def __mul__(self, times: int) -> _Part:
        return _Part(self.shared * times, self.whole * times, self.experts * times)


def count(model: Model, s: Shape) -> Parameters:
    """Count the parameters of one model replica."""
    decoder = _layers(model, s, 0, s.num_layers)
    norm = _norms(model, s.hidden_size)
    mtp = _mtp(model, s, split_down=True)
    words = s.vocab_size * s.hidden_size
    embedding = words if model.share_embeddings_and_output_weights else 2 * words
    embedding += _positions(model, s)
    non_embedding = decoder.total + norm + mtp.total
    visited = decoder.experts * model.moe_router_topk // s.num_moe_experts if s.num_moe_experts else 0
    return Parameters(
        total=embedding + non_embedding,
        active=embedding + decoder.total + norm - decoder.experts + visited,
        embedding=embedding,
        non_embedding=non_embedding,
        experts=decoder.experts + mtp.experts,
        mtp=mtp.total,
    )


def count_on_rank(
    model: Model, s: Shape, layout: Layout, stage: int, device: str, *, local: bool = False
) -> RankParameters:
    """Count the parameters of a rank of one pipeline stage.

    The last stage has the output layer: a copy of a tied embedding unless it is also the first stage. Multi-token
    prediction needs the embedding there as well.

    Args:
        stage: pipeline stage, from 0.
        device: on `cuda` TransformerEngine replicates the down-projections of latent attention on every rank;
            megatron-core's own layers split them.
        local: layers are megatron-core's own on `cuda` too.
    """
    split_down = local or device == "cpu"
    part = _Part()
    for chunk, layers in enumerate(layout.layers_per_stage[stage]):
        first = layout.first_layer(stage, chunk)
        part += _layers(model, s, first, first + layers, split_down=split_down)
    words = _Part(shared=s.vocab_size * s.hidden_size)
    last = stage == layout.pipeline_model_parallel_size - 1
    tied = model.share_embeddings_and_output_weights
    has_embedding = stage == 0 or (last and s.mtp_num_layers > 0)
    if has_embedding:
        part += words + _Part(whole=_positions(model, s))
    if stage == layout.final_norm(s.mtp_num_layers)[0]:
        part += _Part(whole=_norms(model, s.hidden_size))
    if last:
        part += _mtp(model, s, split_down=split_down)
        if not (tied and has_embedding):
            part += words
    return RankParameters(
        dense=part.shared // layout.tensor_model_parallel_size + part.whole,
        experts=part.experts // (layout.expert_model_parallel_size * layout.expert_tensor_parallel_size),
    )


def count_vectors(model: Model, s: Shape) -> int:
    """Parameters of the model that are not of a matrix between hidden layers: what Muon leaves to AdamW."""
    layers = _layer_vectors(model, s, 0, s.num_layers, 1, 1) + _mtp_vectors(model, s, 1, 1)
    return count(model, s).embedding + layers + _norms(model, s.hidden_size)


def vectors_on_rank(model: Model, s: Shape, layout: Layout, stage: int) -> int:
    """As `count_vectors`, on a rank of one pipeline stage."""
    ranks = layout.tensor_model_parallel_size
    total = 0
    for chunk, layers in enumerate(layout.layers_per_stage[stage]):
        first = layout.first_layer(stage, chunk)
        total += _layer_vectors(model, s, first, first + layers, ranks, layout.expert_model_parallel_size)
    last = stage == layout.pipeline_model_parallel_size - 1
    has_embedding = stage == 0 or (last and s.mtp_num_layers > 0)
    words = s.vocab_size * s.hidden_size // ranks
    total += has_embedding * (words + _positions(model, s))
    total += (stage == layout.final_norm(s.mtp_num_layers)[0]) * _norms(model, s.hidden_size)
    if last:
        tied = model.share_embeddings_and_output_weights and has_embedding
        total += _mtp_vectors(model, s, ranks, layout.expert_model_parallel_size) + (0 if tied else words)
    return total


def _layer_vectors(model: Model, s: Shape, first: int, last: int, ranks: int, of_experts: int) -> int:
    """Norms and biases of the layers `first` to `last` - 1 on one of their `ranks` tensor-parallel ranks, which is one
    of `of_experts` expert-parallel ranks."""
    h = s.hidden_size
    bias = model.add_bias_linear
    each = 2 * _norms(model, h) + h * bias
    if not model.multi_latent_attention:
        each += (bias or model.add_qkv_bias) * (s.query_size + s.key_size + s.value_size) // ranks
        each += 2 * _norms(model, s.query_channels) * model.qk_layernorm
    elif model.qk_layernorm:
        each += _norms(model, model.kv_lora_rank) + (_norms(model, model.q_lora_rank) if model.q_lora_rank else 0)
    sparse = s.moe_layers(first, last)
    up = s.ffn_hidden_size * (2 if model.gated_linear_unit else 1)
    routed = s.num_moe_experts * bias + s.num_moe_experts * _biases_of_an_expert(model, s) // of_experts
    return each * (last - first) + (last - first - sparse) * bias * (up // ranks + h) + sparse * routed


def _mtp_vectors(model: Model, s: Shape, ranks: int, of_experts: int) -> int:
    if not s.mtp_num_layers:
        return 0
    layer = _layer_vectors(model, s, s.num_layers - 1, s.num_layers, ranks, of_experts)
    return (layer + 3 * _norms(model, s.hidden_size)) * s.mtp_num_layers


def count_trained_on_rank(
    recipe: Recipe, s: Shape, layout: Layout, stage: int, device: str, *, local: bool = False
) -> RankParameters:
    """`count_on_rank` without the frozen parameters of `train.freeze`."""
    counted = count_on_rank(recipe.model, s, layout, stage, device, local=local)
    if not recipe.train.freeze:
        return counted
    fixed = count_frozen_on_rank(frozen(recipe), recipe.model, s, layout, stage, split_down=local or device == "cpu")
    return RankParameters(counted.dense - fixed.dense, counted.experts - fixed.experts)


def count_frozen_on_rank(
    named: Mapping[str, tuple[int, ...]], model: Model, s: Shape, layout: Layout, stage: int, *, split_down: bool
) -> RankParameters:
    """Parameters of some names and whole shapes on a rank of one pipeline stage.

    Args:
        split_down: the down-projections of latent attention are split over tensor-parallel ranks.
    """
    part = _Part()
    for name, size in _on_stage(named, model, s, layout, stage):
        part += _part_of(name, prod(size), split_down=split_down)
    return RankParameters(
        dense=part.shared // layout.tensor_model_parallel_size + part.whole,
        experts=part.experts // (layout.expert_model_parallel_size * layout.expert_tensor_parallel_size),
    )


def count_frozen_whole(
    recipe: Recipe, s: Shape, layout: Layout, stage: int, within: tuple[str, ...] = ("decoder.",)
) -> int:
    """Frozen parameters of a stage's layers and final norm that each tensor-parallel rank has all of.

    Args:
        within: one of these is in the names that count.
    """
    named = _on_stage(frozen(recipe), recipe.model, s, layout, stage)
    return sum(
        _part_of(name, prod(size), split_down=False).whole
        for name, size in named
        if any(part in name for part in within)
    )


def _on_stage(
    named: Mapping[str, tuple[int, ...]], model: Model, s: Shape, layout: Layout, stage: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    last = layout.pipeline_model_parallel_size - 1
    layers: set[int] = set()
    for chunk, number in enumerate(layout.layers_per_stage[stage]):
        first = layout.first_layer(stage, chunk)
        layers |= set(range(first, first + number))
    for name, size in named.items():
        match = _LAYER_NAME.match(name)
        if match is not None:
            here = int(match[1]) in layers
        elif name.startswith("embedding."):
            copied = name == WORDS and model.share_embeddings_and_output_weights
            here = stage == 0 or (stage == last and copied)
        else:
            here = stage == (last if name == "output_layer.weight" else layout.final_norm(s.mtp_num_layers)[0])
        if here:
            yield name, size


WORDS = "embedding.word_embeddings.weight"
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.")
_SHARED = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias",
           "linear_proj.weight", "linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_q_proj.weight",
           "linear_q_up_proj.weight", "linear_kv_up_proj.weight")  # fmt: skip


def _part_of(name: str, number: int, *, split_down: bool) -> _Part:
    if ".local_experts." in name:
        return _Part(experts=number)
    if name.endswith(_SHARED) or (split_down and name.endswith("_down_proj.weight")):
        return _Part(shared=number)
    return _Part(whole=number)


def count_frozen(recipe: Recipe) -> tuple[int, int]:
    """Frozen parameters of the model, and those of its frozen matrices that one token is multiplied by."""
    total = products = 0
    for name, size in frozen(recipe).items():
        number = prod(size)
        total += number
        if len(size) > 1 and (not name.startswith("embedding.") or _is_output(name, recipe.model)):
            share = 1.0
            if ".local_experts." in name:
                share = recipe.model.moe_router_topk / (recipe.model.num_moe_experts or 1)
            products += int(number * share)
    return total, products


def _is_output(name: str, model: Model) -> bool:
    return name == WORDS and model.share_embeddings_and_output_weights


def count_products_on_rank(recipe: Recipe, s: Shape, layout: Layout, stage: int) -> int:
    """Parameters of the matrices that are multiplied in fp8 on a rank of one pipeline stage."""
    numbers = [number for number in layers_of(layout, stage) if not in_bf16(recipe, number)]
    if stage == layout.pipeline_model_parallel_size - 1:
        numbers += [s.num_layers - 1] * s.mtp_num_layers  # layers like the last one
    return _count_matrices(recipe, s, layout, numbers)


def count_rounded_on_rank(recipe: Recipe, s: Shape, layout: Layout, stage: int) -> int:
    """Parameters of the matrices that are rounded (`qat`) on a rank of one pipeline stage."""
    return _count_matrices(recipe, s, layout, layers_of(layout, stage))


def layers_of(layout: Layout, stage: int) -> list[int]:
    """Numbers of a stage's layers, from 0."""
    first = (layout.first_layer(stage, chunk) for chunk in range(layout.virtual_pipeline_model_parallel_size))
    return [
        begin + n for begin, layers in zip(first, layout.layers_per_stage[stage], strict=True) for n in range(layers)
    ]


def _count_matrices(recipe: Recipe, s: Shape, layout: Layout, numbers: Iterable[int]) -> int:
    """Parameters of a rank's part of the matrices of these layers."""
    total = 0
    for number in numbers:
        for matrix in matrices(recipe.model, s, experts=s.moe_layers(number, number + 1) > 0):
            ranks = layout.tensor_model_parallel_size
            copies = 1
            if matrix.of_experts:
                ranks = layout.expert_tensor_parallel_size
                copies = s.num_moe_experts
                ranks *= layout.expert_model_parallel_size
            total += copies * matrix.width * matrix.height // ranks
    return total


def largest_gathered(model: Model, s: Shape, layout: Layout) -> int:
    """Parameters of a rank's largest layer, or of its word embedding if that is larger."""
    layers = (_layers(model, s, number, number + 1) for number in range(s.num_layers))
    tensor = layout.tensor_model_parallel_size
    sizes = (layer.shared // tensor + layer.whole + layer.experts // tensor for layer in layers)
    return max(*sizes, s.vocab_size * s.hidden_size // tensor, 0)


def _layers(model: Model, s: Shape, first: int, last: int, *, split_down: bool = True) -> _Part:
    """The transformer layers `first` to `last` - 1, counted from 0."""
    with_experts = s.moe_layers(first, last)
    both = _attention(model, s, split_down=split_down) + _Part(whole=2 * _norms(model, s.hidden_size))
    return both * (last - first) + _experts(model, s) * with_experts + _mlp(model, s) * (last - first - with_experts)


def _attention(model: Model, s: Shape, *, split_down: bool) -> _Part:
    h = s.hidden_size
    bias = model.add_bias_linear
    output = _Part(shared=s.context_size * h, whole=h if bias else 0)
    if not model.multi_latent_attention:
        width = s.query_size + s.key_size + s.value_size
        with_bias = bias or model.add_qkv_bias
        norms = 2 * _norms(model, s.query_channels) if model.qk_layernorm else 0
        sinks = s.num_attention_heads if model.softmax_type == "learnable" else 0
        return output + _Part(shared=(h + with_bias) * width + sinks, whole=norms)
    # arXiv 2405.04434, section 2.1: down to the latent vectors, then up to the heads; no biases.
    rank = model.kv_lora_rank
    down = h * (rank + model.qk_pos_emb_head_dim)
    up = rank * s.num_attention_heads * (model.qk_head_dim + model.v_head_dim)
    norms = _norms(model, rank)
    if model.q_lora_rank:
        down += h * model.q_lora_rank
        up += model.q_lora_rank * s.query_size
        norms += _norms(model, model.q_lora_rank)
    else:
        up += h * s.query_size
    norms = norms if model.qk_layernorm else 0
    return output + (_Part(down + up, norms) if split_down else _Part(up, down + norms))


def _mlp(model: Model, s: Shape) -> _Part:
    up = s.ffn_hidden_size * (2 if model.gated_linear_unit else 1)
    bias = model.add_bias_linear
    return _Part(shared=s.hidden_size * (up + s.ffn_hidden_size) + (up if bias else 0), whole=s.hidden_size * bias)


def _experts(model: Model, s: Shape) -> _Part:
    """Router, routed experts and shared experts of one layer, of which the last have no biases."""
    h = s.hidden_size
    matrices = 3 if model.gated_linear_unit else 2
    number = s.num_moe_experts
    return _Part(
        shared=h * s.moe_shared_ffn_hidden_size * matrices,
        whole=(h + model.add_bias_linear) * number,
        experts=(h * s.moe_ffn_hidden_size * matrices + _biases_of_an_expert(model, s)) * number,
    )


def _biases_of_an_expert(model: Model, s: Shape) -> int:
    width = s.moe_ffn_hidden_size * (2 if model.gated_linear_unit else 1)
    return (width + s.hidden_size) * model.add_bias_linear


def _mtp(model: Model, s: Shape, *, split_down: bool) -> _Part:
    """Multi-token prediction: norms of both inputs, their projection, a layer like the last one, and its norm."""
    if not s.mtp_num_layers:
        return _Part()
    layer = _layers(model, s, s.num_layers - 1, s.num_layers, split_down=split_down)
    around = _Part(shared=2 * s.hidden_size * s.hidden_size, whole=3 * _norms(model, s.hidden_size))
    return (layer + around) * s.mtp_num_layers


def _norms(model: Model, width: int) -> int:
    """Parameters of one norm: scale and shift, or only scale."""
    return width * (2 if model.normalization == "LayerNorm" else 1)


def _positions(model: Model, s: Shape) -> int:
    return s.max_position_embeddings * s.hidden_size if model.position_embedding_type == "learned_absolute" else 0


def count_adapters(lora: Lora | None, model: Model, s: Shape) -> tuple[int, int]:
    """Parameters of all adapters, and those that one token uses; none without the section."""
    total = active = 0
    if lora is None:
        return total, active
    for number in range(s.num_layers):
        for matrix in adapted(lora, model, s, experts=s.moe_layers(number, number + 1) > 0):
            size = lora.rank * (matrix.width + matrix.height)
            total += size * (s.num_moe_experts if matrix.of_experts else 1)
            active += size * (model.moe_router_topk if matrix.of_experts else 1)
    return total, active


def count_adapters_on_rank(lora: Lora, model: Model, s: Shape, layout: Layout, stage: int) -> RankParameters:
    """Parameters of the adapters of a rank of one pipeline stage."""
    dense = experts = 0
    for matrix in adapted_on_stage(lora, model, s, layout, stage):
        if matrix.of_experts:
            number = s.num_moe_experts // layout.expert_model_parallel_size
            experts += number * sum(_sides(matrix, lora.rank, layout.expert_tensor_parallel_size))
        else:
            dense += sum(_sides(matrix, lora.rank, layout.tensor_model_parallel_size))
    return RankParameters(dense=dense, experts=experts)


def unsharded_adapters(lora: Lora, matrices: Iterable[Matrix]) -> int:
    """Parameters of adapters that each of the ranks that share their matrices has all of."""
    return sum(lora.rank * (matrix.width if matrix.by_columns else matrix.height) for matrix in matrices)


def adapted_on_stage(lora: Lora, model: Model, s: Shape, layout: Layout, stage: int) -> Iterator[Matrix]:
    """Adapted matrices of the layers of a stage."""
    for chunk, layers in enumerate(layout.layers_per_stage[stage]):
        first = layout.first_layer(stage, chunk)
        for number in range(first, first + layers):
            yield from adapted(lora, model, s, experts=s.moe_layers(number, number + 1) > 0)


def _sides(matrix: Matrix, rank: int, ranks: int) -> tuple[int, int]:
    """Parameters of A and B on one of the ranks that share a matrix."""
    cut = (1, ranks) if matrix.by_columns else (ranks, 1)
    return rank * matrix.width // cut[0], rank * matrix.height // cut[1]


def flops_per_token(model: Model, s: Shape, *, causal: bool, lora: Lora | None = None) -> float:
    """FLOPs of one forward and one backward pass for one token, matrix products only (a multiply-add is two).

    The backward pass costs twice the forward pass; recomputation is not counted. Of the experts, those that a token is
    routed to count; multi-token prediction counts, including its output layer. For the classic GPT shape with
    `causal=False` this is 72 l h² (1 + s / 6h + V / 12lh), equation 3 of Narayanan et al. 2021 (arXiv 2104.04473)
    without its recomputed forward pass. `causal=True` halves the two attention products, as a causal kernel does;
    a sliding window leaves those with the tokens in it.
    With `lora` the frozen matrices have no gradient of their own, which is half of their backward pass.
    """
    h, depth = s.hidden_size, s.mtp_num_layers
    with_experts = s.moe_layers(0, s.num_layers) + s.mtp_moe_layers
    layers = s.num_layers + depth
    attention = s.keys_seen(causal=causal) * (s.query_size + s.context_size)  # scores and weighted values
    products = 3 if model.gated_linear_unit else 2
    experts = h * (s.num_moe_experts + products * model.moe_router_topk * s.moe_ffn_hidden_size)
    experts += h * products * s.moe_shared_ffn_hidden_size
    forward = layers * _projections(model, s)
    forward += with_experts * experts + (layers - with_experts) * products * h * s.ffn_hidden_size
    forward += depth * 2 * h * h + (1 + depth) * h * s.vocab_size
    passes = 3.0 if lora is None else 2.0
    _, trained = count_adapters(lora, model, s)
    return 2.0 * (passes * forward + 3.0 * (attention + trained))


def _projections(model: Model, s: Shape) -> int:
    """Multiply-adds of the products into and out of attention."""
    h = s.hidden_size
    output = s.context_size * s.hidden_size
    if not model.multi_latent_attention:
        return h * (s.query_size + s.key_size + s.value_size) + output
    rank = model.kv_lora_rank
    keys = h * (rank + model.qk_pos_emb_head_dim) + rank * s.num_attention_heads * (
        model.qk_head_dim + model.v_head_dim
    )
    query = h * model.q_lora_rank + model.q_lora_rank * s.query_size if model.q_lora_rank else h * s.query_size
    return keys + query + output
