"""Whether DeepSpeed's C++ operators can be compiled or loaded on this machine. Imports neither DeepSpeed nor torch."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

CPU_ADAM = "cpu_adam"
ASYNC_IO = "async_io"
_COMPILE_TIMEOUT_S = 60
_PYTHON_PROGRAM = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() < 0; }\n"
_LIBAIO_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"


@dataclass(frozen=True)
class Obstacle:
    """Why an operator cannot be used, and what to do about it."""

    what: str
    fix: str


def obstacle(operator: str) -> Obstacle | None:
    """What prevents an operator from being loaded here; None if nothing does.

    Args:
        operator: `CPU_ADAM` or `ASYNC_IO`.
    """
    if operator in precompiled():
        return None
    torch = _folder("torch")
    if torch is None or not (torch / "include").is_dir():
        return Obstacle("torch's headers are not installed", "make setup-zero on a machine, or the CUDA image")
    if ninja_folder() is None:
        return Obstacle("ninja is not installed", "make setup-zero, or pip install ninja")
    compiler = shlex.split(os.environ.get("CXX", "c++"))  # torch's choice
    if not compiler or shutil.which(compiler[0]) is None:
        return Obstacle(f"there is no C++ compiler ({' '.join(compiler) or 'CXX is empty'})", "apt-get install g++")
    if not _compiles(compiler, _PYTHON_PROGRAM, f"-I{sysconfig.get_path('include')}", "-fopenmp"):
        what = f"{' '.join(compiler)} does not compile a program with Python.h and OpenMP"
        return Obstacle(what, "apt-get install g++ libgomp1 python3-dev")
    if operator == ASYNC_IO and not _compiles(compiler, _LIBAIO_PROGRAM, "-laio"):
        return Obstacle("libaio.h or libaio.so is missing", "apt-get install libaio-dev")
    folder = build_folder()
    if not _holds_programs(folder):
        what = f"{folder} is not writable, or its file system is mounted with noexec"
        return Obstacle(what, "TORCH_EXTENSIONS_DIR=DIR, a folder on this node's own disk")
    return None


def precompiled() -> frozenset[str]:
    """Operators that were compiled when DeepSpeed was installed."""
    package = _folder("deepspeed")
    record = package / "git_version_info_installed.py" if package else None
    if record is None or not record.is_file():
        return frozenset()
    found = re.search(r"^installed_ops=(\{.*\})$", record.read_text("utf-8"), re.MULTILINE)
    return frozenset(name for name, there in ast.literal_eval(found[1]).items() if there) if found else frozenset()


def ninja_folder() -> Path | None:
    """Folder of the ninja program: on the PATH, or else in this environment, which need not be activated."""
    program = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
    return Path(program).parent if program else None


def search_path() -> str:
    """A PATH with ninja, which torch looks for nowhere else."""
    path, folder = os.environ.get("PATH", os.defpath), ninja_folder()
    return path if folder is None or str(folder) in path.split(os.pathsep) else f"{path}{os.pathsep}{folder}"


def build_folder() -> Path:
    """Where torch keeps compiled operators."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_extensions"


def _folder(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def _compiles(compiler: Sequence[str], program: str, *flags: str) -> bool:
    """Whether a C++ program compiles and links, with the user's CFLAGS and LDFLAGS as DeepSpeed reads them."""
    own = [*shlex.split(os.environ.get("CFLAGS", "")), *shlex.split(os.environ.get("LDFLAGS", ""))]
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "program.cpp"
            source.write_text(program, "ascii")
            command = [*compiler, str(source), "-o", str(source.with_suffix("")), *own, *flags]
            done = subprocess.run(command, capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _holds_programs(folder: Path) -> bool:
    """Whether libraries can be written to a folder, which need not exist yet, and loaded from it."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK) and not os.statvfs(folder).f_flag & os.ST_NOEXEC
