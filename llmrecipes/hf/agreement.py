"""Whether models can be merged: the same configuration, and the same tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hf.reading import read_bytes, read_json

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
    for name, found in others:
        keys = sorted({*expected, *found} - WITHOUT_MEANING)
        wrong = [key for key in keys if expected.get(key) != found.get(key)]
        if wrong:
            lines = [f"{key}: {found.get(key)!r}, and {expected.get(key)!r} in {first}" for key in wrong]
            raise UserError(
                "another configuration:\n    " + "\n    ".join(lines) if len(lines) > 1 else lines[0],
                where=f"{name}: config.json",
                rule="only models of one configuration can be merged",
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
        found = _tokenizer_files(folder)
        if files != found:
            raise UserError(
                f"{_listed(found)} for a tokenizer, and {_listed(files)} in {first}",
                where=name,
                rule="only models with one tokenizer can be merged",
                fix="copy the missing files if it is the same tokenizer",
            )
        for file in files:
            _require_same_file(first, expected / file, name, folder / file)


def _require_same_file(first: str, expected: Path, name: str, found: Path) -> None:
    difference = _first_difference(expected, found)
    if difference is not None:
        raise UserError(
            f"{difference} {first}",
            where=f"{name}: {found.name}",
            rule="only models with one tokenizer can be merged",
            fix="merge models of one vocabulary",
        )


def _first_difference(expected: Path, found: Path) -> str | None:
    """A clause that ends before the name of the other model; None: they are the same."""
    if read_bytes(expected.parent, expected.name) == read_bytes(found.parent, found.name):
        return None
    if found.name != TOKENIZER:
        return "differs from that of"
    old, new = (read_json(each.parent, each.name) for each in (expected, found))
    tokens, others = _numbers(old, expected), _numbers(new, found)
    for token in sorted({*tokens, *others}, key=lambda each: (tokens.get(each, 1 << 62), each)):
        if tokens.get(token) != others.get(token):
            return f"token {token!r} is {_number(others, token)}, and {_number(tokens, token)} in"
    for key in sorted({*old, *new} - _UNIMPORTANT):
        if old.get(key) != new.get(key):
            return f"{key} differs from that of"
    return None


def _number(tokens: Mapping[str, int], token: str) -> str:
    return f"number {tokens[token]}" if token in tokens else "not there"


def _numbers(tokenizer: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The number of every token: of the vocabulary, as a table or a list, and of those added to it."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab", {}) if isinstance(model, dict) else {}
    try:
        added = [each for each in tokenizer.get("added_tokens") or [] if isinstance(each, dict)]
        pairs = [*_pairs(vocabulary), *((each["content"], each["id"]) for each in added)]
        return {str(token): int(number) for token, number in pairs}
    except (TypeError, ValueError, LookupError) as problem:
        raise UserError(
            f"a token has no number: {problem!r}", where=str(path), rule="a tokenizer gives every token a number"
        ) from problem


def _pairs(vocabulary: object) -> Iterator[tuple[str, int]]:
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    elif isinstance(vocabulary, list):  # of a unigram model: [token, score]
        yield from ((str(each[0]), number) for number, each in enumerate(vocabulary))


def _tokenizer_files(folder: Path) -> tuple[str, ...]:
    if os.path.lexists(folder / TOKENIZER):
        return (TOKENIZER,)
    return tuple(file for file in OTHER_TOKENIZERS if os.path.lexists(folder / file))


def _complete(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults of its model type; as it is, where transformers does not know the type."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return dict(config)
    try:
        complete: dict[str, Any] = CONFIG_MAPPING[kind].from_dict(dict(config)).to_dict()
    except Exception as problem:  # of any kind: transformers checks the values of every family differently
        reason = next(iter(str(problem).strip().splitlines()), "") or type(problem).__name__
        raise UserError(
            f"config.json is not one of type {kind}: {reason[:200]}",
            where=name,
            rule="transformers can read the configuration",
            fix="download the model again",
        ) from problem
    return complete


def _listed(files: Sequence[str]) -> str:
    return " and ".join(files) if files else "no file"
