"""generation_config.json of a model that a run starts from: how its authors sample, and which tokens end a text.

A run keeps it, because the model's folder may be gone when the run is exported. What the run's own tokenizer says of
special tokens counts more; what it leaves out, and further tokens that end a text, stay as they were.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmrecipes.hf.completion import generation_keys
from llmrecipes.hf.reading import read_json
from llmrecipes.io import write_atomic

FILE = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FROM_CONFIG = "_from_model_config"


def read(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers generates with: the file, or where there is none, the keys of config.json.

    Args:
        folder: the model.
        config: its config.json.

    Raises:
        UserError: the file is not a JSON object, or not in the folder.
    """
    if os.path.lexists(folder / FILE):
        read = read_json(folder, FILE)
        return {**read, **{key: config[key] for key in IDS if key in config and key not in read}}
    known = generation_keys()
    return {key: value for key, value in config.items() if key in known and value is not None and key[:1] != "_"}


def keep(folder: Path, config: Mapping[str, Any], run_dir: Path) -> None:
    """Write what `read` returns into the directory of a run."""
    write_atomic(run_dir / FILE, json.dumps(read(folder, config), indent=2) + "\n")


def of_run(run_dir: Path, special: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """generation_config.json of an exported run.

    Args:
        run_dir: the run.
        special: ids that its tokenizer says, from `tokenizer_files.write_tokenizer`.
        vocab_size: ids of the model; others in the file are left out.

    Raises:
        UserError: what the run keeps is not a JSON object.
    """
    if not os.path.lexists(run_dir / FILE):
        return {**special, _FROM_CONFIG: True}
    kept = read_json(run_dir, FILE)
    ids = {name: _ids(kept.get(name), vocab_size) for name in IDS}
    ends = list(dict.fromkeys([*_ids(special.get("eos_token_id"), vocab_size), *ids["eos_token_id"]]))
    merged: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    for name in ("bos_token_id", "pad_token_id"):
        merged[name] = special[name] if special.get(name) is not None else next(iter(ids[name]), None)
    return {**{key: value for key, value in kept.items() if key != _FROM_CONFIG}, **merged}


def _ids(value: object, vocab_size: int) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if type(each) is int and 0 <= each < vocab_size]
