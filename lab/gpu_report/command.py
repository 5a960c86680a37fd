"""`gpu-report`: parsing and printing only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmrecipes.errors import UserError


def gpu_report(
    stages: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STAGE]...",
            help="Run these stages (right, fast, big, state, fp8) or items of them, in this order; default: all.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Write report.jsonl, .md and .html to this folder.")
    ] = Path("gpu-report"),
    budget: Annotated[
        float, typer.Option("--budget", metavar="S", min=1, help="Skip what would not finish within S seconds.")
    ] = 540,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="cpu|cuda",
            help="Run on this device, cuda or cpu (with tiny models); default: a GPU.",
        ),
    ] = None,
) -> int:
    """Compare one GPU with a CPU's results and the plan, in stages.

    Results are written as they are measured; repeat the command to continue where the budget ended.
    """
    from lab.gpu_report.items import gpu_report

    if device not in (None, "cpu", "cuda"):
        raise UserError(f"{device!r}", where="--device", rule="must be cpu or cuda")
    rows = gpu_report(stages or [], out, budget, device, print)
    off, skipped = sum(row.off for row in rows), sum(row.status == "skipped" for row in rows)
    print(f"{len(rows)} rows, {off} flagged, {skipped} skipped: {out / 'report.html'}")
    return 1 if any(row.status == "failed" or (row.limit is not None and row.off) for row in rows) else 0
