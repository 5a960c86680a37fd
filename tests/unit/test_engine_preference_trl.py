"""The loss, gradients and rewards of DPO are those of TRL: figures that its DPOTrainer printed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmrecipes.engine.core.model.gpt import build
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.engine.parts.preference import PreferenceLoss
from llmrecipes.hf.weights import open_weights
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe
from tests.helpers import ROOMY, tiny

pytestmark = pytest.mark.usefixtures("world")

TRL: dict[str, tuple[float, float]] = {
    "sigmoid": (0.7023202180862427, 30.40214384371594),
    "hinge": (0.9709725379943848, 55.744407213455),
    "ipo": (1.1070178747177124, 32.71471315771504),
    "robust": (0.698691725730896, 37.26994287536834),
    "exo_pair": (0.5180160403251648, 31.122382639537193),
    "nca_pair": (1.4763715267181396, 18.29061779977907),
    "bco_pair": (1.4661158323287964, 30.676556735867507),
    "sppo_hard": (5.052832126617432, 572.5981540380033),
    "apo_zero": (0.9976148009300232, 13.163227752083184),
    "apo_down": (1.0535316467285156, 19.065404227331175),
    "sigmoid_norm": (0.7013777494430542, 4.297608193253456),
}
"""Loss, and norm of all gradients, by `loss_type`: TRL 1.16.0, transformers 5.24.0 and torch 2.13.0 on a CPU, with
beta 0.5 and label_smoothing 0.1 where it counts, of the models and pairs below in one batch."""
REWARDS = {
    "chosen": 0.2815573215484619,
    "rejected": 0.2525298595428467,
    "margins": 0.029027462005615234,
    "accuracies": 0.5,
}
"""TRL's `rewards/…` of the same batch, for every loss."""
SMOOTHED = ("robust", "exo_pair")
MODEL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
    "seq_length": 32, "vocab_size": 64, "position_embedding_type": "rope", "normalization": "RMSNorm",
    "activation_func": "silu", "gated_linear_unit": True, "add_bias_linear": False,
    "share_embeddings_and_output_weights": False, "max_position_embeddings": 64, "attention_dropout": 0.0,
    "hidden_dropout": 0.0, "make_vocab_size_divisible_by": 64,
}  # fmt: skip


def model(phase: float, folder: Path) -> Path:
    """A Llama whose weights are sines of their places."""
    made = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
    for number, (name, parameter) in enumerate(sorted(made.named_parameters())):
        places = torch.arange(parameter.numel(), dtype=torch.float64)
        values = 0.3 * torch.sin(places * (0.37 + 0.01 * number) + phase + number)
        values = 1 + 0.1 * values if "norm" in name else values
        parameter.data = values.view(parameter.shape).float()
    made.save_pretrained(folder)
    return folder


def ids(seed: int, count: int) -> list[int]:
    return [2 + (seed * 7 + k * k * 5 + k * 3) % 61 for k in range(count)]


PAIRS = [
    (ids(1, 3), [*ids(2, 4), 1], [*ids(3, 2), 1]),
    (ids(4, 5), [*ids(5, 2), 1], [*ids(6, 6), 1]),
    (ids(7, 4), [*ids(8, 5), 1], [*ids(9, 5), 1]),
    (ids(10, 2), [*ids(11, 7), 1], [*ids(12, 3), 1]),
]
"""Prompt, chosen and rejected."""


def batch(pairs: list[tuple[list[int], list[int], list[int]]], length: int, *, packed: bool) -> dict[str, torch.Tensor]:
    """A micro-batch of these pairs: an answer in each row, or both."""
    rows = [[(prompt, each)] for prompt, *both in pairs for each in both]
    if packed:
        rows = [one + other for one, other in zip(rows[::2], rows[1::2], strict=True)]
    made = {name: torch.zeros(len(rows), length, dtype=torch.long) for name in ("tokens", "labels", "position_ids")}
    made["loss_mask"] = torch.zeros(len(rows), length)
    for row, answers in enumerate(rows):
        start = 0
        for prompt, answer in answers:
            text = torch.tensor(prompt + answer)
            end = start + len(text) - 1
            made["tokens"][row, start:end], made["labels"][row, start:end] = text[:-1], text[1:]
            made["loss_mask"][row, start + len(prompt) - 1 : end] = 1
            made["position_ids"][row, start:end] = torch.arange(end - start)
            start = end
        made["position_ids"][row, start:] = torch.arange(length - start)
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy and the reference."""
    where = tmp_path_factory.mktemp("llamas")
    return model(0.0, where / "policy"), model(0.2, where / "reference")


def engine(recipe: Recipe, policy: Path, reference: Path) -> MegatronEngine:
    plan, platform = derive(recipe, 1, ROOMY), select()
    made = MegatronEngine(plan, build(plan, platform, open_weights(policy, recipe.model)), platform)
    made.parts.load(open_weights(reference, recipe.model))
    return made


@pytest.mark.parametrize(("kind", "packed"), [*((kind, False) for kind in TRL), ("sigmoid", True)])
def test_a_step_is_that_of_trl(kind: str, packed: bool, folders: tuple[Path, Path]) -> None:
    dpo = {"beta": 0.5, "loss_type": kind, "label_smoothing": 0.1 if kind in SMOOTHED else 0.0, "reference": "any"}
    rows = 1 if packed else 2
    recipe = tiny(
        model=MODEL,
        dpo=dpo,
        train={"global_batch_size": 4 * rows},
        data={"sources": [{"type": "docstrings"}], "chat": {"packing": packed, "preference": {}}},
        layout={"micro_batch_size": 2 * rows},
    )
    made = engine(recipe, *folders)
    made.parts.the(PreferenceLoss).rewards.start()
    halves = [batch(PAIRS[start : start + 2], 32, packed=packed) for start in (0, 2)]
    result = made.train_step(iter(halves))
    loss, norm = TRL[kind]
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    rewards = made.parts.the(PreferenceLoss).rewards.take() or {}
    assert rewards == pytest.approx(REWARDS, abs=2e-5) and math.isfinite(sum(rewards.values()))
    made.close()
