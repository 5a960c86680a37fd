"""The fullest moment of a pipeline stage in a step: what its layers, its losses and its schedule have then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmrecipes.plan import losses
from llmrecipes.plan.activations import PerToken
from llmrecipes.plan.kernels import mask_per_token
from llmrecipes.plan.layout import Layout
from llmrecipes.plan.parameters import WORDS
from llmrecipes.plan.pending import fullest
from llmrecipes.recipe.derived.freezing import frozen
from llmrecipes.recipe.derived.shape import Shape
from llmrecipes.recipe.schema import Recipe


@dataclass(frozen=True)
class Peak:
    """Bytes of a rank at the fullest moment of a step, besides model states.

    `activations` are kept for the backward pass; `logits` is what the loss has derived from the output layer's result,
    of which `kept_logits` is kept too; `outputs` are those of chunks that were sent to the next stage; `gradients` are
    those of activations in a layer, or what its experts' results take on their way back.
    """

    activations: int
    logits: int = 0
    kept_logits: int = 0
    outputs: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.outputs + self.gradients


@dataclass(frozen=True)
class _Chunk:
    """Bytes per token of a chunk's layers: what they store, what exists only during recomputation, and how much more
    (or less) than what they store is there at the fullest moment in a layer, with gradients."""

    kept: float = 0.0
    again: float = 0.0
    in_layer: tuple[float, float] = (0.0, 0.0)

    def and_kept(self, more: float) -> _Chunk:
        return replace(self, kept=self.kept + more)


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
    it is the loss, or a layer after it; on the others the last layer, at the beginning of a backward pass.
    """
    per = PerToken(recipe, s, layout, device)
    tokens = losses.tokens_of_a_micro_batch(recipe, layout)
    chunks = []
    last = stage == layout.pipeline_model_parallel_size - 1
    for number, layers in enumerate(layout.layers_per_stage[stage]):
        first = layout.first_layer(stage, number)
        is_last = last and number == len(layout.layers_per_stage[stage]) - 1
        chunk = _chunk(recipe, per, range(first, first + layers), last=is_last)
        chunks.append(chunk.and_kept(mask_per_token(recipe, s, device)))
    if stage == 0:
        chunks[0] = chunks[0].and_kept(per.mask)
    prediction_layers = _mtp(recipe, per)
    # Inputs of the losses: one tensor, freed with the last of them.
    of_losses = per.edge * ((recipe.lora is None) + s.mtp_num_layers)
    ends = per.edge * (recipe.lora is None) + prediction_layers.kept
    norm = layout.final_norm(s.mtp_num_layers)
    if norm == (layout.pipeline_model_parallel_size - 1, len(chunks) - 1):
        ends += per.norm
    elif norm[0] == stage:
        chunks[norm[1]] = chunks[norm[1]].and_kept(per.norm)
    kept_logits, most_logits = losses.kept_and_most(recipe, s, layout, device)
    frees = losses.frees_its_input(recipe, device)
    # Chunks without layers, and without the final norm, keep nothing of their inputs, which are there until the end.
    without = [
        not layers and stage + number > 0 and norm != (stage, number)
        for number, layers in enumerate(layout.layers_per_stage[stage])
    ]
    tables = len(chunks) * per.tables
    # Predictions gather two inputs, joined, in the buffer that is kept for gathered tokens.
    wider = per.gathered * (s.mtp_num_layers > 0)
    words = per.element * s.vocab_size * s.hidden_size // layout.tensor_model_parallel_size
    waiting = words * _waits_for_words(recipe, layout)
    of_predictions = waiting * recipe.model.share_embeddings_and_output_weights
    moments = fullest(
        layout.pipeline_model_parallel_size,
        layout.virtual_pipeline_model_parallel_size,
        # A third group repeats what the second does.
        min(num_microbatches, 3 * layout.pipeline_model_parallel_size),
        stage,
        s.num_moe_experts > 0,
        bool(recipe.layout.overlap_moe_expert_parallel_comm),
    )
    for pending, turn, inputs, sent in moments:
        stack = tables + sum(each.kept * number for each, number in zip(chunks, pending, strict=True))
        held = sum(number for number, none in zip(inputs, without, strict=True) if not none)
        passing = sum(inputs) - held + sum(number for number, none in zip(pending, without, strict=True) if none)
        outputs = int(tokens * ((passing + sent) * per.edge + wider * last))
        # The previous micro-batch's input of a single chunk is released before the backward pass.
        yield Peak(int(tokens * (stack + held * per.edge)), outputs=outputs)
        stack_then = stack + (held * per.edge if len(chunks) > 1 else 0)
        yield Peak(int(tokens * (stack_then + chunks[turn].again)), outputs=outputs, gradients=waiting)
        more, gradients = chunks[turn].in_layer
        there = waiting + int(tokens * gradients)
        yield Peak(int(tokens * (stack_then + more)), outputs=outputs, gradients=there)
        if stage == turn == 0 and recipe.lora is None:
            # After its layers, the gradient of the word embedding, from that of the hidden states of all ranks, and its
            # sum with the one that has waited.
            there = 2 * waiting + words + int(tokens * (per.edge + 2 * per.gathered))
            yield Peak(int(tokens * (stack_then - chunks[0].kept)), outputs=outputs, gradients=there)
        if last and turn == len(chunks) - 1:
            end, freed = stack + held * per.edge + ends, of_losses * (not s.mtp_num_layers)
            buffer = int(tokens * per.gathered_tokens) if any(layout.layers_per_stage[stage]) else 0
            yield Peak(int(tokens * end), kept_logits if frees else most_logits, kept_logits, outputs, buffer)
            if frees:
                yield Peak(int(tokens * (end - freed)), most_logits, kept_logits, outputs, buffer)
            if (prediction := losses.of_a_prediction(recipe, s, layout, device)) is not None:
                freed = of_losses if frees else 0.0
                yield Peak(int(tokens * (end - freed)), prediction[1], prediction[0], outputs, buffer)
            # The losses have been differentiated by then: they were computed after the layers.
            end -= of_losses
            again = int(tokens * (end + prediction_layers.again))
            yield Peak(again, outputs=outputs, gradients=of_predictions)
            more, gradients = prediction_layers.in_layer
            there = of_predictions + int(tokens * gradients)
            yield Peak(int(tokens * (end + more)), outputs=outputs, gradients=there)


def _waits_for_words(recipe: Recipe, layout: Layout) -> bool:
    """Whether the gradient of the word embedding from the output layer, or from multi-token prediction, waits through
    the backward pass of all layers for the one from the embedding itself."""
    twice = recipe.model.share_embeddings_and_output_weights or bool(recipe.model.mtp_num_layers)
    trained = recipe.lora is None and WORDS not in frozen(recipe)
    return twice and trained and layout.pipeline_model_parallel_size == 1


def _chunk(recipe: Recipe, per: PerToken, numbers: range, *, last: bool) -> _Chunk:
    """The layers of one chunk.

    Args:
        last: they are the model's last ones, after which the loss has been.
    """
    layers = [per.layer(number) for number in numbers]
    if not layers:
        return _Chunk()
    if recipe.layout.recompute_granularity != "full" or not recipe.layout.recompute_num_layers:
        kept = most = 0.0
        in_layer = 0.0, 0.0
        for number in numbers:
            # The layers after it are freed by the time one is recomputed.
            own, experts = per.of(number), per.has_experts(number)
            discarded = own.discarded(experts=experts)
            size = per.layer(number) - discarded.total
            most = max(most - size, discarded.most)
            # The gradient that was received, and the restored result of an MLP.
            edges = per.edge * (1 + (discarded.mlp >= own.inside(experts=experts) > 0))
            here = own.fullest(experts=experts, more=discarded.mlp + discarded.twice_in_mlp, gradients=edges)
            in_layer = max((in_layer[0] - size, in_layer[1] + per.edge * (not last)), here, key=sum)
            kept += size
        return _Chunk(kept, most, in_layer)
    number = min(recipe.layout.recompute_num_layers, len(layers))
    if recipe.layout.recompute_method == "uniform":
        groups = [sum(layers[start : start + number]) for start in range(0, len(layers), number)]
        again = max(groups) - per.edge  # whose input is stored anyway
        end = numbers[min((groups.index(max(groups)) + 1) * number, len(layers)) - 1]
        in_layer = per.of(end).fullest(experts=per.has_experts(end), more=again, gradients=2 * per.edge)
        return _Chunk(len(groups) * per.edge, again, in_layer)
    # The layers after the block are freed by the time one inside it is recomputed.
    after = sum(layers[number:])
    again = max(layers[:number]) - per.edge - after
    inside, end = numbers[layers.index(max(layers[:number]))], numbers[-1]
    edges = per.edge * (2 + (after > 0 and not last))
    moments = [per.of(inside).fullest(experts=per.has_experts(inside), more=again, gradients=edges)]
    if after:
        moments.append(per.of(end).fullest(experts=per.has_experts(end), more=0.0, gradients=per.edge))
    return _Chunk(number * per.edge + after, max(again, 0.0), max(moments, key=sum))


def _mtp(recipe: Recipe, per: PerToken) -> _Chunk:
    """The multi-token prediction layers."""
    depth = per.shape.mtp_num_layers
    if not depth:
        return _Chunk()
    experts = per.shape.mtp_moe_layers > 0
    layer = per.expert_layer if experts else per.dense_layer
    # Both inputs and their norms, concatenated for the projection; the result's norm, and the output layer's input.
    around = 2 * per.norm + 2 * per.edge + per.norm + per.edge
    # The gradients of the hidden states and of the layer's result.
    edges = 2 * per.edge
    if recipe.layout.recompute_method == "uniform":
        # The next token's embedding and the hidden states, and a copy of the result as the output layer's input.
        again = layer + around - 2 * per.edge
        in_layer = per.fullest(experts=experts, more=again, gradients=edges + per.edge)
        return _Chunk(depth * 3 * per.edge, again, in_layer)
    discarded = per.discarded(experts=experts)
    in_layer = per.fullest(experts=experts, more=discarded.mlp + discarded.twice_in_mlp, gradients=edges)
    return _Chunk(depth * (layer - discarded.total + around), discarded.most, in_layer)
