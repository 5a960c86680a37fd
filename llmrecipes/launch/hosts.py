"""The hosts of a job whose command was started once on each of them, and which of them this one is."""

from __future__ import annotations

import os
import re
import socket
import subprocess

from llmrecipes.errors import UserError

RANGE = re.compile(r"([^][]*)\[(\d{1,9})-(\d{1,9})\]([^][]*)")
MOST_NODES = 100_000


def job_hosts(nodes: str | None) -> tuple[str, ...]:
    """Hosts of the job, in the same order on each.

    Args:
        nodes: value of --nodes; None: those of the Slurm step, else this host alone.

    Raises:
        UserError: the list is invalid, or Slurm cannot be asked.
    """
    if nodes is not None:
        hosts = tuple(host for word in nodes.split(",") if word for host in _expanded(word))
        if len(set(hosts)) != len(hosts) or not hosts:
            rule = "host names or ranges n[0-3] with commas between them, each once"
            raise UserError(f"{nodes!r}", where="--nodes", rule=rule)
        return hosts
    if int(os.environ.get("SLURM_NNODES", "1")) == 1 or "SLURM_PROCID" not in os.environ:
        return (socket.gethostname(),)
    listing = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    try:
        return tuple(subprocess.run(listing, capture_output=True, text=True, check=True, timeout=60).stdout.split())
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"which hosts are {os.environ['SLURM_JOB_NODELIST']}? scontrol cannot be asked: {error}",
            where="--nodes",
            rule="a check of several nodes needs their names; a container usually has no scontrol",
            fix="outside of the container: --nodes $(scontrol show hostnames $SLURM_JOB_NODELIST | paste -sd,)",
        ) from error


def own_number(hosts: tuple[str, ...]) -> int:
    """Index of this host among those of the job.

    Raises:
        UserError: it is not among them.
    """
    for variable in ("SLURM_NODEID", "JOB_COMPLETION_INDEX"):  # the latter in pods, which may share the node's network
        if (index := os.environ.get(variable, "")).isdecimal() and int(index) < len(hosts):
            return int(index)
    own = socket.gethostname()
    names = {own, own.partition(".")[0]}
    if found := [number for number, host in enumerate(hosts) if host in names or host.partition(".")[0] in names]:
        return found[0]
    raise UserError(
        f"{own} is not among {', '.join(hosts)}", where="--nodes", rule="the command runs on each of the nodes"
    )


def _expanded(word: str) -> list[str]:
    """The hosts of `node[08-11].site`; another word is a host itself."""
    found = RANGE.fullmatch(word)
    if found is None:
        return [word]
    before, first, last, after = found.groups()
    if int(last) - int(first) >= MOST_NODES:
        raise UserError(f"{word!r}", where="--nodes", rule=f"at most {MOST_NODES:,} nodes")
    return [f"{before}{number:0{len(first)}}{after}" for number in range(int(first), int(last) + 1)]
