"""Training on moved embeddings: a step is plain PyTorch's, in its papers' words, and its plan has all passes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.engine.parts.adversary import _key, uniform
from llmrecipes.plan.speed.forecast import forecast
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.adversarial import Adversarial
from llmrecipes.workflow.plan import plan_on
from tests.helpers import engine_of, random_batches, steps, tiny
from tests.refusals import refused
from tests.unit.test_checkpoint_optimizer_state import saved

pytestmark = pytest.mark.usefixtures("world")

SETTINGS: dict[str, dict[str, Any]] = {
    "fgm": {"type": "fgm", "epsilon": 0.5},
    "fgm linf": {"type": "fgm", "epsilon": 0.01, "norm": "linf"},
    "pgd": {"type": "pgd", "epsilon": 0.5, "alpha": 0.4, "steps": 3},
    "pgd linf": {"type": "pgd", "epsilon": 0.01, "alpha": 0.007, "steps": 2, "norm": "linf"},
    "freelb": {"type": "freelb", "epsilon": 0.5, "alpha": 0.4, "steps": 3},
}


def attacked(keys: dict[str, Any], **sections: Any) -> Recipe:
    return tiny(train={"train_iters": 12, "adversarial": keys}, optimizer={"lr": 1e-2, "clip_grad": 0.0}, **sections)


def start(section: Adversarial, seed: int, step: int, sequence: int, size: torch.Size) -> torch.Tensor:
    """[tokens, h]."""
    drawn = uniform(_key(seed, step, sequence), torch.arange(size[0]), size[1])
    return section.epsilon * drawn * (1 if section.norm == "linf" else (size[0] * size[1]) ** -0.5)


def moved(section: Adversarial, move: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Of one sequence, as the papers write it."""
    linf, length = section.norm == "linf", section.alpha or section.epsilon
    move = move + length * (gradient.sign() if linf else gradient / gradient.norm())
    if linf:
        return move.clamp(-section.epsilon, section.epsilon)
    return move * min(1.0, section.epsilon / float(move.norm()))


def plain(engine: MegatronEngine, section: Adversarial, step: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step, sequence by sequence, by autograd of the model as a function of its embeddings."""
    recipe, (module,) = engine.recipe, engine.modules
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    gradients = {name: torch.zeros_like(each) for name, each in named.items()}
    losses, tokens, sequence = 0.0, 0.0, 0
    for batch in islice(random_batches(recipe), engine.plan.num_microbatches):
        for row in range(recipe.layout.micro_batch_size):
            one = {name: each[row : row + 1] for name, each in batch.items()}
            tokens += float(one["loss_mask"].sum())
            move: Any = None
            total, counted = 0.0, 0
            for number in range(section.passes):
                embedded = module.embedding(one["tokens"], one["position_ids"])
                if move is None:
                    move = torch.zeros_like(embedded)
                    if section.type != "fgm":
                        move = start(section, recipe.train.seed, step, sequence, embedded[:, 0].shape)[:, None]
                leaf = move.clone().requires_grad_()
                out = module(
                    one["tokens"], one["position_ids"], None, decoder_input=embedded + leaf,
                    labels=one["labels"], loss_mask=one["loss_mask"],
                )  # fmt: skip
                loss = (out * one["loss_mask"]).sum()
                last = number == section.passes - 1
                ascent, *found = torch.autograd.grad(loss, [leaf, *named.values()])
                if section.type != "pgd" or last:
                    total, counted = total + loss.item(), counted + 1
                    for name, each in zip(named, found, strict=True):
                        gradients[name] += each
                move = moved(section, move, ascent)
            losses, sequence = losses + total / counted, sequence + 1
    return losses / tokens, {name: each / (tokens * counted) for name, each in gradients.items()}


@pytest.mark.parametrize("keys", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.rotating
def test_a_step_is_that_of_plain_pytorch(keys: dict[str, Any]) -> None:
    recipe = attacked(keys)
    engine = engine_of(recipe)
    section = Adversarial(**keys)
    for chunk in engine.chunks:
        chunk.train()
    loss, gradients = plain(engine, section, 1)
    clean = engine.evaluate(random_batches(recipe), 1)
    found: dict[str, torch.Tensor] = {}
    engine.watch_gradients(lambda _, slices: found.update({slice_.name: slice_.tensor for slice_ in slices}))
    result = engine.train_step(random_batches(recipe))
    assert clean is not None and result.loss > clean + 1e-4, "the movement makes no loss larger"
    assert result.loss == pytest.approx(loss, rel=1e-5)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for name, each in found.items():
        if "layers" not in name:  # whose names in the whole model have the layer's number elsewhere
            torch.testing.assert_close(each.view(-1), gradients[name.removesuffix("[]")].view(-1), rtol=1e-4, atol=1e-7)


def test_the_start_of_a_sequence_is_uniform_and_its_parts_are_those_of_the_whole() -> None:
    whole = uniform(_key(7, 3, 0), torch.arange(512), 96)
    places = torch.tensor([5, 6, 300, 511])
    assert torch.equal(uniform(_key(7, 3, 0), places, 96), whole[places])
    assert whole.abs().max() < 1 and abs(float(whole.mean())) < 0.01
    assert float(whole.var()) == pytest.approx(1 / 3, rel=0.02)
    for other in (_key(7, 3, 1), _key(7, 4, 0), _key(8, 3, 0)):
        again = uniform(other, torch.arange(512), 96)
        assert abs(float(torch.corrcoef(torch.stack([whole.view(-1), again.view(-1)]))[0, 1])) < 0.02
    for rows in (whole[:-1, :-1] * whole[1:, :-1], whole[:-1, :-1] * whole[:-1, 1:]):
        assert abs(float(rows.mean())) < 0.01, "neighbours are alike"


def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(tmp_path: Path) -> None:
    recipe = attacked(SETTINGS["pgd"])
    engine = engine_of(recipe)
    batches = random_batches(recipe)
    steps(engine, 1, batches)
    entry = saved(engine, tmp_path)
    after = steps(engine, 2, batches)
    resumed = engine_of(recipe)
    resumed.load_state(entry)
    assert steps(resumed, 2, random_batches(recipe, consumed=8)) == after
    again = engine_of(recipe)
    again.load_state(entry)
    again.steps = 0
    assert steps(again, 1, random_batches(recipe, consumed=8))[0].loss != after[0].loss, "the step has no effect"


def test_a_step_that_is_computed_again_is_the_same() -> None:
    recipe = attacked(SETTINGS["freelb"], faults={"rerun_mode": "validate_results"})
    plain_run = engine_of(recipe).train_step(random_batches(recipe))
    engine = engine_of(recipe)
    finalize, broken = engine._config.finalize_model_grads_func, [True]

    def once(*args: Any, **options: Any) -> None:
        finalize(*args, **options)
        if broken.pop() if broken else False:
            next(iter(engine.modules[0].parameters())).main_grad.fill_(torch.nan)

    engine._config.finalize_model_grads_func = once
    result = engine.train_step(random_batches(recipe))
    assert result.first_attempt is not None
    assert (result.loss, result.grad_norm) == (plain_run.loss, plain_run.grad_norm)


# -- plan ------------------------------------------------------------------------------------------------------------


def test_the_plan_has_all_passes() -> None:
    keys = "train.adversarial={type: freelb, epsilon: 0.1, alpha: 0.1, steps: 3}"
    same = "layout=null"  # auto chooses another one where there is less memory
    several, one = (
        plan_on(load("llama3-8b", [same, *each]).recipe, nproc=None, cluster="h100-ib", nodes=8)[0].largest
        for each in ([keys], [])
    )
    assert several.flops_per_token_full == 3 * one.flops_per_token_full
    tokens = several.recipe.train.global_batch_size * several.recipe.model.seq_length
    split = several.layout.tensor_model_parallel_size if several.layout.sequence_parallel else 1
    ranks = split * several.layout.context_parallel_size
    assert several.memory.movements == tokens / several.layout.data_parallel_size * 4096 * 2 * 2 / ranks
    assert "movements" not in one.memory.as_dict()
    thrice, once = forecast(several, None).step, forecast(one, None).step
    passes = once.seconds - once.gradients - once.optimizer
    assert thrice.seconds == pytest.approx(once.seconds + 2 * passes) and "attack" not in once.parts()


# -- rules -----------------------------------------------------------------------------------------------------------

FGM = "train.adversarial={type: fgm, epsilon: 0.1}"
REFUSED: dict[str, tuple[str, list[str], str]] = {
    "no radius": ("gpt-tiny", ["train.adversarial={type: fgm}"], "train.adversarial.epsilon"),
    "negative": ("gpt-tiny", ["train.adversarial={type: fgm, epsilon: -1.0}"], "train.adversarial.epsilon"),
    "unknown": ("gpt-tiny", ["train.adversarial={type: vat, epsilon: 1.0}"], "train.adversarial.type"),
    "length of fgm": ("gpt-tiny", [FGM, "train.adversarial.alpha=0.1"], "train.adversarial.alpha"),
    "no length": ("gpt-tiny", ["train.adversarial={type: pgd, epsilon: 1.0, steps: 2}"], "train.adversarial.alpha"),
    "no steps": ("gpt-tiny", ["train.adversarial={type: pgd, epsilon: 1.0, alpha: 1.0}"], "train.adversarial.steps"),
    "noise": (
        "gpt-tiny", ["train.adversarial={type: freelb, epsilon: 1.0, alpha: 1.0, steps: 1}"], "train.adversarial.steps",
    ),
    "layout.engine": ("gpt-tiny-zero", [FGM], "train.adversarial"),
    "teacher": ("gpt-tiny-distil", [FGM], "distill"),
    "pairs": ("dpo-tiny", [FGM], "dpo"),
    "experts": ("moe-tiny", [FGM], "model.num_moe_experts"),
    "predictions": ("gpt-tiny", [FGM, "model.mtp_num_layers=1"], "model.mtp_num_layers"),
    "graphs": ("llama3-8b", [FGM, "layout.cuda_graph_impl=transformer_engine"], "layout.cuda_graph_impl"),
    "layers": ("gpt-tiny", [FGM, "tracking.layers_interval=10"], "tracking.layers_interval"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "key"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_moved_is_refused(name: str, keys: list[str], key: str) -> None:
    with refused(key):
        load(name, keys)
