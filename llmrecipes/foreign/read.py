"""`llmrecipes new --from FILE`: recognize a file, translate it, and check the recipe by loading it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.foreign import finetuning, megatron, nested_configs
from llmrecipes.foreign.draft import Draft, Row
from llmrecipes.hardware.machine import planned
from llmrecipes.recipe.document import Kind, clip, read
from llmrecipes.recipe.load import DEFAULTS_NOTE, load_values, short
from llmrecipes.recipe.reading.foreign import KINDS, Foreign, recognized
from llmrecipes.recipe.reading.layouts import CHOSEN
from llmrecipes.recipe.schema import Recipe
from llmrecipes.workflow.new import Wanted

FILES = Kind("configuration", "--from", "", "")


@dataclass(frozen=True)
class Translated:
    """A recipe made of another program's file.

    Attributes:
        recipe: the recipe, checked.
        text: its file.
        draft: what became of each value.
    """

    recipe: Recipe
    text: str
    draft: Draft


def translate(path: Path, wanted: Wanted) -> Translated:
    """Translate a file.

    Args:
        path: the file.
        wanted: `name` (empty: that of the file) and `overrides`, for what the file does not say; `like`, with the
            model's shape, where the file only names it; `cluster` and `nodes`, whose ranks make a global batch of a
            batch for each rank (none: one rank). The others apply to a config.json only.

    Raises:
        UserError: an unknown kind of file, a model or method that recipes do not have, or a required value that the
            file lacks; with the original's names.
    """
    foreign = _foreign(path)
    draft = Draft(foreign.program)
    wanted = replace(wanted, name=wanted.name or named(path))
    draft.values |= {"name": wanted.name, "description": f"translated from {path.name} of {foreign.program}"[:200]}
    if foreign.kind == "huggingface":
        from llmrecipes.foreign.huggingface import from_config

        made = from_config(foreign.data, draft, path, wanted)
        return Translated(made.recipe, made.text, draft)
    _require_unused(wanted, foreign)
    machine = planned(wanted.cluster, wanted.nodes, 1)
    ranks = max(1, len(machine.gpus)) if wanted.cluster else 1
    for override in wanted.overrides:  # before, for what other values are computed from; and after, as the last word
        draft.change(override)
    _translated(foreign, draft, path, ranks, wanted.like)
    for override in wanted.overrides:
        draft.change(override)
    _vocabulary(draft)
    draft.settle(path)
    layout = draft.values.get("layout", {})
    if not layout.keys().isdisjoint(CHOSEN):
        layout.setdefault("name", None)  # what the file leaves out has its default, and is not chosen
    recipe = load_values(draft.values, Path(f"{wanted.name}.yaml")).recipe
    header = f"Translated from {path.name} of {foreign.program}. {DEFAULTS_NOTE}"
    return Translated(recipe, short(recipe, {}, header), draft)


def _require_unused(wanted: Wanted, foreign: Foreign) -> None:
    """Refuse options that would be ignored."""
    options = {
        "--data": wanted.data,
        "--tokenizer": wanted.tokenizer,
        "--seq-length": wanted.seq_length,
        "--tokens": wanted.tokens,
        "--params": wanted.params,
    }
    for option, value in options.items():
        if value:
            raise UserError(
                f"set with a file of {foreign.program}",
                where=option,
                rule="the file says it, or a key=value does",
                fix=f"leave {option} out",
            )


def named(path: Path) -> str:
    """A recipe's name from that of a file, which the recipe's own file must not replace."""
    stem = path.resolve().parent.name if path.name == "config.json" else path.stem
    stem += "-recipe" if path.suffix == ".yaml" else ""
    return (
        re.sub(r"^[^a-z0-9]+", "", re.sub(r"[^a-z0-9._-]+", "-", stem.lower().replace("_", "-")))[:63] or "translated"
    )


def _foreign(path: Path) -> Foreign:
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "no such file"
        raise UserError(what, where=f"--from {path}", rule=f"a file of {', '.join(list(KINDS.values())[:-1])}")
    foreign = recognized(read(path, FILES), path)
    if foreign is None:
        raise UserError(
            "not recognized",
            where=f"--from {path}",
            rule="a Megatron-LM command line or script, a YAML of axolotl, LLaMA-Factory, NeMo or Megatron-Bridge, a "
            "TOML of torchtitan, or a config.json of Hugging Face",
            fix="llmrecipes new NAME --like RECIPE",
        )
    if foreign.kind == "python":
        raise UserError(
            "a Python file",
            where=f"--from {path}",
            rule="configurations are read, never executed",
            fix="pass what the code writes: a TOML of torchtitan, the YAML of a NeMo or Megatron-Bridge config, or the "
            "model's config.json",
        )
    return foreign


def _translated(foreign: Foreign, draft: Draft, path: Path, ranks: int, like: str | None) -> None:
    data: Any = foreign.data
    match foreign.kind:
        case "megatron" if isinstance(data, str):
            megatron.from_script(data, draft, ranks, path)
        case "megatron":
            megatron.from_mapping(data, draft, ranks)
        case "torchtitan":
            nested_configs.from_torchtitan(data, draft, ranks, like)
        case "nemo" | "bridge":
            nested_configs.from_nemo(data, draft, ranks, like)
        case "axolotl":
            _base(draft, data["base_model"], "base_model")
            finetuning.from_axolotl(data, draft, ranks)
        case _:
            _base(draft, data["model_name_or_path"], "model_name_or_path")
            finetuning.from_llamafactory(data, draft, ranks, path)


def _base(draft: Draft, model: str, name: str) -> None:
    """The model section of the weights that are fine-tuned, from their config.json."""
    from llmrecipes.hf.match import section_of, validated
    from llmrecipes.hf.reading import CONFIG, SMALL, read_config, resolve
    from llmrecipes.workflow.pretrained import recipe_values

    chosen = draft.get("train.pretrained") or str(model)
    try:
        located = resolve(chosen, patterns=SMALL)
    except UserError as error:
        raise UserError(
            error.what,
            where=f"{name}: {chosen}",
            rule="the model's shape is in its config.json",
            fix="train.pretrained=FOLDER with the model on this machine; or access to the Hub",
        ) from error
    _, section = section_of(read_config(located.path), located.path)
    validated(section, 1, str(located.path / CONFIG))
    values = recipe_values(located, section, str(draft.values["name"]))
    draft.values["model"] = {**values["model"], **draft.values.get("model", {})}
    for key, value in values["data"].items():
        draft.set(f"data.{key}", value, why="of the model")
    draft.set("train.pretrained", chosen, name, model)


def _vocabulary(draft: Draft) -> None:
    """The size of the vocabulary from the tokenizer, where the file does not say it."""
    tokenizer = draft.get("data.tokenizer")
    if draft.get("model.vocab_size") is not None or not isinstance(tokenizer, dict) or "path" not in tokenizer:
        return
    from llmrecipes.data.tokens.tokenizer import load_huggingface, vocabulary
    from llmrecipes.recipe.sections.tokenizer_section import HuggingFaceTokenizer

    try:
        backend, _ = load_huggingface(HuggingFaceTokenizer(**tokenizer), 1 << 31)
    except UserError as error:
        raise UserError(
            f"not in the file, and the tokenizer cannot be read: {error.what}",
            where="model.vocab_size",
            rule="the number of tokens of the tokenizer",
            fix="model.vocab_size=N",
        ) from error
    draft.set("model.vocab_size", vocabulary(backend), why="of the tokenizer")


def account(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """The rows of a table: what differs, what is left out otherwise (one for each reason), and what was changed."""
    differing = [_cells(row) for row in rows if row.differs]
    reasons: dict[str, list[Row]] = {}
    for row in rows:
        if not row.key and not row.differs:
            reasons.setdefault(row.why, []).append(row)
    plain = [
        (
            ", ".join(row.name for row in alike),
            clip(", ".join(_text(row.original) for row in alike), 60),
            "left out",
            why,
        )
        for why, alike in reasons.items()
    ]
    return [*differing, *plain, *(_cells(row) for row in rows if row.key and row.why)]


def _cells(row: Row) -> tuple[str, str, str, str]:
    became = f"{row.key}: {_text(row.value)}" if row.key else "LEFT OUT"
    if isinstance(row.value, dict):
        became = f"{row.key}: {', '.join(f'{key} {_text(value)}' for key, value in row.value.items())}"
    return row.name or "(default)", _text(row.original) if row.name else "", became, row.why


def _text(value: Any) -> str:
    text = "" if value is None or value == "" else json.dumps(value) if isinstance(value, bool) else str(value)
    return clip(text, 60)
