"""Exit codes and the one error type that users see.

A mistake a user can make is raised as `UserError`; the command line prints it as one message without a traceback
and exits with its code. Any other exception is a bug in this package and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial

from llmrecipes.redact import redact, redacted


class ExitCode(IntEnum):
    """Process exit codes; Slurm's `RequeueExit` and Kubernetes' `podFailurePolicy` rely on them."""

    DONE = 0
    BAD_INPUT = 2
    REQUEUE = 75  # EX_TEMPFAIL: the state is saved, run the same command again
    STOP = 93  # do not run again: it would fail the same way
    TERMINATED = 143  # 128 + SIGTERM: told to stop, but not saved in time; a rerun repeats some steps


class UserError(Exception):
    """A problem the user can fix.

    Args:
        what: what is wrong, with the offending value.
        where: file, line and key (or path) where it was found.
        rule: the rule it breaks.
        fix: the nearest thing that works.
        code: exit code of the process.
        parts: the individual errors, if `what` lists several.
        again: the same command may get past it, so what it has done so far is worth keeping.

    As text or JSON it is redacted: messages quote values of users and of libraries.
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
        again: bool = False,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.rule = rule
        self.fix = fix
        self.code = code
        self.parts = tuple(parts)
        self.again = again

    def __reduce__(self) -> tuple[Callable[[str], UserError], tuple[str]]:
        """Between processes: a subclass, whose own arguments are others, arrives as a UserError."""
        made = partial(UserError, where=self.where, rule=self.rule, fix=self.fix, code=self.code, parts=self.parts)
        return partial(made, again=self.again), (self.what,)

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.rule:
            lines.append(f"  rule: {self.rule}")
        if self.fix:
            lines.append(f"  fix:  {self.fix}")
        return redact("\n".join(lines))

    def as_dict(self) -> dict[str, object]:
        """The same message for programs (`--json`); `problems` has the individual errors if there are several."""
        several = {"problems": [part.as_dict() for part in self.parts]} if self.parts else {}
        return {
            **redacted({"error": self.what, "where": self.where, "rule": self.rule, "fix": self.fix}),
            "exit_code": int(self.code),
            **several,
        }
