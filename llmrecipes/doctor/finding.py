"""Result of a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """One result.

    Args:
        check: what was checked, `gpu 3` or `clock`.
        status: `fail` stops a run or makes it wrong or far too slow; `warn` may; `skip` could not be checked.
        what: what was found, with the value.
        fix: what to do about it; empty if nothing.
        node: host on which it was found.
    """

    check: str
    status: Status
    what: str
    fix: str = ""
    node: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def ok(check: str, what: str) -> Finding:
    """Nothing wrong."""
    return Finding(check, "ok", what)


def warn(check: str, what: str, fix: str) -> Finding:
    """Something that may be wrong."""
    return Finding(check, "warn", what, fix)


def fail(check: str, what: str, fix: str) -> Finding:
    """Something that is wrong."""
    return Finding(check, "fail", what, fix)


def skip(check: str, what: str) -> Finding:
    """Something that could not be checked."""
    return Finding(check, "skip", what)


def bad_nodes(findings: Iterable[Finding]) -> list[str]:
    """Nodes with a failure, sorted."""
    return sorted({finding.node for finding in findings if finding.status == "fail" and finding.node})
