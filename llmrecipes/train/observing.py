"""The observers of a training. A new one is a module in `observers/` and a line here."""

from __future__ import annotations

from llmrecipes.train.observers.base import Observer, Observers
from llmrecipes.train.observers.copies import Copies
from llmrecipes.train.observers.debug import AnomalyMode
from llmrecipes.train.observers.exports import Exports
from llmrecipes.train.observers.first_step import FirstStep
from llmrecipes.train.observers.folder import RunFolder
from llmrecipes.train.observers.garbage import GarbageCollection
from llmrecipes.train.observers.hangs import Hangs
from llmrecipes.train.observers.loss_alarms import LossAlarms
from llmrecipes.train.observers.measured import Measured
from llmrecipes.train.observers.step_profile import Profiler
from llmrecipes.train.observers.task_scores import TaskEvaluations
from llmrecipes.train.observers.telemetry import Telemetry
from llmrecipes.train.spec import RunSpec

OBSERVERS: tuple[type[Observer], ...] = (
    Profiler,
    AnomalyMode,
    Hangs,
    Measured,
    Telemetry,
    RunFolder,
    LossAlarms,
    FirstStep,
    Exports,
    Copies,
    TaskEvaluations,
    GarbageCollection,  # the last to begin: it excludes the objects of the others
)
"""In the order in which their hooks run."""


def observers(spec: RunSpec) -> Observers:
    """Those of a start."""
    return Observers(each(spec) for each in OBSERVERS if each.wanted(spec))
