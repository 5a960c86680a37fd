"""Handing a job to a scheduler: the only module that runs sbatch and kubectl."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from llmrecipes.errors import UserError

TIMEOUT_SECONDS = 120.0


def require_program(program: str, dry_run: str) -> None:
    """UserError if a scheduler's program is not on this machine.

    Args:
        program: its name.
        dry_run: what to do instead.
    """
    if shutil.which(program) is None:
        raise UserError(
            "not on this machine",
            where=program,
            rule="a job is submitted where the scheduler's programs are, such as a login node",
            fix=dry_run,
        )


def submit(command: Sequence[str], text: str = "") -> str:
    """Run a scheduler's command and return what it says, which for `sbatch --parsable` starts with the job's number.

    Args:
        command: its words.
        text: what it reads from its standard input.

    Raises:
        UserError: the program is missing, does not answer, or refuses; then with the scheduler's own words.
    """
    require_program(command[0], "--dry-run prints the command")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False, input=text)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"no answer within {TIMEOUT_SECONDS:g} s", where=command[0]) from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise UserError(f"refused:\n{words}", where=command[0], fix="--dry-run prints the command")
    return done.stdout.strip()
