"""The layers that a GPU with TransformerEngine has, built on the meta device with a stub of it (`tests/stub_te`)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers import ROOT, environment

Weights = dict[str, dict[str, dict[str, list[int]]]]


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    """What the program has printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.te_worker"],
        cwd=ROOT,
        env=environment() | {"PYTHONPATH": f"{ROOT / 'tests' / 'stub_te'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def built(printed: dict[str, Any]) -> dict[str, Weights]:
    """Global shapes of the weights: by layout, model, implementation and name in a checkpoint."""
    return {layout: weights for layout, weights in printed.items() if layout in ("dp2", "tp2", "ep2")}


def test_checkpoints_of_either_implementation_have_the_same_weights(built: dict[str, Weights]) -> None:
    for layout, models in built.items():
        for name, weights in models.items():
            assert weights["local"] == weights["transformer_engine"], f"{name}, {layout}"


def test_a_fused_norm_has_the_name_of_the_layer_that_it_is_fused_with(built: dict[str, Weights]) -> None:
    latent = built["dp2"]["latent attention"]["local"]
    assert [name.partition("[")[0].removeprefix("decoder.") for name in latent if "norm" in name and "[0]" in name] == [
        "layers.input_layernorm.weight",
        "layers.self_attention.linear_q_up_proj.layer_norm_weight",
        "layers.self_attention.linear_kv_up_proj.layer_norm_weight",
        "layers.mlp.linear_fc1.layer_norm_weight",
    ]


def test_queries_that_are_not_compressed_have_no_norm(built: dict[str, Weights]) -> None:
    for weights in built["dp2"]["latent attention, whole queries"].values():
        norms = {name.partition("[")[0] for name in weights if "norm" in name and "self_attention" in name}
        assert norms == {"decoder.layers.self_attention.linear_kv_up_proj.layer_norm_weight"}


def test_packed_conversations_are_one_sequence_with_boundaries(printed: dict[str, Any]) -> None:
    """In TransformerEngine's attention: its arguments, from a micro-batch of one sequence."""
    assert printed["packed"] == {
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        "max_seqlen_q": 64,
        "max_seqlen_kv": 64,
        "cu_seqlens_q": [0, 10, 20, 30, 40, 50, 60, *[64] * 58],
        "cu_seqlens_kv": [0, 10, 20, 30, 40, 50, 60, *[64] * 58],
        "shapes": [[64, 4, 16], [64, 4, 16], [64, 4, 16]],
    }


def test_linear_layers_communicate_through_user_buffers(printed: dict[str, Any]) -> None:
    """As `layout.tp_comm_overlap` and its parts say; without a GPU there are none to create."""
    column = {"ub_bulk_wgrad": False, "ub_bulk_dgrad": True, "ub_overlap_ag": True, "ub_overlap_rs_dgrad": False}
    row = {"ub_overlap_ag": True, "ub_overlap_rs": True}
    assert printed["hidden communication"] == {
        "buffers": {
            "linear_qkv": {**column, "ub_name": "qkv"},
            "linear_proj": {**row, "ub_name": "proj"},
            "linear_fc1": {**column, "ub_name": "fc1"},
            "linear_fc2": {**row, "ub_name": "fc2"},
        },
        "refused": "layout.tp_comm_overlap",
    }


def test_each_weight_counts_once_in_the_gradient_norm(printed: dict[str, Any]) -> None:
    """megatron-core 0.16 left out the experts of all tensor-parallel ranks but one, and counted latent attention's
    down-projections on each."""
    for name, weights in printed["counted"].items():
        assert {weight: times for weight, times in weights.items() if times != 1} == {}, name


def test_weight_gradients_of_all_linear_layers_come_later(printed: dict[str, Any]) -> None:
    delayed = printed["late weight gradients"]
    assert len(delayed) > 4 and all(delayed)


def test_each_scaling_of_fp8_is_transformer_engines(printed: dict[str, Any]) -> None:
    made = printed["fp8"]
    assert {scaling: each["recipe"] for scaling, each in made.items()} == {
        "blockwise": "Float8BlockScaling",
        "tensorwise": "Float8CurrentScaling",
        "mxfp8": "MXFP8BlockScaling",
    }
    for each in made.values():
        assert each["options"]["fp8_format"] == "HYBRID"
        assert each["in bf16"] == [True, False, True]
        assert each["weights"] == ["torch.bfloat16"]


def test_no_checkpoint_has_what_transformer_engine_pickles(printed: dict[str, Any]) -> None:
    for each in printed["fp8"].values():
        assert each["extra states"] > 0 and each["saved extra states"] == 0


def test_layers_are_recorded_once_after_the_first_steps_and_deleted_at_the_end(printed: dict[str, Any]) -> None:
    """Without hooks meanwhile, which TransformerEngine refuses; the layers gather their parameters themselves."""
    recorded = printed["recorded"]
    assert recorded.pop("refused") == "layout.cuda_graph_impl"  # NCCL registers buffers that the allocator moves
    for each in recorded.values():
        (call,) = each["recorded"]
        assert call["inputs"] == [[64, 2, 64]] * call["layers"] and call["fp8"] is False
        assert each["hooks that gather"] and each["deleted"] and each["generators"]
    assert [each["in step"] for each in recorded.values()] == [3, 4, 4]
    assert [each["recorded"][0]["layers"] for each in recorded.values()] == [2, 2, 3]
    assert [each["parts"] for each in recorded.values()] == [[], ["attn"], ["attn"]]


def test_adapters_multiply_what_their_layers_multiply(printed: dict[str, Any]) -> None:
    """Of a layer with a norm inside, the norm's result."""
    for model, layers in printed["adapters"].items():
        assert max(layers.values()) < 1e-5, model


def test_layers_with_adapters_have_their_weights_in_every_layout(built: dict[str, Weights]) -> None:
    for layout, name in (("tp2", "llama with adapters"), ("ep2", "experts with adapters")):
        weights = built[layout][name]["transformer_engine"]
        assert weights == built[layout][name]["local"]
        matrices = {part.rpartition("_lora.")[0].rpartition(".")[2] for part in weights if "_lora." in part}
        assert matrices == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
