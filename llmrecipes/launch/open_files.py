"""The limit of open files: each connection to another rank or node is one, and the usual soft limit is 1,024."""

from __future__ import annotations

import resource
from math import isqrt

from llmrecipes.errors import UserError

OWN_OF_A_CHECK = 1024
"""Files of the process of a check besides its connections; in Python it may have opened many before."""
OWN = 4096
"""Files of a rank besides its connections: libraries, data, checkpoints, logs, NCCL's channels."""


def needed_files(rank: int, ranks: int) -> int:
    """Open files of a rank on GPUs.

    The first rank has the store that all of them connect to; the groups of saving and resuming take 2·√N connections
    each (`checkpoint.rank_groups`).
    """
    return OWN + 4 * (isqrt(ranks) + 1) + (ranks if rank == 0 else 0)


def allow_open_files(rank: int, ranks: int) -> None:
    """Raise the limit of this process to what it needs.

    Raises:
        UserError: it may not be raised so far.
    """
    needed = needed_files(rank, ranks)
    _allow(needed, f"rank {rank}", f"a run of {ranks} ranks needs {needed} open files on rank {rank}")


def allow_nodes(nodes: int) -> None:
    """Raise the limit of this process, the first node of a check, to what a connection from each node needs.

    Raises:
        UserError: it may not be raised so far.
    """
    needed = OWN_OF_A_CHECK + 2 * nodes
    _allow(
        needed, f"the first of {nodes} nodes", f"it needs {needed} open files for the connections of the other nodes"
    )


def _allow(needed: int, who: str, rule: str) -> None:
    if (allowed := _raise_to(needed)) < needed:
        raise UserError(
            f"{who} may open {allowed} files",
            where="ulimit -n",
            rule=rule,
            fix=f"ulimit -Hn {needed} or more: LimitNOFILE for slurmd, --ulimit nofile for a container",
        )


def _raise_to(needed: int) -> int:
    """Raise the soft limit if it is lower; what is allowed of `needed` then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
