"""What saving and resuming cost: measured with four data-parallel ranks on gloo, calculated for thousands.

    python -m benchmarks.checkpoint_scale [--recipe NAME] [--only measured|calculated]

Measured, for each rank: the memory that a save takes on top of training, the bytes that all ranks send to each other
(what the loopback interface counts: run it with nothing else there, as under `unshare -n`), what is read from files on
resume, and seconds. Calculated: the same from the sizes of a recipe, with the index of its checkpoint built, checked
and searched for real.
"""

from __future__ import annotations

import json
import mmap
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import close, machine, parser, show
from benchmarks.ranks import small
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine as machine_of
from llmrecipes.launch.local import run_ranks
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.plan.memory import checkpoint_bytes
from llmrecipes.plan.parameters import count, count_on_rank
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe

RANKS = 4
GB, MB = 1e9, 1e6
NODE_RATE = 2 * GB
"""Bytes a second that a node reads from its file system."""
HASH_RATE = 1.5 * GB
"""Bytes of SHA-256 a second and core, with the processor's own instructions for it."""
PART = 1_300_000
"""Bytes of a part, which decide how wide the columns of an index are."""
BUCKET = 40_000_000
"""megatron-core's least size of a bucket of gradients; 1,000,000 a rank if that is more."""


def measured(recipe: Recipe) -> list[dict[str, float]]:
    """Save and resume on new processes of one thread each; gives each rank's report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = folder / "spec.json"
        spec.write_text(recipe.model_dump_json(), "utf-8")
        code = run_ranks("benchmarks.checkpoint_scale", [str(spec)], world_size=RANKS, threads=1, logs=folder)
        if code:
            logs = "\n".join(path.read_text("utf-8")[-3000:] for path in sorted(folder.glob("rank-*.log")))
            raise RuntimeError(f"the ranks ended with {code}\n{logs}")
        return [json.loads((folder / f"rank-{rank}.json").read_text("utf-8")) for rank in range(RANKS)]


def rank_main(spec: Path) -> None:
    """One rank."""
    import logging

    import torch.distributed as dist

    from benchmarks.zero_rank import return_freed_memory
    from llmrecipes.bench.measure import random_tokens
    from llmrecipes.checkpoint.manifest import CheckpointInfo
    from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
    from llmrecipes.checkpoint.store import CheckpointStore
    from llmrecipes.console import setup_logging
    from llmrecipes.engine.backends import backend
    from llmrecipes.engine.base import Progress
    from llmrecipes.hardware.cluster import detect
    from llmrecipes.train.resume import choose, resume

    setup_logging(logging.ERROR)
    recipe = Recipe.model_validate_json(spec.read_text("utf-8"))
    engines = backend(recipe)
    platform = engines.platform()
    with engines.join(recipe, platform) as world:
        return_freed_memory()
        engine = engines.build(derive(recipe, world.size, detect()), platform)
        engine.train_step(random_tokens(recipe, world.data_parallel_rank))
        store = CheckpointStore(spec.parent / "checkpoints")
        info = CheckpointInfo(
            step=1, consumed_samples=0, consumed_tokens=0, layout=engine.plan.layout.as_dict(), recipe_hash="b"
        )
        report: dict[str, float] = {}

        def measure(name: str, work: Callable[[], object]) -> None:
            dist.barrier()
            before = (_resident("VmRSS"), _loopback(), _read(), time.perf_counter())
            Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
            dist.barrier()
            work()
            seconds = time.perf_counter() - before[3]
            read, peak = _read() - before[2], _resident("VmHWM") - before[0]
            dist.barrier()
            sent = _loopback() - before[1]
            report.update(
                {f"{name}_seconds": seconds, f"{name}_memory": peak, f"{name}_sent": sent, f"{name}_read": read}
            )

        with AsyncSaver(store, saver_group(), engine.checkpoint_format()) as saver:

            def save() -> None:
                saver.save(engine.state(Progress(step=1)), info)
                (done,) = saver.wait()
                assert done.path is not None, done.error

            measure("save", save)

        def load() -> None:
            entry = choose(store, world).entry
            assert entry is not None
            resume(engine, entry, world)

        measure("resume", load)
        report["parameters"] = sum(parameter.numel() for module in engine.modules for parameter in module.parameters())
        report["files"] = sum(path.stat().st_size for path in store.path(1).iterdir())
        (spec.parent / f"rank-{world.rank}.json").write_text(json.dumps(report), "utf-8")
        engine.close()


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _loopback() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def _read() -> int:
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


# -- calculated --------------------------------------------------------------------------------------------------------


def calculated(name: str, ranks: int) -> dict[str, float]:
    """Bytes, parts and seconds of a recipe's checkpoint on nodes of 8 GPUs."""
    from llmrecipes.checkpoint.rank_groups import sockets
    from llmrecipes.launch.open_files import needed_files

    recipe = load(name).recipe
    plan = derive(recipe, ranks, machine_of(load_profile("h100-ib"), ranks // 8))
    layout = plan.layout
    replicas = layout.data_parallel_size * layout.context_parallel_size
    stages = range(layout.pipeline_model_parallel_size)
    on_rank = [count_on_rank(recipe.model, plan.shape, layout, stage, plan.device).total for stage in stages]
    total = checkpoint_bytes(recipe, plan.shape, count(recipe.model, plan.shape).total)
    parts = _parts(plan, max(on_rank), replicas)
    nodes = ranks // 8
    return {
        "ranks": ranks,
        "replicas": replicas,
        "checkpoint": total,
        "gathered_before": 12 * max(on_rank),
        "written_before": 14 * max(on_rank),
        "held": 14 * max(on_rank) / replicas,
        "hash_before": total / min(NODE_RATE, 4 * HASH_RATE),
        "hash": total / nodes / NODE_RATE,
        "read_before": 14 * max(on_rank) * 8 / NODE_RATE,
        "read": 12 * max(on_rank) * 8 / replicas / NODE_RATE,
        "parts": parts * ranks,
        "sockets_before": ranks - 1,
        "sockets": sockets(ranks),
        "files": needed_files(0, ranks),
        **_index(parts, ranks),
    }


def _parts(plan: Plan, parameters: int, replicas: int) -> int:
    """Parts of tensors that a rank writes: in each bucket a range, at an end of two parameters, of three boxes each."""
    chunks = plan.layout.virtual_pipeline_model_parallel_size
    first = parameters / chunks
    buckets = -(-first // max(BUCKET, 1_000_000 * replicas)) if plan.recipe.layout.overlap_grad_reduce else 1
    return int(buckets + chunks - 1) * 2 * 3 * 4


def _index(parts: int, ranks: int) -> dict[str, float]:
    """Bytes of the index of as many parts; CPU seconds to merge, check, write and open it, and to look parts up."""
    from llmrecipes.checkpoint.manifest import FileRecord
    from llmrecipes.engine.core.checkpoint.format import require_whole
    from llmrecipes.engine.core.checkpoint.index import build, decode, encode, make_table, merge_tables

    names, layers = 40, 126
    each = max(1, parts // names // 3)  # times three: a row in two parts, and a whole one
    rows = -(-ranks // layers) * each * 2

    def of_rank(rank: int) -> bytes:
        first = rank // layers * each * 2
        boxes = [(row, *columns) for row in range(0, 2 * each, 2) for columns in ((0, 16), (16, 48))]
        boxes += [(row, 0, 64) for row in range(1, 2 * each, 2)]
        found = [
            [0, PART * number, PART, rank % layers, 1, first + row, 1, *columns]
            for number, (row, *columns) in enumerate(boxes)
        ]
        tensors = [(f"tensor{number}", "float32", (layers, rows, 64), found) for number in range(names)]
        return encode(make_table([f"__{rank}_0.distcp"], [], tensors))

    sent = [of_rank(rank) for rank in range(layers * -(-ranks // layers))]
    files = {f"__{rank}_0.distcp": FileRecord(size=1 << 40, sha256="0" * 64) for rank in range(len(sent))}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.bin"
        clock = [time.process_time()]
        merged = merge_tables([decode(data) for data in sent])
        clock.append(time.process_time())
        require_whole(merged)
        clock.append(time.process_time())
        path.write_bytes(encode(merged))
        clock.append(time.process_time())
        with path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        index = build(decode(memoryview(mapped)), files)
        clock.append(time.process_time())
        for number in range(parts):
            index.tensors[f"tensor{number % names}"].slices((5, 7, 0), (1, 3, 64))
        clock.append(time.process_time())
        size = path.stat().st_size
    spans = [later - earlier for earlier, later in pairwise(clock)]
    return {
        "index_bytes": size,
        "sent": max(map(len, sent)),
        **dict(zip(("merge", "check", "write", "open", "search"), spans, strict=True)),
    }


def main() -> None:
    """Print both tables."""
    options = parser(__doc__)
    options.add_argument("--recipe", default="gpt-tiny")
    options.add_argument("--only", choices=("measured", "calculated"))
    options.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384])
    chosen = options.parse_args()
    started_on = machine()
    figures: dict[str, Any] = {}
    if chosen.only != "calculated":
        sizes = (
            "model.num_layers=8",
            "model.hidden_size=512",
            "layout.micro_batch_size=1",
            "train.global_batch_size=4",
        )
        found = measured(small(chosen.recipe, *sizes))
        figures["measured"] = found
        rows = []
        for what in ("save", "resume"):
            largest = {
                key: max(each[f"{what}_{key}"] for each in found) for key in ("memory", "read", "seconds", "sent")
            }
            megabytes = [f"{largest[key] / MB:,.0f}" for key in ("memory", "sent", "read")]
            rows.append([what, *megabytes, f"{largest['seconds']:.2f}"])
        title = (
            f"{found[0]['parameters'] / 1e6:.1f}M parameters, {found[0]['files'] / MB:,.0f} MB of files, {RANKS} ranks"
        )
        show(title, ("", "memory of a rank, MB", "sent by all, MB", "read by a rank, MB", "s"), rows)
    if chosen.only != "measured":
        figures["calculated"] = [calculated("llama3-405b", ranks) for ranks in chosen.ranks]
        for figure in figures["calculated"]:
            show(
                f"llama3-405b, {figure['ranks']:,} ranks",
                ("", ""),
                [[key, f"{value:,.2f}"] for key, value in figure.items()],
            )
    close(figures, started_on, chosen.json)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith("spec.json"):
        rank_main(Path(sys.argv[1]))
    else:
        main()
