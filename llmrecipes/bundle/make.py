"""`llmrecipes bundle`: what somebody else needs to look at a run or to train it again, in one file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmrecipes import __version__, untrusted
from llmrecipes.bundle.archive import BundleWriter, written
from llmrecipes.bundle.bundle_options import BundleOptions
from llmrecipes.checkpoint.manifest import MANIFEST_NAME, Entry, dump
from llmrecipes.checkpoint.remote import folder_of
from llmrecipes.data.folder import data_manifest
from llmrecipes.data.folder.prepared import held_out_text, open_prepared
from llmrecipes.errors import UserError
from llmrecipes.recipe.load import recipe_hash, short, to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.redact import redact, redacted
from llmrecipes.report import run_page
from llmrecipes.report.material import Material
from llmrecipes.rundir import Run
from llmrecipes.runfiles import CHECKPOINTS, ENVIRONMENT, EVALUATIONS, METRICS, PLAN, RECIPE, STATUS
from llmrecipes.tracking.jsonl import parse
from llmrecipes.units import MIB
from llmrecipes.workflow.model_source import find_checkpoint

FORMAT = 1
FACTS, SHORT, PACKAGES, DIFF = "bundle.json", "recipe-short.yaml", "packages.txt", "code.diff"
DATA, SAMPLE = "data/manifest.json", "data/sample.txt"
MOST_SAMPLE = 4096
"""Bytes of the sample, which has at most a tenth of the held-out text."""
PRIVATE = ("pid", "pid_ticks", "host", "boot_id", "pid_namespace")
"""Values of status.json that are about processes of one machine."""


@dataclass(frozen=True)
class Bundled:
    """A bundle that was written.

    Attributes:
        steps: the last one that the run has logged.
        checkpoint: step of that in the bundle; None: there is none in it.
        copy: URL of the copy of that checkpoint, or of the newest (`checkpoint.copy_to`); None: there is none.
        members: names in their order, without the list of their hashes.
        absent: what the run does not have, and why.
    """

    path: str
    run: str
    steps: int
    checkpoint: int | None
    copy: str | None
    members: tuple[str, ...]
    absent: tuple[str, ...]
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def bundle(run: Run, options: BundleOptions, data_dir: Path) -> Bundled:
    """Write a bundle; of a run that still trains, until its last logged step.

    Everything in it is redacted, and the environment has only variables that `run_environment` records.

    Raises:
        UserError: the run has no step, or no such checkpoint; its recipe is corrupt, or a file of the checkpoint; the
            file exists or cannot be written.
    """
    run = Run(run.path.resolve())  # the page has its path
    recipe = run.recipe()
    chosen = _chosen(run, options.checkpoint)
    newest = chosen or run.newest()
    to = recipe.checkpoint.copy_to
    copy = None if to is None or newest is None else redact(f"{to.rstrip('/')}/{run.name}/{folder_of(newest.path)}")
    path = options.out or Path(f"{run.recipe_name}-{run.run_id}.bundle.tar")
    metrics = Metrics(run)
    absent: list[str] = []
    with written(path, force=options.force) as writer:
        writer.add(RECIPE, [redact(to_yaml(recipe)).encode()])
        writer.add(SHORT, [redact(short(recipe)).encode()])
        _add_documents(writer, run, absent)
        writer.add(METRICS, metrics)
        if not metrics.steps:
            raise UserError("no step is recorded", where=str(run.metrics), rule="a bundle has a run's losses")
        _add_data(writer, recipe, data_dir, absent, sample=options.sample)
        writer.add("report.html", [_page(run, data_dir).encode("utf-8", "replace")])
        if chosen is not None:
            _add_checkpoint(writer, chosen)
        facts = {
            "format": FORMAT,
            "run": run.name,
            "recipe_hash": recipe_hash(recipe),
            "llmrecipes": __version__,
            "state": run.summary().state,
            "steps": metrics.steps,
            "ended_by": run.status().get("ended_by"),
            "weights_from": _origin(run),
            "checkpoint": None if chosen is None else chosen.step,
            "copy": copy,
        }
        writer.add(FACTS, [_json(facts)])
    step = None if chosen is None else chosen.step
    size = path.stat().st_size
    return Bundled(str(path), run.name, metrics.steps, step, copy, tuple(writer.sums)[:-1], tuple(absent), size)


class Metrics:
    """The whole lines of metrics.jsonl; `steps` is the last step, once they were read."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.steps = 0

    def __iter__(self) -> Iterator[bytes]:
        try:
            for line in untrusted.lines(self._run.metrics, root=self._run.path):
                record = parse(line)
                if record is None or not line.endswith(b"\n"):
                    continue
                if "loss" in record:
                    self.steps = record["step"]
                if "event" in record and (hidden := redacted(record)) != record:
                    line = json.dumps(hidden).encode() + b"\n"
                yield line
        except FileNotFoundError:  # no step yet
            return


def _chosen(run: Run, which: str) -> Entry | None:
    if which == "none":
        return None
    if which not in ("last", "best") and not which.isdecimal():
        raise UserError(f"{which!r}", where="--checkpoint", rule="must be none, last, best or a step")
    return find_checkpoint(str(run.path) if which == "last" else f"{run.path}@{which}", run.runs_dir)[1]


def _json(values: Any) -> bytes:
    return json.dumps(values, indent=2).encode() + b"\n"


def _add_documents(writer: BundleWriter, run: Run, absent: list[str]) -> None:
    """What a start has recorded, and what the run's state and evaluations are."""
    status = {key: value for key, value in run.status().items() if key not in PRIVATE}
    writer.add(STATUS, [_json(redacted(status))])
    for name in (PLAN, ENVIRONMENT):
        try:
            values = redacted(untrusted.read_json(run.path / name, root=run.path))
        except (OSError, ValueError) as error:
            absent.append(f"{name}: {getattr(error, 'what', error)}")
            continue
        if name == ENVIRONMENT:
            _add_lock_and_diff(writer, values, absent)
        writer.add(name, [_json(values)])
    with suppress(OSError):
        evaluations = untrusted.read(run.evaluations, root=run.path).decode("utf-8", "replace")
        writer.add(EVALUATIONS, [redact(evaluations).encode()])


def _add_lock_and_diff(writer: BundleWriter, environment: dict[str, Any], absent: list[str]) -> None:
    """Files of their own, for what reads such; without the diff, `environment` has the rest."""
    versions = sorted((environment.get("packages") or {}).items())
    writer.add(PACKAGES, ["".join(f"{name}=={version}\n" for name, version in versions if version).encode()])
    git = environment.get("git") or {}
    diff = git.pop("diff", None)
    if diff is not None:
        writer.add(DIFF, [diff.encode()])
    elif git.get("dirty"):
        absent.append(f"{DIFF}: the code differed from its commit, by too much or before this was recorded")


def _add_data(writer: BundleWriter, recipe: Recipe, data_dir: Path, absent: list[str], *, sample: bool) -> None:
    try:
        prepared = open_prepared(recipe, data_dir)
    except UserError as error:
        absent.append(f"{DATA}: {error.what}; {error.where}")
        return
    manifest = untrusted.read_json(prepared.path / data_manifest.NAME, root=prepared.path)
    writer.add(DATA, [_json(redacted(manifest))])
    held = prepared.manifest.held_out.get("valid")
    if sample and held is not None:
        text = held_out_text(prepared, max_bytes=min(MOST_SAMPLE, held.bytes // 10))
        writer.add(SAMPLE, [redact(text.decode("utf-8", "ignore")).encode()])


def _page(run: Run, data_dir: Path) -> str:
    """The report, which does not depend on the time: it was written when the run has last said something."""
    material = Material.read(run, data_dir)
    material.now = material.summary.updated or 0.0
    return run_page.page(material)


def _origin(run: Run) -> str | None:
    """What made the weights that the run began with, such as `upcycled`; None: they are those of the recipe."""
    for path in sorted(run.path.glob("*.json")):
        with suppress(OSError, ValueError):
            values = untrusted.read_json(path, root=run.path)
            if isinstance(values, dict) and "run_dir" in values:  # as `models.create.create_run` records it
                return path.stem
    return None


def _add_checkpoint(writer: BundleWriter, entry: Entry) -> None:
    """The files of a checkpoint, whose manifest is the first, with its recipe redacted."""
    folder = f"{CHECKPOINTS}/{entry.path.name}"
    recipe = redacted(entry.manifest.recipe)
    changed = recipe != entry.manifest.recipe
    try:
        manifest = untrusted.read(entry.path / MANIFEST_NAME, root=entry.path)
        if changed:
            manifest = dump(entry.manifest.model_copy(update={"recipe": recipe}))
        writer.add(f"{folder}/{MANIFEST_NAME}", [manifest])
        for name, record in sorted(entry.manifest.files.items()):
            if writer.add(f"{folder}/{name}", _pieces(entry.path / name, entry.path)) != record.sha256:
                raise UserError("is damaged: its hash is not that of the manifest", where=str(entry.path / name))
    except FileNotFoundError as error:
        rule = "a run that still trains deletes its older checkpoints"
        raise UserError("is gone", where=str(error.filename), rule=rule, fix="the same command again") from error


def _pieces(path: Path, root: Path) -> Iterator[bytes]:
    with untrusted.open_file(path, root=root) as stream:
        while piece := stream.read(MIB):
            yield piece
