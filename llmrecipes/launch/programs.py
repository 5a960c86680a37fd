"""Runs the schedulers' programs (sbatch, squeue, kubectl ...); the only module that does."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from llmrecipes.errors import UserError

TIMEOUT_SECONDS = 120.0


class SchedulerUnavailable(UserError):
    """A query without an answer; a retry may succeed."""


def require_program(program: str, fix: str) -> None:
    """UserError if a scheduler's program is not on this machine.

    Args:
        program: its name.
        fix: what to do instead.
    """
    if shutil.which(program) is None:
        raise UserError(
            "not on this machine",
            where=program,
            rule="jobs can only be managed where the scheduler's programs are installed, such as on a login node",
            fix=fix,
        )


def tell(command: Sequence[str], text: str = "", fix: str = "") -> str:
    """Run a scheduler command, and return its output.

    Args:
        command: program and arguments.
        text: standard input.
        fix: for the error message if it fails.

    Raises:
        UserError: the program is missing, does not answer, or fails; then with the scheduler's message.
    """
    require_program(command[0], "run it on a login node")
    code, answer, words = run(command, text)
    if code:
        raise UserError(f"failed:\n{words}", where=command[0], fix=fix)
    return answer.strip()


def ask(command: Sequence[str]) -> str:
    """Query a scheduler, and return its output.

    Raises:
        SchedulerUnavailable: it does not answer.
        UserError: the program is missing.
    """
    require_program(command[0], "run it on a login node")
    code, answer, words = run(command)
    if code:
        raise SchedulerUnavailable(f"exit code {code}:\n{words}", where=command[0])
    return answer


def run(command: Sequence[str], text: str = "", seconds: float = TIMEOUT_SECONDS) -> tuple[int, str, str]:
    """Exit code, output, and the message for the user if the code is not 0.

    Raises:
        SchedulerUnavailable: the command timed out.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, input=text)
    except subprocess.TimeoutExpired as error:
        raise SchedulerUnavailable(f"no answer within {seconds:g} s", where=command[0]) from error
    words = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
    return done.returncode, done.stdout, words
