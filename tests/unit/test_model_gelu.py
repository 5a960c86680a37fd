"""Bias and GELU in one kernel: exact, as torch's."""

from __future__ import annotations

import pytest
import torch

from llmrecipes.engine.core.platform import gelu
from tests.helpers import built, tiny


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gelu_and_its_gradients_are_torchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gelu, "bias_gelu_kernel", gelu.forth)
    monkeypatch.setattr(gelu, "bias_gelu_kernel_back", gelu.back)
    values, bias, slope = (torch.randn(*size).mul(2).to(dtype) for size in ((5, 3, 16), (16,), (5, 3, 16)))
    results = []
    for function in (gelu.bias_gelu, lambda one, other: torch.nn.functional.gelu(one + other)):
        inputs = [tensor.clone().requires_grad_() for tensor in (values, bias)]
        result = function(*inputs)
        result.backward(slope)
        results.append((result.detach(), *(tensor.grad for tensor in inputs)))
    for found, expected in zip(*results, strict=True):
        bound = 3e-2 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.usefixtures("world")
def test_the_mlp_of_megatron_core_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gelu, "bias_gelu_kernel", gelu.forth)
    monkeypatch.setattr(gelu, "bias_gelu_kernel_back", gelu.back)
    ids = torch.arange(32).view(1, -1)
    fused, plain = (
        built(tiny(layout={"bias_activation_fusion": value})).module(ids, ids, None, labels=ids)
        for value in (True, False)
    )
    assert "_BiasGelu" in str(nodes(fused)) and "_BiasGelu" not in str(nodes(plain))
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def nodes(result: torch.Tensor) -> set[str]:
    """Names of the operations that a result was computed with."""
    names, waiting = set[str](), [result.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.add(node.name())
        waiting += [before for before, _ in node.next_functions]
    return names
