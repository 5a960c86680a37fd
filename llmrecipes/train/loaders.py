"""Batches of one rank, from prepared data.

A read may fail on one rank: all ranks learn of it between two steps, when the state can be saved.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from llmrecipes.data.folder.prepared import Prepared, bits_per_byte, drawn_sources
from llmrecipes.data.preparation import valid_sets
from llmrecipes.data.read.batches import Ranges, ReaderLost, batches, read_error
from llmrecipes.data.read.by_source import counts_of_parts, held_out_parts, with_source
from llmrecipes.data.read.dataset import build, build_set
from llmrecipes.data.read.precomputed import with_teacher_logits
from llmrecipes.engine.base import Batch, World
from llmrecipes.errors import UserError
from llmrecipes.faults.watchdog import Beat, unwatched
from llmrecipes.recipe.derived.batch_schedule import batch_schedule
from llmrecipes.recipe.derived.stages import span_of
from llmrecipes.recipe.schema import Recipe


@dataclass(frozen=True)
class DataLoaders:
    """Batches of this rank.

    Args:
        train: micro-batches from a number of consumed samples on; the caller closes the generator, which ends the
            data loader processes.
        valid: the validation micro-batches, the same ones at every call; None without a validation split.
        valid_sources: those of the sets of `data.valid_sources`, by label, and with `data.multiple_validation_sets` of
            the valid split of each source, by its name.
        eval_iters: global batches of an evaluation of the latter, where they are fewer than `train.eval_iters`.
        bits_per_byte: converts a validation loss in nats per token into bits per byte of the held-out text; None for
            conversations, where the loss counts only a part of the text.
        bits_per_byte_of: the same of a set, by its label.
    """

    train: Callable[..., Generator[Batch, None, None]]
    valid: Callable[[], Iterator[Batch]] | None
    bits_per_byte: Callable[[float], float] | None
    valid_sources: Mapping[str, Callable[[], Iterator[Batch]]] = field(default_factory=dict)
    eval_iters: Mapping[str, int] = field(default_factory=dict)
    bits_per_byte_of: Callable[[str, float], float] = lambda label, loss: math.nan

    @property
    def evaluates(self) -> bool:
        """Whether there is held-out text."""
        return self.valid is not None or bool(self.valid_sources)

    def leaving_out(self, skipped: Ranges) -> DataLoaders:
        """Loaders without the global batches that have a sample in these ranges."""
        return replace(self, train=partial(self.train, skipped=skipped)) if skipped else self


def has_held_out(recipe: Recipe, prepared: Prepared) -> bool:
    """Whether the loaders of this recipe evaluate anything; reads no tokens."""
    return bool(recipe.data.valid_sources or drawn_sources(recipe, prepared, "valid"))


def open_loaders(recipe: Recipe, prepared: Prepared, world: World, *, pin_memory: bool) -> DataLoaders:
    """Batches of the train and validation splits.

    Args:
        recipe: the resolved recipe.
        prepared: its prepared data.
        world: this rank.
        pin_memory: pin the memory of batches; only with a GPU.
    """
    train: Dataset[Any] | None = build(recipe, prepared, "train")
    if train is None:
        raise UserError(
            f"the training split has less than one sequence of {recipe.model.seq_length} tokens",
            where=str(prepared.path),
            fix="add text to data.sources, or lower model.seq_length",
        )
    if recipe.tracking.loss_by_source:
        train = with_source(train, recipe, prepared)
    if recipe.distill is not None and recipe.distill.logits is not None and world.has_loss:
        train = with_teacher_logits(train, recipe, recipe.distill.logits)
    valid = build(recipe, prepared, "valid")
    sets: dict[str, Dataset[Any]] = {
        held_out.label: build_set(recipe, prepared, held_out.label) for held_out in recipe.data.valid_sources
    }
    by_source = recipe.data.multiple_validation_sets
    parts = {} if valid is None or not by_source else held_out_parts(recipe, prepared, valid)
    if recipe.train.monitor not in (None, *sets, *parts):
        raise UserError(
            f"the valid split of source {recipe.train.monitor!r} has less than one sequence",
            where="train.monitor",
            rule="the monitored set must be large enough to have a loss",
            fix="monitor another set, or raise the share of valid in data.split",
        )
    span = span_of(recipe)
    sizes = batch_schedule(recipe)
    first = 0 if span is None else span.order[0]  # of the order of samples, whose numbers begin with 0
    earlier = sizes.samples(first)
    sizes = sizes.since(first)
    read = partial(
        _read,
        recipe,
        prepared,
        micro_batch_size=recipe.layout.micro_batch_size,
        global_batch_size=recipe.train.global_batch_size,
        data_parallel_rank=world.data_parallel_rank,
        data_parallel_size=world.data_parallel_size,
        prefetch_factor=recipe.data.prefetch_factor,
        pin_memory=pin_memory and recipe.data.pin_memory,
    )
    # A few batches every hundred steps are not worth a worker process.
    return DataLoaders(
        train=lambda consumed, skipped=(): read(
            train,
            consumed_samples=consumed - earlier,
            num_workers=recipe.data.num_workers,
            skipped=skipped,
            sizes=None if sizes.is_constant else sizes,
        ),
        valid=None if valid is None else lambda: read(valid, consumed_samples=0, num_workers=0),
        bits_per_byte=None if recipe.data.chat else partial(_bits_per_byte, prepared, recipe.model.seq_length),
        valid_sources={
            label: partial(read, dataset, consumed_samples=0, num_workers=0)
            for label, dataset in (sets | parts).items()
        },
        eval_iters={name: part.batches for name, part in parts.items()},
        bits_per_byte_of=lambda label, loss: valid_sets.bits_per_byte(
            loss, (counts_of_parts(recipe, prepared) | prepared.manifest.valid_sources)[label]
        ),
    )


def _bits_per_byte(prepared: Prepared, seq_length: int, loss: float) -> float:
    return bits_per_byte(loss, prepared, "valid", seq_length)


def _read(recipe: Recipe, prepared: Prepared, dataset: Dataset[Any], **options: Any) -> Generator[Batch, None, None]:
    with closing(batches(dataset, **options)) as source:
        try:
            yield from source
        except (ReaderLost, OSError) as error:
            raise read_error(error, recipe, prepared) from error


def one_batch_forever(loaders: DataLoaders, num_microbatches: int) -> DataLoaders:
    """Loaders that repeat the first global batch, to see whether the model can overfit it."""

    def train(_consumed: int, skipped: Ranges = ()) -> Generator[Batch, None, None]:
        with closing(loaders.train(0)) as source:
            first = [next(source) for _ in range(num_microbatches)]
        while True:
            yield from first

    return DataLoaders(train=train, valid=None, bits_per_byte=loaders.bits_per_byte)


class ReadAhead:
    """Micro-batches of this rank, read one step before they are used.

    A rank whose read fails knows it while it computes its last complete step, and its flag travels with that step's
    loss. One micro-batch is read for each one used, so that reading stays spread over the step.

    Args:
        batches: micro-batches from the next step on.
        per_step: micro-batches in each of the remaining steps.
        beat: called when a read begins, and when the step continues.
    """

    def __init__(self, batches: Iterator[Batch], per_step: Iterable[int], beat: Beat = unwatched) -> None:
        self.failure: UserError | None = None
        self._beat = beat
        self._source = batches
        self._ready: deque[Batch] = deque()
        self._per_step = iter(per_step)
        self._left = next(self._per_step, 0)
        self._following = next(self._per_step, 0)
        for _ in range(self._left):
            self._read()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._ready:
            raise self.failure or StopIteration
        batch = self._ready.popleft()
        self._left -= 1
        if len(self._ready) - self._left < self._following:
            self._read()
        if self._left == 0:  # a following step that is larger needs more than one for each
            while len(self._ready) < self._following and self.failure is None:
                self._read()
            self._left, self._following = self._following, next(self._per_step, 0)
        return batch

    def _read(self) -> None:
        if self.failure is not None:
            return
        self._beat("data")
        try:
            self._ready.append(next(self._source))
        except StopIteration as end:
            raise RuntimeError("the training data ends before the run does") from end
        except UserError as failure:
            self.failure = failure
        self._beat("step")


class HeldOutBatches:
    """Validation micro-batches of this rank; if they cannot be read, fully masked ones.

    Args:
        batches: to read.
        shape: [micro_batch_size, seq_length].
    """

    def __init__(self, batches: Iterator[Batch], shape: tuple[int, int]) -> None:
        self.failure: UserError | None = None
        self._source = batches
        self._shape = shape

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.failure is None:
            try:
                return next(self._source)
            except UserError as failure:
                self.failure = failure
        ids = torch.zeros(self._shape, dtype=torch.int64)
        return {"tokens": ids, "labels": ids, "loss_mask": torch.zeros(self._shape), "position_ids": ids}


def first_failure(failure: UserError | None, device: torch.device) -> UserError | None:
    """The read failure of some rank, the same on every rank; None if there is none. A collective of all ranks.

    Args:
        failure: failure of this rank.
        device: for the collective.
    """
    # A failure that forbids a restart takes precedence.
    code = -1 if failure is None else (int(failure.code) << 32) + dist.get_rank()
    worst = torch.tensor(code, dtype=torch.int64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if worst.item() < 0:
        return None
    shared = [failure]
    dist.broadcast_object_list(shared, src=int(worst.item()) & 0xFFFFFFFF)
    return shared[0]
