"""Stages of a run: which steps, samples and learning rates are of which, and what is refused with its stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrecipes.api_commands import layout_recipe
from llmrecipes.bench.results import BenchSpec
from llmrecipes.engine.backends import backend
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.update import learning_rate
from llmrecipes.hardware.cluster import DetectedGpu
from llmrecipes.launch.environment import gpu_variables
from llmrecipes.plan.check import check_run as check_plan
from llmrecipes.plan.derive import default_world_size, derive
from llmrecipes.plan.plan_table import rows
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.plan.speed.forecast import forecast, forecast_run
from llmrecipes.plan.speed.search import fastest
from llmrecipes.recipe.derived.batch_schedule import batch_schedule, samples_of, tokens_of
from llmrecipes.recipe.derived.degrees import elastic_worlds, least_ranks
from llmrecipes.recipe.derived.stage_runs import as_run, stage_named, stage_of, stage_recipes
from llmrecipes.recipe.derived.stages import Span, span_of
from llmrecipes.recipe.load import load, load_values, to_yaml
from llmrecipes.recipe.rules.distill_rules import teacher_model
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.variants.proxy import proxy
from llmrecipes.workflow.bench import measure
from llmrecipes.workflow.plan import plan_on
from llmrecipes.workflow.run import on_one_rank
from tests.helpers import ROOMY, tiny
from tests.refusals import refused

STAGES: list[dict[str, Any]] = [
    {"name": "s1", "train_iters": 20},
    {"name": "s2", "tokens": 20_000, "model": {"seq_length": 128}, "layout": {"micro_batch_size": 1}},
    {
        "name": "s3",
        "train": {"global_batch_size": 4},
        "data": {"weights": [1, 3]},
        "optimizer": {"lr": 2e-4},
        "scheduler": {"lr_decay_style": "linear"},
    },
]
SOURCES = [{"type": "stdlib"}, {"type": "machine"}]


def staged(stages: list[dict[str, Any]] | None = None, **sections: Any) -> Recipe:
    train = {"train_iters": 80, "global_batch_size": 8, "rampup_batch_size": [4, 4, 100]}
    merged = {
        "train": train | sections.pop("train", {}),
        "data": {"sources": SOURCES},
        "model": {"position_embedding_type": "rope"},
        **sections,
    }
    values = tiny(**merged).model_dump(mode="json")
    return Recipe.model_validate({**values, "stages": STAGES if stages is None else stages})


def span(recipe: Recipe) -> Span:
    found = span_of(recipe)
    assert found is not None
    return found


def test_a_stage_has_what_it_and_the_earlier_ones_change() -> None:
    recipe = staged()
    begin, long, anneal = stage_recipes(recipe)
    assert [each.model.seq_length for each in (begin, long, anneal)] == [64, 128, 128]
    assert [each.layout.micro_batch_size for each in (begin, long, anneal)] == [2, 1, 1]
    assert [each.train.global_batch_size for each in (begin, long, anneal)] == [8, 8, 4]
    assert anneal.train.rampup_batch_size is None
    # The ramp takes 25 steps of 4, across the boundary; 20,000 tokens are 157 samples: 5 steps of 4, and 18 of 8.
    assert [(span(each).first_step, span(each).last_step) for each in (begin, long, anneal)] == [
        (0, 20),
        (20, 43),
        (43, 80),
    ]
    batches = batch_schedule(recipe)
    assert batches == span(long).batches
    assert [batches.of_step(step) for step in (0, 24, 25, 42, 43)] == [4, 4, 8, 8, 4]
    assert sum(map(tokens_of, (begin, long, anneal))) == tokens_of(recipe)
    assert [samples_of(each) for each in (begin, long)] == [80, batches.samples(43) - 80]
    assert [stage_of(recipe, step).train.train_iters for step in (0, 19, 20, 42, 43, 80)] == [20, 20, 43, 43, 80, 80]
    assert stage_of(recipe, 20, ending=True).train.train_iters == 20
    assert to_yaml(recipe) == to_yaml(span(long).run_recipe)


def test_a_warm_up_of_sequences_changes_their_length_only() -> None:
    lengths = (16, 32, 64)
    stages = [{"name": f"of-{length}", "model": {"seq_length": length}} for length in lengths]
    ends: list[dict[str, Any]] = [{"train_iters": 10}, {"train_iters": 20}, {}]
    recipe = Recipe.model_validate(
        {
            **tiny(model={"max_position_embeddings": 64}, train={"train_iters": 80, "global_batch_size": 8}).model_dump(
                mode="json"
            ),
            "stages": [{**stage, **end} for stage, end in zip(stages, ends, strict=True)],
        }
    )
    assert not check(recipe)
    every = stage_recipes(recipe)
    assert [tokens_of(each) for each in every] == [8 * 10 * 16, 8 * 20 * 32, 8 * 50 * 64]
    assert {span(each).schedule for each in every} == {(0, 80)}
    plain = recipe.model_copy(update={"stages": ()})
    for number, step in enumerate((5, 25, 70)):
        assert learning_rate(every[number], step) == learning_rate(plain, step)


def test_a_schedule_goes_on_until_a_stage_begins_another() -> None:
    begin, long, anneal = stage_recipes(staged())
    assert span(begin).schedule == span(long).schedule == (0, 43)
    assert learning_rate(begin, 21) == learning_rate(long, 21) > 0
    assert learning_rate(long, 44) == 0.0
    assert learning_rate(anneal, 44) == 2e-4
    assert learning_rate(anneal, 44 + 37) == 0.0
    # Steps of 4 samples each: as far as the steps.
    assert learning_rate(anneal, 44 + 10) == pytest.approx(2e-4 * 27 / 37)


def test_a_run_has_a_plan_for_each_stage_and_numbers_of_its_own() -> None:
    recipe = staged()
    run = derive_run(recipe, 1, ROOMY)
    assert [span(plan.recipe).name for plan in run.stages] == ["s1", "s2", "s3"]
    assert all(plan.run_recipe == run.recipe == recipe for plan in run.stages)
    largest = run.stages[1]
    assert run.largest is largest and largest.memory.total > run.stages[0].memory.total
    assert run.total_tokens == tokens_of(recipe) == sum(plan.total_tokens for plan in run.stages)
    written = run.as_dict()
    assert (written["total_tokens"], written["num_microbatches"]) == (run.total_tokens, largest.num_microbatches)
    assert run.facts()["total_tokens"] == run.total_tokens > run.facts()["stages"][1]["total_tokens"]
    shown = {name: (value, origin) for name, value, origin in rows(run)}
    assert shown["tokens in total"][0] == f"{run.total_tokens:,}" and shown["largest stage"][0] == "s2"
    ends = [span(plan.recipe).last_step for plan in run.stages]
    assert [run.of_step(end, ending=True) for end in ends] == list(run.stages)
    assert [run.of_step(step) for step in (0, *ends)] == [*run.stages, run.stages[-1]]
    with pytest.raises(ValueError, match="stages"):
        derive(recipe, 1, ROOMY)


def test_a_run_fits_saves_and_warns_as_all_its_stages() -> None:
    """Also where the stage with the most memory fits, and has the smaller checkpoints."""
    recipe = staged([{"name": "all", "train_iters": 40},
                     {"name": "some", "model": {"seq_length": 512}, "train": {"freeze": ["*.mlp.*"]}}])  # fmt: skip
    run = derive_run(recipe, 1, ROOMY)
    all_trained, some_frozen = run.stages
    assert run.largest is some_frozen and run.checkpoint_bytes == all_trained.checkpoint_bytes
    assert some_frozen.checkpoint_bytes < run.checkpoint_bytes
    tight = replace(run, stages=(replace(all_trained, host_capacity_bytes=-1), some_frozen))
    assert tight.largest.fits and not tight.fits and not tight.as_dict()["fits"]
    full = replace(all_trained, memory_capacity_bytes=all_trained.memory.total)
    (warning,) = replace(run, stages=(full, some_frozen)).warnings
    assert (warning,) == full.warnings and not some_frozen.warnings


def test_one_process_has_the_model_of_a_run_whose_stages_need_several() -> None:
    assert derive(on_one_rank(staged(LAYOUTS)), 1, ROOMY).layout.world_size == 1


def test_a_rank_of_a_slurm_step_measures_the_largest_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {"NTASKS": "2", "PROCID": "1", "JOB_ID": "7", "LOCALID": "1", "STEP_TASKS_PER_NODE": "2"}
    variables = {"MASTER_ADDR": "127.0.0.1", **{f"SLURM_{name}": value for name, value in names.items()}}
    measured: list[BenchSpec] = []
    monkeypatch.setattr("llmrecipes.workflow.bench.os", SimpleNamespace(environ=variables))
    monkeypatch.setattr("llmrecipes.bench.bench_worker.run", measured.append)
    measure(BenchSpec(recipe=staged(), data_dir=tmp_path, out=tmp_path, what="step", repeats=1), None)
    assert measured[0].recipe == derive_run(staged(), 2, ROOMY).largest.recipe


def changed(number: int, **keys: Any) -> list[dict[str, Any]]:
    return [{**stage, **keys} if place == number else stage for place, stage in enumerate(STAGES)]


@pytest.mark.parametrize(
    ("stages", "sections", "key", "rule"),
    [
        (changed(1, name="s1"), {}, "stages.1.name", "s1"),
        (changed(1, train_iters=3), {}, "stages.1", "train_iters"),
        (changed(1, tokens=None), {}, "stages.1", "train_iters"),
        (changed(2, train_iters=3), {}, "train.train_iters", "train.train_iters=46"),
        (changed(0, train_iters=80), {}, "stages.2", "train.train_iters"),
        (changed(0, model={"hidden_size": 128}), {}, "stages.0.model.hidden_size", "seq_length"),
        (changed(0, train={"seed": 1}), {}, "stages.0.train.seed", "global_batch_size"),
        (changed(0, layout={"tensor": 2}), {}, "stages.0.layout.tensor", "tensor_model_parallel_size"),
        (changed(1, layout={"tensor_model_parallel_size": 0}), {},
         "stages.1.layout.tensor_model_parallel_size", "s2"),
        (changed(1, layout={"tensor_model_parallel_size": 3}), {}, "layout.tensor_model_parallel_size", "s2"),
        (changed(2, layout={"sequence_parallel": True}), {}, "layout.sequence_parallel", "s3"),
        (changed(1, layout={"attention_backend": "flash"}), {}, "stages.1.layout.attention_backend", "manual_gc"),
        (changed(1, layout={"hierarchical_context_parallel_sizes": [2, 2]}), {},
         "layout.hierarchical_context_parallel_sizes", "s2"),
        (changed(0, layout={"micro_batch_size": "two"}), {}, "stages.0.layout.micro_batch_size", "s1"),
        (changed(1, layout={"micro_batch_size": 3}), {}, "train.rampup_batch_size", ("s2", "3 or 6")),
        (changed(2, scheduler={"lr_decay_style": "WSD"}), {}, "scheduler.lr_decay_style", "s3"),
        (changed(2, optimizer={"lr": 1e-5, "min_lr": 1e-3}), {}, "optimizer.min_lr", "s3"),
        (changed(2, data={"weights": [1]}), {}, "stages.2.data.weights", "2"),
        (changed(2, data={"weights": [0, 0]}), {}, "stages.2.data.weights", "2"),
        (STAGES, {"faults": {"loss_spike_action": "rewind"}}, "faults.loss_spike_action", "train.rampup_batch_size"),
        (changed(1, model={"seq_length": 128}), {"model": {"position_embedding_type": "learned_absolute"}},
         "model.max_position_embeddings", "model.max_position_embeddings=128"),
        (changed(1, model={"seq_length": 32}, tokens=None, train_iters=20),
         {"model": {"position_embedding_type": "learned_absolute"}},
         "model.max_position_embeddings", "model.max_position_embeddings=64"),
        (changed(2, model={"position_embedding_type": "learned_absolute"}), {}, "model.position_embedding_type", "128"),
        (STAGES, {"distill": {"teacher": "none", "logits": "logits", "top_k": 4}}, "distill.logits", ()),
        (changed(1, model={"seq_length": 128, "rotary_base": 5e5}), {"distill": {"teacher": "none"}},
         "stages.1.model.rotary_base", ("s2", "distill.model.rotary_base=10000.0")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_a_stage_is_refused(
    stages: list[dict[str, Any]], sections: dict[str, Any], key: str, rule: Any, tmp_path: Any
) -> None:
    values = staged(stages, **sections).model_dump(mode="json")
    with refused(key, rule=rule):
        load_values(values, tmp_path / "tiny.yaml")


LAYOUTS: list[dict[str, Any]] = [
    {"name": "of-64", "train_iters": 40, "layout": {"pipeline_model_parallel_size": 2}},
    {
        "name": "of-128",
        "model": {"seq_length": 128},
        "layout": {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 4, "sequence_parallel": True},
    },
]


def test_each_stage_has_the_layout_that_it_names() -> None:
    recipe = staged(LAYOUTS, train={"rampup_batch_size": None})
    assert not check(recipe)
    assert least_ranks(recipe) == default_world_size(recipe, ROOMY) == 4
    plan = derive_run(recipe, 8, ROOMY)
    short, long = (stage.layout for stage in plan.stages)
    assert (short.pipeline_model_parallel_size, short.tensor_model_parallel_size, short.data_parallel_size) == (2, 1, 4)
    assert (long.pipeline_model_parallel_size, long.tensor_model_parallel_size, long.data_parallel_size) == (1, 4, 2)
    assert [stage.num_microbatches for stage in plan.stages] == [1, 2]
    facts = plan.as_dict()["stages"]
    assert [each["degrees"]["data_parallel_size"] for each in facts] == [4, 2]
    assert [each["layout"] for each in facts] == ["pipeline 2 × data 4", "tensor 4 × data 2"]
    assert all(each["layout"] in str(plan) for each in facts)
    assert plan.facts()["stages"][1]["tensor_model_parallel_size"] == 4


def test_ranks_that_the_layout_of_a_stage_does_not_divide_name_it() -> None:
    with refused("layout", rule=("of-128", "4 ranks")):
        derive_run(staged(LAYOUTS), 2, ROOMY)


def test_all_gpus_are_taken_that_every_stage_divides() -> None:
    gpu = DetectedGpu("H100 80GB", 79 << 30, 79 << 30, 989.4)
    node = replace(ROOMY, gpus=(gpu,) * 24, nodes=3)
    # The first batches have two micro-batches, so that there are two replicas of four ranks at most.
    short = {"pipeline_model_parallel_size": 4}
    recipe = staged(changed_layout(0, short), model={"num_layers": 4, "position_embedding_type": "rope"})
    assert default_world_size(recipe, node) == 8


def changed_layout(number: int, parallelism: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**stage, "layout": parallelism} if place == number else stage for place, stage in enumerate(LAYOUTS)]


def test_a_stage_that_does_not_fit_is_named_before_the_start() -> None:
    plan = derive_run(staged(LAYOUTS), 4, ROOMY)
    short, long = plan.stages
    least, most = sorted((short.memory.total, long.memory.total))
    for free, named in ((most - 1, "of-128" if most == long.memory.total else "of-64"), (least - 1, "of-64")):
        machine = replace(ROOMY, memory_available_bytes=4 * free)
        with refused("recipe tiny", rule=named):
            check_plan(derive_run(staged(LAYOUTS), 4, machine), machine)
    check_plan(plan, ROOMY)


def test_a_range_of_replicas_is_one_of_numbers_of_ranks_in_every_stage() -> None:
    # Replicas of the recipe's layout have 1 rank: 2 to 8 ranks, of which the stages divide 2, 4, 8 and 4, 8.
    elastic = staged(LAYOUTS, train={"elastic": [2, 8]})
    assert not check(elastic)
    assert elastic_worlds(elastic) == (4,)
    # A batch of 4 in micro-batches of 2 is shared by two replicas at most.
    without_ramp = staged(LAYOUTS, train={"elastic": [2, 8], "rampup_batch_size": None})
    assert elastic_worlds(without_ramp) == (4, 8)
    (problem,) = check(staged(LAYOUTS, train={"elastic": [2, 2]}))
    assert problem.key == "train.elastic" and "of-128" in problem.what
    stages: list[dict[str, Any]] = [
        {"name": "four", "train_iters": 40, "layout": {"tensor_model_parallel_size": 4}},
        {"name": "three", "train": {"global_batch_size": 6}, "layout": {"tensor_model_parallel_size": 1}},
    ]
    (problem,) = check(staged(stages, train={"elastic": [2, 4], "rampup_batch_size": None}))
    assert problem.key == "train.elastic"


def test_ranks_have_the_environment_that_some_stage_needs() -> None:
    gpu = DetectedGpu("H100 80GB", 79 << 30, 79 << 30, 989.4)
    node = replace(ROOMY, gpus=(gpu,) * 8, nodes=1)
    train = {"rampup_batch_size": None, "global_batch_size": 16}
    plain = derive_run(staged([{"name": "one"}], train=train), 8, node)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in gpu_variables(plain, "H100")
    some = gpu_variables(derive_run(staged(LAYOUTS, train=train), 8, node), "H100")
    assert some["CUDA_DEVICE_MAX_CONNECTIONS"][0] == "1"


def test_a_rank_refuses_a_later_stage_that_its_software_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = staged(changed(1, layout={"bias_dropout_fusion": True}))
    plan, engines, platform = derive(stage_recipes(recipe)[1], 1, ROOMY), backend(recipe), select()
    obstacles: list[str | None] = [None]
    monkeypatch.setattr("llmrecipes.engine.core.model.gpt.compiler_obstacle", lambda _device: obstacles[0])
    engines.require(plan, platform)
    obstacles[0] = "there is no compiler"
    with refused("layout.bias_dropout_fusion", rule="s2"):
        engines.require(plan, platform)


def test_a_stage_is_found_by_its_name() -> None:
    recipe = staged(LAYOUTS)
    assert span(stage_named(recipe, "of-128")).number == 1
    with refused("--in", rule=("of-64", "of-128")):
        stage_named(recipe, "other")
    ranks = layout_recipe(recipe, stage="of-128")
    assert (len(ranks), {rank.tensor for rank in ranks}) == (4, {0, 1, 2, 3})
    assert {rank.stage for rank in layout_recipe(recipe)} == {0, 1}


def test_a_teacher_reads_what_the_stage_reads_and_rotates_as_before() -> None:
    taught = {"distill": {"teacher": "none", "model": {"num_layers": 4, "rotary_base": 10000}}}
    recipe = staged(changed(1, model={"seq_length": 128, "rotary_base": 5e5}), **taught)
    assert not check(recipe)
    models = [teacher_model(each) for each in stage_recipes(recipe)]
    assert [(model.seq_length, model.rotary_base) for model in models] == [(64, 1e4), (128, 1e4), (128, 1e4)]
    # It has to fit each layout, as the student does.
    wide = changed(2, layout={"pipeline_model_parallel_size": 2})
    three = {"distill": {"teacher": "none", "model": {"num_layers": 3}}}
    (problem,) = check(staged(wide, **three))
    assert problem.key == "distill.model" and "s3" in problem.what


def test_the_time_of_a_run_is_that_of_its_stages() -> None:
    plan, _ = plan_on(load("llama3-405b-stages").recipe, nproc=None, cluster="h100-ib", nodes=128)
    found = forecast_run(plan, None)
    of_stages = [forecast(stage, None) for stage in plan.stages]
    assert found.seconds == pytest.approx(sum(stage.step.seconds * stage.plan.full_steps for stage in of_stages))
    assert found.seconds < 0.7 * found.step.seconds * plan.full_steps, "short sequences take less"
    assert [each["step_seconds"] for each in found.record()["stages"]] == [stage.step.seconds for stage in of_stages]


def test_a_stage_is_rehearsed_in_its_layout() -> None:
    recipe = staged(LAYOUTS)
    long = as_run(stage_named(recipe, "of-128"))
    assert span_of(long) is None and not long.stages and not check(long)
    assert (long.model.seq_length, long.layout.tensor_model_parallel_size) == (128, 4)
    assert batch_schedule(long).is_constant
    assert proxy(long).layout.tensor_model_parallel_size == 2


def test_layouts_are_not_searched_by_the_step_of_one_stage() -> None:
    with refused("--search", rule="stages=[]"):
        fastest(staged(), ROOMY, 1, None, 1)


def test_a_batch_that_the_ranks_cannot_share_names_its_stage() -> None:
    with refused("train.global_batch_size", rule=("s3", "4 or 8")):
        derive_run(staged(changed(2, train={"global_batch_size": 6}), layout={"micro_batch_size": 1}), 4, ROOMY)
