"""Which optional packages are installed."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec


def find_spec(package: str) -> ModuleSpec | None:
    """As that of importlib, but a folder that only has the package's name is none.

    `python -m` looks in the current folder first, where Python takes any folder for a package without code: `ray` in
    /tmp is one of Ray's own.
    """
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else spec
