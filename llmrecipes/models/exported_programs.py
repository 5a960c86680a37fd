"""`llmrecipes export --to onnx|torch-export`: a checkpoint as a program that runs without transformers.

The program has token ids [batch, sequence] as input and logits [batch, sequence, vocabulary] as output, for any batch
and any length that the model has positions for. An ONNX program may have a cache: keys and values of the tokens
before are inputs too, and those of all tokens outputs, by the names of Hugging Face Optimum. A program is made of
transformers' model, run once on real ids, and compared with it.
"""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.models.create import published, require_absent
from llmrecipes.models.export import export
from llmrecipes.models.export_options import ExportOptions
from llmrecipes.packages import find_spec
from llmrecipes.tracking.progress import Counted
from llmrecipes.workflow.model_source import find_checkpoint

if TYPE_CHECKING:
    import torch

FILES = {"onnx": "model.onnx", "torch-export": "model.pt2"}
"""What each form's program is called, in its folder."""
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch-export": ()}
TYPES = {"onnx": ("fp32", "int8"), "torch-export": ("fp32",)}
"""Of the weights of linear layers."""
MOST_ONNX = 2 * 10**9
"""Bytes of weights in one ONNX file: a protocol buffer has at most 2 GiB. Larger ones are in a file beside it."""


@dataclass(frozen=True)
class ExportedProgram:
    """What was written.

    Attributes:
        path: the folder.
        run: directory of the run.
        step: step of the checkpoint.
        form: `onnx`, `torch-export` or `gguf`.
        family: `model_type` of transformers.
        dtype: element type of the matrices.
        parameters: parameters of the model, without padding of the vocabulary.
        bytes: size in bytes of the program.
        largest_difference: largest difference of a logit, from transformers' model; None: not compared.
        notes: what users of the model must know.
        seconds: duration.
    """

    path: str
    run: str
    step: int
    form: str
    family: str
    dtype: str
    parameters: int
    bytes: int
    largest_difference: float | None
    notes: tuple[str, ...]
    seconds: float


def export_program(
    reference: str, form: str, out: Path | None, runs_dir: Path, data_dir: Path, options: ExportOptions
) -> ExportedProgram:
    """Write a checkpoint as a program, with its tokenizer and configuration.

    One process holds the model about three times.

    Args:
        reference: `RUN` (its newest checkpoint) or `RUN@STEP`.
        form: a key of `FILES`.
        out: the folder, which must not exist; None: `FORM/step-<step>` in the run's directory.
        runs_dir, data_dir, options: as `export`.

    Raises:
        UserError: as `export`; a package is missing, another type than fp32, or the model has an operation that the
            form lacks. Nothing is left behind.
    """
    started = time.monotonic()
    require_runtimes("--to", form, PACKAGES[form])
    dtype = options.dtype or "fp32"
    if dtype not in TYPES[form]:
        raise UserError(
            f"{dtype} is not supported with --to {form}",
            where="--dtype",
            rule=f"one of {', '.join(TYPES[form])}",
            fix="--dtype fp32",
        )
    run, entry = find_checkpoint(reference, runs_dir)
    out = run / form / f"step-{entry.step:08d}{'-ema' if options.averaged else ''}" if out is None else out
    require_absent(out)
    with published(out) as folder:
        source = folder / "source"
        exported = export(reference, source, runs_dir, data_dir, replace(options, dtype="fp32", cache=False), Counted())
        file = folder / FILES[form]
        difference = _write(source, file, form, dtype, exported.bytes, cache=options.cache)
        for path in source.iterdir():
            if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
                path.rename(folder / path.name)
        shutil.rmtree(source)
        size = sum(path.stat().st_size for path in folder.glob(f"{file.name}*"))
    return ExportedProgram(
        path=str(out),
        run=exported.run,
        step=exported.step,
        form=form,
        family=exported.family,
        dtype=dtype,
        parameters=exported.parameters,
        bytes=size,
        largest_difference=difference,
        notes=exported.notes,
        seconds=round(time.monotonic() - started, 3),
    )


def require_runtimes(where: str, form: str, packages: tuple[str, ...]) -> None:
    """Refuse a form whose packages are missing.

    Raises:
        UserError: one is.
    """
    if missing := [name for name in packages if find_spec(name) is None]:
        raise UserError(
            f"{form} needs the package {', '.join(missing)}, which is not installed",
            where=where,
            rule="its packages are in the extra `runtimes`",
            fix="pip install 'llmrecipes[runtimes]'",
        )


def cache_names(layers: int) -> tuple[list[str], list[str]]:
    """Inputs and outputs of a cache, by their names in Optimum: a key and a value of each layer.

    Each is [batch, heads, tokens, channels].
    """
    kinds = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    return [f"past_key_values.{kind}" for kind in kinds], [f"present.{kind}" for kind in kinds]


def _write(source: Path, file: Path, form: str, dtype: str, weights: int, *, cache: bool) -> float:
    """Write the program of a folder in Hugging Face's form; the largest difference of its logits."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    config = model.config

    class LogitsOnly(torch.nn.Module):
        """Without what transformers' outputs have besides."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, *past: torch.Tensor) -> Any:
            if not cache:
                return self.model(input_ids=input_ids, use_cache=False).logits
            known = transformers.DynamicCache(config=config)
            for layer, key, value in zip(known.layers, past[::2], past[1::2], strict=True):
                layer.lazy_initialization(key, value)
                layer.keys = key
                layer.values = value
            output = self.model(input_ids=input_ids, past_key_values=known, use_cache=True)
            return output.logits, *(tensor for layer in known.layers for tensor in (layer.keys, layer.values))

    positions = int(config.max_position_embeddings)
    draw = torch.Generator().manual_seed(0)
    length = min(16, positions)
    sample = torch.randint(0, config.vocab_size, (2, length), generator=draw)
    batch = torch.export.Dim("batch")
    sequence = torch.export.Dim("sequence", max=positions)
    whole = LogitsOnly().eval()
    with torch.no_grad(), _quiet():
        past = _past(model, sample[:, : length - 3]) if cache else ()
        before = torch.export.Dim("past", max=positions)
        sizes: tuple[Any, ...] = ({0: batch, 1: sequence},)
        if cache:
            sizes = (*sizes, tuple({0: batch, 2: before} for _ in past))
        try:
            program = torch.export.export(whole, (sample, *past), dynamic_shapes=sizes, strict=False)
            # Other sizes than those of the sample: what was fixed by mistake would differ, or fail.
            other = torch.randint(0, config.vocab_size, (1, max(1, length - 4)), generator=draw)
            if form == "onnx":
                written = torch.onnx.export(program, dynamo=True, verbose=False)
                if written is None:
                    raise RuntimeError("torch.onnx.export has returned nothing")
                inputs, outputs = cache_names(len(past) // 2)
                graph = written.model.graph
                for values, names in ((graph.inputs, ["input_ids", *inputs]), (graph.outputs, ["logits", *outputs])):
                    for value, name in zip(values, names, strict=True):
                        value.name = name
                written.save(file, external_data=weights > MOST_ONNX)
                if dtype == "int8":
                    _to_int8(file, external=weights > MOST_ONNX)
                logits = _in_onnx_runtime(file, other)
            else:
                torch.export.save(program, file)
                logits = torch.export.load(file).module()(other)
        except UserError:
            raise
        except Exception as error:  # torch, onnxscript and ONNX Runtime each raise their own
            raise _without_operator(error, form, config.model_type) from error
        return float((logits - model(input_ids=other, use_cache=False).logits).abs().max())


def _past(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys and values that a model has made of token ids [batch, tokens].

    Raises:
        UserError: some layers keep less than all tokens, or other states.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    layers = model(input_ids=ids, past_key_values=DynamicCache(config=model.config), use_cache=True)
    kinds = [type(layer) for layer in layers.past_key_values.layers]
    if other := next((kind for kind in kinds if kind is not DynamicLayer), None):
        raise UserError(
            f"layers have a {other.__name__}",
            where="--cache",
            rule="layers must keep keys and values of all tokens",
            fix="leave it out",
        )
    return tuple(tensor for layer in layers.past_key_values.layers for tensor in (layer.keys, layer.values))


def _to_int8(file: Path, *, external: bool) -> None:
    """Matrices of linear layers in 8 bits, a scale a column; their inputs are rounded when they are computed."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    before = list(file.parent.glob(f"{file.name}*"))
    part = file.with_name(f"{file.name}.int8")
    # Seven bits of the eight: with all of them, processors without VNNI overflow, silently.
    quantize_dynamic(
        file,
        part,
        op_types_to_quantize=["MatMul", "Gemm"],
        weight_type=QuantType.QInt8,
        per_channel=True,
        reduce_range=True,
        use_external_data_format=external,
    )
    for each in before:
        each.unlink()
    part.rename(file)  # weights beside it keep the name that is written in it


class OnnxProgram:
    """A program of `llmrecipes export --to onnx` in ONNX Runtime.

    Args:
        file: the program.
        threads: threads of an operation; None: as ONNX Runtime chooses.
    """

    def __init__(self, file: Path, threads: int | None = None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._cache = {value.name: value.shape for value in self._session.get_inputs()[1:]}

    @property
    def cache(self) -> bool:
        """Whether it has inputs for keys and values."""
        return bool(self._cache)

    def run(self, ids: torch.Tensor, past: Sequence[Any] | None = None) -> tuple[torch.Tensor, list[Any]]:
        """Logits [batch, sequence, vocabulary] of token ids [batch, sequence], and keys and values of all tokens.

        Args:
            ids: ids of the tokens.
            past: keys and values of those before; None: there are none.
        """
        import numpy as np
        import torch

        if past is None:
            past = [np.zeros((ids.size(0), shape[1], 0, shape[3]), np.float32) for shape in self._cache.values()]
        outputs = self._session.run(None, {"input_ids": ids.numpy(), **dict(zip(self._cache, past, strict=True))})
        return torch.from_numpy(outputs[0]), list(outputs[1:])


def _in_onnx_runtime(file: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits of token ids; with a cache the last ones one token at a time."""
    import torch

    program = OnnxProgram(file)
    if not program.cache:
        return program.run(ids)[0]
    logits, past = program.run(ids[:, :-2])
    all_logits = [logits]
    for place in (-2, -1):
        logits, past = program.run(ids[:, place, None], past)
        all_logits.append(logits)
    return torch.cat(all_logits, dim=1)


def _without_operator(error: Exception, form: str, family: str) -> UserError:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return UserError(
        f"a model of type {family} cannot be written: {said[:300]}",
        where=f"--to {form}",
        rule=f"{form} must have every operation of the model, for any batch and length",
        fix="--to hf, which supports every family",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """A block without the remarks of torch's exporters about packages that are not needed."""
    # ONNX Runtime's quantiser speaks through the root logger.
    names: list[Any] = [logging.getLogger(name) for name in ("", "torch.onnx", "onnxscript", "onnx_ir")]
    before = [name.level for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in names:
            each.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for each, level in zip(names, before, strict=True):
                each.setLevel(level)
