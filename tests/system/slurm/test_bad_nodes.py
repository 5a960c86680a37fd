"""Nodes that are not well, found by the doctor before a training starts on them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrecipes.launch.ranks import port_of
from llmrecipes.recipe.schema import Recipe
from tests.helpers import ROOT
from tests.system.slurm.conftest import Site
from tests.system.slurm.daemons import PROGRAMS, Lab, cluster, missing
from tests.unit.test_doctor import report

LISTEN = (
    "import socket, sys, time; taken = socket.create_server(('', int(sys.argv[1])));"
    "print('ready', flush=True); time.sleep(600)"
)


def test_a_job_leaves_a_bad_node_out_and_runs_on_another(site: Site, recipe: Recipe) -> None:
    job, run_dir = site.submit(recipe, "sick", "train.train_iters=5", "--sbatch=--hold")
    with site.lab.inside("n2", sys.executable, "-c", LISTEN, str(port_of(job))) as taken:
        try:
            assert taken.stdout is not None
            assert taken.stdout.readline() == b"ready\n"
            site.lab.run("scontrol", "release", job)
            site.wait_for_restart(job, 1)
        finally:
            taken.kill()
    printed = site.log(run_dir, job)
    headings = [line for line in printed.splitlines() if line.endswith(":")]
    assert headings == ["n2:"]
    assert f"{port_of(job)} " in printed
    assert f"job {job}: bad nodes, left out for 24 hours: n2;" in printed
    assert "step 1/" not in printed
    fields = site.finish(job, run_dir)
    assert (fields["NodeList"], fields["ExcNodeList"], fields["Restarts"]) == ("n[1,3]", "n2", "1")
    assert [line.split()[1] for line in (run_dir / "logs/bad-nodes").read_text().splitlines()] == ["n2"]


def test_a_job_without_other_nodes_is_held(site: Site, recipe: Recipe) -> None:
    """Its user leaves out n3, and n2 is bad: n1 is not enough. Who waits for it is told."""
    words = ["train.train_iters=5", "--sbatch=--hold", "--sbatch=--exclude=n3"]
    with site.waiting(recipe, "stuck", *words) as waiting:
        job, run_dir = waiting.job, waiting.run_dir
        _hold_for_a_bad_node(site, job)
        code, answer, states = waiting.end()
    assert (code, answer["result"]["state"]) == (93, "held") and states[-1].startswith("held, restart 1")
    assert "held" in site.llmrecipes("runs")
    assert f"scontrol release {job}" in site.log(run_dir, job)
    site.lab.run("scontrol", "release", job)  # the node is repaired
    assert site.finish(job, run_dir)["NodeList"] == "n[1-2]"


def _hold_for_a_bad_node(site: Site, job: str) -> None:
    with site.lab.inside("n2", sys.executable, "-c", LISTEN, str(port_of(job))) as taken:
        try:
            assert taken.stdout is not None
            assert taken.stdout.readline() == b"ready\n"
            site.lab.run("scontrol", "release", job)
            site.lab.until(
                lambda: True if "held" in site.lab.job(job)["Reason"] else None, f"job {job} is not held", timeout=90
            )
        finally:
            taken.kill()


def test_the_prolog_drains_a_bad_node(new_site: Callable[[Lab], Site], recipe: Recipe, tmp_path: Path) -> None:
    if lacks := missing(PROGRAMS):
        pytest.skip(f"Slurm: {lacks}")
    smi = tmp_path / "sick" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\ncat <<'END'\n{report({'ecc': 7}, count=1)}\nEND\n", "utf-8")
    prolog = tmp_path / "prolog"
    prolog.write_text(
        f"#!/bin/bash\nexport PYTHONPATH={shlex.quote(str(ROOT))} LLMRECIPES_PYTHON={shlex.quote(sys.executable)}\n"
        "export LLMRECIPES_GPUS=all\n"
        f'[[ $(hostname) != n1 ]] || export PATH={shlex.quote(str(smi.parent))}:"$PATH"\n'
        f"exec {shlex.quote(str(ROOT / 'slurm/prolog.sh'))}\n",
        "utf-8",
    )
    smi.chmod(0o755)
    prolog.chmod(0o755)
    with cluster(3, 2, prolog=str(prolog)) as lab:
        site = new_site(lab)
        job, run_dir = site.submit(recipe, "drained", "train.train_iters=5")
        site.finish(job, run_dir)
        assert lab.job(job)["NodeList"] == "n[2-3]"
        assert "DRAIN" in lab.run("scontrol", "--oneliner", "show", "node", "n1").stdout
