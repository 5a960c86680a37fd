"""Programs of schedulers (sbatch, squeue, kubectl ...): the only module that runs them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from llmrecipes.errors import UserError

TIMEOUT_SECONDS = 120.0


class SchedulerUnavailable(UserError):
    """A question that got no answer; it may get one later."""


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
            rule="a job is submitted, watched and cancelled where the scheduler's programs are, such as a login node",
            fix=fix,
        )


def tell(command: Sequence[str], text: str = "", fix: str = "") -> str:
    """Tell a scheduler something, and return what it says.

    Args:
        command: its words.
        text: what it reads from its standard input.
        fix: what to try where it refuses.

    Raises:
        UserError: the program is missing, does not answer, or refuses; then with the scheduler's own words.
    """
    require_program(command[0], "run it on a login node")
    code, answer, words = run(command, text)
    if code:
        raise UserError(f"refused:\n{words}", where=command[0], fix=fix)
    return answer.strip()


def ask(command: Sequence[str]) -> str:
    """Ask a scheduler something, and return the answer.

    Raises:
        SchedulerUnavailable: it has none.
        UserError: the program is missing.
    """
    require_program(command[0], "run it on a login node")
    code, answer, words = run(command)
    if code:
        raise SchedulerUnavailable(f"exit code {code}:\n{words}", where=command[0])
    return answer


def run(command: Sequence[str], text: str = "") -> tuple[int, str, str]:
    """Exit code, output, and what to tell the user where the code is not 0.

    Raises:
        SchedulerUnavailable: there is no answer in time.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False, input=text)
    except subprocess.TimeoutExpired as error:
        raise SchedulerUnavailable(f"no answer within {TIMEOUT_SECONDS:g} s", where=command[0]) from error
    words = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
    return done.returncode, done.stdout, words
