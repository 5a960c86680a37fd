"""`llmrecipes export --to gguf`: a checkpoint as one file for llama.cpp, and what is built on it.

The names of its tensors and keys, and the arithmetic of its types, are the package gguf's, which llama.cpp's authors
publish; what is here says which tensor is which, as in llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

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
K_TYPES: Mapping[str, str] = {"q6_k": "Q6_K", "q5_k_m": "Q5_K_M", "q4_k_m": "Q4_K_M"}
"""Types that only llama.cpp writes: mixtures, in which it gives some tensors more bits."""
K_BLOCK = 256
"""Numbers of a row that such a type rounds together."""
LLAMA_CPP = "llama_cpp"
"""The package with llama.cpp's own quantiser."""
FEW_BITS = ("q5_1", "q5_0", "q4_1", "q4_0")
WIDER = ("token_embd", "output")
"""Matrices that are Q8_0 where the others have 4 or 5 bits; llama.cpp's own files have them in Q6_K or Q8_0."""
FAMILIES: Mapping[str, str] = {
    "llama": "LLAMA", "mistral": "LLAMA", "mixtral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE",
}  # fmt: skip
"""llama.cpp's architecture of a family."""
ROTATES_PAIRS = ("LLAMA",)
"""Architectures that rotate neighbouring channels, where transformers rotates channels half a head apart."""
ROUTER = ".ffn_gate_inp.weight"
"""End of the names of routers, which llama.cpp's own files have in fp32: their scores select the experts."""
EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""The number of an expert in a name; llama.cpp has the same matrix of all experts of a layer as one tensor."""
OURS = "llama-bpe"
"""llama.cpp's pattern of words next to that of the byte-level BPE of `prepare`, which it does not have."""
PATTERNS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+": "qwen2",
}
"""llama.cpp's name of a pattern that splits text into words, besides Llama 3's."""


def export_gguf(
    reference: str, out: Path | None, runs_dir: Path, data_dir: Path, options: ExportOptions
) -> ExportedProgram:
    """Write a checkpoint as `FILE`, matrix by matrix, each expert's too: memory holds the largest about three times.

    For `K_TYPES` llama.cpp reads a file in the precision of the run, which is beside the new one until then.

    Args:
        reference: `RUN` (its newest checkpoint) or `RUN@STEP`.
        out: the folder, which must not exist; None: `gguf/step-<step>` in the run's directory.
        runs_dir, data_dir, options: as `export.export`; `dtype` is one of `TYPES` or `K_TYPES`.

    Raises:
        UserError: as `export.export`; a family, a scaling of positions, a router or a tokenizer that llama.cpp lacks,
            a width that the type's blocks do not divide, or no package for it. Nothing is left behind.
    """
    started = time.monotonic()
    require_runtimes("--to", "gguf", ("gguf",))
    run, entry = find_checkpoint(reference, runs_dir)
    out = run / "gguf" / f"step-{entry.step:08d}{'-ema' if options.averaged else ''}" if out is None else out
    require_absent(out)
    require_merge(Run(run).recipe(), run, requested=options.merge_adapter)
    opened = open_run(run, entry, options.family, averaged=options.averaged)
    dtype = options.dtype or opened.recipe.train.precision
    if dtype not in TYPES and dtype not in K_TYPES:
        raise UserError(
            f"{dtype!r} is not supported with --to gguf", where="--dtype",
            rule=f"one of {', '.join((*TYPES, *K_TYPES))}",
            fix="--dtype fp16, then llama.cpp's llama-quantize for other types",
        )  # fmt: skip
    if dtype in K_TYPES and find_spec(LLAMA_CPP) is None:
        raise UserError(
            f"{dtype} needs the package {LLAMA_CPP}, which is not installed", where="--dtype",
            rule=f"only llama.cpp writes {', '.join(K_TYPES)}",
            fix="pip install llama-cpp-python, or --dtype fp16 and then llama.cpp's llama-quantize",
        )  # fmt: skip
    _require_form(opened.family.name, opened.config)
    notes: tuple[str, ...] = ()
    with published(out) as folder:
        tokens: dict[str, Any] = {}
        if options.tokenizer:
            tokens, notes = _tokens(opened, data_dir)
        parameters = _write(opened, folder / FILE, dtype, tokens)
        if dtype in K_TYPES:
            _quantize(folder / FILE, dtype)
        size = (folder / FILE).stat().st_size
    return ExportedProgram(
        path=str(out), run=str(run), step=entry.step, form="gguf", family=opened.family.name, dtype=dtype,
        parameters=parameters, bytes=size, largest_difference=None, notes=notes,
        seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip


def _require_form(family: str, config: Mapping[str, Any]) -> None:
    positions = config.get("rope_parameters") or {}
    if family not in FAMILIES:
        raise UserError(
            f"models of type {family} are not supported", where="--to gguf", rule=f"one of {', '.join(FAMILIES)}",
            fix="--to onnx, or --family with one of them if the architecture matches",
        )  # fmt: skip
    kind = positions.get("rope_type", "default")
    if kind != "default":
        raise UserError(
            f"rope_type {kind} is not supported",
            where="--to gguf",
            rule="rotary positions must be unscaled",
            fix="--to onnx",
        )
    if family == "qwen3_moe" and config["mlp_only_layers"]:
        raise UserError(
            f"layers {config['mlp_only_layers']} have no experts", where="--to gguf",
            rule="in llama.cpp every layer of a qwen3_moe has experts", fix="--to onnx",
        )  # fmt: skip
    if family == "qwen3_moe" and not config["norm_topk_prob"]:
        raise UserError(
            "model.moe_router_pre_softmax is not supported", where="--to gguf",
            rule="in llama.cpp the scores of a token's experts sum to one", fix="--to onnx",
        )  # fmt: skip


def _write(opened: OpenedRun, file: Path, dtype: str, tokens: Mapping[str, Any]) -> int:
    import gguf
    import numpy as np
    import torch

    written = opened.recipe.train.precision if dtype in K_TYPES else dtype
    kind, config, source = gguf.GGMLQuantizationType[TYPES[written]], opened.config, opened.source
    architecture = gguf.MODEL_ARCH[FAMILIES[opened.family.name]]
    known = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_name(opened.recipe.name)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}" if written != "fp32" else "ALL_F32"])
    _add_shape(writer, config)
    _add_tokens(writer, tokens, config["vocab_size"])
    parts: dict[str, list[str]] = {}
    for name in source.names():
        theirs = known.get_name(EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise UserError(f"llama.cpp has no name for the tensor {name}", where="--to gguf")
        parts.setdefault(theirs, []).append(name)
    of_type: dict[str, gguf.GGMLQuantizationType] = {}
    sizes: dict[str, int] = {}
    parameters = 0
    for theirs, names in parts.items():
        names.sort(key=_expert)
        row, shape = source.shape(names[0])[-1], source.shape(names[0])
        of_type[theirs] = kind if len(shape) > 1 and not theirs.endswith(ROUTER) else gguf.GGMLQuantizationType.F32
        if dtype in FEW_BITS and theirs.removesuffix(".weight") in WIDER:
            of_type[theirs] = gguf.GGMLQuantizationType.Q8_0
        block, size = gguf.GGML_QUANT_SIZES[of_type[theirs]]
        needed = K_BLOCK if dtype in K_TYPES and of_type[theirs] is kind else block
        if row % needed:
            raise UserError(
                f"{names[0]} has rows of {row} elements", where="--dtype", rule=f"{dtype} needs rows of a multiple "
                f"of {needed} elements",
                fix="--dtype fp16",
            )  # fmt: skip
        if EXPERT.search(names[0]):
            shape = (len(names), *shape)
        count = prod(shape)
        parameters += count
        sizes[theirs] = count // block * size
        # Raw bytes for types that numpy does not have.
        element = {"F32": "float32", "F16": "float16"}.get(of_type[theirs].name, "uint8")
        stored = gguf.quant_shape_to_byte_shape(shape, of_type[theirs]) if element == "uint8" else shape
        writer.add_tensor_info(theirs, stored, np.dtype(element), sizes[theirs], of_type[theirs])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()

    def converted(name: str, theirs: str) -> Any:
        values = source.read(name).to(torch.float32)
        if architecture.name in ROTATES_PAIRS and ".q_proj." in name:
            values = _pairs(values, heads)
        elif architecture.name in ROTATES_PAIRS and ".k_proj." in name:
            values = _pairs(values, groups)
        progress.add(1)
        return gguf.quants.quantize(values.contiguous().numpy(), of_type[theirs])

    progress = Counted()
    progress.begin("tensors", sum(map(len, parts.values())))
    for theirs, names in parts.items():
        writer.write_tensor_data(_Arrays(sizes[theirs], (converted(name, theirs) for name in names)))
    progress.close()
    writer.close()
    return parameters


def _quantize(file: Path, dtype: str) -> None:
    """Let llama.cpp write a file in one of its `K_TYPES`, in its place."""
    import gguf
    import llama_cpp

    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    source = file.rename(file.with_name(f"source-{file.name}"))
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = gguf.LlamaFileType[f"MOSTLY_{K_TYPES[dtype]}"]
    if llama_cpp.llama_model_quantize(bytes(source), bytes(file), options):
        raise RuntimeError(f"llama.cpp did not write {dtype}; see its messages above")
    source.unlink()


def _add_shape(writer: Any, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    channels = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(channels)
    writer.add_value_length(channels)
    writer.add_rope_dimension_count(channels)
    writer.add_rope_freq_base(float((config.get("rope_parameters") or {}).get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _expert(name: str) -> int:
    number = EXPERT.search(name)
    return int(number[1]) if number else 0


class _Arrays:
    """Arrays that are written one after another, as one tensor: what `GGUFWriter.write_tensor_data` asks of an array.

    Args:
        nbytes: size in bytes of all of them.
        arrays: in order; each is made when it is written.
    """

    def __init__(self, nbytes: int, arrays: Iterable[Any]) -> None:
        self.nbytes, self._arrays = nbytes, arrays

    def tofile(self, file: IO[bytes]) -> None:
        """Write them at the end of a file."""
        written = 0
        for array in self._arrays:
            array.tofile(file)
            written += array.nbytes
        if written != self.nbytes:
            raise RuntimeError(f"{written} bytes instead of {self.nbytes}")


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
    from llmrecipes.data.encode import LLAMA3, WORDS
    from llmrecipes.data.prepared import TOKENIZER
    from llmrecipes.hf.tokenizer_files import write_tokenizer
    from llmrecipes.models.export import prepared_of

    prepared = prepared_of(opened.recipe, data_dir)
    with tempfile.TemporaryDirectory() as folder:
        special = write_tokenizer(Path(folder), opened.recipe, prepared)
        file: dict[str, Any] = json.loads((Path(folder) / TOKENIZER).read_text("utf-8"))
    model, splitter = file["model"], json.dumps(file.get("pre_tokenizer"))
    known = PATTERNS | {LLAMA3: OURS}
    pattern = next((name for text, name in known.items() if json.dumps(text)[1:-1] in splitter), None)
    notes: tuple[str, ...] = ()
    if json.dumps(WORDS)[1:-1] in splitter:
        pattern = OURS
        notes = (
            f"llama.cpp splits text into words by its pattern {OURS}; where it differs from this tokenizer's "
            "(contractions, line ends after punctuation), tokens differ from those of training",
        )
    if model.get("type") != "BPE" or pattern is None:
        raise UserError(
            f"a tokenizer of type {model.get('type')} with an unknown pattern", where="--to gguf",
            rule="the tokenizer must be a byte-level BPE with a word pattern that llama.cpp knows",
            fix="--no-tokenizer, with token ids as input",
        )  # fmt: skip
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    added = {token["content"]: token["id"] for token in file.get("added_tokens", [])}
    end = special["eos_token_id"]
    return {
        "tokens": {**model["vocab"], **added}, "special": set(added.values()), "merges": merges, "pattern": pattern,
        "end": end[0] if isinstance(end, list) else end,
    }, notes  # fmt: skip
