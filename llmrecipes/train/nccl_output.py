"""NCCL's output of a rank: a file on the node for the proof of the network, and from it what the user asked to see.

NCCL has one level for all of its output, and one place. The proof needs INFO; a site that exports NCCL_DEBUG=WARN gets
its warnings where it wants them, and no more.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.hardware.nccl_log import FILE, LEVEL, SUBSYSTEMS, log_of, proving, shown
from llmrecipes.launch.environment import FABRIC
from llmrecipes.redact import redact

SECONDS = 1.0
"""Between looks at the file: a warning is shown so much later than NCCL itself would."""


class NcclOutput:
    """Follows the file that NCCL writes in this process, from before NCCL starts."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Set NCCL's variables, until `restore`.

        Raises:
            UserError: no file can be made on this node.
        """
        host = socket.gethostname()
        try:
            handle, name = tempfile.mkstemp(prefix="llmrecipes-nccl-", suffix=".log")
        except OSError as error:
            raise UserError(
                f"no file in {tempfile.gettempdir()} on {host}: {error.strerror}",
                where="TMPDIR",
                rule="each rank writes NCCL's log to its node, to prove which network it uses",
                fix="TMPDIR=DIR, a local disk of the node that can be written",
            ) from error
        os.close(handle)
        self.path = Path(name)
        self.where = f"{host}:{name}"
        self._target = log_of(environment, host, os.getpid())
        self._level = environment.get(LEVEL)
        self._place, self._lock, self._told = 0, threading.Lock(), False
        self._environment = environment
        self._before = {name: environment.get(name) for name in (LEVEL, SUBSYSTEMS, FILE)}
        environment.update({**proving(environment), FILE: name.replace("%", "%%")})

    @property
    def level(self) -> str:
        """What is shown, in words."""
        return f"what {LEVEL}={self._level} asks for" if self._level else "warnings"

    def restore(self) -> None:
        """Give the user's values back: NCCL has read its own."""
        for name, value in self._before.items():
            if value is None:
                self._environment.pop(name, None)
            else:
                self._environment[name] = value

    def text(self) -> str:
        """All of the file; empty if there is none any more."""
        try:
            return self.path.read_text("utf-8", "replace")
        except OSError:
            return ""

    def pass_on(self) -> None:
        """Show complete lines that NCCL has written since, as far as the user's level asks for them."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    file.seek(self._place)
                    new = file.read()
            except OSError:
                return
            whole = new[: new.rfind(b"\n") + 1]
            self._place += len(whole)
            if lines := shown(whole.decode("utf-8", "replace").splitlines(), self._level):
                self._show("".join(f"{line}\n" for line in lines))

    def tell(self) -> None:
        """After an error: everything that was not shown yet, and where the rest is; once."""
        self.pass_on()
        if not self._told:
            self._told = True
            print(f"NCCL's log is {self.where}", file=sys.stderr, flush=True)

    def _show(self, text: str) -> None:
        if self._target is not None:
            try:
                with self._target.open("a", encoding="utf-8") as file:
                    file.write(redact(text))
                return
            except OSError:
                self._target = None
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def nccl_output() -> Iterator[NcclOutput | None]:
    """Follow this rank's output in a thread, where the site has a fabric to prove; otherwise NCCL is left alone.

    The file is removed, after an error it stays.
    """
    if FABRIC not in os.environ:
        yield None
        return
    output, ended = NcclOutput(os.environ), threading.Event()
    if os.environ.get("RANK", "0") == "0":
        print(f"NCCL shows {output.level}; its INFO, which names the network, goes to {output.where}", flush=True)

    def follow() -> None:
        while not ended.wait(SECONDS):
            output.pass_on()

    threading.Thread(target=follow, name="nccl-output", daemon=True).start()
    try:
        with told(output):
            yield output
    finally:
        ended.set()
        output.restore()
    output.pass_on()
    output.path.unlink(missing_ok=True)


@contextmanager
def told(output: NcclOutput | None) -> Iterator[None]:
    """Show what NCCL has said before an error is handled further: the process may end without closing anything."""
    try:
        yield
    except Exception:
        if output is not None:
            output.tell()
        raise
