"""The fullest moment inside of a layer: what of its activations is freed by then, and the gradients that there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmrecipes.plan.activations import PerToken, keeps_input
from llmrecipes.plan.losses import tokens_of_a_micro_batch
from llmrecipes.recipe.derived.adapters import is_target

Moment = tuple[float, float]
"""Bytes per token of the layer's activations that are freed, and of gradients besides the residual stream's."""


def fullest(per: PerToken, *, experts: bool, more: float, gradients: float) -> tuple[float, float]:
    """Bytes per token of activations and gradients at the fullest moment in a layer.

    Args:
        per: parts of the layer.
        experts: whether it has experts.
        more: activations that there are besides those that are stored.
        gradients: those of the residual stream.
    """
    moments = _Layer(per).moments(experts=experts)
    return max(((more - freed, gradients + each) for freed, each in moments), key=sum)


@dataclass(frozen=True)
class _Layer:
    """A layer's backward pass, in bytes per token."""

    per: PerToken

    def moments(self, *, experts: bool) -> Iterator[Moment]:
        """Moments of a layer, the fullest among them."""
        per = self.per
        if not per.recipe.model.multi_latent_attention:
            yield self._in_attention(experts=experts)
        if experts:
            yield from self._in_experts()
        else:
            width = per.shape.ffn_hidden_size / per.layout.tensor_model_parallel_size
            yield from self._in_dense_mlp(per.inside(experts=False), width)

    def _in_attention(self, *, experts: bool) -> Moment:
        """The first product of attention, by which all but its input is freed."""
        per, s = self.per, self.per.shape
        width = (s.query_size + s.key_size + s.value_size) / per.layout.tensor_model_parallel_size
        layer = per.expert_layer if experts else per.dense_layer
        gradients = per.edge + 2 * per.gathered + per.element * width + self._of_weight(width)
        return layer - per.norm - per.edge_as_input, gradients

    def _in_dense_mlp(self, inside: float, width: float) -> Iterator[Moment]:
        per, lora = self.per, self.per.recipe.lora
        values = per.element * width
        yield from self._products(inside, width, width, 2 * per.gathered, per.edge)
        if per.recipe.model.gated_linear_unit or (lora is not None and is_target(lora, "linear_fc2")):
            # Beside the gradient of the second product's input, which is freed, those of the first product's halves; or
            # that of the second product's adapter, and their sum.
            freed = per.input_element * keeps_input(per.recipe, "linear_fc2") * width
            yield freed, per.gathered + 3 * values
        if lora is not None and is_target(lora, "linear_fc1"):
            # In the forward pass the results of the first product and of its adapter, and their sum, which is kept.
            yield inside - self._halves * values, 2 * self._halves * values

    def _in_experts(self) -> Iterator[Moment]:
        per, s, layout = self.per, self.per.shape, self.per.layout
        there = per.gathered + per.edge + self._results
        *_, hidden, shared = per.expert_parts
        yield 0.0, per.gathered + self._combined
        # Of one expert after the other, the first of which has the gradient of its activation.
        number = s.num_moe_experts / layout.expert_model_parallel_size
        visits = self._visits / number
        rows = visits * s.moe_ffn_hidden_size
        yield rows * per.input_element, there + rows * self._scored
        width = s.moe_ffn_hidden_size / layout.expert_tensor_parallel_size
        yield from self._products(hidden / number, rows, width, there, visits * per.element * s.hidden_size)
        if s.moe_shared_ffn_hidden_size:
            width = s.moe_shared_ffn_hidden_size / layout.tensor_model_parallel_size
            yield from self._products(shared, width, width, 2 * per.gathered + self._results, per.edge)

    def _products(self, inside: float, values: float, width: float, there: float, of_input: float) -> Iterator[Moment]:
        """Moments of the backward pass of an MLP, in each of which a product has the gradients of its input and weight.

        Args:
            inside: bytes that are kept inside the MLP, and freed with the second product.
            values: of the second product's input, for each token of the layer.
            width: of its weight on this rank.
            there: bytes of other gradients.
            of_input: bytes of the gradient of the first product's input.
        """
        weight = self._of_weight(width)
        yield 0.0, there + self.per.element * values + weight
        yield inside, there + of_input + self._halves * (self.per.element * values + weight)

    @property
    def _halves(self) -> int:
        """Widths of an MLP's first product: a gate adds its own."""
        return 2 if self.per.recipe.model.gated_linear_unit else 1

    def _of_weight(self, width: float) -> float:
        """The gradient of a weight between the hidden states and so many channels."""
        per = self.per
        if per.recipe.lora is not None:
            return 0.0
        return per.element * width * per.shape.hidden_size / tokens_of_a_micro_batch(per.recipe, per.layout)

    @property
    def _combined(self) -> float:
        """The experts' results in the forward pass, on their way back to the ranks of the tokens."""
        per, s, element = self.per, self.per.shape, self.per.element
        ranks = per.layout.expert_tensor_parallel_size
        if gathered := per.gathered_tokens:
            # In the order of tokens, in the buffer of gathered tokens, and summed over the ranks in fp32.
            return 2 * gathered + 4 / element * (gathered + per.edge)
        # As they come and in one tensor, in fp32 for the sum over the ranks that share an expert, sorted and sent.
        summed = 4 / element * (ranks + 1) if ranks > 1 else 0
        sent = per.recipe.model.moe_router_topk * element * s.hidden_size / per.sequence_ranks
        several = ranks * per.layout.expert_model_parallel_size > 1
        return sent * (2 * ranks + summed + 1 + several) + per.edge * (s.moe_shared_ffn_hidden_size > 0)

    @property
    def _scored(self) -> int:
        """Gradients of an expert's activation, for each of its channels."""
        element = self.per.element
        if self.per.is_fused and self.per.recipe.model.gated_linear_unit:
            return 3 * element
        return 8 + (6 if element == 2 else 4)

    @property
    def _visits(self) -> float:
        """Tokens that experts have for each token of a rank."""
        return self.per.recipe.model.moe_router_topk / self.per.sequence_ranks

    @property
    def _results(self) -> float:
        """Gradients of the results of all experts of a rank."""
        per = self.per
        return self._visits * per.layout.expert_tensor_parallel_size * per.element * per.shape.hidden_size
