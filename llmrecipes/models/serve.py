"""`llmrecipes serve`: a run or a folder behind a third-party HTTP server, in the foreground."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrecipes.commandline import command_line
from llmrecipes.errors import UserError
from llmrecipes.hf.reading import COMPRESSED, CONFIG, TOKENIZER_CONFIG, read_config, read_json
from llmrecipes.packages import find_spec
from llmrecipes.tracking.web import running, until_interrupted
from llmrecipes.workflow.model_source import find_checkpoint

LOOPBACK = ("localhost", "::1")
Say = Callable[[str], None]


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server.

    Attributes:
        backend: one of `BACKENDS`; None: the first of them that is installed.
        host: address to listen on; only this machine reaches the default.
        port: TCP port.
        dtype: dtype of the exported weights of a run; None: the precision of its recipe.
        extra: further arguments of the server.
    """

    backend: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str | None = None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Serving:
    """Commands of a server.

    Attributes:
        model: the folder or file that is served.
        export: command that writes it; None: it exists.
        server: the program.
        url: its address.
    """

    model: Path
    export: str | None
    server: Server
    url: str

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "backend": self.server.backend,
            "model": str(self.model),
            "export": self.export,
            "convert": list(self.server.before) or None,
            "command": list(self.server.command),
            "environment": dict(self.server.environment),
            "url": self.url,
        }

    def as_text(self) -> str:
        """The commands, for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.server.environment.items()]
        lines = [self.export] if self.export else []
        if self.server.before:
            lines.append(shlex.join(self.server.before))
        return "\n".join([*lines, " ".join([*variables, shlex.join(self.server.command)])])


def prepare(reference: str, runs_dir: Path, data_dir: Path, options: ServeOptions) -> Serving:
    """Choose the server, and check that it can start.

    Args:
        reference: `RUN`, `RUN@STEP`, a folder that transformers can load, or a GGUF file.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept, with the tokenizers of runs.
        options: how.

    Raises:
        UserError: no such model, or no server for it.
    """
    path = Path(reference)
    export = None
    if path.suffix == ".gguf" and path.is_file():
        model = path.resolve()
    elif (path / "config.json").is_file():
        _require_safe(path)
        model = path.resolve()
    else:
        model = exported_to(reference, runs_dir, options.dtype)
        if not model.exists():
            overrides = {"out": model, "dtype": options.dtype}
            export = command_line("export", reference, options=overrides, runs_dir=runs_dir, data_dir=data_dir)
    chosen = server(model, options.backend, options.host, options.port, installed(), options.extra)
    return Serving(model, export, chosen, f"http://{_in_url(options.host)}:{options.port}")


def exported_to(reference: str, runs_dir: Path, dtype: str | None) -> Path:
    """Folder of the export of a run that is served: one per checkpoint and element type, in the run's directory.

    Its name has the beginning of the manifest's hash, because a run that was started again has other checkpoints of
    the same steps.
    """
    from llmrecipes.checkpoint.manifest import MANIFEST_NAME

    run, entry = find_checkpoint(reference, runs_dir)
    digest = hashlib.sha256((entry.path / MANIFEST_NAME).read_bytes()).hexdigest()
    name = f"step-{entry.step:08d}-{digest[:12]}" + (f"-{dtype}" if dtype else "")
    return (run / "serve" / name).resolve()


def serve(serving: Serving, reference: str, runs_dir: Path, data_dir: Path, options: ServeOptions, say: Say) -> None:
    """Serve until Ctrl-C or SIGTERM; the server ends with this process, also if that is killed.

    Args:
        serving: result of `prepare`.
        reference, runs_dir, data_dir, options: as for `prepare`.
        say: receives lines for the user.

    Raises:
        UserError: the port is in use, the export or a conversion failed, or the server exited.
    """
    _require_free(options.host, options.port)
    if serving.export:
        from llmrecipes.models.export import export
        from llmrecipes.models.export_options import ExportOptions

        say(f"exporting {reference} to {serving.model}")
        export(reference, serving.model, runs_dir, data_dir, ExportOptions(dtype=options.dtype))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the server as well
    _convert(serving.server, say)
    if not options.host.startswith("127.") and options.host not in LOOPBACK:
        say(f"note: the server has no password; anyone who reaches {options.host} can use it")
    say(f"{serving.server.backend} serves {serving.model} at {serving.url}/v1 once it has loaded it (Ctrl-C stops it)")
    with _child(serving.server.command, serving.server) as process:
        until_interrupted(serving.server.backend, process)


def _child(command: Sequence[str], server: Server) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return running(command, {**os.environ, **server.environment})


def _convert(server: Server, say: Say) -> None:
    """Create the server's file; an incomplete file has another name."""
    if not server.before or server.makes is None:
        return
    part = Path(server.before[-1])
    say(f"converting to {server.makes}")
    try:
        with _child(server.before, server) as process:
            code = process.wait()
        if code != 0 or not part.is_file():
            raise UserError(
                f"{Path(server.before[0]).name} exited with code {code}; its messages are above",
                where=str(server.makes),
                fix="--backend transformers",
            )
        part.rename(server.makes)
    finally:
        part.unlink(missing_ok=True)


def _require_safe(folder: Path) -> None:
    configs = {CONFIG: read_config(folder, COMPRESSED)}
    if os.path.lexists(folder / TOKENIZER_CONFIG):  # llama.cpp's converter loads some tokenizers with their code
        configs[TOKENIZER_CONFIG] = read_json(folder, TOKENIZER_CONFIG)
    if name := next((name for name, config in configs.items() if "auto_map" in config), None):
        raise UserError(
            "this model needs custom Python code (auto_map)",
            where=str(folder / name),
            rule="a model's own code is never run",
        )
    if not any(folder.glob("*.safetensors")):
        raise UserError("no safetensors files", where=str(folder), rule="pickled weights are not loaded")


def _require_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"{host!r}: {error.strerror}", where="--host", fix="--host 127.0.0.1") from error
    with closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise UserError(
                f"{host}:{port}: {error.strerror}",
                where="--port",
                rule="the port must be free",
                fix="another --port",
            ) from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


BACKENDS = ("vllm", "tensorrt-llm", "llama.cpp", "transformers")
"""In the order of preference."""
TRANSFORMERS_NEEDS = ("accelerate", "fastapi", "openai", "pydantic", "uvicorn")
"""Packages that `transformers serve` imports; its extra `serving` has them."""
UNPACKS = "compressed_tensors"
"""Package that quantised weights need besides."""
CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf", "convert_hf_to_gguf")
"""llama.cpp's program that writes GGUF, as its packages name it."""
OFFLINE: Mapping[str, str] = {"HF_HUB_OFFLINE": "1"}
"""The model is on this machine: no request to the Hub, not even for the newest version of transformers."""


@dataclass(frozen=True)
class Server:
    """How to start a server.

    Attributes:
        backend: its name in `BACKENDS`.
        command: program and arguments.
        before: command that makes a file for it, if that is missing.
        makes: this file.
        environment: what is added to the environment.
    """

    backend: str
    command: tuple[str, ...]
    before: tuple[str, ...] = ()
    makes: Path | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: OFFLINE)


@dataclass(frozen=True)
class Installed:
    """Servers installed on a machine.

    Attributes:
        which: path of a program; None: it is not on the PATH.
        missing: those of `TRANSFORMERS_NEEDS` and `UNPACKS` that are not installed.
    """

    which: Callable[[str], str | None]
    missing: tuple[str, ...]


def installed() -> Installed:
    """Detect the servers on this machine."""
    packages = (*TRANSFORMERS_NEEDS, UNPACKS)
    return Installed(shutil.which, tuple(name for name in packages if find_spec(name) is None))


def server(
    model: Path, backend: str | None, host: str, port: int, machine: Installed, extra: Sequence[str] = ()
) -> Server:
    """How to serve a model.

    Args:
        model: a folder with config.json and safetensors, or a GGUF file.
        backend: one of `BACKENDS`; None: the first that is installed and can read the model.
        host: address to listen on.
        port: TCP port.
        machine: what is installed.
        extra: further arguments of the server.

    Raises:
        UserError: an unknown backend, or one that is not installed or cannot read the model, such as quantised weights;
            with what would help.
    """
    if backend is not None and backend not in BACKENDS:
        raise UserError(f"unknown backend {backend!r}", where="--backend", rule=f"one of {', '.join(BACKENDS)}")
    chosen = backend or _first(model, machine)
    make = {"vllm": _vllm, "tensorrt-llm": _tensorrt_llm, "llama.cpp": _llama_cpp, "transformers": _transformers}[
        chosen
    ]
    start = make(model, host, port, machine)
    return Server(start.backend, (*start.command, *extra), start.before, start.makes, start.environment)


def _first(model: Path, machine: Installed) -> str:
    gguf = model.suffix == ".gguf"
    if not gguf and machine.which("vllm"):
        return "vllm"
    if not gguf and machine.which("trtllm-serve") and not _quantised(model):
        return "tensorrt-llm"
    converts = _converter(machine) and not _quantised(model)
    if machine.which("llama-server") and (gguf or _gguf_of(model).is_file() or converts):
        return "llama.cpp"
    return "llama.cpp" if gguf else "transformers"


def _vllm(model: Path, host: str, port: int, machine: Installed) -> Server:
    program = machine.which("vllm")
    if program is None:
        raise UserError(
            "vLLM is not installed",
            where="--backend vllm",
            rule="the program vllm must be on the PATH",
            fix="pip install vllm, in a separate environment",
        )
    if model.suffix == ".gguf":
        raise _needs_folder(model, "vllm")
    return Server("vllm", (program, "serve", str(model), "--host", host, "--port", str(port)))


def _tensorrt_llm(model: Path, host: str, port: int, machine: Installed) -> Server:
    program = machine.which("trtllm-serve")
    if program is None:
        raise UserError(
            "TensorRT-LLM is not installed",
            where="--backend tensorrt-llm",
            rule="the program trtllm-serve must be on the PATH",
            fix="use NVIDIA's image tensorrt-llm/release",
        )
    if model.suffix == ".gguf":
        raise _needs_folder(model, "tensorrt-llm")
    if _quantised(model):
        raise UserError(
            "the weights are quantised",
            where=str(model),
            rule="TensorRT-LLM reads weights quantised by NVIDIA's ModelOpt, not by compressed-tensors",
            fix="--backend vllm or transformers",
        )
    return Server("tensorrt-llm", (program, str(model), "--host", host, "--port", str(port)))


def _llama_cpp(model: Path, host: str, port: int, machine: Installed) -> Server:
    program = machine.which("llama-server")
    if program is None:
        raise UserError(
            "llama.cpp is not installed",
            where="--backend llama.cpp",
            rule="the program llama-server must be on the PATH",
            fix="install llama.cpp (github.com/ggml-org/llama.cpp), or --backend transformers",
        )
    file = model if model.suffix == ".gguf" else _gguf_of(model)
    command = (program, "--model", str(file), "--host", host, "--port", str(port))
    if file.is_file():
        return Server("llama.cpp", command)
    if model.suffix == ".gguf":
        raise UserError("no such file", where=str(model))
    if _quantised(model):
        raise UserError(
            "the weights are quantised",
            where=str(model),
            rule="llama.cpp reads GGUF, and its converter needs unquantised weights",
            fix="--backend vllm or transformers; for a run, llmrecipes export --to gguf --dtype q8_0",
        )
    converter = _converter(machine)
    if converter is None:
        raise UserError(
            f"{file.name} is missing, and none of {', '.join(CONVERTERS)} is on the PATH",
            where=str(model),
            rule="llama.cpp reads GGUF; its own program converts a folder of transformers",
            fix="put llama.cpp's convert_hf_to_gguf.py on the PATH, or --backend transformers",
        )
    part = file.with_name(f".{file.name}.part")
    return Server("llama.cpp", command, (converter, str(model), "--outfile", str(part)), file)


def _transformers(model: Path, host: str, port: int, machine: Installed) -> Server:
    if model.suffix == ".gguf":
        raise _needs_folder(model, "transformers")
    if missing := [name for name in machine.missing if name != UNPACKS]:
        raise UserError(
            f"packages of transformers' server are not installed: {', '.join(missing)}",
            where="--backend transformers",
            rule="a server is a separate program; neither vllm, trtllm-serve nor llama-server is on the PATH",
            fix="pip install 'llmrecipes[serve]', or pip install 'transformers[serving]'",
        )
    if UNPACKS in machine.missing and _quantised(model):
        raise UserError(
            f"the package {COMPRESSED} is not installed",
            where="--backend transformers",
            rule="transformers unpacks quantised weights with it",
            fix="pip install 'llmrecipes[quantize]'",
        )
    if "@" in str(model):
        raise UserError(
            "transformers' server reads what follows @ as a revision",
            where=str(model),
            rule="the path must not contain @",
            fix="move the folder, or --backend vllm",
        )
    command = (sys.executable, "-m", "transformers.cli.transformers", "serve", str(model))
    return Server("transformers", (*command, "--host", host, "--port", str(port)))


def _needs_folder(model: Path, backend: str) -> UserError:
    return UserError(
        f"--backend {backend} does not read GGUF",
        where=str(model),
        rule="it needs a folder with config.json and safetensors",
    )


def _quantised(model: Path) -> bool:
    """Whether a folder has weights that `llmrecipes quantize` wrote; a run is exported as it is."""
    return (model / "config.json").is_file() and "quantization_config" in read_config(model, COMPRESSED)


def _gguf_of(model: Path) -> Path:
    return model / "model.gguf"


def _converter(machine: Installed) -> str | None:
    return next((path for name in CONVERTERS if (path := machine.which(name))), None)
