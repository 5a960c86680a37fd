"""Which programs can serve a folder that transformers can load, and how each is started. None of them is ours."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from llmrecipes.errors import UserError

BACKENDS = ("vllm", "llama.cpp", "transformers")
"""In the order in which they are tried."""
TRANSFORMERS_NEEDS = ("accelerate", "fastapi", "openai", "pydantic", "uvicorn")
"""Packages that `transformers serve` imports; its extra `serving` has them."""
CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf", "convert_hf_to_gguf")
"""llama.cpp's program that writes GGUF, as its packages name it."""
OFFLINE: Mapping[str, str] = {"HF_HUB_OFFLINE": "1"}
"""The model is on this machine, so nothing is asked of the Hub: not even whether transformers has a new version."""


@dataclass(frozen=True)
class Server:
    """How to start a server.

    Attributes:
        backend: its name in `BACKENDS`.
        command: program and arguments.
        before: command that makes a file for it, if that is not there yet.
        makes: that file.
        environment: what is added to the environment.
    """

    backend: str
    command: tuple[str, ...]
    before: tuple[str, ...] = ()
    makes: Path | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: OFFLINE)


@dataclass(frozen=True)
class Installed:
    """What is installed here.

    Attributes:
        which: path of a program; None: it is not on the PATH.
        missing: those of `TRANSFORMERS_NEEDS` that are not there.
    """

    which: Callable[[str], str | None]
    missing: tuple[str, ...]


def installed() -> Installed:
    """Look at this machine."""
    return Installed(shutil.which, tuple(name for name in TRANSFORMERS_NEEDS if find_spec(name) is None))


def server(
    model: Path, backend: str | None, host: str, port: int, here: Installed, extra: Sequence[str] = ()
) -> Server:
    """How to serve a model.

    Args:
        model: a folder with config.json and safetensors, or a GGUF file.
        backend: one of `BACKENDS`; None: vLLM or llama.cpp where they are installed, else transformers.
        host: address to listen on.
        port: TCP port.
        here: what is installed.
        extra: further arguments of the server.

    Raises:
        UserError: an unknown backend, or one that is not installed or cannot read the model; with what would help.
    """
    if backend is not None and backend not in BACKENDS:
        raise UserError(f"{backend!r}", where="--backend", rule=f"one of {', '.join(BACKENDS)}")
    chosen = backend or _first(model, here)
    make = {"vllm": _vllm, "llama.cpp": _llama_cpp, "transformers": _transformers}[chosen]
    found = make(model, host, port, here)
    return Server(found.backend, (*found.command, *extra), found.before, found.makes, found.environment)


def _first(model: Path, here: Installed) -> str:
    gguf = model.suffix == ".gguf"
    if not gguf and here.which("vllm"):
        return "vllm"
    if here.which("llama-server") and (gguf or _gguf_of(model).is_file() or _converter(here)):
        return "llama.cpp"
    return "llama.cpp" if gguf else "transformers"


def _vllm(model: Path, host: str, port: int, here: Installed) -> Server:
    program = here.which("vllm")
    if program is None:
        raise UserError(
            "vLLM is not installed", where="--backend vllm", rule="its program vllm is on the PATH",
            fix="pip install vllm, in an environment of its own",
        )  # fmt: skip
    if model.suffix == ".gguf":
        raise _needs_folder(model, "vllm")
    return Server("vllm", (program, "serve", str(model), "--host", host, "--port", str(port)))


def _llama_cpp(model: Path, host: str, port: int, here: Installed) -> Server:
    program = here.which("llama-server")
    if program is None:
        raise UserError(
            "llama.cpp is not installed", where="--backend llama.cpp", rule="its program llama-server is on the PATH",
            fix="install llama.cpp (github.com/ggml-org/llama.cpp), or --backend transformers",
        )  # fmt: skip
    file = model if model.suffix == ".gguf" else _gguf_of(model)
    command = (program, "--model", str(file), "--host", host, "--port", str(port))
    if file.is_file():
        return Server("llama.cpp", command)
    if model.suffix == ".gguf":
        raise UserError("no such file", where=str(model))
    converter = _converter(here)
    if converter is None:
        raise UserError(
            f"there is no {file.name}, and none of {', '.join(CONVERTERS)} on the PATH",
            where=str(model),
            rule="llama.cpp reads GGUF; its own program converts a folder of transformers",
            fix="put llama.cpp's convert_hf_to_gguf.py on the PATH, or --backend transformers",
        )
    part = file.with_name(f".{file.name}.part")
    return Server("llama.cpp", command, (converter, str(model), "--outfile", str(part)), file)


def _transformers(model: Path, host: str, port: int, here: Installed) -> Server:
    if model.suffix == ".gguf":
        raise _needs_folder(model, "transformers")
    if here.missing:
        raise UserError(
            f"transformers' server needs {', '.join(here.missing)}, which {'is' if len(here.missing) == 1 else 'are'} "
            "not installed",
            where="--backend transformers",
            rule="a server is a program of its own, and none of vllm, llama-server is on the PATH",
            fix="pip install 'llmrecipes[serve]', or pip install 'transformers[serving]'",
        )
    if "@" in str(model):
        raise UserError(
            "transformers' server takes what follows @ for a revision",
            where=str(model),
            rule="a path without @",
            fix="move the folder, or --backend vllm",
        )
    command = (sys.executable, "-m", "transformers.cli.transformers", "serve", str(model))
    return Server("transformers", (*command, "--host", host, "--port", str(port)))


def _needs_folder(model: Path, backend: str) -> UserError:
    return UserError(
        f"--backend {backend} does not read GGUF", where=str(model), rule="a folder with config.json and safetensors"
    )


def _gguf_of(model: Path) -> Path:
    return model / "model.gguf"


def _converter(here: Installed) -> str | None:
    return next((path for name in CONVERTERS if (path := here.which(name))), None)
