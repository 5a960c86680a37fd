"""Which program a configuration is for, by its keys. Nothing of it is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrecipes.commandline import command_line
from llmrecipes.errors import UserError
from llmrecipes.recipe.document import parse

KINDS: Mapping[str, str] = {
    "megatron": "Megatron-LM",
    "axolotl": "axolotl",
    "llamafactory": "LLaMA-Factory",
    "torchtitan": "torchtitan",
    "nemo": "NeMo",
    "bridge": "Megatron-Bridge",
    "huggingface": "Hugging Face",
    "python": "Python",
}
"""Programs whose files are recognized, by their short names."""
_OPTION = re.compile(
    r"(?<!\S)--(?:num-layers|hidden-size|micro-batch-size|tensor-model-parallel-size|seq-length)\b|\bpretrain_\w+\.py\b"
)
_BRIDGE = {"dataset", "rng", "logger", "ddp", "dist", "mixed_precision", "comm_overlap", "profiling"}


@dataclass(frozen=True)
class Foreign:
    """A file of another program.

    Attributes:
        kind: key of `KINDS`.
        data: its content: nested mappings, or the text of a script.
    """

    kind: str
    data: Any

    @property
    def program(self) -> str:
        """Its name for people."""
        return KINDS[self.kind]


def recognized(text: str, path: Path) -> Foreign | None:
    """The program that a text is for; None: none that is known, or a recipe."""
    if path.suffix == ".toml":
        return _toml(text)
    if path.suffix == ".py":
        return Foreign("python", text)
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            data = None
        return _mapping(data) if isinstance(data, dict) else None
    data = parse(text).data
    if isinstance(data, dict):
        return _mapping(data)
    return Foreign("megatron", text) if _OPTION.search(text) else None


def refuse(text: str, path: Path) -> None:
    """Refuse a file of another program where a recipe is needed.

    Raises:
        UserError: it is one; with the command that translates it.
    """
    foreign = recognized(text, path)
    if foreign is not None and foreign.kind != "python":
        raise UserError(
            f"not a recipe: it looks like a file of {foreign.program}",
            where=str(path),
            rule="other programs' configurations are translated, with an account of what is left out",
            fix=command_line("new", options={"from": path}),
        )


def _toml(text: str) -> Foreign | None:
    import tomllib

    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    return Foreign("torchtitan", data) if {"training", "model", "job"} & data.keys() else None


def _mapping(data: Mapping[str, Any]) -> Foreign | None:
    """By keys that only one program has."""
    if {"name", "model", "train", "optimizer"} <= data.keys():
        return None  # a recipe
    names = {str(name).lstrip("-").replace("-", "_") for name in data}
    targets = _targets(data)
    if "model_type" in data and ("architectures" in data or "vocab_size" in data or "hidden_size" in data):
        return Foreign("huggingface", dict(data))
    if "base_model" in data:
        return Foreign("axolotl", dict(data))
    if "model_name_or_path" in data:
        return Foreign("llamafactory", dict(data))
    if any("megatron.bridge" in target for target in targets):
        return Foreign("bridge", dict(data))
    if any("nemo" in target for target in targets) or {"trainer", "model"} <= names or "_factory_" in names:
        return Foreign("nemo", dict(data))
    if _BRIDGE & names and "name" not in names and {"train", "model", "optimizer"} & names:
        return Foreign("bridge", dict(data))
    if "MODEL_ARGS" in names or ("num_layers" in names and "hidden_size" in names):
        return Foreign("megatron", dict(data))
    return None


def _targets(data: Any, depth: int = 0) -> list[str]:
    """Values of `_target_`: the classes that a file of NeMo names."""
    if not isinstance(data, Mapping) or depth > 4:
        return []
    below = [target for value in data.values() for target in _targets(value, depth + 1)]
    return [*([str(data["_target_"])] if "_target_" in data else []), *below]
