"""`llmrecipes export --to gguf`: a checkpoint as one file for llama.cpp, and what is built on it.

The names of its tensors and keys, and the arithmetic of its types, are the package gguf's, which llama.cpp's authors
publish; what is here says which tensor is which, as in llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from llmrecipes.errors import UserError
from llmrecipes.models.create import published, require_absent
from llmrecipes.models.export_options import ExportOptions
from llmrecipes.models.exported_programs import ExportedProgram, require_runtimes
from llmrecipes.models.gguf_vocabulary import Vocabulary, add_vocabulary, unsupported, vocabulary_of
from llmrecipes.packages import find_spec
from llmrecipes.rundir import Run
from llmrecipes.tracking.progress import Counted
from llmrecipes.workflow.model_source import find_checkpoint, open_run, require_merge

if TYPE_CHECKING:
    import gguf
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from llmrecipes.hf.safetensors import TensorSource
    from llmrecipes.workflow.model_source import OpenedRun

FILE = "model.gguf"
TYPES: Mapping[str, str] = {
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
    "q8_0": "Q8_0",
    "q5_1": "Q5_1",
    "q5_0": "Q5_0",
    "q4_1": "Q4_1",
    "q4_0": "Q4_0",
}
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
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "mixtral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE",
}
"""llama.cpp's architecture of a family."""
ROTATES_PAIRS = ("LLAMA",)
"""Architectures that rotate neighbouring channels, where transformers rotates channels half a head apart."""
DIVISORS = "rope_freqs.weight"
"""Tensor of what the frequencies of the rotation are divided by; llama.cpp reads it for `ROTATES_PAIRS` only."""
ROUTER = ".ffn_gate_inp.weight"
"""End of the names of routers, which llama.cpp's own files have in fp32: their scores select the experts."""
EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""The number of an expert in a name; llama.cpp has the same matrix of all experts of a layer as one tensor."""


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
    opened = open_run(run, entry, options.family, averaged=options.averaged, supported=FAMILIES)
    dtype = options.dtype or opened.recipe.train.precision
    if dtype not in TYPES and dtype not in K_TYPES:
        raise UserError(
            f"{dtype!r} is not supported with --to gguf",
            where="--dtype",
            rule=f"one of {', '.join((*TYPES, *K_TYPES))}",
            fix="--dtype fp16, then llama.cpp's llama-quantize for other types",
        )
    if dtype in K_TYPES and find_spec(LLAMA_CPP) is None:
        raise UserError(
            f"{dtype} needs the package {LLAMA_CPP}, which is not installed",
            where="--dtype",
            rule=f"only llama.cpp writes {', '.join(K_TYPES)}",
            fix="pip install llama-cpp-python, or --dtype fp16 and then llama.cpp's llama-quantize",
        )
    _require_form(opened.family.name, opened.config)
    vocabulary, notes = vocabulary_of(opened, data_dir) if options.tokenizer else (None, ())
    with published(out) as folder:
        parameters = _write(opened, folder / FILE, dtype, vocabulary)
        if dtype in K_TYPES:
            _quantize(folder / FILE, dtype)
        size = (folder / FILE).stat().st_size
    return ExportedProgram(
        path=str(out),
        run=str(run),
        step=entry.step,
        form="gguf",
        family=opened.family.name,
        dtype=dtype,
        parameters=parameters,
        bytes=size,
        largest_difference=None,
        notes=(*notes, *opened.notes),
        seconds=round(time.monotonic() - started, 3),
    )


def _require_form(family: str, config: Mapping[str, Any]) -> None:
    if family not in FAMILIES:
        raise unsupported(
            f"models of type {family} are not supported",
            f"one of {', '.join(FAMILIES)}",
            "--to onnx, or --family with one of them if the architecture matches",
        )
    window = config.get("sliding_window")
    if window is not None and window < config["max_position_embeddings"]:
        raise unsupported(
            f"a sliding window of {window} tokens is not supported",
            "in llama.cpp a token of these models attends to all tokens before it",
            f"--to onnx, or train with model.max_position_embeddings={window}",
        )
    if family == "qwen3_moe" and config["mlp_only_layers"]:
        raise unsupported(
            f"layers {config['mlp_only_layers']} have no experts", "in llama.cpp every layer of a qwen3_moe has experts"
        )
    if family == "qwen3_moe" and not config["norm_topk_prob"]:
        raise unsupported(
            "model.moe_router_pre_softmax is not supported", "in llama.cpp the scores of a token's experts sum to one"
        )


def _write(opened: OpenedRun, file: Path, dtype: str, vocabulary: Vocabulary | None) -> int:
    import gguf
    import numpy as np
    import torch

    written = opened.recipe.train.precision if dtype in K_TYPES else dtype
    kind = gguf.GGMLQuantizationType[TYPES[written]]
    config = opened.config
    source = opened.source
    architecture = gguf.MODEL_ARCH[FAMILIES[opened.family.name]]
    known = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"]
    writer.add_name(opened.recipe.name)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}" if written != "fp32" else "ALL_F32"])
    _add_shape(writer, config)
    divisors = _add_positions(writer, architecture.name, config)
    add_vocabulary(writer, vocabulary, config["vocab_size"])
    parts: dict[str, list[str]] = {}
    for name in source.names():
        theirs = known.get_name(EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise UserError(f"llama.cpp has no name for the tensor {name}", where="--to gguf")
        parts.setdefault(theirs, []).append(name)
    tensors = [_entry(theirs, sorted(names, key=_expert), source, dtype, kind) for theirs, names in parts.items()]
    for entry in tensors:
        # Raw bytes for types that numpy does not have.
        element = {"F32": "float32", "F16": "float16"}.get(entry.kind.name, "uint8")
        stored = gguf.quant_shape_to_byte_shape(entry.shape, entry.kind) if element == "uint8" else entry.shape
        writer.add_tensor_info(entry.name, stored, np.dtype(element), entry.bytes, entry.kind)
    if divisors is not None:
        kind = gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(DIVISORS, divisors.shape, divisors.dtype, divisors.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()

    def converted(name: str, kind: gguf.GGMLQuantizationType) -> Any:
        values = source.read(name).to(torch.float32)
        if architecture.name in ROTATES_PAIRS and ".q_proj." in name:
            values = _pairs(values, heads)
        elif architecture.name in ROTATES_PAIRS and ".k_proj." in name:
            values = _pairs(values, groups)
        progress.add(1)
        return gguf.quants.quantize(values.contiguous().numpy(), kind)

    progress = Counted()
    progress.begin("tensors", sum(len(entry.parts) for entry in tensors))
    for entry in tensors:
        writer.write_tensor_data(_Arrays(entry.bytes, (converted(part, entry.kind) for part in entry.parts)))
    progress.close()
    if divisors is not None:
        writer.write_tensor_data(divisors)
    writer.close()
    return sum(prod(entry.shape) for entry in tensors)


class _Entry(NamedTuple):
    """A tensor of the file: `parts` are its tensors in the export, several for the experts of a layer."""

    name: str
    parts: list[str]
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    bytes: int


def _entry(
    name: str, parts: list[str], source: TensorSource, dtype: str, matrices: gguf.GGMLQuantizationType
) -> _Entry:
    """A tensor with its type: that of matrices, 32 bits for vectors and routers, 8 bits where fewer lose too much."""
    import gguf

    shape = source.shape(parts[0])
    kind = matrices if len(shape) > 1 and not name.endswith(ROUTER) else gguf.GGMLQuantizationType.F32
    if dtype in FEW_BITS and name.removesuffix(".weight") in WIDER:
        kind = gguf.GGMLQuantizationType.Q8_0
    block, size = gguf.GGML_QUANT_SIZES[kind]
    needed = K_BLOCK if dtype in K_TYPES and kind is matrices else block
    if shape[-1] % needed:
        raise UserError(
            f"{parts[0]} has rows of {shape[-1]} elements",
            where="--dtype",
            rule=f"{dtype} needs rows of a multiple of {needed} elements",
            fix="--dtype fp16",
        )
    if EXPERT.search(parts[0]):
        shape = (len(parts), *shape)
    return _Entry(name, parts, kind, shape, prod(shape) // block * size)


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
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_positions(writer: Any, architecture: str, config: Mapping[str, Any]) -> NDArray[np.float32] | None:
    """Say how positions are rotated, as transformers reads config.json.

    Returns:
        [channels / 2] what llama.cpp divides the frequencies by, for the tensor `DIVISORS`; None: nothing.

    Raises:
        UserError: llama.cpp lacks the scaling, or has it for other architectures only.
    """
    import gguf
    import numpy as np
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    read: Any = AutoConfig.for_model(**config)
    positions = read.rope_parameters
    kind = positions["rope_type"]
    base = float(positions["rope_theta"])
    writer.add_rope_freq_base(base)
    if kind == "default":
        return None
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(positions["factor"])
        return None
    if kind not in ("llama3", "yarn") or (kind == "llama3" and architecture not in ROTATES_PAIRS):
        raise unsupported(
            f"rope_type {kind} is not supported for models of type {config['model_type']}",
            "llama.cpp has linear and yarn, and llama3 for llama, mistral and mixtral",
        )
    frequencies, attention = ROPE_INIT_FUNCTIONS[kind](read, "cpu")
    if kind == "llama3":
        channels = 2 * len(frequencies)
        unscaled = 1 / base ** (np.arange(0, channels, 2, dtype=np.float32) / channels)
        divisors: NDArray[np.float32] = (unscaled / frequencies.numpy()).astype(np.float32)
        return divisors
    fast = positions.get("beta_fast") or 32
    slow = positions.get("beta_slow") or 1
    if (fast, slow) != (32, 1) or not positions.get("truncate", True):
        raise unsupported(
            f"YaRN with beta_fast {fast}, beta_slow {slow} and truncate {positions.get('truncate', True)}",
            "llama.cpp computes with 32, 1 and true for these models",
        )
    factor = positions["factor"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(int(positions["original_max_position_embeddings"]))
    # llama.cpp multiplies queries and keys by this and by what follows from the factor.
    writer.add_rope_scaling_attn_factors(attention / (1 + 0.1 * math.log(max(factor, 1.0))))
    return None


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
        self.nbytes = nbytes
        self._arrays = arrays

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
