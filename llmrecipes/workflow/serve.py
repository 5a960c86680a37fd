"""`llmrecipes serve`: a run or a folder behind a third-party HTTP server, in the foreground."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmrecipes.commandline import command_line
from llmrecipes.errors import UserError
from llmrecipes.faults.signals import end_with_parent
from llmrecipes.hf.reading import read_config
from llmrecipes.hf.servers import Server, installed, server
from llmrecipes.tracking.web import running, until_interrupted
from llmrecipes.workflow.tensors import find_checkpoint

LOOPBACK = ("localhost", "::1")
Say = Callable[[str], None]


@dataclass(frozen=True)
class ServeOptions:
    """How a model is served.

    Attributes:
        backend: vllm, llama.cpp or transformers; None: the first of them that is installed.
        host: address to listen on; nobody but this machine reaches the default.
        port: TCP port.
        dtype: of the exported weights of a run; None: the precision of its recipe.
        extra: further arguments of the server.
    """

    backend: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str | None = None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Serving:
    """What a call does.

    Attributes:
        model: the folder or file that is served.
        export: command that writes it; None: it is there.
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
    """Find out what to start, and whether it can be.

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
        _require_plain(path)
        model = path.resolve()
    else:
        model = exported_to(reference, runs_dir, options.dtype)
        if not model.exists():
            overrides = {"out": model, "dtype": options.dtype}
            export = command_line("export", reference, options=overrides, runs_dir=runs_dir, data_dir=data_dir)
    chosen = server(model, options.backend, options.host, options.port, installed(), options.extra)
    return Serving(model, export, chosen, f"http://{_in_url(options.host)}:{options.port}")


def exported_to(reference: str, runs_dir: Path, dtype: str | None) -> Path:
    """Where the export of a run that is served is kept: a folder for each checkpoint and type, in the run's directory.

    Its name has the beginning of the manifest's hash, because a run that was started again has other checkpoints of
    the same steps.
    """
    from llmrecipes.checkpoint.manifest import MANIFEST_NAME

    run, entry = find_checkpoint(reference, runs_dir)
    digest = hashlib.sha256((entry.path / MANIFEST_NAME).read_bytes()).hexdigest()
    name = f"step-{entry.step:08d}-{digest[:12]}" + (f"-{dtype}" if dtype else "")
    return (run / "serve" / name).resolve()


def serve(serving: Serving, reference: str, runs_dir: Path, data_dir: Path, options: ServeOptions, say: Say) -> None:
    """Serve until Ctrl-C or SIGTERM; the server ends with this process, however that ends.

    Args:
        serving: of `prepare`.
        reference, runs_dir, data_dir, options: as there.
        say: receives lines for the user.

    Raises:
        UserError: the port is in use, the export or a conversion failed, or the server exited.
    """
    _require_free(options.host, options.port)
    if serving.export:
        from llmrecipes.workflow.export import Options, export

        say(f"exporting {reference} to {serving.model}")
        export(reference, serving.model, runs_dir, data_dir, Options(dtype=options.dtype))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the server as well
    _convert(serving.server, say)
    if not options.host.startswith("127.") and options.host not in LOOPBACK:
        say(f"note: the server has no password; anyone who reaches {options.host} can use it")
    say(f"{serving.server.backend} serves {serving.model} at {serving.url}/v1 once it has loaded it (Ctrl-C ends it)")
    with _child(serving.server.command, serving.server) as process:
        until_interrupted(serving.server.backend, process)


def _child(command: Sequence[str], server: Server) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return running(command, {**os.environ, **server.environment}, partial(end_with_parent, os.getpid()))


def _convert(server: Server, say: Say) -> None:
    """Run what makes the server's file; a file that is not complete has another name."""
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


def _require_plain(folder: Path) -> None:
    config = read_config(folder)
    if "auto_map" in config:
        raise UserError(
            "this model has its own Python code (auto_map)",
            where=str(folder / "config.json"),
            rule="code of a model is never run",
        )
    if not any(folder.glob("*.safetensors")):
        raise UserError("no safetensors", where=str(folder), rule="pickled weights are not loaded")


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
                rule="clients expect this port",
                fix="another --port",
            ) from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
