"""How long it takes to plan a run for a large cluster and to render its sbatch command: 2,000 nodes of 8 GPUs.

    python -m benchmarks.render_slurm --json render_slurm.json

`in the process` is loading recipe and profile, plan, check and rendering; `the command` is `llmrecipes submit
--dry-run` from its start to its end.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import ROOT, close, machine, parser, show
from llmrecipes.launch.slurm.sbatch import as_text, command
from llmrecipes.launch.slurm.slurm_options import SlurmOptions, SlurmRequest
from llmrecipes.workflow.submit import plan_for

NODES, CLUSTER, RECIPE = 2000, "h100-ib", ["gpt-7b", "train.global_batch_size=16000"]
TIMES = 10


def in_process() -> float:
    """Seconds of one rendering."""
    started = time.perf_counter()
    planned = plan_for(RECIPE[0], RECIPE[1:], CLUSTER, NODES)
    runs = Path("/shared/runs")
    request = SlurmRequest(planned.asked, CLUSTER, NODES, "run-1", runs, Path("/shared/data"), runs / "gpt-7b/run-1")
    text = as_text(command(request, planned.plan, planned.profile, SlurmOptions(), Path("slurm/train.sbatch")))
    seconds = time.perf_counter() - started
    assert planned.plan.world_size == 16000 and "--nodes=2000" in text
    return seconds


def whole_command() -> float:
    """Seconds of one `llmrecipes submit --dry-run`."""
    words = ["submit", *RECIPE, "--cluster", CLUSTER, "--nodes", str(NODES), "--dry-run"]
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "llmrecipes.cli", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Print one table."""
    chosen = parser(__doc__).parse_args()
    started_on = machine()
    figures = {
        "in the process": [in_process() for _ in range(TIMES)],
        "the command": [whole_command() for _ in range(TIMES)],
    }
    rows = [
        [name, f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f}-{max(seconds):.3f}", len(seconds)]
        for name, seconds in figures.items()
    ]
    show("seconds for 2,000 nodes × 8 GPUs", ("", "median", "range", "times"), rows)
    close(figures, started_on, chosen.json)


if __name__ == "__main__":
    main()
