"""The two machines of this folder's tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fabric.guests import ROOT, Guest, boot, build, missing

PROFILE = """\
name: soft-roce
gpus_per_node: 0
cpu_cores: 1
memory_gib: 1
intra_node: {kind: memory, gb_per_s: 1}
inter_node: {kind: roce, gb_per_s: 12.5}
adapters: {ports: 1, gb_per_s: 12.5, names: [rxe0]}
environment: {NCCL_IB_GID_INDEX: 1, NCCL_IB_TC: 106}
"""
CACHE = "FABRIC_LAB"
"""Variable with a folder in which the build is kept."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.fabric)
            item.add_marker(pytest.mark.timeout(2400))


def _shares() -> list[Path]:
    """What Python needs, each folder once, and none within another."""
    wanted = {ROOT, Path(sys.prefix).absolute(), Path(sys.base_prefix).absolute()}
    return sorted(one for one in wanted if not any(one != other and one.is_relative_to(other) for other in wanted))


@pytest.fixture(scope="package")
def guests() -> Iterator[tuple[Guest, Guest]]:
    if packages := missing():
        pytest.skip(f"needs Debian packages: apt-get install --no-install-recommends {' '.join(packages)}")
    if os.geteuid() != 0:
        pytest.skip("needs root, for debootstrap")
    run = Path(tempfile.mkdtemp(prefix="fabric-", dir="/tmp"))
    built = Path(os.environ.get(CACHE) or run / "built")
    try:
        build(built)
        with boot(built, run, _shares()) as made:
            for guest in made:
                (guest.commands / "soft-roce.yaml").write_text(PROFILE, "utf-8")
            yield made
    except subprocess.CalledProcessError as error:
        pytest.fail(f"the machines could not be built: {error}")
    finally:
        shutil.rmtree(run, ignore_errors=True)
