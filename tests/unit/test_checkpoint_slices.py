"""Ranges of a flattened tensor as slices."""

from __future__ import annotations

from math import prod

import pytest
import torch

from llmrecipes.engine.core.checkpoint.slices import flat_slices


@pytest.mark.parametrize("shape", [(7,), (1,), (3, 4), (4, 1), (2, 3, 4), (1, 5, 2), (2, 2, 2, 3)])
def test_boxes_cover_a_range_once_and_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found = list(flat_slices(shape, start, stop))
            parts = [whole[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))] for box in found]
            values = [part.flatten() for part in parts]
            assert torch.equal(torch.cat([*values, torch.empty(0, dtype=torch.long)]), torch.arange(start, stop))
            assert [box.start for box in found] == [int(part[0]) for part in values]
            assert len(found) <= 2 * len(shape) - 1
