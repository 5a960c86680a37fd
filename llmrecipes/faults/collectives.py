"""The last collective of each process group of this rank, from torch's flight recorder; a subject of hang reports.

Both NCCL and gloo record what a rank has called. The recorder is read in the rank, by a thread that waits for its
watchdog: a rank whose Python lock is held does not answer.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

ENTRIES = "TORCH_FR_BUFFER_SIZE"
MOST_NAMED, MOST_LINES = 8, 8


def record_collectives() -> None:
    """Have torch record them: before the first process group, unless the environment says how many."""
    os.environ.setdefault(ENTRIES, "2000")


def last_collectives() -> str:
    """By group, as JSON: its last collective's number, whether it has ended, and what it is; empty: none is recorded.

    The recorder is a private part of torch (tried with 2.13 and gloo), so that a hang is reported without it where it
    has changed.
    """
    from torch._C import _distributed_c10d as c10d

    by_group: dict[str, dict[str, Any]] = {}
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # the first in builds with NCCL only
        with suppress(AttributeError, RuntimeError, ValueError, KeyError, TypeError):
            for entry in json.loads(getattr(c10d, name)(True, False)).get("entries", ()):
                if not entry["is_p2p"]:
                    number = int(entry["collective_seq_id"])
                    group, about = entry["process_group"]
                    label = f"{group} ({about})" if about not in ("", "undefined") else str(group)
                    if number >= by_group.get(label, {"number": 0})["number"]:
                        what = f"{entry['profiling_name']} of {entry['input_sizes']}"
                        by_group[label] = {"number": number, "ended": bool(entry["retired"]), "what": what[:120]}
    return json.dumps(by_group)


def waits(by_rank: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Lines about collectives that some ranks wait in; those that others have not called come first.

    Args:
        by_rank: what `last_collectives` says of each rank.
    """
    groups: dict[str, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for rank, of_groups in by_rank.items():
        for group, last in of_groups.items():
            groups[group][rank] = last
    lines: list[tuple[bool, str]] = []
    for group, lasts in groups.items():
        newest = max(last["number"] for last in lasts.values())
        waiting = [rank for rank, last in lasts.items() if last["number"] == newest and not last["ended"]]
        absent = [rank for rank, last in lasts.items() if last["number"] < newest]
        if waiting:
            others = f"; not called by {_named(absent)}" if absent else "; all of these ranks have called it"
            what = lasts[waiting[0]]["what"]
            lines.append(
                (not absent, f"    collective {newest} of group {group}, {what}: {_named(waiting)} wait in it{others}")
            )
    for _, line in sorted(lines)[:MOST_LINES]:
        yield line


def _named(ranks: list[int]) -> str:
    shown = sorted(ranks)[:MOST_NAMED]
    more = len(ranks) - len(shown)
    return ", ".join(map(str, shown)) + (f" and {more} more" if more else "")
