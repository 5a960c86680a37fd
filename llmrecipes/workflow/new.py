"""`llmrecipes new`: a recipe from a few answers, in the shape of the nearest one in recipes/."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.machine import planned
from llmrecipes.io import write_atomic
from llmrecipes.plan.check import fitted
from llmrecipes.plan.parameters import count
from llmrecipes.plan.run_plan import RunPlan, derive_run
from llmrecipes.recipe.derived.batch_schedule import GROWING, tokens_of
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.load import DEFAULTS_NOTE, changed_values, load, load_values, names, short
from llmrecipes.recipe.schema import Model, Recipe, Source
from llmrecipes.recipe.sections.source import SOURCE_TYPES, PathSource, make_source
from llmrecipes.recipe.sections.tokenizer_section import HuggingFaceTokenizer

TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022, arXiv 2203.15556."""
LEAST_STEPS = 100
SAME_SIZE = 0.05
"""Relative difference in parameters up to which a model has the size that was asked for."""
_MOST_SLIMMER = math.log(4)
"""The width per layer of a resized model is at most four times or at least a quarter of that of the recipe."""
SUFFIXES = {".jsonl": "jsonl", ".parquet": "parquet", ".txt": "text"}
"""Types of files that are named without a type."""
COMMENTS = {
    "train.train_iters": "steps",
    "layout.micro_batch_size": "sequences on one rank at a time: the largest that fits, by the plan",
    "train.global_batch_size": "sequences per step",
    "optimizer.lr": "peak; llmrecipes search tries others",
    "data.sources": "blended by weight: the share of the samples, however much text a source has",
    "data.split": "training, validation and test, by the hash of a document",
}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmbt]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Wanted:
    """Answers from which a recipe is made.

    Attributes:
        name: name of the recipe and its file.
        params: parameters of the model, within `SAME_SIZE`; None: those of `like`.
        model: section `model` of another shape than that of `like`; None: the shape of `like`.
        like: recipe with the shape and everything that is not set; None: the nearest by `params`, with its depth and
            width changed if it has another size.
        data: sources, as `source_of` reads them; none: those of `like`.
        tokenizer: bpe, or the name or folder of a Hugging Face tokenizer; None: that of `like`.
        seq_length: None: that of `like`.
        tokens: to train on; None: 20 for each parameter, or with `like` those of that recipe.
        cluster: name or path of the profile of the machine; None: this machine.
        nodes: nodes of the cluster; None: one.
        overrides: `key.path=value`, applied last.
    """

    name: str
    params: int | None = None
    like: str | None = None
    data: tuple[str, ...] = ()
    tokenizer: str | None = None
    seq_length: int | None = None
    tokens: int | None = None
    cluster: str | None = None
    nodes: int | None = None
    overrides: tuple[str, ...] = ()
    model: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Made:
    """A new recipe.

    Attributes:
        recipe: the resolved recipe.
        text: its file.
        like: the recipe that it follows.
        form: that recipe, and the depth and width if they are not those of it.
        plan: on the machine it was made for.
        elsewhere: paths of sources that have no files on this machine.
    """

    recipe: Recipe
    text: str
    like: str
    form: str
    plan: RunPlan
    elsewhere: tuple[str, ...]


def amount(text: str, option: str) -> int:
    """`1b`, `350M`, `2.5k` or `1000` as a number.

    Raises:
        UserError: it is not one.
    """
    match = _AMOUNT.fullmatch(text.strip())
    number = 0 if match is None else round(float(match[1]) * _UNITS[match[2].lower()])
    if not 0 < number <= 10**18:
        raise UserError(
            f"{text!r} is not a number",
            where=option,
            rule="a number, optionally with K, M, B or T for thousands to trillions",
            fix=f"{option} 1b",
        )
    return number


def source_of(text: str, option: str, *, chat: bool = False) -> Source:
    """`TYPE:PATH`, `stdlib`, `docstrings`, or a file whose suffix says its type.

    Args:
        text: as the user wrote it.
        option: for messages.
        chat: a source of conversations.

    Raises:
        UserError: it is not one of these.
    """
    types = (
        ("docstrings", "jsonl", "parquet", "hub")
        if chat
        else tuple(kind for kind in SOURCE_TYPES if kind != "docstrings")
    )
    kind, colon, path = text.partition(":")
    if not colon:
        kind = SUFFIXES.get(Path(text).suffix, "text" if Path(text).is_dir() and not chat else text)
        path = text
    needs_path = kind in types and issubclass(SOURCE_TYPES[kind], PathSource)
    if kind not in types or (colon and not needs_path) or not path:
        suffixes = ", ".join(suffix for suffix, of_suffix in SUFFIXES.items() if of_suffix in types)
        raise UserError(
            f"{text!r} is not a data source",
            where=option,
            rule=f"a file with the suffix {suffixes}, or TYPE:PATH with a type of {', '.join(types)}",
            fix=f"{option} jsonl:chat.jsonl" if chat else f"{option} text:FOLDER, or hub:HuggingFaceFW/fineweb-edu",
        )
    return make_source(type=kind, path=path) if needs_path else make_source(type=kind)


def as_values(source: Source) -> dict[str, Any]:
    """A source as it is written in a recipe."""
    return source.model_dump(mode="json", exclude_defaults=True)


def nearest(params: int) -> str:
    """The recipe in recipes/ for pretraining a dense model whose number of parameters is nearest, as a ratio."""
    candidates: list[tuple[float, int, str]] = []
    for name in names():
        try:
            recipe = load(name).recipe
        except UserError:  # one invalid file must not hide the others
            continue
        plain = not (
            recipe.lora or recipe.layout.zero or recipe.data.chat or recipe.distill or recipe.model.num_moe_experts
        )
        if plain and recipe.train.pretrained is None:
            ratio = abs(math.log(count(recipe.model, shape(recipe.model)).total / params))
            candidates.append((round(ratio, 6), len(name), name))
    if not candidates:
        raise UserError("no recipe for pretraining in recipes/", where="--params", fix="--like FILE.yaml")
    return min(candidates)[2]


def resized(section: dict[str, Any], params: int) -> dict[str, Any]:
    """A section `model` with the depth and width for a number of parameters; unchanged if it has them already.

    The width of a head, the number of query groups and the proportion of feed-forward layers are kept. Of the shapes
    with the number within `SAME_SIZE`, it is the one whose width per layer and number are nearest.

    Raises:
        UserError: no shape has the number.
    """
    model = Model(**section)
    whole = count(model, shape(model)).total
    if abs(whole / params - 1) <= SAME_SIZE:
        return section
    candidates: list[tuple[float, int, dict[str, Any]]] = []
    width = model.hidden_size // model.num_attention_heads
    groups = model.num_query_groups or 1
    for heads in range(groups, 4 * model.num_attention_heads + 1, groups):
        if heads % _multiple(2 * heads, 8):  # of the heads, for tensor parallelism
            continue
        wider = section | {"num_attention_heads": heads, "hidden_size": heads * width}
        if model.ffn_hidden_size is not None:
            unit = _multiple(model.ffn_hidden_size, 128)
            wider["ffn_hidden_size"] = unit * round(model.ffn_hidden_size * heads / model.num_attention_heads / unit)
        one, two = (count(deep, shape(deep)).total for deep in (Model(**wider | {"num_layers": n}) for n in (1, 2)))
        fitting = max(1.0, (params - one) / (two - one) + 1)
        unit = _multiple(round(fitting), 4 if fitting >= 64 else 2)  # of the layers, for pipeline parallelism
        layers = max(unit, unit * round(fitting / unit))
        size = one + (layers - 1) * (two - one)
        slimmer = abs(math.log(heads * model.num_layers / (model.num_attention_heads * layers)))
        if slimmer <= _MOST_SLIMMER:
            distance = slimmer + 4 * abs(size / params - 1)
            candidates.append((distance, size, wider | {"num_layers": layers}))
    same = [(distance, each) for distance, size, each in candidates if abs(size / params - 1) <= SAME_SIZE]
    if not same:
        closest = min((size for _, size, _ in candidates), key=lambda size: abs(math.log(size / params)))
        raise UserError(
            f"no shape of {params:,} parameters",
            where="--params",
            rule=f"within {SAME_SIZE:.0%} of what whole layers and heads have with this vocabulary",
            fix=f"--params {closest}",
        )
    return min(same, key=lambda pair: pair[0])[1]


def _multiple(number: int, most: int) -> int:
    """The power of two, at most `most`, of which numbers of this size are chosen as multiples."""
    return min(most, 1 << max(0, (number // 8).bit_length() - 1))


def make(wanted: Wanted) -> Made:
    """The recipe, without writing it.

    Raises:
        UserError: neither or both of `params` and `like`; an invalid value; a tokenizer that cannot be loaded;
            parameters that no shape has; overrides that make an invalid recipe.
    """
    like = _like(wanted)
    base = load(like).recipe
    path = Path(f"{wanted.name}.yaml")
    seq_length = wanted.seq_length or base.model.seq_length
    values = _copied(base, wanted, seq_length)
    model = values["model"]
    form = like
    if wanted.params is not None:
        values["model"] = model = resized(model, wanted.params)
        if model["num_layers"] != base.model.num_layers or model["hidden_size"] != base.model.hidden_size:
            form += f", with {model['num_layers']} layers of width {model['hidden_size']:,}"
            values["description"] += ", resized"
    machine = planned(wanted.cluster, wanted.nodes or (1 if wanted.cluster else None), 1)
    sized = load_values(values, path, wanted.overrides).recipe
    elsewhere = _require_columns(sized) if wanted.data else ()
    default = TOKENS_PER_PARAMETER * count(sized.model, shape(sized.model)).total
    same = tokens_of(base)
    tokens = wanted.tokens or (default if wanted.like is None or wanted.model is not None else same)
    values["train"]["global_batch_size"] = _batch_size(base, sized.model.seq_length, tokens)
    if machine.gpus:
        values["train"]["precision"] = "bf16"
    recipe, ranks = fitted(load_values(values, path, wanted.overrides).recipe, machine)
    values |= recipe.model_dump(mode="json", include={"layout", "train"}, exclude_defaults=True)
    iters = max(1, round(tokens / (recipe.train.global_batch_size * recipe.model.seq_length)))
    values["train"]["train_iters"] = iters
    values["train"]["eval_interval"] = min(base.train.eval_interval, max(1, iters // 4))
    values["scheduler"] = _scheduler(base, iters)
    save = values.setdefault("checkpoint", {})
    save["save_interval"] = min(base.checkpoint.save_interval, max(1, iters // 4))
    if save.get("keep_interval", 0) % save["save_interval"]:
        del save["keep_interval"]  # only steps that are saved can be kept
    loaded = load_values(values, path, wanted.overrides).recipe
    plan = derive_run(loaded, ranks, machine)
    header = f"{tokens:,} tokens in the shape of {form}. {DEFAULTS_NOTE}"
    return Made(loaded, short(loaded, COMMENTS, header), like, form, plan, elsewhere)


def _like(wanted: Wanted) -> str:
    """The recipe to begin from."""
    if (wanted.params is None) == (wanted.like is None):
        what = "not set" if wanted.params is None else f"{wanted.params} with --like {wanted.like}"
        raise UserError(
            what, where="--params", rule="set one of --params and --like", fix="--params 1b, or --like gpt-1b"
        )
    return wanted.like or nearest(wanted.params or 1)


def _copied(base: Recipe, wanted: Wanted, seq_length: int) -> dict[str, Any]:
    """The values of a recipe without what was made for its tokens and ranks, with the data that is wanted."""
    values = changed_values(base)
    model = dict(wanted.model or values["model"]) | {"seq_length": seq_length}
    if model.get("max_position_embeddings", seq_length) < seq_length:
        model["max_position_embeddings"] = seq_length
    kept = {"overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"}
    values |= {
        "name": wanted.name,
        "description": f"made by llmrecipes new, in the shape of {base.name}",
        "model": model,
        "layout": base.layout.model_dump(include=kept, exclude_defaults=True),
    }
    for section in ("search", "stages"):
        values.pop(section, None)
    for key in GROWING:
        values["train"].pop(key, None)
    data = values.setdefault("data", {})
    if wanted.data:
        data["sources"] = [as_values(source_of(text, "--data")) for text in wanted.data]
    if wanted.tokenizer is not None:
        data["tokenizer"], model["vocab_size"] = _tokenizer(wanted.tokenizer, base)
    return values


def _batch_size(base: Recipe, seq_length: int, tokens: int) -> int:
    """The tokens of the recipe's batch, halved until there are `LEAST_STEPS` of it."""
    batch = max(1, round(base.train.global_batch_size * base.model.seq_length / seq_length))
    while batch > 1 and tokens < LEAST_STEPS * batch * seq_length:
        batch = -(-batch // 2)
    return batch


def write(name: str, text: str, folder: Path, *, force: bool, source: Path | None = None) -> Path:
    """Write the file of a recipe.

    Args:
        name: of the recipe.
        text: its content.
        folder: created if it does not exist.
        source: file that is never overwritten.

    Raises:
        UserError: it exists, unless `force`; or it cannot be written.
    """
    path = folder / f"{name}.yaml"
    if source is not None and path.exists() and path.samefile(source):
        raise UserError(
            "is the file being translated",
            where=str(path),
            rule="a recipe must not overwrite its source",
            fix="another NAME, or --out DIR",
        )
    if path.exists() and not force:
        raise UserError(
            "already exists",
            where=str(path),
            rule="a recipe is overwritten only with --force",
            fix="--force, or another name",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise UserError(
            f"cannot write: {error.strerror}", where=str(error.filename or path), fix="--out DIR"
        ) from error
    return path


def _require_columns(recipe: Recipe) -> tuple[str, ...]:
    """Look at the first rows; returns the paths of sources that have no files here."""
    from llmrecipes.data.sources.sources import require_columns  # not at the top: it loads the readers of all formats

    elsewhere = []
    for number, source in enumerate(recipe.data.sources):
        try:
            if not require_columns(source, recipe.data.chat):
                elsewhere.append(source.location or source.type)
        except UserError as error:
            if recipe.data.chat is not None or not error.fix.startswith("set "):  # a key
                raise
            fix = f"data.sources.{number}.text_key=COLUMN at the end of the command"
            raise UserError(error.what, where=error.where, rule=error.rule, fix=fix) from error
    return tuple(elsewhere)


def _tokenizer(text: str, base: Recipe) -> tuple[dict[str, Any], int]:
    """The section of a tokenizer, and the size of its vocabulary."""
    if text == "bpe":
        return {}, base.model.vocab_size
    from llmrecipes.data.tokens.tokenizer import load_huggingface, vocabulary

    section = HuggingFaceTokenizer(type="huggingface", path=text)
    backend, _ = load_huggingface(section, 1 << 31)
    return section.model_dump(mode="json", exclude_defaults=True), vocabulary(backend)


def _scheduler(base: Recipe, iters: int) -> dict[str, Any]:
    """The schedule of a recipe over another number of steps: each part keeps its share, warm-up at most its length."""
    values = base.scheduler.model_dump(mode="json", exclude_defaults=True)
    values.pop("lr_decay_iters", None)
    share = iters / base.train.train_iters
    if warmup := values.pop("lr_warmup_iters", 0):
        values["lr_warmup_iters"] = min(warmup, round(warmup * share))
    if decay := values.pop("lr_wsd_decay_iters", 0):
        values["lr_wsd_decay_iters"] = max(1, round(decay * share))
    return values
