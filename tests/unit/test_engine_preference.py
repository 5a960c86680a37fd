"""Direct preference optimization: losses of TRL, a step of plain PyTorch, adapters switched off, rules and plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F

from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.engine.parts.preference import Gains, PreferenceLoss, find_answers, pair_losses
from llmrecipes.plan.derive import derive
from llmrecipes.plan.parameters import count
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.load import load
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.preference_section import SMOOTHED, Dpo, LossType
from llmrecipes.recipe.variants.proxy import proxy
from tests.helpers import ROOMY, engine_of, random_batches, tiny
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("world")

PADDED: dict[str, Any] = {"chat": {"packing": False, "preference": {}}, "sources": [{"type": "docstrings"}]}
PACKED: dict[str, Any] = {"chat": {"preference": {}}, "sources": [{"type": "docstrings"}]}


def preferring(data: dict[str, Any] = PADDED, dpo: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    train = {"train_iters": 12, **sections.pop("train", {})}
    return tiny(dpo={"beta": 0.5, **(dpo or {})}, data=data, train=train, optimizer={"lr": 1e-2}, **sections)


def spans(positions: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Where answers with their prompts, and padding, begin and end in a row."""
    return pairwise([*(positions == 0).nonzero().flatten().tolist(), len(positions)])


def expected(losses: torch.Tensor, reference: torch.Tensor, batch: dict[str, torch.Tensor], beta: float) -> Any:
    """Loss of DPO (arXiv 2305.18290, equation 7) and rewards of the pairs of a micro-batch, by plain loops."""
    answers = []
    for row in range(losses.size(0)):
        for start, end in spans(batch["position_ids"][row]):
            mask = batch["loss_mask"][row, start:end].bool()
            if mask.any():
                answers.append((reference - losses)[row, start:end][mask].sum())
    rewards = beta * torch.stack(answers).view(-1, 2)
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1]), rewards


def token_losses(engine: MegatronEngine, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[b, s], by torch from the logits of each answer by itself."""
    (module,) = engine.modules
    module.eval()
    rows = torch.zeros_like(batch["loss_mask"])
    for row in range(rows.size(0)):
        for start, end in spans(batch["position_ids"][row]):
            tokens = batch["tokens"][row : row + 1, start:end]
            logits = module(tokens, torch.arange(end - start)[None], None)[0]
            rows[row, start:end] = F.cross_entropy(logits, batch["labels"][row, start:end], reduction="none").detach()
    module.train()
    return rows


@pytest.mark.parametrize("data", [PADDED, PACKED], ids=["padded", "packed"])
def test_steps_have_the_loss_of_plain_pytorch(data: dict[str, Any]) -> None:
    recipe = preferring(data)
    engine = engine_of(recipe)
    assert not check(recipe)
    stream = random_batches(recipe)
    first = engine_of(recipe)  # keeps the weights of the start
    for step in range(3):
        batches = [batch for batch, _ in zip(stream, range(engine.plan.num_microbatches), strict=False)]
        losses, rewards = zip(
            *(expected(token_losses(engine, batch), token_losses(first, batch), batch, 0.5) for batch in batches),
            strict=True,
        )
        engine.parts.the(PreferenceLoss).rewards.start()
        loss = engine.train_step(iter(batches)).loss
        assert loss == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5), step
        every = torch.cat(rewards)
        measured = engine.parts.the(PreferenceLoss).rewards.take() or {}
        assert measured["chosen"] == pytest.approx(float(every[:, 0].mean()), abs=1e-4)
        assert measured["margins"] == pytest.approx(float((every[:, 0] - every[:, 1]).mean()), abs=1e-4)
        if step:
            assert measured["accuracies"] == float((every[:, 0] > every[:, 1]).float().mean())


@pytest.mark.parametrize("data", [PADDED, PACKED], ids=["padded", "packed"])
def test_the_reference_of_adapters_is_the_model_without_them(data: dict[str, Any]) -> None:
    """With adapters merged into nothing: the losses are those of a second model with the same weights."""
    recipe = preferring(data, lora={"rank": 4, "alpha": 16.0, "dropout": 0.1})
    engine = engine_of(recipe)
    stream = random_batches(recipe)
    first = engine.train_step(stream).loss
    assert first == pytest.approx(math.log(2), rel=1e-6)
    for _ in range(4):
        last = engine.train_step(stream).loss
    assert last < first and engine.modules[0].training
    base = engine_of(recipe.model_copy(update={"lora": None, "dpo": None}))
    batch = next(random_batches(recipe))
    with engine.parts.the(PreferenceLoss)._as_reference():
        off = token_losses(engine, batch)
    torch.testing.assert_close(off, token_losses(base, batch))
    assert not torch.allclose(off, token_losses(engine, batch), atol=1e-3)


def test_held_out_pairs_have_the_loss_and_rewards_of_training() -> None:
    recipe = preferring()
    engine = engine_of(recipe)
    for _ in range(3):
        engine.train_step(random_batches(recipe))
    engine.parts.the(PreferenceLoss).rewards.start()
    held_out = engine.evaluate(random_batches(recipe), 1)
    rewards = engine.parts.the(PreferenceLoss).rewards.take()
    engine.parts.the(PreferenceLoss).rewards.start()
    assert engine.train_step(random_batches(recipe)).loss == pytest.approx(held_out or 0, rel=1e-6)
    assert engine.parts.the(PreferenceLoss).rewards.take() == pytest.approx(rewards)


def test_without_a_reference_rewards_are_log_probabilities() -> None:
    recipe = preferring(dpo={"reference_free": True})
    engine = engine_of(recipe)
    batches = [batch for batch, _ in zip(random_batches(recipe), range(engine.plan.num_microbatches), strict=False)]
    losses = [
        expected(token_losses(engine, batch), torch.zeros_like(batch["loss_mask"]), batch, 0.5) for batch in batches
    ]
    assert engine.train_step(iter(batches)).loss == pytest.approx(
        float(torch.cat([each for each, _ in losses]).mean()), rel=1e-5
    )


def test_half_a_pair_is_an_error() -> None:
    positions, mask = torch.arange(8)[None].repeat(3, 1), torch.ones(3, 8)
    with pytest.raises(ValueError, match="3"):
        find_answers(positions, mask)
    assert find_answers(positions, torch.zeros(3, 8)).count == 0


def test_a_loss_that_is_not_finite_stays_so() -> None:
    one, nan = torch.ones(1, dtype=torch.float64), torch.full((1,), torch.nan, dtype=torch.float64)
    for kind in get_args(LossType):
        dpo = Dpo(loss_type=kind, label_smoothing=0.1 if kind in SMOOTHED else 0.0)
        assert pair_losses(Gains(one, one, one, one), dpo).isfinite().all()
        assert not pair_losses(Gains(nan, nan, one, one), dpo).isfinite().any()


# -- plan ------------------------------------------------------------------------------------------------------------


def test_the_plan_has_the_memory_and_work_of_the_reference() -> None:
    recipe = preferring()
    adapted = preferring(lora={"rank": 4})
    plan, none, own = (derive(each, 1, ROOMY) for each in (
        recipe, preferring(dpo={"reference_free": True}), adapted))  # fmt: skip
    kept = 4 * 2 * 64
    assert plan.memory.teacher == 4 * count(recipe.model, shape(recipe.model)).total + kept
    assert none.memory.teacher == 0 and own.memory.teacher == kept
    assert plan.flops_per_token_full == pytest.approx(none.flops_per_token_full * 4 / 3)
    named = derive(preferring(dpo={"reference": "a"}, lora={"rank": 4}), 1, ROOMY)
    assert named.memory.teacher == plan.memory.teacher


# -- rules -----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[str], str]] = {
    "layout.engine": (["layout.engine=deepspeed"], "dpo"),
    "no pairs": (["data.chat.preference=null"], "dpo"),
    "no section": (["dpo=null"], "data.chat.preference"),
    "half pairs": (["data.chat.packing=false", "layout.micro_batch_size=1"], "layout.micro_batch_size"),
    "smoothing of sigmoid": (["dpo.label_smoothing=0.1"], "dpo.label_smoothing"),
    "exo without": (["dpo.loss_type=exo_pair"], "dpo.label_smoothing"),
    "two answers": (["dpo.reference_free=true", "dpo.reference=a"], "dpo.reference"),
    "nothing to read": (["dpo.reference_free=true", "dpo.reference_log_probs=a"], "dpo.reference_log_probs"),
    "smoothed tokens": (["train.label_smoothing=0.1"], "train.label_smoothing"),
    "chunks": (["layout.loss_chunk_tokens=64"], "layout.loss_chunk_tokens"),
    "predictions": (["model.mtp_num_layers=1"], "model.mtp_num_layers"),
    "moved embeddings": (["train.adversarial={type: fgm, epsilon: 0.5}"], "train.adversarial"),
    "a teacher": (["distill.teacher=a"], "distill"),
    "half a sequence": (["data.chat.max_length=130"], "data.chat.max_length"),
    "packed over context": (["layout.context_parallel_size=2"], "layout.context_parallel_size"),
    "a growing batch": (["data.chat.packing=false", "train.rampup_batch_size=[2, 2, 60]"], "train.rampup_batch_size"),
    "stages": (["stages=[{name: a, train_iters: 60}]"], "stages"),
    "unknown loss": (["dpo.loss_type=kto"], "dpo.loss_type"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "key"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_tuned_is_refused(keys: list[str], key: str) -> None:
    with refused(key):
        load("dpo-tiny", keys)


def test_a_rehearsal_has_pairs_and_the_model_of_the_start() -> None:
    small = proxy(load("dpo-tiny", ["data.sources=[{type: hub, path: some/pairs}]", "dpo.reference=any"]).recipe)
    assert not check(small) and small.dpo is not None and small.dpo.reference is None
