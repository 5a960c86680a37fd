"""Request and result of an evaluation. Imports neither torch nor the harness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict

from llmrecipes.evaluation import CHECKS, Check
from llmrecipes.options import Option

DATA = "valid"
"""Data of perplexity by default, and of the check `repetition`."""


class EvaluationRequest(BaseModel):
    """One evaluation; every field is an option of `eval` and of `Run.evaluate`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: Annotated[
        tuple[str, ...],
        Option("Run this lm-evaluation-harness task, group or task file; repeatable.", "task", "NAME"),
    ] = ()
    data: Annotated[
        tuple[str, ...],
        Option(
            "Measure perplexity on valid, test, train, stdlib, or TYPE:PATH (a type of data.sources); repeatable. "
            "Default without --task and --check: valid.",
            metavar="SOURCE",
        ),
    ] = ()
    """See `evaluation.texts.Texts.parse`."""
    checks: Annotated[
        tuple[Check, ...], Option(f"Check generated text for: {', '.join(CHECKS)}; repeatable.", "check", "NAME")
    ] = ()
    limit: Annotated[
        int | None, Option("Use at most N documents per task or source; default: all.", metavar="N", least=1)
    ] = None
    num_fewshot: Annotated[
        int | None, Option("Put N examples before every question; default: the task's.", metavar="N", least=0)
    ] = None
    include_path: Annotated[Path | None, Option("Also look for task files in this folder.", metavar="DIR")] = None
    trust_code: Annotated[
        bool, Option("Allow code referenced by task files, in a process without network and credentials.")
    ] = False
    text_key: Annotated[str, Option("Read the text of a jsonl or parquet source from this column.", metavar="NAME")] = (
        "text"
    )
    per_document: Annotated[
        Path | None,
        Option("Write the loss of every document of the split to this new folder, for data.curriculum.", metavar="DIR"),
    ] = None
    window: Annotated[
        int | None, Option("Measure perplexity in windows of N tokens; default: seq_length.", metavar="N", least=1)
    ] = None
    stride: Annotated[
        int | None, Option("Score N tokens of a window; default: half a window.", metavar="N", least=1)
    ] = None
    prefix: Annotated[int, Option("Use prompts of N tokens for --check.", metavar="N", least=1)] = 50
    length: Annotated[int, Option("Continue prompts of --check by N tokens.", metavar="N", least=1)] = 50
    samples: Annotated[int, Option("Write N continuations per --check.", metavar="N", least=1)] = 200
    temperature: Annotated[
        float, Option("Sample continuations of --check at this temperature.", metavar="T", least=0)
    ] = 1.0
    seed: Annotated[int, Option("Seed the samples of --check.", least=0)] = 1234
    batch_size: Annotated[int, Option("Score N sequences per forward pass of a replica.", metavar="N", least=1)] = 8


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
