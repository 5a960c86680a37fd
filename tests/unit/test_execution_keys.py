"""Every key of execution, and what shows that it changes nothing beyond rounding: a row of the table of layouts, the
training below that is executed otherwise, another test by its name, or the reason why no CPU can show it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.launch.run_options import RunOptions
from llmrecipes.nested import leaves
from llmrecipes.recipe.halves import half_of, learned_half
from llmrecipes.recipe.load import changed_values
from llmrecipes.recipe.reading.keys import keys
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.section import EXECUTION
from llmrecipes.workflow.run import Paths, TrainOptions
from llmrecipes.workflow.train import train
from tests.dist.table import ROWS
from tests.helpers import curve, require_same_checkpoints, tiny_on

ROOT = Path(__file__).parents[2]

OTHERWISE: dict[str, dict[str, Any]] = {
    "model": {"moe_token_dispatcher_type": "allgather"},
    "train": {"eval_at_start": True, "log_interval": 2, "elastic": [1, 2], "exit_grace_seconds": 100.0},
    "layout": {"manual_gc": True, "manual_gc_interval": 2},
    "data": {"num_workers": 2, "prefetch_factor": 2, "pin_memory": False, "multiple_validation_sets": True},
    "checkpoint": {
        "save_interval": 2, "async_save": False, "most_recent_k": 3, "keep_interval": 2, "keep_best": True,
        "max_failed_saves": 1,
    },
    "faults": {
        "rerun_mode": "disabled", "rank_heartbeat_timeout": 100.0, "initial_rank_heartbeat_timeout": 1000.0,
        "check_weight_hash_across_dp_replicas_interval": 1, "check_results_across_dp_replicas_interval": 1,
        "gradient_check_action": "none", "straggler_threshold": 0.5, "straggler_exclude_reports": 3,
    },
    "tracking": {
        "mlflow": True, "experiment": "other", "tensorboard": True, "alarms": False, "system_metrics_interval": 1.0,
        "loss_by_source": True, "layers_interval": 1,
    }
}  # fmt: skip
LABEL = "data.sources.N.label"

NAMED = "tests/train/test_train_named_layouts.py"
TESTS = {
    "distill.logits": "tests/unit/test_precompute.py::test_a_student_is_the_one_with_its_teacher",
    "dpo.reference_log_probs": "tests/unit/test_precompute.py::test_a_run_is_the_one_with_the_reference",
    "layout.torch_compile": "tests/unit/test_engine_step.py::test_compiled_layers_compute_the_same",
    "layout.name": f"{NAMED}::test_layouts_one_after_another_train_as_one_process",
    "checkpoint.copy_to": "tests/train/test_train_copies.py::test_a_run_goes_on_elsewhere_from_its_copies",
    "layouts": f"{NAMED}::test_layouts_one_after_another_train_as_one_process",
    "search": "tests/unit/test_checkpoint_loading.py::test_a_search_is_no_part_of_a_training",
}
"""A key, or a section with all its keys, and the test of another module, which names it."""

KERNELS = "TransformerEngine's or NCCL's, on a GPU"
OUTSIDE = (
    "checkpoint.also_export", "checkpoint.also_export_interval", "checkpoint.non_persistent_save_interval",
    "checkpoint.non_persistent_local_ckpt_dir", "tracking.wandb", "tracking.wandb_project", "tracking.wandb_exp_name",
    "tracking.wandb_entity", "tracking.wandb_save_dir", "tracking.prometheus", "tracking.prometheus_port",
    "tracking.alarms_webhook", "tracking.alarms_command", "tracking.alarms_interval", "tracking.energy_model",
    "tracking.kg_co2_per_kwh",
)  # fmt: skip
NOT_ON_A_CPU = {
    "name": "a label",
    "description": "a label",
    "model.transformer_impl": KERNELS,
    "train.eval_tasks": "needs tasks of the harness; evaluated between steps, without gradients",
    "layout.gradient_accumulation_fusion": KERNELS,
    "layout.attention_backend": KERNELS,
    "layout.cp_comm_type": KERNELS,
    "layout.hierarchical_context_parallel_sizes": KERNELS,
    "layout.align_param_gather": KERNELS,
    "layout.moe_permute_fusion": KERNELS,
    "layout.moe_router_fusion": KERNELS,
    "layout.moe_flex_dispatcher_backend": KERNELS,
    "layout.high_priority_stream_groups": KERNELS,
    "layout.nccl_communicator_config_path": KERNELS,
    "layout.tp_comm_overlap": KERNELS,
    "layout.tp_comm_overlap_ag": KERNELS,
    "layout.tp_comm_overlap_rs": KERNELS,
    "layout.tp_comm_bulk_dgrad": KERNELS,
    "layout.tp_comm_bulk_wgrad": KERNELS,
    "layout.delay_wgrad_compute": KERNELS,
    "layout.cuda_graph_impl": KERNELS,
    "layout.cuda_graph_modules": KERNELS,
    "layout.cuda_graph_warmup_steps": KERNELS,
    **dict.fromkeys(OUTSIDE, "what is sent, or written beside a run, after its numbers are computed"),
}  # fmt: skip
"""A key, or a section with all its keys, and why no test shows it."""


def in_rows() -> set[str]:
    """Keys that a row of the table of layouts sets, or that its model sets where ranks share it."""
    found = set[str]()
    for row in ROWS:
        found |= {name for name, _ in leaves(changed_values(row.recipe))}
    return found - {"name"}


def of(key: str, table: dict[str, str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in table)


def test_every_key_of_execution_is_shown_to_change_nothing() -> None:
    executed = {key.name for key in keys().values() if not key.section and half_of(key.name) is EXECUTION}
    here = {name for name, _ in leaves(OTHERWISE)} | {LABEL}
    extra = {"layout.zero.extra"} if any(name.startswith("layout.zero.extra.") for name in in_rows()) else set[str]()
    shown = (in_rows() | here | extra) & executed | {key for key in executed if of(key, TESTS)}
    assert here <= executed and len(shown) >= 100
    assert {key for key in executed - shown if not of(key, NOT_ON_A_CPU)} == set()
    assert [key for key in shown if of(key, NOT_ON_A_CPU)] == [], "a test shows it"
    assert [name for name in (*TESTS, *NOT_ON_A_CPU) if not any(of(key, {name: ""}) for key in executed)] == []


@pytest.mark.parametrize("key", TESTS)
def test_the_test_of_a_key_exists_and_names_it(key: str) -> None:
    path, _, name = TESTS[key].partition("::")
    text = (ROOT / path).read_text("utf-8")
    assert re.search(rf"^def {name}\(", text, re.MULTILINE)
    assert key.rpartition(".")[2] in text


@pytest.mark.slow
def test_a_training_that_is_executed_otherwise_is_the_same_bit_for_bit(
    corpus: Path, data_dir: Path, tmp_path: Path
) -> None:
    base: dict[str, dict[str, Any]] = {
        "model": {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "hidden_dropout": 0.1},
        "train": {"train_iters": 4, "eval_interval": 2, "eval_iters": 2},
        "data": {"num_workers": 0},
        "tracking": {"mlflow": False, "tensorboard": False},
    }
    source = {"type": "text", "path": str(corpus)}
    names = {*base, *OTHERWISE}
    changed = {name: {**base.get(name, {}), **OTHERWISE.get(name, {})} for name in names}
    changed["data"]["sources"] = [{**source, "label": "other"}]
    plain, other = (tiny_on(corpus, "tiny", **each) for each in (base, changed))
    assert learned_half(plain) == learned_half(other)
    folders = [trained(recipe, tmp_path / name, data_dir) for name, recipe in (("plain", plain), ("other", other))]
    curves = [[values[:6] for values in curve(folder) if values[1] is not None] for folder in folders]
    assert len(curves[0]) == 4 and curves[0] == curves[1]
    held_out = [{values[0]: values[-1] for values in curve(folder) if values[-1] is not None} for folder in folders]
    assert held_out[0].keys() == {2, 4} and held_out[0].items() <= held_out[1].items()
    require_same_checkpoints(*(folder / "checkpoints/step-00000004" for folder in folders))


def trained(recipe: Recipe, runs_dir: Path, data_dir: Path) -> Path:
    options = TrainOptions(nproc=1, run_id="r", run=RunOptions(sample=False))
    assert train(recipe, Paths(runs_dir, data_dir), options, print) == 0
    return runs_dir / recipe.name / "r"
