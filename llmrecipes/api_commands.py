"""Commands from Python: data, runs, layouts, jobs, searches and models. `import llmrecipes` has these functions too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmrecipes.api import Overrides, Run, directory, load_recipe, open_run, override_words, say
from llmrecipes.commandline import DATA_DIR, DATA_VARIABLE, RUNS_DIR, RUNS_VARIABLE
from llmrecipes.errors import UserError
from llmrecipes.models.merge_options import MergeOptions
from llmrecipes.options import takes
from llmrecipes.plan.placement import Placement
from llmrecipes.recipe.schema import Recipe

if TYPE_CHECKING:
    from llmrecipes.data.folder.prepared import Prepared
    from llmrecipes.search.command import SearchResult
    from llmrecipes.workflow.compare import RunComparison
    from llmrecipes.workflow.submit import Submitted


def list_runs(runs_dir: str | Path | None = None, *, data_dir: str | Path | None = None) -> list[Run]:
    """All runs, in the order of `llmrecipes runs`: by recipe and run id.

    Args:
        runs_dir: default: `LLMRECIPES_RUNS`, else `runs`; a folder that does not exist has no runs.
        data_dir: where their prepared data is, for `Run.generate`; default: `LLMRECIPES_DATA`, else `data`.
    """
    from llmrecipes.tracking.run_list import list_runs as summaries

    data = directory(data_dir, DATA_VARIABLE, DATA_DIR)
    return [Run(Path(summary.path), data) for summary in summaries(directory(runs_dir, RUNS_VARIABLE, RUNS_DIR))]


def compare_runs(*runs: Run | str | Path, runs_dir: str | Path | None = None) -> RunComparison:
    """Compare two or more runs: recipe keys that differ, loss curves, final figures.

    Args:
        runs: runs, or what `open_run` takes.
        runs_dir: default: `LLMRECIPES_RUNS`, else `runs`.

    Returns:
        `runs` with `figures` and the curves `train` and `valid`, and `differences`: values by key. `as_dict()` is the
        output of `llmrecipes compare --json`.

    Raises:
        UserError: fewer than two runs, no such run, or one without any step.
    """
    from llmrecipes.workflow.compare import compare

    return compare([run.path if isinstance(run, Run) else open_run(run, runs_dir=runs_dir).path for run in runs])


def report_run(
    *runs: Run | str | Path,
    out: str | Path | None = None,
    cluster: str | None = None,
    runs_dir: str | Path | None = None,
    data_dir: str | Path | None = None,
) -> dict[str, Any]:
    """Write a page about a run, or one that compares several: `llmrecipes report`.

    Args:
        runs: runs, or what `open_run` takes.
        out: file of the page; default: `report.html` or `comparison.html` in the directory of the first run.
        cluster: name or path of a cluster profile, for prices and power.
        runs_dir: default: `LLMRECIPES_RUNS`, else `runs`.
        data_dir: default: `LLMRECIPES_DATA`, else `data`.

    Returns:
        The output of `llmrecipes report --json`: `page` is its path, and the rest its numbers.

    Raises:
        UserError: no run, more than six, no such run or profile, or the page cannot be written.
    """
    from llmrecipes.hardware.load import load_profile
    from llmrecipes.report.comparison_page import write
    from llmrecipes.rundir import Run as RunDirectory

    if not runs:
        raise UserError("no run", where="report_run", rule="a page needs one to six runs")
    paths = [run.path if isinstance(run, Run) else open_run(run, runs_dir=runs_dir).path for run in runs]
    data = directory(data_dir, DATA_VARIABLE, DATA_DIR)
    costs = None if cluster is None else load_profile(cluster).costs
    values, _ = write([RunDirectory(path) for path in paths], None if out is None else Path(out), data, costs)
    return values


def layout_recipe(
    recipe: Recipe | str | Path,
    *,
    nproc: int | None = None,
    cluster: str | None = None,
    nodes: int | None = None,
    stage: str | None = None,
) -> tuple[Placement, ...]:
    """What each rank holds of model and data, by rank: `llmrecipes plan --placement`.

    Args:
        recipe: a recipe, or its name or path.
        nproc: ranks; default: the fewest that the layout needs.
        cluster: name or path of a cluster profile; default: any machine.
        nodes: nodes of the cluster; default: the fewest that fit the ranks.
        stage: of a recipe with stages, by its name; default: the first.

    Raises:
        UserError: the layout does not divide the ranks, or there is no such profile or stage.
    """
    from llmrecipes.workflow.plan import placement

    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    return placement(loaded, nproc, cluster, nodes, stage)[1]


def prepare_recipe(
    recipe: Recipe | str | Path,
    *,
    data_dir: str | Path | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> Prepared:
    """Tokenize a recipe's data unless it is prepared already: `llmrecipes prepare`.

    Args:
        recipe: a recipe, or its name or path.
        data_dir: default: `LLMRECIPES_DATA`, else `data`.
        workers: tokenizing processes; default: one for each core.
        quiet: do not print progress.

    Returns:
        The prepared folder: `path`, `manifest.counts("train").tokens`, `tokenizer()`.

    Raises:
        UserError: sources or tokenizer that cannot be used, a corrupt folder, or one that cannot be written.
    """
    from llmrecipes.data.prepare import prepare

    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    folder = directory(data_dir, DATA_VARIABLE, DATA_DIR)
    return prepare(loaded, folder, workers=workers, progress=_said(quiet))


def submit_recipe(
    name_or_path: str | Path,
    overrides: Overrides = (),
    *,
    to: str = "slurm",
    cluster: str | None = None,
    nodes: int = 1,
    ranks_per_node: int | None = None,
    run_id: str | None = None,
    accept_changes: bool = False,
    dry_run: bool = False,
    runs_dir: str | Path | None = None,
    data_dir: str | Path | None = None,
    **options: Any,
) -> Submitted:
    """Submit a recipe to a scheduler, once its plan fits the nodes: `llmrecipes submit`.

    Args:
        name_or_path: name in recipes/, or path of a YAML file; the job reads it again.
        overrides: as `load_recipe`.
        to: `slurm`, `k8s` or `local`.
        cluster: name or path of a cluster profile; `local` needs none.
        nodes: nodes of the cluster.
        ranks_per_node: default: one per GPU.
        run_id: name of the run; an existing run is resumed. Default: a new name.
        accept_changes: resume even if this changes the learning rate or the data order.
        dry_run: only render: `submitted.rendering.shown`.
        runs_dir: default: `LLMRECIPES_RUNS`, else `runs`.
        data_dir: default: `LLMRECIPES_DATA`, else `data`.
        options: others of the command, such as `partition="gpu"`, `time="2:00:00"` or `image="..."`.

    Returns:
        `job` with `state`, `wait()`, `result()` and `cancel()`, or None after a dry run; `submission.run_dir`.

    Raises:
        UserError: nothing was submitted: the plan does not fit, an option is not one of this scheduler, or it rejects
            the job.
    """
    from llmrecipes.launch.registry import launcher
    from llmrecipes.launch.run_options import taken
    from llmrecipes.workflow.run import Paths
    from llmrecipes.workflow.submit import plan_for, plan_on_this_machine, submit

    place_of_jobs = launcher(to)
    run, launcher_options = taken({**_options(options, place_of_jobs.takes, to), "accept-changes": accept_changes})
    recipe = str(name_or_path)
    words = list(override_words(overrides))
    paths = Paths(directory(runs_dir, RUNS_VARIABLE, RUNS_DIR), directory(data_dir, DATA_VARIABLE, DATA_DIR))
    if cluster is None and not place_of_jobs.needs_cluster:
        planned = plan_on_this_machine(recipe, words, nodes, ranks_per_node)
    else:
        planned = plan_for(recipe, words, cluster, nodes, ranks_per_node, paths.runs_dir)
    return submit(planned, place_of_jobs, launcher_options, paths, run_id=run_id, options=run, dry_run=dry_run)


def search_recipe(
    recipe: Recipe | str | Path,
    *,
    to: str = "local",
    workers: int = 1,
    cluster: str | None = None,
    nodes: int = 1,
    nproc: int | None = None,
    resume: bool = False,
    quiet: bool = False,
    runs_dir: str | Path | None = None,
    data_dir: str | Path | None = None,
    **options: Any,
) -> SearchResult:
    """Search hyperparameters by the recipe's section `search`: `llmrecipes search`; returns when a limit is reached.

    Args:
        recipe: a recipe with a section `search`, or its name or path.
        to: where trials run: `local`, `slurm` or `k8s`.
        workers: trials at a time.
        cluster: name or path of a cluster profile, for schedulers.
        nodes: nodes of a trial.
        nproc: ranks of a trial; default: as `train_recipe`.
        resume: continue a study.
        quiet: do not print what happens to trials.
        runs_dir: default: `LLMRECIPES_RUNS`, else `runs`.
        data_dir: default: `LLMRECIPES_DATA`, else `data`.
        options: of each trial's job, as `submit_recipe`.

    Returns:
        `best` trials with their values, `recipes` made of them, `trials` by outcome, and `code`: 75 if a signal stopped
        the search.

    Raises:
        UserError: no section `search`, a study that cannot be opened, or trials that fail one after another.
    """
    from llmrecipes.launch.registry import launcher
    from llmrecipes.search.command import search
    from llmrecipes.search.target import target_of
    from llmrecipes.workflow.run import Paths

    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "search_recipe was called from a thread", rule="it needs the main thread, which receives signals"
        )
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    launcher_options = _options(options, launcher(to).takes, to)
    paths = Paths(directory(runs_dir, RUNS_VARIABLE, RUNS_DIR), directory(data_dir, DATA_VARIABLE, DATA_DIR))
    return search(
        loaded,
        lambda: target_of(to, launcher_options, paths, workers, cluster, nodes, nproc),
        resume=resume,
        log=_said(quiet),
    )


def _options(options: Mapping[str, Any], takes: frozenset[str], to: str) -> dict[str, Any]:
    """Options of a scheduler by their names on the command line: `prepare_partition` is `--prepare-partition`."""
    from llmrecipes.launch.run_options import JOB_OPTIONS

    named = {name.replace("_", "-"): value for name, value in options.items()}
    takes |= JOB_OPTIONS
    foreign = sorted(named.keys() - takes)
    if foreign:
        raise UserError(f"not valid with to={to!r}", where=foreign[0], rule=f"one of {', '.join(sorted(takes))}")
    return named


def _said(quiet: bool) -> Callable[[str], None]:
    return (lambda _line: None) if quiet else say


@takes("options", MergeOptions)
def merge_models(
    models: Sequence[str | Path],
    out: str | Path,
    options: MergeOptions,
    *,
    base: str | Path | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    tokenizer: bool = True,
    runs_dir: str | Path | None = None,
    data_dir: str | Path | None = None,
) -> Path:
    """Merge models of one configuration and one tokenizer into a folder that transformers can load; returns it.

    Args:
        models: runs, `RUN@STEP`, or folders with config.json and safetensors.
        out: new folder.
        options: its fields are keywords: `method`, `weights`, `density` and the other options of the command, whose
            `--lambda` is `scale`.
        base: base model of the fine-tuned models, for all methods but linear and slerp.
        dtype: of the weights; default: the first model's.
        tokenizer: compare and write tokenizers.
        runs_dir: default: `LLMRECIPES_RUNS`, else `runs`.
        data_dir: default: `LLMRECIPES_DATA`, else `data`.

    Raises:
        UserError: an option that the method does not have; a model that is missing, corrupt, named twice or of another
            kind; values that are not finite; a folder that exists; a full disk.
    """
    from llmrecipes.models.merge import Output, merge

    merged = merge(
        [str(model) for model in models],
        options,
        Output(Path(out), dtype, tokenizer=tokenizer),
        directory(runs_dir, RUNS_VARIABLE, RUNS_DIR),
        directory(data_dir, DATA_VARIABLE, DATA_DIR),
        None if base is None else str(base),
    )
    return Path(merged.path)


def import_model(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    revision: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    runs_dir: str | Path | None = None,
    data_dir: str | Path | None = None,
) -> Run:
    """Make a run from a Hugging Face model, with a checkpoint of step 0 that any layout loads.

    Args:
        source: folder with config.json and safetensors, or name on the Hub.
        overrides: of the recipe, as on the command line: `["train.train_iters=20"]`.
        revision: branch, tag or commit on the Hub.
        name: of the recipe; default: that of the model.
        run_id: of the new run; default: a new name.
        runs_dir: default: `LLMRECIPES_RUNS`, else `runs`.
        data_dir: default: `LLMRECIPES_DATA`, else `data`.

    Raises:
        UserError: the model cannot be found, read or described by a recipe; a run id in use; a full disk.
    """
    from llmrecipes.models.importing import import_model as make
    from llmrecipes.runfiles import checked_run_id

    created = make(
        str(source),
        overrides,
        directory(runs_dir, RUNS_VARIABLE, RUNS_DIR),
        checked_run_id(run_id),
        revision=revision,
        name=name,
    )
    return Run(Path(created.run_dir), directory(data_dir, DATA_VARIABLE, DATA_DIR))
