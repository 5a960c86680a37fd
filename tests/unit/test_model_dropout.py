"""Masks of dropout that are a function of the place of an element."""

from __future__ import annotations

import pytest
import torch

from llmrecipes.engine.core.model import dropout
from llmrecipes.engine.core.model.dropout import Masks, kept_by_words, words
from llmrecipes.plan.derive import derive
from tests.helpers import ROOMY, built, tiny

pytestmark = pytest.mark.usefixtures("world")

CPU = torch.device("cpu")
DROPPED = 0.3


def masks(**train: int) -> Masks:
    return Masks(derive(tiny(model={"hidden_dropout": DROPPED}, train=train), 1, ROOMY))


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 as its authors write it (Salmon et al., SC 2011, section 3.3)."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            second >> 32 ^ counter[1] ^ key[0], second % 2**32, first >> 32 ^ counter[3] ^ key[1], first % 2**32
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def test_words_of_a_gpu_are_philox() -> None:
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # published with it
    low, high, row = 0xA4093822, 0x299F31D0, 0x13198A2E85A308D3
    expected = [word for block in range(3) for word in philox([block, row % 2**32, row >> 32, 0], [low, high])]
    assert words(torch.tensor(low), torch.tensor(high), torch.tensor([row]), 3).tolist() == [expected]


def test_a_part_is_a_slice_of_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks have parts of it; the parity table has it for the masks of a CPU."""
    monkeypatch.setattr(dropout, "_AT_ONCE", 100)
    whole = kept_by_words(words, bytes(range(16)), [(0, 24)], (0, 20), 1 << 30, CPU)
    part = kept_by_words(words, bytes(range(16)), [(3, 4), (10, 2)], (5, 7), 1 << 30, CPU)
    assert torch.equal(part, whole[[3, 4, 5, 6, 10, 11], 5:12])
    assert 0.6 < whole.float().mean() < 0.9


def test_what_is_dropped_follows_from_seed_step_sample_and_place() -> None:
    values = torch.ones(64, 2, 64, requires_grad=True)

    def drop(step: int = 3, number: int = 1, place: str = "a", seed: int = 1) -> torch.Tensor:
        drawing = masks(seed=seed)
        drawing.begin(step, number)
        return drawing.drop(values, place, DROPPED)

    base = drop()
    base.sum().backward()
    assert torch.equal(values.grad, base.detach())  # type: ignore[arg-type]
    assert sorted(set(base.flatten().tolist())) == pytest.approx([0, 1 / (1 - DROPPED)])
    base = base.detach()
    assert float(base.mean()) == pytest.approx(1, abs=0.03)
    assert torch.equal(base, drop())
    for other in (
        drop(step=4),
        drop(number=2),
        drop(place="b"),
        drop(seed=2),
        base.transpose(0, 1).reshape(base.shape),
    ):
        together = ((base > 0) == (other > 0)).float().mean()
        assert float(together) == pytest.approx(DROPPED**2 + (1 - DROPPED) ** 2, abs=0.03)


@pytest.mark.rotating
def test_compiled_layers_drop_others_in_each_step_and_are_compiled_once() -> None:
    recipe = tiny(model={"hidden_dropout": 0.1, "attention_dropout": 0.1}, layout={"torch_compile": True})
    model = built(recipe)
    assert model.masks is not None
    model.module.compile_layers("eager")
    inputs = torch.arange(64)[None] % 7
    outputs: list[torch.Tensor] = []
    for step in (0, 1, 1):
        model.masks.begin(step, 0)
        with torch.compiler.set_stance("default" if not outputs else "fail_on_recompile"):
            outputs.append(model.module(inputs, inputs, None))
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])
