"""`llmrecipes precompute`: what a frozen model says of a run's samples, written before the run, which is without it.

Ranks compute parts of the samples and write each as a file, so that a computation that is killed goes on where it was.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from llmrecipes.data import precomputed
from llmrecipes.data.split import Split
from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.io import sync, write_atomic, write_synced
from llmrecipes.launch.environment import detected_environment
from llmrecipes.launch.local import run_ranks
from llmrecipes.launch.ranks import Node
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.degrees import smallest_world
from llmrecipes.recipe.preference_rules import (
    with_frozen_model,
)
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.rank import failure_reported, guarded, nodes, rank_main
from llmrecipes.train.spec import RankSpec
from llmrecipes.units import gib
from llmrecipes.untrusted import read_json
from llmrecipes.workflow.precomputed import facts, frozen_path, identity, passes_recipe, place
from llmrecipes.workflow.run import Log, Paths, prepare_data

if TYPE_CHECKING:
    from llmrecipes.data.pair_samples import PairDataset
    from llmrecipes.data.prepared import Prepared
    from llmrecipes.engine.base import Platform, World
    from llmrecipes.engine.meters import Precomputation

REQUEST = "request.json"
SPLITS: tuple[Split, ...] = ("train", "valid")
"""Whose pairs a run compares."""
PAIR_BYTES = 16
"""Two numbers in fp64."""
LARGEST_PART, PARTS_PER_REPLICA = 256, 8
"""Sequences that a kill loses at most of each replica; and parts that it has at least, so that none waits for long."""


@dataclass(frozen=True)
class Precomputed:
    """A computation that is complete.

    Attributes:
        folder: of the values.
        pairs: whose answers were scored.
        bytes: of the files.
        seconds: that it took now; 0: it was there.
    """

    folder: str
    pairs: int
    bytes: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


class PrecomputeSpec(RankSpec):
    """What the ranks compute."""

    folder: Path
    """Of the values."""
    frozen: Path | None
    """Checkpoint, or folder in Hugging Face's form; None: initial weights."""
    on_gpus: bool


# -- the command ------------------------------------------------------------------------------------------------------


def precompute(recipe: Recipe, paths: Paths, nproc: int | None, node: Node | None, log: Log) -> Precomputed | int:
    """Compute what the recipe's key names, or what is missing of it.

    Args:
        recipe: the resolved recipe.
        paths: where runs and data are kept.
        nproc: ranks of all nodes; None: all GPUs, else the fewest that the layout needs.
        node: which of several machines this is; None: the only one.
        log: receives one line for each slow step.

    Returns:
        What is there now; or the exit code of ranks that have failed, and have said why.

    Raises:
        UserError: nothing was computed.
    """
    key, folder = place(recipe)
    live = with_frozen_model(recipe)
    require_packages(live)
    nodes_ = 1 if node is None else node.nodes
    cluster = detect().times(nodes_)
    ranks = _ranks(recipe, nproc, nodes_, cluster)
    plan = derive(passes_recipe(recipe, ranks), ranks, cluster)
    _require_memory(plan)
    path = frozen_path(recipe, paths.runs_dir)
    prepare_data(live, paths.data_dir, log)
    from llmrecipes.data.prepared import open_prepared

    prepared = open_prepared(live, paths.data_dir)
    pairs = sum(prepared.manifest.counts(split).documents for split in SPLITS)
    where = f"{key}: {folder}"
    wanted = facts(recipe, prepared, identity(path, live, log))
    with _only_one(folder, node):
        if (folder / precomputed.NAME).exists():
            record, _ = precomputed.read_record(folder, where)
            precomputed.require_same(record.facts, wanted, where)
            log(f"{where}: complete already")
            return Precomputed(str(folder), pairs, _size(record), 0.0)
        log(f"{where}: {pairs:,} pairs × {PAIR_BYTES} bytes = {pairs * PAIR_BYTES:,} bytes, ranks: {ranks}")
        if node is None or node.number == 0:
            _begin(folder, wanted, where)
        began = time.monotonic()
        spec = PrecomputeSpec(
            recipe=live, data_dir=paths.data_dir, folder=folder.absolute(), frozen=path, on_gpus=plan.device == "cuda"
        )
        code = _start(spec, plan, cluster, node)
        if code:
            return code
        record, _ = precomputed.read_record(folder, where)
        return Precomputed(str(folder), pairs, _size(record), time.monotonic() - began)


def _size(record: precomputed.PrecomputedRecord) -> int:
    return sum(file.bytes for file in record.files.values())


def _ranks(recipe: Recipe, nproc: int | None, nodes_: int, cluster: Cluster) -> int:
    least = smallest_world(recipe.parallelism)
    if nproc is None:
        return max(nodes_, least, len(cluster.gpus) // least * least)
    if nproc % least or nproc % nodes_:
        raise UserError(
            f"{nproc}", where="--nproc", rule=f"a multiple of the layout's {least} ranks and of {nodes_} nodes",
            fix=f"--nproc {least * nodes_}",
        )  # fmt: skip
    return nproc


def _require_memory(plan: Plan) -> None:
    if plan.memory.weights > plan.memory_capacity_bytes:
        raise UserError(
            f"weights need {gib(plan.memory.weights)} a rank, {gib(plan.memory_capacity_bytes)} available",
            where=f"recipe {plan.recipe.name}", rule="the ranks of a replica hold the frozen model",
            fix="a larger parallelism.tensor_model_parallel_size or pipeline_model_parallel_size for this command",
        )  # fmt: skip


def work_folder(folder: Path) -> Path:
    """Where the parts are until the folder is complete."""
    return folder.absolute().with_name(f".{folder.absolute().name}.part")


@contextmanager
def _only_one(folder: Path, node: Node | None) -> Iterator[None]:
    from filelock import FileLock, Timeout

    if node is not None and node.number > 0:
        yield
        return
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{work_folder(folder)}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            "another precompute writes there", where=str(folder), rule="one at a time", fix="wait for it"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _begin(folder: Path, wanted: dict[str, Any], where: str) -> None:
    """Create the folder of the parts, or require that those in it belong to the same."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            "has something else", where=where, rule="precompute writes a new folder", fix="the name of a new folder"
        )
    work = work_folder(folder)
    if (work / REQUEST).exists():
        precomputed.require_same(read_json(work / REQUEST, root=work).get("facts", {}), wanted, f"{where} ({work})")
        return
    (work / "parts").mkdir(parents=True, exist_ok=True)
    write_atomic(work / REQUEST, json.dumps({"facts": wanted}, indent=1) + "\n")


def _start(spec: PrecomputeSpec, plan: Plan, cluster: Cluster, node: Node | None) -> int:
    ranks = plan.layout.world_size
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, int(cluster.cpu_cores) // ranks))
    if ranks == 1 and node is None:
        import torch

        torch.set_num_threads(threads)
        return guarded(run, spec)
    logs = work_folder(spec.folder) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"spec-{0 if node is None else node.number}.json"
    path.write_text(spec.model_dump_json() + "\n", "utf-8")
    return run_ranks(
        "llmrecipes.workflow.precompute",
        [str(path)],
        world_size=ranks,
        threads=threads,
        logs=logs,
        node=node,
        environment=detected_environment(cluster, plan, logs),
    )


# -- the ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Samples of a split that one replica computes, and whose values are one file."""

    split: Split
    first: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.first:012}-{self.end:012}.npy"


def run(spec: PrecomputeSpec) -> ExitCode:
    """Join the ranks that a launcher started, or form a world of one, and compute.

    Raises:
        UserError: a problem the user can fix.
    """
    require_packages(spec.recipe)
    # Imported here so that a rank with an invalid spec fails before torch is loaded.
    from llmrecipes.engine.backends import backend

    recipe = spec.recipe
    engines = backend(recipe)
    platform = engines.platform(int(os.environ.get("LOCAL_RANK", "0")))
    if spec.on_gpus and platform.name != "cuda":
        raise UserError("torch sees no GPU", where="torch.cuda", rule="the computation is planned for GPUs",
                        fix="llmrecipes doctor on that node")  # fmt: skip
    with engines.join(recipe, platform) as world, failure_reported(recipe):
        compute(spec, platform, world)
    return ExitCode.DONE


def compute(spec: PrecomputeSpec, platform: Platform, world: World) -> None:
    """Compute the parts that are missing and publish all, on ranks that have joined."""
    import torch.distributed as dist

    from llmrecipes.data.dataset import build
    from llmrecipes.data.prepared import open_prepared
    from llmrecipes.engine.backends import backend
    from llmrecipes.tracking.progress import Counted
    from llmrecipes.train.resume import load_frozen

    plan = derive(passes_recipe(spec.recipe, world.size), world.size, detect().times(nodes()))
    # Rules require the engine that has it.
    frozen: Precomputation = cast(Any, backend(spec.recipe)).precomputation(plan, platform)
    if spec.frozen is None:
        frozen.load()
    else:
        load_frozen(frozen, spec.frozen, plan.recipe.model)
    prepared = open_prepared(spec.recipe, spec.data_dir)
    opened = {split: build(spec.recipe, prepared, split) for split in SPLITS}
    every = {split: cast("PairDataset", each).in_file_order() for split, each in opened.items() if each is not None}
    work, micro, replicas = work_folder(spec.folder), spec.recipe.train.micro_batch_size, world.data_parallel_size
    # Rank 0 decides: ranks may see different listings of a shared file system.
    parts = _parts(work, every, micro, replicas) if world.is_first else []
    shared: list[Any] = [[part for part in parts if not (work / "parts" / part.name).exists()]]
    dist.broadcast_object_list(shared, src=0)
    missing: list[Part] = shared[0]
    progress = Counted() if world.is_first else None
    if progress is not None:
        progress.begin("sequences", sum(part.end - part.first for part in missing))
    for start in range(0, len(missing), replicas):
        together = missing[start : start + replicas]
        # Every replica passes as many micro-batches: experts are shared by several.
        length = max(part.end - part.first for part in together)
        is_mine = world.data_parallel_rank < len(together)
        part = together[world.data_parallel_rank if is_mine else 0]
        values = _values(frozen, every[part.split], part, length, micro)
        if frozen.writes and is_mine:
            _write_part(
                work / "parts" / part.name, values[: 2 * len(every[part.split].pairs(part.first, part.end))], spec
            )
        if progress is not None:
            progress.add(sum(each.end - each.first for each in together))
    if progress is not None:
        progress.close()
    dist.barrier()
    if world.is_first:
        _publish(spec, work, parts, every, prepared)
    dist.barrier()


def _parts(work: Path, every: dict[Split, PairDataset], micro: int, replicas: int) -> list[Part]:
    """All parts. Their size is that of the first start, so that one on other ranks finds what is there."""
    request = read_json(work / REQUEST, root=work)
    total = sum(len(each) for each in every.values())
    size = request.get("part") or min(LARGEST_PART, -(-total // (PARTS_PER_REPLICA * replicas)))
    size = -(-int(size) // micro) * micro
    if "part" not in request:
        write_atomic(work / REQUEST, json.dumps({**request, "part": size}, indent=1) + "\n")
    return [
        Part(split, first, min(first + size, len(samples)))
        for split, samples in every.items()
        for first in range(0, len(samples), size)
    ]


def _values(frozen: Precomputation, samples: PairDataset, part: Part, length: int, micro: int) -> np.ndarray:
    """[answers of the part and more], of at least `length` samples, those behind its end from its beginning again."""
    from llmrecipes.data.batches import collate

    found, own = [], part.end - part.first
    size = micro * frozen.together
    for begin in range(0, length, size):
        rows = [samples[part.first + number % own] for number in range(begin, begin + size)]
        batches = [cast(Any, collate(rows[place : place + micro])) for place in range(0, size, micro)]
        found += [each.numpy() for each in frozen.values(batches)]
    return np.concatenate(found) if found else np.empty(0)


def _write_part(path: Path, values: np.ndarray, spec: PrecomputeSpec) -> None:
    if not np.isfinite(values).all():
        raise UserError(
            "a log-probability is not finite", where=str(spec.frozen or "initial weights"),
            rule="a reference says something of every answer", fix="another reference, or train.precision bf16",
            code=ExitCode.STOP,
        )  # fmt: skip
    stream = io.BytesIO()
    np.save(stream, values.reshape(-1, 2))
    write_atomic(path, stream.getvalue())


def _publish(
    spec: PrecomputeSpec, work: Path, parts: list[Part], every: dict[Split, PairDataset], prepared: Prepared
) -> None:
    """Put the parts together by pair, and give the folder its name."""
    from llmrecipes.data.manifest import File, sha256, stem

    complete, files = work / "complete", {}
    shutil.rmtree(complete, ignore_errors=True)
    complete.mkdir()
    for split, samples in every.items():
        arrays = [np.full((count, 2), np.nan) for count in samples.counts]
        for part in (each for each in parts if each.split == split):
            values = np.load(work / "parts" / part.name, allow_pickle=False)
            places = samples.pairs(part.first, part.end)
            for number, array in enumerate(arrays):
                own = places[:, 0] == number
                array[places[own, 1]] = values[own]
        for number, array in zip(prepared.usable(split, spec.recipe.model.seq_length), arrays, strict=True):
            if np.isnan(array).any():
                raise AssertionError(f"pairs of {stem(number, split)} are missing")
            stream = io.BytesIO()
            np.save(stream, array)
            write_synced(complete / f"{stem(number, split)}.npy", stream.getvalue())
    for path in sorted(complete.iterdir()):
        files[path.name] = File(bytes=path.stat().st_size, sha256=sha256(path))
    record = precomputed.PrecomputedRecord(
        format=precomputed.FORMAT, facts=read_json(work / REQUEST, root=work)["facts"], files=files
    )
    write_synced(complete / precomputed.NAME, (record.model_dump_json(indent=1) + "\n").encode())
    sync(complete)
    complete.rename(spec.folder)  # an empty folder of that name is replaced
    sync(spec.folder.parent)
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    rank_main(PrecomputeSpec, run)
