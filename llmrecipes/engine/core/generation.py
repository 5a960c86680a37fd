"""Sampling text from a trained model with a key/value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.engine.sampling import Sampling, draw
from llmrecipes.errors import UserError


@torch.no_grad()
def generate(
    model: RecipeModel,
    prompt: list[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    vocab_size: int,
    eod: int | None,
    use_cache: bool = True,
) -> Iterator[int]:
    """Token ids that continue a prompt, until `max_new_tokens`, the end of the document, or the last position.

    Args:
        model: on its device; switched to evaluation mode and back.
        prompt: token ids, at least one.
        max_new_tokens: most tokens to yield.
        sampling: how to draw.
        vocab_size: real size of the vocabulary; padding rows of the embedding are never drawn.
        eod: end-of-document id, which is not yielded; None to continue after it.
        use_cache: cache keys and values of earlier tokens; otherwise every token recomputes the full text.

    Raises:
        UserError: the prompt is empty or fills all positions.
    """
    longest = model.max_sequence_length
    if not 0 < len(prompt) < longest:
        raise UserError(
            f"{len(prompt)} tokens",
            where="--prompt",
            rule=f"a prompt has at least one token, and fewer than the model's {longest} positions",
            fix="give a shorter prompt" if prompt else "give a prompt",
        )
    random = torch.Generator().manual_seed(sampling.seed)
    limit = min(longest, len(prompt) + max_new_tokens)
    step = _cached(model, limit) if use_cache else _uncached(model)
    with evaluating([model]):
        tokens = list(prompt)
        for _ in range(limit - len(prompt)):
            token = draw(step(tokens)[:vocab_size], sampling, random)
            if token == eod:
                return
            yield token
            tokens.append(token)


@contextmanager
def evaluating(modules: Sequence[RecipeModel]) -> Iterator[None]:
    """A block with the chunks of a model in evaluation mode, not compiled, and with its products in bf16.

    Texts of any length have other numbers of tokens than products in fp8 take, and copies of weights in fp8 are renewed
    by training steps only. Each length would be compiled, until torch gives up on the layers, also in training. Rounded
    weights (`qat`) are renewed here.
    """
    with uncompiled(modules), _evaluating(modules):
        yield


def uncompiled(modules: Iterable[RecipeModel]) -> AbstractContextManager[object]:
    """A block in which compiled layers of these modules, and compiled functions, run as they are."""
    if not any(_compiles(module) for module in modules):
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def _compiles(module: RecipeModel) -> bool:
    config = module.config
    functions = config.bias_activation_fusion or config.apply_rope_fusion or config.cross_entropy_loss_fusion
    return bool(functions) or any(part._compiled_call_impl is not None for part in module.modules())


@contextmanager
def _evaluating(modules: Sequence[RecipeModel]) -> Iterator[None]:
    before = [(module, module.training, module.config.fp8) for module in modules]
    try:
        for module in modules:
            module.eval()
            if module.fake_quantizer is not None:
                module.fake_quantizer.forget()
            module.config.fp8 = None  # which all layers of a chunk share
        yield
    finally:
        for module, training, fp8 in before:
            module.train(training)
            module.config.fp8 = fp8


def _cached(model: RecipeModel, limit: int) -> Callable[[list[int]], torch.Tensor]:
    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=limit)

    def step(tokens: list[int]) -> torch.Tensor:
        done = context.sequence_len_offset
        logits = _forward(model, tokens[done:], done, context)
        context.sequence_len_offset = len(tokens)
        context.enable_decode_mode()
        return logits

    return step


def _uncached(model: RecipeModel) -> Callable[[list[int]], torch.Tensor]:
    return lambda tokens: _forward(model, tokens, 0, None)


def _forward(
    model: RecipeModel, tokens: list[int], offset: int, context: StaticInferenceContext | None
) -> torch.Tensor:
    device = next(model.parameters()).device
    ids = torch.tensor([tokens], device=device)
    positions = torch.arange(offset, offset + len(tokens), device=device)[None]
    with without_plans():
        logits = model(ids, positions, None, inference_context=context, runtime_gather_output=True)
    return logits[0, -1]


def without_plans() -> AbstractContextManager[None]:
    """A block in which torch's attention does not take cuDNN's, which makes a plan for each length of the keys: tens of
    milliseconds a token where they grow by one."""
    chosen: AbstractContextManager[None] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return chosen
