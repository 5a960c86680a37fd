"""Assertions on errors that users see: the key, option or path they are about, their tokens and exit code.

A token is a key, option, path, number, name or value. The words around it can change without editing a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmrecipes.errors import ExitCode, UserError
from tests.prose import is_prose


def has_token(text: str, token: str) -> bool:
    """Whether a text contains a complete token: `train.lr` is neither in `train.lr_decay` nor in `x.train.lr`."""
    start = r"(?<![\w.-])" if re.match(r"\w", token) else ""
    end = r"(?![\w-])(?!\.\w)" if re.search(r"\w$", token) else ""
    return re.search(f"{start}{re.escape(token)}{end}", text) is not None


@contextmanager
def refused(
    where: str | Path, *, rule: str | tuple[str, ...] = (), code: ExitCode = ExitCode.BAD_INPUT
) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """The block raises a `UserError` about a key, option or path.

    Args:
        where: the key, option or path that the error names; if it lists several errors, that of any of them.
        rule: tokens of its text, if one key has several rules.
        code: exit code of the process.
    """
    with pytest.raises(UserError) as caught:
        yield caught
    require_refusal(caught.value, where, rule=rule, code=code)


def require_refusal(
    error: UserError,
    where: str | Path,
    *,
    rule: str | tuple[str, ...] = (),
    code: ExitCode = ExitCode.BAD_INPUT,
) -> None:
    """The assertions of `refused`, for an error that was caught elsewhere."""
    assert error.code == code, error
    about = [part for part in (error, *error.parts) if has_token(part.where, str(where))]
    assert about, f"not about {where}: {error}"
    tokens = _tokens(rule)
    texts = [f"{each.what}\n{each.rule}\n{each.fix}" for each in about]
    assert any(all(has_token(text, token) for token in tokens) for text in texts), f"no {tokens} in: {error}"


def require_message(printed: str, where: str | Path, *, rule: str | tuple[str, ...] = ()) -> None:
    """The output of a command has one error, whose first line names the key, option or path that it is about."""
    assert "Traceback" not in printed
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, printed
    assert has_token(errors[0], str(where)), f"not about {where}: {printed}"
    message = printed[printed.index(errors[0]) :]
    for token in _tokens(rule):
        assert has_token(message, token), f"no {token} in: {message}"


def _tokens(rule: str | tuple[str, ...]) -> tuple[str, ...]:
    tokens = (rule,) if isinstance(rule, str) else rule
    prose = [token for token in tokens if not token or is_prose(token)]
    assert not prose, f"name a key, option, path, number or value, no words: {prose}"
    return tokens
