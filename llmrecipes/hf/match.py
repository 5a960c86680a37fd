"""Whether a recipe's model is the one in a config.json: every key that changes what is computed has to agree."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmrecipes.errors import UserError
from llmrecipes.hf import completion
from llmrecipes.hf.families.parts import LATENT
from llmrecipes.hf.family import FAMILIES, family_named, model_of
from llmrecipes.hf.reading import CONFIG, runs_code
from llmrecipes.hf.table import NEUTRAL, Family, resolved
from llmrecipes.recipe.schema import TRAINING_ONLY, Model

FREE = TRAINING_ONLY | {"max_position_embeddings", "vocab_size"}
"""Keys of `model` that a recipe chooses; these two within limits, see `_lengths` and `_vocabulary`."""
MOST, MOST_COUNTED = 1 << 31, 1 << 14
"""Largest size in a config.json, and largest number of layers or experts."""
ROTARY = frozenset(
    {"rotary_base", "rotary_percent", "rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"}
)
_SHARED = (
    "configuration_utils",
    "generation/configuration_utils",
    "masking_utils",
    "modeling_rope_utils",
    "modeling_utils",
)
"""Files of transformers that read config.json for every model."""


def section_of(
    config: Mapping[str, Any], folder: Path, ignored: Collection[str] = (), *, predicting: bool = False
) -> tuple[Family, dict[str, Any]]:
    """Family and section `model`, but for `seq_length`, of a config.json.

    Args:
        config: the file's content.
        folder: that it is in.
        ignored: keys that the user says have no effect.
        predicting: with its layers of multi-token prediction. transformers writes their number, by default 1, and saves
            none of them.

    Raises:
        UserError: an unknown family, or one that needs custom code, or keys without a counterpart; all at once; or a
            config.json that transformers refuses.
    """
    where = str(folder / CONFIG)
    try:
        family = family_named(config.get("model_type"), where)
    except UserError as error:
        code = runs_code(folder)
        if code is None:
            raise
        raise UserError(
            error.what,
            where=where,
            rule=f"{error.rule}; {code} asks for custom code, which is never run",
            fix="use a model of one of these types",
        ) from error
    _require_sane(config, where)
    # Code that auto_map names is not needed where the family is supported.
    dropped = {"auto_map", *without_effect(config, folder), *ignored}
    kept = {key: value for key, value in config.items() if key not in dropped}
    try:
        section = model_of(family, _completed(family, kept, where), where)
        return family, section if predicting else section | {"mtp_num_layers": None}
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError) as error:
        raise UserError(
            f"a value has the wrong type or size: {str(error)[:200]}",
            where=where,
            rule=f"values must be as transformers writes them for model_type {family.name}",
        ) from error


def _completed(family: Family, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A config.json as transformers reads it: with its defaults, other names of keys, and what replaces what.

    Raises:
        UserError: transformers refuses it, or reads it as a model of another type.
    """
    needed = {"model_type", *family.translated}
    given = {key: value for key, value in config.items() if key in needed or key not in NEUTRAL}
    try:
        whole = completion.completed(given)
    except completion.Refused as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(
            f"transformers refuses it: {' '.join(lines)[:300]}",
            where=where,
            rule=f"values must be as transformers writes them for model_type {family.name}",
            fix="correct the key, or remove it: the default of transformers is used",
        ) from error
    if whole["model_type"] != family.name:
        raise UserError(
            f"transformers reads it as a model of type {whole['model_type']}",
            where=where,
            rule=f"one of {', '.join(FAMILIES)}",
            fix="use a model of one of these types",
        )
    # A later transformers may have more keys with defaults.
    return {key: value for key, value in whole.items() if key in given or key in family.known}


def without_effect(config: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    """Keys of a config.json that transformers does not read for a model of this type: left by other programs.

    These are neither fields of its configuration class nor named in a file that computes the model. There are none in
    a folder with Python code, or that a later transformers has written: either could read them.
    """
    family = FAMILIES[config["model_type"]]
    unknown = family.unknown(config)
    if not unknown or runs_code(folder) is not None or _is_later(config.get("transformers_version")):
        return ()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family.name]
    home = Path(_origin("transformers")).parent
    files = [*(home / f"{name}.py" for name in _SHARED), *Path(_origin(kind.__module__)).parent.glob("*.py")]
    source = "\n".join(file.read_text("utf-8") for file in files)
    words = set(re.findall(r"\w+", source))
    return tuple(key for key in unknown if not hasattr(kind, key) and not words.issuperset(re.findall(r"\w+", key)))


def _is_later(version: object) -> bool:
    """Whether a version is later than that of the installed transformers, or is not one."""
    if version is None:
        return False
    installed, other = (re.findall(r"\d+", str(part))[:3] for part in (metadata.version("transformers"), version))
    return not other or [int(part[:9]) for part in other] > [int(part) for part in installed]


def _origin(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(module)
    return spec.origin


def require_ignorable(config: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    """Check that keys which the user says have no effect are unsupported ones.

    Raises:
        UserError: config.json does not have the key, or it has an effect.
    """
    family = family_named(config.get("model_type"), where)
    for key in keys:
        if key not in config:
            raise UserError(
                f"{key!r} is not a key of config.json", where="--ignore-key", rule=where, fix="leave it out"
            )
        if key not in family.unknown(config):
            raise UserError(
                f"{key} is a supported key of {family.name}",
                where="--ignore-key",
                rule="only keys without a counterpart in recipes can be ignored",
                fix="leave it out",
            )


def _require_sane(config: Mapping[str, Any], where: str) -> None:
    """Refuse sizes that no model has, before loops run up to them.

    Raises:
        UserError: for the first.
    """
    for key, value in config.items():
        most = MOST_COUNTED if re.search("layer|experts|dense_replace|sparse_step", key) else MOST
        if isinstance(value, int | float) and abs(value) > most:
            raise UserError(f"{value:.3g}", where=f"{where}: {key[:80]}", rule=f"at most {most:,}")


def require_same(model: Model, section: Mapping[str, Any], where: str) -> None:
    """Check that a recipe's model is that of a config.json.

    Args:
        model: model of the recipe.
        section: from `section_of`.
        where: config.json.

    Raises:
        UserError: they differ; with the keys and both values.
    """
    theirs = validated(section, model.seq_length, where)
    problems = [*_differences(model, theirs), *_lengths(model, theirs), *_vocabulary(model, theirs)]
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    what = "\n".join([f"the recipe's model does not match config.json ({len(problems)} problems)", *map(str, problems)])
    raise UserError(what, where=where, parts=problems)


def validated(section: Mapping[str, Any], seq_length: int, where: str) -> Model:
    """The section `model` of a config.json, checked.

    Raises:
        UserError: a value of a wrong type.
    """
    try:
        return Model.model_validate({**section, "seq_length": seq_length})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(
            first["msg"], where=f"{where}: model.{key}", rule="config.json must describe a valid model"
        ) from error


def _differences(model: Model, theirs: Model) -> Iterator[UserError]:
    now, then = resolved(model), resolved(theirs)
    ignored = set(FREE)
    if not theirs.num_moe_experts:
        ignored |= {name for name in now if name.startswith("moe_")}
    ignored |= {"kv_channels", "num_query_groups"} if theirs.multi_latent_attention else LATENT
    if theirs.position_embedding_type == "learned_absolute":
        ignored |= ROTARY
    if not theirs.rope_scaling:
        ignored.add("rope_scaling_factor")
    if not theirs.use_mup:
        ignored |= {name for name in now if name.startswith("mup_")}
    if theirs.add_bias_linear:
        ignored.add("add_qkv_bias")  # included
    for name, value in now.items():
        if name not in ignored and _plain(name, value, theirs) != _plain(name, then.get(name), theirs):
            yield _problem(name, value, then.get(name))


def _plain(name: str, value: Any, model: Model) -> Any:
    """Values that mean the same: layers with experts, with a window or without rotation, as a list."""
    if name == "no_rope_freq" and isinstance(value, int):
        return [int((layer + 1) % value == 0) for layer in range(model.num_layers)]
    if name == "window_attn_skip_freq" and isinstance(value, int):
        return [int((layer + 1) % value != 0) for layer in range(model.num_layers)]
    if name == "moe_layer_freq" and isinstance(value, int) and value > 0:
        return [int(layer % value == 0) for layer in range(model.num_layers)]
    return value


def _lengths(model: Model, theirs: Model) -> Iterator[UserError]:
    most = theirs.max_position_embeddings or theirs.seq_length
    length = model.max_position_embeddings or model.seq_length
    if model.position_embedding_type == "learned_absolute":
        if length != most:
            yield _problem("max_position_embeddings", model.max_position_embeddings, most)
    elif model.max_position_embeddings is None and model.seq_length > most:
        yield UserError(
            f"{model.seq_length}, but config.json has max_position_embeddings {most}",
            where="model.seq_length",
            rule="sequences must not be longer than those that the model was trained with",
            fix=f"model.seq_length={most}; or, to extend it, model.max_position_embeddings={model.seq_length}",
        )


def _vocabulary(model: Model, theirs: Model) -> Iterator[UserError]:
    if model.vocab_size < theirs.vocab_size:
        yield UserError(
            f"{model.vocab_size}, but config.json has {theirs.vocab_size}",
            where="model.vocab_size",
            rule="the vocabulary must not shrink",
            fix=f"model.vocab_size={theirs.vocab_size}",
        )


def _problem(name: str, now: Any, then: Any) -> UserError:
    text = "null" if then is None else str(then).lower() if isinstance(then, bool) else str(then)
    return UserError(
        f"{now} in the recipe, {then} in config.json",
        where=f"model.{name}",
        rule="the recipe must describe the model whose weights it starts from",
        fix=f"model.{name}={text}",
    )
