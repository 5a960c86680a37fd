"""Wrong gradients are found in the first step, with the names of the weights, and right ones never are.

Rows of the table, in every precision and layout, have the other half: `tests.dist.training` asks for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import MegatronOptimizer

from llmrecipes.engine.core import masters, update
from llmrecipes.engine.megatron import engine
from llmrecipes.engine.megatron.optimizer import create_optimizer
from llmrecipes.engine.meters import GradientFault
from llmrecipes.engine.parts.gradient_check import GradientCheck
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.events import Note
from llmrecipes.train.guard import require_right_gradients
from tests.dist.guarding import Notes
from tests.dist.table import Row
from tests.dist.training import loaders, training
from tests.dist.worlds import GlooWorld

WHOLE = {"layout": {"use_distributed_optimizer": False}}


Wrong = Callable[[pytest.MonkeyPatch], None]
"""Makes engines that are built next compute something wrong."""


def change(patch: pytest.MonkeyPatch, weights: str, attribute: str, value: bool) -> None:
    """Set a mark of weights before the optimizer is made of them."""

    def create(recipe: Recipe, modules: Any, chunks: Any) -> Any:
        for module in modules:
            for name, parameter in module.named_parameters():
                if re.search(weights, name):
                    setattr(parameter, attribute, value)
        return create_optimizer(recipe, modules, chunks)

    patch.setattr(engine, "create_optimizer", create)


def count(patch: pytest.MonkeyPatch, counts: Callable[[Any, bool], bool]) -> None:
    """Let a parameter's gradient count in the norm as `counts(parameter, whether it does)` says."""
    plain = MegatronOptimizer.get_grads_for_grad_norm

    def counted(part: Any) -> list[Any]:
        before = {id(each) for each in plain(part)}
        owned = [(parameter, update.gradient(main)) for parameter, main, _ in masters.updated(part)]
        return [each for parameter, each in owned if each is not None and counts(parameter, id(each) in before)]

    patch.setattr(MegatronOptimizer, "get_grads_for_grad_norm", counted)


def experts_on_the_first_rank_only(patch: pytest.MonkeyPatch) -> None:
    """As megatron-core 0.16 counted TransformerEngine's grouped layers."""
    rank = parallel_state.get_tensor_model_parallel_rank
    count(patch, lambda parameter, before: before and (getattr(parameter, "allreduce", True) or rank() == 0))


def norms_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    """As megatron-core 0.16 counted latent attention's down-projections of TransformerEngine."""
    count(patch, lambda parameter, before: before or getattr(parameter, "sequence_parallel", False))


def norms_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Tensor-parallel ranks keep the gradients of their own tokens."""
    change(patch, r"layernorm\.(weight|bias)", "sequence_parallel", False)


def ties_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Each stage keeps its own gradient of tied embeddings."""
    module = import_module("megatron.core.distributed.finalize_model_grads")
    patch.setattr(module, "_allreduce_word_embedding_grads", lambda *_, **__: None)


def replica_not_reduced(patch: pytest.MonkeyPatch) -> None:
    """A data-parallel rank has another gradient of one weight."""
    finalize = update.finalize

    def finalize_and_scale(chunks: Any, *args: Any, **options: Any) -> None:
        finalize(chunks, *args, **options)
        named = dict(chunks[0].module.named_parameters())
        named["decoder.layers.0.self_attention.linear_proj.weight"].main_grad *= 1 + 0.1 * dist.get_rank()

    patch.setattr(update, "finalize", finalize_and_scale)


def first_step(row: Row, wrong: Wrong) -> tuple[GradientFault | None, int | None, list[Note]]:
    """What the check finds, the exit code, and the notes of the first step."""
    with pytest.MonkeyPatch.context() as patch:
        wrong(patch)
        return _first_step(row.recipe)


def _first_step(recipe: Recipe) -> tuple[GradientFault | None, int | None, list[Note]]:
    with training(recipe) as (built, world):
        batches, notes, code, fault = loaders(recipe, world), Notes(), None, None
        built.train_step(batches)
        check = built.parts.the(GradientCheck)
        fault = check.fault()
        check._fault = fault
        try:
            require_right_gradients(1, built, notes)
        except UserError as error:
            code = error.code
        built.train_step(batches)
        assert check.fault() is None, "it is said once in a start"
        return fault, code, notes.notes


CASES = [
    pytest.param(Row("moe", "tp2 sp ep2 etp1"), experts_on_the_first_rank_only, "linear_fc", "left out", id="W1"),
    pytest.param(
        Row("moe with padded room for all", "tp2 sp dp2 ep2 etp2"),
        experts_on_the_first_rank_only,
        "linear_fc",
        "left out",
    ),
    pytest.param(
        Row("deepseek in bf16", "tp2 sp pp2 ep2 etp1"), experts_on_the_first_rank_only, "linear_fc", "left out"
    ),
    pytest.param(Row("mla", "tp2 sp"), norms_on_every_rank, "norm", "too often", id="W2"),
    pytest.param(Row("llama in bf16", "tp2 sp dp2", WHOLE), norms_on_every_rank, "norm", "too often"),
]


@pytest.mark.parametrize(("row", "wrong", "weight", "how"), CASES)
def test_weights_that_the_norm_counts_wrongly(
    row: Row, wrong: Wrong, weight: str, how: str, worlds: dict[int, GlooWorld]
) -> None:
    fault, code, notes = worlds[row.ranks].run(first_step, row, wrong)
    assert fault.is_miscounted
    assert (fault.norm > fault.of_each_weight) == (how == "too often")
    assert not fault.copies
    assert fault.miscounted
    assert all(weight in each and how in each for each in fault.miscounted)
    assert code == ExitCode.STOP
    (note,) = notes
    assert (note.event, note.alarm) == ("gradients_wrong", True)


COPIES = [
    pytest.param(Row("llama", "tp2 sp"), norms_not_summed, "norm"),
    pytest.param(Row("llama in bf16", "tp2 sp cp2"), norms_not_summed, "norm"),
    pytest.param(Row("moe", "tp2 sp ep2 etp1"), norms_not_summed, "norm"),
    pytest.param(Row("gpt", "pp2"), ties_not_summed, "word_embeddings"),
    pytest.param(Row("gpt in fp16", "tp2 pp2 dp2"), ties_not_summed, "word_embeddings"),
    pytest.param(Row("gpt", "dp2", WHOLE), replica_not_reduced, "linear_proj.weight"),
]


@pytest.mark.parametrize(("row", "wrong", "weight"), COPIES)
def test_copies_of_a_weight_whose_gradients_differ(
    row: Row, wrong: Wrong, weight: str, worlds: dict[int, GlooWorld]
) -> None:
    fault, code, _ = worlds[row.ranks].run(first_step, row, wrong)
    assert fault.copies
    assert all(weight in each for each in fault.copies)
    assert code == ExitCode.STOP


@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_norm_that_deepspeed_rounds_is_not_wrong(worlds: dict[int, GlooWorld]) -> None:
    """It adds up the squares of a tensor as large as an embedding in fp32."""
    model = {"vocab_size": 1 << 14, "hidden_size": 192, "share_embeddings_and_output_weights": False}
    row = Row("gpt", "dp2", {"layout": {"zero": {"stage": 3}}, "model": model}, engine="deepspeed")
    fault = worlds[2].run(norm_of_the_first_step, row)
    assert fault is None


def norm_of_the_first_step(row: Row) -> GradientFault | None:
    """What the check finds."""
    with training(row.recipe) as (built, world):
        built.train_step(loaders(row.recipe, world))
        check = built.parts.the(GradientCheck)
        return check.fault()
