"""`layout`: named layouts of a recipe, and `auto`, which the planner chooses for the GPUs of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from llmrecipes.cli.app import run
from llmrecipes.files import recipes_dir
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine, planned
from llmrecipes.plan.check import check_run
from llmrecipes.plan.derive import LEAST_HEADROOM, Plan, derive
from llmrecipes.plan.speed.choice import ALIKE, choose
from llmrecipes.plan.speed.search import fastest
from llmrecipes.recipe.load import RECIPES, load, names, to_yaml
from llmrecipes.recipe.reading.layouts import CHOSEN
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.layout_section import AUTO
from llmrecipes.workflow.plan import placement, plan_on
from llmrecipes.workflow.speed_forecast import search, write
from llmrecipes.workflow.submit import plan_for
from tests.refusals import refused, require_message

BASE = """\
name: blocks
model: {num_layers: 4, hidden_size: 256, num_attention_heads: 4, seq_length: 128, vocab_size: 512}
train: {train_iters: 10, global_batch_size: 16}
optimizer: {lr: 1e-3}
layout:
  tensor_model_parallel_size: 2
  sequence_parallel: true
  overlap_grad_reduce: true
  micro_batch_size: 4
  recompute_granularity: selective
"""
LAYOUTS = """\
layouts:
  stages: {pipeline_model_parallel_size: 2, micro_batch_size: 2}
  zero3: {zero: {stage: 3, reduce_bucket_size: 1000000}, overlap_grad_reduce: false}
"""


def written(folder: Path, *more: str) -> str:
    path = folder / "blocks.yaml"
    path.write_text("".join((BASE, *more)), "utf-8")
    return str(path)


def test_a_layout_of_the_command_line_replaces_the_keys_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, LAYOUTS)
    recipe = load(path, ["layout=stages"]).recipe
    assert recipe.layout.pipeline_model_parallel_size == 2
    assert recipe.layout.tensor_model_parallel_size == 1
    assert not recipe.layout.sequence_parallel
    assert recipe.layout.overlap_grad_reduce, "which a layout may set, and this one does not"
    assert recipe.layout.micro_batch_size == 2
    assert recipe.layout.recompute_granularity is None
    assert load(path, ["layout=null"]).recipe.layout.tensor_model_parallel_size == 1
    assert load(path).recipe.layout.tensor_model_parallel_size == 2


def test_a_layout_of_the_file_sets_only_what_the_file_does_not(tmp_path: Path) -> None:
    recipe = load(written(tmp_path, LAYOUTS.replace("layouts:", "  name: stages\nlayouts:"))).recipe
    assert recipe.layout.tensor_model_parallel_size == 2
    assert recipe.layout.pipeline_model_parallel_size == 2
    assert recipe.layout.micro_batch_size == 4


@pytest.mark.parametrize("order", [1, -1])
def test_other_overrides_take_precedence_over_a_layout(tmp_path: Path, order: int) -> None:
    overrides = ["layout=zero3", "layout.zero.stage=2", "layout.micro_batch_size=1"][::order]
    recipe = load(written(tmp_path, LAYOUTS), overrides).recipe
    assert recipe.layout.zero is not None
    assert (recipe.layout.zero.stage, recipe.layout.zero.reduce_bucket_size) == (2, 1_000_000)
    assert recipe.layout.micro_batch_size == 1


def test_a_recorded_recipe_has_its_layout_once(tmp_path: Path) -> None:
    recipe = load(written(tmp_path, LAYOUTS), ["layout=zero3", "layout.micro_batch_size=1"]).recipe
    recorded = tmp_path / "recipe.yaml"
    recorded.write_text(to_yaml(recipe), "utf-8")
    assert load(str(recorded)).recipe == recipe


def test_unknown_layouts_and_wrong_keys_of_any_layout_are_refused(tmp_path: Path) -> None:
    with refused("layout", rule="layout=zero3"):
        load(written(tmp_path, LAYOUTS), ["layout=zero"])
    with refused("layout"):
        load(written(tmp_path), ["layout=stages"])
    with refused("layouts.a.micro_batch", rule="layouts.a.micro_batch_size"):
        load(written(tmp_path, "layouts: {a: {micro_batch: 2}}\n"))
    with refused("layouts.a.micro_batch_size"):
        load(written(tmp_path, "layouts: {a: {micro_batch_size: two}}\n"))
    with refused("layouts.a.zero.stage"):
        load(written(tmp_path, "layouts: {a: {zero: {stage: 7}}}\n"))
    with refused("layouts.a.lr"):
        load(written(tmp_path, "layouts: {a: {lr: 2.0}}\n"))
    with refused("layouts"):
        load(written(tmp_path, f"layouts: {{{', '.join(f'a{number}: {{}}' for number in range(10_000))}}}\n"))
    with refused("layouts.auto"):
        load(written(tmp_path, "layouts: {auto: {micro_batch_size: 2}}\n"))


def test_a_wrong_value_of_the_layout_in_use_is_named_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, "layouts:\n  a:\n    micro_batch_size: two\n")
    with refused("layout.micro_batch_size") as caught:
        load(path, ["layout=a"])
    assert f"{path}:13" in str(caught.value)


@pytest.mark.parametrize("name", names())
def test_the_shipped_layouts_are_valid(name: str) -> None:
    for layout in load(name).recipe.layouts:
        load(name, [f"layout={layout}"])


@pytest.mark.parametrize(("name", "now"), RECIPES.gone.items())
def test_a_recipe_that_became_a_layout_names_it(name: str, now: str) -> None:
    recipe, layout = now.split()
    with refused(name, rule=layout):
        load(name)
    assert load(recipe, [layout]).recipe.layout.zero is not None


H100 = "h100-ib"


@pytest.mark.parametrize(
    ("name", "nodes", "overrides"),
    [
        ("gpt-1b", 1, ()),
        ("llama3-8b", 1, ()),
        ("llama3-8b", 2, ("layout.tensor_model_parallel_size=4",)),
        ("llama3-8b", 2, ("layout.micro_batch_size=2", "layout.recompute_granularity=full",
                          "layout.recompute_method=uniform", "layout.recompute_num_layers=1")),
        ("mixtral-8x7b", 8, ("layout.pipeline_model_parallel_size=1",)),
    ],
)  # fmt: skip
def test_auto_is_as_fast_as_the_fastest_and_keeps_what_is_set(
    name: str, nodes: int, overrides: tuple[str, ...]
) -> None:
    profile = load_profile(H100)
    site = machine(profile, nodes)
    recipe = load(name, ["layout=auto", *overrides]).recipe
    choice = choose(recipe, site, 8 * nodes, profile)
    assert choice is not None
    plan, _ = plan_on(recipe, nproc=None, cluster=H100, nodes=nodes)
    assert plan.fits
    assert plan.world_size == 8 * nodes
    assert plan.chosen is not None
    assert plan.chosen["text"] == str(choice)
    set_here = [override.partition("=")[0].split(".") for override in overrides]
    for section, key in set_here:
        assert getattr(getattr(plan.recipe, section), key) == getattr(getattr(recipe, section), key)
    kept = [key for _, key in set_here]
    best = fastest(recipe, site, 8 * nodes, profile, 1, kept)[0].forecast.step.seconds
    assert choice.chosen.forecast.step.seconds <= best * (1 + ALIKE)
    assert choose(choice.recipe, site, 8 * nodes, profile) is None, "all is set"


def test_without_auto_nothing_is_chosen(tmp_path: Path) -> None:
    plan, _ = plan_on(load("llama3-70b").recipe, nproc=None, cluster=H100, nodes=4)
    assert plan.chosen is None
    assert plan.recipe.layout == load("llama3-70b").recipe.layout
    plan, _ = plan_on(load(written(tmp_path), ["layout=null"]).recipe, nproc=8, cluster=H100, nodes=1)
    assert plan.chosen is None


def test_auto_is_the_default_and_chooses_what_the_file_does_not_set(tmp_path: Path) -> None:
    recipe = load(written(tmp_path)).recipe
    plan, _ = plan_on(recipe, nproc=8, cluster=H100, nodes=1)
    assert plan.chosen is not None
    assert plan.recipe.layout.tensor_model_parallel_size == 2
    assert plan.recipe.layout.micro_batch_size == 4
    assert plan.recipe.layout.recompute_granularity == "selective"
    assert plan.recipe.layout.name is None, "so that no rank chooses again"
    alone, _ = plan_on(load("gpt-125m").recipe, nproc=8, cluster=H100, nodes=1)
    assert alone.recipe.layout.micro_batch_size == 32, "a small model has large micro-batches"


def test_where_nothing_fits_the_plan_says_why() -> None:
    for name, nproc, where, key in (
        ("gpt-tiny-3d", 2, "layout", "tensor_model_parallel_size 2"),
        ("gpt-tiny-minitron", 8, "train.global_batch_size", "micro_batch_size 8"),
    ):
        with refused(where, rule=key):
            plan_on(load(name).recipe, nproc=nproc, cluster=H100, nodes=1)
    small, site = plan_on(load("llama3-8b").recipe, nproc=1, cluster="rtx-4090", nodes=1)
    assert not small.fits
    with refused("recipe llama3-8b", rule="RECIPE=llama3-8b"):
        check_run(small, site)


def test_where_nothing_can_be_compared_the_defaults_stay(caplog: pytest.LogCaptureFixture) -> None:
    staged = load("llama3-8b", ["stages=[{name: one}]"]).recipe
    assert choose(staged, planned(H100, 1, 1), 8, load_profile(H100)) is None
    unknown = DetectedGpu("NVIDIA T400", 4 << 30, 4 << 30, None)
    site = Cluster((unknown,) * 2, 8, 64 << 30, 64 << 30, 1 << 40)
    assert choose(load("gpt-125m").recipe, site, 2, None) is None
    assert "no layout was chosen" in caplog.text
    with refused(""):
        choose(load("gpt-125m", ["layout=auto"]).recipe, site, 2, None)


def test_the_nodes_on_which_it_would_fit_have_their_own_main_memory() -> None:
    recipe = load("llama3-405b", ["layout=auto"]).recipe
    with refused("layout auto", rule=("16 nodes", "128 GPUs")):
        choose(recipe, planned(H100, 2, 1), 16, load_profile(H100))


def test_a_layout_is_tried_that_fits_only_with_its_loss_in_chunks() -> None:
    """Which the plan chooses where the logits take much of a GPU."""
    large = ["model.vocab_size=256000", "model.seq_length=2048", "layout.micro_batch_size=64"]
    one_rank = ["layout.tensor_model_parallel_size=1", "layout.pipeline_model_parallel_size=1"]
    plain = ["layout.context_parallel_size=1", "layout.recompute_granularity=null", "train.global_batch_size=512"]
    recipe = load("gpt-125m", ["layout=auto", *large, *one_rank, *plain]).recipe
    choice = choose(recipe, planned(H100, 1, 1), 8, load_profile(H100))
    assert choice is not None
    assert choice.chosen.forecast.plan.recipe.layout.loss_chunk_tokens


def test_a_run_that_goes_on_has_its_layout_whatever_memory_is_free() -> None:
    recipe = load("gpt-1b").recipe
    (gpu, *_) = planned(H100, 1, 1).gpus

    def plan(free: float) -> Plan:
        site = replace(planned(H100, 1, 1), gpus=(replace(gpu, memory_free_bytes=int(free)),))
        choice = choose(recipe, site, 1, load_profile(H100))
        assert choice is not None
        return derive(choice.recipe, 1, site)

    roomy = plan(gpu.memory_bytes)
    assert roomy.memory_headroom > LEAST_HEADROOM
    tight = plan(1.01 * roomy.memory.total)
    assert (tight.recipe, tight.fits) == (roomy.recipe, True)
    shared = plan(0.8 * roomy.memory.total)
    assert shared.fits, "what others keep does not become free"
    assert shared.recipe.layout.micro_batch_size < roomy.recipe.layout.micro_batch_size


def test_a_record_has_no_auto_that_was_not_asked_for(tmp_path: Path) -> None:
    """So that reading it is not refused where a layout cannot be chosen."""
    for overrides, name in ((["stages=[{name: one}]"], AUTO), (["layout=null"], None)):
        recipe = load(written(tmp_path), overrides).recipe
        (tmp_path / "recipe.yaml").write_text(to_yaml(recipe), "utf-8")
        again = load(str(tmp_path / "recipe.yaml")).recipe
        assert again == recipe
        assert again.layout.name == name
        assert choose(again, planned(H100, 1, 1), 8, load_profile(H100)) is None
    asked = to_yaml(load(written(tmp_path), ["layout=auto"]).recipe)
    assert yaml.safe_load(asked)["layout"]["name"] == AUTO


@pytest.mark.parametrize(
    "override", ["layout={zero: {stage: 1, reduce_bucket_size: 7000000}, engine: deepspeed}", "layout.name=auto"]
)
def test_a_submitted_job_keeps_the_section_of_the_command_line(override: str) -> None:
    planned_job = plan_for("gpt-1b", ["train.train_iters=50", override], H100, 1)
    name, *overrides = planned_job.asked
    recipe = load(name, overrides).recipe
    assert recipe == planned_job.plan.recipe
    assert (recipe.train.train_iters, recipe.layout.name) == (50, None)
    if "zero" in override:
        assert recipe.layout.zero is not None
        assert recipe.layout.zero.reduce_bucket_size == 7_000_000


def test_a_submitted_job_keeps_the_files_zero(tmp_path: Path) -> None:
    path = written(tmp_path, "  zero: {stage: 1, reduce_bucket_size: 1000000}\n  engine: deepspeed\n")
    text = Path(path).read_text("utf-8").replace("  overlap_grad_reduce: true\n", "")
    Path(path).write_text(text, "utf-8")
    planned_job = plan_for(path, [], H100, 1)
    name, *overrides = planned_job.asked
    recipe = load(name, overrides).recipe
    assert recipe.layout.zero is not None
    assert recipe.layout.zero.reduce_bucket_size == 1_000_000
    assert recipe.layout.tensor_model_parallel_size == 2
    assert recipe == planned_job.plan.recipe


def test_a_layout_that_a_search_writes_is_not_chosen_again(tmp_path: Path) -> None:
    path = tmp_path / "written.yaml"
    (best,) = search("gpt-1b", (), H100, 1, None, None, 1)
    write(best, path)
    recipe = load(str(path)).recipe
    assert _layout(recipe) == _layout(best.recipe)
    assert choose(recipe, planned(H100, 1, 1), 8, load_profile(H100)) is None


def test_ranks_are_placed_in_the_layout_that_a_profile_chooses(tmp_path: Path) -> None:
    path = written(tmp_path)
    Path(path).write_text(Path(path).read_text("utf-8").partition("layout:")[0], "utf-8")
    recipe = load(path, ["model.num_layers=1"]).recipe
    placed, ranks = placement(recipe, None, H100, 1, None)
    assert (placed.world_size, len(ranks)) == (8, 8)
    assert placed == plan_on(recipe, nproc=None, cluster=H100, nodes=1)[0].largest.layout
    assert placement(recipe, None, None, None, None)[0].world_size == 1
    assert placement(load(path, ["layout=null"]).recipe, None, H100, 1, None)[0].world_size == 1


def test_a_pinned_section_is_the_layout_that_was_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "gpt-1b", "--cluster", H100, "--nodes", "1", "--pin"]
    assert run(asked) == 0
    text = capsys.readouterr().out
    choice = choose(load("gpt-1b").recipe, planned(H100, 1, 1), 8, load_profile(H100))
    assert choice is not None
    assert f"# {choice}\n" in text
    file = recipes_dir() / "gpt-1b.yaml"
    recipe = yaml.safe_load(file.read_text("utf-8")) | yaml.safe_load(text)
    (tmp_path / "gpt-1b.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    assert load(str(tmp_path / "gpt-1b.yaml")).recipe == choice.recipe
    assert run([*asked, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["chosen"], shown["layout"]["name"]) == (choice.as_dict(), None)
    assert run(["plan", "llama3-70b", "--cluster", H100, "--nodes", "4", "--pin"]) == 2
    require_message(capsys.readouterr().err, "--pin", rule="layout=auto")
    assert run(["plan", "gpt-tiny", "--cluster", "laptop", "--pin"]) == 2
    require_message(capsys.readouterr().err, "--pin", rule="--cluster")


def test_nothing_is_chosen_for_processors() -> None:
    recipe = load("gpt-tiny", ["layout=auto"]).recipe
    plan, _ = plan_on(recipe, nproc=2, cluster="laptop", nodes=1)
    assert plan.chosen is None
    assert plan.recipe.layout.micro_batch_size == 1


def test_zero_and_offload_are_chosen_only_where_nothing_else_fits() -> None:
    recipe = load("gpt-1b", ["layout=auto"]).recipe
    roomy, _ = plan_on(recipe, nproc=None, cluster="rtx-4090", nodes=8)
    assert roomy.recipe.layout.zero is None
    one, _ = plan_on(recipe, nproc=None, cluster="rtx-4090", nodes=1)
    assert one.fits
    assert one.recipe.layout.zero is not None
    assert one.recipe.layout.zero.offload_optimizer == "cpu"
    assert not one.recipe.layout.overlap_grad_reduce


def test_what_cannot_be_chosen_is_refused() -> None:
    with refused("layout", rule="layout=null"):
        plan_on(load("deepseek-v3-stages", ["layout=auto"]).recipe, nproc=None, cluster=H100, nodes=128)
    with refused("layout auto"):  # 70 billion parameters on one small GPU
        plan_on(load("llama3-70b", ["layout=auto"]).recipe, nproc=None, cluster="rtx-4090", nodes=1)


def test_a_submitted_job_has_the_layout_that_was_planned() -> None:
    """Whatever it would choose on its nodes: `plan_for` gives it the keys themselves."""
    planned_job = plan_for("llama3-8b", ["layout=auto", "train.train_iters=50"], H100, 2)
    name, *overrides = planned_job.asked
    assert "layout=auto" not in overrides
    recipe = load(name, overrides).recipe
    assert recipe.train.train_iters == 50
    assert _layout(recipe) == _layout(choose_for("llama3-8b", 2))
    assert planned_job.plan.chosen is not None


def test_a_submission_says_what_was_chosen_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--to", "slurm", "--cluster", H100, "--nodes", "1", "--runs-dir", str(tmp_path), "--dry-run")
    assert run(["submit", "gpt-1b", *where]) == 0
    shown = capsys.readouterr()
    assert "\n    layout  MBS8: " in shown.err and "MFU predicted" in shown.err
    assert "    layout.name=null \\\n    layout.micro_batch_size=8" in shown.out
    assert run(["submit", "gpt-1b", "layout=null", *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["layout"] is None


def choose_for(name: str, nodes: int) -> Recipe:
    profile = load_profile(H100)
    choice = choose(load(name, ["layout=auto"]).recipe, planned(H100, nodes, 1), 8 * nodes, profile)
    assert choice is not None
    return choice.recipe


def _layout(recipe: Recipe) -> dict[str, object]:
    return {name: getattr(recipe.layout, name) for name in CHOSEN}


def test_the_recipe_of_a_choice_reads_back_with_nothing_left_to_choose(tmp_path: Path) -> None:
    recipe = choose_for("llama3-8b", 1)
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(recipe), "utf-8")
    assert yaml.safe_load(path.read_text("utf-8"))["layout"]["name"] is None
    again = load(str(path)).recipe
    assert again == recipe
    assert choose(again, planned(H100, 1, 1), 8, load_profile(H100)) is None
