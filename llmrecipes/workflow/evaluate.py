"""`llmrecipes eval`: perplexity, tasks and checks on a run's checkpoint; results beside the run's earlier ones."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.commandline import resume_command
from llmrecipes.errors import UserError
from llmrecipes.evaluation import history
from llmrecipes.evaluation.request import DATA, Request
from llmrecipes.evaluation.result import Result
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.launch.environment import detected_environment
from llmrecipes.launch.local import run_ranks
from llmrecipes.plan.check import gib
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.engines import without_zero
from llmrecipes.recipe.schema import Parallelism, Recipe
from llmrecipes.workflow.evaluate_rank import EvaluationSpec, evaluate
from llmrecipes.workflow.recorded import run_recipe
from llmrecipes.workflow.run import new_run_id, require_checkpoint
from llmrecipes.workflow.runs import find_run

if TYPE_CHECKING:
    from llmrecipes.checkpoint.store import Entry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """Ranks of an evaluation."""

    tensor: int = 1
    """Ranks that share the model."""
    ranks: int | None = None
    """All ranks; None: `tensor`."""


@dataclass(frozen=True)
class Evaluation:
    """What was found, and where it is kept.

    Attributes:
        run_dir: of the run.
        step: of the checkpoint.
        records: a task each, as they stand in evaluations.jsonl.
        warnings: what could not be done with the results.
    """

    run_dir: Path
    step: int
    records: list[dict[str, Any]]
    warnings: tuple[str, ...] = ()


def evaluate_run(name: str, request: Request, runs_dir: Path, data_dir: Path, layout: Layout = Layout()) -> Evaluation:
    """Evaluate a run's checkpoint, and keep the results in its directory and in its MLflow run.

    Results are written when all of them are there: an evaluation that is interrupted leaves nothing.

    Args:
        name: the run, see `find_run`; `RUN@STEP` for a checkpoint other than the newest.
        request: perplexity on the validation split if it asks for nothing.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept.
        layout: ranks on this machine.

    Raises:
        UserError: no such run or checkpoint; tasks or data that are missing; a model that does not fit.
    """
    if not (request.tasks or request.data or request.checks):
        request = request.model_copy(update={"data": (DATA,)})
    run_dir, step = find_checkpoint(name, runs_dir)
    recipe = run_recipe(run_dir)
    entry = checkpoint_at(run_dir, step, data_dir)
    cluster = detect()
    spread = on_ranks(recipe, layout)
    ranks = layout.ranks or layout.tensor
    plan = derive(spread, ranks, cluster)
    _require_memory(plan, layout)
    spec = EvaluationSpec(recipe=spread, data_dir=data_dir, checkpoint=entry.path, request=request)
    results = evaluate(spec) if ranks == 1 else _start(spec, plan, cluster, run_dir)
    records = history.records(results, entry.step, str(entry.path))
    history.append(run_dir, records)
    return Evaluation(run_dir, entry.step, records, _track(recipe, run_dir, runs_dir, records))


def find_checkpoint(name: str, runs_dir: Path) -> tuple[Path, int | None]:
    """Directory of a run, and the step of `RUN@STEP`.

    Raises:
        UserError: no such run, or a step that is no number.
    """
    run, at, step = name.rpartition("@")
    if not at or Path(name).exists():
        return find_run(name, runs_dir), None
    if not step.isdecimal():
        raise UserError(f"step {step!r}", where=name, rule="RUN@STEP has the step of a checkpoint", fix=f"{run}@100")
    return find_run(run, runs_dir), int(step)


def checkpoint_at(run_dir: Path, step: int | None, data_dir: Path) -> Entry:
    """The checkpoint of a step, checked; the newest valid one if there is none given.

    Raises:
        UserError: there is none, or it is damaged.
    """
    if step is None:
        return require_checkpoint(run_dir, data_dir)
    from llmrecipes.checkpoint.store import CheckpointStore

    store = CheckpointStore(run_dir / "checkpoints")
    found = {entry.step: entry for entry in store.entries()}
    if step not in found:
        raise UserError(
            f"no checkpoint of step {step}",
            where=str(store.directory),
            rule=f"there are those of {', '.join(map(str, found))}" if found else "there is none",
            fix=f"{run_dir}@{min(found, key=lambda each: abs(each - step))}"
            if found
            else f"train it first: {resume_command(run_dir, data_dir=data_dir)}",
        )
    if not store.valid(step, full=True):
        raise UserError(
            "a file of this checkpoint is damaged",
            where=str(found[step].path),
            rule="every file has its recorded SHA-256",
            fix="another step, or a copy of this checkpoint",
        )
    return found[step]


def on_ranks(recipe: Recipe, layout: Layout) -> Recipe:
    """The recipe on the ranks of an evaluation; checkpoints are the same in every layout.

    Raises:
        UserError: the ranks are no multiple of those that share the model, or these do not divide its heads.
    """
    tensor, ranks = layout.tensor, layout.ranks or layout.tensor
    groups = recipe.model.num_query_groups or recipe.model.num_attention_heads
    if ranks % tensor:
        raise UserError(f"{ranks}", where="--nproc", rule=f"a multiple of --tp, {tensor}", fix=f"--nproc {tensor}")
    if groups % tensor:
        fits = [size for size in range(1, groups + 1) if groups % size == 0]
        near = min(fits, key=lambda size: (abs(size - tensor), size))
        raise UserError(f"{tensor}", where="--tp", rule=f"divides the {groups} key/value heads", fix=f"--tp {near}")
    parallel = Parallelism(
        tensor_model_parallel_size=tensor, use_distributed_optimizer=recipe.parallelism.use_distributed_optimizer
    )
    train = recipe.train.model_copy(update={"micro_batch_size": 1, "global_batch_size": ranks // tensor})
    return without_zero(recipe).model_copy(update={"parallelism": parallel, "train": train})


def _require_memory(plan: Plan, layout: Layout) -> None:
    if plan.memory.weights > plan.memory_capacity_bytes:
        raise UserError(
            f"its weights take {gib(plan.memory.weights)} a rank, and there are {gib(plan.memory_capacity_bytes)}",
            where=f"recipe {plan.recipe.name}",
            rule="--tp ranks hold the whole model",
            fix=f"--tp {2 * layout.tensor}, or a machine with more memory",
        )


def _start(spec: EvaluationSpec, plan: Plan, cluster: Cluster, run_dir: Path) -> list[Result]:
    folder = run_dir / "logs" / f"eval-{new_run_id()}"
    folder.mkdir(parents=True)
    output = folder / "results.json"
    path = folder / "spec.json"
    path.write_text(spec.model_copy(update={"output": output}).model_dump_json() + "\n", "utf-8")
    ranks = plan.layout.world_size
    code = run_ranks(
        "llmrecipes.workflow.evaluate_rank",
        [str(path)],
        world_size=ranks,
        threads=max(1, int(cluster.cpu_cores) // ranks),
        logs=folder,
        environment=detected_environment(cluster, plan, folder.absolute()),
    )
    if code:
        raise UserError(f"the evaluation ended with exit code {code}", where=str(folder), fix="see the messages above")
    results = [Result(**values) for values in json.loads(output.read_text("utf-8"))]
    shutil.rmtree(folder)
    return results


def _track(recipe: Recipe, run_dir: Path, runs_dir: Path, records: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Add the metrics to the run's own MLflow run; returns what went wrong, which does not undo an evaluation."""
    if not recipe.tracking.mlflow:
        return ()
    from llmrecipes.tracking.mlflow.later import add_metrics

    values = {name: value for record in records for name, value in history.metric_names(record).items()}
    problem = add_metrics(run_dir, runs_dir, values, step=records[0]["step"] if records else 0)
    return () if problem is None else (problem,)
