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
    """As `speed.tp_comm_overlap` and its parts say; without a GPU there are none to create."""
    column = {"ub_bulk_wgrad": False, "ub_bulk_dgrad": True, "ub_overlap_ag": True, "ub_overlap_rs_dgrad": False}
    row = {"ub_overlap_ag": True, "ub_overlap_rs": True}
    assert printed["hidden communication"] == {
        "buffers": {
            "linear_qkv": {**column, "ub_name": "qkv"},
            "linear_proj": {**row, "ub_name": "proj"},
            "linear_fc1": {**column, "ub_name": "fc1"},
            "linear_fc2": {**row, "ub_name": "fc2"},
        },
        "refused": "speed.tp_comm_overlap",
    }


def test_weight_gradients_of_all_linear_layers_come_later(printed: dict[str, Any]) -> None:
    delayed = printed["late weight gradients"]
    assert len(delayed) > 4 and all(delayed)
