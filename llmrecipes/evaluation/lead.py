"""All ranks evaluate one model, and only the first has the texts, the tasks and the results.

What is evaluated differs in every task, and so do the numbers of rows. The first rank runs the task; for each batch it
sends the tokens to the others, which take part in the forward pass and wait for the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llmrecipes.data.tokens.tokenizer import TextTokenizer
from llmrecipes.engine.base import Scorer, World
from llmrecipes.engine.sampling import Sampling
from llmrecipes.tracking.progress import Counted

T = TypeVar("T")
BATCHES_AT_ONCE = 32
"""Batches that are sorted by length together: memory for their tokens, and little padding."""


class Interrupted(Exception):
    """A rank received a stop signal, and the evaluation is discarded; raised on every rank."""


@dataclass(frozen=True)
class RowScore:
    """Scores of the last tokens of a row.

    Attributes:
        logprobs: natural logarithms of the tokens' probabilities.
        greedy: whether all of them are the likeliest.
    """

    logprobs: list[float]
    greedy: bool


@dataclass(frozen=True)
class _Score:
    rows: list[list[int]]


@dataclass(frozen=True)
class _Extend:
    prompts: list[list[int]]
    limits: list[int]
    seeds: list[int]
    sampling: Sampling
    until: tuple[str, ...]


class RankZeroScorer:
    """The model as a task on the first rank sees it.

    Args:
        scorer: this rank's part of the model.
        world: this rank.
        tokenizer: tokenizer of the model, on every rank.
        batch_size: rows of one data-parallel rank in a forward pass.
        stop: whether this rank was asked to stop.
        progress: shows what is done; on the first rank.
    """

    def __init__(
        self,
        scorer: Scorer,
        world: World,
        tokenizer: TextTokenizer,
        batch_size: int,
        stop: Callable[[], bool] = lambda: False,
        progress: Counted | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.positions = scorer.positions
        self._scorer = scorer
        self._world = world
        self._stop = stop
        self._rows = batch_size * world.data_parallel_size
        self._answering = False
        self.name, self._progress = "", progress
        """Of what is evaluated now."""

    def begin(self, total: int | None) -> None:
        """Show progress of so many items."""
        if self._progress is not None:
            self._progress.begin(self.name, total)

    def count(self, items: int) -> None:
        """Show that items are done."""
        if self._progress is not None:
            self._progress.add(items)

    def run(self, task: Callable[[RankZeroScorer], T]) -> T | None:
        """Run a task on the first rank, with the help of the others; a collective of all ranks.

        Returns:
            Its result; None on the other ranks, also if the task raises on the first.

        Raises:
            Interrupted: a rank was asked to stop.
        """
        if not self._world.is_first:
            self._follow()
            return None
        try:
            result = task(self)
        except BaseException:
            if not self._answering:  # or the others are in the same answer, and do not wait for a question
                self._send(None)
            raise
        self._send(None)
        return result

    def score(self, rows: Iterable[tuple[list[int], int]]) -> Iterator[RowScore]:
        """Score the last tokens of rows, lazily and in order.

        Args:
            rows: 2 to `positions` + 1 tokens, and how many of the last ones are asked for: 1 to all but one. Progress
                is shown if they are a sequence.
        """
        counted = isinstance(rows, Sequence)
        if isinstance(rows, Sequence):
            self.begin(len(rows))
        source = iter(rows)
        while block := list(islice(source, BATCHES_AT_ONCE * self._rows)):
            scored: dict[int, RowScore] = {}
            order = sorted(range(len(block)), key=lambda number: -len(block[number][0]))
            for start in range(0, len(order), self._rows):
                batch = order[start : start + self._rows]
                scores = self._ask(_Score([block[number][0] for number in batch]))
                for place, number in enumerate(batch):
                    tokens, last = block[number]
                    part = slice(len(tokens) - 1 - last, len(tokens) - 1)
                    same = scores.greedy[place, part] == torch.tensor(tokens[-last:])
                    scored[number] = RowScore(scores.logprobs[place, part].tolist(), bool(same.all()))
                self.count(len(batch) if counted else 0)
            yield from (scored[number] for number in range(len(block)))

    def extend(
        self,
        prompts: Sequence[list[int]],
        limits: Sequence[int],
        sampling: Sampling,
        until: Sequence[str] = (),
    ) -> list[list[int]]:
        """New tokens of each prompt, in order, without an end-of-document token; prompt *n* has the seed + *n*.

        Args:
            prompts: token ids, 1 to `positions` - 1.
            limits: most new tokens of each.
            sampling: how to draw.
            until: a continuation ends with the first of these texts, which its tokens may have more of.
        """
        written: dict[int, list[int]] = {}
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        self.begin(len(prompts))
        for start in range(0, len(order), self._rows):
            batch = order[start : start + self._rows]
            question = _Extend(
                [list(prompts[number]) for number in batch],
                [limits[number] for number in batch],
                [sampling.seed + number for number in batch],
                sampling,
                tuple(until),
            )
            written |= dict(zip(batch, self._ask(question), strict=True))
            self.count(len(batch))
        eod = self.tokenizer.eod
        return [new[:-1] if new and new[-1] == eod else new for new in (written[n] for n in range(len(prompts)))]

    def _ask(self, question: _Score | _Extend) -> Any:
        self._send(question)
        self._answering = True
        answer = self._answer(question)
        self._answering = False
        return answer

    def _follow(self) -> None:
        while (question := self._receive()) is not None:
            self._answer(question)

    def _send(self, question: _Score | _Extend | None) -> None:
        if self._world.size > 1:
            dist.broadcast_object_list([question], src=0)

    def _receive(self) -> _Score | _Extend | None:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0)
        question: _Score | _Extend | None = box[0]
        return question

    def _answer(self, question: _Score | _Extend) -> Any:
        if self._stop_requested():
            raise Interrupted
        if isinstance(question, _Score):
            width = max(map(len, question.rows))
            tokens = torch.zeros(len(question.rows), width, dtype=torch.long)
            for row, ids in zip(tokens, question.rows, strict=True):
                row[: len(ids)] = torch.tensor(ids)
            return self._scorer.score(tokens)
        tokenizer = self.tokenizer
        until = question.until

        def ended(new: list[int]) -> bool:
            if new[-1] == tokenizer.eod:
                return True
            return bool(until) and any(text in tokenizer.decode(new) for text in until)

        return self._scorer.extend(question.prompts, question.limits, question.seeds, question.sampling, ended)

    def _stop_requested(self) -> bool:
        if self._world.size == 1:
            return self._stop()
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        answer = torch.tensor(int(self._stop()), device=device)
        dist.all_reduce(answer)
        return bool(answer.item())
