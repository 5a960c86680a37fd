"""Micro-batches of a rank, in an order that depends only on the consumed samples; and why a read has failed."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from llmrecipes.data.folder import data_manifest
from llmrecipes.data.folder.data_manifest import read_listing, require_listed
from llmrecipes.data.folder.prepared import Prepared, index_folder
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.parent import end_with_parent
from llmrecipes.recipe.derived.batch_schedule import BatchSchedule
from llmrecipes.recipe.schema import Recipe

STOP_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
KEYS = ("tokens", "labels", "loss_mask", "position_ids")
PRECOMPUTED = ("reference", "teacher_ids", "teacher_logits")
"""Further keys of samples with what a frozen model says of them (`data.precomputed`)."""
SOURCE = "source"
"""Further key of samples that have the number of their source (`data.by_source`)."""
_SECONDS_TO_END = 5.0
"""Seconds that a process may take to exit after its connection closes."""


Ranges = Sequence[tuple[int, int]]
"""Samples: the first, and the one behind the last."""


class ReaderLost(RuntimeError):
    """A worker process ended; a negative exit code is the signal that killed it."""

    def __init__(self, pid: int, exitcode: int) -> None:
        super().__init__(f"data loader process {pid} ended with exit code {exitcode}")
        self.pid = pid
        self.exitcode = exitcode


def sample_ids(
    size: int,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    global_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    skipped: Ranges = (),
) -> Iterator[list[int]]:
    """Ids of a rank's micro-batches, up to the last full global batch.

    Global batch g holds ids consumed + [g, g + 1) × `global_batch_size`; its micro-batch j of rank r starts
    (j × data-parallel size + r) × `micro_batch_size` into it. So a global batch holds the same samples on any number of
    ranks.

    Global batches with a sample in `skipped` are left out. As many follow the last one instead, from the first sample
    on and without those; a dataset that has more samples than a run draws gets that far only later.

    Raises:
        ValueError: the global batch is not a multiple of micro-batch × data-parallel size (the planner rejects it).
    """
    stride = micro_batch_size * data_parallel_size
    if global_batch_size % stride:
        raise ValueError(
            f"global batch {global_batch_size} is not a multiple of {micro_batch_size} × {data_parallel_size}"
        )
    batches = size // global_batch_size * global_batch_size if skipped else size
    more = sum(-(-end // global_batch_size) - first // global_batch_size for first, end in skipped) * global_batch_size
    batch = consumed_samples
    while (batch := after_skipped(batch, global_batch_size, skipped)) <= batches + more - global_batch_size:
        following = -(-(batch - batches) // global_batch_size)  # negative before the last sample
        begin = batch if following < 0 else _from_the_first(following, batches, global_batch_size, skipped)
        for start in range(begin + data_parallel_rank * micro_batch_size, begin + global_batch_size, stride):
            yield list(range(start, start + micro_batch_size))
        batch += global_batch_size


def scheduled_ids(
    size: int,
    sizes: BatchSchedule,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[list[int]]:
    """`sample_ids` where the global batch grows: of the size that `sizes` has for the samples consumed before it."""
    stride = micro_batch_size * data_parallel_size
    begin = consumed_samples
    while (end := begin + sizes.of_sample(begin)) <= size:
        if (end - begin) % stride:
            raise ValueError(
                f"global batch {end - begin} is not a multiple of {micro_batch_size} × {data_parallel_size}"
            )
        for start in range(begin + data_parallel_rank * micro_batch_size, end, stride):
            yield list(range(start, start + micro_batch_size))
        begin = end


def _from_the_first(number: int, size: int, global_batch_size: int, skipped: Ranges) -> int:
    """Where the global batch of this number begins, counted from the first sample on without those in `skipped`."""
    first = place = after_skipped(0, global_batch_size, skipped)
    for _ in range(number):
        place = after_skipped(place + global_batch_size, global_batch_size, skipped)
        if place + global_batch_size > size:
            place = first
    return place % size  # 0 if all are left out


def after_skipped(consumed_samples: int, global_batch_size: int, skipped: Ranges) -> int:
    """Where the next global batch begins that has no sample in `skipped`."""
    for first, end in sorted(skipped):
        if first < consumed_samples + global_batch_size and consumed_samples < end:
            consumed_samples += -(-(end - consumed_samples) // global_batch_size) * global_batch_size
    return consumed_samples


def batches(
    dataset: Dataset[dict[str, Any]],
    *,
    consumed_samples: int,
    micro_batch_size: int,
    global_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int,
    prefetch_factor: int,
    pin_memory: bool,
    skipped: Ranges = (),
    sizes: BatchSchedule | None = None,
) -> Generator[dict[str, torch.Tensor], None, None]:
    """Micro-batches of this rank from `consumed_samples` on; closing the iterator stops its worker processes.

    Args:
        dataset: from `dataset.build`.
        consumed_samples: samples that training has consumed, over all ranks.
        micro_batch_size: sequences in one micro-batch.
        global_batch_size: sequences in one optimizer step.
        data_parallel_rank: this rank.
        data_parallel_size: ranks that share a global batch.
        num_workers: worker processes; 0 reads in this process.
        prefetch_factor: micro-batches that each process prefetches.
        pin_memory: page-locked tensors; no effect without a GPU.
        skipped: samples to leave out; not with `sizes`.
        sizes: sizes of the global batches, where they differ; None: all have `global_batch_size`.

    Yields:
        `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), each [micro_batch_size, seq_length]; of
        samples with their source also `source` (int64), [micro_batch_size].

    Raises:
        ReaderLost: a worker process was killed.
        OSError: a file could not be read, in this process or a worker.
    """
    ranks = {"data_parallel_rank": data_parallel_rank, "data_parallel_size": data_parallel_size}
    begin = {"consumed_samples": consumed_samples, "micro_batch_size": micro_batch_size, **ranks}
    number: int = len(dataset)  # type: ignore[arg-type]
    if sizes is None:
        ids = sample_ids(number, global_batch_size=global_batch_size, skipped=skipped, **begin)
    else:
        ids = scheduled_ids(number, sizes, **begin)
    pinned = pin_memory and torch.cuda.is_available()
    loader = DataLoader(
        _Reads(dataset),
        batch_sampler=_Once(ids),
        num_workers=num_workers,
        collate_fn=collate if pinned else _collate_arrays,
        prefetch_factor=prefetch_factor if num_workers else None,
        pin_memory=pinned,
        worker_init_fn=partial(_begin_worker, os.getpid()),
        # Otherwise torch draws the workers' seed, which they do not use, from dropout's generator on a CPU: a resumed
        # run, which opens its loader once more, would have different dropout masks than an uninterrupted one.
        generator=torch.Generator(),
        # Forked: the memory-mapped indices are shared, not copied; the workers do not use the GPU.
        multiprocessing_context="fork" if num_workers else None,
    )
    # A worker is forked with these blocked, and unblocks them once it has handlers; before, they would kill it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    on_child = signal.getsignal(signal.SIGCHLD)
    try:
        stream = iter(loader)
    finally:
        # torch's handler raises wherever the program is when a worker dies, even during an update; without it
        # the next read detects it.
        if signal.getsignal(signal.SIGCHLD) is not on_child:
            signal.signal(signal.SIGCHLD, on_child or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        while True:
            try:
                batch = next(stream)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError):  # from a queue whose other end is gone
                _require_alive(getattr(stream, "_workers", []))
                raise
            if isinstance(batch, OSError | UserError):
                raise batch
            yield {key: torch.as_tensor(value) for key, value in batch.items()}
    finally:
        # A traceback may keep the iterator alive. An exiting process would then wait for its workers forever: it sends
        # them one SIGTERM, and they ignore the first.
        if num_workers:
            stream._shutdown_workers()  # type: ignore[attr-defined]


class _Reads(Dataset[Any]):
    """Samples, or the exception instead of one: torch would send its traceback as text."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, number: int) -> Any:
        try:
            return self._dataset[number]
        except (OSError, UserError) as error:
            return error
        except IndexError as error:
            return UserError(
                f"the sample index refers to a sample that does not exist: {error}",
                where=f"sample {number:,}",
                rule="the sample index must match the tokens next to it",
                fix="delete the index/ folder of the prepared data and prepare again",
                code=ExitCode.STOP,
            )


def _require_alive(workers: list[BaseProcess]) -> None:
    ended = wait([worker.sentinel for worker in workers], _SECONDS_TO_END)
    for worker in workers:
        if worker.sentinel in ended:
            worker.join()  # the sentinel closes a moment before there is an exit code
        if worker.exitcode:
            raise ReaderLost(worker.pid or 0, worker.exitcode) from None


class _Once:
    """A batch sampler from an iterator (DataLoader wants an iterable of lists)."""

    def __init__(self, ids: Iterator[list[int]]) -> None:
        self._ids = ids

    def __iter__(self) -> Iterator[list[int]]:
        return self._ids


def collate(samples: list[Any]) -> dict[str, torch.Tensor] | OSError | UserError:
    """A micro-batch of samples, or the exception that is in place of one."""
    for sample in samples:
        if isinstance(sample, OSError | UserError):
            return sample
    keys = (*KEYS, *(key for key in (*PRECOMPUTED, SOURCE) if key in samples[0]))
    return {key: torch.stack([sample[key] for sample in samples]) for key in keys}


def _collate_arrays(samples: list[Any]) -> dict[str, np.ndarray] | OSError | UserError:
    """`collate` for a process without a thread that pins: a worker sends arrays in its message.

    Each tensor is a file descriptor over a socket, and the training thread waits 2 ms for the four of a micro-batch,
    0.2 ms for arrays.
    """
    batch = collate(samples)
    return {key: value.numpy() for key, value in batch.items()} if isinstance(batch, dict) else batch


def _begin_worker(trainer: int, _worker: int) -> None:
    """Exit with the trainer, and leave signals to it.

    Schedulers and terminals signal every process of a job; only the trainer reacts, after it has saved.

    A worker ignores the first SIGTERM but not the second, with which a parent that exits abnormally stops it.
    """
    end_with_parent(trainer)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    def first(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))

    signal.signal(signal.SIGTERM, first)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def read_error(error: ReaderLost | OSError, recipe: Recipe, prepared: Prepared) -> UserError:
    """The error for it: `STOP` if prepared data has changed, `REQUEUE` if a restart may succeed.

    Args:
        error: what the loader raised.
        recipe: recipe of the run.
        prepared: its data, whose files are checked again.
    """
    try:
        folder = index_folder(recipe, prepared)
        data_manifest.check_sizes(prepared.path, prepared.manifest)
        require_listed(folder, read_listing(folder))
    except (UserError, OSError) as changed:
        what, where = (changed.what, changed.where) if isinstance(changed, UserError) else (str(changed), "")
        return UserError(
            f"prepared data changed during the run: {what}",
            where=where,
            rule="prepared data must not change while a run reads it",
            fix="copy the file again from where it was prepared, or delete the folder and prepare again; then resume",
            code=ExitCode.STOP,
        )
    host = socket.gethostname()
    if isinstance(error, OSError):
        return UserError(
            f"cannot read prepared data on {host}: {error.strerror or error}",
            where=str(error.filename or prepared.path),
            fix=f"check the file system of {host} (dmesg), then resume",
            code=ExitCode.REQUEUE,
        )
    return UserError(
        f"data loader process {error.pid} on {host} {_end(error.exitcode)}",
        where="data.num_workers",
        fix=_FIXES.get(-error.exitcode, f"check the kernel log of {host} (dmesg), then resume"),
        code=ExitCode.REQUEUE,
    )


_FIXES: dict[int, str] = {
    signal.SIGKILL: "usually the kernel, out of memory: give the job more memory, or lower data.num_workers or "
    "data.prefetch_factor",
    signal.SIGBUS: "usually /dev/shm is full: enlarge it (docker run --shm-size), or lower data.num_workers or "
    "data.prefetch_factor",
}


def _end(exitcode: int) -> str:
    return f"was killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with exit code {exitcode}"
