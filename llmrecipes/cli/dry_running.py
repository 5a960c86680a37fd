"""`dryrun`: parsing and printing only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrecipes.cli.shared_options import (
    NO_OVERRIDES,
    RUNS,
    ClusterOption,
    JsonOption,
    NodesOption,
    OverridesArgument,
    RecipeArgument,
    RunsOption,
    StageOption,
)
from llmrecipes.cli.tables import TextTable, show
from llmrecipes.units import KIB, MIB, gib

if TYPE_CHECKING:
    from llmrecipes.dryrun.dry_run_spec import RankReport, Resume
    from llmrecipes.plan.derive import Plan

MOST_MODULES = 8
NOT_SHOWN = {
    "cuda": (
        "as on a GPU: flash attention, a ring with context parallelism, full down-projections of latent attention, "
        "one-byte dropout masks, fused RMSNorm. Not shown: fragmentation, workspaces, NCCL's buffers, CUDA's context."
    ),
    "cpu": "not shown: the interpreter, the allocator's overhead and the data loader.",
}
"""What tensors without data cannot show, by device."""


def dryrun(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    cluster_name: ClusterOption = None,
    nodes: NodesOption = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="R", help="Measure this rank; default: 0.")] = None,
    stages: Annotated[bool, typer.Option("--stages", help="Measure the first rank of each pipeline stage.")] = False,
    stage: StageOption = None,
    skew: Annotated[
        float,
        typer.Option("--skew", metavar="F", help="Route F times the even share of tokens to the rank's first expert."),
    ] = 1.0,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Measure one rank of a run of any size, without GPUs.

    Runs a step of the real model, schedule, optimizer and save on tensors without data, and reports memory by part and
    module, traffic, host waits and the order of passes.
    """
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.dryrun import dry_run

    result = dry_run(
        load(recipe, overrides).recipe,
        runs_dir,
        lambda line: print(line, file=sys.stderr),
        cluster=cluster_name,
        nodes=nodes,
        rank=rank,
        stages=stages,
        stage=stage,
        skew=skew,
    )
    if as_json:
        reports = [report.contract() for report in result.reports]
        print(json.dumps(reports if stages else reports[0], indent=2))
    else:
        show(*lines(result.plan, result.reports, result.folder))


def lines(plan: Plan, reports: Sequence[RankReport], folder: Path) -> Iterator[str | TextTable]:
    """Per rank: memory by part and module, traffic, waits, save; then the limits of a dry run."""
    for report in reports:
        yield from _of_rank(report)
        yield ""
    yield NOT_SHOWN[plan.device]
    yield f"pictures: {folder}"


def _of_rank(report: RankReport) -> Iterator[str | TextTable]:
    from llmrecipes.console import duration

    took = f"{report.operations:,} operations in {duration(report.seconds)}, {duration(report.build_seconds)} to build"
    yield f"{report.recipe}: rank {report.rank} of {report.world_size}, stage {report.stage}; {took}"
    yield ""
    yield TextTable([("memory at the peak", "dry run", "planned"), *_memory(report)], right=(1, 2))
    if report.modules:
        rows = [(share.module or "outside of modules", share.part, _size(share.bytes)) for share in report.modules]
        yield ""
        yield TextTable([("module at the peak", "", ""), *rows[:MOST_MODULES]], right=(2,))
    if report.traffic:
        traffic = [
            (
                collective.group,
                collective.op,
                f"{collective.calls:,}",
                _size(collective.bytes),
                str(collective.ranks),
                _where(collective.node_local),
            )
            for collective in report.traffic
        ]
        header = ("group", "collective", "calls", "bytes", "ranks", "")
        yield ""
        yield TextTable([header, *traffic], right=(2, 3, 4))
    places = ", ".join(f"{place} × {number:,}" for place, number in report.waits.items())
    yield ""
    yield f"host waits for the device in a step: {places or 'none'}"
    save, resume = report.save, report.resume
    yield f"a save holds {_size(save.held_bytes)} of host memory on this rank, and writes {_size(save.written_bytes)}"
    yield f"a resume holds {_size(resume.held_bytes)}, and reads {_size(resume.read_bytes)}{_sent(resume)}"


def _sent(resume: Resume) -> str:
    sent = ", ".join(
        f"{collective.op} of {_size(collective.bytes)} over {collective.ranks} ranks" for collective in resume.traffic
    )
    return f", then {sent}" if sent else ""


def _memory(report: RankReport) -> list[tuple[str, str, str]]:
    from llmrecipes.dryrun.dry_run_spec import PARTS

    rows = [(part, _size(report.memory.get(part, 0)), _planned(report, part)) for part in PARTS]
    return [*rows, ("total", gib(sum(report.memory.values())), gib(sum(report.planned.values())))]


def _planned(report: RankReport, part: str) -> str:
    return _size(report.planned[part]) if part in report.planned else ""


def _size(size: int) -> str:
    """Bytes with a fitting unit."""
    if size >= MIB:
        return gib(size)
    return f"{size / KIB:.0f} KiB" if size >= KIB else f"{size} B"


def _where(node_local: bool) -> str:
    return "on the node" if node_local else "between nodes"
