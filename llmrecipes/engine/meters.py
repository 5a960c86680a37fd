"""What an engine measures on request, in a step or of a frozen model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from llmrecipes.recipe.variants.pruned_models import PruneOptions
from llmrecipes.tracking.events import LayerBalance
from llmrecipes.tracking.progress import Counted


@dataclass(frozen=True)
class ReplicaFault:
    """A replica whose weights, or whose results of the same tokens, differ from those of the others."""

    rank: int
    node: str
    other: int
    """A rank that has what most replicas have."""
    parameter: str
    """The first that differs, in model order; or which result."""
    differing: int
    """Parameters or results that differ."""
    is_outvoted: bool
    """Most replicas agree against this one; of two replicas, either may be the wrong one."""


@dataclass(frozen=True)
class GradientFault:
    """Gradients of a step that no layout should have."""

    norm: float
    """That clips."""
    of_each_weight: float
    """Norm over each element of each weight once."""
    is_miscounted: bool
    """These differ."""
    miscounted: tuple[str, ...]
    """Weights that make the difference, with the norm of it; empty where the engine cannot tell."""
    copies: tuple[str, ...]
    """Weights whose copies have other gradients, with the least and largest norm."""


@dataclass(frozen=True)
class Balance:
    """Expert routing of one step, over all ranks."""

    layers: tuple[LayerBalance, ...]
    aux_loss: float | None
    """See `StepMetrics.moe_aux_loss`."""


class LayerMeasurements(NamedTuple):
    """Measurements of layers in one step."""

    layers: Mapping[str, Mapping[str, Any]]
    """See `StepMetrics.layers`."""
    histograms: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """See `StepMetrics.histograms`."""


@dataclass
class Importance:
    """Sums over tokens; larger is more important.

    Attributes:
        tokens: that were read.
        layers: [layers], 1 - cosine of a layer's input and output (block influence, arXiv 2403.03853).
        groups: by layer [groups], norm of the heads' outputs of a group.
        neurons: by MLP, such as `decoder.layers.3.mlp`, [width], size of the input of its second matrix.
        hidden: [channels], size of the outputs of all norms.
        experts: by layer [experts], probabilities that its router gave to the experts it chose.
        inputs: by matrix [columns], square of its input.
    """

    tokens: int = 0
    layers: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    groups: dict[int, torch.Tensor] = field(default_factory=dict)
    neurons: dict[str, torch.Tensor] = field(default_factory=dict)
    hidden: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    experts: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Sparsified:
    """Weights of which some were removed.

    Attributes:
        tokens: that were read.
        weights: by their names in one process; they are the model's.
    """

    tokens: int = 0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


class Sparsifier(Protocol):
    """A backend that prunes by SparseGPT."""

    def sparsify(
        self,
        plan: Any,
        platform: Any,
        entry: Any,
        batches: Sequence[torch.Tensor],
        options: PruneOptions,
        progress: Counted | None = None,
    ) -> Sparsified:
        """The matrices of a checkpoint's layers after SparseGPT on batches [b, s] of token ids; in one process."""


class Precomputation(Protocol):
    """A frozen model whose results are written to disk, in any layout. The engine megatron has it."""

    def load(self, weights: Any = None) -> None:
        """Build the model, a collective of all ranks; arguments as `engine.parts.frozen_passes.FrozenModel`."""

    @property
    def together(self) -> int:
        """Each call of `values` gets a multiple of this number of micro-batches."""

    @property
    def writes(self) -> bool:
        """Whether this rank has the values of its samples, and is the one of those to write them."""

    def values(self, batches: Sequence[dict[str, torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
        """What is written of each micro-batch, in host memory; nothing on ranks that have none. Every data-parallel
        rank passes as many."""
