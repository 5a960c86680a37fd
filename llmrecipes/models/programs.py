"""`llmrecipes export --to onnx|torch-export`: a checkpoint as a program that runs without transformers.

The program has token ids [batch, sequence] as input and logits [batch, sequence, vocabulary] as output, for any batch
and any length that the model has positions for; it has no cache of keys and values. It is made of transformers' model,
run once on real ids, and compared with it.
"""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.models.create import published, require_absent
from llmrecipes.models.export import ExportOptions, export
from llmrecipes.tracking.progress import Counted
from llmrecipes.workflow.model_source import find_checkpoint

if TYPE_CHECKING:
    import torch

FILES = {"onnx": "model.onnx", "torch-export": "model.pt2"}
"""What each form's program is called, in its folder."""
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch-export": ()}
MOST_ONNX = 2 * 10**9
"""Bytes of weights in one ONNX file: a protocol buffer has at most 2 GiB. Larger ones are in a file beside it."""


@dataclass(frozen=True)
class ExportedProgram:
    """What was written.

    Attributes:
        path: the folder.
        run: directory of the run.
        step: of the checkpoint.
        form: `onnx`, `torch-export` or `gguf`.
        family: `model_type` of transformers.
        dtype: element type of the matrices.
        parameters: of the model, without padding of the vocabulary.
        bytes: of the program.
        largest_difference: of a logit, from transformers' model; None: not compared.
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
    if options.dtype not in (None, "fp32"):
        raise UserError(
            f"{options.dtype} with --to {form}", where="--dtype", rule="programs compute in fp32", fix="--dtype fp32"
        )
    run, entry = find_checkpoint(reference, runs_dir)
    out = run / form / f"step-{entry.step:08d}{'-ema' if options.averaged else ''}" if out is None else out
    require_absent(out)
    with published(out) as folder:
        source = folder / "source"
        made = export(reference, source, runs_dir, data_dir, replace(options, dtype="fp32"), Counted())
        file = folder / FILES[form]
        difference = _write(source, file, form, made.bytes)
        for each in source.iterdir():
            if each.suffix != ".safetensors" and not each.name.endswith(".index.json"):
                each.rename(folder / each.name)
        shutil.rmtree(source)
        size = sum(each.stat().st_size for each in folder.glob(f"{file.name}*"))
    return ExportedProgram(
        path=str(out), run=made.run, step=made.step, form=form, family=made.family, dtype="fp32",
        parameters=made.parameters, bytes=size, largest_difference=difference, notes=made.notes,
        seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip


def require_runtimes(where: str, form: str, packages: tuple[str, ...]) -> None:
    """Refuse a form whose packages are missing.

    Raises:
        UserError: one is.
    """
    if missing := [name for name in packages if find_spec(name) is None]:
        raise UserError(
            f"{form}, but the package {', '.join(missing)} is not installed", where=where,
            rule="its packages are in the extra runtimes", fix="pip install 'llmrecipes[runtimes]'",
        )  # fmt: skip


def _write(source: Path, file: Path, form: str, weights: int) -> float:
    """Write the program of a folder in Hugging Face's form; the largest difference of its logits."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    config = model.config

    class Logits(torch.nn.Module):
        """Without what transformers' outputs have besides."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
            return logits

    positions, draw = int(config.max_position_embeddings), torch.Generator().manual_seed(0)
    length = min(16, positions)
    sample = torch.randint(0, config.vocab_size, (2, length), generator=draw)
    sizes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=positions)}}
    whole = Logits().eval()
    with torch.no_grad(), _quiet():
        try:
            program = torch.export.export(whole, (sample,), dynamic_shapes=sizes, strict=False)
            # Other sizes than those of the sample: what was fixed by mistake would differ, or fail.
            other = torch.randint(0, config.vocab_size, (1, max(1, length - 3)), generator=draw)
            if form == "onnx":
                written = torch.onnx.export(program, dynamo=True, verbose=False)
                if written is None:
                    raise RuntimeError("torch.onnx.export has returned nothing")
                written.model.graph.inputs[0].name, written.model.graph.outputs[0].name = "input_ids", "logits"
                written.save(file, external_data=weights > MOST_ONNX)
                found = _in_onnx_runtime(file, other)
            else:
                torch.export.save(program, file)
                found = torch.export.load(file).module()(other)
        except UserError:
            raise
        except Exception as error:  # torch, onnxscript and ONNX Runtime each raise their own
            raise _without_operator(error, form, config.model_type) from error
        return float((found - whole(other)).abs().max())


def _in_onnx_runtime(file: Path, ids: torch.Tensor) -> torch.Tensor:
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"input_ids": ids.numpy()})[0])


def _without_operator(error: Exception, form: str, family: str) -> UserError:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return UserError(
        f"a model of type {family} cannot be written: {said[:300]}", where=f"--to {form}",
        rule=f"every operation of the model has a counterpart in {form}, for any batch and length",
        fix="--to hf, which every family has",
    )  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """A block without the remarks of torch's exporters about packages that are not needed."""
    names: list[Any] = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [each.level for each in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in names:
            each.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for each, level in zip(names, before, strict=True):
                each.setLevel(level)
