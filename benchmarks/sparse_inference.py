"""Inference of a mixture of experts beside dense models of its active and of its total size, in seconds of one core.

    python -m benchmarks.sparse_inference

A Mixtral with 2 of 8 experts a token, and two Llamas: one with an MLP as wide as the two, one as wide as the eight.
Random weights of 4 layers of 512 with a vocabulary of 4,096: speed and memory do not depend on what is learnt. Seconds
are those of the process, on one thread, so that other work on the machine counts little.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common import close, machine, parser, show
from llmrecipes.models.export import ExportOptions
from llmrecipes.models.gguf_file import export_gguf
from llmrecipes.models.importing import import_model
from llmrecipes.models.inference_worker import PROGRAMS, InferenceSpec, peak_memory
from llmrecipes.models.quantize import QuantizeOptions, quantize
from llmrecipes.units import MIB

PROMPT, NEW, REPEATS = 64, 24, 3
SHAPE = {
    "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "2 of 8 experts": (
        "mixtral", {"intermediate_size": 1024, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "dense, as active": ("llama", {"intermediate_size": 2048}),
    "dense, as total": ("llama", {"intermediate_size": 8192}),
}  # fmt: skip
FORMATS = ("fp32", "bf16", "int8", "gguf-fp32", "gguf-q8_0", "gguf-q4_k_m")


def folders(source: Path, place: Path) -> Iterator[tuple[str, Path, str]]:
    """Format, folder and program of a model in all formats."""
    created = import_model(str(source), ["data.tokenizer.type=bpe"], place / "runs", "one", name="random")
    for name in FORMATS:
        out = place / name
        if name.startswith("gguf-"):
            options = ExportOptions(dtype=name.removeprefix("gguf-"), tokenizer=False)
            export_gguf(created.run_dir, out, place / "runs", place / "data", options)
            yield name, out, "llama.cpp"
        elif name == "int8":
            quantize(str(source), out, place / "runs", place / "data", QuantizeOptions(name))
            yield name, out, "transformers"
        else:
            yield name, source, "transformers"


def measured(name: str, folder: Path, program: str) -> dict[str, Any]:
    """Seconds of the first token and a further one, and the memory that the model takes, of a forked process."""
    reader, writer = os.pipe()
    if not os.fork():
        spec = InferenceSpec(
            folder=folder, program=program, dtype=name, window=1, prompt_tokens=PROMPT, new_tokens=NEW,
            repeats=REPEATS, threads=1, out=folder,
        )  # fmt: skip
        before, prompt = peak_memory(), list(range(PROMPT))
        with torch.no_grad():
            loaded = PROGRAMS[program](spec)
            firsts, others = [], []
            for _ in range(REPEATS + 1):
                started = time.process_time()
                stream = loaded.greedy(prompt)
                next(stream)
                first = time.process_time()
                for _ in range(NEW):
                    next(stream)
                firsts.append(first - started)
                others.append((time.process_time() - first) / NEW)
        values = {"first": min(firsts[1:]), "token": min(others[1:]), "memory": peak_memory() - before}
        os.write(writer, json.dumps(values).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        return dict(json.load(file))


def main() -> None:
    """Measure all models in all formats."""
    args, started_on = parser(__doc__).parse_args(), machine()
    torch.set_num_threads(1)
    rows = []
    for title, (kind, sizes) in MODELS.items():
        with tempfile.TemporaryDirectory() as temporary:
            source = Path(temporary) / "hf"
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(kind, **SHAPE, **sizes)
            model = transformers.AutoModelForCausalLM.from_config(config)
            count = sum(parameter.numel() for parameter in model.parameters())
            model.save_pretrained(source)
            del model
            for name, folder, program in folders(source, Path(temporary)):
                row = {"model": title, "parameters": count, "format": name, **measured(name, folder, program)}
                print(row, flush=True)
                rows.append(row)
    columns = ("model", "parameters", "format", "first token, ms", "a token, ms", "memory, MiB")
    lines = [
        (
            row["model"], f"{row['parameters'] / 1e6:.0f}M", row["format"], f"{row['first'] * 1e3:.0f}",
            f"{row['token'] * 1e3:.1f}", f"{row['memory'] / MIB:,.0f}",
        )
        for row in rows
    ]  # fmt: skip
    show("Seconds of one core", columns, lines)
    close({"rows": rows}, started_on, args.json)


if __name__ == "__main__":
    main()
