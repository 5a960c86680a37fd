"""Printing of reports: lines of text and tables. On a terminal rich lays tables out, else they are plain lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrecipes.redact import redact

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


@dataclass(frozen=True)
class TextTable:
    """A table.

    Attributes:
        rows: all with the same number of cells; the first is the head.
        right: indices of right-aligned columns.
    """

    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()

    def __str__(self) -> str:
        """Aligned lines of any width, without trailing spaces: the same for the same rows."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column in self.right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in self.rows
        )

    def __rich__(self) -> Table:
        """The same with a bold head and cells that wrap at the width of the terminal."""
        from rich.table import Table
        from rich.text import Text

        head, *body = [[Text(redact(cell)) for cell in row] for row in self.rows]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column, cell in enumerate(head):
            table.add_column(cell, justify="right" if column in self.right else "left", overflow="fold")
        for row in body:
            table.add_row(*row)
        return table


def show(*parts: str | Text | TextTable) -> None:
    """Print lines and tables."""
    if not sys.stdout.isatty():  # without importing rich
        for part in parts:
            print(part)
        return
    from llmrecipes.console import console

    for part in parts:
        # Lines are wrapped by the terminal, and are copied from it without line breaks.
        console().print(part, markup=False, soft_wrap=not isinstance(part, TextTable))
