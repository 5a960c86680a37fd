"""Request and result of an evaluation. Imports neither torch nor the harness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from llmrecipes.evaluation import Check

DATA = "valid"
"""Data of perplexity by default, and of the check `repetition`."""
Positive = Annotated[int, Field(gt=0)]


class EvaluationRequest(BaseModel):
    """One evaluation.

    Attributes:
        tasks: tasks of the harness, or paths of task files.
        trust_code: run the code that task files name, in a process without network and variables.
        include_path: folder with more task files.
        data: for perplexity; see `evaluation.texts.Texts.parse`.
        text_key: column of the text in a JSON or Parquet source.
        per_document: new folder for the losses of the documents of `data`, which is one split.
        checks: checks of what the model writes.
        limit: documents of each task and source.
        num_fewshot: examples in a task's context; None: as the task says.
        batch_size: rows of one data-parallel rank in a forward pass.
        window: tokens that perplexity reads at once; None: the recipe's sequence length.
        stride: stride of perplexity's windows; None: half a window.
        prefix: tokens of a prompt of a check.
        length: tokens of a continuation in a check.
        samples: continuations in a check.
        temperature: temperature of sampled continuations.
        seed: seed of draws.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: tuple[str, ...] = ()
    trust_code: bool = False
    include_path: Path | None = None
    data: tuple[str, ...] = ()
    text_key: str = "text"
    per_document: Path | None = None
    checks: tuple[Check, ...] = ()
    limit: Positive | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    batch_size: Positive = 8
    window: Positive | None = None
    stride: Positive | None = None
    prefix: Positive = 50
    length: Positive = 50
    samples: Positive = 200
    temperature: Annotated[float, Field(ge=0)] = 1.0
    seed: Annotated[int, Field(ge=0)] = 1234


@dataclass(frozen=True)
class EvaluationResult:
    """One task.

    Attributes:
        task: its name.
        metrics: numbers by name, of which the tracker gets those that are finite as `eval/<task>/<metric>`.
        settings: what the numbers depend on, besides model and task.
        examples: what the numbers were computed from, for people.
    """

    task: str
    metrics: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)
    examples: Sequence[dict[str, Any]] = ()
