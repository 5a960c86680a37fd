"""NVIDIA's GPUs: runs nvidia-smi and parses its output, which no other module does."""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path

INFOROM = 14
"""Exit code after a complete report, if a GPU's infoROM is corrupted (nvidia-smi's manual page)."""
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_VENDOR, _DISPLAY = "0x10de", "0x03"
"""NVIDIA, and the first byte of the class of graphics cards and accelerators without outputs (PCI ID database)."""


def pci_address(bus_id: str) -> str:
    """A PCI address as in /sys: `0000:1b:00.0` of nvidia-smi's `00000000:1B:00.0`."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def report(*arguments: str, timeout: float) -> str | None:
    """Output of nvidia-smi; None if there is no nvidia-smi.

    Raises:
        OSError: it could not be started.
        subprocess.SubprocessError: it failed, or did not answer in time.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, *arguments]
    started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        said, wrong = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # Not waited for: in a driver that hangs it does not even die of SIGKILL.
        started.kill()
        raise
    # A field may have any bytes, whatever the locale.
    output = said.decode("utf-8", "replace")
    errors = wrong.decode("utf-8", "replace")
    if started.returncode not in (0, INFOROM):
        raise subprocess.CalledProcessError(started.returncode, command, output, errors)
    return output


def driver_fault(timeout: float) -> str | None:
    """nvidia-smi's message on a machine with a GPU whose driver does not answer; None on any other machine."""
    try:
        report("-L", timeout=timeout)
    except subprocess.CalledProcessError as error:
        said = " ".join(f"{error.stdout or ''} {error.stderr or ''}".split())
    except (OSError, subprocess.SubprocessError) as error:
        said = f"nvidia-smi: {error}"
    else:
        return None
    # A login node may have the driver's programs, but no GPU.
    return said if any(map(_is_gpu, _PCI_DEVICES.glob("*"))) else None


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text("ascii").strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == _VENDOR and kind.startswith(_DISPLAY)


def query(*fields: str, timeout: float) -> list[dict[str, str]]:
    """Fields of every GPU; none if nvidia-smi is missing or its driver does not answer."""
    try:
        listing = report(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", timeout=timeout)
    except (OSError, subprocess.SubprocessError):
        return []
    return rows(listing or "", fields)


def rows(listing: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """Complete rows of a CSV listing."""
    lines = csv.reader(listing.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in lines if len(row) == len(fields)]
