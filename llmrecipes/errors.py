"""Exit codes and the one error type that users see.

A mistake a user can make is raised as `UserError`; the command line prints it as one message without a traceback
and exits with its code. Anything else that escapes is a defect of this package and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes; outside scripts (Slurm's `RequeueExit`, Kubernetes' `podFailurePolicy`) rely on them."""

    DONE = 0
    BAD_INPUT = 2
    REQUEUE = 75  # EX_TEMPFAIL: the state is saved, run the same command again
    STOP = 93  # do not run again: the same thing would happen
    TERMINATED = 143  # 128 + SIGTERM: asked to stop, but not saved in time; running it again loses some steps


class UserError(Exception):
    """A problem the user can mend.

    Args:
        what: what is wrong, with the offending value.
        where: file, line and key (or path) it was found at.
        rule: the rule it breaks.
        fix: the nearest thing that works.
        code: exit code of the process.
        parts: of an error that names several, the single ones that `what` writes out.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        rule: str = "",
        fix: str = "",
        code: ExitCode = ExitCode.BAD_INPUT,
        parts: Sequence[UserError] = (),
    ) -> None:
        super().__init__(what)
        self.what, self.where, self.rule, self.fix, self.code = what, where, rule, fix, code
        self.parts = tuple(parts)

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.rule:
            lines.append(f"  rule: {self.rule}")
        if self.fix:
            lines.append(f"  fix:  {self.fix}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """The same message for programs (`--json`); `problems` has the single errors of one that names several."""
        several = {"problems": [part.as_dict() for part in self.parts]} if self.parts else {}
        return {
            "error": self.what,
            "where": self.where,
            "rule": self.rule,
            "fix": self.fix,
            "exit_code": int(self.code),
            **several,
        }
