"""The process of a dry run: patches of megatron-core for tensors without data hold for a whole process."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path

from llmrecipes.console import setup_logging
from llmrecipes.dryrun.spec import DryRunSpec, report_name
from llmrecipes.faults.signals import end_with_parent
from llmrecipes.redact import guard_streams


def main() -> None:
    """Run the ranks of a spec one after another: `python -m llmrecipes.dryrun.worker <spec.json> <parent>`.

    Each report is written beside the spec as `rank-<n>.json` when it is ready.
    """
    guard_streams()
    end_with_parent(int(sys.argv[2]))
    setup_logging()
    # Every call of a library passes through the recorder, which is blamed for their warnings.
    warnings.filterwarnings("ignore", module=r"llmrecipes\.dryrun\.recorder")
    path = Path(sys.argv[1])
    spec = DryRunSpec.model_validate_json(path.read_text("utf-8"))
    from llmrecipes.dryrun.simulation import dry_run

    for number, rank in enumerate(spec.ranks, start=1):
        which = f"rank {rank}" + (f" ({number} of {len(spec.ranks)})" if len(spec.ranks) > 1 else "")
        report = dry_run(spec, rank, partial(_say, which))
        (path.parent / report_name(rank)).write_text(report.model_dump_json() + "\n", "utf-8")


def _say(which: str, line: str) -> None:
    print(f"{which}: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
