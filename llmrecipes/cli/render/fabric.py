"""Output of `bench fabric`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from llmrecipes.bench.fabric.transfers import Kind, percent
from llmrecipes.bench.results import LEAST
from llmrecipes.cli.render.table import aligned

if TYPE_CHECKING:
    from llmrecipes.bench.fabric.transfers import Report, Transfer

SHOWN = 24
"""Transfers and findings that are printed; 16,384 GPUs have tens of thousands."""
KINDS: dict[Kind, str] = {"neighbours": "between neighbours", "halves": "between halves"}


def as_text(report: Report) -> str:
    """Transfers, slowest first if there are many, the median of each kind of pairs, and what is wrong."""
    lines = [f"{report.measured_nodes} of {report.nodes} nodes; RDMA writes of 64 KiB, sends of 8 bytes; main memory"]
    if report.expected_gb_per_s is not None:
        lines[0] += f"; {report.profile}: {report.expected_gb_per_s:g} GB/s a port"
    ordered = sorted(report.transfers, key=lambda each: (not each.error, each.gb_per_s or 0))
    shown = report.transfers if len(report.transfers) <= SHOWN else ordered[:SHOWN]
    if shown:
        lines += _table(report, shown)
    if len(shown) < len(report.transfers):
        lines.append(f"the slowest {len(shown)} of {len(report.transfers)} transfers; all: --json")
    lines += [line for kind, words in KINDS.items() for line in _summary(report, kind, words)]
    for finding in report.findings[:SHOWN]:
        lines.append(f"{finding.status.upper()} {finding.node}: {finding.check}: {finding.what}")
        if finding.fix:
            lines.append(f"     fix: {finding.fix}")
    if len(report.findings) > SHOWN:
        lines.append(f"and {len(report.findings) - SHOWN} more; all: --json")
    failed, warned = (sum(each.status == status for each in report.findings) for status in ("fail", "warn"))
    where = f" on {', '.join(report.bad_nodes[:SHOWN])}" if report.bad_nodes else ""
    lines.append(f"{failed} failed{where}, {warned} warned, of {len(report.transfers)} transfers")
    return "\n".join(lines)


def _table(report: Report, shown: list[Transfer]) -> list[str]:
    head = ["from", "port", "to", "port", "GB/s", "of profile", "latency µs", "99 %", ""]
    rows = [head]
    for each in shown:
        share = report.share(each)
        rows.append([
            each.sender, each.sender_port, each.receiver, each.receiver_port,
            "failed" if each.gb_per_s is None else f"{each.gb_per_s:.3g}",
            "" if share is None else percent(share),
            "" if each.latency_us is None else f"{each.latency_us:.2f}",
            "" if each.latency_99_us is None else f"{each.latency_99_us:.2f}",
            each.error,
        ])  # fmt: skip
    return aligned(rows, right=(4, 5, 6, 7))


def _summary(report: Report, kind: Kind, words: str) -> list[str]:
    speeds = [each.gb_per_s for each in report.transfers if each.kind == kind and each.gb_per_s is not None]
    if not speeds:
        return []
    middle = statistics.median(speeds)
    line = f"{words}: {middle:.3g} GB/s in the median, {min(speeds):.3g} to {max(speeds):.3g}"
    if report.expected_gb_per_s is None:
        return [line]
    short = sum(speed < LEAST * report.expected_gb_per_s for speed in speeds)
    return [f"{line}; {short} of {len(speeds)} below {LEAST:.0%} of {report.profile}"]
