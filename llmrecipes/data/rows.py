"""Rows of a source as documents: a column of text, a conversation, or a pair of answers to a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llmrecipes.errors import UserError
from llmrecipes.recipe.preference import Preference
from llmrecipes.recipe.schema import Chat, Source
from llmrecipes.recipe.source import ValidSource

Turns = list[dict[str, str]]
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages; a template may refuse some of them, or their order."""

SAYS_MORE = ("tool_calls", "function_call", "tools", "reasoning_content", "reasoning", "thinking")
"""Keys of a message with text that its content does not have; without it the model would learn an empty answer."""


def section(source: Source) -> str:
    """The list of a recipe that a source is in."""
    return "data.valid_sources" if isinstance(source, ValidSource) else "data.sources"


class Rows(Protocol):
    """Which columns are read, and the document that a row is."""

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        """The columns to read.

        Raises:
            UserError: they are missing.
        """

    def wanted(self, row: Mapping[str, Any]) -> bool:
        """Whether the row belongs to the source."""

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        """The document; empty if the row has none, None if it is not valid Unicode.

        Raises:
            UserError: the row holds something else.
        """


def rows_of(source: Source, chat: Chat | None) -> Rows:
    """How rows of a source are read."""
    if chat is not None and chat.preference is not None:
        return PairRows(source, chat, chat.preference)
    return _Text(source) if chat is None else _Conversations(source, chat)


class Labelled:
    """Rows of which those with a label are read, if the source has one."""

    def __init__(self, source: Source) -> None:
        self._section = section(source)
        self._label_key, self._label = source.label_key, source.label_value

    def with_label(self, columns: list[str], present: Sequence[str], where: str) -> list[str]:
        """The columns and that of labels."""
        if self._label_key is None:
            return columns
        if self._label_key not in present:
            rule = f"{self._section}[].label_key names the column of labels"
            raise no_column(repr(self._label_key), present, where, rule)
        return list(dict.fromkeys([*columns, self._label_key]))

    def wanted(self, row: Mapping[str, Any]) -> bool:
        """Whether the row has the label."""
        return self._label_key is None or str(row[self._label_key]) == self._label


class _Text(Labelled):
    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._key, self._setting = source.text_key, f"{self._section}[].text_key"

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        if self._key not in present:
            raise no_column(repr(self._key), present, where, f"{self._setting} names the column of text")
        return self.with_label([self._key], present, where)

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        value = row[self._key]
        if value is None:
            return ""
        return valid(text_of(value, repr(self._key), where, f"set {self._setting}"))


class _Conversations(Labelled):
    def __init__(self, source: Source, chat: Chat) -> None:
        super().__init__(source)
        self._messages, self._pair = chat.messages_key, [chat.prompt_key, chat.completion_key]

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        if self._messages in present:
            return self.with_label([self._messages], present, where)
        if all(key in present for key in self._pair):
            return self.with_label(self._pair, present, where)
        keys = f"{self._messages!r}, nor {self._pair[0]!r} and {self._pair[1]!r}"
        rule = "a conversation is in data.chat.messages_key, or in prompt_key and completion_key"
        raise no_column(keys, present, where, rule)

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        if self._messages in row:
            messages = turns(row[self._messages], self._messages, where)
        elif None in (row[key] for key in self._pair):
            messages = []
        else:
            prompt, completion = (
                text_of(row[key], repr(key), where, "conversations of several turns go into data.chat.messages_key")
                for key in self._pair
            )
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return conversation(messages) if messages else ""


def turns(value: Any, column: str, where: str) -> list[dict[str, str]]:
    """The messages of a column; none if it holds nothing.

    Raises:
        UserError: it holds something else.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise _not_messages(f"{column!r} holds {type(value).__name__}, not a list", where)
    messages = []
    for number, message in enumerate(value):
        name = f"message {number} of {column!r}"
        if not isinstance(message, dict):
            raise _not_messages(f"{name} is {_kind(message)}, not an object", where)
        if unused := [key for key in SAYS_MORE if message.get(key)]:
            raise UserError(
                f"{name} has {unused[0]!r}",
                where=where,
                rule="a message has role and content; what else it says would be missing in training",
                fix="write it into content as the model is to write it, or delete the row",
            )
        if missing := [key for key in ("role", "content") if key not in message]:
            keys = ", ".join(map(repr, message)) or "none"
            raise _not_messages(f"{name} has no {missing[0]!r}; its keys: {keys}", where)
        fix = "fix or delete the row"
        role, content = (text_of(message[key], f"{key!r} of {name}", where, fix) for key in ("role", "content"))
        if role not in ROLES:
            raise _not_messages(f"{name} has the role {role[:40]!r}", where)
        messages.append({"role": role, "content": content})
    return messages


class PairRows(Labelled):
    """How rows of pairs are read: implements `sources.Rows`."""

    def __init__(self, source: Source, chat: Chat, preference: Preference) -> None:
        super().__init__(source)
        self._keys = (chat.prompt_key, preference.chosen_key, preference.rejected_key)

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        if missing := [key for key in self._keys if key not in present]:
            rule = "a pair is in data.chat.prompt_key, data.chat.preference.chosen_key and rejected_key"
            raise no_column(repr(missing[0]), present, where, rule)
        return self.with_label(list(self._keys), present, where)

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        if any(row[key] is None for key in self._keys):
            return ""
        kinds = {isinstance(row[key], str) for key in self._keys}
        if len(kinds) > 1:
            raise UserError(
                f"{', '.join(map(repr, self._keys))} mix text and lists of messages",
                where=where,
                rule="prompt and answers of a pair must be all text, or all messages",
                fix="fix or delete the row",
            )
        read = self._text if kinds == {True} else turns
        prompt, chosen, rejected = (read(row[key], key, where) for key in self._keys)
        if chosen == rejected:
            raise UserError(
                f"{self._keys[1]!r} and {self._keys[2]!r} are equal",
                where=where,
                rule="the answers of a pair must differ",
                fix="delete the row",
            )
        return pair(prompt, chosen, rejected)

    @staticmethod
    def _text(value: Any, column: str, where: str) -> Turns:
        return [{"role": "", "content": text_of(value, repr(column), where, "fix or delete the row")}]


def conversation(messages: list[dict[str, str]]) -> str | None:
    """The one text of a conversation, which its hash is made of; None if it is not valid Unicode."""
    return valid(json.dumps(messages, ensure_ascii=False))


PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
"""Parts of a pair, `part` of its messages. A part that is text and not messages has the role "" and one content."""


def pair(prompt: list[dict[str, str]], chosen: list[dict[str, str]], rejected: list[dict[str, str]]) -> str | None:
    """The one text of a pair of answers to a prompt, a list of messages as that of a conversation; None if it is not
    valid Unicode."""
    parts = {PROMPT: prompt, CHOSEN: chosen, REJECTED: rejected}
    return conversation([{**message, "part": part} for part, messages in parts.items() for message in messages])


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


def text_of(value: Any, name: str, where: str, fix: str) -> str:
    """A text of a row.

    Raises:
        UserError: it is something else.
    """
    if not isinstance(value, str):
        raise UserError(f"{name} holds {_kind(value)}, not text", where=where, fix=fix)
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _not_messages(what: str, where: str) -> UserError:
    return UserError(
        what,
        where=where,
        rule=f"a message needs role ({', '.join(ROLES[:4])}, …) and content, both text",
        fix="fix or delete the row, or set data.chat.messages_key",
    )


def no_column(keys: str, present: Sequence[str], where: str, rule: str) -> UserError:
    """The error for rows that lack a column."""
    columns = ", ".join(present) or "none"
    return UserError(
        f"no column {keys}; the columns are {columns}", where=where, rule=rule, fix=f"set the key to one of: {columns}"
    )
