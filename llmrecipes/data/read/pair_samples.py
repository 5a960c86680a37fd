"""Samples of pairs: both answers, each behind the prompt, in one sequence or in two that follow each other.

So a pair never leaves its micro-batch: a sequence is in one, and a micro-batch without packing has an even number.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from llmrecipes.data.tokens.pairs import ANSWER, SECOND

if TYPE_CHECKING:
    from llmrecipes.data.read.dataset import ConversationFile, Packed


class PairDataset(Dataset[dict[str, torch.Tensor]]):
    """Samples of a split, in the order that `dataset.write_order` wrote.

    Positions begin at 0 in every answer's sequence of prompt and answer, and in the padding.

    Args:
        files: files of the sources that the split has.
        packed: the sequences of each.
        order: [samples, 2]: source and sequence of each sample, or of each two if a sample is one answer.
        length: length of a sequence.
        pad: id of the padding.
        packing: both answers of a pair, and several pairs, are in one sequence.
        reference: [pairs, 2] of each source: log-probabilities of both answers under the reference of `dpo`. Samples
            then have `reference`, fp64: minus that of an answer where its first label is, else 0.
    """

    def __init__(
        self, files: list[ConversationFile], packed: list[Packed], order: np.ndarray, length: int, pad: int,
        *, packing: bool, reference: list[np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        self.packed = packed
        self.order = order
        self._files = files
        self._length = length
        self._pad = pad
        self._packing = packing
        self._reference = reference

    def in_file_order(self) -> PairDataset:
        """Every sequence once, source after source."""
        pairs = [np.stack([np.full(len(packed), source), np.arange(len(packed))], 1)
                 for source, packed in enumerate(self.packed)]  # fmt: skip
        return PairDataset(
            self._files, self.packed, np.concatenate(pairs), self._length, self._pad, packing=self._packing
        )

    def pairs(self, first: int, end: int) -> np.ndarray:
        """[pairs, 2], source and number of the pairs that samples `first` to `end` - 1 have; whole pairs."""
        rows = 1 if self._packing else 2
        indices = []
        for source, sequence in self.order[first // rows : end // rows]:
            packed = self.packed[source]
            members = packed.members[packed.bounds[sequence] : packed.bounds[sequence + 1]]
            indices.append(np.stack([np.full(len(members), source), members], 1))
        return np.concatenate(indices)

    @property
    def counts(self) -> list[int]:
        """Pairs of each source."""
        return [len(packed.members) for packed in self.packed]

    def __len__(self) -> int:
        return len(self.order) * (1 if self._packing else 2)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        place, side = (number, None) if self._packing else divmod(number, 2)
        source, sequence = (int(value) for value in self.order[place])
        packed = self.packed[source]
        tokens = np.full(self._length, self._pad, np.int64)
        labels = tokens.copy()
        mask = np.zeros(self._length, np.float32)
        positions = np.empty(self._length, np.int64)
        reference = np.zeros(0 if self._reference is None else self._length, np.float64)
        start = 0
        for member in packed.members[packed.bounds[sequence] : packed.bounds[sequence + 1]]:
            ids, marks = self._files[source][int(member)]
            second = int(np.flatnonzero(marks == SECOND)[0])
            both = list(pairwise((0, second, len(ids))))
            for answer in (0, 1) if side is None else (side,):
                first, last = both[answer]
                end = start + last - first - 1
                tokens[start:end], labels[start:end] = ids[first : last - 1], ids[first + 1 : last]
                mask[start:end] = marks[first + 1 : last] == ANSWER
                positions[start:end] = np.arange(end - start)
                if self._reference is not None:
                    reference[start + int(mask[start:end].argmax())] = -self._reference[source][member, answer]
                start = end
        positions[start:] = np.arange(self._length - start)
        sample = {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(mask),
            "position_ids": torch.from_numpy(positions),
        }
        return sample if self._reference is None else {**sample, "reference": torch.from_numpy(reference)}
