"""The loss in chunks of tokens: the same losses and gradients, without the logits of a micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from llmrecipes.engine.core.model.gpt import RecipeModel, loss_chunk_tokens
from llmrecipes.engine.core.model.loss import Chunking, CompiledLossKernels, LossKernels, Split, chunked_losses
from llmrecipes.hardware.cluster import DetectedGpu
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load
from llmrecipes.units import GIB
from tests.helpers import LLAMA, ROOMY, built, engine_of, steps, tiny
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("world")

LENGTH, VOCABULARY = 64, 512
MTP = {"position_embedding_type": "rope", "mtp_num_layers": 2}
MUP = {"use_mup": True, "mup_base_hidden_size": 16}


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and a mask that leaves some of them out."""
    random = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=random)
    return ids, torch.arange(LENGTH).expand(2, -1), (torch.rand(2, LENGTH, generator=random) < 0.7).float()


def results(module: RecipeModel, factor: float = 1.0, **options: Any) -> dict[str, torch.Tensor]:
    """Losses and gradients of a pass whose losses are weighted with the mask, times a factor."""
    ids, positions, mask = batch()
    module.zero_grad()
    losses = module(ids, positions, None, labels=ids.roll(-1, 1), loss_mask=mask, **options)
    (losses * mask * factor).sum().backward()
    gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    return {"losses": losses.detach(), **gradients}


def require_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    """By norms of tensors; that of a key's bias is rounding only."""
    assert found.keys() == expected.keys()
    least = 1e-3 * max(float(each.float().norm()) for each in expected.values())
    for name, value in expected.items():
        difference = float((found[name].float() - value.float()).norm())
        assert difference <= bound * max(float(value.float().norm()), least), name


def chunked(tokens: int | None, **sections: Any) -> RecipeModel:
    layout = {**sections.pop("layout", {}), "loss_chunk_tokens": tokens}
    return built(tiny(layout=layout, **sections)).module


CASES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"model": LLAMA},
    "smoothed": {"train": {"label_smoothing": 0.2}},
    "further predictions": {"model": MTP},
    "muP": {"model": MUP},
    "adapters": {"lora": {"rank": 4}},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [128, 48])  # all tokens, and chunks of which the last is smaller
def test_losses_and_gradients_are_those_of_all_logits(name: str, tokens: int) -> None:
    expected, found = (results(chunked(each, **CASES[name]), factor=3.0) for each in (0, tokens))
    require_close(found, expected, 1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_and_gradients_in_16_bits(precision: str) -> None:
    expected, found = (results(chunked(each, train={"precision": precision}), 64.0) for each in (0, 48))
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-4, atol=1e-4)
    require_close(found, expected, 1e-2)


def test_losses_of_an_evaluation() -> None:
    ids, positions, _ = batch()
    with torch.no_grad():
        expected, found = (
            chunked(tokens, train={"label_smoothing": 0.2}).eval()(ids, positions, None, labels=ids)
            for tokens in (0, 48)
        )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_gradient_that_is_not_the_mask_times_a_number_is_not_passed_off_as_right() -> None:
    ids, positions, mask = batch()
    module = chunked(48)
    losses = module(ids, positions, None, labels=ids, loss_mask=mask)
    losses.square().sum().backward()
    assert module.decoder.final_layernorm.weight.grad.isnan().all()
    # Without a mask the gradient may be any.
    module.zero_grad()
    losses = module(ids, positions, None, labels=ids)
    losses.square().sum().backward()
    assert not module.decoder.final_layernorm.weight.grad.isnan().any()


class _Largest(TorchDispatchMode):
    """Most elements of a result."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.number = max(self.number, result.numel())
        return result


@pytest.mark.parametrize(("tokens", "elements"), [(0, 2 * LENGTH * VOCABULARY), (32, 32 * VOCABULARY)])
def test_the_logits_of_all_tokens_are_never_there(tokens: int, elements: int) -> None:
    """Nothing is larger than them: a weight has 32,768 elements, and all activations fewer."""
    module = chunked(tokens, model={"ffn_hidden_size": 64})
    with _Largest() as largest:
        results(module)
    assert largest.number == max(elements, VOCABULARY * 64)


class _Alive(TorchDispatchMode):
    """Most bytes of results with a number of elements that are in memory together."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements, self._results = elements, dict[StorageWeakRef, int]()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self._elements:
            storage = result.untyped_storage()
            self._results[StorageWeakRef(storage)] = storage.nbytes()
            self._results = {each: size for each, size in self._results.items() if not each.expired()}
            self.most = max(self.most, sum(self._results.values()))
        return result


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 4), (torch.bfloat16, 6), (torch.float16, 6)])
@pytest.mark.parametrize("known", [True, False])
def test_a_chunk_takes_the_bytes_per_logit_that_are_planned(dtype: torch.dtype, most: int, known: bool) -> None:
    """Whether gradients are computed in the forward pass (the weights are known) or in the backward pass."""
    hidden, weight = (torch.randn(*size, dtype=dtype, requires_grad=True) for size in ((LENGTH, 2, 8), (VOCABULARY, 8)))
    ids, _, mask = batch()
    how = Chunking(32, Split(), 0.0, 0.0, LossKernels(), torch.nn.Identity(), lambda *_: None)
    with _Alive(32 * VOCABULARY) as alive:
        (chunked_losses(hidden, weight, ids, mask if known else None, how) * mask).sum().backward()
    assert alive.most == most * 32 * VOCABULARY


def test_training_in_chunks_is_training() -> None:
    expected, found = (
        [step.loss for step in steps(engine_of(tiny(layout={"loss_chunk_tokens": tokens})), 4)] for tokens in (0, 48)
    )
    assert found == pytest.approx(expected, rel=1e-5)


def test_generation_has_logits() -> None:
    ids, positions, _ = batch()
    with torch.no_grad():
        whole, found = (chunked(tokens).eval()(ids, positions, None) for tokens in (0, 48))
    assert torch.equal(whole, found)


@pytest.mark.parametrize("sections", [{}, {"model": MTP}])
def test_scores_and_likeliest_tokens_are_those_of_all_logits(sections: dict[str, Any]) -> None:
    """The hook that takes padded rows out of the softmax sees every chunk."""
    rows = batch()[0]
    model = {**sections.get("model", {}), "vocab_size": 500}  # padded to 512
    whole, found = (
        engine_of(tiny(model=model, layout={"loss_chunk_tokens": tokens})).scorer().score(rows % 500)
        for tokens in (0, 48)
    )
    assert torch.equal(found.greedy, whole.greedy)
    torch.testing.assert_close(found.logprobs, whole.logprobs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [0, 48])
@pytest.mark.parametrize(
    "train", [{"label_smoothing": 0.2}, {"precision": "bf16"}, {"precision": "fp16", "label_smoothing": 0.2}]
)
def test_compiled_kernels_compute_the_same_loss(tokens: int, train: dict[str, Any]) -> None:
    module = chunked(tokens, train=train)
    expected = results(module, 3.0)
    module.compile_loss(backend="eager")
    found = results(module, 3.0)
    rounded = "precision" in train
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=1e-5)
    require_close(found, expected, 1e-2 if rounded else 1e-6)


def test_a_rank_without_a_compiler_computes_in_chunks_what_was_planned_at_once() -> None:
    gpu = DetectedGpu("NVIDIA H100", 79 * GIB, 79 * GIB, None)
    micro = "layout.micro_batch_size=32"
    plan = derive(load("gpt-125m", [micro]).recipe, 1, replace(ROOMY, gpus=(gpu,)))
    assert [loss_chunk_tokens(plan, compiled=compiled) for compiled in (True, False)] == [0, 4096]
    whole = derive(load("gpt-125m", [micro, "layout.loss_chunk_tokens=0"]).recipe, 1, replace(ROOMY, gpus=(gpu,)))
    assert loss_chunk_tokens(whole, compiled=False) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_replace_logits_with_their_gradient(dtype: torch.dtype) -> None:
    """As torch compiles them, and for any number of tokens."""
    kernels = CompiledLossKernels()
    for tokens in (40, 24):
        labels, has = torch.randint(VOCABULARY, (tokens,)), torch.ones(tokens, dtype=torch.bool)
        logits, weights = torch.randn(tokens, VOCABULARY).mul(4).to(dtype), torch.rand(tokens, 1)
        expected = logits.float().softmax(-1) * weights
        expected[torch.arange(tokens), labels] -= weights[:, 0]
        totals, place = logits.float().logsumexp(-1, keepdim=True), logits.data_ptr()
        values, offset, parts = kernels.statistics(logits, labels, has, 0.0)
        slope = kernels.gradient(values, offset - parts[:, :1], weights, weights, labels, None, dtype)
        torch.testing.assert_close(parts[:, :1], totals)
        torch.testing.assert_close(slope.float(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        assert slope.data_ptr() == place


Z_LOSS = 0.05


@pytest.mark.parametrize("precision", ["fp32", "fp16"])  # one pass, and one whose backward pass computes logits again
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("tokens", [None, 48])
def test_z_loss_is_that_of_all_logits_in_pytorch(tokens: int | None, smoothing: float, precision: str) -> None:
    """The squared log-sum-exp of the logits (arXiv 2204.02311, section 5), of unmasked tokens only."""
    train = {"label_smoothing": smoothing, "precision": precision}
    found = results(chunked(tokens, train={**train, "z_loss_coeff": Z_LOSS}), 8.0)
    module = chunked(0, train=train)
    ids, positions, mask = batch()
    module.zero_grad()
    logits = module(ids, positions, None).float()
    labels = ids.roll(-1, 1)
    entropy = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    ).view(ids.shape)
    losses = entropy + Z_LOSS * logits.logsumexp(-1).square()
    (losses * mask * 8.0).sum().backward()
    gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    bound = 1e-5 if precision == "fp32" else 1e-2
    torch.testing.assert_close(found["losses"], losses.detach(), rtol=bound, atol=bound)
    require_close(found, {"losses": losses.detach(), **gradients}, bound)


def test_the_validation_loss_has_no_z_loss() -> None:
    ids, positions, _ = batch()
    with torch.no_grad():
        expected, found = (
            chunked(48, train={"z_loss_coeff": coeff}).eval()(ids, positions, None, labels=ids) for coeff in (0, Z_LOSS)
        )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("other", ["layout.loss_chunk_tokens=0", "layout.zero={stage: 3}"])
def test_a_z_loss_without_chunks_is_refused(other: str) -> None:
    with refused("train.z_loss_coeff"):
        load("gpt-tiny", ["train.z_loss_coeff=1e-4", other])
