"""`llmrecipes dryrun`: starts a process that runs ranks on tensors without data, and collects their reports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from llmrecipes.dryrun.dry_run_spec import DryRunSpec, RankReport, report_name
from llmrecipes.dryrun.pictures import memory_svg, passes_svg
from llmrecipes.engine.requirements import require_installed
from llmrecipes.errors import UserError
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.derived.stage_runs import stage_named
from llmrecipes.recipe.derived.stages import span_of
from llmrecipes.recipe.engines import ENGINES, engine_name
from llmrecipes.recipe.schema import Recipe
from llmrecipes.runfiles import RunFiles, new_run_id
from llmrecipes.workflow.plan import plan_on

Log = Callable[[str], None]
STDERR = 2


@dataclass(frozen=True)
class DryRun:
    """Reports of the ranks, in order, and where their pictures are."""

    plan: Plan
    reports: tuple[RankReport, ...]
    folder: Path


def dry_run(
    recipe: Recipe,
    runs_dir: Path,
    log: Log,
    *,
    cluster: str | None = None,
    nodes: int | None = None,
    rank: int | None = None,
    stages: bool = False,
    stage: str | None = None,
    skew: float = 1.0,
) -> DryRun:
    """Run ranks of a recipe's world for a step, without memory, GPUs or the other ranks.

    Args:
        recipe: the resolved recipe.
        runs_dir: `<runs_dir>/<recipe>-dryrun/<id>/` receives reports and pictures.
        log: receives a line before each slow step.
        cluster: name or path of a cluster profile; None: this machine.
        nodes: nodes of the cluster; None: the fewest that fit the layout.
        rank: rank of the world; None: the first.
        stages: the first rank of each pipeline stage instead.
        stage: stage to run, of a recipe with stages, in its layout; None: the one that needs the most memory.
        skew: times its even share of tokens that one expert of each layer on the rank gets.

    Raises:
        UserError: the layout does not divide the ranks, there is no such rank, the engine is missing or needs data, or
            the dry run failed, which leaves nothing behind.
    """
    run, machine = plan_on(recipe, nproc=None, cluster=cluster, nodes=nodes)
    recipe = run.recipe
    plan = run.largest
    title = recipe.name
    if stage is None and plan.span is not None:
        stage = plan.span.name
    if stage is not None:
        recipe = stage_named(recipe, stage)
        title = f"{title} in {stage}"
        plan = next(each for each in run.stages if each.span == span_of(recipe))
    ranks = _ranks(plan, rank, stages=stages)
    _check(recipe, skew)
    world = plan.layout.world_size
    spec = DryRunSpec(recipe=recipe, cluster=machine, world_size=world, ranks=ranks, skew=skew)
    log(f"dryrun {title}: {_listed(ranks)} of {world}, {plan.num_microbatches} micro-batches each")
    folder = RunFiles.of(runs_dir, f"{recipe.name}-dryrun", new_run_id()).path
    path = folder / "spec.json"
    try:
        folder.mkdir(parents=True)
        path.write_text(spec.model_dump_json(), "utf-8")
        _run(path, recipe)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # an interrupt may come before there is one
        raise
    path.unlink()
    reports = tuple(RankReport.model_validate_json((folder / report_name(rank)).read_text("utf-8")) for rank in ranks)
    for report in reports:
        of_rank = f"{title}, rank {report.rank} of {world} (stage {report.stage})"
        (folder / f"memory-{report.rank}.svg").write_text(memory_svg(report, of_rank), "utf-8")
    in_order = f"{title}, {_listed(ranks)} of {world}: passes in the order in which they start"
    (folder / "passes.svg").write_text(passes_svg(reports, in_order), "utf-8")
    return DryRun(plan, reports, folder)


def _run(spec: Path, recipe: Recipe) -> None:
    command = [sys.executable, "-m", "llmrecipes.dryrun.simulation", str(spec), str(os.getpid())]
    # Standard output has only the report, and Ctrl-C reaches only this process, which kills the other one.
    ended = subprocess.run(
        command, env={**os.environ, **environment()}, stdout=STDERR, start_new_session=True, check=False
    )
    if ended.returncode:
        raise UserError(
            f"the dry run exited with code {ended.returncode}",
            where=f"recipe {recipe.name}",
            fix="see the messages above",
        )


def _ranks(plan: Plan, rank: int | None, *, stages: bool) -> tuple[int, ...]:
    world = plan.layout.world_size
    number = plan.layout.pipeline_model_parallel_size
    if stages:
        if rank is not None:
            raise UserError(
                f"rank {rank} cannot be combined with --stages",
                where="--rank",
                rule="--stages runs the first rank of each stage",
            )
        return tuple(range(0, world, world // number))
    if rank is not None and not 0 <= rank < world:
        raise UserError(
            f"no rank {rank} among {world} ranks",
            where="--rank",
            rule="ranks are numbered from 0",
            fix=f"0 to {world - 1}",
        )
    return (rank or 0,)


def _check(recipe: Recipe, skew: float) -> None:
    engine = ENGINES[engine_name(recipe)]
    if engine.needs_data is not None:
        resolve_name(engine.needs_data)(recipe)
    require_installed(recipe)
    if recipe.layout.torch_compile:
        raise UserError(
            "true",
            where="layout.torch_compile",
            rule="torch.compile needs a device",
            fix="layout.torch_compile=false",
        )
    if skew != 1.0 and not recipe.model.num_moe_experts:
        raise UserError(f"{skew:g}", where="--skew", rule="--skew is only for a mixture of experts")
    if skew != 1.0 and recipe.model.moe_token_dispatcher_type == "allgather":  # noqa: S105 - no password
        raise UserError(
            f"{skew:g} with moe_token_dispatcher_type allgather",
            where="--skew",
            rule="only the all-to-all dispatcher's skewed routing can be dry run",
            fix="model.moe_token_dispatcher_type=alltoall",
        )
    if recipe.model.moe_token_dispatcher_type == "flex":  # noqa: S105 - no password
        raise UserError(
            "flex",
            where="model.moe_token_dispatcher_type",
            rule="DeepEP needs a device",
            fix="model.moe_token_dispatcher_type=alltoall, which keeps the same tensors",
        )
    if skew < 1.0:
        raise UserError(
            f"{skew:g}", where="--skew", rule="the skew is a multiple of the even share, and at least 1", fix="--skew 2"
        )


def environment() -> dict[str, str]:
    """No GPU, one thread, and none of torch's warnings about groups of a fake backend."""
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _listed(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
