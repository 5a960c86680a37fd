"""`serve`: parsing and printing only."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import DATA, RUNS, DataOption, JsonOption, RunsOption


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model to serve: a run, RUN@STEP, a Hugging Face folder, or a GGUF file.",
            autocompletion=completion.runs,
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="Pass more arguments to the server, after --.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="Serve with vllm, tensorrt-llm, llama.cpp or transformers; default: the first that is installed.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="HOST", help="Listen on this address; the default is reachable from this machine only."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Listen on this TCP port.")] = 8000,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="TYPE", help="Export a run as fp32, bf16 or fp16; default: the run's precision."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands; start nothing.")] = False,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Serve a model over HTTP with vLLM, llama.cpp or transformers.

    A run is first exported to its run directory. The API is OpenAI's: /v1/completions, /v1/chat/completions.
    """
    from llmrecipes.console import setup_logging
    from llmrecipes.models.serve import ServeOptions, prepare
    from llmrecipes.models.serve import serve as start

    setup_logging()
    options = ServeOptions(backend, host, port, dtype, tuple(arguments or ()))
    serving = prepare(model, runs_dir, data_dir, options)
    if as_json:
        print(json.dumps(serving.as_dict()), flush=True)
    elif dry_run:
        print(serving.as_text())
    if not dry_run:
        start(serving, model, runs_dir, data_dir, options, _silent if as_json else _say)


def _say(line: str) -> None:
    print(line, flush=True)


def _silent(_line: str) -> None:
    pass
