"""`llmrecipes doctor`: parsing and printing only."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import (
    DATA,
    NO_OVERRIDES,
    RUNS,
    DataOption,
    HostsOption,
    JsonOption,
    OverridesArgument,
    PatienceOption,
    RunsOption,
    site_option,
)
from llmrecipes.doctor.check_result import Finding, bad_nodes
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.launch.ranks import FIRST_PORT, port_of
from llmrecipes.launch.rendezvous import job_hosts, own_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmrecipes.doctor.examine import DoctorContext
    from llmrecipes.doctor.nodes import GatheredFindings
    from llmrecipes.recipe.schema import Recipe

CRASHED = 70  # EX_SOFTWARE
"""Exit code of a doctor that has an error itself: 1 would drain every node whose prolog runs it."""
MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL", "skip": "-   "}


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="Also check data and checkpoint storage for this recipe.",
            autocompletion=completion.recipes,
        ),
    ] = None,
    overrides: OverridesArgument = NO_OVERRIDES,
    cluster: Annotated[str | None, site_option("Check against this cluster profile.")] = None,
    nodes: HostsOption = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id",
            metavar="ID",
            help="Store the result with this run of RECIPE; skip the checks if the run is complete.",
        ),
    ] = None,
    patience: PatienceOption = 60.0,
    bad_nodes_file: Annotated[
        Path | None,
        typer.Option(
            "--bad-nodes", metavar="FILE", help="Write the names of failing nodes to this file, comma-separated."
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FILE",
            help="Append the findings to FILE as JSON; default with --run-id: logs/doctor.jsonl of the run.",
        ),
    ] = None,
    own_gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="N,...",
            help="Check only these GPUs, such as those of a job on a shared node; empty: none. Default: all.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only problems.")] = False,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Check a node, or all nodes of a job, and suggest fixes."""
    from llmrecipes.doctor.examine import DoctorContext
    from llmrecipes.hardware.load import load_profile
    from llmrecipes.recipe.load import load
    from llmrecipes.runfiles import RunFiles

    profile = load_profile(cluster) if cluster else None
    loaded = load(recipe, overrides).recipe if recipe else None
    if run_id is not None and _is_done(loaded, runs_dir, run_id):
        return int(ExitCode.DONE)
    hosts = job_hosts(nodes)
    own = _own(own_gpus)
    job = os.environ.get("SLURM_JOB_ID")
    port = port_of(job) if job else FIRST_PORT
    number = own_number(hosts) if len(hosts) > 1 else 0
    # Pods of a Job only check their own node; Kubernetes numbers them.
    leads = number == 0 and os.environ.get("JOB_COMPLETION_INDEX", "0") == "0"
    try:
        context = DoctorContext(profile, loaded, runs_dir, data_dir, port, len(hosts) > 1, leads, own)
        gathered = _gathered(context, hosts, number, patience)
    except UserError:
        raise
    except Exception:
        traceback.print_exc()
        return CRASHED
    if gathered.findings is not None:
        if record is None and run_id is not None and loaded is not None:
            record = RunFiles.of(runs_dir, loaded.name, run_id).doctor
        _keep(gathered.findings, gathered.bad, bad_nodes_file, record if leads else None)
        _print(gathered.findings, gathered.bad, quiet=quiet, as_json=as_json)
    return 1 if gathered.bad else int(ExitCode.DONE)


def _gathered(context: DoctorContext, hosts: tuple[str, ...], number: int, patience: float) -> GatheredFindings:
    """The findings of all nodes on the first one, and on the others which nodes are bad."""
    from llmrecipes.doctor.examine import examine
    from llmrecipes.doctor.nodes import GatheredFindings, NodeRendezvous, compared, meet
    from llmrecipes.launch.rendezvous import token_of

    findings = examine(context)
    if len(hosts) > 1:
        token = token_of(os.environ)
        return meet(NodeRendezvous(hosts, number, context.port, context.runs_dir, token, patience, _say), findings)
    local = compared(findings)
    return GatheredFindings(local, bad_nodes(local))


def _keep(findings: Sequence[Finding], bad: Sequence[str], bad_nodes: Path | None, record: Path | None) -> None:
    from llmrecipes.doctor.doctor_log import keep

    if bad_nodes is not None:
        bad_nodes.write_text(",".join(bad), "utf-8")
    if record is not None and (problem := keep(record, findings, bad)):
        _say(problem)


def _print(findings: Sequence[Finding], bad: Sequence[str], *, quiet: bool, as_json: bool) -> None:
    if as_json:
        values = {"ok": not bad, "bad_nodes": bad, "findings": [finding.as_dict() for finding in findings]}
        print(json.dumps(values, indent=2))
    else:
        print(as_text(findings, quiet))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _is_done(recipe: Recipe | None, runs_dir: Path, run_id: str) -> bool:
    """Whether a run has done all its steps: a pod that restarts afterwards would wait for nodes that have ended."""
    from llmrecipes.rundir import Run
    from llmrecipes.runfiles import checked_run_id

    if recipe is None:
        raise UserError("set without RECIPE", where="--run-id", rule="--run-id needs the recipe of the run")
    run = Run.of(runs_dir, recipe.name, checked_run_id(run_id))
    if not run.is_finished(recipe.train):
        return False
    print(f"{run.path} is complete: nothing to check")
    return True


def as_text(findings: Sequence[Finding], quiet: bool) -> str:
    """Human-readable lines, node by node, problems with their fixes; nodes without any are left out if `quiet`."""
    several = len({finding.node for finding in findings}) > 1
    shown = [finding for finding in findings if not quiet or finding.status in ("warn", "fail")]
    width = max((len(finding.check) for finding in shown), default=0)
    lines = []
    for host in dict.fromkeys(finding.node for finding in shown):
        if several:
            lines.append(f"{host}:")
        for each in (finding for finding in shown if finding.node == host):
            lines.append(f"{MARKS[each.status]} {each.check:{width}}  {each.what}")
            if each.fix:
                lines.append(f"     {'':{width}}  fix: {each.fix}")
    wrong, odd = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
    bad = bad_nodes(findings)
    where = f" on {', '.join(bad)}" if bad and several else ""
    lines.append(f"{wrong} failed{where}, {odd} warned, of {len(findings)} checks")
    return "\n".join(lines)


def _own(gpus: str | None) -> frozenset[int] | None:
    if gpus is None:
        return None
    words = [word for word in gpus.split(",") if word]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise UserError(f"{gpus!r}", where="--gpus", rule="must be comma-separated GPU numbers", fix="--gpus 0,1")
    return frozenset(map(int, words))
