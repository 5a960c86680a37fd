"""The files that the program comes with: recipes and cluster profiles, and those for Slurm and Kubernetes.

The folders beside this file are links to those of the checkout. A wheel has copies in their place, because a wheel has
no links (pyproject.toml, package-data).
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from llmrecipes.errors import UserError


def folder(name: str) -> Path:
    """A folder: `recipes`, `slurm` or `k8s`. In a checkout its own path, which is what messages show."""
    path = Path(str(resources.files(__name__))) / name
    return Path(os.path.normpath(path.parent / path.readlink())) if path.is_symlink() else path


def recipes_dir() -> Path:
    """Folder of the named recipes: `LLMRECIPES_RECIPES`, else `recipes/` of the checkout or package."""
    configured = os.environ.get("LLMRECIPES_RECIPES")
    return Path(configured) if configured else folder("recipes")


def checkout() -> Path | None:
    """The checkout that the program runs from; None for an installed one."""
    root = Path(__file__).parents[2]
    return root if (Path(__file__).parent / "recipes").is_symlink() and (root / "pyproject.toml").is_file() else None


def require_checkout(command: str) -> Path:
    """The checkout that the program runs from.

    Raises:
        UserError: it is installed.
    """
    root = checkout()
    if root is None:
        raise UserError(
            "this installation is not a checkout of the repository",
            where=command,
            rule="the command writes files of the repository",
            fix="run it in a git clone",
        )
    return root
