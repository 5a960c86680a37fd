"""What a recipe adds to a training step is one module and one line, and no engine names it."""

from __future__ import annotations

import ast
from functools import cache
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from llmrecipes.engine.base import Progress, World
from llmrecipes.engine.parts.base import DEEPSPEED_HOOKS, Part
from llmrecipes.recipe import step_parts
from llmrecipes.recipe.engines import DEEPSPEED
from llmrecipes.recipe.load import load
from llmrecipes.recipe.step_parts import PARTS, StepPart
from tests.helpers import engine_of, random_batches, tiny
from tests.refusals import refused

PACKAGE = Path(__file__).parents[2] / "llmrecipes"
SCRATCH = '''
"""A part of a training step that freezes the weights by clearing their gradients, and says how many tokens it saw."""
from llmrecipes.engine.parts.base import Part

class Still(Part):
    size = 1

    def __init__(self, step):
        self._step, self.calls, self._tokens = step, [], 0.0

    def before_passes(self, step, micro_batches):
        self.calls.append(f"step {step} of {micro_batches}")

    def counted(self, batch, losses):
        self.calls.append("counted")
        return batch["loss_mask"].sum().double().reshape(1)

    def before_norm(self):
        for gradient in self._step.gradients():
            gradient.values.zero_()

    def read(self, own, local, agreed):
        (self._tokens,) = own

    def fields(self, before):
        return {"tokens": self._tokens}
'''
"""All of a feature, but for its line in `PARTS` and its key."""


@pytest.fixture
def still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepPart:
    (tmp_path / "scratch_still.py").write_text(SCRATCH)
    monkeypatch.syspath_prepend(tmp_path)
    part = StepPart("scratch_still:Still", "train.label_smoothing")
    monkeypatch.setattr(step_parts, "PARTS", (*PARTS, part))
    return part


def test_a_part_is_a_single_file(still: StepPart, world: World) -> None:
    recipe = tiny(train={"label_smoothing": 0.1}, optimizer={"weight_decay": 0.0})
    engine = engine_of(recipe)
    before = [parameter.clone() for module in engine.modules for parameter in module.parameters()]
    result = engine.train_step(random_batches(recipe))
    after = [parameter for module in engine.modules for parameter in module.parameters()]
    assert result.grad_norm == 0.0
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    made: Any = engine.parts[-1]
    number = engine.plan.num_microbatches
    assert made.calls == [f"step 1 of {number}", *["counted"] * number]
    tokens = sum(float(batch["loss_mask"].sum()) for batch in islice(random_batches(recipe), number))
    assert engine.parts.fields(Progress())["tokens"] == tokens
    engine.close()
    assert len(engine_of(tiny()).parts) == len(engine.parts) - 1, "another recipe does not have it"


def test_an_engine_without_a_part_refuses_its_key(still: StepPart) -> None:
    with refused("train.label_smoothing", rule="label_smoothing"):
        load("gpt-tiny-zero", ["train.label_smoothing=0.1"])


def test_parts_of_deepspeed_have_no_hooks_that_it_does_not_call() -> None:
    hooks = {name for name, value in vars(Part).items() if not name.startswith("__") and name != "size"}
    assert set(DEEPSPEED_HOOKS) <= hooks
    for each in PARTS:
        if DEEPSPEED in each.engines:
            kind: type[Part] = resolve_name(each.part)
            own = {name for name in hooks if getattr(kind, name) is not getattr(Part, name)}
            assert own <= set(DEEPSPEED_HOOKS), each.part


@cache
def _names(path: Path) -> frozenset[str | None]:
    """What a module names: variables, attributes, imports and functions."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return frozenset(getattr(node, name, None) for node in nodes for name in ("id", "attr", "module", "name"))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.part.rpartition(".")[2])
def test_at_most_one_other_file_names_a_part(part: StepPart) -> None:
    module, _, kind = part.part.partition(":")
    section, _, key = (part.key or "").rpartition(".")
    own = {module, kind, key if section and key != "num_moe_experts" else module}
    others = []
    for path in [*(PACKAGE / "engine").rglob("*.py"), *(PACKAGE / "train").glob("*.py")]:
        if own & _names(path) and path.parent.name != "parts":
            others.append(path.name)
    assert len(others) <= 1, others
