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
    overrides: OverridesArgument = None,
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
    from llmrecipes.doctor.doctor_log import keep
    from llmrecipes.doctor.examine import DoctorContext, examine
    from llmrecipes.doctor.nodes import GatheredFindings, NodeRendezvous, compared, meet
    from llmrecipes.hardware.load import load_profile
    from llmrecipes.launch.rendezvous import token_of
    from llmrecipes.plan.parameters import count
    from llmrecipes.recipe.derived.shape import shape
    from llmrecipes.recipe.load import load
    from llmrecipes.runfiles import RunFiles

    profile = load_profile(cluster) if cluster else None
    loaded = load(recipe, overrides or []).recipe if recipe else None
    if run_id is not None and _is_done(loaded, runs_dir, run_id):
        return int(ExitCode.DONE)
    hosts = job_hosts(nodes)
    own = _own(own_gpus)
    job = os.environ.get("SLURM_JOB_ID")
    port = port_of(job) if job else FIRST_PORT
    parameters = count(loaded.model, shape(loaded.model)).total if loaded else 0
    several = len(hosts) > 1
    number = own_number(hosts) if several else 0
    token = token_of(os.environ) if several else b""
    # Pods of a Job only check their own node; Kubernetes numbers them.
    leads = number == 0 and os.environ.get("JOB_COMPLETION_INDEX", "0") == "0"
    try:
        context = DoctorContext(profile, loaded, parameters, runs_dir, data_dir, port, several, leads, own)
        findings = examine(context)
        gathered = (
            meet(NodeRendezvous(hosts, number, port, runs_dir, token, patience, _say), findings)
            if several
            else GatheredFindings(local := compared(findings), bad_nodes(local))
        )
    except UserError:
        raise
    except Exception:
        traceback.print_exc()
        return CRASHED
    bad = gathered.bad
    code = 1 if bad else int(ExitCode.DONE)
    if gathered.findings is None:
        return code
    findings = gathered.findings
    if bad_nodes_file is not None:
        bad_nodes_file.write_text(",".join(bad), "utf-8")
    if record is None and run_id is not None and loaded is not None:
        record = RunFiles.of(runs_dir, loaded.name, run_id).doctor
    if record is not None and leads and (problem := keep(record, findings, bad)):
        _say(problem)
    if as_json:
        print(
            json.dumps(
                {"ok": not bad, "bad_nodes": bad, "findings": [finding.as_dict() for finding in findings]}, indent=2
            )
        )
    else:
        print(as_text(findings, quiet))
    return code


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


def as_text(findings: list[Finding], quiet: bool) -> str:
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
