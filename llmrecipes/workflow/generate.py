"""`llmrecipes generate`: text from a run's newest checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmrecipes.commandline import resume_command
from llmrecipes.engine.sampling import Sampling
from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Parallelism
from llmrecipes.workflow.recorded import run_recipe


@dataclass(frozen=True)
class Request:
    """Prompt and sampling options."""

    prompt: str
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    num_samples: int = 1
    """Each with the next seed."""


@dataclass(frozen=True)
class Sample:
    """A prompt and its continuation."""

    step: int
    prompt: str
    text: str
    tokens: int


def samples(run_dir: Path, data_dir: Path, request: Request) -> Iterator[Sample]:
    """Continuations of a prompt by the newest valid checkpoint of a run.

    Raises:
        UserError: no valid checkpoint, no tokenizer, or a prompt that cannot be continued.
    """
    from llmrecipes.checkpoint.store import CheckpointStore
    from llmrecipes.data.prepared import open_prepared
    from llmrecipes.engine.registry import backend

    recipe = run_recipe(run_dir)
    entry = CheckpointStore(run_dir / "checkpoints").latest_valid()
    if entry is None:
        raise UserError(
            "no valid checkpoint",
            where=str(run_dir / "checkpoints"),
            fix=f"train it first: {resume_command(run_dir, data_dir=data_dir)}",
        )
    tokenizer = open_prepared(recipe, data_dir).tokenizer()
    prompt = tokenizer.encode(request.prompt)
    engines = backend(recipe)
    platform = engines.platform()
    # One process holds the full model, whatever layout trained it.
    recipe = recipe.model_copy(update={"parallelism": Parallelism()})
    with engines.join(recipe, platform):
        model = engines.load_weights(derive(recipe, 1, detect()), platform, entry)
        for number in range(request.num_samples):
            sampling = replace(request.sampling, seed=request.sampling.seed + number)
            ids = model.generate(
                prompt,
                max_new_tokens=request.max_new_tokens,
                sampling=sampling,
                vocab_size=tokenizer.vocab_size,
                eod=tokenizer.eod,
            )
            new = list(ids)
            yield Sample(entry.step, request.prompt, tokenizer.decode(new), len(new))
