"""The ladder out of memory: every way in order, each a recipe that can be planned, with its memory and time."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from llmrecipes.plan.check import check
from llmrecipes.plan.derive import LEAST_HEADROOM, Plan
from llmrecipes.plan.speed.ladder import ALLOCATOR, Rung, ladder, lines, others, plan_seconds
from llmrecipes.recipe.load import load
from llmrecipes.workflow.plan import plan_on
from tests.refusals import refused

ORDER = [
    "allocator", "micro-batch", "recomputation", "sequence parallelism", "tensor parallelism", "pipeline parallelism",
    "distributed optimizer", "ZeRO", "offload",
]  # fmt: skip
TIGHT = ("layout=null", "layout.micro_batch_size=2", "layout.use_distributed_optimizer=false",
         "layout.overlap_param_gather=false")  # fmt: skip


def planned(name: str, *overrides: str, nodes: int = 1) -> Plan:
    return plan_on(load(name, overrides).recipe, nproc=None, cluster="h100-ib", nodes=nodes)[0].largest


def rungs(plan: Plan, allocator: str = "") -> dict[str, Rung]:
    made = ladder(plan, allocator)
    assert [rung.name for rung in made] == ORDER
    return {rung.name: rung for rung in made}


def test_each_rung_of_llama3_8b_on_a_node_is_what_the_plan_of_its_change_says() -> None:
    plan = planned("llama3-8b", *TIGHT)
    before = plan_seconds(plan)
    assert not plan.fits
    assert before is not None
    changed = {name: rung for name, rung in rungs(plan).items() if rung.change}
    assert list(changed) == [name for name in ORDER if name not in ("allocator", "sequence parallelism")]
    for name, rung in changed.items():
        again = planned("llama3-8b", *TIGHT, *shlex.split(rung.change))
        assert rung.memory == again.memory.total < plan.memory.total, name
        assert rung.fits == (again.fits and again.memory_headroom >= LEAST_HEADROOM), name
        if name == "offload":
            assert rung.seconds is None, "the time model does not count its copies"
        else:
            assert rung.seconds == pytest.approx(plan_seconds(again)), name
    recomputed = changed["recomputation"].seconds
    assert recomputed is not None
    assert f"step {recomputed / before - 1:+.0%}" in lines(plan, ladder(plan))[1]


def test_sequence_parallelism_is_a_rung_of_tensor_parallel_ranks() -> None:
    wide = ("layout.tensor_model_parallel_size=2", "layout.sequence_parallel=false")
    rung = rungs(planned("llama3-8b", *TIGHT, *wide))["sequence parallelism"]
    assert rung.change == "layout.sequence_parallel=true"
    assert rungs(planned("llama3-8b"))["sequence parallelism"].change == ""


def test_what_the_recipe_has_and_what_a_rule_forbids_is_said_and_not_advised() -> None:
    made = rungs(planned("llama3-70b", nodes=16))
    assert made["recomputation"].change.startswith("layout.recompute_granularity=full"), "auto chose less, which fitted"
    assert not made["distributed optimizer"].change
    assert not made["ZeRO"].change, "DeepSpeed has no pipelines"
    assert all(rung.note for rung in made.values() if not rung.change)
    assert "ZeRO" in others(list(made.values()))


def test_the_allocator_is_a_rung_where_a_user_has_changed_it() -> None:
    plan = planned("llama3-8b")
    assert rungs(plan)["allocator"].change == ""
    assert ALLOCATOR in rungs(plan, "max_split_size_mb:64")["allocator"].change


def test_a_machine_without_coefficients_has_memory_but_no_time() -> None:
    plan = planned("llama3-8b", *TIGHT)
    unknown = tuple(replace(gpu, name="Unheard Of 9000") for gpu in plan.cluster.gpus)
    made = ladder(replace(plan, cluster=replace(plan.cluster, gpus=unknown)))
    assert all(rung.seconds is None for rung in made)
    assert any(rung.memory for rung in made)


def test_a_refused_plan_has_the_ladder() -> None:
    plan = planned("llama3-8b", *TIGHT)
    steps = ("layout.micro_batch_size=1", "layout.zero.stage=3", "layout.zero.offload_optimizer=cpu")
    with refused("recipe llama3-8b", rule=steps):
        check(plan, plan.cluster)
