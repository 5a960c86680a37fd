"""How much faster is fine-tuning on packed conversations than on padded ones, and how should attention keep them apart?

    python -m benchmarks.finetuning [--steps 20] [--json finetuning.json]

Trains sft-tiny both ways in turns in one process, a few steps each. What counts is the tokens of conversations in a
second: padding is computed too, and teaches nothing. Then core attention alone on packed sequences, by the lengths of
the conversations (a call for each) and by a mask (one call for all). Last, how long it takes to pack ten million
conversations whose lengths have a log-normal distribution, and how full the sequences are.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.common import close, machine, parser, show
from llmrecipes.data.prepare import prepare
from llmrecipes.data.read.batches import batches
from llmrecipes.data.read.dataset import best_fit, build
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import Batch, Engine
from llmrecipes.engine.core.model.attention import attention_mask
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe

TURNS = 4
LENGTHS = ((256, 64), (2048, 64), (2048, 512), (8192, 512))
"""Tokens of a sequence, and of each conversation in it."""


class Contender:
    """One way to fill sequences.

    Args:
        recipe: of the training.
        data_dir: of prepared data.
    """

    def __init__(self, recipe: Recipe, data_dir: Path) -> None:
        prepared = prepare(recipe, data_dir)
        dataset: Any = build(recipe, prepared, "train")
        engines = backend(recipe)
        self.engine: Engine = engines.build(derive(recipe, 1, detect()), engines.platform())
        self._batches = _counting(recipe, dataset, self)
        self.tokens = self.answers = 0
        self.rates: list[tuple[float, float, float]] = []
        """Positions, tokens of conversations and answer tokens per second, of each turn."""

    def turn(self, steps: int) -> None:
        """Train some steps and take the time."""
        self.tokens = self.answers = 0
        started = time.perf_counter()
        for _ in range(steps):
            self.engine.train_step(self._batches)
        seconds = time.perf_counter() - started
        train = self.engine.recipe.train
        positions = steps * train.global_batch_size * self.engine.recipe.model.seq_length
        self.rates.append((positions / seconds, self.tokens / seconds, self.answers / seconds))


def _counting(recipe: Recipe, dataset: Dataset[Any], contender: Contender) -> Iterator[Batch]:
    train = recipe.train
    for batch in batches(
        dataset, consumed_samples=0, micro_batch_size=recipe.layout.micro_batch_size,
        global_batch_size=train.global_batch_size, data_parallel_rank=0, data_parallel_size=1, num_workers=0,
        prefetch_factor=1, pin_memory=False,
    ):  # fmt: skip
        contender.answers += int(batch["loss_mask"].sum())
        # The padding is what follows the last answer, but for the end of a line there.
        contender.tokens += int((batch["loss_mask"].flip(1).cumsum(1) > 0).sum())
        yield batch


def attention(length: int, each: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a forward and backward pass of core attention: 4 heads of 48 channels, 2 sequences."""
    from llmrecipes.engine.core.model.attention import SdpaCoreAttention

    module = SdpaCoreAttention.__new__(SdpaCoreAttention)
    torch.nn.Module.__init__(module)
    module.scale, module.context_group = None, None
    query, key, value = (torch.randn(length, 2, 4, 48, requires_grad=True) for _ in range(3))
    positions = (torch.arange(length) % each).expand(2, -1)

    def passes(mask: torch.Tensor | None) -> None:
        if mask is None:
            out = module._attend(query, key, value, 0.0, is_causal=True)
        else:
            out = module._attend_to_own(query, key, value, 0.0, mask)
        out.sum().backward()

    ways: dict[str, torch.Tensor | None] = {
        "lengths": attention_mask(positions, dense=False),
        "mask": attention_mask(positions, dense=True),
        "one document": None,
    }
    return {name: 1e3 * _median(partial(passes, mask), repeats) for name, mask in ways.items()}


def packing(conversations: int = 10_000_000, room: int = 8192) -> dict[str, float]:
    """Seconds, and the share of the sequences that is filled."""
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, conversations).astype(np.int64).clip(1, room)
    started = time.perf_counter()
    packed = best_fit(lengths, room, 1)
    return {"seconds": time.perf_counter() - started, "filled": float(lengths.sum() / (len(packed) * room))}


def _median(work: Callable[[], None], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=10, help="of each turn")
    given = arguments.parse_args()
    started_on = machine()
    overrides = ["data.num_workers=0", f"train.train_iters={TURNS * given.steps + 10}", "scheduler.lr_decay_iters=1000"]
    found: dict[str, Contender] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = load("sft-tiny", overrides).recipe
        engines = backend(first)
        with engines.join(first, engines.platform()):
            for name in ("packed", "padded"):
                changes = [*overrides, f"data.chat.packing={str(name == 'packed').lower()}"]
                found[name] = Contender(load("sft-tiny", changes).recipe, Path(folder))
                found[name].engine.train_step(found[name]._batches)
            for _ in range(TURNS):
                for contender in found.values():
                    contender.turn(given.steps)
            alone = {f"{length} of {each}": attention(length, each, 5) for length, each in LENGTHS}
    rates = {
        name: [statistics.median(column) for column in zip(*contender.rates, strict=True)]
        for name, contender in found.items()
    }
    show(
        f"sft-tiny, median of {TURNS} turns of {given.steps} steps",
        ("sequences", "positions/s", "conversation tokens/s", "answer tokens/s"),
        [(name, *(f"{rate:,.0f}" for rate in row)) for name, row in rates.items()],
    )
    print(f"packed / padded: {rates['packed'][1] / rates['padded'][1]:.2f} times the tokens of conversations\n")
    show(
        "core attention forward and backward, ms",
        ("tokens of a sequence, of a conversation", *next(iter(alone.values()))),
        [(name, *(f"{ms:.1f}" for ms in row.values())) for name, row in alone.items()],
    )
    packed = packing()
    print(
        f"10,000,000 conversations packed in {packed['seconds']:.1f} s; sequences are {packed['filled']:.2%} filled\n"
    )
    close({"rates": rates, "attention_ms": alone, "packing": packed}, started_on, given.json)


if __name__ == "__main__":
    main()
