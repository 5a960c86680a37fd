"""nvidia-smi: started and read here alone."""

from __future__ import annotations

import csv
import shutil
import subprocess


def report(*arguments: str, timeout: float) -> str | None:
    """What nvidia-smi prints; None where there is no nvidia-smi.

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
    """Fields of every GPU; none where nvidia-smi is missing or its driver does not answer."""
    try:
        listing = report(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", timeout=timeout)
    except (OSError, subprocess.SubprocessError):
        return []
    return rows(listing or "", fields)


def rows(listing: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """The lines of a CSV listing that have every field."""
    found = csv.reader(listing.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in found if len(row) == len(fields)]
