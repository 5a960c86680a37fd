"""`llmrecipes rerun`: a bundle's run trained again on this machine, what differs here, and whether the losses do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmrecipes.bundle.archive import Bundle, opened, refused
from llmrecipes.bundle.bundle_options import RerunOptions
from llmrecipes.bundle.make import DATA, DIFF, FACTS, FORMAT
from llmrecipes.commandline import command_line
from llmrecipes.data.folder.data_manifest import DataManifest
from llmrecipes.data.folder.prepared import fingerprint, open_prepared
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.files import checkout
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import default_world_size
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe, Tracking
from llmrecipes.recipe.sections.source import PathSource
from llmrecipes.report.machine_sections import flat
from llmrecipes.rundir import Run
from llmrecipes.runfiles import ENVIRONMENT, METRICS, PLAN, RECIPE, checked_run_id
from llmrecipes.tracking.jsonl import parse
from llmrecipes.tracking.run_environment import PACKAGES, capture
from llmrecipes.untrusted import RECORD, Refused, lines, number, parse_json
from llmrecipes.workflow.run import Log, Paths, TrainOptions, is_prepared, plan_run, prepare_data
from llmrecipes.workflow.train import train

COMPARED = ("python", *(f"packages.{name}" for name in PACKAGES), "cpu", "cores.usable", "git.commit", "git.dirty")
KEPT = ("mlflow", "tensorboard", "loss_by_source", "layers_interval")
"""Keys of `tracking` that a rerun takes from the bundle: the others send what it reports to places of another user."""
TOKENS = (".bin", ".idx", ".answers")


Losses = Mapping[tuple[str, int], float | None]
"""Losses by `train` or `valid` and step; None: not finite."""


def losses_of(metrics: Iterable[bytes]) -> Losses:
    """Losses of the lines of metrics.jsonl."""
    records = [record for record in map(parse, metrics) if record is not None]
    kinds = (("train", "loss"), ("valid", "valid_loss"))
    return {(kind, each["step"]): number(each[key]) for each in records for kind, key in kinds if key in each}


@dataclass(frozen=True)
class LossComparison:
    """Losses of a rerun beside those of its bundle.

    Attributes:
        steps: of the bundle.
        done: of them, those that the rerun has trained.
        first: kind and step of the first losses that differ; None: all are equal to the last bit.
        then, now: these losses.
        worst: largest relative difference of all steps and evaluations; infinite if one of two is not finite.
    """

    steps: int
    done: int
    first: tuple[str, int] | None
    then: float | None
    now: float | None
    worst: float

    @classmethod
    def of(cls, then: Losses, now: Losses) -> LossComparison:
        """Compare what both have."""
        common = sorted(then.keys() & now.keys(), key=lambda key: (key[1], key[0]))
        parted = {key: _relative(then[key], now[key]) for key in common}
        first = next((key for key, difference in parted.items() if difference), None)
        values = (None, None) if first is None else (then[first], now[first])
        steps, done = (sum(kind == "train" for kind, _ in keys) for keys in (then, common))
        return cls(steps, done, first, *values, max(parted.values(), default=0.0))

    @property
    def digits(self) -> int | None:
        """To how many decimal digits all losses agree; None: to the last bit."""
        if not self.worst:
            return None
        return 0 if self.worst >= 1 else math.floor(-math.log10(self.worst))

    def text(self) -> str:
        """For people."""
        of = f"losses of {self.done:,} steps" if self.done == self.steps else f"{self.done:,} of {self.steps:,} losses"
        if self.first is None:
            return f"{of}: equal to the last bit"
        kind, step = self.first
        part = f"they part at step {step:,} ({kind}: {self.then!r}, now {self.now!r})"
        return f"{of}: equal to {self.digits} digits, relative difference at most {self.worst:.1e}; {part}"


def _relative(then: float | None, now: float | None) -> float:
    if then == now:
        return 0.0
    return math.inf if then is None or now is None else abs(now - then) / (abs(then) or 1.0)


@dataclass(frozen=True)
class Prepared:
    """A rerun that can start.

    Attributes:
        differences: what is otherwise on this machine, by name: value of the bundle, and here.
        data: how the data compares, in words.
    """

    recipe: Recipe
    ranks: int
    losses: Losses
    stop_after: int | None
    differences: dict[str, tuple[str, str]]
    data: str


@dataclass(frozen=True)
class RerunResult:
    """What a rerun has shown; `losses` is None with `--check`."""

    differences: dict[str, tuple[str, str]]
    data: str
    run: str | None
    losses: LossComparison | None
    exit_code: int

    def as_dict(self) -> dict[str, Any]:
        """JSON values; an infinite difference is null."""
        losses = None
        if self.losses is not None:
            worst = self.losses.worst
            losses = {**asdict(self.losses), "worst": worst if math.isfinite(worst) else None}
            losses["digits"] = self.losses.digits
        return {**asdict(self), "losses": losses}


def prepare(path: Path, options: RerunOptions, nproc: int | None, paths: Paths, log: Log) -> Prepared:
    """Open a bundle and compare it with this machine; prepare the data, unless `options.check`.

    Args:
        nproc: ranks; None: those of the bundle if this machine has as many GPUs (or cores), else as for `train`.

    Raises:
        UserError: the file is not a valid bundle, or of a newer version; the recipe cannot run here, or does not
            describe the run; prepared data is damaged, or its source is missing.
    """
    with opened(path) as bundle:
        facts = _json(bundle, FACTS)
        if facts.get("format") != FORMAT:
            raise Refused(
                f"has the format {str(facts.get('format'))[:20]}",
                where=str(path),
                rule=f"this version of llmrecipes reads format {FORMAT}",
                fix="use the version that wrote it",
            )
        if (origin := facts.get("weights_from")) is not None:
            raise UserError(
                f"its weights are from another run ({str(origin)[:40]})",
                where=str(path),
                rule="a rerun begins with the weights of the recipe, as train does",
                fix="bundle the run with --checkpoint, and compare by hand",
            )
        recipe = _here(_recipe(bundle), options.data)
        losses = losses_of(bundle.lines(METRICS))
        plan, environment = _json(bundle, PLAN), _json(bundle, ENVIRONMENT)
        manifest = _manifest(bundle)
        diff = bundle.read(DIFF).decode("utf-8", "replace") if DIFF in bundle.names else None
    then, cluster = int(number(plan.get("world_size")) or 0), detect()
    has_room = 1 <= then <= (len(cluster.gpus) or cluster.cpu_cores)
    ranks = nproc or (then if has_room else default_world_size(recipe, cluster))
    plan_run(recipe, cluster, ranks)
    machine = capture(checkout())
    differences = dict(_differing(environment, machine))
    if diff != (diff_here := (machine["git"] or {}).get("diff")):
        differences[DIFF] = (_lines(diff), _lines(diff_here))
    if then != ranks:
        differences["ranks"] = (str(then or "unknown"), str(ranks))
    if not options.check:
        prepare_data(recipe, paths.data_dir, log)
    steps = max((step for kind, step in losses if kind == "train"), default=0)
    stop_after = steps if steps < recipe.train.train_iters and not facts.get("ended_by") else None
    return Prepared(recipe, ranks, losses, stop_after, differences, _data(recipe, manifest, path, paths, log))


def rerun(ready: Prepared, options: RerunOptions, train_options: TrainOptions, paths: Paths, log: Log) -> RerunResult:
    """Train, unless `options.check`, and compare the losses.

    Raises:
        UserError: as `train`.
    """
    if train_options.run.overfit_batch:
        raise UserError("trains another recipe", where="--overfit-batch", fix="leave it out")
    if options.check:
        return RerunResult(ready.differences, ready.data, None, None, ExitCode.DONE)
    run_id = checked_run_id(train_options.run_id)
    chosen = replace(train_options, nproc=ready.ranks, run_id=run_id, stop_after=ready.stop_after)
    code = train(ready.recipe, paths, chosen, log)
    run = Run.of(paths.runs_dir, ready.recipe.name, run_id)
    trained = lines(run.metrics, root=run.path) if run.metrics.exists() else ()
    compared = LossComparison.of(ready.losses, losses_of(trained))
    complete = compared.done == compared.steps
    if code == ExitCode.DONE or (complete and code == ExitCode.REQUEUE):
        code = int(ExitCode.DONE if complete and compared.worst <= options.tolerance else 1)
    return RerunResult(ready.differences, ready.data, run.name, compared, code)


def _json(bundle: Bundle, name: str) -> dict[str, Any]:
    values = parse_json(bundle.read(name), f"{bundle.path}: {name}") if name in bundle.names else {}
    if not isinstance(values, dict) or (name == FACTS and not values):
        raise refused(bundle.path, f"has no {name} that can be read")
    return values


def _recipe(bundle: Bundle) -> Recipe:
    with TemporaryDirectory() as folder:
        path = Path(folder) / RECIPE
        path.write_bytes(bundle.read(RECIPE, RECORD))
        try:
            return load(str(path)).recipe
        except UserError as error:
            raise UserError(error.what, where=f"{bundle.path}: {RECIPE}", rule=error.rule, fix=error.fix) from error


def _here(recipe: Recipe, data: Path | None) -> Recipe:
    """The recipe without what names places of another machine; its source at another path."""
    tracking = Tracking(**{key: getattr(recipe.tracking, key) for key in KEPT})
    checkpoint = recipe.checkpoint.of_short_run(recipe.checkpoint.save_interval)
    recipe = recipe.model_copy(update={"tracking": tracking, "checkpoint": checkpoint})
    if data is None:
        return recipe
    places = [place for place, source in enumerate(recipe.data.sources) if isinstance(source, PathSource)]
    if len(places) != 1:
        raise UserError(
            f"{len(places)} sources have a path",
            where="--data",
            rule="it replaces the path of the only one",
            fix="leave it out",
        )
    sources = list(recipe.data.sources)
    sources[places[0]] = sources[places[0]].model_copy(update={"path": str(data)})
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"sources": tuple(sources)})})


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """What differs and may change a loss."""
    before, here = dict(flat(then)), dict(flat(now))
    for values in (before, here):
        names = [value for key, value in values.items() if key.startswith("gpus.") and key.endswith(".name")]
        values["gpus"] = f"{len(names)} × {names[0]}" if names else "none"
    for key in (*COMPARED, "gpus"):
        if (old := before.get(key, "unknown")) != (new := here.get(key, "unknown")):
            yield key.removeprefix("packages."), (_printable(old), _printable(new))
    others = [key for key in before if key.startswith("packages.") and key not in COMPARED]
    if changed := sum(before[key] != here.get(key) for key in others):
        yield "other packages", (f"{len(others)}, in packages.txt", f"{changed} of them differ")


def _lines(text: str | None) -> str:
    return "none" if text is None else f"{text.count(chr(10)):,} lines"


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)[:60]


def _manifest(bundle: Bundle) -> DataManifest | None:
    if DATA not in bundle.names:
        return None
    try:
        return DataManifest.model_validate_json(bundle.read(DATA))
    except ValueError as error:
        raise refused(bundle.path, f"has a {DATA} that cannot be read") from error


def _data(recipe: Recipe, then: DataManifest | None, path: Path, paths: Paths, log: Log) -> str:
    if not is_prepared(recipe, paths.data_dir):
        again = command_line("rerun", path, data_dir=paths.data_dir)
        sources = ", ".join(source.location or source.type for source in recipe.data.sources)
        return f"not prepared in {paths.data_dir / fingerprint(recipe)}; {again} prepares it from {sources}"
    prepared = open_prepared(recipe, paths.data_dir)
    if then is None:
        return "unknown: the bundle does not describe its data"
    now = prepared.manifest
    prepared.check([name for name in now.files if name.endswith(TOKENS)], log)
    before, here = _tokens(then), _tokens(now)
    changed = sorted(name for name in before.keys() | here.keys() if before.get(name) != here.get(name))
    if changed:
        return f"different: {', '.join(changed[:5])}{', …' if len(changed) > 5 else ''}"
    return f"equal: {now.counts('train').tokens:,} training tokens"


def _tokens(manifest: DataManifest) -> dict[str, str]:
    files = {name: file.sha256 for name, file in manifest.files.items() if name.endswith(TOKENS)}
    return {**files, "tokenizer": manifest.tokenizer.sha256}
