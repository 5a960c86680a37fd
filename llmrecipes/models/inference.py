"""`llmrecipes bench inference`: size, quality and speed of a model by format, on this machine.

Each format is loaded by a separate process; the tokens of the text, and what is measured, are the same for all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrecipes.console import duration
from llmrecipes.errors import UserError
from llmrecipes.models.export import export
from llmrecipes.models.export_options import ExportOptions
from llmrecipes.models.gguf_file import K_TYPES, LLAMA_CPP
from llmrecipes.models.gguf_file import TYPES as GGUF_TYPES
from llmrecipes.models.inference_worker import InferenceSpec, MeasuredForm
from llmrecipes.models.quantize import PACKAGE, quantize, text_of
from llmrecipes.models.quantize_options import QuantizeOptions
from llmrecipes.models.quantized_weights import SCHEMES
from llmrecipes.packages import find_spec
from llmrecipes.rundir import Run

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmrecipes.tracking.progress import Counted

PLAIN = ("fp32", "bf16")
GGUF = tuple(f"gguf-{name}" for name in (*GGUF_TYPES, *K_TYPES))
ONNX = {
    "onnx": ExportOptions(),
    "onnx-cache": ExportOptions(cache=True),
    "onnx-int8": ExportOptions("int8", cache=True),
}
EXPORTED = (*ONNX, "torch-export", *GGUF)
FORMATS = (*PLAIN, *SCHEMES, *EXPORTED)
FILES = {"model.onnx": "onnx", "model.pt2": "torch-export", "model.gguf": "gguf"}
"""What says the format of a folder that is not one of transformers."""
NEEDS = {"onnxruntime": "onnxruntime", "llama.cpp": LLAMA_CPP}


@dataclass(frozen=True)
class InferenceOptions:
    """Options of a measurement.

    Attributes:
        data: source of text (`evaluation.texts.Texts.parse`); None: the split `valid` of a run, none of a folder.
        text_key: column of a source in jsonl or parquet.
        limit: documents at most; None: all.
        prompt_tokens: number of tokens of the prompt.
        new_tokens: that are generated.
        repeats: repetitions of the generation; the median counts.
        threads: threads of a process; None: the cores of this machine.
        trust_code: load a folder's model.pt2, whoever wrote it.
    """

    data: str | None = None
    text_key: str = "text"
    limit: int | None = 16
    prompt_tokens: int = 64
    new_tokens: int = 64
    repeats: int = 3
    threads: int | None = None
    trust_code: bool = False


@dataclass(frozen=True)
class FormatRow:
    """A format of a model.

    Attributes:
        model: run or folder, as the user wrote it.
        format: its name.
        program: that ran it.
        bytes: size in bytes of its weights on disk.
        measured: None where it was skipped.
        skipped: why.
        same_tokens: of the greedy continuation, those before the first that differs from the model's first row.
    """

    model: str
    format: str
    program: str
    bytes: int
    measured: MeasuredForm | None
    skipped: str = ""
    same_tokens: int | None = None


def bench_inference(
    models: Sequence[str],
    formats: Sequence[str] | None,
    runs_dir: Path,
    data_dir: Path,
    options: InferenceOptions,
    say: Callable[[str], None] = lambda _line: None,
    progress: Counted | None = None,
) -> list[FormatRow]:
    """Measure models in formats.

    Args:
        models: runs, or folders of `export`, `quantize` or transformers.
        formats: names of `FORMATS`, which are made in a temporary folder; None: fp32 and bf16. A folder that is
            quantised, or another program's, has its own.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept.
        options: what is measured.
        say: receives a line before each format is measured.
        progress: shows how much of a format is written.

    Raises:
        UserError: an unknown format or model, one that a folder cannot be written in, or a process that fails.
    """
    if unknown := [name for name in formats or () if name not in FORMATS]:
        raise UserError(
            f"unknown format {unknown[0]!r}", where="--formats", rule=f"one or more of {', '.join(FORMATS)}"
        )
    rows: list[FormatRow] = []
    own = [_own_form(Path(model)) for model in models]
    for model, form in zip(models, own, strict=True):
        _require_trusted(model, form, options)
    total = sum(1 if form else len(formats or PLAIN) for form in own)
    began = time.monotonic()
    for model in models:
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            first: MeasuredForm | None = None
            for name, folder, program, size in _forms(model, formats, runs_dir, data_dir, place, progress):
                say(f"{model}  {name}  {_how_far(len(rows), total, time.monotonic() - began)}")
                needs = NEEDS.get(program)
                if needs is not None and find_spec(needs) is None:
                    rows.append(FormatRow(model, name, program, size, None, f"the package {needs} is not installed"))
                    continue
                texts = _texts(model, folder, runs_dir, data_dir, options, place)
                measured = measured_in_process(folder, program, name if name in PLAIN else "auto", texts, options)
                first = first or measured
                same = _same(first.tokens, measured.tokens)
                rows.append(FormatRow(model, name, program, size, measured, same_tokens=same))
    return rows


def _require_trusted(model: str, form: str | None, options: InferenceOptions) -> None:
    if form == "torch-export" and not options.trust_code:
        raise UserError(
            "model.pt2 in a folder is not loaded",
            where=model,
            rule="torch.export.load unpickles the file and evaluates expressions in it, so it can run any code",
            fix="name a run with --formats torch-export, which writes a new file; or --trust-code, if you wrote "
            "this one",
        )


def _how_far(done: int, total: int, seconds: float) -> str:
    left = f", about {duration(seconds / done * (total - done))} left" if done else ""
    return f"({done + 1} of {total}{left})"


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _forms(
    model: str,
    formats: Sequence[str] | None,
    runs_dir: Path,
    data_dir: Path,
    place: Path,
    progress: Counted | None,
) -> Iterator[tuple[str, Path, str, int]]:
    """Format, folder, program and bytes of the weights, of each format of a model; made when it is asked for."""
    folder = Path(model)
    is_folder = folder.is_dir() and not Run(folder).exists()
    if (form := _own_form(folder)) is not None:
        if form not in FILES.values():
            _require_package(form)
        yield form, folder, _program(form) if form in FILES.values() else "transformers", _bytes(folder)
        return
    exported = [name for name in formats or () if name in EXPORTED]
    if is_folder and exported:
        raise UserError(
            f"{exported[0]} needs a run, not a folder",
            where="--formats",
            rule="this format is exported from a run",
            fix=f"name a run, or leave {exported[0]} out",
        )
    source = folder
    if not is_folder:
        source = place / "hf"
        export(model, source, runs_dir, data_dir, ExportOptions(), progress)
    for name in formats or PLAIN:
        if name in PLAIN:
            yield name, source, "transformers", _stored_bytes(source, name)
        elif name in SCHEMES:
            _require_package(name)
            quantize(str(source), place / name, runs_dir, data_dir, QuantizeOptions(name), progress)
            yield name, place / name, "transformers", _bytes(place / name)
        elif name.removeprefix("gguf-") in K_TYPES and find_spec(LLAMA_CPP) is None:
            yield name, place / name, _program(name), 0
        else:
            _export_program(model, name, place / name, runs_dir, data_dir)
            yield name, place / name, _program(name), _bytes(place / name)


def _own_form(folder: Path) -> str | None:
    """The format of a folder that has one only, because it is quantised or another program's; None: of all others."""
    if not folder.is_dir() or Run(folder).exists():
        return None
    kind = next((kind for file, kind in FILES.items() if (folder / file).is_file()), None)
    return scheme_of(folder) if kind is None else kind


def _export_program(model: str, name: str, out: Path, runs_dir: Path, data_dir: Path) -> None:
    from llmrecipes.models.exported_programs import export_program
    from llmrecipes.models.gguf_file import export_gguf

    if name in GGUF:
        options = ExportOptions(dtype=name.removeprefix("gguf-"), tokenizer=False)
        export_gguf(model, out, runs_dir, data_dir, options)
    elif name in ONNX:
        export_program(model, "onnx", out, runs_dir, data_dir, ONNX[name])
    else:
        export_program(model, name, out, runs_dir, data_dir, ExportOptions())


def _program(name: str) -> str:
    return "onnxruntime" if name in ONNX else {"torch-export": "torch.export"}.get(name, "llama.cpp")


def _require_package(scheme: str) -> None:
    if find_spec(PACKAGE) is None:
        raise UserError(
            f"{scheme} needs the package compressed-tensors, which is not installed",
            where="--formats",
            rule="it is in the extra quantize",
            fix="pip install 'llmrecipes[quantize]'",
        )


def scheme_of(folder: Path) -> str | None:
    """The scheme of a quantised folder, or the name of its format; None: its weights are as they were trained."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "is neither a run nor a model",
            where=str(folder),
            rule="name a run, or a folder with config.json, model.onnx, model.pt2 or model.gguf",
        ) from error
    quantised = config.get("quantization_config")
    if quantised is None:
        return None
    if quantised.get("quant_method") != "compressed-tensors":
        return str(quantised.get("quant_method"))
    bits = next(iter(quantised["config_groups"].values()))["weights"]["num_bits"]
    form = quantised["format"]
    return next((name for name, kind in SCHEMES.items() if (kind.form, kind.bits) == (form, bits)), str(form))


def _bytes(folder: Path) -> int:
    return sum(
        path.stat().st_size
        for path in folder.iterdir()
        if path.suffix == ".safetensors" or any(path.name.startswith(file) for file in FILES)
    )


def _stored_bytes(folder: Path, dtype: str) -> int:
    """Bytes of the weights of a folder in another type."""
    from math import prod

    from llmrecipes.hf.safetensors import ELEMENT_TYPES, SafetensorsFolder

    source = SafetensorsFolder(folder)
    return sum(prod(source.shape(name)) for name in source.names()) * ELEMENT_TYPES[dtype].itemsize


@dataclass(frozen=True)
class TokenFile:
    """Text as tokens, in a file.

    Attributes:
        file: lines {"tokens": [...], "bytes": N}, a document each.
        start: ids before the text of a document.
        window: tokens that perplexity reads at once.
    """

    file: Path
    start: tuple[int, ...]
    window: int


def _texts(
    model: str, folder: Path, runs_dir: Path, data_dir: Path, options: InferenceOptions, place: Path
) -> TokenFile | None:
    """The text of a measurement, read once for all formats of a model; None if none is named."""
    is_folder = folder.is_dir() and Path(model) == folder
    if is_folder and options.data is None:
        return None
    if is_folder and not (folder / "tokenizer.json").is_file():
        return None
    source = folder if is_folder or not (place / "hf").exists() else place / "hf"
    return written_texts(model, source, runs_dir, data_dir, options, place / "texts.jsonl")


def written_texts(
    model: str, folder: Path, runs_dir: Path, data_dir: Path, options: InferenceOptions, file: Path
) -> TokenFile:
    """Write the text of a measurement as tokens, unless it is written.

    Args:
        model: run or folder.
        folder: folder of the model in Hugging Face's form.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept.
        options: source and limit.
        file: to write.

    Raises:
        UserError: no such source, or it is empty.
    """
    from llmrecipes.evaluation.texts import Texts as Source
    from llmrecipes.workflow.pretrained import SEQ_LENGTH

    tokenizer, prepared, positions = text_of(folder, model, runs_dir, data_dir)
    # As `llmrecipes eval` reads a folder, and a run.
    window = min(positions, SEQ_LENGTH if prepared is None else prepared_window(model, runs_dir))
    if not file.exists():
        texts = Source.parse(options.data or "valid", text_key=options.text_key, limit=options.limit)
        texts.require(prepared)
        lines = (
            json.dumps({"tokens": [int(token) for token in text.tokens], "bytes": text.bytes})
            for text in texts.documents(tokenizer, prepared)
        )
        file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return TokenFile(file, tuple(tokenizer.start), window)


def prepared_window(model: str, runs_dir: Path) -> int:
    """Tokens that `llmrecipes eval` reads at once, of a run."""
    from llmrecipes.workflow.model_source import find_checkpoint

    run, entry = find_checkpoint(model, runs_dir)
    return int(Run(run).recipe_of(entry.step).model.seq_length)


def measured_in_process(
    folder: Path, program: str, dtype: str, texts: TokenFile | None, options: InferenceOptions
) -> MeasuredForm:
    """Measure a model in a new process.

    Args:
        folder: folder of the model.
        program: that runs it.
        dtype: `fp32`, `bf16` or `auto`, of transformers.
        texts: for perplexity and the prompt.
        options: what is measured.

    Raises:
        UserError: the process fails.
    """
    from llmrecipes.hardware.cluster import detect

    threads = options.threads or max(1, int(detect().cpu_cores))
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "measured.json"
        file = Path(temporary) / "spec.json"
        spec = InferenceSpec(
            folder=folder.absolute(),
            program=program,
            dtype=dtype,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            repeats=options.repeats,
            threads=threads,
            out=out,
            window=texts.window if texts else 1,
            start=texts.start if texts else (),
            texts=texts.file.absolute() if texts else None,
        )
        file.write_text(spec.model_dump_json(), "utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "llmrecipes.models.inference_worker", str(file)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode or not out.exists():
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
            raise UserError(
                f"{program} cannot run this model (exit code {done.returncode}): {last[:300]}",
                where=str(folder),
                rule="each model is first run once in a separate process",
            )
        return MeasuredForm(**json.loads(out.read_text("utf-8")))


def compare_folders(
    model: str,
    original: Path,
    quantized: Path,
    scheme: str,
    runs_dir: Path,
    data_dir: Path,
    options: InferenceOptions,
) -> list[FormatRow]:
    """Measure a model before and after it is quantised, on the same text.

    Args:
        model: run or folder, as the user wrote it.
        original: its folder in Hugging Face's form.
        quantized: the folder that was written.
        scheme: its name.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept.
        options: what is measured; of a folder without `data`, no text is.
    """
    is_folder = Path(model) == original
    with tempfile.TemporaryDirectory() as temporary:
        texts = None
        if options.data is not None or not is_folder:
            texts = written_texts(model, original, runs_dir, data_dir, options, Path(temporary) / "texts.jsonl")
        before = measured_in_process(original, "transformers", "auto", texts, options)
        after = measured_in_process(quantized, "transformers", "auto", texts, options)
    return [
        FormatRow(model, "original", "transformers", _bytes(original), before, same_tokens=len(before.tokens)),
        FormatRow(
            model, scheme, "transformers", _bytes(quantized), after, same_tokens=_same(before.tokens, after.tokens)
        ),
    ]


def draw(rows: Sequence[FormatRow], file: Path) -> None:
    """Draw size against bits per byte; the area of a point is the speed.

    Args:
        rows: those that were measured with text are drawn.
        file: .svg, .png or .pdf.

    Raises:
        UserError: nothing to draw, or the file cannot be written.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    shown = [
        (row, row.measured, row.measured.bits_per_byte)
        for row in rows
        if row.measured is not None and row.measured.bits_per_byte is not None
    ]
    if not shown:
        raise UserError(
            "no row has bits per byte", where="--plot", rule="the plot shows quality over size", fix="add --data"
        )
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    fastest = max(measured.tokens_per_second for _, measured, _ in shown)
    height = max(bits for _, _, bits in shown) - min(bits for _, _, bits in shown)
    named: dict[tuple[float, float], list[str]] = {}  # formats at about the same place have one label
    for place, (row, measured, bits) in enumerate(shown):
        colour = colormaps["tab10"](place % 10)
        mib = row.bytes / 2**20
        axes.scatter(
            mib,
            bits,
            s=30 + 400 * measured.tokens_per_second / fastest,
            color=colour,
            alpha=0.7,
            label=f"{row.format}, {measured.tokens_per_second:,.0f} tokens/s",
        )
        near = (at for at in named if abs(at[0] / mib - 1) < 0.1 and abs(at[1] - bits) <= 0.04 * height)
        named.setdefault(next(near, (mib, bits)), []).append(row.format)
    for at, names in named.items():
        axes.annotate("\n".join(names), at, textcoords="offset points", xytext=(8, 8), fontsize="small")
    axes.margins(x=0.2, y=0.15)
    axes.set(xscale="log", xlabel="weights on disk [MiB]", ylabel="held-out bits per byte (lower is better)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(title="area: tokens/s", loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    try:
        figure.savefig(file, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise UserError(
            f"cannot write: {error.strerror}", where=str(file), fix="--plot with a path that can be written"
        ) from error
