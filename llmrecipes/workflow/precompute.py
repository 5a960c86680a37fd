"""`llmrecipes precompute`: a frozen model's outputs for a run's samples, written before the run, which is without it.

Ranks compute parts of the samples and write each as a file, so that a computation that was killed continues there.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from llmrecipes.data.read import precomputed
from llmrecipes.data.steps.split import Split
from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.io import sync, write_atomic, write_synced
from llmrecipes.launch.environment import detected_environment
from llmrecipes.launch.local import run_ranks
from llmrecipes.launch.ranks import Node
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.run_plan import RunPlan, derive_run
from llmrecipes.recipe.derived.batch_schedule import samples_of
from llmrecipes.recipe.derived.degrees import smallest_world
from llmrecipes.recipe.rules.distill_rules import of_teacher, sample_bytes
from llmrecipes.recipe.rules.preference_rules import (
    with_frozen_model,
)
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.rank import failure_reported, guarded, nodes, rank_main
from llmrecipes.train.spec import RankSpec
from llmrecipes.units import MIB, gib
from llmrecipes.untrusted import read_json
from llmrecipes.workflow.precomputed_match import facts, frozen_path, identity, passes_recipe, place
from llmrecipes.workflow.run import Log, Paths, prepare_data
from llmrecipes.workflow.teacher import require_same_tokens

if TYPE_CHECKING:
    from llmrecipes.data.folder.prepared import Prepared
    from llmrecipes.data.read.pair_samples import PairDataset
    from llmrecipes.engine.base import Platform, World
    from llmrecipes.engine.meters import Precomputation

REQUEST = "request.json"
SPLITS: tuple[Split, ...] = ("train", "valid")
"""Whose pairs a run compares."""
PAIR_BYTES = 16
"""Two numbers in fp64."""
LARGEST_PART, LARGEST_PART_BYTES, PARTS_PER_REPLICA = 256, 64 * MIB, 8
"""Sequences that a kill loses at most of each replica, and their bytes in memory; and parts that it has at least, so
that none waits for long."""


@dataclass(frozen=True)
class FinishedPrecompute:
    """A computation that is complete.

    Attributes:
        folder: folder of the values.
        values, unit: pairs, or samples.
        bytes: size in bytes of the files.
        seconds: that it took now; 0: it was there.
    """

    folder: str
    values: int
    unit: str
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


def precompute(
    recipe: Recipe, paths: Paths, nproc: int | None, node: Node | None, log: Log
) -> FinishedPrecompute | int:
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
    for problem in of_teacher(live, check):
        raise UserError(problem.what, where=problem.key, rule=problem.rule, fix=problem.fix)
    require_packages(live)
    nodes_ = 1 if node is None else node.nodes
    cluster = detect().times(nodes_)
    ranks = _ranks(recipe, nproc, nodes_, cluster)
    plan = derive_run(passes_recipe(recipe, ranks), ranks, cluster)
    _require_memory(plan.largest)
    path = frozen_path(recipe, paths.runs_dir)
    prepare_data(live, paths.data_dir, log)
    from llmrecipes.data.folder.prepared import open_prepared

    prepared = open_prepared(live, paths.data_dir)
    if path is not None and live.distill is not None:
        require_same_tokens(RankSpec(recipe=live, data_dir=paths.data_dir), path)
    if live.distill is None:
        number, unit, size = sum(prepared.manifest.counts(split).documents for split in SPLITS), "pairs", PAIR_BYTES
    else:
        number, unit, size = samples_of(live), "samples", sample_bytes(live)
    where = f"{key}: {folder}"
    wanted = facts(recipe, prepared, identity(path, live, log))
    with _only_one(folder, node):
        if (folder / precomputed.NAME).exists():
            record, _ = precomputed.read_record(folder, where)
            precomputed.require_same(record.facts, wanted, where)
            log(f"{where}: complete already")
            return FinishedPrecompute(str(folder), number, unit, _size(record), 0.0)
        log(f"{where}: {number:,} {unit} × {size:,} bytes = {gib(number * size)}, ranks: {ranks}")
        with _writing(folder):
            _require_space(folder, number * size)
            if node is None or node.number == 0:
                _begin(folder, wanted, where)
        began = time.monotonic()
        spec = PrecomputeSpec(
            recipe=live, data_dir=paths.data_dir, folder=folder.absolute(), frozen=path, on_gpus=bool(cluster.gpus)
        )
        code = _start(spec, plan, cluster, node)
        if code:
            return code
        record, _ = precomputed.read_record(folder, where)
        return FinishedPrecompute(str(folder), number, unit, _size(record), time.monotonic() - began)


def _size(record: precomputed.PrecomputedRecord) -> int:
    form = record.logits
    return sum(file.bytes for file in record.files.values()) + (form.samples * form.sample_bytes if form else 0)


def _require_space(folder: Path, size: int) -> None:
    free, parent = shutil.disk_usage(folder.absolute().parent).free, folder.absolute().parent
    there = sum(path.stat().st_size for path in work_folder(folder).rglob("*.bin"))
    if size > free + there:
        raise UserError(
            f"needs {gib(size)}, and {gib(free)} are free", where=str(parent), rule="all values go there",
            fix="use another folder, or for a teacher a smaller distill.top_k",
        )  # fmt: skip


def _ranks(recipe: Recipe, nproc: int | None, nodes_: int, cluster: Cluster) -> int:
    least = smallest_world(recipe.layout)
    if nproc is None:
        return max(nodes_, least, len(cluster.gpus) // least * least)
    if nproc % least or nproc % nodes_:
        raise UserError(
            f"{nproc}", where="--nproc", rule=f"must be a multiple of the layout's {least} ranks and {nodes_} nodes",
            fix=f"--nproc {least * nodes_}",
        )  # fmt: skip
    return nproc


def _require_memory(plan: Plan) -> None:
    if plan.memory.weights > plan.memory_capacity_bytes:
        raise UserError(
            f"weights need {gib(plan.memory.weights)} a rank, {gib(plan.memory_capacity_bytes)} available",
            where=f"recipe {plan.recipe.name}", rule="the ranks of a replica hold the frozen model",
            fix="a larger layout.tensor_model_parallel_size or pipeline_model_parallel_size for this command",
        )  # fmt: skip


def work_folder(folder: Path) -> Path:
    """Where the parts are until the folder is complete."""
    return folder.absolute().with_name(f".{folder.absolute().name}.part")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Report a disk that is full or read-only as one message."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror or error}", where=str(error.filename or folder),
            rule=f"the folder is written as {work_folder(folder).name} next to it, and renamed when it is complete",
            fix="free some disk space, and repeat the command to continue; or name another folder",
        ) from error  # fmt: skip


@contextmanager
def _only_one(folder: Path, node: Node | None) -> Iterator[None]:
    from filelock import FileLock, Timeout

    if node is not None and node.number > 0:
        yield
        return
    lock = FileLock(f"{work_folder(folder)}.lock")
    with _writing(folder):
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError("another process is writing it", where=str(folder), fix="wait for it to finish") from error
    try:
        yield
    finally:
        lock.release()


def _begin(folder: Path, wanted: dict[str, Any], where: str) -> None:
    """Create the folder of the parts, or require that those in it belong to the same."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError("is not empty", where=where, rule="precompute writes a new folder", fix="use a new folder")
    work = work_folder(folder)
    if (work / REQUEST).exists():
        precomputed.require_same(read_json(work / REQUEST, root=work).get("facts", {}), wanted, f"{where} ({work})")
        return
    (work / "parts").mkdir(parents=True, exist_ok=True)
    write_atomic(work / REQUEST, json.dumps({"facts": wanted}, indent=1) + "\n")


def _start(spec: PrecomputeSpec, plan: RunPlan, cluster: Cluster, node: Node | None) -> int:
    ranks = plan.world_size
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
class SampleRange:
    """Samples of a split that one replica computes, and whose values are one file."""

    split: Split
    number: int
    first: int
    end: int


class Pairs:
    """Two numbers for each pair, which are put together by pair: they serve every order of the pairs.

    Args:
        work: folder of the parts.
    """

    sample_bytes = 0  # so few that parts are bounded by the work that a kill loses

    def __init__(self, recipe: Recipe, prepared: Prepared, work: Path) -> None:
        from llmrecipes.data.read.dataset import build

        self._prepared, self._length, self._work = prepared, recipe.model.seq_length, work
        opened = {split: build(recipe, prepared, split) for split in SPLITS}
        self.samples = {split: cast("PairDataset", each).in_file_order()
                        for split, each in opened.items() if each is not None}  # fmt: skip
        self.lengths = {split: len(samples) for split, samples in self.samples.items()}

    def file(self, part: SampleRange) -> Path:
        """File of a part's values."""
        return self._work / "parts" / f"{part.split}-{part.first:012}-{part.end:012}.npy"

    def packed(self, part: SampleRange, values: Sequence[tuple[Any, ...]]) -> bytes:
        """The content of that file, from the values of its samples and of further ones."""
        numbers = np.concatenate([answers.numpy() for (answers,) in values])
        numbers = numbers[: 2 * len(self.samples[part.split].pairs(part.first, part.end))]
        _require_finite(bool(np.isfinite(numbers).all()))
        return _array(numbers.reshape(-1, 2))

    def complete(self, folder: Path, parts: Sequence[SampleRange]) -> dict[str, Any]:
        """Write the files of the complete folder; returns what its record says of them."""
        from llmrecipes.data.folder.data_manifest import File, sha256, stem

        files = {}
        for split, samples in self.samples.items():
            arrays = [np.full((count, 2), np.nan) for count in samples.counts]
            for part in (part for part in parts if part.split == split):
                values = np.load(self.file(part), allow_pickle=False)
                places = samples.pairs(part.first, part.end)
                for number, array in enumerate(arrays):
                    of_source = places[:, 0] == number
                    array[places[of_source, 1]] = values[of_source]
            for number, array in zip(self._prepared.usable(split, self._length), arrays, strict=True):
                path = folder / f"{stem(number, split)}.npy"
                if np.isnan(array).any():
                    raise AssertionError(f"pairs of {path.stem} are missing")
                write_synced(path, _array(array))
                files[path.name] = File(bytes=path.stat().st_size, sha256=sha256(path))
        return {"files": files}


class TopLogits:
    """The largest logits of each token, in the order of the run's samples.

    Args: as `Pairs`.
    """

    def __init__(self, recipe: Recipe, prepared: Prepared, work: Path) -> None:
        from llmrecipes.data.read.dataset import build

        self._recipe, self._work = recipe, work
        self._form = precomputed.LogitsForm.of(recipe, 1)
        train = build(recipe, prepared, "train")
        self.samples: dict[Split, Any] = {} if train is None else {"train": train}
        self.lengths: dict[Split, int] = {"train": self._form.samples} if self.samples else {}
        self.sample_bytes = self._form.sample_bytes

    def file(self, part: SampleRange) -> Path:
        """As `Pairs.file`."""
        return self._work / "complete" / precomputed.LOGITS / self._form.file(part.number)

    def packed(self, part: SampleRange, values: Sequence[tuple[Any, ...]]) -> bytes:
        """As `Pairs.packed`."""
        rows = [row for ids, logits in values for row in zip(ids, logits, strict=True)][: part.end - part.first]
        _require_finite(all(bool(logits.isfinite().all()) for _, logits in rows))
        return b"".join(self._form.packed(ids, logits) for ids, logits in rows)

    def complete(self, folder: Path, parts: Sequence[SampleRange]) -> dict[str, Any]:
        """As `Pairs.complete`."""
        size = max(part.end - part.first for part in parts)
        return {"logits": self._form.model_copy(update={"part": size})}


def _array(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def _require_finite(is_finite: bool) -> None:
    if not is_finite:
        raise UserError(
            "its outputs are not finite", where="the frozen model", rule="log-probabilities and logits must be finite",
            fix="use another model, or train.precision=bf16", code=ExitCode.STOP,
        )  # fmt: skip


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
                        fix="run llmrecipes doctor on this node")  # fmt: skip
    with engines.join(recipe, platform) as world, failure_reported(recipe):
        compute(spec, platform, world)
    return ExitCode.DONE


def compute(spec: PrecomputeSpec, platform: Platform, world: World) -> None:
    """Compute the parts that are missing and publish all, on ranks that have joined."""
    import torch.distributed as dist

    from llmrecipes.data.folder.prepared import open_prepared
    from llmrecipes.engine.backends import backend
    from llmrecipes.tracking.progress import Counted
    from llmrecipes.train.resume import load_frozen_from

    recipe = spec.recipe
    plan = derive_run(passes_recipe(recipe, world.size), world.size, detect().times(nodes())).largest
    top_k = None if recipe.distill is None else recipe.distill.top_k
    # Rules require the engine that has it.
    frozen: Precomputation = cast(Any, backend(recipe)).precomputation(plan, platform, top_k)
    if spec.frozen is None:
        frozen.load()
    else:
        load_frozen_from(frozen, spec.frozen, plan.recipe.model)
    work, micro, replicas = work_folder(spec.folder), recipe.layout.micro_batch_size, world.data_parallel_size
    kind = (Pairs if recipe.distill is None else TopLogits)(recipe, open_prepared(recipe, spec.data_dir), work)
    # Rank 0 decides: ranks may see different listings of a shared file system.
    parts = _parts(work, kind, micro, replicas) if world.is_first else []
    shared: list[Any] = [[part for part in parts if not kind.file(part).exists()]]
    dist.broadcast_object_list(shared, src=0)
    missing: list[SampleRange] = shared[0]
    progress = Counted() if world.is_first else None
    if progress is not None:
        progress.begin("sequences", sum(part.end - part.first for part in missing))
    for start in range(0, len(missing), replicas):
        together = missing[start : start + replicas]
        # Every replica passes as many micro-batches: experts are shared by several.
        length = max(part.end - part.first for part in together)
        is_mine = world.data_parallel_rank < len(together)
        part = together[world.data_parallel_rank if is_mine else 0]
        values = _values(frozen, kind.samples[part.split], part, length, micro)
        if frozen.writes and is_mine:
            with _writing(spec.folder):
                _write_part(kind.file(part), kind.packed(part, values))
        if progress is not None:
            progress.add(sum(part.end - part.first for part in together))
    if progress is not None:
        progress.close()
    dist.barrier()
    if world.is_first:
        with _writing(spec.folder):
            _publish(spec, kind, parts)
    dist.barrier()


def _parts(work: Path, kind: Pairs | TopLogits, micro: int, replicas: int) -> list[SampleRange]:
    """All parts. Their size is that of the first start, so that one on other ranks finds what is there."""
    request = read_json(work / REQUEST, root=work)
    most = min(LARGEST_PART, max(1, LARGEST_PART_BYTES // max(1, kind.sample_bytes)))
    if "part" not in request:
        size = min(most, -(-sum(kind.lengths.values()) // (PARTS_PER_REPLICA * replicas)))
        request["part"] = -(-size // micro) * micro
        write_atomic(work / REQUEST, json.dumps(request, indent=1) + "\n")
    size = int(request["part"])  # also if another micro-batch does not divide it
    return [
        SampleRange(split, number, first, min(first + size, length))
        for split, length in kind.lengths.items()
        for number, first in enumerate(range(0, length, size))
    ]


def _values(frozen: Precomputation, samples: Any, part: SampleRange, length: int, micro: int) -> list[tuple[Any, ...]]:
    """Values of at least `length` samples: those of the part, and further ones from its beginning again."""
    from llmrecipes.data.read.batches import collate

    values, own = list[tuple[Any, ...]](), part.end - part.first
    size = micro * frozen.together
    for begin in range(0, length, size):
        rows = [samples[part.first + number % own] for number in range(begin, begin + size)]
        batches = [cast(Any, collate(rows[place : place + micro])) for place in range(0, size, micro)]
        values += frozen.values(batches)
    return values


def _write_part(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)


def _publish(spec: PrecomputeSpec, kind: Pairs | TopLogits, parts: list[SampleRange]) -> None:
    """Give the folder its name."""
    work = work_folder(spec.folder)
    complete = work / "complete"
    complete.mkdir(exist_ok=True)
    facts_ = read_json(work / REQUEST, root=work)["facts"]
    record = precomputed.PrecomputedRecord(format=precomputed.FORMAT, facts=facts_, **kind.complete(complete, parts))
    write_synced(complete / precomputed.NAME, (record.model_dump_json(indent=1) + "\n").encode())
    sync(complete)
    complete.rename(spec.folder)  # an empty folder of that name is replaced
    sync(spec.folder.parent)
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    rank_main(PrecomputeSpec, run)
