"""`llmrecipes export`: a checkpoint of a run as a folder that transformers, and what reads its form, can load."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrecipes.errors import UserError
from llmrecipes.workflow.tensors import find_checkpoint, open_run

if TYPE_CHECKING:
    pass

FORMS = ("hf",)
ELEMENT_TYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Options:
    """How a model is written.

    Attributes:
        dtype: fp32, bf16 or fp16; None: the precision of the recipe.
        shard_bytes: largest file of weights.
        family: `model_type`; None: the first that has the model's form.
        tokenizer: also write the tokenizer.
    """

    dtype: str | None = None
    shard_bytes: int = 5 * 10**9
    family: str | None = None
    tokenizer: bool = True


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the folder.
        run: directory of the run.
        step: of the checkpoint.
        family: `model_type`.
        dtype: element type of the weights.
        parameters: of the model, without padding of the vocabulary.
        bytes: of the weights.
        shards: files of the weights.
        largest_shard: bytes of the largest.
        seconds: that it took.
    """

    path: str
    run: str
    step: int
    family: str
    dtype: str
    parameters: int
    bytes: int
    shards: int
    largest_shard: int
    seconds: float


def export(reference: str, out: Path | None, runs_dir: Path, data_dir: Path, options: Options) -> Exported:
    """Write a checkpoint as safetensors with configuration, tokenizer and model card.

    Any layout's checkpoint can be exported by one process without a GPU, tensor by tensor: memory holds the largest
    tensor about twice.

    Args:
        reference: `RUN` (its newest checkpoint) or `RUN@STEP`.
        out: the folder, which must not exist; None: `hf/step-<step>` in the run's directory.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept, with the tokenizer.
        options: how.

    Raises:
        UserError: no such run or checkpoint, a model without a form in transformers (with the key in the way), a
            damaged checkpoint, a folder that exists, or a full disk. Nothing is left behind.
    """
    from llmrecipes.hf.export import write
    from llmrecipes.hf.folder import published, require_absent

    started = time.monotonic()
    _require_options(options)
    run, entry = find_checkpoint(reference, runs_dir)
    out = run / "hf" / f"step-{entry.step:08d}" if out is None else out
    require_absent(out)
    opened = open_run(run, entry, options.family)
    dtype = options.dtype or opened.recipe.train.precision
    with published(out) as folder:
        written = write(opened.source, opened.config, folder, dtype, options.shard_bytes)
    return Exported(
        path=str(out),
        run=str(run),
        step=entry.step,
        family=opened.family.name,
        dtype=dtype,
        parameters=written.parameters,
        bytes=written.bytes,
        shards=len(written.shards),
        largest_shard=written.largest_shard,
        seconds=round(time.monotonic() - started, 3),
    )


def _require_options(options: Options) -> None:
    if options.dtype is not None and options.dtype not in ELEMENT_TYPES:
        raise UserError(f"{options.dtype!r}", where="--dtype", rule=f"one of {', '.join(ELEMENT_TYPES)}")
