"""Output of `layout`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llmrecipes.cli.render.table import aligned
from llmrecipes.plan.layout import Layout
from llmrecipes.plan.placement import Placement, Range, groups

MOST_ROWS = 64
MOST_GROUPS = 8
GROUP_NAMES = {
    "tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data", "ep": "expert", "expert_tp": "expert-tensor",
    "expert_dp": "expert-data",
}  # fmt: skip


def as_dict(laid_out: Layout, ranks: Sequence[Placement]) -> dict[str, Any]:
    """Output of `layout --json`."""
    return {
        "layout": asdict(laid_out),
        "groups": groups(laid_out),
        "ranks": [rank.as_dict() for rank in ranks],
    }


def as_text(laid_out: Layout, ranks: Sequence[Placement]) -> str:
    """A line for each rank with what differs between ranks, then what they have in common, and the process groups.

    For a large world only the first data-parallel slice is shown: the others hold the same parts of the model.
    """
    shown = ranks if len(ranks) <= MOST_ROWS else [rank for rank in ranks if rank.data == 0]
    cells = [_cells(rank) for rank in shown]
    differ = [name for name in cells[0] if name == "rank" or any(row[name] != cells[0][name] for row in cells)]
    alike = [f"{name} {value}" for name, value in cells[0].items() if name not in differ and value]
    rows = [differ, *([row[name] for name in differ] for row in cells)]
    lines = aligned(rows)
    every = "every rank" if len(shown) == len(ranks) else "each of these ranks"
    lines += ["", *([f"{every}: {'; '.join(alike)}"] if alike else [])]
    if len(shown) == len(ranks):
        return "\n".join(lines + _groups(laid_out, ranks)).rstrip()
    slices = f"data-parallel slice 0 of {laid_out.data_parallel_size}"
    return "\n".join([*lines, f"{len(shown)} of {len(ranks)} ranks are shown: {slices}; --json has all"])


def _groups(laid_out: Layout, ranks: Sequence[Placement]) -> list[str]:
    found, has_experts = groups(laid_out), ranks[0].experts != (0, 0)
    lines = []
    for name, words in GROUP_NAMES.items():
        if len(found[name][0]) > 1 and (has_experts or not name.startswith("e")):
            written = [f"({' '.join(map(str, group))})" for group in found[name]]
            rest = f" … {len(written)} groups" if len(written) > MOST_GROUPS else ""
            lines.append(f"{words}-parallel: {' '.join(written[:MOST_GROUPS])}{rest}")
    return lines


def _cells(rank: Placement) -> dict[str, str]:
    """One row of the table, by column; empty if the rank has no such part."""
    ends = [name for name, has in (("embedding", rank.has_embedding), ("output", rank.has_output)) if has]
    split = rank.residual_tokens != rank.tokens
    return {
        "rank": str(rank.rank),
        "stage": str(rank.stage),
        "layers": ", ".join(_words(part) for part in rank.layers if part[0] < part[1]),
        "vocabulary": f"{_words(rank.vocabulary)} ({' and '.join(ends)})" if ends else "",
        "heads": _words(rank.query_heads),
        "experts": _words(rank.experts),
        "tokens": ", ".join(map(_words, rank.tokens)),
        "residual stream": ", ".join(map(_words, rank.residual_tokens)) if split else "",
        "sequences": _listed(rank.sequences),
    }


def _words(numbers: Range) -> str:
    first, end = numbers
    if first >= end:
        return ""
    return str(first) if end == first + 1 else f"{first}-{end - 1}"


def _listed(parts: Sequence[Range], most: int = 2) -> str:
    words = ", ".join(_words(part) for part in parts[:most])
    return words if len(parts) <= most else f"{words}, … ({len(parts)} micro-batches)"
