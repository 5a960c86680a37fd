"""Patching names of another package, after checking that they exist.

A patch of a name that a new version has moved would silently have no effect, so every target is looked up first.
"""

from __future__ import annotations

import importlib
from typing import Any


class MissingPatchTarget(RuntimeError):
    """A supported version of a library no longer has a name that is patched here."""


def replace(module: str, attribute: str, value: Any) -> None:
    """Set `module.attribute` to `value`.

    Args:
        module: dotted name of a module, or of a class inside one (`torch.Tensor`).
        attribute: name that must already exist there.

    Raises:
        MissingPatchTarget: the module or the attribute does not exist.
    """
    owner = resolve(module)
    if not hasattr(owner, attribute):
        raise MissingPatchTarget(f"{module} has no {attribute}: this version of the library is not supported")
    setattr(owner, attribute, value)


def resolve(dotted: str) -> Any:
    """The module or class with a dotted name."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        if not module:
            raise MissingPatchTarget(f"{dotted} is not installed") from None
        owner = resolve(module)
        if not hasattr(owner, name):
            raise MissingPatchTarget(f"{module} has no {name}: this version of the library is not supported") from None
        return getattr(owner, name)
