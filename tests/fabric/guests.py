"""Two emulated machines with soft-RoCE adapters, and a cable between them that can be pulled.

QEMU without KVM boots Debian's kernel with `rdma_rxe`: real verbs and a real sysfs, at the speed of an emulation.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from llmrecipes.launch.rendezvous import TOKEN

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "debootstrap": "debootstrap", "busybox": "busybox-static"}
"""Programs, and the Debian packages that have them."""
PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NETWORKS = ("nodes", "fabric")
"""The one that host names resolve to, and the adapters'."""
GUESTS = (1, 2)
BUILD_SECONDS, BOOT_SECONDS = 1200, 300
READY = "ready"


def missing() -> list[str]:
    """Debian packages that are not installed."""
    return sorted({package for program, package in PROGRAMS.items() if shutil.which(program, path=PATHS) is None})


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float


class Command:
    """A command that runs in a guest."""

    def __init__(self, base: Path, guest: Guest) -> None:
        self._base, self._guest, self._started = base, guest, time.monotonic()

    def end(self, seconds: float) -> Ended:
        """Wait for its end, `seconds` at most."""
        self._guest.until(lambda: self._file("rc").exists(), "a command has not ended", seconds)
        texts = [self._file(name).read_text("utf-8", "replace") for name in ("rc", "out", "err")]
        return Ended(int(texts[0]), texts[1], texts[2], time.monotonic() - self._started)

    def _file(self, name: str) -> Path:
        return self._base.with_suffix(f".{name}")


@dataclass(frozen=True)
class Guest:
    """One emulated machine: its number, its process, and folders for its commands and its log."""

    number: int
    process: subprocess.Popen[bytes]
    commands: Path
    log: Path
    control: Path
    names: Iterator[int]

    def start(self, script: str) -> Command:
        """Start a shell command."""
        base = self.commands / f"{next(self.names):06d}"
        part = base.with_suffix(".part")
        part.write_text(script + "\n", "utf-8")
        part.rename(base.with_suffix(".sh"))
        return Command(base, self)

    def run(self, script: str, seconds: float = 60) -> str:
        """Run a shell command that does not fail; what it printed."""
        ended = self.start(script).end(seconds)
        assert ended.code == 0, f"guest{self.number}: {script}: {ended}"
        return ended.out

    def llmrecipes(self, *words: str) -> Command:
        """Start the program of this checkout, with this machine's Python."""
        words = (sys.executable, "-m", "llmrecipes.cli", *words)
        return self.start(
            f"cd /tmp && PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={ROOT} {TOKEN}={'0' * 64} exec {' '.join(words)}"
        )

    def link(self, up: bool) -> None:
        """Pull this end of the fabric's cable, or put it back; until its kernel has seen it."""
        with socket.socket(socket.AF_UNIX) as made:
            made.settimeout(30)
            made.connect(str(self.control))
            stream = made.makefile("rw", encoding="utf-8")
            stream.readline()  # the greeting
            for order in (
                {"execute": "qmp_capabilities"},
                {"execute": "set_link", "arguments": {"name": "fabric", "up": up}},
            ):
                stream.write(json.dumps(order) + "\n")
                stream.flush()
                while "return" not in (reply := json.loads(stream.readline())):
                    assert "error" not in reply, reply
        state = "ACTIVE" if up else "DOWN"
        self.run(f"for i in $(seq 100); do grep -q {state} {self.port}/state && exit; sleep 0.1; done; exit 1")

    port = "/sys/class/infiniband/rxe0/ports/1"

    def until(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait for something; this machine has to live on."""
        deadline = time.monotonic() + seconds
        while not done():
            assert self.process.poll() is None, f"guest{self.number} has ended: {self.messages()}"
            assert time.monotonic() < deadline, f"guest{self.number}: {what} in {seconds:g} s: {self.messages()}"
            time.sleep(0.05)

    def messages(self) -> str:
        """The last lines of its console, and of QEMU."""
        files = (self.log, self.log.with_suffix(".err"))
        return "\n".join(line for file in files for line in file.read_text("utf-8", "replace").splitlines()[-20:])


def build(folder: Path) -> None:
    """Build what the guests boot; where it is built already, in a second."""
    subprocess.run([HERE / "build.sh", folder], check=True, timeout=BUILD_SECONDS)


@contextmanager
def boot(built: Path, run: Path, shares: Sequence[Path]) -> Iterator[tuple[Guest, Guest]]:
    """Two guests, ready for commands; ended with the block.

    Args:
        built: see `build`.
        run: folder of this run; a short path, because sockets have at most 108 characters.
        shares: folders of this machine that the guests have too, read-only.
    """
    with ExitStack() as stack:
        guests = []
        for number in GUESTS:
            guests.append(_start(number, built, run, shares))
            stack.callback(_end, guests[-1].process)
            # The first guest makes the sockets that are the cables.
            guests[-1].until(lambda: all((run / name).exists() for name in NETWORKS), "no network", 30)
        for guest in guests:
            guest.until((guest.commands / READY).exists, "has not booted", BOOT_SECONDS)
        yield guests[0], guests[1]


def _start(number: int, built: Path, run: Path, shares: Sequence[Path]) -> Guest:
    commands, log, control = run / f"commands{number}", run / f"guest{number}.log", run / f"control{number}"
    commands.mkdir()
    log.touch()
    devices, words = [], [f"guest={number}"]
    for network, name in enumerate(NETWORKS):
        server = "on" if number == GUESTS[0] else "off"
        card = f"virtio-net-pci,netdev={name},mac=52:54:00:09:{network:02x}:{number:02x}"
        devices += ["-netdev", f"stream,id={name},server={server},addr.type=unix,addr.path={run / name}"]
        devices += ["-device", f"{card},speed=100000,duplex=full,host_mtu=9000"]
    devices += _shared("root", built / "root") + _shared("commands", commands, writable=True)
    for place, folder in enumerate(shares):
        devices += _shared(f"share.{place}", folder)
        words.append(f"share.{place}={folder}")
    with log.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(
            # A guest ends with this process, even if that is killed.
            ["setpriv", "--pdeathsig", "TERM", "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", "1024",
             "-smp", "1", "-nodefaults", "-no-reboot", "-display", "none",
             "-kernel", str(built / "vmlinuz"), "-initrd", str(built / "initramfs.cpio"),
             "-append", f"console=ttyS0 panic=-1 quiet {' '.join(words)}", "-serial", f"file:{log}",
             "-qmp", f"unix:{control},server,nowait", *devices],
            stdin=subprocess.DEVNULL, stderr=errors, env={"PATH": PATHS},
        )  # fmt: skip
    return Guest(number, process, commands, log, control, count())


def _shared(tag: str, folder: Path, *, writable: bool = False) -> list[str]:
    read_only = "" if writable else ",readonly=on"
    return ["-virtfs", f"local,path={folder},mount_tag={tag},security_model=none,multidevs=remap{read_only}"]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
