"""A number that is not finite once: no weight has it, the rank is named, and training goes on as if it had not been."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.dist.guarding import CHANGED, FAULTY, drifted, drifted_in_a_pass, miscomputed, trained
from tests.dist.table import Row
from tests.dist.worlds import GlooWorld

pytestmark = pytest.mark.dist

DROPOUT = {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}}
WHOLE = {"layout": {"use_distributed_optimizer": False}}
OVERLAP = {"layout": {"overlap_grad_reduce": True, "overlap_param_gather": True}}

ROWS = [
    pytest.param(Row("gpt", "dp2", DROPOUT), "gradient"),
    pytest.param(Row("gpt", "dp2", {**DROPOUT, **OVERLAP}), "gradient"),
    pytest.param(Row("gpt in bf16", "dp2", {**DROPOUT, **WHOLE}), "gradient", marks=pytest.mark.rotating),
    pytest.param(Row("gpt in bf16", "tp2 pp2", DROPOUT), "loss"),
    pytest.param(Row("moe with expert bias", "dp2 ep2", DROPOUT), "loss"),
    pytest.param(Row("mtp", "tp2 sp", DROPOUT), "gradient", marks=pytest.mark.rotating),
    pytest.param(Row("gpt", "cp2 dp2", DROPOUT), "gradient", marks=pytest.mark.rotating),
]


@pytest.mark.parametrize(("row", "fault"), ROWS)
@pytest.mark.rotating
def test_a_fault_that_does_not_come_again_changes_nothing_and_names_its_rank(
    row: Row, fault: Literal["gradient", "loss"], worlds: dict[int, GlooWorld]
) -> None:
    with_fault, without = (worlds[row.ranks].run(trained, row, kind) for kind in (fault, None))
    assert with_fault.numbers == without.numbers
    assert with_fault.digests == without.digests
    assert not without.notes
    assert (with_fault.again, without.again) == (1, 0)
    (note,) = with_fault.notes
    assert (note.step, note.event, note.alarm) == (FAULTY, "hardware_suspect", True)
    assert row.ranks - 1 in note.details["ranks"]
    assert note.details["node"]
    samples = row.recipe.train.global_batch_size
    assert set(note.details["samples"]) <= set(range(samples, 2 * samples))
    if fault == "gradient" and "tp" not in row.degrees and "cp" not in row.degrees:
        assert note.details["rank"] == row.ranks - 1


def test_in_fp16_the_scaler_skips_an_overflow_and_nothing_is_computed_again(worlds: dict[int, GlooWorld]) -> None:
    result = worlds[2].run(trained, Row("gpt in fp16", "dp2", DROPOUT), "gradient")
    assert [norm is None for _, norm, _ in result.numbers] == [False, True, False]
    assert not result.notes


REPLICAS = [
    pytest.param(Row("gpt", "dp2"), 1),
    pytest.param(Row("gpt in bf16", "dp4", WHOLE), 2, marks=pytest.mark.rotating),
    pytest.param(Row("gpt in bf16", "tp2 dp2"), 3),
    pytest.param(Row("moe", "dp4 ep2"), 3),
    pytest.param(Row("gpt", "pp2 vpp2 dp2", DROPOUT), 3, marks=pytest.mark.rotating),
]


@pytest.mark.parametrize(("row", "rank"), REPLICAS)
@pytest.mark.rotating
def test_one_bit_of_a_weight_that_replicas_do_not_share_is_found_and_named(
    row: Row, rank: int, worlds: dict[int, GlooWorld]
) -> None:
    assert set(worlds[row.ranks].run(drifted, row, None)) == {""}
    (said,) = set(worlds[row.ranks].run(drifted, row, rank))
    assert said.startswith(f"93 rank {rank} on ")
    assert " 1 parameters " in said
    assert CHANGED in said


BEFORE_GATHER = [
    pytest.param(Row("gpt", "dp2", OVERLAP), 1),
    pytest.param(Row("gpt in bf16", "tp2 dp2"), 3, marks=pytest.mark.rotating),
    pytest.param(Row("moe", "dp4 ep2"), 3, marks=pytest.mark.rotating),
]


@pytest.mark.parametrize(("row", "rank"), BEFORE_GATHER)
def test_one_bit_that_the_next_gather_overwrites_is_found_before_it(
    row: Row, rank: int, worlds: dict[int, GlooWorld]
) -> None:
    assert set(worlds[row.ranks].run(drifted_in_a_pass, row, None)) == {""}
    (said,) = set(worlds[row.ranks].run(drifted_in_a_pass, row, rank))
    assert said.startswith(f"93 rank {rank} on ")
    assert CHANGED in said


RESULTS = [
    pytest.param(Row("gpt in bf16", "dp4", WHOLE), 2, 2, 0, "losses, after layer 4"),
    pytest.param(Row("gpt", "dp2", OVERLAP), 1, 1, 0, "losses, after layer 4", marks=pytest.mark.rotating),
    # Tensor- and context-parallel ranks compute from what the others do: the first of the replica is named.
    pytest.param(Row("gpt in bf16", "tp2 dp2"), 3, 2, 0, "losses, after layer 4", marks=pytest.mark.rotating),
    pytest.param(Row("gpt", "cp2 dp2"), 3, 2, 0, "losses, after layer 4", marks=pytest.mark.rotating),
    # The last stage has the first wrong result, although the one before it has one from it too.
    pytest.param(Row("gpt", "pp2 vpp2 dp2"), 3, 3, 2, "hidden states, after layer 2"),
    pytest.param(Row("moe", "dp4 ep2"), 3, 3, 1, "losses, after layer 4", marks=pytest.mark.rotating),
]


@pytest.mark.parametrize(("row", "rank", "named", "other", "result"), RESULTS)
def test_a_rank_that_computes_one_bit_otherwise_is_found_and_named(
    row: Row, rank: int, named: int, other: int, result: str, worlds: dict[int, GlooWorld]
) -> None:
    world = worlds[row.ranks]
    without, no_notes = world.run(miscomputed, row, None)
    assert not no_notes
    losses, (note,) = world.run(miscomputed, row, rank)
    assert (note.step, note.event, note.alarm) == (2, "results_differ", True)
    assert (note.details["rank"], note.details["other"], note.details["parameter"]) == (named, other, result)
    assert note.details["is_outvoted"] is (row.layout == "dp4")
    # The comparison changes nothing of the training.
    assert losses == without == world.run(miscomputed, row, None, None)[0]
