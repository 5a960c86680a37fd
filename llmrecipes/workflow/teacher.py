"""The frozen model that a run names (`distill.teacher`, `dpo.reference`), checked before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.io import write_atomic
from llmrecipes.recipe.rules.distill_rules import NOT_COMPARED, OF_TEACHERS, SHARED, differing
from llmrecipes.recipe.rules.preference_rules import frozen_model, named
from llmrecipes.recipe.schema import Model, Recipe
from llmrecipes.recipe.sections.tokenizer_section import HuggingFaceTokenizer
from llmrecipes.rundir import Run
from llmrecipes.runfiles import run_of
from llmrecipes.train.spec import RankSpec, RunSpec
from llmrecipes.untrusted import RECORD as MOST
from llmrecipes.untrusted import read_json
from llmrecipes.workflow.model_source import find_checkpoint
from llmrecipes.workflow.run import Log

if TYPE_CHECKING:
    from llmrecipes.data.tokens.tokenizer import TextTokenizer

RECORD = "teacher.json"
SHOWN = 3
"""Differing tokens that a message has."""


def named_model(recipe: Recipe) -> str | None:
    """The value of the key that names a frozen model."""
    if named(recipe) is None:
        return None
    if recipe.distill is not None:
        return recipe.distill.teacher
    return None if recipe.dpo is None else recipe.dpo.reference


def with_teacher(spec: RunSpec, log: Log) -> RunSpec:
    """The spec of a run with the folder of its teacher: a checkpoint, or a model in Hugging Face's form.

    Raises:
        UserError: there is no such teacher, or it is another model than the recipe says.
    """
    reference = named_model(spec.recipe)
    key = named(spec.recipe)
    if reference is None or key is None:
        return spec
    try:
        path = _recorded(spec) or located(reference, spec.runs_dir, key)
        require_fit(path, spec.recipe)
    except UserError:
        spec.run.remove_if_empty()
        raise
    log(f"{key}: {path}")
    return spec.model_copy(update={"teacher": path})


def record_teacher(spec: RunSpec) -> None:
    """Check that every token id has the same meaning for teacher and student, and record the teacher: a run that is
    started again learns from the same weights although its teacher has trained on.

    Args:
        spec: spec of a run whose data is prepared.

    Raises:
        UserError: ids differ; the message has some.
    """
    reference = named_model(spec.recipe)
    if spec.teacher is None or reference is None:
        return
    try:
        require_same_tokens(spec, spec.teacher)
    except UserError:
        spec.run.remove_if_empty()
        raise
    record = {"teacher": reference, "path": str(spec.teacher)}
    write_atomic(spec.run_dir / RECORD, json.dumps(record, indent=2) + "\n")


def require_same_tokens(spec: RankSpec, path: Path) -> None:
    """Refuse a frozen model to which token ids mean something else than in the prepared data.

    Raises:
        UserError: ids differ; the message has some.
    """
    from llmrecipes.data.folder.prepared import open_prepared

    student = open_prepared(spec.recipe, spec.data_dir).tokenizer().backend.get_vocab(with_added_tokens=True)
    teacher = _vocabulary(spec, path)
    if teacher is None or teacher == student:
        return
    tokens = {number: token for token, number in student.items()}
    others = {number: token for token, number in teacher.items()}
    apart = sorted(number for number in tokens.keys() | others.keys() if tokens.get(number) != others.get(number))
    some = "; ".join(
        f"{number} is {others.get(number, 'no token')!r} to it, {tokens.get(number, 'no token')!r} here"
        for number in apart[:SHOWN]
    )
    raise UserError(
        f"{len(apart)} of {len(tokens.keys() | others.keys())} token ids differ: {some}",
        where=f"{named(spec.recipe)}: {named_model(spec.recipe)}",
        rule="both models are compared token by token, so they must share a tokenizer",
        fix="use the data.tokenizer of that model (for a folder: type huggingface, path FOLDER), or another model",
    )


def _recorded(spec: RunSpec) -> Path | None:
    if spec.from_scratch:
        return None
    try:
        record: dict[str, Any] = read_json(spec.run_dir / RECORD, root=spec.run_dir, most=MOST)
    except (OSError, ValueError):
        return None
    known = record.get("teacher") == named_model(spec.recipe) and isinstance(record.get("path"), str)
    path = Path(record["path"]) if known else None
    if path is not None and not path.is_dir():
        raise UserError(
            "no longer exists",
            where=str(path),
            rule="a restarted run must use the same weights",
            fix="restore it, or start a new run",
        )
    return path


def located(reference: str, runs_dir: Path, key: str = "distill.teacher") -> Path:
    """The checkpoint, or the folder in Hugging Face's form, that the value of a key names.

    Raises:
        UserError: there is none.
    """
    if (Path(reference) / "config.json").is_file():
        return Path(reference).absolute()
    where = f"{key}: {reference}"
    rule = "a run, a folder with config.json, or a name on the Hub"
    try:
        _, entry = find_checkpoint(reference, runs_dir)
    except UserError as no_run:
        if "/" not in reference or Path(reference).exists() or (runs_dir / reference).exists():
            raise UserError(no_run.what, where=where, rule=no_run.rule, fix=no_run.fix, code=no_run.code) from no_run
        from llmrecipes.hf.reading import resolve

        try:
            return resolve(reference).path.absolute()
        except UserError as no_model:
            raise UserError(
                f"no run ({no_run.what}) and no model ({no_model.what})", where=where, rule=rule
            ) from no_model
    return entry.path.absolute()


def require_fit(path: Path, recipe: Recipe) -> None:
    """Refuse a teacher of another shape than `distill.model` says, or a reference of another than `model`."""
    expected = frozen_model(recipe)
    run = run_of_teacher(path)
    if run is None:
        from llmrecipes.hf.weights import open_weights

        open_weights(path, expected).close()
        return
    recorded = run.recipe()
    key = named(recipe)
    where = f"{key}: {named_model(recipe)}"
    if recorded.lora is not None:
        raise UserError(
            "this run trained only adapters",
            where=where,
            rule="a frozen model needs complete weights",
            fix=f"llmrecipes export RUN --merge-adapter, then set {key} to the folder",
        )
    if wrong := [key for key in SHARED if getattr(recorded.model, key) != getattr(recipe.model, key)]:
        raise UserError(
            ", ".join(f"{getattr(recorded.model, key)} in its model.{key}" for key in wrong),
            where=where,
            rule="both models must read and predict the same tokens",
            fix=" ".join(f"model.{key}={getattr(recorded.model, key)}" for key in wrong),
        )
    if plain(recorded.model) != plain(expected) and recipe.distill is None:
        raise UserError(
            f"its model differs: {json.dumps(differing(recipe.model, recorded.model))}",
            where=where,
            rule="a reference must be the model that is trained, with other weights",
            fix="use another run, or set these model keys",
        )
    if plain(recorded.model) != plain(expected):
        raise UserError(
            "its model differs from distill.model",
            where=where,
            rule="distill.model must have the model keys in which the teacher differs from the recipe",
            fix=f"distill.model={json.dumps(differing(recipe.model, recorded.model))}",
        )


def plain(model: Model) -> dict[str, Any]:
    """What its weights and passes depend on."""
    values = model.model_copy(update=OF_TEACHERS).model_dump()
    dense = model.num_moe_experts is None
    skipped = {*NOT_COMPARED, *(key for key in values if dense and key.startswith("moe_"))}
    return {key: each for key, each in values.items() if key not in skipped}


def run_of_teacher(path: Path) -> Run | None:
    """The run that a checkpoint belongs to; None: it is a model in Hugging Face's form."""
    return None if (path / "config.json").is_file() else Run(run_of(path.parent).path)


def _vocabulary(spec: RankSpec, path: Path) -> dict[str, int] | None:
    """Ids of the teacher's tokens; None: they are the student's, from the same data or the same name."""
    from llmrecipes.data.folder.prepared import fingerprint, open_prepared
    from llmrecipes.data.tokens.tokenizer import load_huggingface

    run = run_of_teacher(path)
    if run is None:
        of_folder = HuggingFaceTokenizer(type="huggingface", path=str(path))
        return dict(load_huggingface(of_folder, spec.recipe.model.vocab_size)[0].get_vocab(with_added_tokens=True))
    recipe = run.recipe()
    named = recipe.data.tokenizer
    if named.type == "huggingface" and named == spec.recipe.data.tokenizer:
        return None
    if named.type == "huggingface":
        return dict(load_huggingface(named, recipe.model.vocab_size)[0].get_vocab(with_added_tokens=True))
    if fingerprint(recipe) == fingerprint(spec.recipe):
        return None
    tokenizer: TextTokenizer = open_prepared(recipe, spec.data_dir).tokenizer()
    return dict(tokenizer.backend.get_vocab(with_added_tokens=True))
