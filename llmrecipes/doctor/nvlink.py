"""NVLinks that are down, according to `nvidia-smi nvlink --status`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from llmrecipes.doctor.finding import Finding, fail, ok, skip, warn
from llmrecipes.hardware import nvidia
from llmrecipes.hardware.profile import Profile

_GPU = re.compile(r"GPU (\d+):")
_LINK = re.compile(r"\s+Link (\d+): (?:(<inactive>)|[\d.]+ GB/s)")


def query(timeout: float = 20) -> str | None:
    """nvidia-smi's report; None without nvidia-smi.

    Raises:
        OSError: it could not be started.
        subprocess.SubprocessError: it failed or timed out.
    """
    return nvidia.report("nvlink", "--status", timeout=timeout)


def parse(report: str) -> list[tuple[int, int]]:
    """(links that are up, links) of each GPU."""
    found: dict[int, list[bool]] = {}
    gpu = -1
    for line in report.splitlines():
        if head := _GPU.match(line):
            gpu = int(head[1])
            found[gpu] = []
        elif (link := _LINK.match(line)) and gpu >= 0:
            found[gpu].append(link[2] is None)
    return [(sum(found[number]), len(found[number])) for number in sorted(found)]


def check(
    links: Sequence[tuple[int, int]], profile: Profile | None, own: Collection[int] | None = None
) -> Iterator[Finding]:
    """Check the links.

    Args:
        links: see `parse`.
        profile: of a site with NVLink; on others links are only compared with each other: bridges may join some GPUs.
        own: numbers of the job's GPUs; None: all.
    """
    wanted = profile is not None and profile.intra_node.kind == "nvlink"
    most = max((up for up, _ in links), default=0)
    fix = "reset the GPUs, restart nvidia-fabricmanager; a link that stays down: replace GPU or bridge"
    for number, (up, there) in enumerate(links):
        if own is not None and number not in own:
            continue
        if up < most:
            what = f"{up} of {there} NVLinks are up, but {most} of another GPU"
            yield (fail if wanted else warn)(f"gpu {number}", what, fix)
        elif wanted and up < there:
            yield warn(f"gpu {number}", f"{up} of {there} NVLinks are up", fix)
    if wanted and links and not most:
        yield fail("NVLink", f"no GPU has a link that is up, but {profile.name if profile else ''} has NVLink", fix)
    elif most and all(up == most == there for up, there in links):
        yield ok("NVLink", f"{most} links of each GPU are up")
    elif not links:
        yield skip("NVLink", "nvidia-smi lists no links")
