"""Output of `bench collectives`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrecipes.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from llmrecipes.bench.compare import Comparison
    from llmrecipes.bench.spec import Collectives


def bandwidths(found: Collectives) -> str:
    """Bus bandwidth: a line for each operation and group, a column for each size."""
    sizes = sorted({row.bytes for row in found.rows})
    lines = [f"{found.world_size} ranks over {found.backend}; bus bandwidth in GB/s"]
    if not found.rows:
        return f"{lines[0]}: no group has more than one rank; try --nproc 2"
    lines.append(f"{'operation':15} {'group':9} ranks" + "".join(f"{_size(size):>10}" for size in sizes))
    rows: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in found.rows:
        rows.setdefault((row.operation, row.group, row.ranks), {})[row.bytes] = row.bus_gb_per_s
    for (operation, group, ranks), speeds in sorted(rows.items(), key=lambda each: each[0][1]):
        cells = "".join(f"{speeds[size]:10.3f}" if size in speeds else f"{'':10}" for size in sizes)
        lines.append(f"{operation:15} {group:9} {ranks:5}{cells}")
    return "\n".join(lines)


def comparison(name: str, compared: list[Comparison]) -> str:
    """Results below those of the profile, one line each."""
    from llmrecipes.bench.compare import LEAST, LINK_BYTES

    if not compared:
        return (
            f"nothing to compare with {name}: no such row in its measured, and links count from {_size(LINK_BYTES)} on"
        )
    short = [f"warning: {each.as_text()}" for each in compared if not each.ok]
    summary = f"{len(compared) - len(short)} of {len(compared)} have at least {LEAST:.0%} of what {name} says"
    return "\n".join([*short, summary])


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"
