"""`llmrecipes merge`: models of one shape become one, tensor by tensor, as a folder or as step 0 of a new run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.hf.reading import read_bytes, read_json
from llmrecipes.models.create import CreatedRun, create_run, published, require_absent, write_checkpoint
from llmrecipes.models.export import front_matter
from llmrecipes.models.export_options import ELEMENT_TYPES
from llmrecipes.models.merge_options import METHODS, Merge, MergeOptions, resolve
from llmrecipes.recipe.load import DEFAULTS_NOTE, short
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.workflow.model_source import Opened, OpenedRun, find_checkpoint, open_tensors

if TYPE_CHECKING:
    import torch

    from llmrecipes.hf.safetensors import TensorSource
    from llmrecipes.tracking.progress import Counted


COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json",
)  # fmt: skip
"""Files that a merged model takes from the first one, besides the weights."""


@dataclass(frozen=True)
class Output:
    """Output options of a merge.

    Attributes:
        folder: it must not exist.
        dtype: fp32, bf16 or fp16; None: that of the first model, which is the precision of the recipe if it is a run.
        shard_bytes: largest file of weights.
        tokenizer: compare and write tokenizers.
    """

    folder: Path
    dtype: str | None = None
    shard_bytes: int = 5 * 10**9
    tokenizer: bool = True


@dataclass(frozen=True)
class MergeResult:
    """Result of a merge.

    Attributes:
        path: the folder.
        models: as they were named, without the base.
        base: likewise; None: the method has none.
        merge: `Merge.as_dict`: method and numbers.
        tensors: how many.
        parameters: their elements.
        bytes: size in bytes of the weights.
        shards: files of weights.
        seconds: that it took.
    """

    path: str
    models: tuple[str, ...]
    base: str | None
    merge: dict[str, Any]
    tensors: int
    parameters: int
    bytes: int
    shards: int
    seconds: float


def merge(
    models: Sequence[str],
    options: MergeOptions,
    output: Output,
    runs_dir: Path,
    data_dir: Path,
    base: str | None = None,
    progress: Counted | None = None,
) -> MergeResult:
    """Merge models into a folder that transformers can load.

    Everything is checked before the first byte is written: options, and whether configuration, tensors and tokenizers
    of all models agree. One process without a GPU reads one tensor of every model at a time; memory peaks at a few fp32
    copies of the largest one: about four for a mean, six with a base, eight where two models vote on signs.

    Args:
        models: each `RUN` (its newest checkpoint), `RUN@STEP`, or a folder with config.json and safetensors.
        options: method and numbers.
        output: where and how it is written.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept, with the tokenizers of runs.
        base: the model that the others were fine-tuned from, likewise.
        progress: shows how much is written.

    Raises:
        UserError: an option that the method does not have, a model that is missing, corrupt, named twice or of another
            kind, a value that is not finite, a folder that exists, or a full disk. Nothing is left behind.
    """
    numbers = resolve(options, len(models), base=base is not None)
    if output.dtype is not None and output.dtype not in ELEMENT_TYPES:
        raise UserError(f"unknown type {output.dtype!r}", where="--dtype", rule=f"one of {', '.join(ELEMENT_TYPES)}")
    from llmrecipes.hf.safetensors import write
    from llmrecipes.models.merge_formulas import Input, MergedTensors

    started = time.monotonic()
    require_absent(output.folder)
    names = [*models, *([] if base is None else [base])]
    require_different(names, names)
    opened = {name: open_tensors(name, runs_dir) for name in names}
    require_different(names, [_identity(model) for model in opened.values()])
    require_same_configs({name: model.config for name, model in opened.items()})
    if output.tokenizer:
        require_same_tokenizers({name: _tokenizer_folder(model, data_dir) for name, model in opened.items()})
    inputs = {name: Input(name, model.source) for name, model in opened.items()}
    merged = MergedTensors(numbers, [inputs[name] for name in models], None if base is None else inputs[base])
    first = opened[models[0]]
    dtype = output.dtype or (first.recipe.train.precision if isinstance(first, OpenedRun) else None)
    with published(output.folder) as folder:
        special = _write_companions(first, data_dir, folder, tokenizer=output.tokenizer)
        written = write(merged, {**_config(first.config), **special}, folder, dtype, output.shard_bytes, progress)
        (folder / "README.md").write_text(_card(models, base, numbers), "utf-8")
    return MergeResult(
        path=str(output.folder),
        models=tuple(models),
        base=base,
        merge=numbers.as_dict(),
        tensors=written.tensors,
        parameters=written.parameters,
        bytes=written.bytes,
        shards=len(written.shards),
        seconds=round(time.monotonic() - started, 3),
    )


def _identity(opened: Opened) -> str:
    return str((opened.entry.path if isinstance(opened, OpenedRun) else opened.folder).resolve())


def require_different(names: Sequence[str], identities: Sequence[str]) -> None:
    """Check that no model is named twice.

    Args:
        names: as the user wrote them.
        identities: equal for two names of one model.

    Raises:
        UserError: with the second name.
    """
    seen: dict[str, str] = {}
    for name, identity in zip(names, identities, strict=True):
        if identity in seen:
            other = seen[identity]
            raise UserError(
                "this model is named twice" if name == other else f"the same model as {other}",
                where=name,
                rule="each model is named once, the base included",
                fix="use --weights to give a model more weight",
            )
        seen[identity] = name


def _tokenizer_folder(opened: Opened, data_dir: Path) -> Path:
    if not isinstance(opened, OpenedRun):
        return opened.folder
    from llmrecipes.data.folder.prepared import open_prepared

    return open_prepared(opened.recipe, data_dir).path


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the first model, without the keys that refer to its weights or code."""
    return {key: value for key, value in config.items() if key not in {"_name_or_path", "auto_map", "dtype"}}


def _write_companions(first: Opened, data_dir: Path, folder: Path, *, tokenizer: bool) -> dict[str, Any]:
    """Write generation_config.json and the tokenizer of the first model.

    Returns:
        What they add to config.json.
    """
    if not isinstance(first, OpenedRun):
        from llmrecipes.hf.reading import copy

        for name in COMPANIONS if tokenizer else COMPANIONS[:1]:
            if os.path.lexists(first.folder / name):
                copy(first.folder, name, folder / name)
        return {}
    from llmrecipes.hf.tokenizer_files import write_companions
    from llmrecipes.models.export import prepared_of

    prepared = prepared_of(first, data_dir) if tokenizer else None
    return write_companions(folder, first.recipe, prepared, first.folder, tokenizer=tokenizer)


def _card(models: Sequence[str], base: str | None, numbers: Merge) -> str:
    """The model card. A folder is named by its last part: a card is published, the paths of a machine are not."""
    values = numbers.as_dict()
    of_each = {"weight": values.pop("weights", ()), "density": values.pop("densities", ())}
    columns = ["model", *(name for name, column in of_each.items() if column)]
    rows = [
        [_named(model), *(f"{column[number]:g}" for column in of_each.values() if column)]
        for number, model in enumerate(models)
    ]
    if base is not None:
        rows.append([f"{_named(base)} (base)", *("" for _ in columns[1:])])
    lines = [
        front_matter("merge", "llmrecipes"),
        "# Merged model", "",
        f"Made by `llmrecipes merge --method {numbers.method}`: {METHODS[numbers.method].reference}. The configuration",
        "and the tokenizer, the same in all models, are copied from the first one.", "",
        *(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)), "",
        *(f"- {key}: {value}" for key, value in values.items() if key != "method"),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _named(model: str) -> str:
    return f"`{Path(model).resolve().name if Path(model).is_dir() else model}`"


def merge_runs(
    models: Sequence[str],
    options: MergeOptions,
    runs_dir: Path,
    run_id: str,
    base: str | None = None,
    progress: Counted | None = None,
) -> CreatedRun:
    """Merge checkpoints of runs into a run that `llmrecipes train`, `generate` and `eval` take like any other.

    Its recipe is that of the first run, and its optimizer is new. Any model can be merged so, also one without a form
    in transformers. One process without a GPU reads one tensor of every model at a time.

    Args:
        models: each `RUN` (its newest checkpoint) or `RUN@STEP`.
        options: method and numbers.
        runs_dir: where runs are kept.
        run_id: run id of the new run.
        base: the run that the others were fine-tuned from, likewise.
        progress: shows how much is written.

    Returns:
        With the origin: `models` and `base` as they were named, `merge` (method and numbers), and `seconds`.

    Raises:
        UserError: as `merge`, or recipes of different models. Nothing remains.
    """
    numbers = resolve(options, len(models), base=base is not None)
    from llmrecipes.engine.backends import stored_weights
    from llmrecipes.models.merge_formulas import Input, MergedTensors

    started = time.monotonic()
    names = [*models, *([] if base is None else [base])]
    require_different(names, names)
    checkpoints = {name: find_checkpoint(name, runs_dir) for name in names}
    require_different(names, [str(entry.path.resolve()) for _, entry in checkpoints.values()])
    recipes = {name: Run(run).recipe_of(entry.step) for name, (run, entry) in checkpoints.items()}
    _require_same_models(recipes)
    inputs = {name: Input(name, stored_weights(recipes[name], entry)) for name, (_, entry) in checkpoints.items()}
    merged = MergedTensors(numbers, [inputs[name] for name in models], None if base is None else inputs[base])
    recipe = recipes[models[0]]
    run_dir = Run.of(runs_dir, recipe.name, run_id).path

    def write(folder: Path) -> dict[str, Any]:
        write_checkpoint(recipe, Boxes(merged), folder, progress)
        seconds = round(time.monotonic() - started, 3)
        return {"models": tuple(models), "base": base, "merge": numbers.as_dict(), "seconds": seconds}

    return create_run(run_dir, recipe, write, text=short(recipe, None, DEFAULTS_NOTE))


class Boxes:
    """Tensors read in boxes (`engine.base.WeightSource`); the last tensor is kept in memory."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """See `WeightSource`."""
        if self._last is None or self._last[0] != name:
            self._last = None  # frees its memory before the next is read
            self._last = name, self._source.read(name)
        box = self._last[1][tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
        if tuple(box.shape) != shape:
            raise RuntimeError(f"{name} has no box of {shape} at {offset}")
        return box


def _require_same_models(recipes: Mapping[str, Recipe]) -> None:
    from llmrecipes.data.folder.prepared import fingerprint

    (first, expected), *others = recipes.items()
    for name, recipe in recipes.items():
        if recipe.lora is not None:
            raise UserError(
                "this run trained only adapters",
                where=f"{name}: lora",
                rule="only runs that trained all weights can be merged into a run",
                fix="--to hf",
            )
    for name, recipe in others:
        model = expected.model.model_dump(mode="json")
        other = recipe.model.model_dump(mode="json")
        for key in model:
            if model[key] != other[key]:
                raise UserError(
                    f"{other[key]!r}, but {model[key]!r} in {first}",
                    where=f"{name}: model.{key}",
                    rule="only runs of the same model can be merged",
                )
        same = expected.data.tokenizer == recipe.data.tokenizer
        if same and recipe.data.tokenizer.type == "bpe":  # trained on the data
            same = fingerprint(expected) == fingerprint(recipe)
        if not same:
            raise UserError(
                f"its tokenizer differs from that of {first}",
                where=f"{name}: data.tokenizer",
                rule="only runs with the same tokenizer can be merged",
            )


WITHOUT_MEANING = frozenset(
    {
        "_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype", "use_cache",
        "bos_token_id", "eos_token_id", "pad_token_id", "return_dict", "output_attentions", "output_hidden_states",
        "_attn_implementation", "attn_implementation",
    }
)  # fmt: skip
"""Keys of config.json that may differ: none of them changes what the weights mean. Those of the first model stay.
Special tokens are among them, because a fine-tuned model often ends its answers with another one."""

TOKENIZER = "tokenizer.json"
OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json")
"""Where there is no tokenizer.json."""
_UNIMPORTANT = frozenset({"version", "truncation", "padding"})
"""Parts of tokenizer.json that do not change which token has which number."""


def require_same_configs(configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that models have one configuration. Keys that are left out have the defaults of transformers.

    Args:
        configs: config.json by the name of the model; the first is what the others are compared with.

    Raises:
        UserError: with the model and the keys.
    """
    (first, expected), *others = ((name, _complete(name, config)) for name, config in configs.items())
    for name, config in others:
        keys = sorted({*expected, *config} - WITHOUT_MEANING)
        wrong = [key for key in keys if expected.get(key) != config.get(key)]
        if wrong:
            lines = [f"{key}: {config.get(key)!r}, but {expected.get(key)!r} in {first}" for key in wrong]
            raise UserError(
                "a different configuration:\n    " + "\n    ".join(lines) if len(lines) > 1 else lines[0],
                where=f"{name}: config.json",
                rule="only models with the same configuration can be merged",
                parts=[UserError(line, where=key) for key, line in zip(wrong, lines, strict=True)],
            )


def require_same_tokenizers(folders: Mapping[str, Path]) -> None:
    """Check that models have one tokenizer: the same token for every number, and the same way to get there.

    Args:
        folders: with the tokenizer's files, by the name of the model.

    Raises:
        UserError: with the model, the file and the first difference.
    """
    (first, expected), *others = folders.items()
    files = _tokenizer_files(expected)
    for name, folder in others:
        present = _tokenizer_files(folder)
        if files != present:
            raise UserError(
                f"the tokenizer is {_listed(present)}, but {_listed(files)} in {first}",
                where=name,
                rule="only models with the same tokenizer can be merged",
                fix="copy the missing files if the tokenizers are the same",
            )
        for file in files:
            _require_same_file(first, expected / file, name, folder / file)


def _require_same_file(first: str, expected: Path, name: str, path: Path) -> None:
    difference = _first_difference(expected, path)
    if difference is not None:
        raise UserError(
            f"{difference} {first}",
            where=f"{name}: {path.name}",
            rule="only models with the same tokenizer can be merged",
            fix="merge models with the same vocabulary",
        )


def _first_difference(expected: Path, path: Path) -> str | None:
    """A clause that ends before the name of the other model; None: they are the same."""
    if read_bytes(expected.parent, expected.name) == read_bytes(path.parent, path.name):
        return None
    if path.name != TOKENIZER:
        return "differs from that of"
    old, new = (read_json(file.parent, file.name) for file in (expected, path))
    tokens, others = _numbers(old, expected), _numbers(new, path)
    for token in sorted({*tokens, *others}, key=lambda token: (tokens.get(token, 1 << 62), token)):
        if tokens.get(token) != others.get(token):
            return f"token {token!r} is {_number(others, token)}, but {_number(tokens, token)} in"
    for key in sorted({*old, *new} - _UNIMPORTANT):
        if old.get(key) != new.get(key):
            return f"{key} differs from that of"
    return None


def _number(tokens: Mapping[str, int], token: str) -> str:
    return f"id {tokens[token]}" if token in tokens else "missing"


def _numbers(tokenizer: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The number of every token: of the vocabulary, as a table or a list, and of those added to it."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab", {}) if isinstance(model, dict) else {}
    try:
        added = [entry for entry in tokenizer.get("added_tokens") or [] if isinstance(entry, dict)]
        pairs = [*_pairs(vocabulary), *((entry["content"], entry["id"]) for entry in added)]
        return {str(token): int(number) for token, number in pairs}
    except (TypeError, ValueError, LookupError) as problem:
        raise UserError(
            f"a token has no id: {problem!r}", where=str(path), rule="every token must have an id"
        ) from problem


def _pairs(vocabulary: object) -> Iterator[tuple[str, int]]:
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    elif isinstance(vocabulary, list):  # of a unigram model: [token, score]
        yield from ((str(piece[0]), number) for number, piece in enumerate(vocabulary))


def _tokenizer_files(folder: Path) -> tuple[str, ...]:
    if os.path.lexists(folder / TOKENIZER):
        return (TOKENIZER,)
    return tuple(file for file in OTHER_TOKENIZERS if os.path.lexists(folder / file))


def _complete(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults of its model type; unchanged if transformers does not know the type."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return dict(config)
    try:
        complete: dict[str, Any] = CONFIG_MAPPING[kind].from_dict(dict(config)).to_dict()
    except Exception as problem:  # of any kind: transformers checks the values of every family differently
        reason = next(iter(str(problem).strip().splitlines()), "") or type(problem).__name__
        raise UserError(
            f"config.json is not valid for model_type {kind}: {reason[:200]}",
            where=name,
            rule="transformers must be able to read the configuration",
            fix="download the model again",
        ) from problem
    return complete


def _listed(files: Sequence[str]) -> str:
    return " and ".join(files) if files else "no file"
