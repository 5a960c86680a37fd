"""`llmrecipes eval`: perplexity, tasks and checks on a checkpoint; the command, and one rank (`python -m`)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from llmrecipes import untrusted
from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.evaluation import history, isolation
from llmrecipes.evaluation.request import DATA, EvaluationRequest, EvaluationResult
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.io import write_atomic
from llmrecipes.launch.environment import detected_environment
from llmrecipes.launch.local import run_ranks
from llmrecipes.plan.check import gib
from llmrecipes.plan.run_plan import RunPlan, derive_run
from llmrecipes.recipe.derived.batch_schedule import without_ramp
from llmrecipes.recipe.derived.degrees import undivided
from llmrecipes.recipe.load import load_values
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.runfiles import new_run_id, run_of
from llmrecipes.train.rank import failure_reported, rank_main
from llmrecipes.train.spec import RankSpec
from llmrecipes.units import MIB
from llmrecipes.workflow.model_source import find_checkpoint
from llmrecipes.workflow.pretrained import base_weights

if TYPE_CHECKING:
    from llmrecipes.checkpoint.store import Entry
    from llmrecipes.data.tokens.tokenizer import TextTokenizer
    from llmrecipes.engine.base import Backend, Platform, Scorer, TextModel, World
    from llmrecipes.plan.derive import Plan
    from llmrecipes.recipe.schema import Recipe


LARGEST_RESULTS = 64 * MIB
"""Bytes of an isolated process's results."""


@dataclass(frozen=True)
class EvaluationLayout:
    """Ranks of an evaluation."""

    tensor: int = 1
    """Ranks that share the model."""
    ranks: int | None = None
    """All ranks; None: `tensor`."""


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation, and where they are kept.

    Attributes:
        model: run or folder that was evaluated.
        run_dir: directory of the run, where the results are kept; None for a folder.
        step: step of the checkpoint.
        records: a task each, as they stand in evaluations.jsonl.
        precision: that a folder was computed in; None for a run, which has its own, and for quantised weights.
        warnings: what could not be done with the results.
    """

    model: Path
    run_dir: Path | None
    step: int
    records: list[dict[str, Any]]
    warnings: tuple[str, ...] = ()
    precision: str | None = None


def evaluate_run(
    name: str,
    request: EvaluationRequest,
    runs_dir: Path,
    data_dir: Path,
    layout: EvaluationLayout = EvaluationLayout(),
    *,
    progress: bool = False,
) -> Evaluation:
    """Evaluate a run's checkpoint, and keep the results in its directory and in its MLflow run.

    Results are written together at the end: an evaluation that is interrupted leaves nothing.

    Args:
        name: the run, see `Run.find`; `RUN@STEP` for a checkpoint other than the newest; or a folder of a Hugging Face
            model, which is read in place, and whose results are only returned.
        request: perplexity on the validation split if it asks for nothing.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept.
        layout: ranks on this machine.
        progress: show on stderr how much is done.

    Raises:
        UserError: no such run or checkpoint; tasks or data that are missing; a model that does not fit.
    """
    if not (request.tasks or request.data or request.checks):
        request = request.model_copy(update={"data": (DATA,)})
    if _is_folder(Path(name)):
        return _evaluate_folder(Path(name), request, data_dir, layout, progress=progress)
    run_dir, entry = find_checkpoint(name, runs_dir)
    recipe = Run(run_dir).recipe_of(entry.step)
    _require_intact(run_dir, entry)
    spec = EvaluationSpec(
        recipe=on_ranks(recipe, layout),
        data_dir=data_dir,
        checkpoint=entry.path.absolute(),
        request=request,
        progress=progress,
    )
    results = _results(spec, layout, Run(run_dir).logs)
    records = history.records(results, entry.step, str(entry.path))
    history.append(run_dir, records)
    return Evaluation(run_dir, run_dir, entry.step, records, _track(recipe, run_dir, runs_dir, records))


def _is_folder(path: Path) -> bool:
    return (path / "config.json").is_file() and not Run(path).exists()


def _evaluate_folder(
    path: Path, request: EvaluationRequest, data_dir: Path, layout: EvaluationLayout, *, progress: bool
) -> Evaluation:
    """Evaluate a folder of a Hugging Face model, which is only read."""
    from llmrecipes.hf.match import section_of, validated
    from llmrecipes.hf.reading import COMPRESSED, CONFIG, open_folder, precision_of, read_config, resolve
    from llmrecipes.workflow.pretrained import TOKENIZER_FILE, recipe_name, recipe_values

    source = resolve(str(path))
    config = read_config(source.path, COMPRESSED)
    quantised = config.pop("quantization_config", None) is not None
    if quantised and (layout.ranks or layout.tensor) > 1:
        raise UserError(
            f"{layout.ranks or layout.tensor} ranks for quantised weights",
            where="--tp, --nproc",
            rule="transformers evaluates them in a single process",
            fix="--tp 1 and no --nproc",
        )
    section = section_of(config, source.path)[1]
    validated(section, 1, str(source.path / CONFIG))
    weights = open_folder(source.path, COMPRESSED)  # refuses pickles and missing files before anything is loaded
    if not (source.path / TOKENIZER_FILE).is_file():
        raise UserError(
            "no tokenizer.json",
            where=str(source.path),
            rule="text is evaluated with the model's own tokenizer",
            fix="copy the tokenizer's files to that folder",
        )
    values = recipe_values(source, section, recipe_name(source.name))
    recipe = load_values(values, source.path / CONFIG, [f"train.precision={precision_of(weights)}"]).recipe
    spec = EvaluationSpec(
        recipe=on_ranks(recipe, layout),
        data_dir=data_dir,
        folder=source.path.absolute(),
        quantised=quantised,
        request=request,
        progress=progress,
    )
    with TemporaryDirectory() as logs:
        results = _results(spec, layout, Path(logs))
    precision = None if quantised else recipe.train.precision
    return Evaluation(path, None, 0, history.records(results, 0, str(path)), precision=precision)


def _results(spec: EvaluationSpec, layout: EvaluationLayout, logs: Path) -> list[EvaluationResult]:
    cluster = detect()
    plan = derive_run(spec.recipe, layout.ranks or layout.tensor, cluster)
    _require_memory(plan.largest, layout)
    if spec.request.trust_code:
        return _isolated(spec, plan, logs)
    return evaluate(spec) if plan.world_size == 1 else _start(spec, plan, cluster, logs)


def _isolated(spec: EvaluationSpec, plan: RunPlan, logs: Path) -> list[EvaluationResult]:
    """Evaluate in a process that tasks may run code in; what it writes is read as data of a stranger."""
    if plan.world_size > 1:
        raise UserError(
            f"{plan.world_size} ranks",
            where=isolation.OPTION,
            rule="code of a task file runs in one process without network, which several ranks would need",
            fix="--tp 1 and no --nproc",
        )
    folder = logs / f"eval-{new_run_id()}"
    folder.mkdir(parents=True)
    output = folder / "results.json"
    path = folder / "spec.json"
    path.write_text(spec.model_copy(update={"output": output.absolute()}).model_dump_json() + "\n", "utf-8")
    try:
        code = isolation.run("llmrecipes.workflow.evaluate", [str(path.absolute())])
        written = _written(output)
    finally:
        shutil.rmtree(folder)
    if written is None or (code and written.refused is None):
        raise UserError(
            f"the evaluation ended with exit code {code}", where=isolation.OPTION, fix="see the messages above"
        )
    if written.refused is not None:
        said = written.refused
        raise UserError(said.error, where=said.where, rule=said.rule, fix=said.fix)
    return list(written.results)


class _Refused(BaseModel):
    error: str
    where: str
    rule: str
    fix: str


class _Written(BaseModel):
    """What the process leaves."""

    results: list[EvaluationResult] = []
    refused: _Refused | None = None


def _written(output: Path) -> _Written | None:
    """None if it left nothing that can be used."""
    try:
        values = untrusted.read_json(output, most=LARGEST_RESULTS)
        written = _Written.model_validate({"results": values} if isinstance(values, list) else values)
        names = (name for result in written.results for name in (result.task, *result.metrics))
        return written if all(map(str.isprintable, names)) else None
    except (OSError, UserError, ValueError, RecursionError):
        return None


def _require_intact(run_dir: Path, entry: Entry) -> None:
    """A corrupt file would give numbers that look like others."""

    store = Run(run_dir).store()
    if store.valid(entry.step, full=True):
        return
    others = [f"{run_dir}@{candidate.step}" for candidate in store.entries() if candidate.step != entry.step]
    raise UserError(
        "a file of this checkpoint is corrupt",
        where=str(entry.path),
        rule="every file must match its recorded SHA-256",
        fix=f"one of {', '.join(others)}" if others else "restore it from a backup",
    )


def on_ranks(recipe: Recipe, layout: EvaluationLayout) -> Recipe:
    """The recipe on the ranks of an evaluation; checkpoints are the same in every layout.

    Raises:
        UserError: the ranks are not a multiple of the tensor-parallel size, or these do not divide its heads.
    """
    tensor = layout.tensor
    ranks = layout.ranks or layout.tensor
    groups = recipe.model.num_query_groups or recipe.model.num_attention_heads
    if ranks % tensor:
        raise UserError(
            f"{ranks} is not a multiple of --tp {tensor}",
            where="--nproc",
            rule="the number of ranks must be a multiple of --tp",
            fix=f"--nproc {tensor}",
        )
    if groups % tensor:
        fits = [size for size in range(1, groups + 1) if groups % size == 0]
        near = min(fits, key=lambda size: (abs(size - tensor), size))
        raise UserError(
            f"{tensor}", where="--tp", rule=f"--tp must divide the {groups} key/value heads", fix=f"--tp {near}"
        )
    train = without_ramp(recipe.train, global_batch_size=ranks // tensor)
    return undivided(
        recipe.model_copy(update={"train": train}),
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1 and recipe.model.num_moe_experts is not None,  # experts need it
        use_distributed_optimizer=recipe.layout.use_distributed_optimizer,
        micro_batch_size=1,
    )


def _require_memory(plan: Plan, layout: EvaluationLayout) -> None:
    if plan.memory.weights > plan.memory_capacity_bytes:
        raise UserError(
            f"weights need {gib(plan.memory.weights)} per rank, {gib(plan.memory_capacity_bytes)} available",
            where=f"recipe {plan.recipe.name}",
            rule="--tp ranks hold the whole model",
            fix=f"--tp {2 * layout.tensor}, or a machine with more memory",
        )


def _start(spec: EvaluationSpec, plan: RunPlan, cluster: Cluster, logs: Path) -> list[EvaluationResult]:
    folder = logs / f"eval-{new_run_id()}"
    folder.mkdir(parents=True)
    output = folder / "results.json"
    path = folder / "spec.json"
    path.write_text(spec.model_copy(update={"output": output}).model_dump_json() + "\n", "utf-8")
    ranks = plan.world_size
    code = run_ranks(
        "llmrecipes.workflow.evaluate",
        [str(path)],
        world_size=ranks,
        threads=max(1, int(cluster.cpu_cores) // ranks),
        logs=folder,
        environment=detected_environment(cluster, plan, folder.absolute()),
    )
    if code:
        raise UserError(f"the evaluation ended with exit code {code}", where=str(folder), fix="see the messages above")
    results = [EvaluationResult(**values) for values in json.loads(output.read_text("utf-8"))]
    shutil.rmtree(folder)
    return results


def _track(recipe: Recipe, run_dir: Path, runs_dir: Path, records: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Add the metrics to the run's own MLflow run; returns what went wrong, which does not undo an evaluation."""
    if not recipe.tracking.mlflow:
        return ()
    from llmrecipes.tracking.mlflow.sink import add_metrics

    values = {name: value for record in records for name, value in history.metric_names(record).items()}
    problem = add_metrics(run_dir, runs_dir, values, step=records[0]["step"] if records else 0)
    return () if problem is None else (problem,)


class EvaluationSpec(RankSpec):
    """An evaluation of a checkpoint, or of a folder of a Hugging Face model."""

    checkpoint: Path | None = None
    """Directory of the checkpoint, whose files have been checked."""
    folder: Path | None = None
    """Folder of the Hugging Face model; None with a checkpoint."""
    quantised: bool = False
    """The folder's weights are; transformers computes with them."""
    request: EvaluationRequest
    progress: bool = False
    """Show on stderr how much is done."""
    output: Path | None = None
    """File for the results; None: they are returned."""


def run(spec: EvaluationSpec) -> ExitCode:
    """Evaluate, and write the results to the spec's file; of an isolated process, also what the user did wrong."""
    try:
        results = evaluate(spec)
    except UserError as error:
        if spec.output is None or not spec.request.trust_code:
            raise
        write_atomic(spec.output, json.dumps({"refused": error.as_dict()}))
        return error.code
    if spec.output is not None and os.environ.get("RANK", "0") == "0":
        write_atomic(spec.output, json.dumps([asdict(result) for result in results]))
    return ExitCode.DONE


def evaluate(spec: EvaluationSpec) -> list[EvaluationResult]:
    """Join the ranks that a launcher started, or form a world of one, and evaluate; results on the first rank.

    Raises:
        UserError: a problem the user can fix. Tasks and data are checked before the model is loaded.
    """
    require_packages(spec.recipe)
    # Imported here so that a rank with an invalid spec fails before torch is loaded.

    from llmrecipes.data.folder.prepared import fingerprint, open_prepared
    from llmrecipes.evaluation.lead import RankZeroScorer
    from llmrecipes.evaluation.measurements import Prepare
    from llmrecipes.hardware.cluster import detect
    from llmrecipes.plan.derive import derive
    from llmrecipes.tracking.progress import Counted

    recipe = spec.recipe
    # A tokenizer of Hugging Face is its own file: an imported model needs no prepared data.
    downloads_tokenizer = (
        recipe.data.tokenizer.type == "huggingface" and not (spec.data_dir / fingerprint(recipe)).is_dir()
    )
    prepared = None if downloads_tokenizer else open_prepared(recipe, spec.data_dir)
    tokenizer = _tokenizer_of(spec) if prepared is None else prepared.tokenizer()
    plan = derive(recipe, int(os.environ.get("WORLD_SIZE", "1")), detect())
    work = None
    if os.environ.get("RANK", "0") == "0":
        positions = plan.shape.max_position_embeddings
        model = str(spec.checkpoint or spec.folder)
        work = Prepare.of(spec.request, prepared, tokenizer, recipe.model.seq_length, positions, model)
    with _scorer(spec, plan) as (scorer, world):
        progress = Counted() if spec.progress and work is not None else None
        lead = RankZeroScorer(scorer, world, tokenizer, spec.request.batch_size, progress=progress)
        try:
            return lead.run(lambda one: work.run(one) if work is not None else []) or []
        finally:
            if progress is not None:
                progress.close()


@contextmanager
def _scorer(spec: EvaluationSpec, plan: Plan) -> Iterator[tuple[Scorer, World]]:
    """The model of this rank, and the rank's world until the block ends."""
    if spec.quantised:
        from llmrecipes.evaluation.logits_scorer import ALONE, LogitsScorer

        yield LogitsScorer.of_folder(spec.folder or Path()), ALONE
        return
    from llmrecipes.engine.backends import backend

    engines = backend(spec.recipe)
    platform = engines.platform(int(os.environ.get("LOCAL_RANK", "0")))
    with engines.join(spec.recipe, platform) as world, failure_reported(spec.recipe):
        yield _model(spec, engines, plan, platform).scorer(), world


def _model(spec: EvaluationSpec, engines: Backend, plan: Plan, platform: Platform) -> TextModel:
    if spec.checkpoint is not None:
        from llmrecipes.checkpoint.manifest import Entry, read_manifest

        entry = Entry(spec.checkpoint, read_manifest(spec.checkpoint))
        with base_weights(run_of(spec.checkpoint.parent).path, spec.recipe) as base:
            return engines.load_weights(plan, platform, entry, base)
    from llmrecipes.hf.weights import open_weights

    weights = open_weights(spec.folder or Path(), spec.recipe.model)
    try:
        return engines.load_given(plan, platform, weights)
    finally:
        weights.close()


def _tokenizer_of(spec: EvaluationSpec) -> TextTokenizer:
    """The tokenizer in the folder of a model, or that of a run whose data is elsewhere."""
    from llmrecipes.data.tokens.tokenizer import TextTokenizer, load_huggingface, open_huggingface, prefix_of

    section = spec.recipe.data.tokenizer
    vocab_size = spec.recipe.model.vocab_size
    if spec.folder is not None:
        return open_huggingface(section, vocab_size)
    backend, eod = load_huggingface(section, vocab_size)
    return TextTokenizer.beginning(prefix_of(section, backend, eod), backend, eod, "")


if __name__ == "__main__":
    rank_main(EvaluationSpec, run)
