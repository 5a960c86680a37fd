"""Names of recipes that are derived from another one."""

from __future__ import annotations

MAX_NAME = 63
"""Characters that the schema allows: a label in Kubernetes."""


def suffixed(name: str, suffix: str, spare: int = 0) -> str:
    """A recipe's name with a suffix, shortened if it would be too long.

    Args:
        name: of the recipe.
        suffix: what is appended.
        spare: characters to leave free for more.
    """
    return name[: MAX_NAME - len(suffix) - spare] + suffix
