"""Output of `dryrun`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmrecipes.cli.render.table import aligned
from llmrecipes.console import duration
from llmrecipes.dryrun.spec import PARTS, RankReport, Resume
from llmrecipes.plan.check import gib
from llmrecipes.plan.derive import Plan
from llmrecipes.units import KIB, MIB

MOST_MODULES = 8
NOT_SHOWN = {
    "cuda": (
        "as on a GPU: flash attention, a ring under context parallelism, whole down-projections of latent attention, "
        "one-byte dropout masks, fused RMSNorm. Not shown: fragmentation, workspaces, NCCL's buffers, CUDA's context."
    ),
    "cpu": "not shown: the interpreter, the allocator's overhead and the data loader.",
}
"""What tensors without data cannot show, by device."""


def as_text(plan: Plan, reports: Sequence[RankReport], folder: Path) -> str:
    """Each rank: memory by part and module, traffic, waits, save; then what no dry run shows."""
    lines = [line for report in reports for line in (*_of_rank(report), "")]
    return "\n".join([*lines, NOT_SHOWN[plan.device], f"pictures: {folder}"])


def _of_rank(report: RankReport) -> list[str]:
    took = f"{report.operations:,} operations in {duration(report.seconds)}, {duration(report.build_seconds)} to build"
    lines = [f"{report.recipe}: rank {report.rank} of {report.world_size}, stage {report.stage}; {took}", ""]
    lines += aligned([("memory at the peak", "dry run", "planned"), *_memory(report)], right=(1, 2))
    if report.modules:
        rows = [(share.module or "outside of modules", share.part, _size(share.bytes)) for share in report.modules]
        lines += ["", *aligned([("module at the peak", "", ""), *rows[:MOST_MODULES]], right=(2,))]
    if report.traffic:
        traffic = [
            (each.group, each.op, f"{each.calls:,}", _size(each.bytes), str(each.ranks), _where(each.node_local))
            for each in report.traffic
        ]
        header = ("group", "collective", "calls", "bytes", "ranks", "")
        lines += ["", *aligned([header, *traffic], right=(2, 3, 4))]
    places = ", ".join(f"{place} × {number:,}" for place, number in report.waits.items())
    lines += ["", f"host waits for the device in a step: {places or 'none'}"]
    save, resume = report.save, report.resume
    lines += [
        f"a save holds {_size(save.held_bytes)} of host memory on this rank, and writes {_size(save.written_bytes)}",
        f"a resume holds {_size(resume.held_bytes)}, and reads {_size(resume.read_bytes)}{_sent(resume)}",
    ]
    return lines


def _sent(resume: Resume) -> str:
    sent = ", ".join(f"{each.op} of {_size(each.bytes)} over {each.ranks} ranks" for each in resume.traffic)
    return f", then {sent}" if sent else ""


def _memory(report: RankReport) -> list[tuple[str, str, str]]:
    rows = [(part, _size(report.memory.get(part, 0)), _planned(report, part)) for part in PARTS]
    return [*rows, ("total", gib(sum(report.memory.values())), gib(sum(report.planned.values())))]


def _planned(report: RankReport, part: str) -> str:
    return _size(report.planned[part]) if part in report.planned else ""


def _size(size: int) -> str:
    """Bytes with a unit that shows them."""
    if size >= MIB:
        return gib(size)
    return f"{size / KIB:.0f} KiB" if size >= KIB else f"{size} B"


def _where(node_local: bool) -> str:
    return "on the node" if node_local else "between nodes"
