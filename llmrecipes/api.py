"""llmrecipes from Python: plan a recipe, train it, and read what runs have recorded.

Importing this module loads neither torch nor pandas; what needs them imports them when it is called.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmrecipes.commandline import DATA_DIR, DATA_VARIABLE, RUNS_DIR, RUNS_VARIABLE
from llmrecipes.console import ignore_library_warnings
from llmrecipes.engine.sampling import Sampling
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.evaluation.request import EvaluationRequest
from llmrecipes.models.export_options import ExportOptions
from llmrecipes.options import made, takes
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.redact import redact
from llmrecipes.runfiles import RunFiles, checked_run_id

if TYPE_CHECKING:
    import pandas

    from llmrecipes import rundir
    from llmrecipes.tracking.run_list import RunSummary

__all__ = ["Checkpoint", "Run", "TrainResult", "load_recipe", "open_run", "plan_recipe", "train_recipe"]

Outcome = Literal["finished", "saved", "failed"]
Overrides = Mapping[str, object] | Sequence[str]

_IDENTIFYING = {"steps": "loss", "evaluations": "valid_loss", "notes": "event"}
"""The key that only the records of a kind in metrics.jsonl have."""


def load_recipe(name_or_path: str | Path, overrides: Overrides = ()) -> Recipe:
    """Load and check a recipe.

    Args:
        name_or_path: name in recipes/, or path of a YAML file.
        overrides: `{"train.train_iters": 50}`, or `["train.train_iters=50"]` as on the command line.

    Raises:
        UserError: no such recipe, or a key or value that is not allowed; all problems are in one message.
    """
    return load(str(name_or_path), override_words(overrides)).recipe


def override_words(overrides: Overrides) -> Sequence[str]:
    """Overrides as on the command line."""
    if isinstance(overrides, str):
        raise UserError(
            f"overrides are {overrides!r}", rule="overrides must be a mapping or a list", fix=f"[{overrides!r}]"
        )
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return overrides


def plan_recipe(
    recipe: Recipe | str | Path, *, nproc: int | None = None, cluster: str | None = None, nodes: int | None = None
) -> RunPlan:
    """Plan a recipe for this machine, or for nodes of a cluster: layout, memory, FLOPs; `print` shows it as a table.

    Args:
        recipe: a recipe, or its name or path.
        nproc: ranks; default: all GPUs, else the fewest that the layout needs.
        cluster: name or path of a cluster profile; default: this machine.
        nodes: nodes of the cluster; default: the fewest that fit the layout.

    Raises:
        UserError: the layout does not divide the ranks. A plan that does not fit is not an error: see `fits`.
    """
    from llmrecipes.workflow.plan import plan_on

    return plan_on(_recipe(recipe), nproc=nproc, cluster=cluster, nodes=nodes)[0]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of a run."""

    step: int
    path: Path


@dataclass(frozen=True)
class Run:
    """A run, read from its directory on each access, so that it may still be training."""

    path: Path
    data_dir: Path

    def _files(self) -> rundir.Run:
        from llmrecipes.rundir import Run

        return Run(self.path)

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe it was started with."""
        return self._files().recipe()

    @property
    def status(self) -> RunSummary:
        """State (`running`, `finished`, `saved`, `failed`, `interrupted`), step, total steps and last losses."""
        return self._files().summary()

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Its complete checkpoints, oldest first. Their hashes are checked when one is loaded."""
        return [Checkpoint(entry.step, entry.path) for entry in self._files().store().entries()]

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest of them; None if there is none."""
        complete = self.checkpoints
        return complete[-1] if complete else None

    def records(self, kind: Literal["steps", "evaluations", "notes"] = "steps") -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: one a step, an evaluation, or a note such as `checkpoint_saved`.

        Numbers that are not finite are None, with their names in `non_finite`.

        Raises:
            UserError: an unknown kind, or a file that cannot be read.
        """
        from llmrecipes.tracking.jsonl import parse
        from llmrecipes.untrusted import lines

        if kind not in _IDENTIFYING:
            raise UserError(f"{kind!r}", where="kind", rule=f"one of {', '.join(_IDENTIFYING)}")
        path = self._files().metrics
        try:
            parsed = [parse(line) for line in lines(path, root=self.path)]  # the last line may be incomplete
        except FileNotFoundError:  # no step yet
            return []
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from error
        return [record for record in parsed if record is not None and _IDENTIFYING[kind] in record]

    def metrics(self, kind: Literal["steps", "evaluations", "notes"] = "steps") -> pandas.DataFrame:
        """`records` as a pandas DataFrame with `step` as its index.

        Raises:
            UserError: pandas is not installed; or as `records`.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError("pandas is not installed", fix="pip install pandas, or records() for dicts") from error
        records = self.records(kind)
        return pandas.DataFrame(records, columns=None if records else ["step"]).set_index("step")

    @takes("options", ExportOptions)
    def export(self, out: str | Path | None = None, *, options: ExportOptions, step: int | None = None) -> Path:
        """Write a checkpoint for Hugging Face transformers, one tensor in memory at a time; returns the folder.

        Args:
            out: the folder, which must not exist; default: `hf/step-<step>` in the run's directory.
            options: its fields are keywords: `dtype`, `family`, `max_shard_bytes`, `tokenizer`, and `averaged` for the
                moving average of the weights.
            step: of the checkpoint; default: the newest.

        Raises:
            UserError: no such checkpoint, or a corrupt one; a model without a form in transformers; a folder that
                exists; a full disk.
        """
        from llmrecipes.models.export import export as write

        reference = str(self.path) if step is None else f"{self.path}@{step}"
        folder = None if out is None else Path(out)
        return Path(write(reference, folder, self._files().runs_dir, self.data_dir, options).path)

    @takes("sampling", Sampling)
    def generate(self, prompt: str, *, max_new_tokens: int = 128, sampling: Sampling, chat: bool = False) -> str:
        """Continue a prompt with the newest valid checkpoint, loaded into this process; returns the continuation.

        Args:
            prompt: text to continue.
            max_new_tokens: maximum length of the continuation, in tokens.
            sampling: its fields are keywords: `temperature`, where 0 is greedy decoding, `top_k`, `top_p` and `seed`.
            chat: the prompt is a message, which the model answers by the run's chat template.

        Raises:
            UserError: no valid checkpoint, no tokenizer, an empty prompt, or no chat template.
        """
        from llmrecipes.workflow.generate import GenerationRequest, samples

        request = GenerationRequest(prompt, max_new_tokens, sampling, chat=chat)
        with warnings.catch_warnings():
            ignore_library_warnings()
            (sample,) = samples(self.path, self.data_dir, request)
        return sample.text

    @takes("request", EvaluationRequest)
    def evaluate(
        self, request: EvaluationRequest, *, step: int | None = None, tp: int = 1, nproc: int | None = None
    ) -> list[dict[str, Any]]:
        """Evaluate a checkpoint, as `llmrecipes eval`; results are also kept in evaluations.jsonl and MLflow.

        Args:
            request: its fields are keywords: `data`, `tasks` and `checks`, which are lists, `limit=100` and the other
                options of the command.
            step: of the checkpoint; default: the newest.
            tp: ranks that share the model; more than one rank run in separate processes.
            nproc: all ranks; default: `tp`.

        Returns:
            A record for each task, with `task`, `metrics`, `settings`, `step`, `time` and `examples`.

        Raises:
            UserError: no valid checkpoint, tasks or data that are missing, or an unknown option.
        """
        from llmrecipes.workflow.evaluate import EvaluationLayout, evaluate_run

        name = str(self.path) if step is None else f"{self.path}@{step}"
        with warnings.catch_warnings():
            ignore_library_warnings()
            return evaluate_run(
                name, request, self._files().runs_dir, self.data_dir, EvaluationLayout(tp, nproc)
            ).records

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """All records of `evaluate` and `llmrecipes eval`, oldest first."""
        from llmrecipes.evaluation.history import read

        return read(self.path)


@dataclass(frozen=True)
class TrainResult:
    """How a call of `train_recipe` ended.

    Attributes:
        run: the run it made or resumed.
        outcome: `finished`; `saved`: a signal stopped it and its state is saved, so that another call with the same run
            id resumes it; or `failed`, with the reason on stderr and in the run's logs/.
        exit_code: what `llmrecipes train` would have exited with.
        final: the last step's metrics, with `valid_loss` of the last evaluation; empty if there was no step.
    """

    run: Run
    outcome: Outcome
    exit_code: int
    final: dict[str, Any]


def train_recipe(
    recipe: Recipe | str | Path,
    *,
    nproc: int | None = None,
    run_id: str | None = None,
    runs_dir: str | Path | None = None,
    data_dir: str | Path | None = None,
    max_restarts: int = 0,
    accept_changes: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Prepare the data and train a recipe on this machine, or resume a run; returns when it has ended.

    Every rank is a separate process, started as `python -m`, so that a script needs no `if __name__ == "__main__"`
    and this process holds no memory after training. The first rank prints to this process's stdout. Signals are
    forwarded to the ranks, for which this must be the main thread.

    Args:
        recipe: a recipe, or its name or path.
        nproc: ranks; default: all GPUs, else the fewest that the layout needs.
        run_id: name of the run; an existing run is resumed. Default: a new name.
        runs_dir: default: `LLMRECIPES_RUNS`, else `runs`.
        data_dir: default: `LLMRECIPES_DATA`, else `data`.
        max_restarts: maximum number of restarts after failures.
        accept_changes: resume even if this changes the learning rate or the data order.
        quiet: do not print the progress of data preparation; the ranks still print.

    Raises:
        UserError: nothing was started: the recipe, its data or the machine does not allow it.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "train_recipe was called from a thread", rule="it needs the main thread, which receives signals"
        )
    from llmrecipes.launch.run_options import RunOptions
    from llmrecipes.workflow.run import Paths, TrainOptions
    from llmrecipes.workflow.train import train as start

    loaded = _recipe(recipe)
    paths = Paths(
        directory(runs_dir, RUNS_VARIABLE, RUNS_DIR),
        directory(data_dir, DATA_VARIABLE, DATA_DIR),
    )
    name = checked_run_id(run_id)
    options = TrainOptions(
        nproc=nproc,
        run_id=name,
        separate_process=True,
        run=made(RunOptions, {"sample": False, "max_restarts": max_restarts, "accept_changes": accept_changes}),
    )
    with warnings.catch_warnings():
        ignore_library_warnings()
        sys.stdout.flush()  # the ranks write to the same file
        code = start(loaded, paths, options, (lambda _line: None) if quiet else say)
    run = Run(RunFiles.of(paths.runs_dir, loaded.name, name).path, paths.data_dir)
    outcomes: dict[int, Outcome] = {ExitCode.DONE: "finished", ExitCode.REQUEUE: "saved"}
    return TrainResult(run, outcomes.get(code, "failed"), code, _final(run))


def open_run(name: str | Path, *, runs_dir: str | Path | None = None, data_dir: str | Path | None = None) -> Run:
    """Open a finished or running run.

    Args:
        name: run directory, recipe/run-id, run id, or recipe name (its newest run).
        runs_dir: default: `LLMRECIPES_RUNS`, else `runs`.
        data_dir: where its prepared data is, for `Run.generate`; default: `LLMRECIPES_DATA`, else `data`.

    Raises:
        UserError: there is no such run, or several have that run id.
    """
    from llmrecipes import rundir

    run = rundir.Run.find(str(name), directory(runs_dir, RUNS_VARIABLE, RUNS_DIR))
    return Run(run.path, directory(data_dir, DATA_VARIABLE, DATA_DIR))


def say(line: str) -> None:
    """Print a line of progress."""
    print(redact(line), flush=True)  # a library leaves the streams of its caller as they are


def _recipe(recipe: Recipe | str | Path) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe)


def directory(chosen: str | Path | None, variable: str, default: Path) -> Path:
    """The chosen directory, else that of its environment variable, else its default."""
    return Path(os.environ.get(variable) or default) if chosen is None else Path(chosen)


def _final(run: Run) -> dict[str, Any]:
    steps, evaluations = run.records("steps"), run.records("evaluations")
    if not steps:
        return {}
    return steps[-1] | {key: value for key, value in (evaluations or [{}])[-1].items() if key.startswith("valid_")}
