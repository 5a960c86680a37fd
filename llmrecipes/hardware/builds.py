"""What the installed torch, TransformerEngine and DeepSpeed can do on this machine, and the import of megatron-core."""

from __future__ import annotations

import ast
import gc
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module, metadata
from pathlib import Path
from types import FunctionType
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import visible_gpus
from llmrecipes.packages import find_spec


def cuda_version() -> str | None:
    """`torch.version.cuda` of the installed torch, such as `13.0`; None for a build without CUDA, or without torch.

    The version of the package does not tell: NVIDIA's own builds are called `2.13.0a0+8145d630e8.nv26.06`.
    """
    spec = find_spec("torch")
    return None if spec is None or spec.origin is None else cuda_of(Path(spec.origin).with_name("version.py"))


def cuda_of(version_file: Path) -> str | None:
    """The value of `cuda` in torch's `version.py`, which is generated at build time; None if it has none."""
    try:
        tree = ast.parse(version_file.read_text("utf-8"))
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
            value = node.value
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    return None


def require_gpu_build() -> None:
    """Refuse a CPU build of torch on a machine with GPUs, before anything else is done.

    Raises:
        UserError: it is one.
    """
    if cuda_version() is None and find_spec("torch") is not None and (gpus := visible_gpus()):
        raise unusable(f"{len(gpus)} × {gpus[0].name}, but torch {metadata.version('torch')} is a CPU build")


def unusable(what: str) -> UserError:
    """The error about GPUs that torch cannot use."""
    return UserError(
        f"this machine has {what}",
        where="torch.cuda",
        rule="on a machine with a GPU, training on the CPU needs an empty CUDA_VISIBLE_DEVICES",
        fix="llmrecipes doctor; make setup TORCH=cuda if torch is a CPU build; or CUDA_VISIBLE_DEVICES= in "
        "front of the command, to train on the CPU",
    )


TRANSFORMER_ENGINE = "transformer_engine"


@cache
def transformer_engine_obstacle() -> str | None:
    """Why TransformerEngine cannot be used; None if it can. To be called before megatron-core is imported.

    One that was built for another torch or CUDA raises anything: OSError, RuntimeError, AssertionError. megatron-core
    imports it in many modules and handles only ImportError; so after any error, later imports of it raise that. They do
    so without a GPU too: megatron-core uses its products for routers, and its optimizer, wherever it can be imported,
    and both compute on CUDA only.
    """
    if find_spec(TRANSFORMER_ENGINE) is None:
        return "TransformerEngine is not installed"
    import torch  # not at the top: parts of the program that start without torch import this module

    if not torch.cuda.is_available():
        sys.modules[TRANSFORMER_ENGINE] = None  # type: ignore[assignment]  # what the import system raises ImportError for
        return "no GPU"
    try:
        import_module(f"{TRANSFORMER_ENGINE}.pytorch")
    except Exception as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == TRANSFORMER_ENGINE]:
            del sys.modules[name]
        sys.modules[TRANSFORMER_ENGINE] = None  # type: ignore[assignment]  # what the import system raises ImportError for
        reason = " ".join(str(error).split("\n")[0].split())
        return f"TransformerEngine cannot be imported: {type(error).__name__}: {reason}"
    return None


_IN_VAIN = ("wandb", "torch.utils.tensorboard")


def import_megatron() -> None:
    """Import megatron-core without TransformerEngine where that cannot be used, and without what is imported in vain.

    To be called before anything else imports it. It decorates functions with `torch.compile`, which imports the
    compiler though a CPU calls none of them, and imports Weights & Biases and TensorBoard for timers and an inference
    server that are not used: without them a rank starts in half of the processor time and opens 1,700 files less.
    A quarter of what is left would be collections of garbage, of which imports leave hardly any.
    """
    if "megatron.core" in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        _import_megatron()
    finally:
        if collecting:
            gc.enable()


def _import_megatron() -> None:
    transformer_engine_obstacle()
    import torch  # not at the top: parts of the program that start without torch import this module

    compile_ = torch.compile
    hidden = [name for name in _IN_VAIN if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # what the import system raises ImportError for
    torch.compile = partial(compiled_at_first_call, compile_)
    try:
        import_module("megatron.core")
    finally:
        torch.compile = compile_
        for name in hidden:
            del sys.modules[name]


def compiled_at_first_call(compile_: Callable[..., Any], function: Any = None, **options: Any) -> Any:
    """The decorator `torch.compile`, but `compile_` is called with the function when the function is."""
    if function is None:
        return partial(compiled_at_first_call, compile_, **options)
    if not isinstance(function, FunctionType):
        return compile_(function, **options)
    from torch.compiler import is_compiling

    compiled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if is_compiling():  # a function that calls this one: both become one graph
            return function(*args, **kwargs)
        if compiled is None:
            compiled = compile_(function, **options)
        return compiled(*args, **kwargs)

    return call


def transformer_engine_version() -> tuple[int, int] | None:
    """Major and minor version of the installed TransformerEngine; None without one."""
    try:
        numbers = metadata.version(TRANSFORMER_ENGINE).split(".")
    except metadata.PackageNotFoundError:
        return None
    return int(numbers[0]), int(numbers[1])


def compiler_obstacle(device: str) -> str | None:
    """Why torch cannot compile functions for a device; None if it can.

    On a GPU it generates Triton, whose launchers are C; on a CPU it generates C++.
    """
    if device == "cuda" and find_spec("triton") is None:
        return "Triton, which torch needs to compile for GPUs, is not installed"
    variable, names = ("CC", ("gcc", "clang")) if device == "cuda" else ("CXX", ("g++", "clang++"))
    wanted = shlex.split(os.environ.get(variable, ""))[:1] or names
    if any(shutil.which(name) for name in wanted):
        return None
    return f"no {'C' if device == 'cuda' else 'C++'} compiler ({' or '.join(wanted)})"


CPU_ADAM = "cpu_adam"
ASYNC_IO = "async_io"
_COMPILE_TIMEOUT_S = 60
_PYTHON_PROGRAM = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() < 0; }\n"
_LIBAIO_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"


@dataclass(frozen=True)
class MissingPart:
    """Why an operator cannot be used, and what to do about it."""

    what: str
    fix: str


def operator_obstacle(operator: str) -> MissingPart | None:
    """What prevents an operator from being loaded on this machine; None if nothing does.

    Args:
        operator: `CPU_ADAM` or `ASYNC_IO`.
    """
    if operator in precompiled():
        return None
    torch = _folder("torch")
    if torch is None or not (torch / "include").is_dir():
        return MissingPart("torch's headers are not installed", "make setup-zero on a machine, or the CUDA image")
    if ninja_folder() is None:
        return MissingPart("ninja is not installed", "make setup-zero, or pip install ninja")
    compiler = shlex.split(os.environ.get("CXX", "c++"))  # torch's choice
    if not compiler or shutil.which(compiler[0]) is None:
        return MissingPart(f"no C++ compiler ({' '.join(compiler) or 'CXX is empty'})", "apt-get install g++")
    if not _compiles(compiler, _PYTHON_PROGRAM, f"-I{sysconfig.get_path('include')}", "-fopenmp"):
        what = f"{' '.join(compiler)} cannot compile a program with Python.h and OpenMP"
        return MissingPart(what, "apt-get install g++ libgomp1 python3-dev")
    if operator == ASYNC_IO and not _compiles(compiler, _LIBAIO_PROGRAM, "-laio"):
        return MissingPart("libaio.h or libaio.so is missing", "apt-get install libaio-dev")
    folder = build_folder()
    if not _holds_programs(folder):
        what = f"{folder} is not writable, or its file system is mounted with noexec"
        return MissingPart(what, "TORCH_EXTENSIONS_DIR=DIR, a folder on a local disk of this node")
    return None


def precompiled() -> frozenset[str]:
    """Operators that were compiled when DeepSpeed was installed."""
    package = _folder("deepspeed")
    record = package / "git_version_info_installed.py" if package else None
    if record is None or not record.is_file():
        return frozenset()
    operators = re.search(r"^installed_ops=(\{.*\})$", record.read_text("utf-8"), re.MULTILINE)
    return (
        frozenset(name for name, compiled in ast.literal_eval(operators[1]).items() if compiled)
        if operators
        else frozenset()
    )


def ninja_folder() -> Path | None:
    """Folder of the ninja program: on the PATH, or else in this environment, which need not be activated."""
    program = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
    return Path(program).parent if program else None


def search_path() -> str:
    """A PATH with ninja, which torch looks for nowhere else."""
    path = os.environ.get("PATH", os.defpath)
    folder = ninja_folder()
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
    user_flags = [*shlex.split(os.environ.get("CFLAGS", "")), *shlex.split(os.environ.get("LDFLAGS", ""))]
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "program.cpp"
            source.write_text(program, "ascii")
            command = [*compiler, str(source), "-o", str(source.with_suffix("")), *user_flags, *flags]
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
