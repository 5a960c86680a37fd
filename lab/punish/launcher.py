"""`llmrecipes train` whose ranks are those of `punish.worker`, for one run: `python -m <module> <options as JSON>`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmrecipes.console import setup_logging
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.signals import StoppedEarly, early_signals
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.recipe.load import load
from llmrecipes.redact import guard_streams
from llmrecipes.workflow import train
from llmrecipes.workflow.run import Paths, TrainOptions

WORKER, PUNISHED = "llmrecipes.train.worker", "lab.punish.worker"


def main(options: dict[str, Any]) -> int:
    """Train.

    Args:
        options: `recipe`, a file; `nproc`, `run_id`, `runs_dir`, `data_dir` and `restarts`.
    """
    ordinary = train.run_ranks

    def run_ranks(module: str, arguments: Sequence[str], **others: Any) -> int:
        if module != WORKER:
            raise AssertionError(f"ranks run {module}, so faults cannot be injected")
        return ordinary(PUNISHED, arguments, **others)

    train.run_ranks = run_ranks
    started = RunOptions(sample=False, max_restarts=options["restarts"])
    try:
        with early_signals():
            return train.train(
                load(options["recipe"]).recipe,
                Paths(Path(options["runs_dir"]), Path(options["data_dir"])),
                TrainOptions(nproc=options["nproc"], run_id=options["run_id"], run=started),
                lambda line: print(line, flush=True),
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return int(error.code)
    except StoppedEarly:
        return int(ExitCode.REQUEUE)


if __name__ == "__main__":
    guard_streams()
    setup_logging()
    sys.exit(main(json.loads(sys.argv[1])))
