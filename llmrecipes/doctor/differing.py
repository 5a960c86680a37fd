"""Versions that differ between the nodes of a job."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llmrecipes.doctor.finding import Finding, fail, ok, warn
from llmrecipes.hardware.nics import SYSTEM

CHECK = "software"
MUST_AGREE = ("torch", "megatron-core", "nvidia-nccl", "deepspeed", "transformer-engine")
"""Starts of the names of packages whose other version computes something else, or hangs in a collective."""


def inventory(packages: Mapping[str, str], driver: str | None) -> Finding:
    """The versions of this node, as a finding that the first node compares."""
    named = {**packages, **({"driver": driver} if driver else {}), "Linux": os.uname().release}
    if versions := firmware(SYSTEM):
        named["adapter firmware"] = " and ".join(versions)
    return ok(CHECK, "; ".join(f"{name} = {version}" for name, version in sorted(named.items())))


def firmware(system: Path) -> list[str]:
    """Versions of all adapters; those that cannot be read are left out."""
    found = set()
    for file in system.glob("*/fw_ver"):
        with suppress(OSError, UnicodeDecodeError):
            found.add(file.read_text("ascii").strip())
    return sorted(found)


def differing(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Compare the inventories of nodes: each version with that of most nodes, in a tie with the first node's."""
    nodes = [(each.node, _parse(each.what)) for each in findings if each.check == CHECK and each.status == "ok"]
    for name in sorted({name for _, versions in nodes for name in versions}):
        values = [versions.get(name, "not installed") for _, versions in nodes]
        (usual, count), *others = Counter(values).most_common()
        if not others:
            continue
        verdict = fail if name.startswith(MUST_AGREE) else warn
        for (node, _), value in zip(nodes, values, strict=True):
            if value != usual:
                what = f"{name} {value}, but {usual} on {count} of {len(nodes)} nodes"
                yield replace(verdict(CHECK, what, "the same image or environment on all nodes"), node=node)


def compared(findings: Sequence[Finding]) -> list[Finding]:
    """The findings of all nodes, with those about differences."""
    return [*findings, *differing(findings)]


def _parse(text: str) -> dict[str, str]:
    return dict(item.split(" = ", 1) for item in text.split("; "))
