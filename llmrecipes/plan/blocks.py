"""What a model consists of, for its picture: blocks with their weights, layers by kind, and what each stage holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from llmrecipes.recipe.derived.adapters import EXPERTS, Matrix, adapted, matrices
from llmrecipes.recipe.derived.shape import Shape, shape
from llmrecipes.recipe.derived.stage_layout import layers_per_stage
from llmrecipes.recipe.schema import Lora, Model, Recipe

ACTIVATIONS = {
    "gelu": "GELU", "gelu_tanh": "GELU (tanh)", "quick_gelu": "quick GELU", "silu": "SiLU",
    "squared_relu": "squared ReLU",
}  # fmt: skip
GATED = {
    "gelu": "GEGLU", "gelu_tanh": "GEGLU (tanh)", "quick_gelu": "quick GEGLU", "silu": "SwiGLU",
    "squared_relu": "gated squared ReLU",
}  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """Weights of a block under one name of megatron-core, biases included; `size` is their shape in words."""

    name: str
    size: str
    parameters: int


@dataclass(frozen=True)
class Block:
    """A box of the picture.

    Attributes:
        kind: embedding, norm, attention, mlp, experts, output; join and layer of multi-token prediction.
        title: what it is.
        notes: what it computes, a short line each.
        parts: its weights.
    """

    kind: str
    title: str
    notes: tuple[str, ...] = ()
    parts: tuple[Weights, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)


@dataclass(frozen=True)
class Layers:
    """Equal layers.

    Attributes:
        experts: whether they are mixtures of experts.
        numbers: which layers they are, counted from 0.
        blocks: of one of them, from its input to its output.
        adapters: of one of them; they are not in `parameters`.
    """

    experts: bool
    numbers: tuple[int, ...]
    blocks: tuple[Block, ...]
    adapters: tuple[Weights, ...] = ()

    @property
    def parameters(self) -> int:
        """Parameters of one layer."""
        return sum(block.parameters for block in self.blocks)


@dataclass(frozen=True)
class StageBlocks:
    """What a pipeline stage holds.

    Attributes:
        chunks: of each chunk its first layer, counted from 0, and the number of its layers.
        has: whether it has the embedding, the norm after the last layer, layers of multi-token prediction, the output.
        copies: parameters of copies of a tied embedding, which the first stage has too.
        parameters: all of them, with the copies, over all its tensor- and expert-parallel ranks.
    """

    chunks: tuple[tuple[int, int], ...]
    has: tuple[str, ...]
    copies: int
    parameters: int


@dataclass(frozen=True)
class Graph:
    """A model from token ids to logits.

    Attributes:
        layers: by kind, in the order of their first layer.
        output: without parts if it is tied to the embedding.
        prediction: blocks of one layer of multi-token prediction; `predictions` is their number.
    """

    embedding: Block
    layers: tuple[Layers, ...]
    norm: Block
    output: Block
    prediction: tuple[Block, ...]
    predictions: int
    stages: tuple[StageBlocks, ...]

    @property
    def parameters(self) -> int:
        """Parameters of the model, without adapters."""
        ends = self.embedding.parameters + self.norm.parameters + self.output.parameters
        return ends + sum(layer.parameters * len(layer.numbers) for layer in self.layers) + self.predicting

    @property
    def predicting(self) -> int:
        """Parameters of all layers of multi-token prediction."""
        return self.predictions * sum(block.parameters for block in self.prediction)

    def kinds(self) -> tuple[int, ...]:
        """For each layer, which of `layers` it is one of."""
        of = {number: kind for kind, each in enumerate(self.layers) for number in each.numbers}
        return tuple(of[number] for number in range(len(of)))

    @property
    def alternates(self) -> bool:
        """Whether the layers of a kind do not all follow one another."""
        return sum(1 for _ in groupby(self.kinds())) > len(self.layers)


def graph(recipe: Recipe) -> Graph:
    """The blocks of a recipe's model, without building it."""
    model = recipe.model
    s = shape(recipe.model)
    with_experts = [s.moe_layers(number, number + 1) > 0 for number in range(s.num_layers)]
    layers = tuple(
        Layers(
            kind,
            tuple(number for number, each in enumerate(with_experts) if each is kind),
            _layer(model, s, experts=kind),
            tuple(_adapters(recipe.lora, model, s, experts=kind)),
        )
        for kind in dict.fromkeys(with_experts)
    )
    result = Graph(
        embedding=_embedding(model, s),
        layers=layers,
        norm=_norm(model, "Final norm", "final_layernorm", s.hidden_size),
        output=_output(model, s),
        prediction=tuple(_prediction(model, s, experts=with_experts[-1])) if s.mtp_num_layers else (),
        predictions=s.mtp_num_layers,
        stages=(),
    )
    return replace(result, stages=tuple(_stages(recipe, s, result)))


def _embedding(model: Model, s: Shape) -> Block:
    parts = [Weights("word_embeddings", f"{s.vocab_size:,} × {s.hidden_size:,}", s.vocab_size * s.hidden_size)]
    notes = [] if s.vocab_size == model.vocab_size else [f"{model.vocab_size:,} tokens, padded"]
    if model.position_embedding_type == "learned_absolute":
        places = s.max_position_embeddings
        parts.append(Weights("position_embeddings", f"{places:,} × {s.hidden_size:,}", places * s.hidden_size))
    return Block("embedding", "Embedding", tuple(notes), tuple(parts))


def _output(model: Model, s: Shape) -> Block:
    if model.share_embeddings_and_output_weights:
        return Block("output", "Output layer", ("tied: the weights of word_embeddings",))
    size = f"{s.hidden_size:,} → {s.vocab_size:,}"
    return Block("output", "Output layer", (), (Weights("output_layer", size, s.hidden_size * s.vocab_size),))


def _norm(model: Model, title: str, name: str, width: int) -> Block:
    return Block("norm", f"{title}: {model.normalization}", (), (_scales(model, name, width),))


def _scales(model: Model, name: str, width: int, copies: int = 1) -> Weights:
    shifted = model.normalization == "LayerNorm"
    size = f"{f'{copies} × ' if copies > 1 else ''}{width:,}{', shift' if shifted else ''}"
    return Weights(name, size, copies * width * (2 if shifted else 1))


def _layer(model: Model, s: Shape, *, experts: bool) -> tuple[Block, ...]:
    weights = {matrix.name: matrix for matrix in matrices(model, s, experts=experts)}
    return (
        _norm(model, "Norm", "input_layernorm", s.hidden_size),
        _attention(model, s, weights),
        _norm(model, "Norm", "pre_mlp_layernorm", s.hidden_size),
        _experts(model, s, weights) if experts else _mlp(model, s, weights),
    )


def _product(each: Matrix, *, bias: bool = False, name: str | None = None, copies: int = 1) -> Weights:
    size = f"{f'{copies} × ' if copies > 1 else ''}{each.width:,} → {each.height:,}{', bias' if bias else ''}"
    return Weights(name or each.name, size, copies * (each.width * each.height + (each.height if bias else 0)))


def _attention(model: Model, s: Shape, weights: dict[str, Matrix]) -> Block:
    """Weights in the order in which they are used (latent attention: arXiv 2405.04434, section 2.1)."""
    if model.multi_latent_attention:
        latent = ["linear_q_proj"]
        normed = {"kv": model.kv_lora_rank}
        if model.q_lora_rank:
            latent = ["linear_q_down_proj", "linear_q_up_proj"]
            normed = {"q": model.q_lora_rank, **normed}
        parts = [_product(weights[name]) for name in (*latent, "linear_kv_down_proj", "linear_kv_up_proj")]
        if model.qk_layernorm:
            parts += [_scales(model, f"{name}_layernorm", width) for name, width in normed.items()]
        title = "Latent attention (MLA)"
        heads = f"{s.num_attention_heads:,} heads of {model.qk_head_dim} + {model.qk_pos_emb_head_dim} channels"
    else:
        parts = [_product(weights["linear_qkv"], bias=model.add_bias_linear or model.add_qkv_bias)]
        if model.softmax_type == "learnable":
            parts.append(Weights("core_attention.softmax_offset", f"{s.num_attention_heads:,}", s.num_attention_heads))
        if model.qk_layernorm:
            parts += [_scales(model, f"{name}_layernorm", s.query_channels) for name in ("q", "k")]
        grouped = s.num_query_groups < s.num_attention_heads
        title = "Grouped-query attention (GQA)" if grouped else "Attention"
        keys = f", {s.num_query_groups:,} for keys and values" if grouped else ""
        heads = f"{s.num_attention_heads:,} heads of {s.query_channels:,} channels{keys}"
    parts.append(_product(weights["linear_proj"], bias=model.add_bias_linear))
    rotary = {"rope": "rotary positions", "yarn": "rotary positions, YaRN"}
    kind = model.rope_type if model.multi_latent_attention else model.position_embedding_type
    near = f"a window of {s.window:,} tokens in {sum(s.windowed)} of {s.num_layers} layers" if s.window else None
    return Block("attention", title, tuple(filter(None, (heads, rotary.get(kind), near))), tuple(parts))


def _activation(model: Model) -> str:
    return (GATED if model.gated_linear_unit else ACTIVATIONS)[model.activation_func]


def _mlp(model: Model, s: Shape, weights: dict[str, Matrix]) -> Block:
    parts = tuple(_product(weights[name], bias=model.add_bias_linear) for name in ("linear_fc1", "linear_fc2"))
    return Block("mlp", f"MLP: {_activation(model)}", (f"width {s.ffn_hidden_size:,}",), parts)


def _experts(model: Model, s: Shape, weights: dict[str, Matrix]) -> Block:
    """Router, routed experts and shared experts, of which the last have no biases."""
    many, h = s.num_moe_experts, s.hidden_size
    bias = model.add_bias_linear
    parts = [Weights("router", f"{h:,} → {many:,}{', bias' if bias else ''}", (h + bias) * many)]
    parts += [_product(weights[EXPERTS + name], bias=bias, copies=many) for name in ("linear_fc1", "linear_fc2")]
    notes = [f"{model.moe_router_topk} of {many:,} for each token, width {s.moe_ffn_hidden_size:,}"]
    if s.moe_shared_ffn_hidden_size:
        notes.append(f"and shared experts, width {s.moe_shared_ffn_hidden_size:,}")
        parts += [_product(weights[name], name=f"shared_experts.{name}") for name in ("linear_fc1", "linear_fc2")]
    return Block("experts", f"{many:,} experts: {_activation(model)}", tuple(notes), tuple(parts))


def _prediction(model: Model, s: Shape, *, experts: bool) -> Iterator[Block]:
    """Multi-token prediction: norms of both inputs, their projection, a layer like the last one, and its norm."""
    h = s.hidden_size
    layer = _layer(model, s, experts=experts)
    parts = (
        _scales(model, "enorm", h),
        _scales(model, "hnorm", h),
        Weights("eh_proj", f"{2 * h:,} → {h:,}", 2 * h * h),
    )
    yield Block("join", "Join", ("of the last layer's output and the next embedding",), parts)
    whole = Weights("transformer_layer", "", sum(block.parameters for block in layer))
    yield Block("layer", f"Layer like the last, {'with experts' if experts else 'dense'}", (), (whole,))
    yield _norm(model, "Norm", "final_layernorm", h)


def _adapters(lora: Lora | None, model: Model, s: Shape, *, experts: bool) -> Iterator[Weights]:
    if lora is None:
        return
    for matrix in adapted(lora, model, s, experts=experts):
        copies = s.num_moe_experts if matrix.of_experts else 1
        size = f"{f'{copies} × ' if copies > 1 else ''}{matrix.width:,} → {lora.rank:,} → {matrix.height:,}"
        yield Weights(matrix.name, size, copies * lora.rank * (matrix.width + matrix.height))


def _stages(recipe: Recipe, s: Shape, drawing: Graph) -> Iterator[StageBlocks]:
    """As `plan.parameters.count_on_rank`, over all ranks of a stage."""
    per_stage = layers_per_stage(recipe)
    kinds = drawing.kinds()
    last = len(per_stage) - 1
    words = s.vocab_size * s.hidden_size
    first: dict[tuple[int, int], int] = {}
    number = 0
    for chunk in range(len(per_stage[0])):
        for stage, layers in enumerate(per_stage):
            first[stage, chunk] = number
            number += layers[chunk]
    with_layers = max((chunk, stage) for stage, each in enumerate(per_stage) for chunk, n in enumerate(each) if n)
    normed = with_layers[1] if drawing.predictions else last
    for stage, layers in enumerate(per_stage):
        chunks = tuple((first[stage, chunk], layers[chunk]) for chunk in range(len(layers)))
        held = sum(drawing.layers[kinds[n]].parameters for start, many in chunks for n in range(start, start + many))
        has, copies = [], 0
        if stage == 0:
            has.append("embedding")
            held += drawing.embedding.parameters
        elif stage == last and drawing.predictions:
            has.append("copy of the embedding")
            copies = drawing.embedding.parameters
        if stage == normed:
            has.append("final norm")
            held += drawing.norm.parameters
        if stage == last:
            has += ["multi-token prediction"] if drawing.predictions else []
            has.append("output layer")
            held += drawing.predicting + drawing.output.parameters
            if not drawing.output.parts and stage and not copies:
                copies = words
        yield StageBlocks(chunks, tuple(has), copies, held + copies)
