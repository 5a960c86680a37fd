"""What is read of a row of JSONL, Parquet or a Hub dataset: a column of text, or a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Chat, Source

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages; a template may refuse some of them, or their order."""


class Rows(Protocol):
    """Which columns are read, and the document that a row is."""

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        """The columns to read.

        Raises:
            UserError: they are not there.
        """

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        """The document; empty if the row has none, None if it is not valid Unicode.

        Raises:
            UserError: the row holds something else.
        """


def rows(source: Source, chat: Chat | None) -> Rows:
    """How rows of a source are read."""
    return _Text(source.text_key) if chat is None else _Conversations(chat)


class _Text:
    def __init__(self, key: str) -> None:
        self._key = key

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        if self._key not in there:
            raise _no_column(repr(self._key), there, where, "data.sources[].text_key names the column of text")
        return [self._key]

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        value = row[self._key]
        if value is None:
            return ""
        return valid(_string(value, repr(self._key), where, "set data.sources[].text_key"))


class _Conversations:
    def __init__(self, chat: Chat) -> None:
        self._messages, self._pair = chat.messages_key, [chat.prompt_key, chat.completion_key]

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        if self._messages in there:
            return [self._messages]
        if all(key in there for key in self._pair):
            return self._pair
        keys = f"{self._messages!r}, nor {self._pair[0]!r} and {self._pair[1]!r}"
        rule = "a conversation is in data.chat.messages_key, or in prompt_key and completion_key"
        raise _no_column(keys, there, where, rule)

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        if self._messages in row:
            messages = self._turns(row[self._messages], where)
        elif None in (row[key] for key in self._pair):
            messages = []
        else:
            prompt, completion = (
                _string(row[key], repr(key), where, "conversations of several turns go into data.chat.messages_key")
                for key in self._pair
            )
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return conversation(messages) if messages else ""

    def _turns(self, value: Any, where: str) -> list[dict[str, str]]:
        if value is None:
            return []
        if not isinstance(value, list):
            raise _not_messages(f"{self._messages!r} holds {type(value).__name__}, not a list", where)
        found = []
        for number, message in enumerate(value):
            name = f"message {number} of {self._messages!r}"
            if not isinstance(message, dict):
                raise _not_messages(f"{name} is {_kind(message)}, not an object", where)
            if missing := [key for key in ("role", "content") if key not in message]:
                keys = ", ".join(map(repr, message)) or "none"
                raise _not_messages(f"{name} has no {missing[0]!r}; its keys: {keys}", where)
            fix = "fix or delete the row"
            role, content = (_string(message[key], f"{key!r} of {name}", where, fix) for key in ("role", "content"))
            if role not in ROLES:
                raise _not_messages(f"{name} has the role {role[:40]!r}", where)
            found.append({"role": role, "content": content})
        return found


def conversation(messages: list[dict[str, str]]) -> str | None:
    """The one text of a conversation, which its hash is made of; None if it is not valid Unicode."""
    return valid(json.dumps(messages, ensure_ascii=False))


def contents(text: bytes) -> list[str]:
    """What the messages of such a text say."""
    return [message["content"] for message in json.loads(text)]


def valid(text: str) -> str | None:
    """The text, unless it has a lone surrogate, which is legal in JSON but not valid Unicode."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return None
    return text


def _string(value: Any, name: str, where: str, fix: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} holds {_kind(value)}, not text", where=where, fix=fix)
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _not_messages(what: str, where: str) -> UserError:
    return UserError(
        what,
        where=where,
        rule=f"a message has role ({', '.join(ROLES[:4])}, …) and content, both text",
        fix="fix or delete the row, or set data.chat.messages_key",
    )


def _no_column(keys: str, there: Sequence[str], where: str, rule: str) -> UserError:
    columns = ", ".join(there) or "none"
    return UserError(f"no column {keys}; there is {columns}", where=where, rule=rule, fix=f"name one of: {columns}")
