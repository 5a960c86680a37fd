"""`llmrecipes export --to gguf`: a checkpoint as one file for llama.cpp, and what is built on it.

The names of its tensors and keys, and the arithmetic of its types, are the package gguf's, which llama.cpp's authors
publish; what is here says which tensor is which, as in llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.models.create import published, require_absent
from llmrecipes.models.export import ExportOptions
from llmrecipes.models.programs import ExportedProgram, require_runtimes
from llmrecipes.rundir import Run
from llmrecipes.tracking.progress import Counted
from llmrecipes.workflow.model_source import find_checkpoint, open_run, require_merge

if TYPE_CHECKING:
    import torch

    from llmrecipes.workflow.model_source import OpenedRun

FILE = "model.gguf"
TYPES: Mapping[str, str] = {
    "fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q5_1": "Q5_1", "q5_0": "Q5_0", "q4_1": "Q4_1",
    "q4_0": "Q4_0",
}  # fmt: skip
"""llama.cpp's types of matrices, those that the package can write; vectors are fp32, as in llama.cpp's own files."""
FEW_BITS = ("q5_1", "q5_0", "q4_1", "q4_0")
WIDER = ("token_embd", "output")
"""Matrices that are Q8_0 where the others have 4 or 5 bits; llama.cpp's own files have them in Q6_K or Q8_0."""
FAMILIES: Mapping[str, str] = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""llama.cpp's architecture of a family."""
ROTATES_PAIRS = ("LLAMA",)
"""Architectures that rotate neighbouring channels, where transformers rotates channels half a head apart."""
OURS = "llama-bpe"
"""llama.cpp's pattern of words next to that of the byte-level BPE of `prepare`, which it does not have."""
PATTERNS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+": "qwen2",
}
"""llama.cpp's name of a pattern that splits text into words."""


def export_gguf(
    reference: str, out: Path | None, runs_dir: Path, data_dir: Path, options: ExportOptions
) -> ExportedProgram:
    """Write a checkpoint as `FILE`, tensor by tensor: memory holds the largest about three times.

    Args:
        reference: `RUN` (its newest checkpoint) or `RUN@STEP`.
        out: the folder, which must not exist; None: `gguf/step-<step>` in the run's directory.
        runs_dir, data_dir, options: as `export.export`; `dtype` is one of `TYPES`.

    Raises:
        UserError: as `export.export`; a family, a scaling of positions or a tokenizer that llama.cpp lacks, or a width
            that the type's blocks do not divide. Nothing is left behind.
    """
    started = time.monotonic()
    require_runtimes("--to", "gguf", ("gguf",))
    run, entry = find_checkpoint(reference, runs_dir)
    out = run / "gguf" / f"step-{entry.step:08d}{'-ema' if options.averaged else ''}" if out is None else out
    require_absent(out)
    require_merge(Run(run).recipe(), run, requested=options.merge_adapter)
    opened = open_run(run, entry, options.family, averaged=options.averaged)
    dtype = options.dtype or opened.recipe.train.precision
    if dtype not in TYPES:
        raise UserError(
            f"{dtype!r} with --to gguf", where="--dtype", rule=f"one of {', '.join(TYPES)}",
            fix="--dtype fp16, then llama.cpp's program llama-quantize, which has the other types (Q4_K_M)",
        )  # fmt: skip
    _require_form(opened)
    notes: tuple[str, ...] = ()
    with published(out) as folder:
        tokens: dict[str, Any] = {}
        if options.tokenizer:
            tokens, notes = _tokens(opened, data_dir)
        parameters = _write(opened, folder / FILE, dtype, tokens)
        size = (folder / FILE).stat().st_size
    return ExportedProgram(
        path=str(out), run=str(run), step=entry.step, form="gguf", family=opened.family.name, dtype=dtype,
        parameters=parameters, bytes=size, largest_difference=None, notes=notes,
        seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip


def _require_form(opened: OpenedRun) -> None:
    family, positions = opened.family.name, opened.config.get("rope_parameters") or {}
    if family not in FAMILIES:
        raise UserError(
            f"a model of type {family}", where="--to gguf", rule=f"one of {', '.join(FAMILIES)}",
            fix="--to onnx, or --family with one of them if the model has its form",
        )  # fmt: skip
    kind = positions.get("rope_type", "default")
    if kind != "default":
        raise UserError(
            f"positions of rope_type {kind}", where="--to gguf", rule="unscaled rotary positions", fix="--to onnx"
        )


def _write(opened: OpenedRun, file: Path, dtype: str, tokens: Mapping[str, Any]) -> int:
    import gguf
    import numpy as np
    import torch

    kind, config, source = gguf.GGMLQuantizationType[TYPES[dtype]], opened.config, opened.source
    architecture = gguf.MODEL_ARCH[FAMILIES[opened.family.name]]
    known = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    channels = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name(opened.recipe.name)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}" if dtype != "fp32" else "ALL_F32"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_key_length(channels)
    writer.add_value_length(channels)
    writer.add_rope_dimension_count(channels)
    writer.add_rope_freq_base(float((config.get("rope_parameters") or {}).get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokens(writer, tokens, config["vocab_size"])
    names = {name: known.get_name(name, try_suffixes=(".weight", ".bias")) for name in source.names()}
    of_type: dict[str, gguf.GGMLQuantizationType] = {}
    parameters = 0
    for name, theirs in names.items():
        shape = source.shape(name)
        if theirs is None:
            raise UserError(f"the tensor {name}", where="--to gguf", rule="llama.cpp has a name for every tensor")
        of_type[name] = kind if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        if dtype in FEW_BITS and theirs.removesuffix(".weight") in WIDER:
            of_type[name] = gguf.GGMLQuantizationType.Q8_0
        block, size = gguf.GGML_QUANT_SIZES[of_type[name]]
        if shape[-1] % block:
            raise UserError(
                f"{name} has rows of {shape[-1]}", where="--dtype", rule=f"{dtype} has blocks of {block} numbers",
                fix="--dtype fp16",
            )  # fmt: skip
        count = 1
        for side in shape:
            count *= side
        parameters += count
        stored = gguf.quant_shape_to_byte_shape(shape, of_type[name]) if block > 1 or size == 1 else shape
        # Raw bytes for types that numpy does not have.
        element = {"fp16": "float16", "fp32": "float32"}.get(dtype, "uint8") if len(shape) > 1 else "float32"
        if dtype == "bf16" and len(shape) > 1:
            stored = (*shape[:-1], 2 * shape[-1])
        writer.add_tensor_info(theirs, stored, np.dtype(element), count // block * size, of_type[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    progress = Counted()
    progress.begin("tensors", len(names))
    for name in names:
        values = source.read(name).to(torch.float32)
        if architecture.name in ROTATES_PAIRS and ".q_proj." in name:
            values = _pairs(values, heads)
        elif architecture.name in ROTATES_PAIRS and ".k_proj." in name:
            values = _pairs(values, groups)
        writer.write_tensor_data(gguf.quants.quantize(values.contiguous().numpy(), of_type[name]))
        progress.add(1)
    progress.close()
    writer.close()
    return parameters


def _pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (or a bias) of queries or keys with the channels that are rotated together side by side."""
    halves = weight.view(heads, 2, weight.size(0) // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _add_tokens(writer: Any, tokens: Mapping[str, Any], vocabulary: int) -> None:
    import gguf

    if not tokens:
        writer.add_tokenizer_model("no_vocab")
        return
    special: set[int] = tokens["special"]
    names: list[str] = [f"[PAD{number}]" for number in range(vocabulary)]
    kinds = [gguf.TokenType.UNUSED] * vocabulary
    for text, number in tokens["tokens"].items():
        names[number] = text
        kinds[number] = gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokens["pattern"])
    writer.add_token_list(names)
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges(tokens["merges"])
    writer.add_eos_token_id(tokens["end"])
    writer.add_add_bos_token(False)


def _tokens(opened: OpenedRun, data_dir: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What a file says of a run's byte-level BPE, and notes.

    Raises:
        UserError: its data is not prepared, or llmrecipes does not know its pattern in llama.cpp.
    """
    from llmrecipes.data.encode import WORDS
    from llmrecipes.data.prepared import TOKENIZER
    from llmrecipes.hf.tokenizer_files import write_tokenizer
    from llmrecipes.models.export import prepared_of

    prepared = prepared_of(opened.recipe, data_dir)
    with tempfile.TemporaryDirectory() as folder:
        special = write_tokenizer(Path(folder), opened.recipe, prepared)
        file: dict[str, Any] = json.loads((Path(folder) / TOKENIZER).read_text("utf-8"))
    model, splitter = file["model"], json.dumps(file.get("pre_tokenizer"))
    pattern = next((name for text, name in PATTERNS.items() if json.dumps(text)[1:-1] in splitter), None)
    notes: tuple[str, ...] = ()
    if json.dumps(WORDS)[1:-1] in splitter:
        pattern = OURS
        notes = (
            f"llama.cpp splits text into words by its pattern {OURS}: where that differs from this tokenizer's "
            "(contractions, line ends after punctuation), tokens are others than in training",
        )
    if model.get("type") != "BPE" or pattern is None:
        raise UserError(
            f"a tokenizer of type {model.get('type')} with another pattern", where="--to gguf",
            rule="a byte-level BPE whose pattern of words llama.cpp has", fix="--no-tokenizer, and token ids as input",
        )  # fmt: skip
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    added = {token["content"]: token["id"] for token in file.get("added_tokens", [])}
    end = special["eos_token_id"]
    return {
        "tokens": {**model["vocab"], **added}, "special": set(added.values()), "merges": merges, "pattern": pattern,
        "end": end[0] if isinstance(end, list) else end,
    }, notes  # fmt: skip
