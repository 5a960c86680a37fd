"""Tells the launcher that the ranks train; it waits for the first step with its spares."""

from __future__ import annotations

import os
from contextlib import suppress

from llmrecipes.launch.ranks import FIRST_STEP
from llmrecipes.train.observers.base import Observer, StepDone
from llmrecipes.train.spec import RunSpec


class FirstStep(Observer):
    """The launcher's pipe, of a rank that has one."""

    def __init__(self, spec: RunSpec) -> None:
        descriptor = os.environ.pop(FIRST_STEP, None)
        self._waiting = [] if descriptor is None else [int(descriptor)]

    def after_step(self, done: StepDone) -> None:
        """Write to it once."""
        while self._waiting:
            with suppress(OSError):
                os.write(self._waiting.pop(), b"1")
