"""The fullest moment of a pipeline stage in a step: what its layers, its losses and its schedule have then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmrecipes.plan import layer_moments, losses
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
    moments = _Stage(recipe, s, layout, stage, device).moments(num_microbatches)
    return max(moments, key=lambda moment: moment.total)


def most_activations(recipe: Recipe, s: Shape, layout: Layout, num_microbatches: int, stage: int, device: str) -> int:
    """Most bytes that a rank of one pipeline stage keeps for its backward passes at a time."""
    moments = _Stage(recipe, s, layout, stage, device).moments(num_microbatches)
    return max(moment.activations + moment.kept_logits for moment in moments)


class _Stage:
    """A rank of one pipeline stage, whose bytes are those of a token."""

    def __init__(self, recipe: Recipe, s: Shape, layout: Layout, stage: int, device: str) -> None:
        self._of = recipe, s, layout, device
        self._stage = stage
        self._per = per = PerToken(recipe, s, layout, device)
        self._tokens = losses.tokens_of_a_micro_batch(recipe, layout)
        self._layers = layout.layers_per_stage[stage]
        self._last = stage == layout.pipeline_model_parallel_size - 1
        self._norm = layout.final_norm(s.mtp_num_layers)
        self._chunks = [self._chunk(number) for number in range(len(self._layers))]
        self._predictions = _mtp(recipe, per)
        self._words = per.element * s.vocab_size * s.hidden_size // layout.tensor_model_parallel_size
        self._waiting = self._words * _waits_for_words(recipe, layout)

    def moments(self, num_microbatches: int) -> Iterator[Peak]:
        """Moments of a step, the fullest among them.

        A stage stores several micro-batches at once, the first stage the most (`in_flight`). Tensor parallelism divides
        what is inside attention and MLP, sequence parallelism the rest, context parallelism everything. On the last
        stage it is the loss, or a layer after it; on the others the last layer, at the beginning of a backward pass.
        """
        recipe, s, layout, _ = self._of
        moments = fullest(
            layout.pipeline_model_parallel_size,
            layout.virtual_pipeline_model_parallel_size,
            # A third group repeats what the second does.
            min(num_microbatches, 3 * layout.pipeline_model_parallel_size),
            self._stage,
            s.num_moe_experts > 0,
            bool(recipe.layout.overlap_moe_expert_parallel_comm),
        )
        for pending, turn, inputs, sent in moments:
            stack, held, outputs = self._stored(pending, inputs, sent)
            yield from self._in_layers(turn, stack, held, outputs)
            if self._last and turn == len(self._chunks) - 1:
                end = stack + held + self._ends
                yield from self._at_loss(end, outputs)
                yield from self._in_predictions(end, outputs)

    def _chunk(self, number: int) -> _Chunk:
        recipe, s, layout, device = self._of
        first = layout.first_layer(self._stage, number)
        is_last = self._last and number == len(self._layers) - 1
        chunk = _chunk(recipe, self._per, range(first, first + self._layers[number]), last=is_last)
        kept: float = mask_per_token(recipe, s, device)
        if self._stage == number == 0:
            kept += self._per.mask
        if self._norm == (self._stage, number) and not is_last:
            kept += self._per.norm
        return chunk.and_kept(kept)

    @property
    def _ends(self) -> float:
        """Kept after the last layer."""
        recipe, _, layout, _ = self._of
        of_last = layout.pipeline_model_parallel_size - 1, len(self._layers) - 1
        inputs = self._per.edge * (recipe.lora is None) + self._predictions.kept
        return inputs + self._per.norm * (self._norm == of_last)

    def _is_empty(self, number: int) -> bool:
        """Whether a chunk without layers, and without the final norm, keeps nothing of its inputs, which are there
        until the end."""
        return not self._layers[number] and self._stage + number > 0 and self._norm != (self._stage, number)

    def _stored(self, pending: Sequence[int], inputs: Sequence[int], sent: int) -> tuple[float, float, int]:
        """What layers keep, their inputs that are held, and bytes of messages."""
        per = self._per
        stack = len(self._chunks) * per.tables
        held = passing = 0
        for number, chunk in enumerate(self._chunks):
            stack += chunk.kept * pending[number]
            if self._is_empty(number):
                passing += inputs[number] + pending[number]
            else:
                held += inputs[number]
        # Predictions gather two inputs, joined, in the buffer that is kept for gathered tokens.
        wider = per.gathered * (per.shape.mtp_num_layers > 0) * self._last
        return stack, held * per.edge, int(self._tokens * ((passing + sent) * per.edge + wider))

    def _at(self, activations: float, outputs: int, gradients: int) -> Peak:
        return Peak(int(self._tokens * activations), outputs=outputs, gradients=gradients)

    def _in_layers(self, turn: int, stack: float, held: float, outputs: int) -> Iterator[Peak]:
        per, chunk, waiting = self._per, self._chunks[turn], self._waiting
        # The previous micro-batch's input of a single chunk is released before the backward pass.
        yield self._at(stack + held, outputs, 0)
        stack += held if len(self._chunks) > 1 else 0
        yield self._at(stack + chunk.again, outputs, waiting)
        more, gradients = chunk.in_layer
        yield self._at(stack + more, outputs, waiting + int(self._tokens * gradients))
        if self._stage == turn == 0 and per.recipe.lora is None:
            # After its layers, the gradient of the word embedding, from that of the hidden states of all ranks, and its
            # sum with the one that has waited.
            there = 2 * waiting + self._words + int(self._tokens * (per.edge + 2 * per.gathered))
            yield self._at(stack - self._chunks[0].kept, outputs, there)

    @property
    def _of_losses(self) -> float:
        """Inputs of the losses: one tensor, freed with the last of them."""
        return self._per.edge * ((self._per.recipe.lora is None) + self._per.shape.mtp_num_layers)

    def _at_loss(self, end: float, outputs: int) -> Iterator[Peak]:
        recipe, s, layout, device = self._of
        kept, most = losses.kept_and_most(recipe, s, layout, device)
        frees = losses.frees_its_input(recipe, device)
        buffer = int(self._tokens * self._per.gathered_tokens) if any(self._layers) else 0
        yield Peak(int(self._tokens * end), kept if frees else most, kept, outputs, buffer)
        if frees:
            freed = self._of_losses * (not s.mtp_num_layers)
            yield Peak(int(self._tokens * (end - freed)), most, kept, outputs, buffer)
        if (prediction := losses.of_a_prediction(recipe, s, layout, device)) is not None:
            freed = self._of_losses if frees else 0.0
            kept, most = prediction
            yield Peak(int(self._tokens * (end - freed)), most, kept, outputs, buffer)

    def _in_predictions(self, end: float, outputs: int) -> Iterator[Peak]:
        """Moments of layers whose losses have been differentiated: they were computed after the layers."""
        end -= self._of_losses
        waiting = self._waiting * self._per.recipe.model.share_embeddings_and_output_weights
        yield self._at(end + self._predictions.again, outputs, waiting)
        more, gradients = self._predictions.in_layer
        yield self._at(end + more, outputs, waiting + int(self._tokens * gradients))


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
            here = layer_moments.fullest(
                own, experts=experts, more=discarded.mlp + discarded.twice_in_mlp, gradients=edges
            )
            in_layer = max((in_layer[0] - size, in_layer[1] + per.edge * (not last)), here, key=sum)
            kept += size
        return _Chunk(kept, most, in_layer)
    number = min(recipe.layout.recompute_num_layers, len(layers))
    if recipe.layout.recompute_method == "uniform":
        groups = [sum(layers[start : start + number]) for start in range(0, len(layers), number)]
        again = max(groups) - per.edge  # whose input is stored anyway
        end = numbers[min((groups.index(max(groups)) + 1) * number, len(layers)) - 1]
        in_layer = layer_moments.fullest(per.of(end), experts=per.has_experts(end), more=again, gradients=2 * per.edge)
        return _Chunk(len(groups) * per.edge, again, in_layer)
    # The layers after the block are freed by the time one inside it is recomputed.
    after = sum(layers[number:])
    again = max(layers[:number]) - per.edge - after
    inside, end = numbers[layers.index(max(layers[:number]))], numbers[-1]
    edges = per.edge * (2 + (after > 0 and not last))
    moments = [layer_moments.fullest(per.of(inside), experts=per.has_experts(inside), more=again, gradients=edges)]
    if after:
        moments.append(layer_moments.fullest(per.of(end), experts=per.has_experts(end), more=0.0, gradients=per.edge))
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
        in_layer = layer_moments.fullest(per, experts=experts, more=again, gradients=edges + per.edge)
        return _Chunk(depth * 3 * per.edge, again, in_layer)
    discarded = per.discarded(experts=experts)
    in_layer = layer_moments.fullest(per, experts=experts, more=discarded.mlp + discarded.twice_in_mlp, gradients=edges)
    return _Chunk(depth * (layer - discarded.total + around), discarded.most, in_layer)
