"""Fill-in-the-middle: documents whose middle comes last, so that a model learns to write what is between two texts.

As in Bavarian et al. 2022 (arXiv 2207.14255), Megatron-LM's fork for StarCoder and StarCoder2: a document is cut at two
random characters, before it is tokenized and packed, and the three parts are tokenized by themselves:

    PSM   <prefix> prefix <suffix> suffix <middle> middle
    SPM   <prefix> <suffix> suffix <middle> prefix middle      (the paper's second variant)

What happens to a document depends on the seed and the hash of its text only, so neither on processes nor on the order.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from llmrecipes.data.tokens.encode import Encode, Encoded
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Data
from llmrecipes.recipe.sections.source import Source, TextSource

if TYPE_CHECKING:
    import tokenizers

ORDERS = ("fim_psm", "fim_spm")
"""By which rearranged documents are counted, beside the steps that change documents."""
PARTS = ("prefix", "middle", "suffix")
_WHOLE = 1 << 64


@dataclass(frozen=True)
class FimSpec:
    """All a worker process needs to rearrange documents.

    Args:
        rates: rates of each source, by number.
        spm_rate: share of SPM among the rearranged ones.
        seed: seed of the choices.
        ids: ids of `prefix`, `middle` and `suffix`.
    """

    rates: tuple[float, ...]
    spm_rate: float
    seed: int
    ids: tuple[int, int, int]


def infills(data: Data) -> bool:
    """Whether any document of a recipe is rearranged."""
    return any(map(fim_rate, (*data.sources, *data.valid_sources)))


def fim_rate(source: Source) -> float:
    """Fraction of a source's documents that is rearranged."""
    return source.fim_rate if isinstance(source, TextSource) else 0.0


def token_texts(data: Data) -> dict[str, str]:
    """The special tokens by part; none where no document is rearranged."""
    return {part: getattr(data.fim, f"{part}_token") for part in PARTS} if infills(data) else {}


def fim_spec(data: Data, ids: Mapping[str, int]) -> FimSpec | None:
    """How a recipe's documents are rearranged, with ids by part; None if they are not."""
    if not ids:
        return None
    prefix, middle, suffix = (ids[part] for part in PARTS)
    rates = tuple(map(fim_rate, data.sources))
    return FimSpec(rates, data.fim.spm_rate, data.fim.seed, (prefix, middle, suffix))


def require_tokens(backend: tokenizers.Tokenizer, data: Data) -> dict[str, int]:
    """Ids of the special tokens, by part. In the tokenizer they become special, so that text cannot have them.

    Raises:
        UserError: the tokenizer does not have one of them.
    """
    added = {token.content: number for number, token in backend.get_added_tokens_decoder().items()}
    wanted = token_texts(data)
    if missing := [part for part in wanted if wanted[part] not in added]:
        similar = [text for text in added if any(part in text.lower() for part in ("fim", "pre>", "suf", "mid"))]
        name = data.tokenizer.path if data.tokenizer.type == "huggingface" else data.tokenizer.type
        raise UserError(
            f"tokenizer {name!r} has no special token {wanted[missing[0]]!r}",
            where=f"data.fim.{missing[0]}_token",
            rule="fill-in-the-middle tokens must be special tokens of the tokenizer",
            fix=f"use those that it has, such as {', '.join(similar)}"
            if similar
            else "use a tokenizer that has them, or set fim_rate to 0",
        )
    backend.add_special_tokens(list(wanted.values()))
    return {part: added[text] for part, text in wanted.items()}


@dataclass(frozen=True)
class InfillingCut:
    """Where a text is cut, in characters, and whether the suffix comes first."""

    first: int
    second: int
    spm: bool

    @property
    def order(self) -> str:
        """One of `ORDERS`."""
        return ORDERS[self.spm]


def cut(length: int, digest: bytes, rate: float, spm_rate: float, seed: int) -> InfillingCut | None:
    """Whether and how a text is rearranged: independent uniform choices, made from the hash of seed and digest.

    Args:
        length: length of the text, in characters.
        digest: SHA-256 of the text.
        rate: share of texts that are rearranged.
        spm_rate: share of SPM among them.
        seed: another one makes other choices.
    """
    key = struct.pack("<Q", seed)
    chosen, order, *places = struct.unpack("<4Q", hashlib.blake2b(digest, digest_size=32, key=key).digest())
    if chosen >= rate * _WHOLE:
        return None
    first, second = sorted(place * (length + 1) >> 64 for place in places)
    return InfillingCut(first, second, order < spm_rate * _WHOLE)


def encode_cut(
    texts: Sequence[bytes], cuts: Sequence[InfillingCut | None], ids: Sequence[int], encode: Encode, prefix: int = 0
) -> Encoded:
    """Ids of texts, of which some are rearranged, each with its end token.

    Args:
        texts: UTF-8.
        cuts: cuts of each text; None: as it is.
        ids: ids of the special tokens, in the order of `PARTS`.
        encode: tokenizes, and adds what documents begin and end with.
        prefix: tokens that it puts before a document.
    """
    pieces: list[bytes] = []
    for text, where in zip(texts, cuts, strict=True):
        if where is None:
            pieces.append(text)
        else:
            characters = text.decode()
            bounds = (0, where.first, where.second, len(characters))
            pieces += [characters[a:b].encode() for a, b in pairwise(bounds)]
    encoded = encode(pieces)
    itemsize = len(encoded.ids) // max(sum(encoded.lengths), 1)
    all_ids = np.frombuffer(encoded.ids, np.dtype(f"u{itemsize}") if itemsize else np.uint8)
    rows = iter(np.split(all_ids, np.cumsum(encoded.lengths)[:-1]))
    special = {part: np.array([number], all_ids.dtype) for part, number in zip(PARTS, ids, strict=True)}
    rearranged = []
    for where in cuts:
        if where is None:
            rearranged.append(next(rows))
            continue
        pieces_of_text = next(rows), next(rows), next(rows)
        body = [piece[prefix:-1] for piece in pieces_of_text]
        beginning = pieces_of_text[0][:prefix]
        end = pieces_of_text[0][-1:]
        if where.spm:
            parts = (special["prefix"], special["suffix"], body[2], special["middle"], body[0], body[1])
        else:
            parts = (special["prefix"], body[0], special["suffix"], body[2], special["middle"], body[1])
        rearranged.append(np.concatenate([beginning, *parts, end]))
    return Encoded(b"".join(row.tobytes() for row in rearranged), [len(row) for row in rearranged])


def order_of(tokens: Sequence[int], ids: Mapping[str, int]) -> str | None:
    """One of `ORDERS` for the tokens of a rearranged document, else None. With an empty prefix both are the same."""
    if not ids or not len(tokens) or tokens[0] != ids["prefix"]:
        return None
    return ORDERS[len(tokens) > 1 and tokens[1] == ids["suffix"]]


def restored(tokens: list[int], ids: Mapping[str, int]) -> list[int]:
    """The tokens of a document in the order of its text, without the special ones.

    Args:
        tokens: without what documents begin and end with.
        ids: ids of the special tokens, by part; none: nothing was rearranged.
    """
    order = order_of(tokens, ids)
    if order is None:
        return tokens
    suffix, middle = tokens.index(ids["suffix"]), tokens.index(ids["middle"])
    before = tokens[1:suffix] + tokens[middle + 1 :]
    return before + tokens[suffix + 1 : middle]
