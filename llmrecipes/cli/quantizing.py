"""`quantize` and `bench inference`: parsing and printing only."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import DATA, RUNS, DataOption, JsonOption, RunsOption, with_options
from llmrecipes.cli.tables import TextTable, show
from llmrecipes.faults.signals import early_signals
from llmrecipes.units import MIB

if TYPE_CHECKING:
    from llmrecipes.models.inference import FormatRow
    from llmrecipes.models.quantize_options import QuantizeOptions

SourceOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="SOURCE",
        help="Measure bits per byte on valid, test, train, stdlib, or TYPE:PATH; default for a run: valid.",
    ),
]
LimitOption = Annotated[
    int, typer.Option("--limit", metavar="N", min=1, help="Measure bits per byte on at most N documents.")
]
TextKeyOption = Annotated[
    str, typer.Option("--text-key", metavar="NAME", help="Read the text of a jsonl or parquet source from this column.")
]
PromptOption = Annotated[int, typer.Option("--prompt-tokens", metavar="N", min=1, help="Time a prompt of N tokens.")]
NewOption = Annotated[int, typer.Option("--new-tokens", metavar="N", min=2, help="Generate N tokens, greedily.")]
RepeatsOption = Annotated[
    int, typer.Option("--repeats", metavar="N", min=1, help="Repeat the generation N times, and take the median.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=1, help="Compute with N threads; default: all cores.")
]


@early_signals()
@with_options(options="models.quantize_options.QuantizeOptions")
def quantize(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]|DIR",
            help="Run, or folder of a Hugging Face model.",
            autocompletion=completion.runs,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Write to this new folder.")],
    options: QuantizeOptions,
    measure: Annotated[bool, typer.Option(help="Compare size, quality and speed with those of the original.")] = True,
    data: SourceOption = None,
    limit: LimitOption = 16,
    new_tokens: NewOption = 64,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Quantize a model to 8 or 4 bits, for transformers and vLLM.

    Linear layers and experts are quantized; embeddings, norms, routers and the output layer are not. rtn needs no
    text, and only one matrix in memory at a time. Both models are then measured.
    """
    from llmrecipes.console import number, setup_logging
    from llmrecipes.models.inference import InferenceOptions, compare_folders
    from llmrecipes.models.quantize import quantize as make
    from llmrecipes.tracking.progress import Counted

    setup_logging()
    wanted = InferenceOptions(data, options.text_key, limit, new_tokens=new_tokens, threads=threads)
    rows: list[FormatRow] = []

    def compare(original: Path, quantized: Path) -> None:
        rows.extend(compare_folders(model, original, quantized, options.scheme, runs_dir, data_dir, wanted))

    made = make(model, out, runs_dir, data_dir, options, None if as_json else Counted(), compare if measure else None)
    if as_json:
        print(json.dumps({**asdict(made), "measured": [asdict(row) for row in rows]}))
        return
    share = made.quantized_parameters / made.parameters
    experts = f" ({made.expert_matrices} of experts)" if made.expert_matrices else ""
    print(
        f"quantized {made.source}: {made.matrices} matrices{experts}, {share:.0%} of {number(made.parameters)} "
        "parameters"
    )
    print(f"to       {made.path}")
    groups = "" if made.group is None else f" in groups of {made.group}"
    read = "" if not made.calibration_tokens else f", calibrated on {made.calibration_tokens:,} tokens"
    if made.unvisited_matrices:
        read += f", {made.unvisited_matrices} expert matrices that no token reached rounded to nearest"
    print(
        f"         {made.scheme}{groups} by {made.method}{read}; compressed-tensors {made.form}, {made.seconds:.1f} s"
    )
    print(f"         {made.bytes_before / MIB:,.1f} MiB before, {made.bytes / MIB:,.1f} MiB now")
    grown = made.peak_memory_bytes - made.memory_before_bytes
    largest = made.largest_matrix_bytes / MIB
    print(
        f"memory   {made.peak_memory_bytes / MIB:,.0f} MiB, {grown / MIB:,.1f} of it for the model; "
        f"its largest matrix has {largest:,.1f}"
    )
    if rows:
        print()
        show(*lines(rows))


def inference(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|DIR...",
            help="Runs, and folders of export, quantize or transformers.",
            autocompletion=completion.runs,
        ),
    ],
    formats: Annotated[
        str | None,
        typer.Option(
            "--formats",
            metavar="LIST",
            help="Measure these: fp32, bf16, int8, w8a8, int4, fp8, nvfp4, onnx, onnx-cache, onnx-int8, torch-export, "
            "gguf-fp32, gguf-fp16, gguf-bf16, gguf-q8_0, gguf-q5_1, gguf-q5_0, gguf-q4_1, gguf-q4_0. "
            "Default: fp32,bf16.",
        ),
    ] = None,
    data: SourceOption = None,
    text_key: TextKeyOption = "text",
    limit: LimitOption = 16,
    prompt_tokens: PromptOption = 64,
    new_tokens: NewOption = 64,
    repeats: RepeatsOption = 3,
    threads: ThreadsOption = None,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code", help="Load a folder's model.pt2, which can run code: only for files that you wrote."
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw size, quality and speed: .svg, .png or .pdf.")
    ] = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Measure size, quality and speed of models by format, on this machine."""
    from llmrecipes.console import setup_logging
    from llmrecipes.models.inference import InferenceOptions, bench_inference, draw
    from llmrecipes.scaling.plot import require_file
    from llmrecipes.tracking.progress import Counted

    setup_logging()
    if plot is not None:
        require_file(plot)
    options = InferenceOptions(data, text_key, limit, prompt_tokens, new_tokens, repeats, threads, trust_code)
    names = None if formats is None else [name.strip() for name in formats.split(",") if name.strip()]

    def say(line: str) -> None:
        if not as_json:
            print(line, file=sys.stderr, flush=True)

    rows = bench_inference(models, names, runs_dir, data_dir, options, say, None if as_json else Counted())
    if plot is not None:
        draw(rows, plot)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    show(*lines(rows))
    if plot is not None:
        print(f"drawn in {plot}")


def lines(rows: Sequence[FormatRow]) -> list[str | TextTable]:
    """A row for each format, and why some were skipped."""
    several = len({row.model for row in rows}) > 1
    head = ["format", "program", "MiB", "bits/byte", "perplexity", "first token", "tokens/s", "memory", "same text"]
    table = [["model", *head] if several else head]
    for row in rows:
        cells: list[str] = [row.format, row.program, f"{row.bytes / MIB:,.1f}"]
        measured = row.measured
        if measured is None:
            cells += ["-"] * 6
        else:
            cells += [
                _digits(measured.bits_per_byte, 4),
                _digits(measured.perplexity, 2),
                f"{1000 * measured.first_token_seconds:,.1f} ms",
                f"{measured.tokens_per_second:,.1f}{'' if measured.cache else '*'}",
                f"{measured.peak_memory_bytes / MIB:,.0f} MiB",
                f"{row.same_tokens}/{len(measured.tokens)}",
            ]
        table.append([row.model, *cells] if several else cells)
    first = 3 if several else 2
    printed: list[str | TextTable] = [TextTable(table, right=range(first, len(table[0])))]
    printed += [f"skipped  {row.format}: {row.skipped}" for row in rows if row.measured is None]
    if any(row.measured is not None and not row.measured.cache for row in rows):
        printed.append("*        without a cache of keys and values: each token is computed from all before it")
    return printed


def _digits(value: Any, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
