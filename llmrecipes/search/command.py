"""`llmrecipes search`: opens the study, runs its trials, prints the result; and optuna-dashboard, on localhost only."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any, TextIO

from llmrecipes.commandline import command_line
from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.packages import find_spec
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.web import HOST, reserved, started, until_interrupted

if TYPE_CHECKING:
    from llmrecipes.search.target import Target


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchResult:
    """How a search has ended, as far as this process knows.

    Attributes:
        study: its name.
        storage: where it is, without password.
        folder: with the best recipe and the report.
        code: 0, or 75 if it was stopped by a signal.
        trials: how many trials have ended, by outcome.
        best: number, values of the objectives and values of the keys of each best trial.
        recipes: files with their recipes.
    """

    study: str
    storage: str
    folder: Path
    code: ExitCode
    trials: dict[str, int]
    best: list[dict[str, Any]]
    recipes: list[Path]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "study": self.study,
            "storage": self.storage,
            "folder": str(self.folder),
            "exit_code": int(self.code),
            "trials": self.trials,
            "best": self.best,
            "recipes": [str(path) for path in self.recipes],
        }


def require_library(recipe: Recipe, *more: str) -> None:
    """Refuse a search without the packages of the extra that it needs.

    Args:
        recipe: recipe of the search.
        more: packages that are needed besides Optuna and what the recipe names.

    Raises:
        UserError: one is missing.
    """
    needed = ["optuna", *more]
    if recipe.search is not None and recipe.search.sampler.type == "CmaEsSampler":
        needed.append("cmaes")
    if recipe.search is not None and (recipe.search.storage or "").startswith("postgresql"):
        needed.append("psycopg2")
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} is not installed",
            where="search",
            rule="searches need packages of an extra",
            fix="make setup in the checkout, or pip install 'llmrecipes[search,server]'",
        )


def quiet() -> None:
    """Optuna logs as this program does, also what it warns of, and does not warn that its features are new."""
    import optuna

    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    if not isinstance(warnings.showwarning, _LoggedWarnings):
        warnings.showwarning = _LoggedWarnings(Path(optuna.__file__).parent, warnings.showwarning)


class _LoggedWarnings:
    """Shows warnings of Optuna as lines of the log, each text once, instead of as lines of source code.

    Args:
        library: folder of Optuna.
        others: shows all other warnings.
    """

    def __init__(self, library: Path, others: Callable[..., None]) -> None:
        self._library = str(library)
        self._others = others
        self._seen: set[str] = set()

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        # Optuna attributes its warnings to its caller: the file name says nothing.
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename in (__file__, warnings.__file__):
            frame = frame.f_back
        if frame is None or not frame.f_code.co_filename.startswith(self._library):
            self._others(message, category, filename, lineno, file, line)
        elif str(message) not in self._seen:
            self._seen.add(str(message))
            logger.warning("optuna: %s", message)


def search(
    recipe: Recipe,
    make_target: Callable[[], Target],
    *,
    resume: bool,
    log: Callable[[str], None],
    goal: Recipe | None = None,
    overrides: Sequence[str] = (),
) -> SearchResult:
    """Search, or continue a search, until a limit is reached or a signal arrives.

    Args:
        recipe: with the section `search`.
        make_target: makes the target of the trials.
        resume: continue a study that exists.
        log: receives a line for each event.
        goal: recipe that the best values are for, if `recipe` is its proxy.
        overrides: with which the recipe was loaded; the study keeps them.

    Raises:
        UserError: the study cannot be opened, trials fail one after another, or the storage does not respond.
    """
    require_library(recipe)
    quiet()
    from llmrecipes.search.best import Keeper
    from llmrecipes.search.study import open_study, place_of, require_section
    from llmrecipes.search.tracking import StudyTracker
    from llmrecipes.search.worker import Worker
    from llmrecipes.workflow.run import prepare_data

    section = require_section(recipe)
    target = make_target()
    if target.is_local:
        require_packages(recipe)
    place = place_of(recipe, section, target.paths.runs_dir)
    study = open_study(recipe, place, resume=resume, overrides=overrides, log=log)
    if target.is_local:
        prepare_data(recipe, target.paths.data_dir, log)  # once, rather than in the first trials
        _require_validation(recipe, target.paths.data_dir)
    keeper = Keeper(goal or recipe, place)
    tracker = StudyTracker.open(study, recipe, place, target.launcher_options.get("tracking-uri"))
    code = ExitCode.REQUEUE
    try:
        code = Worker(study, recipe, place, target, log, keeper, tracker).run()
    finally:
        tracker.close(finished=code == ExitCode.DONE, files=keeper.files())
    return result_of(recipe, study, keeper, code)


def _require_validation(recipe: Recipe, data_dir: Path) -> None:
    """Refuse data without a validation split, before anything trains on it.

    Raises:
        UserError: no source has a sequence of it, because there is too little text.
    """
    from llmrecipes.data.folder.prepared import open_prepared

    prepared = open_prepared(recipe, data_dir)
    if prepared.usable("valid", recipe.model.seq_length):
        return
    raise UserError(
        f"the validation split has less than one sequence of {recipe.model.seq_length} tokens",
        where="data.split",
        rule="trials are compared by their validation loss",
        fix="more text in data.sources, or a larger share, such as data.split: [90, 9, 1]",
    )


def earlier_overrides(recipe: Recipe, runs_dir: Path) -> list[str]:
    """The overrides that a study was last searched with; none if there is no such study.

    Args:
        recipe: with the section `search`.
        runs_dir: runs directory of the study.

    Raises:
        UserError: its storage does not respond.
    """
    require_library(recipe)
    quiet()
    from llmrecipes.search import storage
    from llmrecipes.search.study import OVERRIDES, load, place_of, require_section

    section = require_section(recipe)
    place = place_of(recipe, section, runs_dir)
    where = storage.address(section, place.folder)
    if (file := storage.file_of(where)) is not None and not file.is_file():
        return []
    kept = storage.open_storage(where, section)
    if place.name not in storage.with_retries(
        lambda: [summary.study_name for summary in kept.get_all_studies()], where
    ):
        return []
    study = load(recipe, place)
    return [str(override) for override in storage.with_retries(lambda: study.user_attrs, where).get(OVERRIDES, ())]


def report(recipe: Recipe, runs_dir: Path, data_dir: Path) -> Path:
    """Write the report of a study, and return its path.

    Args:
        recipe: with the section `search`.
        runs_dir, data_dir: directories of the study, and for the command that trains its best recipe.

    Raises:
        UserError: there is no such study, or it cannot be written.
    """
    require_library(recipe, "plotly")
    quiet()
    from llmrecipes.search.best import Keeper
    from llmrecipes.search.study import load, place_of, require_section
    from llmrecipes.search.study_report import write_report

    place = place_of(recipe, require_section(recipe), runs_dir)
    study = load(recipe, place)
    path = place.folder / "report.html"
    commands = [
        command_line("train", file, runs_dir=runs_dir, data_dir=data_dir) for file in Keeper(recipe, place).files()
    ]
    try:
        write_report(study, recipe, path, commands, place)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=str(path), fix="--runs-dir DIR") from error
    return path


def show(recipe: Recipe, runs_dir: Path, port: int) -> None:
    """Show a study in optuna-dashboard until Ctrl-C.

    Raises:
        UserError: there is no such study, or the dashboard does not start.
    """
    require_library(recipe, "optuna_dashboard")
    quiet()
    from llmrecipes.search.storage import address
    from llmrecipes.search.study import load, place_of, require_section

    section = require_section(recipe)
    place = place_of(recipe, section, runs_dir)
    study = load(recipe, place)
    serve(address(section, place.folder), study._study_id, port)


def result_of(recipe: Recipe, study: Any, keeper: Any, code: ExitCode) -> SearchResult:
    """Results of a study up to now."""
    from collections import Counter

    from llmrecipes.search.best import best_trials
    from llmrecipes.search.space import values_of
    from llmrecipes.search.storage import address
    from llmrecipes.search.study import require_section
    from llmrecipes.search.trials import STANDARD_ERRORS, own_trials
    from llmrecipes.tracking.mlflow.database import redact

    section = require_section(recipe)
    best = [
        {
            "number": trial.number,
            **dict(zip(section.objectives, trial.values, strict=True)),
            "values": values_of(trial.params, section),
            **({"standard_errors": errors} if (errors := trial.user_attrs.get(STANDARD_ERRORS)) else {}),
        }
        for trial in best_trials(study)
    ]
    counts = Counter(str(trial.user_attrs.get("outcome", trial.state.name.lower())) for trial in own_trials(study))
    where = address(section, keeper.place.folder)
    return SearchResult(
        study.study_name,
        redact(where) if "://" in where else where,
        keeper.place.folder,
        code,
        dict(counts),
        best,
        keeper.files(),
    )


NAME = "optuna-dashboard"
# As optuna-dashboard starts itself, without a line for each request.
SCRIPT = """
import sys, bottle, optuna_dashboard
bottle.run(optuna_dashboard.wsgi(sys.argv[1]), host=sys.argv[2], port=int(sys.argv[3]), quiet=True)
"""


@contextmanager
def server(place: str, port: int) -> Iterator[tuple[str, Popen[bytes]]]:
    """A running dashboard; yields its address and process once it responds, stops it at the end.

    Args:
        place: URL of the storage, or path of a journal file.
        port: port of the dashboard, if it is free.

    Raises:
        UserError: it does not start.
    """
    from llmrecipes.search.storage import url_with_driver

    storage = url_with_driver(place) if "://" in place else place
    with reserved(port) as port:
        command = [sys.executable, "-c", SCRIPT, storage, HOST, str(port)]
        with started(NAME, command, port, "/api/studies", os.environ) as process:
            yield f"http://{HOST}:{port}", process


def serve(place: str, study_id: int, port: int = 8080) -> None:
    """Show a study until Ctrl-C.

    Args:
        place: URL of the storage, or path of a journal file.
        study_id: id of the study in its storage, which may have many.
        port: port of the dashboard, if it is free.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a signal ends the server, not a search
        signal.signal(number, signal.default_int_handler)
    with server(place, port) as (address, process):
        print(
            f"optuna-dashboard shows the study at {address}/dashboard/studies/{study_id} (Ctrl-C stops it)", flush=True
        )
        until_interrupted(NAME, process)
