"""Result of a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """One result.

    Args:
        check: what was checked, `gpu 3` or `clock`.
        status: `fail` stops a run or makes it wrong or far too slow; `warn` may; `skip` could not be checked.
        fix: what to do about it; empty if nothing.
    """

    check: str
    status: Status
    what: str
    fix: str = ""
    node: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    def seen_on(self, host: str) -> Finding:
        """The same finding with this host; one without a node keeps none."""
        return replace(self, node=host) if self.node else self


def findings_of(value: object) -> list[Finding]:
    """The findings that another node has sent.

    Raises:
        ValueError: they are not findings.
    """
    return _adapter().validate_python(value)


@cache
def _adapter() -> TypeAdapter[list[Finding]]:
    from pydantic import TypeAdapter  # only where nodes send findings: `llmrecipes --help` imports this module

    return TypeAdapter(list[Finding])


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


def ignored(connections: int, host: str) -> list[Finding]:
    """Finding of the first node about connections from outside the job; none without such connections."""
    what = f"ignored {connections} malformed or unauthenticated connections"
    fix = "nothing, if it was a port scanner; a node with a different token is listed as not connected"
    return [replace(warn("rendezvous", what, fix), node=host)] if connections else []
