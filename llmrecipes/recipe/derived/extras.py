"""Optional packages that a recipe needs, and the extras of pyproject.toml that have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from llmrecipes.recipe.engines import ENGINES, engine_name
from llmrecipes.recipe.schema import Data, Recipe
from llmrecipes.recipe.sections.data_steps import DecontaminateStep
from llmrecipes.recipe.sections.plugins import MetricSink, declared
from llmrecipes.stores import PACKAGES

HARNESS = "lm_eval"


@dataclass(frozen=True)
class Need:
    """`key` of a recipe needs `package`, as it is imported, which is only in `extra`; None: in no extra."""

    key: str
    package: str
    extra: str | None

    def __str__(self) -> str:
        return f"{self.package} ({f'extra {self.extra}' if self.extra else 'in no extra'}, for {self.key})"


def of_recipe(recipe: Recipe, *, prepares: bool) -> Iterator[Need]:
    """What a run imports from extras.

    Args:
        recipe: the resolved recipe.
        prepares: the data is prepared too.
    """
    engine = ENGINES[engine_name(recipe)]
    yield from (Need("engine", package, engine.extra) for package in engine.packages if engine.extra is not None)
    yield from of_tracking(recipe)
    if recipe.train.eval_tasks is not None:
        yield Need("train.eval_tasks", HARNESS, "eval")
    yield from of_url("checkpoint.copy_to", recipe.checkpoint.copy_to or "")
    if prepares:
        yield from of_data(recipe.data)


def of_tracking(recipe: Recipe) -> Iterator[Need]:
    """What the sinks and the measurements of `tracking` need."""
    tracking = recipe.tracking
    for name, sink in declared(type(tracking), MetricSink).items():
        if sink.package is not None and sink.extra is not None and getattr(tracking, name):
            yield Need(f"tracking.{name}", sink.package, sink.extra)
    if tracking.energy_model is not None:
        yield Need("tracking.energy_model", tracking.energy_model, "energy")


def of_data(data: Data) -> Iterator[Need]:
    """What preparing the data needs."""
    for number, step in enumerate(data.steps):
        if step.does.package is not None and step.does.extra is not None:
            yield Need(f"data.steps.{number}.type", step.does.package, step.does.extra)
        if isinstance(step, DecontaminateStep) and step.tasks:
            yield Need(f"data.steps.{number}.tasks", HARNESS, "eval")
    for number, source in enumerate(data.sources):
        yield from of_url(f"data.sources.{number}.path", source.location)


def of_url(key: str, url: str) -> Iterator[Need]:
    """What opening a file or a folder needs."""
    if (scheme := urlsplit(url).scheme) in PACKAGES:
        yield Need(key, *PACKAGES[scheme])
