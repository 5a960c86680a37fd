"""Small recipes and corpora for the tests of llmrecipes.data."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from llmrecipes.data.steps.steps import Step as MadeStep
from llmrecipes.recipe.schema import Data, Model, Optimizer, Recipe, Train
from llmrecipes.recipe.sections.data_steps import Step, StepSection
from llmrecipes.recipe.sections.layout_section import LayoutKeys
from llmrecipes.recipe.sections.plugins import DataStep
from llmrecipes.recipe.sections.source import AnySource, make_source
from llmrecipes.recipe.sections.tokenizer_section import AnyTokenizer, BpeTokenizer


def recipe(
    *sources: AnySource,
    split: tuple[float, float, float] = (90.0, 5.0, 5.0),
    tokenizer: AnyTokenizer | None = None,
    seq_length: int = 64,
    vocab_size: int = 512,
    seed: int = 1234,
    train_iters: int = 10,
) -> Recipe:
    """A recipe that only differs from others in its data."""
    return Recipe(
        name="t",
        model=Model(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=seq_length, vocab_size=vocab_size),
        train=Train(train_iters=train_iters, global_batch_size=8, eval_interval=5, eval_iters=2, seed=seed),
        optimizer=Optimizer(lr=1e-3),
        layout=LayoutKeys(micro_batch_size=2),
        data=Data(sources=sources, split=split, tokenizer=tokenizer or BpeTokenizer()),
    )


STEPS = {get_args(step.model_fields["type"].annotation)[0]: step for step in StepSection.__subclasses__()}
"""The class of each type of `data.steps`."""


def made_step(values: Mapping[str, Any]) -> Step:
    """A step of `data.steps`."""
    return Data.model_validate({"steps": [values]}).steps[0]


def without(word: str) -> MadeStep:
    """A step of data preparation: drops documents that are only this word, and takes it out of the others."""
    return lambda texts: None if texts == [word] else [text.replace(word, "") for text in texts]


WITHOUT = DataStep(target="tests.unit.data_recipes:without")


def corpus(folder: Path, documents: int = 200, seed: int = 0, word: str = "word") -> AnySource:
    """Write a folder of different small texts whose every line holds `word`."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    for n in range(documents):
        lines = [f"{word} {rng.randrange(10**6)} döcument {n}.{line}" for line in range(rng.randrange(4, 12))]
        (folder / f"{n:04d}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return make_source(type="text", path=str(folder))


def fused(folder: str) -> MadeStep:
    """A step that kills its worker, as `kill -9` does, at each document that begins with the name of a file in the
    folder: once, because the file is deleted."""

    def step(texts: list[str]) -> list[str]:
        words = texts[0].split()
        if multiprocessing.parent_process() is not None and len(words) > 1:
            try:
                (Path(folder) / words[1]).unlink()
            except FileNotFoundError:
                return texts
            os.kill(os.getpid(), signal.SIGKILL)
        return texts

    return step


FUSED = DataStep(target="tests.unit.data_recipes:fused")
