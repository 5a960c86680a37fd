"""The files on a node's disk that a rank with offload to NVMe keeps its state in."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.recipe.zero import Zero


@contextmanager
def swap_files(zero: Zero, rank: int) -> Iterator[None]:
    """A block in which this process alone has the files of its rank; they are removed at its end.

    DeepSpeed names them by the rank alone, so a second run with the same `nvme_path` on a node would overwrite the
    optimizer state of the first. What a killed run has left, the next one overwrites.

    Raises:
        UserError: another process has them.
    """
    if zero.nvme_path is None:
        yield
        return
    folder = Path(zero.nvme_path) / "zero_stage_3"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank{rank}.flock").open("w") as mutex:
        try:
            fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run on this node uses {folder}",
                where="zero.nvme_path",
                rule="runs on the same node at the same time have different folders",
                fix=f"zero.nvme_path={zero.nvme_path}/NAME, or wait until the other run has ended",
            ) from None
        try:
            yield
        finally:
            shutil.rmtree(folder / "optimizer" / f"rank{rank}", ignore_errors=True)
