"""The options of `llmrecipes export`. Imports no libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from llmrecipes.errors import UserError
from llmrecipes.options import Option

FORMS = ("hf", "peft", "onnx", "torch-export", "gguf")
ELEMENT_TYPES = ("fp32", "bf16", "fp16")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _bytes(text: str) -> int:
    digits = text.upper().rstrip("BKMGT ")
    unit = text.upper().removeprefix(digits).strip()
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise UserError(f"{text!r}", where="--max-shard-size", rule="must be a number with KB, MB, GB or TB", fix="5GB")
    return size


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export, of `export` and of `Run.export`."""

    dtype: Annotated[
        str | None,
        Option(
            "Write weights as fp32, bf16 or fp16, q8_0, q6_k, q5_k_m, q5_1, q5_0, q4_k_m, q4_1 or q4_0 (gguf) or int8 "
            "(onnx); default: the run's precision.",
            metavar="TYPE",
        ),
    ] = None
    max_shard_bytes: Annotated[
        int,
        Option(
            "Split weights into files of at most this size, such as 500MB; default: 5GB.",
            "max-shard-size",
            "SIZE",
            least=1,
            read=_bytes,
        ),
    ] = 5 * 10**9
    family: Annotated[
        str | None,
        Option(
            "Write this model_type of transformers; default: that of the model that the run started from, else the "
            "first that fits.",
            metavar="NAME",
        ),
    ] = None
    tokenizer: Annotated[bool, Option("Write the tokenizer too.")] = True
    averaged: Annotated[bool, Option("Write the moving average of the weights (`optimizer.ema_decay`).", "ema")] = False
    merge_adapter: Annotated[bool, Option("Merge the adapters of a LoRA run into its base model.")] = False
    cache: Annotated[bool, Option("Give an ONNX program a key/value cache as inputs and outputs.")] = False

    def require_valid_for(self, form: str) -> None:
        """Raise UserError for an option that this form does not have."""
        if form != "onnx" and self.cache:
            raise UserError(f"--to {form}", where="--cache", rule="only used with --to onnx", fix="--to onnx")
        if form == "hf" and self.dtype is not None and self.dtype not in ELEMENT_TYPES:
            raise UserError(f"unknown type {self.dtype!r}", where="--dtype", rule=f"one of {', '.join(ELEMENT_TYPES)}")
