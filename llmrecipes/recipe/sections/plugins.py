"""What a key switches on: a sink of metrics or a step of data preparation, declared in the type of the key.

The section is the table: `Tracking` has the sinks. Steps are types of `data.steps`, classes in `recipe.data_steps`;
some are keys of `Data`, and come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from pydantic import BaseModel


@dataclass(frozen=True, kw_only=True)
class MetricSink:
    """A sink of metrics, in `Tracking`: the key, which is true or false, opens it. Its settings begin with its name."""

    target: str
    """`module:class` of its `tracking.events.Sink`, imported on demand."""
    rehearsal: bool
    """Whether rehearsals (`smoke`, `verify`) write it too."""
    keeps_steps: bool
    """Whether it has the values of single steps. A resumed run then has each step once: what an earlier attempt
    recorded after the checkpoint is dropped, or stands for the repeated step where it cannot be deleted."""
    extra: str | None = None
    """Extra of pyproject.toml that has its package; None: the project's dependencies are enough."""
    package: str | None = None
    """What it imports from the extra."""


@dataclass(frozen=True, kw_only=True)
class DataStep:
    """A step of data preparation: of a type of `data.steps` (`recipe.data_steps`), or declared by a key of `Data` and
    made from its value. The default of such a key disables it.

    Dropped documents are counted by the type or key. A prepared folder depends on the key only where there is a step,
    so that folders from before there was this key are still used.
    """

    target: str
    """`module:name` of what makes a `data.steps.steps.Step` or, with `compares`, a `Comparison` there: called with the
    keys of a type, or with the value of a key of `Data`. Imported on demand."""
    compares: bool = False
    """Whether it compares documents with earlier ones."""
    augments: bool = False
    """Whether it changes training documents only, behind all other steps: what is compared, and which split a document
    is in, are those of the text before."""
    weighs: bool = False
    """Whether it only decides how often sources are drawn from, so that tokens do not depend on it."""
    takes_markup: bool = False
    """Whether it may come before `html`, on web pages; steps that judge text may not."""
    revision: int = 1
    """Raised when it makes something else of the same documents: what was prepared before is then prepared again."""
    extra: str | None = None
    """Extra of pyproject.toml that has its package; None: the project's dependencies are enough."""
    package: str | None = None
    """What it imports from the extra."""


Declared = TypeVar("Declared")


def declared(section: type[BaseModel], kind: type[Declared]) -> dict[str, Declared]:
    """The keys of a section that declare something of that kind, in the order of the schema."""
    return {
        name: metadata
        for name, field in section.model_fields.items()
        for metadata in field.metadata
        if isinstance(metadata, kind)
    }


def settings(section: type[BaseModel], sink: str) -> tuple[str, ...]:
    """The keys that only one sink reads."""
    return tuple(name for name in section.model_fields if name.startswith(f"{sink}_"))


def resolve(target: str) -> Any:
    """What `module:name` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
