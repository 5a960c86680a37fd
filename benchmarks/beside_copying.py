"""`llmrecipes import` and `export` of a folder beside copying and hashing it: whole commands, in turns, as ratios.

    python -m benchmarks.beside_copying [--layers 7] [--rounds 5] [--folder DIR]

The yardstick is `cp`, then `sha256sum` and `sync` of the copy. Each is a new process; its time by the clock and of the
processor (user and system, with the processes that it starts), and the largest resident size of one process. The folder
has the shape of gpt-1b with fewer layers, in bf16: 0.91 GB with 7, 2.63 GB with all 24. It and four copies are deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import ROOT, close, machine, parser, show

RECIPE = "gpt-1b"
COPY = "cp, sha256sum, sync"
PROGRAM = f"{shlex.quote(sys.executable)} -m llmrecipes"
COMMANDS = {
    COPY: "cp -r model copied && sha256sum copied/* >hashes && sync copied/*",
    "import": f"{PROGRAM} import model data.tokenizer.type=bpe --runs-dir runs --run-id made --name model",
    "export": f"{PROGRAM} export model/made --runs-dir runs --no-tokenizer --out exported",
}
"""In this order, in a folder that has `model`."""
WRITTEN = ("copied", "runs", "exported")


def write_model(folder: Path, layers: int) -> int:
    """A folder for `import`, with values like those of a trained model; returns its bytes."""
    import torch

    from benchmarks.huggingface import MadeWeights
    from llmrecipes.hf.family import config_of, family_of
    from llmrecipes.hf.safetensors import write
    from llmrecipes.hf.weights import AsHuggingFace
    from llmrecipes.recipe.load import load

    class Drawn(MadeWeights):
        def read(self, name: str) -> Any:
            return torch.empty(self.shape(name), dtype=torch.bfloat16).normal_(std=0.02)

    changes = [f"model.num_layers={layers}"]
    model = load(RECIPE, changes).recipe.model
    family = family_of(model)
    folder.mkdir()
    written = write(AsHuggingFace(Drawn(RECIPE, changes), family, model), config_of(family, model), folder)
    return written.bytes


def run(command: str, folder: Path) -> dict[str, float]:
    """Run a command of a shell, and wait for it alone."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["bash", "-c", command], cwd=folder, stdout=log, stderr=log, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError((folder / "log").read_text()[-2000:])
    return {"seconds": seconds, "processor": usage.ru_utime + usage.ru_stime, "peak": usage.ru_maxrss * 1024}


def main(arguments: argparse.Namespace) -> None:
    """Measure all in turns and print the figures."""
    started_on = machine()
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        size = json.loads(
            subprocess.check_output(
                [sys.executable, "-m", "benchmarks.beside_copying", "--make", name, "--layers", str(arguments.layers)]
            )
        )
        for _ in range(arguments.rounds):
            for written in WRITTEN:
                shutil.rmtree(folder / written, ignore_errors=True)
            for what, command in COMMANDS.items():
                taken[what].append(run(command, folder))
    rows = []
    for what, each in taken.items():
        ratios = [
            median(one[key] / copy[key] for one, copy in zip(each, taken[COPY], strict=True))
            for key in ("seconds", "processor")
        ]
        low = [min(one[key] for one in each) for key in ("seconds", "processor")]
        peak = max(one["peak"] for one in each)
        rows.append(
            [
                what,
                *(f"{value:.2f}" for value in low),
                *(f"{value:.2f}" for value in ratios),
                f"{peak / 2**30:.2f}",
                f"{peak / size:.2f}",
            ]
        )
    columns = ["", "seconds, least", "processor, least", "ratio", "of processor", "peak, GiB", "of the folder"]
    show(f"{size / 2**30:.2f} GiB, {arguments.rounds} rounds", columns, rows)
    close({"bytes": size, **taken}, started_on, arguments.json)


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where files are written")
    made.add_argument("--layers", type=int, default=7)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    given = made.parse_args()
    if given.make is not None:
        print(write_model(given.make / "model", given.layers))
    else:
        main(given)
