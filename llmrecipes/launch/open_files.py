"""The limit of open files of a rank: each connection to another rank is one, and the usual soft limit is 1,024."""

from __future__ import annotations

import resource
from math import isqrt

from llmrecipes.errors import UserError

OWN = 4096
"""Files of a rank besides its connections: libraries, data, checkpoints, logs, NCCL's channels."""


def needed_files(rank: int, ranks: int) -> int:
    """Open files of a rank on GPUs.

    The first rank has the store that all of them connect to; the groups of saving and resuming take 2·√N connections
    each (`checkpoint.ranks`).
    """
    return OWN + 4 * (isqrt(ranks) + 1) + (ranks if rank == 0 else 0)


def allow_open_files(rank: int, ranks: int) -> None:
    """Raise the limit of this process to what it needs.

    Raises:
        UserError: it may not be raised so far.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = needed_files(rank, ranks)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        raise UserError(
            f"rank {rank} may open {hard} files",
            where="ulimit -n",
            rule=f"a run of {ranks} ranks needs {needed} open files on rank {rank}",
            fix=f"ulimit -Hn {needed} or more: LimitNOFILE for slurmd, --ulimit nofile for a container",
        )
