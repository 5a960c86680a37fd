"""`llmrecipes submit`: parsing and printing only."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrecipes.cli.options import DATA, RUNS, DataOption, JsonOption, OverridesArgument, RecipeArgument, RunsOption
from llmrecipes.errors import UserError

if TYPE_CHECKING:
    from llmrecipes.launch.kubernetes.options import Options as KubernetesOptions
    from llmrecipes.workflow.preview import Preview
    from llmrecipes.workflow.submit import Applied

TARGETS = ("slurm", "k8s")


def submit(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    to: Annotated[str, typer.Option("--to", metavar="WHERE", help="Scheduler: slurm or k8s.")] = "slurm",
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, help="Nodes; more of them add data-parallel ranks only.")
    ] = 1,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="NAME", envvar="LLMRECIPES_CLUSTER", help="Cluster profile or YAML file."),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option("--ranks-per-node", metavar="N", min=1, help="Default: one per GPU, or one without GPUs."),
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME")] = None,
    account: Annotated[str | None, typer.Option("--account", metavar="NAME")] = None,
    qos: Annotated[str | None, typer.Option("--qos", metavar="NAME")] = None,
    time: Annotated[str | None, typer.Option("--time", metavar="LIMIT", help="For example 8:00:00.")] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="REF", help="Container image; for k8s, NAME@sha256:DIGEST.")
    ] = None,
    runtime: Annotated[
        str | None, typer.Option("--runtime", metavar="WHAT", help="pyxis, apptainer or none; default: the profile's.")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="PATH", help="Python of the ranks; default: this one, or the image's."),
    ] = None,
    warning: Annotated[
        int, typer.Option("--warning", metavar="S", min=1, max=65535, help="Save S seconds before the time limit.")
    ] = 180,
    max_restarts: Annotated[
        int | None,
        typer.Option("--max-restarts", metavar="N", min=0, help="Restarts after failures; then it ends with 93."),
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", metavar="OPTION", help="More for sbatch: --sbatch=--reservation=x")
    ] = None,
    flavor: Annotated[
        str | None, typer.Option("--flavor", metavar="KIND", help="k8s: job (default), jobset or trainjob.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="NAME", help="k8s: namespace; default: default.")
    ] = None,
    claim: Annotated[
        str | None, typer.Option("--claim", metavar="NAME", help="k8s: PersistentVolumeClaim with runs and data.")
    ] = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="NAME", help="k8s: LocalQueue of Kueue.")] = None,
    topology: Annotated[
        str | None, typer.Option("--topology", metavar="LABEL", help="k8s: prefer nodes that share this label's value.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="VAR=NAME[:KEY]", help="k8s: set a variable from a Secret."),
    ] = None,
    tracking_uri: Annotated[
        str | None, typer.Option("--tracking-uri", metavar="URL", help="k8s: URL of the MLflow server.")
    ] = None,
    service_account: Annotated[
        str | None, typer.Option("--service-account", metavar="NAME", help="k8s: service account of the pods.")
    ] = None,
    pull_secret: Annotated[
        str | None, typer.Option("--pull-secret", metavar="NAME", help="k8s: Secret to pull the image with.")
    ] = None,
    host_network: Annotated[
        bool | None, typer.Option("--host-network", help="k8s: use the node's network, where RDMA needs it.")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="Name of the run; an existing one resumes.")
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume although its learning rate or data order changes.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")
    ] = False,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Submit a recipe to Slurm or Kubernetes, once its plan fits the nodes."""
    from llmrecipes.launch.slurm import Options, as_text
    from llmrecipes.workflow.preview import of_kubernetes, of_slurm
    from llmrecipes.workflow.submit import plan_for, submit_kubernetes, submit_slurm
    from llmrecipes.workflow.train import Paths

    if to not in TARGETS:
        raise UserError(f"{to!r}", where="--to", rule=f"one of {', '.join(TARGETS)}")
    for_slurm: dict[str, Any] = {
        "partition": partition, "account": account, "qos": qos, "time": time, "runtime": runtime, "python": python,
        "sbatch": sbatch,
    }  # fmt: skip
    for_kubernetes: dict[str, Any] = {
        "flavor": flavor, "namespace": namespace, "claim": claim, "queue": queue, "topology": topology,
        "secret": secret, "tracking-uri": tracking_uri, "service-account": service_account,
        "pull-secret": pull_secret, "host-network": host_network,
    }  # fmt: skip
    _require_own(to, for_kubernetes if to == "slurm" else for_slurm)
    planned = plan_for(recipe, overrides or [], cluster, nodes, ranks_per_node)
    if to == "k8s":
        wanted = _kubernetes(image, max_restarts, for_kubernetes)
        applied = submit_kubernetes(planned, wanted, run_id, dry_run, accept_changes=accept_changes)
        _print_applied(applied, of_kubernetes(applied, wanted.queue, wanted.secrets), dry_run, as_json)
        return
    options = Options(
        partition=partition,
        account=account,
        qos=qos,
        time=time,
        runtime=runtime,
        image=image,
        python=python or (None if image else sys.executable),
        warning=warning,
        max_restarts=max_restarts,
        accept_changes=accept_changes,
        more=tuple(sbatch or ()),
    )
    done = submit_slurm(planned, Paths(runs_dir, data_dir), options, run_id, dry_run)
    preview = of_slurm(done)
    if as_json:
        print(json.dumps({**done.as_dict(), "summary": preview.as_dict()}, indent=2))
        return
    if dry_run:
        print(as_text(done.command))
    else:
        print(
            f"job {done.job_id}: {planned.plan.layout.world_size} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}"
        )
        print(f"run  {done.run_dir}")
        print(f"log  {done.run_dir}/logs/slurm-{done.job_id}.out")
    _print_preview(preview, dry_run)


def _require_own(to: str, others: dict[str, Any]) -> None:
    """UserError where an option of another scheduler is given: it would be without effect."""
    given = [f"--{name}" for name, value in others.items() if value is not None]
    if given:
        raise UserError(f"given with --to {to}", where=given[0], rule="it belongs to another scheduler",
                        fix="leave it out")  # fmt: skip


def _kubernetes(image: str | None, max_restarts: int | None, given: dict[str, Any]) -> KubernetesOptions:
    from llmrecipes.launch.kubernetes.options import Options, parse_secrets

    if image is None:
        raise UserError(
            "no image is named", where="--image", fix="--image REGISTRY/llmrecipes@sha256:DIGEST; make image builds one"
        )
    values = {name.replace("-", "_"): value for name, value in given.items() if value is not None and name != "secret"}
    if max_restarts is not None:
        values["max_restarts"] = max_restarts
    return Options(image=image, secrets=parse_secrets(given["secret"] or ()), **values)


def _print_preview(preview: Preview, dry_run: bool) -> None:
    """On stderr, so that a dry run's output can be piped; of what was submitted, warnings alone."""
    sys.stdout.flush()
    lines = preview.lines() if dry_run else (f"warning: {text}" for text in preview.warnings)
    for line in lines:
        print(line, file=sys.stderr)


def _print_applied(applied: Applied, preview: Preview, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**applied.as_dict(), "summary": preview.as_dict()}, indent=2))
        return
    if dry_run:
        print(applied.as_yaml(), end="")
    else:
        print(applied.answer)
        ranks, nodes, where = (
            applied.planned.plan.layout.world_size,
            applied.planned.nodes,
            f"--namespace {applied.namespace}",
        )
        print(f"run  {applied.run_id}: {ranks} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}")
        print(f"log  kubectl logs {where} --selector app.kubernetes.io/instance={applied.name} --follow --prefix")
    _print_preview(preview, dry_run)
