"""Upload and fetch of a checkpoint of four ranks in an S3 store, in turns with `aws s3 cp --recursive`.

    python -m benchmarks.copies s3://BUCKET [--aws PROGRAM] [--gib 2] [--rounds 3]

Endpoint and credentials are those of the environment. Ranks are processes that have imported everything, as those of a
run; a rank's memory is what its largest resident size grows by. The store must be able to take the speed: one on this
machine shares its cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import close, machine, parser, show

RANKS, STEP = 4, 10


def write(folder: Path, size: int) -> Path:
    """A checkpoint with a file of each rank."""
    from llmrecipes.checkpoint.manifest import CheckpointInfo
    from llmrecipes.checkpoint.store import CheckpointStore

    store = CheckpointStore(folder)
    temporary = store.temporary(STEP)
    block = os.urandom(1 << 24)
    for rank in range(RANKS):
        with (temporary / f"__{rank}_0.distcp").open("wb") as file:
            for _ in range(size // RANKS >> 24):
                file.write(block)
    info = CheckpointInfo(step=STEP, consumed_samples=1, consumed_tokens=1, layout={}, recipe_hash="")
    return store.publish(temporary, info, versions={}).path


def rank_main(rank: int, url: str, folder: Path, pipe: Connection) -> None:
    """Upload or fetch the share of a rank whenever asked; answers with the bytes that its memory grew by."""
    from llmrecipes.checkpoint.manifest import read_manifest
    from llmrecipes.checkpoint.rank_groups import own_share
    from llmrecipes.checkpoint.remote import RemoteCheckpoints
    from llmrecipes.hardware.process import peak_memory

    files = read_manifest(folder).files
    names = own_share(files, rank, RANKS)
    RemoteCheckpoints(url, "warm/up").copies()  # imports what it needs
    pipe.send(0)
    while (asked := pipe.recv()) is not None:
        what, run, target = asked
        before = peak_memory()
        remote = RemoteCheckpoints(url, run)
        if what == "upload":
            remote.upload(folder, names)
            if rank == 0:
                remote.announce(folder, lambda: False)
        else:
            remote.fetch(remote.copies()[STEP], {name: files[name] for name in names}, target)
        pipe.send(peak_memory() - before)


def main(arguments: argparse.Namespace) -> None:
    """Measure all in turns and print the figures."""
    started_on = machine()
    context = multiprocessing.get_context("spawn")
    taken: dict[str, list[float]] = {"upload": [], "aws upload": [], "fetch": [], "aws fetch": []}
    grown = 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        checkpoint = write(folder / "checkpoints", int(arguments.gib * 2**30))
        pipes = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            context.Process(target=rank_main, args=(rank, arguments.url, checkpoint, theirs), daemon=True).start()
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()

        def ranks(what: str, run: str) -> None:
            nonlocal grown
            target = folder / "fetched"
            target.mkdir(exist_ok=True)
            started = time.perf_counter()
            for pipe in pipes:
                pipe.send((what, run, target))
            grown = max(grown, *(pipe.recv() for pipe in pipes))
            taken[what].append(time.perf_counter() - started)
            shutil.rmtree(target)

        def aws(what: str, *paths: str) -> None:
            started = time.perf_counter()
            subprocess.run([arguments.aws, "s3", "cp", "--recursive", "--quiet", *paths], check=True)
            taken[what].append(time.perf_counter() - started)

        for number in range(arguments.rounds):
            run = f"benchmark-{os.getpid()}/{number}"
            there = f"{arguments.url}/aws/{run}"
            ranks("upload", run)
            aws("aws upload", str(checkpoint), there)
            ranks("fetch", run)
            aws("aws fetch", there, str(folder / "by-aws"))
            shutil.rmtree(folder / "by-aws")
        for pipe in pipes:
            pipe.send(None)
    rows: list[list[Any]] = [
        [
            what,
            f"{median(taken[what]):.1f}",
            f"{median(taken[f'aws {what}']):.1f}",
            f"{median(theirs / ours for ours, theirs in zip(taken[what], taken[f'aws {what}'], strict=True)):.2f}",
        ]
        for what in ("upload", "fetch")
    ]
    show(f"{arguments.gib:g} GiB, {arguments.rounds} rounds", ["", "seconds", "of aws s3 cp", "speed beside it"], rows)
    print(f"a rank's memory grew by at most {grown / 2**20:.0f} MiB")
    close({**taken, "grown_bytes": grown}, started_on, arguments.json)


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("url", help="bucket, and folder in it; what is written there is not deleted")
    made.add_argument("--aws", default="aws", help="the command line program of AWS")
    made.add_argument("--gib", type=float, default=2.0)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where files are written")
    main(made.parse_args())
