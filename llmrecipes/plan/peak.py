"""The fullest moment of a pipeline stage in a step: what its layers, its losses and its schedule have then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmrecipes.plan import losses
from llmrecipes.plan.activations import PerToken
from llmrecipes.plan.kernels import mask_per_token
from llmrecipes.plan.layout import Layout
from llmrecipes.plan.pending import fullest
from llmrecipes.recipe.derived.shape import Shape
from llmrecipes.recipe.schema import Recipe


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
    per = PerToken(recipe, s, layout, device)
    tokens = losses.tokens_of_a_micro_batch(recipe, layout)
    chunks = []
    for number, layers in enumerate(layout.layers_per_stage[stage]):
        first = layout.first_layer(stage, number)
        chunks.append(_chunk(recipe, per, range(first, first + layers)))
    if stage == 0:
        chunks[0] = chunks[0][0] + per.mask, chunks[0][1]
    chunks = [(kept + mask_per_token(recipe, s, device), again) for kept, again in chunks]
    last = stage == layout.pipeline_model_parallel_size - 1
    predictions, recomputed_prediction = _mtp(recipe, per)
    # Of the losses, and of recomputed predictions: freed with them.
    inputs = (recipe.lora is None) + s.mtp_num_layers * (2 if recipe.train.recompute_method == "uniform" else 1)
    ends = per.edge * (recipe.lora is None) + predictions
    norm = layout.final_norm(s.mtp_num_layers)
    if norm == (layout.pipeline_model_parallel_size - 1, len(chunks) - 1):
        ends += per.norm
    elif norm[0] == stage:
        chunks[norm[1]] = chunks[norm[1]][0] + per.norm, chunks[norm[1]][1]
    kept_logits, most_logits = losses.kept_and_most(recipe, s, layout, device)
    frees = losses.frees_its_input(recipe, device)
    tables = len(chunks) * per.tables
    moments = fullest(
        layout.pipeline_model_parallel_size,
        layout.virtual_pipeline_model_parallel_size,
        # A third group repeats what the second does.
        min(num_microbatches, 3 * layout.pipeline_model_parallel_size),
        stage,
        s.num_moe_experts > 0,
        bool(recipe.speed.overlap_moe_expert_parallel_comm),
    )
    for pending, chunk, held in moments:
        stack = tables + sum(kept * number for (kept, _), number in zip(chunks, pending, strict=True))
        # Of one chunk the gradient that was sent last; the outputs of several, but for the very last, which sends none.
        sent = sum(pending[:-1] if last else pending) if len(chunks) > 1 else held
        outputs = int(tokens * sent * per.edge)
        recomputed = chunks[chunk][1]
        if len(chunks) == 1:
            # The previous micro-batch's input is released before the backward pass.
            yield Peak(int(tokens * (stack + recomputed)), outputs=outputs)
            yield Peak(int(tokens * (stack + held * per.edge)), outputs=outputs)
        else:
            yield Peak(int(tokens * (stack + held * per.edge + recomputed)), outputs=outputs)
        if last and chunk == len(chunks) - 1:
            end, freed = stack + held * per.edge + ends, per.edge * (recipe.lora is None)  # the main loss's input
            yield Peak(int(tokens * end), kept_logits if frees else most_logits, kept_logits, outputs)
            if frees:
                yield Peak(int(tokens * (end - freed)), most_logits, kept_logits, outputs)
            if (prediction := losses.of_a_prediction(recipe, s, layout, device)) is not None:
                freed = per.edge * inputs if frees else freed
                yield Peak(int(tokens * (end - freed)), prediction[1], prediction[0], outputs)
            # The losses have been differentiated by then: they were computed after the layers.
            yield Peak(int(tokens * (end - freed + recomputed_prediction)), outputs=outputs)


def _chunk(recipe: Recipe, per: PerToken, numbers: range) -> tuple[float, float]:
    """Bytes per token that the layers of one chunk store, and those that exist only during recomputation."""
    train = recipe.train
    layers = [per.layer(number) for number in numbers]
    if not layers:
        return 0.0, 0.0
    if train.recompute_granularity != "full" or not train.recompute_num_layers:
        kept, most = 0.0, 0.0
        for number in numbers:
            # The layers after it are freed by the time one is recomputed.
            discarded = per.of(number).discarded(experts=per.has_experts(number))
            size = per.layer(number) - discarded.total
            most = max(most - size, discarded.most)
            kept += size
        return kept, most
    number = min(train.recompute_num_layers, len(layers))
    if train.recompute_method == "uniform":
        groups = [sum(layers[start : start + number]) for start in range(0, len(layers), number)]
        return len(groups) * per.edge, max(groups) - per.edge  # whose input is stored anyway
    # The layers after the block are freed by the time one inside it is recomputed.
    after = sum(layers[number:])
    return number * per.edge + after, max(max(layers[:number]) - per.edge - after, 0.0)


def _mtp(recipe: Recipe, per: PerToken) -> tuple[float, float]:
    """Bytes per token that multi-token prediction layers keep, and those of the one that is being recomputed."""
    depth = per.shape.mtp_num_layers
    experts = per.shape.mtp_moe_layers > 0
    layer = per.expert_layer if experts else per.dense_layer
    # Both inputs and their norms, concatenated for the projection; the result's norm, and the output layer's input.
    around = 2 * per.norm + 2 * per.edge + per.norm + per.edge
    if recipe.train.recompute_method == "uniform":
        # The next token's embedding, and the output layer's input; the hidden states are the input of the loss before.
        return depth * 2 * per.edge, layer + around if depth else 0.0
    discarded = per.discarded(experts=experts)
    return depth * (layer - discarded.total + around), discarded.most if depth else 0.0
