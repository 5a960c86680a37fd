"""Observers of a training without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from llmrecipes.engine.base import Progress
from llmrecipes.faults.signals import StopRequest
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.events import NoTracker
from llmrecipes.train.observers.base import Observer, Observers
from llmrecipes.train.spec import RunSpec

Kind = TypeVar("Kind", bound=Observer)
FIRST = SimpleNamespace(size=1, rank=0, is_first=True, data_parallel_size=1)


@contextmanager
def observer(
    kind: type[Kind], recipe: Recipe, run: Path, spec: dict[str, Any] | None = None, **loop: Any
) -> Iterator[Kind]:
    """One that has not begun.

    Args:
        run: the run's directory.
        spec: more of the spec.
        loop: what the loop has besides a plan with the recipe alone, one rank, and no steps.
    """
    made = kind(RunSpec(recipe=recipe, data_dir=run, run_dir=run, runs_dir=run, **(spec or {})))
    fields = {
        "plan": SimpleNamespace(recipe=recipe), "world": FIRST, "tracker": NoTracker(), "progress": Progress(),
        "stop": StopRequest(), "losses": [], "observers": Observers((made,)), **loop,
    }  # fmt: skip
    joined: Any = SimpleNamespace(
        spec=RunSpec(recipe=recipe, data_dir=run, run_dir=run, runs_dir=run, **(spec or {})),
        prepared=SimpleNamespace(tokenizer=lambda: None),
    )
    made.joined, made.loop = joined, SimpleNamespace(**fields)  # type: ignore[assignment]
    with ExitStack() as made.stack:
        yield made
