"""Types of text in cluster profiles."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@=,-]*$")]
"""A name of a partition, resource or constraint: no blanks, no leading dash, nothing a shell or Slurm would split."""
Variable = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
