"""The options of `llmrecipes quantize`. Imports no libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from llmrecipes.options import Option


@dataclass(frozen=True)
class QuantizeOptions:
    """Options of a quantisation; every field is one of `quantize`."""

    scheme: Annotated[
        str,
        Option(
            "Quantize weights to int8, int4 or nvfp4, or weights and activations to w8a8 (integers) or fp8.",
            metavar="NAME",
        ),
    ] = "int8"
    method: Annotated[str, Option("Round to nearest (rtn), or calibrate: gptq, awq, smoothquant.", metavar="NAME")] = (
        "rtn"
    )
    calibrate: Annotated[
        str | None,
        Option("Calibrate on this text: train, stdlib, or TYPE:PATH; default for a run: train.", metavar="SOURCE"),
    ] = None
    """See `evaluation.texts.Texts.parse`."""
    text_key: Annotated[str, Option("Read the text of a jsonl or parquet source from this column.", metavar="NAME")] = (
        "text"
    )
    samples: Annotated[int, Option("Calibrate on N rows of text.", metavar="N", least=1)] = 128
    length: Annotated[
        int | None,
        Option("Calibrate on rows of N tokens; default: 512, or the model's positions.", metavar="N", least=2),
    ] = None
    group_size: Annotated[
        int | None,
        Option(
            "Scale groups of N weights of int4; default: 128, or the largest smaller one that divides all rows.",
            metavar="N",
            least=8,
        ),
    ] = None
    dtype: Annotated[
        str | None, Option("Write all other weights as fp32 or bf16; default: unchanged.", metavar="TYPE")
    ] = None
