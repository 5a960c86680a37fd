"""Runs nvidia-smi and parses its output; the only module that does."""

from __future__ import annotations

import csv
import shutil
import subprocess


def report(*arguments: str, timeout: float) -> str | None:
    """Output of nvidia-smi; None if there is no nvidia-smi.

    Raises:
        OSError: it could not be started.
        subprocess.SubprocessError: it failed, or did not answer in time.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=timeout, check=True)
    return done.stdout


def query(*fields: str, timeout: float) -> list[dict[str, str]]:
    """Fields of every GPU; none if nvidia-smi is missing or its driver does not answer."""
    try:
        listing = report(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", timeout=timeout)
    except (OSError, subprocess.SubprocessError):
        return []
    return rows(listing or "", fields)


def rows(listing: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """Complete rows of a CSV listing."""
    found = csv.reader(listing.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in found if len(row) == len(fields)]
