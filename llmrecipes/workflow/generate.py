"""`llmrecipes generate`: text from a run's newest checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmrecipes.engine.requirements import require_packages
from llmrecipes.engine.sampling import Sampling
from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.check import gib
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.rundir import Run
from llmrecipes.workflow.pretrained import base_weights
from llmrecipes.workflow.run import on_one_rank


@dataclass(frozen=True)
class GenerationRequest:
    """Prompt and sampling options."""

    prompt: str
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    num_samples: int = 1
    """Each with the next seed."""
    averaged: bool = False
    """By the moving average of the weights."""
    chat: bool = False
    """The prompt is a message, which the run's chat template turns into text."""


@dataclass(frozen=True)
class Sample:
    """A prompt and its continuation."""

    step: int
    prompt: str
    text: str
    tokens: int


def samples(run_dir: Path, data_dir: Path, request: GenerationRequest) -> Iterator[Sample]:
    """Continuations of a prompt by the newest valid checkpoint of a run.

    Raises:
        UserError: no valid checkpoint, no tokenizer, a prompt that cannot be continued, or a message for a run
            without a chat template.
    """
    from llmrecipes.data.folder.prepared import open_prepared
    from llmrecipes.data.tokens.templates import question
    from llmrecipes.engine.backends import backend

    entry = Run(run_dir).require_checkpoint(data_dir)
    recipe = Run(run_dir).recipe_of(entry.step)
    plan = derive(on_one_rank(recipe), 1, detect())
    require_packages(plan.recipe)
    _require_memory(plan)
    prepared = open_prepared(recipe, data_dir)
    tokenizer = prepared.tokenizer()
    prompt = tokenizer.prompt(request.prompt)
    end = tokenizer.eod
    if request.chat:
        prompt_of_chat = question(prepared, request.prompt)
        prompt, end = prompt_of_chat.ids, prompt_of_chat.end
    engines = backend(plan.recipe)
    platform = engines.platform()
    with engines.join(plan.recipe, platform):
        with base_weights(run_dir, recipe) as base:
            model = engines.load_weights(plan, platform, entry, base, averaged=request.averaged)
        for number in range(request.num_samples):
            sampling = replace(request.sampling, seed=request.sampling.seed + number)
            ids = model.generate(
                prompt,
                max_new_tokens=request.max_new_tokens,
                sampling=sampling,
                vocab_size=tokenizer.vocab_size,
                eod=end,
            )
            new = list(ids)
            yield Sample(entry.step, request.prompt, tokenizer.decode(new), len(new))


def _require_memory(plan: Plan) -> None:
    if plan.memory.weights > plan.memory_capacity_bytes:
        raise UserError(
            f"weights need {gib(plan.memory.weights)}, {gib(plan.memory_capacity_bytes)} available",
            where=f"recipe {plan.recipe.name}",
            rule="one process holds the whole model",
            fix="generate on a machine with more memory",
        )
