"""`llmrecipes submit`: plan for the target, check, preview, render, submit; and finding the job of a run later."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.hardware.load import load_profile, names
from llmrecipes.hardware.machine import machine
from llmrecipes.launch import image_packages, record
from llmrecipes.launch.base import (
    JobHandle,
    JobRef,
    JobState,
    Launcher,
    LauncherOptions,
    Planned,
    PlannedForCluster,
    Rendering,
    Submission,
)
from llmrecipes.launch.job import handle
from llmrecipes.launch.registry import LAUNCHERS, launcher
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.plan.check import gib
from llmrecipes.plan.speed.choice import Choice, choose, overrides_of
from llmrecipes.recipe.load import load
from llmrecipes.recipe.reading.layouts import chosen_keys, is_name
from llmrecipes.recipe.reading.overrides import parse_override
from llmrecipes.recipe.schema import Recipe
from llmrecipes.runfiles import RunFiles, checked_run_id
from llmrecipes.workflow.measured_steps import measured_steps
from llmrecipes.workflow.run import (
    Paths,
    TrainOptions,
    is_prepared,
    new_spec,
    plan_run,
)

logger = logging.getLogger(__name__)

FOR_JOBS = RunOptions(sample=False)


@dataclass(frozen=True)
class Submitted:
    """A job that was submitted, or would be: `job` is None after a dry run."""

    submission: Submission
    rendering: Rendering
    job: JobHandle | None

    @property
    def planned(self) -> Planned:
        return self.submission.planned

    def as_dict(self, state: JobState | None) -> dict[str, Any]:
        """Plain data for JSON."""
        planned = self.planned
        return {
            "job_id": None if self.job is None else self.job.ref.job_id,
            "launcher": None if self.job is None else self.job.ref.launcher,
            "state": state,
            "run_id": self.submission.run_id,
            "run_dir": str(self.submission.run_dir),
            "cluster": None if planned.profile is None else planned.profile.name,
            "nodes": planned.nodes,
            "ranks": planned.plan.world_size,
            "submitted": self.job is not None,
            **self.rendering.details,
        }


def plan_for(
    recipe: str,
    overrides: list[str],
    cluster: str | None,
    nodes: int,
    ranks_per_node: int | None = None,
    runs_dir: Path | None = None,
) -> PlannedForCluster:
    """Plan a recipe for some nodes of a site.

    Args:
        recipe, overrides: see `recipe.load.load`.
        cluster: name or path of a profile.
        nodes: how many of its nodes; more nodes add data-parallel ranks and change nothing else.
        ranks_per_node: None: one per GPU.
        runs_dir: see `plan.laid_out`.

    Raises:
        UserError: the recipe or the profile is wrong, or the run does not fit.
    """
    loaded = load(recipe, overrides).recipe
    if cluster is None:
        raise UserError(
            "no cluster is named",
            where="--cluster",
            rule="a job is planned for the nodes it will run on, not for the machine that submits it",
            fix=f"one of {', '.join(names())}, or a YAML file",
        )
    profile = load_profile(cluster)
    if ranks_per_node is not None and profile.gpus_per_node and ranks_per_node > profile.gpus_per_node:
        raise UserError(
            f"{ranks_per_node} ranks on {profile.gpus_per_node} GPUs", where="--ranks-per-node", rule="one rank per GPU"
        )
    site = machine(profile, nodes)
    ranks = nodes * (ranks_per_node or profile.ranks_per_node)
    choice = choose(loaded, site, ranks, profile, measured_steps(loaded, site, ranks, profile, runs_dir))
    if choice is not None:
        overrides = _with_layout(recipe, overrides, choice)
        loaded = load(recipe, overrides).recipe
    plan = replace(plan_run(loaded, site, ranks), chosen=None if choice is None else choice.as_dict())
    return PlannedForCluster((recipe, *overrides), cluster, profile, site, plan, nodes)


def _with_layout(recipe: str, overrides: list[str], choice: Choice) -> list[str]:
    """Overrides with which the job has the layout that was chosen here, whatever it would choose there."""
    changes = zip(overrides, map(parse_override, overrides), strict=True)
    others = [text for text, change in changes if change.key != "layout" or not is_name(change.value)]
    # A layout that was asked for replaces keys of the file.
    others.append("layout.name=null" if len(others) == len(overrides) else "layout=null")
    return [*others, *overrides_of(load(recipe, others).recipe, choice)]


def plan_on_this_machine(recipe: str, overrides: list[str], nodes: int, ranks: int | None = None) -> Planned:
    """Plan a recipe for this machine; `nodes` is 1, which the launcher checks.

    Raises:
        UserError: the recipe is wrong, or the run does not fit.
    """
    loaded = load(recipe, overrides).recipe
    site = detect()
    return Planned((recipe, *overrides), None, None, site, plan_run(loaded, site, ranks), nodes)


def submit(
    planned: Planned,
    launcher: Launcher,
    given: LauncherOptions,
    paths: Paths,
    *,
    run_id: str | None = None,
    options: RunOptions = FOR_JOBS,
    prepare: bool = False,
    dry_run: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Submitted:
    """Render a planned run, and submit it unless this is a dry run.

    Args:
        planned: from `plan_for` or `plan_on_this_machine`.
        launcher: from `launch.registry`.
        given: its options.
        paths: where runs and data are kept.
        run_id: None: a new one.
        options: options of the start of the ranks.
        prepare: where this machine cannot see whether the data is prepared, a job finds out first.
        dry_run: only render.
        environment: more variables, for a job on this machine.

    Raises:
        UserError: a value that the scheduler cannot take, none of its programs on this machine, or it rejects the job.
    """
    run_id = checked_run_id(run_id)
    paths = Paths(paths.runs_dir.resolve(), paths.data_dir.resolve())
    submission = Submission(
        planned, run_id, paths.runs_dir, paths.data_dir, options, environment=environment or {},
        prepared=is_prepared(planned.recipe, paths.data_dir) if launcher.shares_disk else not prepare,
    )  # fmt: skip
    rendering = launcher.render(submission, given)
    lacking = image_packages.warnings(submission, given, python="python" in launcher.takes)
    rendering = replace(rendering, warnings=(*rendering.warnings, *lacking))
    if dry_run:
        return Submitted(submission, rendering, None)
    launcher.require()
    spec = None
    if launcher.shares_disk:
        # Also creates the directory of the log.
        spec = new_spec(planned.recipe, paths, TrainOptions(run_id=run_id, run=options))
    try:
        job = launcher.submit(submission, rendering)
    except UserError:
        if spec is not None:
            spec.run.remove_if_empty()
        raise
    try:
        record.write(job.ref)
        if planned.plan.chosen is not None and launcher.shares_disk:
            record.write_choice(submission.run_dir, planned.plan.chosen, chosen_keys(planned.recipe))
    except OSError as error:  # the job was submitted anyway
        logger.warning(
            "%s: %s; llmrecipes cancel needs the id of the job", RunFiles(submission.run_dir).submission, error.strerror
        )
    return Submitted(submission, rendering, job)


GATED = ("meta-llama/", "mistralai/", "google/gemma", "bigcode/starcoder", "bigcode/the-stack", "CohereLabs/")
"""Names on the Hugging Face Hub with these prefixes need an account that has accepted their licence. The Hub is not
queried, because a login node may have no network."""
TOKEN = "HF_TOKEN"  # noqa: S105


@dataclass(frozen=True)
class Gated:
    """A name on the Hub that is likely to need a token."""

    key: str
    name: str


@dataclass(frozen=True)
class Preview:
    """Preview of a job: resources and requirements.

    Attributes:
        layout: what `layout: auto` chose, and why; None: nothing was chosen.
        place: where it is queued: Slurm's partition, or Kubernetes' namespace and queue.
        time_limit: in Slurm's format; None: the partition's default. Kubernetes has none.
        checkpoints_bytes: maximum disk use of checkpoints, without those kept by `checkpoint.keep_interval`.
        gated: names on the Hub that are likely to need a token.
        has_token: whether the job has `HF_TOKEN`.
        notes: what the launcher says about the job, by a short name.
    """

    nodes: int
    gpus: int
    gpu: str | None
    ranks: int
    layout: str | None
    memory_bytes: int
    memory_capacity_bytes: int
    memory_headroom: float
    place: dict[str, str | None]
    time_limit: str | None
    checkpoint_bytes: int
    checkpoints_bytes: int
    gated: tuple[Gated, ...]
    has_token: bool
    warnings: tuple[str, ...]
    notes: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "gated": [asdict(gate) for gate in self.gated], "warnings": list(self.warnings)}

    def lines(self) -> Iterator[str]:
        """Human-readable lines."""
        nodes = f"{self.nodes} {'node' if self.nodes == 1 else 'nodes'}"
        hardware = f"{self.gpus} × {self.gpu}" if self.gpu else "no GPU"
        share = f"({self.memory_headroom:.0%} headroom)"
        rows = {
            "nodes": f"{nodes}, {hardware}, {self.ranks} {'rank' if self.ranks == 1 else 'ranks'}",
            **({} if self.layout is None else {"layout": self.layout}),
            "memory": f"{gib(self.memory_bytes)} of {gib(self.memory_capacity_bytes)} a rank {share}",
            **{name: value or "the site's default" for name, value in self.place.items()},
            "time limit": self.time_limit or "the partition's own",
            "checkpoint": f"{gib(self.checkpoint_bytes)}, at most {gib(self.checkpoints_bytes)} on disk",
            **self.notes,
        }
        yield from (f"{name:>10}  {text}" for name, text in rows.items())
        for gate in self.gated:
            state = "the job has it" if self.has_token else "the job does not have it, see docs/guide/data.md"
            yield f"{'gated':>10}  {gate.name} ({gate.key}) needs a Hugging Face token: {TOKEN}; {state}"
        yield from (f"{'warning':>10}  {text}" for text in self.warnings)


def gated_names(recipe: Recipe) -> tuple[Gated, ...]:
    """Tokenizers and datasets of a recipe that are likely to be gated on the Hugging Face Hub."""
    tokenizer = recipe.data.tokenizer
    names = [("data.tokenizer.path", tokenizer.path)] if tokenizer.type == "huggingface" else []
    names += [
        (f"data.sources.{number}.path", source.path)
        for number, source in enumerate(recipe.data.sources)
        if source.type == "hub"
    ]
    return tuple(
        Gated(key, name)
        for key, name in names
        if name.startswith(GATED) and not Path(name).exists()  # a local folder comes first
    )


def preview(submitted: Submitted) -> Preview:
    """The preview of a job that was submitted, or would be."""
    planned, rendering = submitted.planned, submitted.rendering
    plan = planned.plan
    return Preview(
        nodes=planned.nodes,
        gpus=len(planned.site.gpus),
        gpu=planned.site.gpus[0].name if planned.site.gpus else None,
        ranks=plan.world_size,
        layout=None if plan.chosen is None else plan.chosen["text"],
        memory_bytes=plan.largest.memory.total,
        memory_capacity_bytes=plan.largest.memory_capacity_bytes,
        memory_headroom=round(plan.largest.memory_headroom, 4),
        place=dict(rendering.place),
        time_limit=rendering.time_limit,
        checkpoint_bytes=plan.checkpoint_bytes,
        checkpoints_bytes=(planned.recipe.checkpoint.most_recent_k + 1 + planned.recipe.checkpoint.keep_best)
        * plan.checkpoint_bytes,
        gated=gated_names(planned.recipe),
        has_token=rendering.has_token,
        warnings=(*plan.warnings, *rendering.warnings),
        notes=dict(rendering.notes),
    )


def find_job(name: str, runs_dir: Path) -> JobHandle:
    """The newest job of a run, or a job by its id.

    Args:
        name: run directory, recipe/run-id, run id, or the id that `submit` printed.
        runs_dir: where runs are kept.

    Raises:
        UserError: there is no such run or job, or several runs have that id.
    """
    folders = list(record.submitted(runs_dir))
    for folder in (Path(name), runs_dir / name):
        if (recorded := record.read(folder)) is not None:
            return handle(recorded.ref)
        if RunFiles(folder).exists():
            raise UserError(
                "the run was not submitted as a job",
                where=str(folder),
                rule="stop an interactive run with Ctrl-C; it saves first",
            )
    named = [folder for folder in folders if folder.name == name]
    if len(named) > 1:
        raise UserError(f"several runs are called {name}: {', '.join(map(str, named))}", fix="use recipe/run-id")
    for folder in named or folders:
        recorded = record.read(folder)
        if recorded is not None and (named or recorded.ref.job_id == name):
            return handle(recorded.ref)
    for kind in LAUNCHERS:
        if launcher(kind).names_job(name):
            ref = JobRef(kind, name, runs_dir / ".unknown")
            if ref in launcher(kind).statuses([ref]):
                return handle(ref)
    raise UserError(
        f"no submitted run and no job {name}",
        where=str(runs_dir),
        rule="a job is named by its run (directory, recipe/run-id or run id), or by the id that submit printed",
        fix="llmrecipes runs lists runs; --runs-dir DIR if they are elsewhere",
    )
