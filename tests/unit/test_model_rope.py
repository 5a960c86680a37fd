"""Rotary embeddings: those of megatron-core's own function, whose backward pass keeps the angles only."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import unwrap
from typing import Any

import pytest
import torch

from llmrecipes.engine.core.platform import rope
from llmrecipes.engine.core.platform.patching import resolve
from tests.helpers import engine_of, steps, tiny

pytestmark = pytest.mark.usefixtures("world")


def angles(width: int) -> torch.Tensor:
    half = torch.randn(16, 1, 1, width // 2)
    return torch.cat((half, half), -1)


def both(function: Any, values: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Result, and gradient of the values."""
    values = values.detach().requires_grad_()
    # Not contiguous, as the queries of a projection to queries, keys and values.
    result = function(values[..., : values.size(-1) // 2], *arguments, **options)
    result.backward(torch.linspace(-1, 1, result.numel()).view_as(result).to(result.dtype))
    assert values.grad is not None
    return result.detach(), values.grad


@pytest.fixture
def replaced() -> Iterator[tuple[Any, Any]]:
    """The function that megatron-core calls, and its own."""
    rope.install_rope()
    function = resolve(f"{rope.ROPE}._apply_rotary_pos_emb_bshd")
    yield function, unwrap(function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "interleaved"), [(8, False), (4, False), (8, True)])  # of 8 channels of a head
def test_rotations_are_megatron_cores(
    dtype: torch.dtype, width: int, interleaved: bool, replaced: tuple[Any, Any]
) -> None:
    ours, theirs = replaced
    values, turns = torch.randn(16, 2, 3, 16).to(dtype), angles(width)
    found, expected = (both(each, values, turns, False, interleaved, mscale=1.3) for each in (ours, theirs))
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-6
    for ours_, theirs_ in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=bound, atol=bound)


@pytest.mark.slow
@pytest.mark.parametrize("width", [8, 4])
def test_a_compiled_kernel_rotates_alike(width: int, replaced: tuple[Any, Any]) -> None:
    values, turns = torch.randn(16, 2, 3, 16), angles(width)
    for found, expected in zip(both(rope.in_one_kernel, values, turns), both(replaced[1], values, turns), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_nothing_but_the_angles_is_kept(replaced: tuple[Any, Any]) -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        replaced[0](torch.randn(16, 2, 3, 8, requires_grad=True), angles(8))
    assert not kept


def test_layers_of_all_steps_share_cosines_and_sines(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[int, ...]] = []
    cosines = torch.Tensor.cos

    def compute(turns: torch.Tensor) -> torch.Tensor:
        computed.append(tuple(turns.shape))
        return cosines(turns)

    monkeypatch.setattr(torch.Tensor, "cos", compute)
    steps(engine_of(tiny(model={"position_embedding_type": "rope", "num_layers": 3})), 2)
    assert len(computed) == 1
