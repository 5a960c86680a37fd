"""Recording of losses, gradient norms, weights and gradients over a few steps, and their differences."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from llmrecipes.engine.base import Batch, Engine, Slice
from llmrecipes.plan.derive import Plan
from llmrecipes.verify.verify_spec import ReplicaDifference, StepRecord, TrainingRecord

FINAL, BEFORE, GRADIENTS = "final", "before", "gradients"
"""Weights after the last step, weights before the kept step, and its gradients."""

Keep = Callable[[int, StepRecord], bool]
"""(step from 1, its loss and gradient norm) -> whether to keep its weights and gradients."""


@dataclass
class _Snapshot:
    """Weights and reduced gradients of the last step, taken between backward pass and update."""

    before: list[Slice] = field(default_factory=list)
    gradients: list[Slice] = field(default_factory=list)

    def take(self, weights: list[Slice], gradients: list[Slice]) -> None:
        self.before = weights
        self.gradients = gradients


def observe(
    engine: Engine,
    plan: Plan,
    batches: Iterator[Batch],
    iters: int,
    folder: Path,
    keep: Keep,
    done: Callable[[int], None] | None = None,
) -> TrainingRecord:
    """Train, and write this rank's part of the weights; a collective of all ranks.

    Args:
        plan: its plan on this world.
        batches: micro-batches of this data-parallel rank.
        folder: output directory for `<FINAL, BEFORE or GRADIENTS>/<rank>.pt`.
        keep: called after every step until one is kept; rank 0 decides.
        done: called with 1 after every step.
    """
    snapshot = _Snapshot()
    engine.watch_gradients(snapshot.take)
    file = f"{dist.get_rank()}.pt"
    steps: list[StepRecord] = []
    kept = None
    differing: ReplicaDifference | None = None
    for number in range(1, iters + 1):
        result = engine.train_step(batches)
        steps.append(StepRecord(loss=result.loss, grad_norm=math.nan if result.grad_norm is None else result.grad_norm))
        if done is not None:
            done(1)
        differing = differing or _replicas(snapshot.before, number - 1)
        if kept is None and _from_first(keep(number, steps[-1]), engine.platform.device):
            kept = number
            write_shards(folder / BEFORE / file, snapshot.before)
            write_shards(folder / GRADIENTS / file, snapshot.gradients)
    with engine.params_synced():
        final = engine.weights()
    differing = differing or _replicas(final, iters)
    write_shards(folder / FINAL / file, final)
    return TrainingRecord(layout=plan.layout.as_dict(), steps=tuple(steps), kept_step=kept, replicas=differing)


def _replicas(weights: list[Slice], step: int) -> ReplicaDifference | None:
    return first_replica_difference(gathered(digests(weights)), step)


def _from_first(value: bool, device: torch.device) -> bool:
    flag = torch.tensor([float(value)], device=device)
    dist.broadcast(flag, 0)
    return bool(flag.item())


@dataclass(frozen=True)
class TensorDifference:
    """Difference of a global tensor from the reference's."""

    name: str
    """Named like megatron-core's modules, with layer and expert."""
    layer: int | None
    """Decoder layer, from 0; None outside of the layers."""
    relative: float
    """‖a - b‖ / ‖b‖ (Frobenius), the maximum over replicas. Infinity if not finite."""
    norm: float
    """‖a‖ in the layout."""
    reference_norm: float
    """‖b‖ in the reference."""


def differences(reference: Path, layout: Path) -> list[TensorDifference]:
    """Differences of all tensors, in model order: embedding, layers, final norm, output.

    Args:
        reference: folder with the file of the single rank.
        layout: folder with a file for every rank.

    Raises:
        RuntimeError: the ranks together do not hold exactly the reference's tensors.
    """
    whole = _whole(reference)
    # name -> offset -> the largest (squared difference, squared norm) of the ranks that hold this part
    parts: dict[str, dict[tuple[int, ...], tuple[float, float]]] = {name: {} for name in whole}
    held = dict.fromkeys(whole, 0)
    for file in sorted(layout.glob("*.pt")):
        for shard in read_shards(file):
            if shard.name not in whole or whole[shard.name].shape != shard.shape:
                raise RuntimeError(f"{shard.name} {shard.shape} is not a tensor of the reference")
            expected = whole[shard.name][_place(shard)]
            squares = (_square(shard.tensor - expected), _square(shard.tensor))
            known = parts[shard.name].get(shard.offset)
            held[shard.name] += 0 if known else expected.numel()
            parts[shard.name][shard.offset] = max(known or squares, squares, key=lambda pair: pair[0])
    partial = [name for name, tensor in whole.items() if held[name] != tensor.numel()]
    if partial:
        raise RuntimeError(f"the ranks do not hold all of {', '.join(partial)}")
    return [_difference(name, tensor, list(parts[name].values())) for name, tensor in whole.items()]


def readable(name: str) -> tuple[str, int | None]:
    """Name of a global tensor with its layer and expert, if any, and the decoder layer.

    Args:
        name: with layer and expert in brackets: `decoder.layers.mlp.experts.experts.linear_fc1.weight[2,5]`.
    """
    key, _, place = name.rstrip("]").partition("[")
    indices = place.split(",") if place else []
    if indices and re.search(r"\.layers\.(?!\d)", key):
        key = re.sub(r"\.layers\.", f".layers.{indices.pop(0)}.", key, count=1)
    if indices and ".experts.experts." in key:
        key = key.replace(".experts.experts.", f".experts.{indices.pop(0)}.")
    match = re.match(r"decoder\.layers\.(\d+)\.", key)
    return key + (f"[{','.join(indices)}]" if indices else ""), int(match[1]) if match else None


def _whole(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.pt")
    whole: dict[str, torch.Tensor] = {}
    for shard in read_shards(file):
        whole.setdefault(shard.name, torch.zeros(shard.shape))[_place(shard)] = shard.tensor
    return whole


def _place(shard: Slice) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(shard.offset, shard.tensor.shape, strict=True))


def _square(tensor: torch.Tensor) -> float:
    square = float(tensor.double().square().sum())
    return square if math.isfinite(square) else math.inf


def _difference(name: str, expected: torch.Tensor, squares: Sequence[tuple[float, float]]) -> TensorDifference:
    difference, norm = (math.sqrt(math.fsum(column)) for column in zip(*squares, strict=True))
    reference_norm = math.sqrt(_square(expected))
    # For a tensor that is zero in the reference, the absolute difference.
    return TensorDifference(*readable(name), difference / (reference_norm or 1.0), norm, reference_norm)


def write_shards(path: Path, shards: list[Slice]) -> None:
    """Write shards as plain tuples, which need no unpickling of classes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save([tuple(shard) for shard in shards], path)


def read_shards(path: Path) -> list[Slice]:
    """Read what `write_shards` wrote."""
    return [Slice(*values) for values in torch.load(path, map_location="cpu", weights_only=True)]


Digest = tuple[str, tuple[int, ...], bytes]
"""Global name, offset in the global tensor, and a hash of the bytes."""


class _Main(NamedTuple):
    rank: int
    digest: bytes


def digests(shards: Iterable[Slice]) -> list[Digest]:
    """Hashes of this rank's weights: about 100 bytes per tensor, whatever its size."""
    return [
        (shard.name, shard.offset, hashlib.blake2b(shard.tensor.numpy().tobytes(), digest_size=16).digest())
        for shard in shards
    ]


def gathered(local: list[Digest]) -> list[list[Digest]]:
    """Every rank's digests; a collective of all ranks."""
    by_rank: list[list[Digest]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, local)
    return by_rank


def first_replica_difference(by_rank: Sequence[Sequence[Digest]], step: int) -> ReplicaDifference | None:
    """The first tensor, by rank and model order, whose replicas differ.

    Args:
        by_rank: digests of each rank.
        step: optimizer steps so far.
    """
    main: dict[tuple[str, tuple[int, ...]], _Main] = {}
    copies, different = 0, []
    for rank, of_rank in enumerate(by_rank):
        for name, offset, digest in of_rank:
            known = main.setdefault((name, offset), _Main(rank, digest))
            copies += known.rank != rank
            if known.digest != digest:
                different.append((name, rank, known.rank))
    if not different:
        return None
    key, rank, other = different[0]
    name, layer = readable(key)
    return ReplicaDifference(
        step=step, tensor=name, layer=layer, rank=rank, main_rank=other, differing=len(different), copies=copies
    )
