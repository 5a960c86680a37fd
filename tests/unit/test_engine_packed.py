"""Conversations that share a sequence train like unpacked ones, and only answers count."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmrecipes.data.read.batches import KEYS
from llmrecipes.data.read.dataset import ConversationDataset, best_fit, unpacked
from llmrecipes.engine.base import Batch
from llmrecipes.engine.core.model import attention
from llmrecipes.engine.core.model.attention import attention_mask
from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.plan.derive import derive
from llmrecipes.plan.kernels import mask_per_token
from tests.helpers import LLAMA, ROOMY, built, engine_of, random_batches, tiny
from tests.unit import test_model_hf as hf

pytestmark = pytest.mark.usefixtures("world")

BOUND = 1e-5
LENGTH, PAD = 32, 0
CHAT = {"sources": [{"type": "docstrings"}], "chat": {}}
MODELS: dict[str, dict[str, Any]] = {
    "learned positions": {},
    "rotary positions, grouped queries": LLAMA,
    "a window": {**LLAMA, "window_size": [3, 0], "window_attn_skip_freq": 2},
    "experts": {**LLAMA, "num_moe_experts": 4},
    "latent attention": {
        "position_embedding_type": "rope", "multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8, "v_head_dim": 24, "normalization": "RMSNorm", "add_bias_linear": False,
    },
}  # fmt: skip
Talks = list[tuple[np.ndarray, np.ndarray]]


def talks(count: int = 9, vocabulary: int = 512) -> Talks:
    """Conversations of 2 to 20 tokens, each with an answer."""
    random = np.random.default_rng(0)
    lengths = random.integers(2, 21, count)
    ids = [random.integers(1, vocabulary, n) for n in lengths]
    return [(each, (np.arange(len(each)) >= random.integers(1, len(each))).astype(np.uint8)) for each in ids]


def batch(given: Talks, *, packed: bool) -> Batch:
    """All of them, in as many sequences as they need."""
    lengths = np.array([len(ids) - 1 for ids, _ in given])
    sequences = best_fit(lengths, LENGTH, 0) if packed else unpacked(len(given))
    order = np.stack([np.zeros(len(sequences), np.int64), np.arange(len(sequences))], 1)
    data: Any = given
    samples = ConversationDataset([data], [sequences], order, LENGTH, PAD)
    return {key: torch.stack([samples[n][key] for n in range(len(samples))]) for key in KEYS}


def loss_and_gradients(
    module: RecipeModel, given: Batch, mask: torch.Tensor | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss summed over what counts, and its gradients."""
    module.zero_grad(set_to_none=True)
    weights = given["loss_mask"]
    losses = module(given["tokens"], given["position_ids"], mask, labels=given["labels"], loss_mask=weights)
    total = (losses * weights).sum()
    total.backward()
    return total.detach(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def require_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        scale = other[name].norm().clamp(min=1e-3)
        assert (one[name] - other[name]).norm() / scale < BOUND, name


@pytest.mark.parametrize("dense", [False, True], ids=["by lengths", "by a mask"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_conversations_train_as_if_each_were_alone(name: str, dense: bool) -> None:
    module = built(tiny(model={**MODELS[name], "seq_length": LENGTH}, data=CHAT)).module
    given = talks()
    together, apart = batch(given, packed=True), batch(given, packed=False)
    assert len(together["tokens"]) < len(apart["tokens"])
    mask = attention_mask(together["position_ids"], dense=dense)
    ours, gradients = loss_and_gradients(module, together, mask)
    loss, expected = loss_and_gradients(module, apart, None)
    assert ours / loss == pytest.approx(1, abs=BOUND)
    require_same(gradients, expected)
    # It is the mask that does it.
    assert abs(loss_and_gradients(module, together, None)[0] / loss - 1) > 3 * BOUND


def test_the_loss_is_that_of_transformers_with_labels_of_minus_100(tmp_path: Path) -> None:
    case = hf.Case("llama", {**hf.LLAMA, "vocab_size": 384})  # which needs no rows of padding
    ours = hf.randomised(case.model)
    theirs, _ = hf.exported(case, ours, tmp_path)
    given = talks(vocabulary=384)
    longest = max(len(ids) for ids, _ in given)
    ids, labels = np.zeros((len(given), longest), np.int64), np.full((len(given), longest), -100)
    for row, (tokens, answers) in enumerate(given):
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = np.where(answers > 0, tokens, -100)
    expected = theirs(input_ids=torch.from_numpy(ids), labels=torch.from_numpy(labels)).loss
    together = batch(given, packed=True)
    mask = attention_mask(together["position_ids"], dense=False)
    found = loss_and_gradients(ours, together, mask)[0] / together["loss_mask"].sum()
    assert found.item() == pytest.approx(expected.item(), rel=BOUND)


def test_what_is_not_an_answer_never_counts() -> None:
    module = built(tiny(model={**LLAMA, "seq_length": LENGTH}, data=CHAT)).module
    given = batch(talks(), packed=True)
    mask = attention_mask(given["position_ids"], dense=False)
    loss, gradients = loss_and_gradients(module, given, mask)
    other = {**given, "labels": torch.where(given["loss_mask"] > 0, given["labels"], 7)}
    assert not torch.equal(other["labels"], given["labels"])
    changed, found = loss_and_gradients(module, other, mask)
    assert changed == loss
    assert all(torch.equal(found[name], gradients[name]) for name in gradients)
    # Nor does the padding reach what counts.
    padding = given["loss_mask"].flip(1).cumsum(1).flip(1) == 0
    noise = {**given, "tokens": torch.where(padding, 9, given["tokens"])}
    assert not torch.equal(noise["tokens"], given["tokens"])
    assert loss_and_gradients(module, noise, mask)[0] == loss


def masked(batches: Iterator[Batch], without: int) -> Iterator[Batch]:
    """The batches; one of them has nothing that counts."""
    for number, each in enumerate(batches):
        yield {**each, "loss_mask": each["loss_mask"] * (number != without)}


def test_a_micro_batch_without_an_answer_changes_no_mean() -> None:
    whole = tiny(layout={"micro_batch_size": 8})
    parts = tiny(layout={"micro_batch_size": 2})
    results = []
    for recipe in (whole, parts):
        engine = engine_of(recipe)
        batches = masked(random_batches(parts), 1)
        if recipe is whole:
            four = [next(batches) for _ in range(4)]
            batches = iter([{key: torch.cat([each[key] for each in four]) for key in four[0]}])
        results.append(engine.train_step(batches))
        engine.close()
    one, other = results
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)


def test_an_evaluation_is_a_mean_over_answers_of_all_batches() -> None:
    engine = engine_of(tiny(layout={"micro_batch_size": 8}))
    batches = list(masked(random_batches(engine.recipe), -1))[:2]
    batches[1]["loss_mask"][:, 3:] = 0
    counts = [float(batch["loss_mask"].sum()) for batch in batches]
    apart = [engine.evaluate(iter([batch]), 1) or 0.0 for batch in batches]
    expected = sum(loss * count for loss, count in zip(apart, counts, strict=True)) / sum(counts)
    assert engine.evaluate(iter(batches), 2) == pytest.approx(expected, rel=1e-9)
    assert abs(sum(apart) / 2 - expected) > 1e-4
    engine.close()


def test_packing_chooses_the_layers_that_keep_conversations_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrecipes.engine.core.model.layer_spec._transformer_engine_obstacle", lambda: None)
    assert built(tiny(data=CHAT)).implementation == "local"


def by_lengths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: torch.Tensor, **_options: Any
) -> torch.Tensor:
    """What torch's attention of variable length computes, which has no kernel on a CPU."""
    parts = []
    for begin, end in pairwise(boundaries.tolist()):
        q, k, v = (each[begin:end].transpose(0, 1) for each in (query, key, value))
        before = _options["before"]
        seen = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        seen = seen if before < 0 else seen.triu(-before)
        out = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True, scale=_options["scale"])
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "latent attention"])  # whose heads differ in width
def test_attention_by_boundaries_is_that_of_the_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for the kernel: its arguments are bound to torch's signature."""
    from torch.nn.attention.varlen import varlen_attn

    called = []

    def varlen(*args: Any, **options: Any) -> torch.Tensor:
        bound = inspect.signature(varlen_attn).bind(*args, **options).arguments
        query, boundaries = bound["query"], bound["cu_seq_q"]
        assert boundaries is bound["cu_seq_k"] and boundaries.dtype == torch.int32
        assert (len(boundaries) - 1) % 4 == 0 and boundaries[-1] == len(query)
        assert int(boundaries.diff().max()) <= bound["max_q"] == bound["max_k"]
        before, after = bound["window_size"]
        assert after == 0
        assert bound["enable_gqa"] == (query.size(1) != bound["key"].size(1))
        called.append(bound)
        return by_lengths(query, bound["key"], bound["value"], boundaries, scale=bound["scale"], before=before)

    module = built(tiny(model={**MODELS[name], "seq_length": LENGTH}, data=CHAT)).module
    together = batch(talks(), packed=True)
    positions = together["position_ids"]
    loss, expected = loss_and_gradients(module, together, attention_mask(positions, dense=True))
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(
        attention.SdpaCoreAttention,
        "_attend_one_by_one",
        lambda self, query, key, value, _dropout, where: self._attend_by_boundaries(query, key, value, where),
    )
    ours, gradients = loss_and_gradients(module, together, attention_mask(positions, dense=False, multiple=4))
    windows = [bound["window_size"][0] for bound in called]
    assert windows == [3 if name == "a window" else -1, -1] and ours / loss == pytest.approx(1, abs=BOUND)
    require_same(gradients, expected)


def test_what_keeps_conversations_apart_on_a_gpu() -> None:
    """Boundaries where FlashAttention can run, else the mask; on a CPU boundaries unless layers are compiled."""
    heads = {"num_attention_heads": 4, "num_query_groups": 4}

    def kept_apart(device: str, *, precision: str = "bf16", compiled: bool = False, **model: Any) -> str:
        recipe = tiny(
            model={**LLAMA, **heads, "seq_length": LENGTH, **model},
            train={"precision": precision},
            data=CHAT,
            layout={"torch_compile": compiled},
        )
        found = attention.masks(recipe, torch.device(device))(torch.arange(LENGTH)[None] % 10)
        assert found is not None and found.device.type == device
        plan = derive(recipe, 1, ROOMY)
        bytes_per_token = mask_per_token(recipe, plan.shape, "cpu" if device == "cpu" else "cuda")
        assert bytes_per_token == (LENGTH if found.dtype == torch.bool else 0)
        return "mask" if found.dtype == torch.bool else f"{len(found) - 1} conversations"

    assert kept_apart("cpu") == "4 conversations"
    assert kept_apart("cpu", compiled=True) == "mask"
    assert kept_apart("meta") == kept_apart("meta", compiled=True) == "64 conversations"
    assert kept_apart("meta", precision="fp32") == "mask"
    assert kept_apart("meta", attention_dropout=0.1) == "mask"
    assert kept_apart("meta", kv_channels=512) == kept_apart("meta", kv_channels=20) == "mask"
