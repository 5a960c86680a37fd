"""Text that the model was not trained on, for bits per byte."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Literal

from llmrecipes.data.prepared import Prepared

HeldOutSplit = Literal["valid", "test"]


def name(split: HeldOutSplit) -> str:
    """File name of a held-out split's text."""
    return f"{split}.txt.gz"


def text(prepared: Prepared, split: HeldOutSplit = "valid", max_bytes: int | None = None) -> bytes:
    """The split's documents, concatenated in order, as UTF-8; at most `max_bytes`."""
    path: Path = prepared.path / name(split)
    if split not in prepared.manifest.held_out:
        return b""
    with gzip.open(path) as stream:
        return stream.read(-1 if max_bytes is None else max_bytes)


def bytes_per_token(prepared: Prepared, split: HeldOutSplit = "valid", seq_length: int = 1) -> float:
    """Bytes of text per token of the split, including end tokens, weighted by source like the samples.

    Args:
        prepared: the opened folder.
        split: valid or test.
        seq_length: sources shorter than one such sequence are excluded, as in training.

    Returns:
        Bytes per token; NaN if the split is empty.
    """
    every = [prepared.manifest.sources[n].splits[split] for n in prepared.usable(split, seq_length)]
    weights = [prepared.weights[n] for n in prepared.usable(split, seq_length)]
    if not every:
        return math.nan
    return sum(w * c.bytes / c.tokens for w, c in zip(weights, every, strict=True)) / sum(weights)


def bits_per_byte(loss: float, prepared: Prepared, split: HeldOutSplit = "valid", seq_length: int = 1) -> float:
    """A mean loss in nats per token as bits per byte of text."""
    return loss / math.log(2) / bytes_per_token(prepared, split, seq_length)


def gzip_bits_per_byte(prepared: Prepared, split: HeldOutSplit = "valid") -> float:
    """Bits per byte that `gzip -9` needs for the same text; NaN where the split is empty."""
    held = prepared.manifest.held_out.get(split)
    return 8 * held.gzip_bytes / held.bytes if held and held.bytes else math.nan


def deflate_bits_per_byte(text: bytes, window: int) -> float:
    """Bits per byte where each piece of the text is compressed by itself, as `gzip -9` does but without its header.

    Args:
        text: compressed in pieces, the last one of which may be shorter.
        window: bytes of a piece.
    """
    pieces = (text[start : start + window] for start in range(0, len(text), window))
    return 8 * sum(len(zlib.compress(piece, 9, wbits=-zlib.MAX_WBITS)) for piece in pieces) / len(text)
