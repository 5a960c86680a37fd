"""A process for code of others (`--trust-code`): without network, other processes, variables and kept credentials.

Made with util-linux's `unshare` and `setpriv`, which need no privileges where the kernel lets users have namespaces.
It is not a container: the code can read and change the user's other files, and use the GPU.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmrecipes.errors import UserError

OPTION = "--trust-code"
NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
SECONDS_TO_TRY = 20
MARK = "LLMRECIPES_ISOLATED"
KEPT = frozenset({
    "PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "PYTORCH_ALLOC_CONF",
    "NO_COLOR", "COLUMNS",
})  # fmt: skip
"""Variables that the process gets; no other, as any can have a token."""
HIDDEN = (
    ".ssh", ".gnupg", ".aws", ".azure", ".config", ".docker", ".kube", ".netrc", ".git-credentials", ".pypirc",
    ".mlflow", ".databrickscfg", ".bash_history", ".python_history", ".cache/huggingface/token",
    ".cache/huggingface/stored_tokens",
)  # fmt: skip
"""Files and folders of the home with credentials: empty for the process."""
SOCKETS = ("/run/docker.sock", "/var/run/docker.sock", "/run/containerd", "/run/user", "/run/dbus", "/run/munge")
"""Ways to services of this machine that a network namespace does not close: empty for the process."""
_ENTER = """
import fcntl, os, socket, struct, subprocess, sys
with socket.socket() as any_socket:  # gloo needs an interface: loopback, which is down, with SIOCSIFFLAGS and IFF_UP
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1))
split = sys.argv.index("--")
for path in sys.argv[1:split]:
    how = ["-t", "tmpfs", "-o", "size=4k,mode=700", "none"] if os.path.isdir(path) else ["--bind", "/dev/null"]
    subprocess.run(["mount", *how, path], check=True)
no_rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
os.execvp("setpriv", ["setpriv", *no_rights, *sys.argv[split + 1 :]])
"""
"""Runs first inside the namespaces."""


def command(words: Sequence[str]) -> list[str]:
    """A command in the isolated process.

    Raises:
        UserError: this machine does not allow it, with the reason.
    """
    for program in ("unshare", "setpriv"):
        if shutil.which(program) is None:
            raise _refusal(f"program {program} is not installed")
    arguments = [*NAMESPACES, sys.executable, "-I", "-c", _ENTER, *map(str, hidden()), "--"]
    try:
        tried = subprocess.run(
            [*arguments, "true"], env=environment(), capture_output=True, text=True, timeout=SECONDS_TO_TRY, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _refusal(str(error)) from error
    if tried.returncode:
        raise _refusal(" ".join(tried.stderr.split())[-300:] or f"exit code {tried.returncode}")
    return [*arguments, *words]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of the process: some of this one's, and others.

    Args:
        more: set besides them.
    """
    kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("LC_")}
    return {**kept, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", MARK: "1", **(more or {})}


def hidden() -> list[Path]:
    """Existing files and folders that the process finds empty."""
    home = Path.home()
    tokens = [os.environ.get("HF_TOKEN_PATH"), *(f"{home}/{name}" for name in HIDDEN), *SOCKETS]
    if hub := os.environ.get("HF_HOME"):
        tokens += [f"{hub}/token", f"{hub}/stored_tokens"]
    real = {path.resolve() for path in map(Path, filter(None, tokens)) if path.exists()}
    return sorted(path for path in real if not any(above in real for above in path.parents))


def run(module: str, arguments: Sequence[str]) -> int:
    """Run a Python module in such a process, and wait; returns its exit code. A signal ends it.

    Raises:
        UserError: see `command`.
    """
    words = command([sys.executable, "-m", module, *arguments])
    process = subprocess.Popen(
        words, env=environment(), stdin=subprocess.DEVNULL, start_new_session=True
    )  # no terminal to type into
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(number: int, _frame: object) -> None:
        process.kill()  # its child dies with it
        raise SystemExit(128 + number)

    try:
        for number in before:
            signal.signal(number, end)
        return process.wait()
    finally:
        process.kill()
        process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def require_isolated() -> None:
    """Refuse to continue in a process that has a network.

    Raises:
        UserError: it has.
    """
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if MARK not in os.environ or others:
        raise _refusal(f"this process has a network: {', '.join(others) or 'lo'}")


def _refusal(reason: str) -> UserError:
    return UserError(
        f"cannot start a process without network: {reason}",
        where=OPTION,
        rule="code of a task file runs without network, environment variables and credentials, in Linux user "
        "namespaces",
        fix="use a machine that allows them (sysctl kernel.unprivileged_userns_clone, user.max_user_namespaces), or "
        "a task without code",
    )
