"""The options of `llmrecipes bundle` and `rerun`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from llmrecipes.options import Option


@dataclass(frozen=True)
class BundleOptions:
    """Options of `llmrecipes bundle`."""

    checkpoint: Annotated[str, Option("Include this checkpoint: none, last, best or a step.", metavar="WHICH")] = "none"
    out: Annotated[
        Path | None, Option("Write to FILE; default: RECIPE-RUN_ID.bundle.tar in this directory.", metavar="FILE")
    ] = None
    sample: Annotated[bool, Option("Include a little of the held-out text.")] = True
    force: Annotated[bool, Option("Overwrite FILE.")] = False


@dataclass(frozen=True)
class RerunOptions:
    """Options of `llmrecipes rerun` besides those of `train`."""

    check: Annotated[bool, Option("Only say what differs on this machine.")] = False
    data: Annotated[
        Path | None, Option("Read the text of the recipe's only source with a path from PATH.", metavar="PATH")
    ] = None
    tolerance: Annotated[float, Option("Accept relative differences of losses up to T.", metavar="T", least=0)] = 0.0
