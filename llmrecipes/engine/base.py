"""The protocol of an engine. The loop owns the order of operations, an engine owns the arithmetic.

An engine is a package next to this module with a `Backend`, and one line in `recipe/engines.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist

from llmrecipes.checkpoint.state_format import CheckpointFormat, StateDict, Written
from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine import meters
from llmrecipes.engine.sampling import Sampling
from llmrecipes.faults.numerics import BadParameter
from llmrecipes.hardware.profile import Group
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.schema import Recipe

if TYPE_CHECKING:
    from llmrecipes.engine.parts.base import Parts

Batch = dict[str, torch.Tensor]
"""`tokens`, `labels`, `loss_mask` and `position_ids` of a micro-batch, each [micro_batch_size, seq_length]; with
`tracking.loss_by_source` also `source`, [micro_batch_size]."""

StopCheck = Callable[[], bool]
"""Whether this rank has to stop."""

Accept = Callable[[float, float], bool]
"""Whether to make an update, by the loss and the gradient norm of the global batch; all ranks have to answer alike."""


class Platform(Protocol):
    """The device of this process."""

    name: str
    """`cpu` or `cuda`."""
    backend: str
    """torch.distributed backend."""

    @property
    def device(self) -> torch.device:
        """Device of this process's tensors."""

    def install(self) -> None:
        """Prepare the engine's library for this device; call it once, before anything is built."""

    def connect(self, timeout: timedelta) -> None:
        """Form the default process group of this process's world."""

    def peak_memory(self) -> int:
        """Peak memory of this process in bytes: resident on a CPU, allocated on a GPU."""

    def synchronize(self) -> None:
        """Wait for the device's queued work."""


@dataclass(frozen=True)
class Rank:
    """This process among all ranks, in whatever layout."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """The rank that prints, tracks and publishes."""
        return self.rank == 0


@dataclass(frozen=True)
class World(Rank):
    """This process in a layout of all ranks."""

    data_parallel_rank: int
    data_parallel_size: int
    holds_whole_model: bool
    """Whether each rank has all parameters, so that one rank can run the model."""
    has_loss: bool = True
    """Whether this rank is one of the last pipeline stage."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    step: int = 0
    consumed_samples: int = 0
    """Place in the order of samples, those that were left out included."""
    consumed_tokens: int = 0
    """Tokens of the batches that were trained on."""
    skipped_steps: int = 0
    """Steps without an update."""
    skipped_samples: tuple[tuple[int, int], ...] = ()
    """Samples that training leaves out, before this step or after it: first, and the one behind the last."""
    recent_losses: tuple[float, ...] = ()
    """Of the last steps, if spikes are acted upon (`faults.loss_spike_window`)."""
    recent_norms: tuple[float, ...] = ()
    source_sums: tuple[float, ...] = ()
    """Summed loss of each source and tokens of each, of the steps since the last report (`tracking.loss_by_source`)."""


@dataclass(frozen=True)
class FirstAttempt:
    """A computation of a step that was not finite, before the step was computed again; every rank has one."""

    loss: float
    grad_norm: float
    is_local: bool
    """Whether this rank's loss, or its gradients before they were reduced, were not finite."""
    first_bad: BadParameter | None
    """First non-finite parameter or reduced gradient on this rank."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step."""

    loss: float
    """Mean loss per token of the global batch, with label smoothing if the recipe has it."""
    grad_norm: float | None
    """Global gradient norm before clipping; None if gradients overflowed in fp16. If it or the loss is not finite, the
    weights are unchanged."""
    lr: float
    """Learning rate of this step."""
    loss_scale: float | None
    """fp16 loss scale of this step."""
    skipped: bool
    """Gradients overflowed in fp16: weights and schedule are unchanged."""
    stop: bool
    """Some rank had to stop before this step's gradients were reduced."""
    rejected: bool = False
    """`accept` refused the update: weights and schedule are unchanged."""
    first_attempt: FirstAttempt | None = None
    """What was computed first, if that was not finite and the step was computed again (`faults.rerun_mode`)."""
    is_local: bool = False
    """Of a result that is not finite: whether this rank's loss, or its gradients before they were reduced, are not."""


@dataclass(frozen=True)
class Implementation:
    """How an engine built its layers."""

    name: str
    """`transformer_engine` or `local`, as in `model.transformer_impl`."""
    reason: str
    """Why it was chosen."""


class Slice(NamedTuple):
    """A rectangular part of a named global tensor, on this rank."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the global tensor."""
    tensor: torch.Tensor
    """Its values, of the slice's size; of weights and gradients that an engine shows, fp32 copies on the CPU."""


class Engine(Protocol):
    """Model, gradients, optimizer and schedule of one rank."""

    name: str
    """Name in recipes."""
    recipe: Recipe
    plan: Plan
    platform: Platform
    implementation: Implementation
    local_loss: float
    """This rank's part of the last loss."""
    parts: Parts
    """What the recipe adds to a step, of what the engine takes."""

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """This rank's parts of the model: one, or one for each virtual pipeline stage."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""

    def train_step(
        self, batches: Iterator[Batch], *, num_microbatches: int | None = None, stop: StopCheck | None = None,
        accept: Accept | None = None, redo: Callable[[], None] | None = None,
    ) -> StepResult:  # fmt: skip
        """One optimizer step on the next global batch.

        Args:
            batches: micro-batches of this data-parallel rank.
            num_microbatches: of this step; None: the plan's.
            stop: called when the batches are used up; the answer is reduced with the loss, which costs nothing.
            accept: called before the update, if loss and gradient norm are finite; None: every update is made.
                An engine that updates before it knows both ignores it (`recipe/rules/zero_rules.py`).
            redo: called before each micro-batch of a step that is computed again.
        """

    def evaluate(self, batches: Iterator[Batch], global_batches: int, stop: StopCheck | None = None) -> float | None:
        """Mean validation loss per token, without dropout and label smoothing.

        Args:
            batches: micro-batches of this data-parallel rank, of the validation split.
            global_batches: how many global batches to read; `stop` is called once in each.

        Returns:
            The loss, or None on all ranks if one of them had to stop: a partial mean is not a result.
        """

    def params_synced(self) -> AbstractContextManager[None]:
        """A block in which every rank has up-to-date parameters; all ranks have to enter it. `state` needs none."""

    def replica_fault(self) -> meters.ReplicaFault | None:
        """First weight that differs between data-parallel replicas, the same on all ranks; a collective of all.

        With the distributed optimizer, call it in `params_synced`, or between the passes of a step and its update.
        """

    def result_fault(self) -> meters.ReplicaFault | None:
        """Where data-parallel replicas compute different results from the same tokens, the same on all ranks; a
        collective of all, in `params_synced`."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters of this rank, then their gradients as `<name>.grad`, named as in the full model."""

    def weights(self) -> list[Slice]:
        """Copies of this rank's parameters, and of buffers that training changes, in model order."""

    def watch_gradients(self, see: Callable[[list[Slice], list[Slice]], None]) -> None:
        """Call `see(weights, reduced gradients)` in every step from now on, before the update; on all ranks."""

    def checkpoint_format(self) -> CheckpointFormat:
        """A new format for one saver."""

    def state(self, progress: Progress) -> StateDict:
        """The state for a checkpoint; tensors are referenced, not copied, and there is no communication."""

    def load_state(self, entry: Entry) -> Progress:
        """Restore weights, optimizer, schedule and random states; a collective of all ranks. Returns the progress.

        Raises:
            UserError: the checkpoint has a different architecture, or is not plain data.
        """

    def generate(
        self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, vocab_size: int, eod: int | None
    ) -> Iterator[int]:
        """Token ids that continue a prompt; on a rank that holds the full model."""

    def scorer(self) -> Scorer:
        """The model for evaluation, for as long as the parameters are synced; training is not affected."""

    def close(self) -> None:
        """Release the model and its memory."""


class PartEngine(Engine, Protocol):
    """An engine with local checkpoints."""

    def part_format(self) -> CheckpointFormat:
        """A new format for what `part` returns, of which only this rank reads the files, by `load_state`."""

    def part(self, progress: Progress) -> StateDict:
        """The state that this rank needs to go on, whatever other ranks have; as `state`."""


class TextModel(Protocol):
    """Weights for sampling, without an optimizer."""

    def scorer(self) -> Scorer:
        """The model for evaluation."""

    def generate(
        self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, vocab_size: int, eod: int | None
    ) -> Iterator[int]:
        """Token ids that continue a prompt."""


class WeightSource(Protocol):
    """Weights that a new run starts from."""

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A slice of a weight, on the CPU; nothing else of it is kept in memory.

        Args:
            name: of the weight in a model that one process holds, such as `decoder.layers.3.mlp.linear_fc1.weight`.
            offset, shape: of the slice, which may lie in rows that pad the vocabulary.

        Raises:
            UserError: the source has no such weight, of this shape.
        """


class Backend(meters.Sparsifier, Protocol):
    """Factory of one kind of engine."""

    def platform(self, local_rank: int = 0) -> Platform:
        """The GPU of this rank if torch sees one, else the CPU; installed.

        Args:
            local_rank: rank on this node; the index of the GPU.
        """

    def connect(self, platform: Platform) -> AbstractContextManager[Rank]:
        """Join the ranks that a launcher started (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, …), or form a world of one."""

    def lay_out(self, recipe: Recipe) -> AbstractContextManager[World]:
        """The process groups of a recipe's layout, one after another; a collective of ranks that have joined."""

    def join(self, recipe: Recipe, platform: Platform) -> AbstractContextManager[World]:
        """`connect` and `lay_out`."""

    def require(self, plan: Plan, platform: Platform) -> None:
        """Refuse a plan that this rank's software, GPU or environment cannot run."""

    def build(self, plan: Plan, platform: Platform, weights: WeightSource | None = None) -> Engine:
        """An engine with initial weights, which depend only on the seed; or with those of `weights`."""

    def construct(self, plan: Plan, platform: Platform, base: WeightSource | None = None) -> Engine:
        """An engine whose weights have no defined values: for a checkpoint to be loaded next.

        Args:
            plan, platform: as `build`.
            base: weights of the model whose adapters the checkpoint has; None: initial ones. Without adapters unused.
        """

    def load_weights(
        self, plan: Plan, platform: Platform, entry: Entry, base: WeightSource | None = None, *, averaged: bool = False
    ) -> TextModel:
        """The weights of a checkpoint: in one process, or for a `Scorer` on the ranks of any layout.

        Arguments as `construct`.

        With `averaged`, their moving average (`optimizer.ema_decay`).

        Raises:
            UserError: the checkpoint does not fit the plan, or has no average.
        """

    def load_given(self, plan: Plan, platform: Platform, weights: WeightSource) -> TextModel:
        """A model with the weights of a source, for a `Scorer` on the ranks of any layout; each rank reads its part."""

    def upcycle(self, dense: Plan, moe: Plan, platform: Platform, entry: Entry) -> Engine:
        """An MoE engine whose experts are copies of a dense checkpoint's MLP; in one process."""

    def importance(
        self, plan: Plan, platform: Platform, entry: Entry, batches: Iterable[torch.Tensor]
    ) -> meters.Importance:
        """How much the parts of a checkpoint's model contribute on batches [b, s] of token ids; in one process."""

    def write_weights(self, plan: Plan, weights: WeightSource, directory: Path) -> tuple[Written, dict[str, str]]:
        """Write weights as the files of a checkpoint of step 0, in one process that does not hold the model.

        Args:
            plan: of the recipe, for one rank; this process has joined that world.
            weights: the weights.
            directory: of the checkpoint; it is created.

        Returns:
            What was written, and the versions for its manifest.

        Raises:
            OSError: the disk is full, or fails.
        """

    def learning_rate(self, recipe: Recipe, step: int) -> float:
        """Learning rate of a step, counted from 1, if no step was skipped."""

    def process_groups(self) -> Mapping[Group, dist.ProcessGroup]:
        """Process groups of the layout with more than one rank, one of each kind."""


class MetaEngine(Engine, Protocol):
    """An engine that also runs on tensors without data."""

    first_steps: int
    """Steps that differ from those after them."""

    def model_states(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """What stays in memory between steps: `weights`, `gradients`, and `optimizer` with master weights.

        Tensors of one part do not overlap. They may share a buffer with padding, which is not counted.
        """

    def rehearse_load(self) -> list[int]:
        """`load_state` of a checkpoint of the same layout, without reading; a collective of all ranks.

        Returns:
            Bytes of each part of a tensor that this rank would read.
        """

    def watch_states(self, see: Callable[[str, Iterable[torch.Tensor]], None]) -> None:
        """Call `see(part, tensors)` in each step from now on for states that do not stay in memory between steps.

        Parts are those of `model_states`, and `communication` for buffers.
        """


class MetaBackend(Backend, Protocol):
    """Factory of engines that also run on tensors without data, but for what `Engine.needs_data` refuses."""

    def meta_platform(self, rank: int, world_size: int, kernels: str, skew: float) -> Platform:
        """A rank of a world that does not exist; installed, for the rest of the process.

        Args:
            rank: of the world.
            world_size: its ranks.
            kernels: device whose choice of kernels is followed: `cuda`, `cpu`, `cuda, local`, a GPU without
                TransformerEngine, or `cuda, unfused`, one with its attention in parts.
            skew: times its even share that one expert of each layer on this rank gets; 1: all get the same.
        """

    def construct_meta(self, plan: Plan, platform: Platform) -> MetaEngine:
        """An engine on such a platform."""


class Scores(NamedTuple):
    """What a model thinks of rows of tokens."""

    logprobs: torch.Tensor
    """Log-probability of each token after the first, in nats, [rows, length - 1], fp64 on the CPU."""
    greedy: torch.Tensor
    """The likeliest token in the place of each of them, [rows, length - 1], int64 on the CPU."""


class Scorer(Protocol):
    """A model for evaluation: in every layout, with nothing left of what was computed.

    Both methods are collectives: all ranks call them with the same arguments, and get the same answer.
    """

    positions: int
    """Tokens that the model can read at once."""

    def score(self, tokens: torch.Tensor) -> Scores:
        """Score rows of token ids, [rows, length].

        Args:
            tokens: 2 to `positions` + 1 a row. Padding on the right has no effect on what stands before it.
        """

    def extend(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        seeds: Sequence[int],
        sampling: Sampling,
        ended: Callable[[list[int]], bool],
    ) -> list[list[int]]:
        """Continue several prompts.

        Args:
            prompts: token ids, at least one and fewer than `positions`.
            limits: most new tokens of each; `positions` limits them too.
            seeds: of each prompt's draws, so that they do not depend on its neighbours; that of `sampling` is not used.
            sampling: how to draw.
            ended: whether a prompt's new tokens, the last of which has just been added, end its continuation.

        Raises:
            UserError: tokens are drawn with a temperature where ranks share texts or layers.
        """
