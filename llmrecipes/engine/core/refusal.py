"""What a library says about keys that a recipe passes on to it unread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from pydantic import ValidationError

from llmrecipes.errors import UserError
from llmrecipes.recipe.document import clip

Errors = tuple[type[Exception], ...]
ERRORS: Errors = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def accepted(library: str, key: str, extra: Mapping[str, object], rule: str, errors: Errors = ERRORS) -> Iterator[None]:
    """A block in which a library reads its configuration; what it raises is about `extra`, if there is any.

    Args:
        library: its name.
        key: of the recipe, dotted.
        extra: value of that key.
        rule: what the value must be.
        errors: that the library raises.

    Raises:
        UserError: the library refuses the configuration. Without `extra` its error is a bug, and passes.
    """
    try:
        yield
    except errors as error:
        if not extra or isinstance(error, torch.OutOfMemoryError | torch.distributed.DistError):
            raise
        raise UserError(
            f"{library} refuses this configuration: {_reason(error)}",
            where=key,
            rule=rule,
            fix=f"correct or remove {', '.join(extra)}",
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
    return f"{type(error).__name__}: {clip(' '.join(str(error).split()))}"
