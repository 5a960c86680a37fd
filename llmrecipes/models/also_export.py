"""The process that writes the Hugging Face folder of one checkpoint while its run trains (`checkpoint.also_export`).

It prints one line of JSON: what was written, or the error. Folders whose checkpoint is gone, or was saved again since,
are deleted, so that they are kept as long as checkpoints are.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.parent import end_with_parent
from llmrecipes.rundir import Run

NICENESS = 10
"""The loaders of the ranks come first."""


def main(run_dir: str, step: str, data_dir: str, parent: str) -> int:
    """Export one checkpoint; the exit code."""
    end_with_parent(int(parent))
    os.nice(NICENESS)
    run = Run(Path(run_dir))
    number = int(step)
    try:
        tidy(run)
        from llmrecipes.models.export import export
        from llmrecipes.models.export_options import ExportOptions

        options = ExportOptions(merge_adapter=run.recipe().lora is not None)
        out = run.exported(number)
        if out.exists():  # of a checkpoint that was saved again at the same time of the clock
            _delete(out)
        exported = export(f"{run.path}@{number}", out, run.runs_dir, Path(data_dir), options)
        tidy(run)
    except UserError as error:
        print(json.dumps({"error": ": ".join(filter(None, (error.where, error.what)))}))
        return int(error.code)
    print(json.dumps({"path": exported.path, "seconds": exported.seconds, "bytes": exported.bytes}))
    return 0


def tidy(run: Run) -> None:
    """Delete the exports of checkpoints that are gone, and what a killed process has left."""
    folder = run.exports
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        steps = path.name.removeprefix("step-")
        if not (path.name.startswith("step-") and steps.isdecimal()):
            if path.name.startswith("."):
                shutil.rmtree(path, ignore_errors=True)
        elif not run.is_exported(int(steps)):
            _delete(path)


def _delete(path: Path) -> None:
    """Under another name first: no half of a folder looks like a model."""
    hidden = path.with_name(f".{path.name}.deleted")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
