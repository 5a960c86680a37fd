"""An optimizer step waits for the device once, in every layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.dist.waiting import waits_of_a_step
from tests.dist.worlds import GlooWorld
from tests.helpers import LLAMA, tiny

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "distributed optimizer": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "tensor": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "context": (2, {"context_parallel_size": 2}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2}),
    "virtual pipeline": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.rotating
def test_a_step_waits_for_the_device_once(name: str, worlds: dict[int, GlooWorld]) -> None:
    ranks, parallelism = LAYOUTS[name]
    recipe = tiny(
        model={**LLAMA, "num_layers": 4},
        layout={**parallelism, "micro_batch_size": 1},
        train={"global_batch_size": 4, "label_smoothing": 0.1},
    )
    found, freed = worlds[ranks].run(waits_of_a_step, recipe)
    assert found == ["tolist"], "the loss, with the norm and the stop flag"
    if name == "pipeline":
        assert freed and all(before > 1 and after == 1 for before, after in freed)


def test_layers_are_measured_without_another_wait(worlds: dict[int, GlooWorld]) -> None:
    recipe = tiny(tracking={"layers_interval": 1}, train={"global_batch_size": 4}, layout={"micro_batch_size": 1})
    assert worlds[2].run(waits_of_a_step, recipe)[0] == ["tolist"]


@pytest.mark.parametrize("name", ["distributed optimizer", "tensor", "pipeline"])
def test_gradients_are_compared_without_another_wait(name: str, worlds: dict[int, GlooWorld]) -> None:
    ranks, parallelism = LAYOUTS[name]
    recipe = tiny(
        model={**LLAMA, "num_layers": 4},
        layout={**parallelism, "micro_batch_size": 1},
        train={"global_batch_size": 4},
    )
    found, _ = worlds[ranks].run(partial(waits_of_a_step, compared=True), recipe)
    assert found == ["tolist"]


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.rotating
def test_around_deepspeeds_own_a_step_waits_once(stage: int, worlds: dict[int, GlooWorld]) -> None:
    recipe = tiny(
        layout={"zero": {"stage": stage}, "use_distributed_optimizer": stage > 0, "micro_batch_size": 1},
        train={"global_batch_size": 4},
    ).with_layout(engine="deepspeed")
    found, _ = worlds[2].run(waits_of_a_step, recipe, "llmrecipes")
    # Masks of the batch are summed on the host, where they are.
    assert [name for name in found if name != "__float__"] == ["tolist"]
    assert found.count("__float__") == 2
