"""Log-probabilities and continuations of many texts at a time, in any layout, for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.pipeline_parallel import get_forward_backward_func

from llmrecipes.engine.base import Batch, Platform, Scores
from llmrecipes.engine.core.generation import evaluating, without_plans
from llmrecipes.engine.core.model.attention import own_chunks
from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.engine.core.token_accuracy import likeliest
from llmrecipes.engine.sampling import Sampling, draw
from llmrecipes.errors import UserError
from llmrecipes.plan.derive import Plan

LOWEST = torch.finfo(torch.float16).min
"""Logit of a padding row of the vocabulary: a probability of zero in every precision."""


class GPTScorer:
    """Implements `engine.base.Scorer`.

    Each rank computes its layers, heads, chunk of the sequence and rows; results are summed over all ranks, each number
    from the one rank that has it. No rank gathers weights, and logits stay split over the vocabulary.

    Args:
        modules: this rank's chunks of the model, with up-to-date parameters.
        plan: of their recipe.
        platform: their device.
    """

    def __init__(self, modules: Sequence[RecipeModel], plan: Plan, platform: Platform) -> None:
        self._modules = list(modules)
        self._device = platform.device
        self._recipe = plan.recipe
        self._rows = plan.recipe.model.vocab_size
        self.positions = plan.shape.max_position_embeddings
        self._places: list[torch.Tensor] = []

    @torch.no_grad()
    def score(self, tokens: torch.Tensor) -> Scores:
        rows = tokens.size(0)
        length = tokens.size(1) - 1
        if not 0 < length <= self.positions:
            raise ValueError(f"{length + 1} tokens in a row: 2 to {self.positions + 1} can be scored")
        parallel = self._recipe.layout
        replicas = parallel_state.get_data_parallel_world_size()
        replica = parallel_state.get_data_parallel_rank()
        parts = parallel_state.get_context_parallel_world_size()
        number = parallel_state.get_context_parallel_rank()
        # The interleaved schedule needs a multiple of its stages, and the plain one would leave them idle.
        passes = parallel.pipeline_model_parallel_size
        size = -(-rows // (replicas * passes))
        multiple = (2 * parts if parts > 1 else 1) * parallel.tensor_model_parallel_size
        width = -(-length // multiple) * multiple
        padded = torch.zeros(2, replicas * passes * size, width, dtype=torch.long, device=self._device)
        padded[0, :rows, :length] = tokens[:, :-1].to(self._device)
        padded[1, :rows, :length] = tokens[:, 1:].to(self._device)
        first = replica * passes * size
        batches = [_batch(padded[:, start : start + size]) for start in range(first, first + passes * size, size)]
        outputs = self._passes([own_chunks(batch, parts, number) for batch in batches], size, width)
        scores = torch.zeros(padded.shape, dtype=torch.float64, device=self._device)
        if outputs and parallel_state.get_tensor_model_parallel_rank() == 0:
            where = own_chunks({"place": torch.arange(width, device=self._device)[None]}, parts, number)["place"][0]
            for start, (losses, greedy) in zip(range(first, first + passes * size, size), outputs, strict=True):
                scores[0, start : start + size, where] = -losses.double()
                scores[1, start : start + size, where] = greedy.double()
        dist.all_reduce(scores)
        cpu = scores[:, :rows, :length].cpu()
        return Scores(cpu[0], cpu[1].long())

    @torch.no_grad()
    def extend(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        seeds: Sequence[int],
        sampling: Sampling,
        ended: Callable[[list[int]], bool],
    ) -> list[list[int]]:
        texts = [
            _Continuation(list(prompt), min(len(prompt) + limit, self.positions), torch.Generator().manual_seed(seed))
            for prompt, limit, seed in zip(prompts, limits, seeds, strict=True)
        ]
        for text in texts:
            if not 0 < len(text.prompt) < self.positions:
                raise ValueError(f"a prompt of {len(text.prompt)} tokens: 1 to {self.positions - 1} can be continued")
        if self._splits_sequences():
            if sampling.temperature != 0:
                raise UserError(
                    f"a continuation is drawn with temperature {sampling.temperature:g}",
                    where="train.eval_tasks",
                    rule="only greedy continuations with pipeline, context, sequence or expert parallelism",
                    fix="leave the task out, or evaluate it after training: llmrecipes eval",
                )
            self._by_scores(texts, ended)
            return [text.new for text in texts]
        replicas = parallel_state.get_data_parallel_world_size()
        replica = parallel_state.get_data_parallel_rank()
        local_texts = texts[replica::replicas]
        if local_texts:
            with evaluating(self._modules):
                self._by_cache(local_texts, sampling, ended)
        if replicas == 1:
            return [text.new for text in texts]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, {replica + replicas * n: text.new for n, text in enumerate(local_texts)})
        merged = {number: new for part in gathered for number, new in part.items()}
        return [merged[number] for number in range(len(texts))]

    def _splits_sequences(self) -> bool:
        """Whether a rank has no whole layer stack or text, so that the cache of keys and values does not apply."""
        parallel = self._recipe.layout
        return (
            parallel.pipeline_model_parallel_size > 1
            or parallel.context_parallel_size > 1
            or parallel.expert_model_parallel_size > 1
            or parallel.sequence_parallel
            or self._recipe.model.multi_latent_attention  # megatron-core has no such cache for these two
            or self._recipe.model.mtp_num_layers is not None
            or (self._recipe.layout.zero is not None and self._recipe.layout.zero.stage == 3)
        )

    def _by_scores(self, texts: list[_Continuation], ended: Callable[[list[int]], bool]) -> None:
        """Greedy continuations that recompute the text for each token: right in every layout, and slow."""
        while any(not text.done for text in texts):
            rows = torch.zeros(len(texts), 1 + max(len(text.all) for text in texts), dtype=torch.long)
            for row, text in zip(rows, texts, strict=True):
                row[: len(text.all)] = torch.tensor(text.all)
            greedy = self.score(rows).greedy
            for number, text in enumerate(texts):
                if not text.done:
                    text.add(int(greedy[number, len(text.all) - 1]), ended)

    def _by_cache(self, texts: list[_Continuation], sampling: Sampling, ended: Callable[[list[int]], bool]) -> None:
        """Continuations with a cache: up to the shortest prompt at once, then a token at a time for all texts.

        A longer prompt gives its own next tokens meanwhile, so that all texts have the same positions.
        """
        (module,) = self._modules
        context = StaticInferenceContext(max_batch_size=len(texts), max_sequence_length=max(text.end for text in texts))
        done = 0
        at = min(len(text.prompt) for text in texts)
        while any(not text.done for text in texts):
            rows = torch.zeros(len(texts), at - done, dtype=torch.long)
            for row, text in zip(rows, texts, strict=True):
                tokens = text.all[done:at]
                row[: len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            places = torch.arange(done, at, device=self._device)[None].expand(len(texts), -1)
            with without_plans():
                logits = module(
                    rows.to(self._device), places, None, inference_context=context, runtime_gather_output=True
                )[:, -1, : self._rows]
            context.sequence_len_offset = done = at
            context.enable_decode_mode()
            likeliest = logits.argmax(-1).tolist() if sampling.temperature == 0 else None
            for row, text in enumerate(texts):
                if not text.done and len(text.all) == at:
                    token = draw(logits[row], sampling, text.random) if likeliest is None else likeliest[row]
                    text.add(token, ended)
            at += 1

    def _passes(self, batches: list[Batch], size: int, width: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Losses and likeliest tokens of each micro-batch, [b, s / context-parallel size]; on the last stage."""
        several = len(self._modules) > 1
        with evaluating(self._modules):
            hook = self._modules[-1].logits.register_forward_hook(self._see)
            try:
                reports = get_forward_backward_func()(
                    forward_step_func=self._forward_step,
                    data_iterator=[iter(batches) for _ in self._modules] if several else iter(batches),
                    model=self._modules,
                    num_microbatches=len(batches),
                    seq_length=width,
                    micro_batch_size=size,
                    decoder_seq_length=width,
                    forward_only=True,
                )
            finally:
                hook.remove()
        return [(report["losses"], report["greedy"]) for report in reports]

    def _forward_step(self, batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        self._places.clear()
        losses = model(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["labels"],
            loss_mask=torch.ones_like(batch["tokens"], dtype=torch.float32),
        )
        return losses, partial(_report, self._greedy(losses))

    def _greedy(self, losses: torch.Tensor) -> torch.Tensor | None:
        """Likeliest tokens [b, s] of a micro-batch; None before the last stage.

        A loss in chunks has shown the logits chunk by chunk, and those of multi-token prediction came before.
        """
        if not self._places:
            return None
        return torch.cat([place.flatten() for place in self._places])[-losses.numel() :].view(losses.shape[::-1]).t()

    def _see(self, _module: torch.nn.Module, _given: Any, logits: torch.Tensor) -> torch.Tensor:
        """Keep the likeliest token of each position, and take the vocabulary's padding rows out of the softmax.

        Called with [s, b, padded vocabulary / tensor-parallel size], or with some of these s × b tokens at a time; with
        multi-token prediction several times, of which the last is for the next token.
        """
        rows = logits.size(-1)
        first = parallel_state.get_tensor_model_parallel_rank() * rows
        if first + rows > self._rows:
            logits[..., max(0, self._rows - first) :] = LOWEST
        self._places.append(likeliest(logits, self._rows))
        return logits


class _Continuation:
    """A text while it is continued, to `end` tokens at most."""

    def __init__(self, prompt: list[int], end: int, random: torch.Generator) -> None:
        self.prompt = prompt
        self.end = end
        self.random = random
        self.all = list(prompt)
        self.new: list[int] = []
        self.done = len(prompt) >= end

    def add(self, token: int, ended: Callable[[list[int]], bool]) -> None:
        self.new.append(token)
        self.all.append(token)
        self.done = len(self.all) >= self.end or ended(self.new)


def _batch(pair: torch.Tensor) -> Batch:
    """A micro-batch of tokens and labels, [2, b, s]."""
    tokens, labels = pair
    places = torch.arange(tokens.size(1), device=tokens.device)[None].expand_as(tokens)
    return {"tokens": tokens, "labels": labels, "position_ids": places}


def _report(
    greedy: torch.Tensor | None, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | None]]:
    """In the form that megatron-core's schedules ask of a loss function, which the last stage calls."""
    count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return losses.sum(), count, {"losses": losses, "greedy": greedy}
