"""Rows of a source as documents: a column of text, a conversation, or a pair of answers to a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

from llmrecipes.data.sources.judged import Form, as_message, form_of, hh_turns
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Chat, Source
from llmrecipes.recipe.sections.preference_section import Preference
from llmrecipes.recipe.sections.source import RowSource, ValidSource

Turns = list[dict[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages; a template may refuse some of them, or their order."""

SHARE_GPT = {"human": "user", "gpt": "assistant"}
"""Names of roles in messages with `from` and `value`, the form of ShareGPT."""
INSTRUCTION, INPUT, OUTPUT, HISTORY = "instruction", "input", "output", "history"
"""Columns of Alpaca's sets. `input` is optional and is appended to the instruction on a new line; `history` holds
earlier [question, answer] pairs."""
SYSTEM = ("system", "system_prompt")
"""Columns of a system message beside those of a conversation."""
UNCOUNTED = ("weight", "train", "training")
"""Keys with which OpenAI, Mistral and axolotl exclude a message from the loss."""
SAYS_MORE = ("function_call", "tools", "refusal", "audio", "images", "videos")
"""Keys of a message with a meaning that is not read: without it the model would learn something else."""
TOOL_CALLS, TOOLS = "tool_calls", "tools"
REASONING = ("reasoning_content", "reasoning", "thinking")
READ_BY_TEMPLATES = (TOOL_CALLS, *REASONING)
"""Keys of a message that are part of what an assistant says, where the template reads them."""
NAMES = ("name", "tool_call_id")
"""Keys of a message that some templates print and others have no use for."""


def section(source: Source) -> str:
    """The list of a recipe that a source is in."""
    return "data.valid_sources" if isinstance(source, ValidSource) else "data.sources"


TABLES = ("parquet", "hub")
"""Types of sources whose rows all have the same keys, also within a column: absent ones are null."""


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


def rows_of(source: RowSource, chat: Chat | None) -> Rows:
    """How rows of a source are read."""
    if chat is not None and chat.preference is not None:
        return PairRows(source, chat, chat.preference)
    return _Text(source) if chat is None else _Conversations(source, chat)


class Labelled:
    """Rows of which those with a label are read, if the source has one."""

    def __init__(self, source: RowSource) -> None:
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
    def __init__(self, source: RowSource) -> None:
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
    def __init__(self, source: RowSource, chat: Chat) -> None:
        super().__init__(source)
        self._messages = chat.messages_key
        self._pair = [chat.prompt_key, chat.completion_key]
        self._filled = source.type in TABLES

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        alpaca = [INSTRUCTION, OUTPUT]
        beside = [key for key in (TOOLS, *SYSTEM) if key in present]
        for columns in ([self._messages], self._pair, alpaca):
            if all(key in present for key in columns):
                optional = [key for key in (INPUT, HISTORY) if columns == alpaca and key in present]
                return self.with_label(list(dict.fromkeys([*columns, *optional, *beside])), present, where)
        keys = f"{self._messages!r}, nor {self._pair[0]!r} and {self._pair[1]!r}, nor {INSTRUCTION!r} and {OUTPUT!r}"
        rule = (
            "a conversation is a list of messages (data.chat.messages_key), text of a prompt and a completion "
            "(prompt_key, completion_key), or instruction, input and output"
        )
        raise no_column(keys, present, where, rule)

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        if self._messages in row:
            messages = turns(row[self._messages], self._messages, where, filled=self._filled)
        else:
            messages = self._of_a_pair(row, where)
        if not messages:
            return ""
        used = (self._messages, *self._pair)
        messages = [*system_of(row, messages, where, used=used), *messages]
        return conversation(messages, tools_of(row, where, filled=self._filled))

    def _of_a_pair(self, row: Mapping[str, Any], where: str) -> Turns:
        pair = self._pair if all(key in row for key in self._pair) else [INSTRUCTION, OUTPUT]
        if None in (row[key] for key in pair):
            return []
        fix = "conversations of several turns go into data.chat.messages_key"
        prompt, completion = (text_of(row[key], repr(key), where, fix) for key in pair)
        earlier: list[tuple[str, str]] = []
        if pair == [INSTRUCTION, OUTPUT]:
            if row.get(INPUT):
                prompt += "\n" + text_of(row[INPUT], repr(INPUT), where, fix)
            earlier = _history(row.get(HISTORY) or [], where)
        return [
            {"role": role, "content": content}
            for both in (*earlier, (prompt, completion))
            for role, content in zip(("user", "assistant"), both, strict=True)
        ]


def _history(value: Any, where: str) -> list[tuple[str, str]]:
    fix = "fix or delete the row"
    if not isinstance(value, list) or not all(isinstance(both, list) and len(both) == 2 for both in value):
        rule = "it is a list of pairs of a question and an answer"
        raise UserError(f"{HISTORY!r} holds something else", where=where, rule=rule, fix=fix)
    question, answer = (f"{which} in {HISTORY!r}" for which in ("a question", "an answer"))
    return [(text_of(asked, question, where, fix), text_of(said, answer, where, fix)) for asked, said in value]


def system_of(row: Mapping[str, Any], messages: Turns, where: str, *, used: Sequence[str]) -> Turns:
    """The system message that the columns `SYSTEM` have in front of the messages; none if they begin with it.

    Args:
        row: the row.
        messages: what the row's other columns say.
        where: place of the row.
        used: columns that are read as something else.

    Raises:
        UserError: two different ones, or no text.
    """
    fix = "keep one of them"
    said = [text_of(row[key], repr(key), where, fix) for key in SYSTEM if key not in used and row.get(key)]
    mine = [message["content"] for message in messages[:1] if message["role"] in ("system", "developer")]
    if len({*said, *mine}) > 1:
        raise UserError(
            "two different system messages", where=where, rule="a conversation begins with one system message", fix=fix
        )
    return [] if mine or not said else [{"role": "system", "content": said[0]}]


PAIR_RULE = (
    "a pair has two answers, data.chat.preference.chosen_key and rejected_key: text with text of a prompt "
    "(data.chat.prompt_key), messages with a prompt of text or messages, or whole conversations as messages or as text "
    "of the form of hh-rlhf (\\n\\nHuman: … \\n\\nAssistant: …), which begin alike"
)


def _split_off(prompt: Turns, chosen: Turns, rejected: Turns) -> list[Turns]:
    """A pair whose answers may be whole conversations, with the prompt: their common beginning."""
    alike = common(chosen, rejected)
    if prompt and prompt[-1] not in chosen[:alike]:
        return [prompt, chosen, rejected]
    return [chosen[:alike], chosen[alike:], rejected[alike:]]


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the beginning that both have."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


def turns(value: Any, column: str, where: str, *, filled: bool = False) -> Turns:
    """The messages of a column; none if it holds nothing.

    Args:
        value: the column's.
        column: its name.
        where: place of the row.
        filled: the row is of a table, which has a null for each key of a tool's arguments that other rows have.

    Raises:
        UserError: it holds something else.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise _not_messages(f"{column!r} holds {type(value).__name__}, not a list", where)
    named = ((f"message {number} of {column!r}", message) for number, message in enumerate(value))
    return [_turn(message, name, where, filled=filled) for name, message in named]


def _turn(message: Any, name: str, where: str, *, filled: bool) -> dict[str, Any]:
    """What is read of a message."""
    if not isinstance(message, dict):
        raise _not_messages(f"{name} is {_kind(message)}, not an object", where)
    if "role" not in message and {"from", "value"} <= message.keys():
        role = message["from"]
        message = {**message, "role": SHARE_GPT.get(role, role), "content": message["value"]}
    _require_read(message, name, where)
    if message.get(TOOL_CALLS) and message.get("content") is None:  # OpenAI's
        message = {**message, "content": ""}
    if missing := [key for key in ("role", "content") if key not in message]:
        keys = ", ".join(map(repr, message)) or "none"
        raise _not_messages(f"{name} has no {missing[0]!r}; its keys: {keys}", where)
    fix = "fix or delete the row"
    role, content = (text_of(message[key], f"{key!r} of {name}", where, fix) for key in ("role", "content"))
    if role not in ROLES:
        raise _not_messages(f"{name} has the role {role[:40]!r}", where)
    turn: dict[str, Any] = {"role": role, "content": content}
    for key in (*REASONING, *NAMES):
        if message.get(key):
            turn[key] = text_of(message[key], f"{key!r} of {name}", where, fix)
    if message.get(TOOL_CALLS):
        turn[TOOL_CALLS] = _calls(message[TOOL_CALLS], name, where, filled=filled)
    return turn


def _require_read(message: Mapping[str, Any], name: str, where: str) -> None:
    """Refuse a message with a key that changes its meaning and is not read."""
    if uncounted := [key for key in UNCOUNTED if message.get(key) not in (None, 1)]:
        raise UserError(
            f"{name} has {uncounted[0]!r}: {message[uncounted[0]]!r}",
            where=where,
            rule="the loss counts every answer of a conversation alike",
            fix="remove the key, or end the conversation before this message",
        )
    if unused := [key for key in SAYS_MORE if message.get(key)]:
        raise UserError(
            f"{name} has {unused[0]!r}",
            where=where,
            rule=f"of a message are read role, content, {', '.join((*READ_BY_TEMPLATES, *NAMES))}",
            fix="write it into content as the model is to write it, or delete the row",
        )
    if message.get("channel") not in (None, "", "final"):
        raise UserError(
            f"{name} is in the channel {str(message['channel'])[:40]!r}",
            where=where,
            rule="only a message in the channel final is an answer",
            fix=f"write reasoning into {REASONING[0]} of the answer, calls into {TOOL_CALLS}, or delete it",
        )


def _calls(value: Any, name: str, where: str, *, filled: bool) -> list[Any]:
    """Tool calls with their arguments as objects, which is what templates expect; OpenAI's are JSON in a text."""
    calls = []
    for call in _json_list(value, f"{TOOL_CALLS!r} of {name}", where, filled=filled):
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _not_json(f"a call in {TOOL_CALLS!r} of {name} has no name of a function", where)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise _not_json(
                    f"'arguments' of {function['name']!r} in {name} are not JSON: {error}", where
                ) from error
        function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return calls


def tools_of(row: Mapping[str, Any], where: str, *, filled: bool) -> list[Any]:
    """Definitions of tools in the column `tools`: a list of objects, or JSON of one.

    Raises:
        UserError: it holds something else.
    """
    return _json_list(row[TOOLS], repr(TOOLS), where, filled=filled) if row.get(TOOLS) else []


def _json_list(value: Any, name: str, where: str, *, filled: bool) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _not_json(f"{name} are not JSON: {error}", where) from error
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise _not_json(f"{name} are not a list of objects", where)
    return [_without_nulls(each) if filled else each for each in value]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _not_json(what: str, where: str) -> UserError:
    return UserError(
        what,
        where=where,
        rule="tools and tool_calls are lists of objects, as OpenAI's; a call has a function with name and arguments",
        fix="fix or delete the row",
    )


class PairRows(Labelled):
    """How rows of pairs are read: implements `sources.Rows`."""

    def __init__(self, source: RowSource, chat: Chat, preference: Preference) -> None:
        super().__init__(source)
        self._keys = (chat.prompt_key, preference.chosen_key, preference.rejected_key)
        self._form: Form | None = None
        self._filled = source.type in TABLES

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        self._form = None if set(self._keys[1:]) <= set(present) else form_of(present, where)
        if self._form is not None:
            return self.with_label(self._form.columns, present, where)
        if missing := [key for key in self._keys[1:] if key not in present]:
            raise no_column(repr(missing[0]), present, where, PAIR_RULE)
        return self.with_label([key for key in (*self._keys, TOOLS, *SYSTEM) if key in present], present, where)

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        keys = self._columns(row, where)
        if keys is None:
            return ""
        asked, *answers = keys
        values = {key: row[key] for key in keys if key in row}
        if self._form is not None and self._form.prompt is not None:  # an answer to somebody, not a text continued
            values = {key: as_message("user" if key == asked else "assistant", value) for key, value in values.items()}
        if None in values.values():
            return ""
        parts = self._parts(values, asked, answers, where)
        prompt, chosen, rejected = parts
        if chosen == rejected:
            raise UserError(
                f"{answers[0]!r} and {answers[1]!r} are equal",
                where=where,
                rule="the answers of a pair must differ",
                fix="delete the row",
            )
        if system := system_of(row, prompt, where, used=keys):
            if not all(message["role"] for message in prompt):
                raise UserError(
                    "a pair of texts has a system message",
                    where=where,
                    rule="texts are used as they are, without a template for a system message",
                    fix="write it into the prompt, or write prompt and answers as messages",
                )
            prompt = [*system, *prompt]
        return pair(prompt, chosen, rejected, tools_of(row, where, filled=self._filled))

    def _columns(self, row: Mapping[str, Any], where: str) -> tuple[str, str, str] | None:
        """The columns of the prompt and of the better and the worse answer; None for a row without a pair."""
        if self._form is None:
            return self._keys
        better = self._form.chosen_and_rejected(row, where)
        return None if better is None else (self._form.prompt or self._keys[0], *better)

    def _parts(self, values: dict[str, Any], asked: str, answers: list[str], where: str) -> list[Turns]:
        """The messages of the prompt and of both answers."""
        values = {key: [value] if isinstance(value, dict) else value for key, value in values.items()}
        if asked not in values:
            values = {key: hh_turns(value) for key, value in values.items()}
        texts = [key for key, value in values.items() if isinstance(value, str)]
        if texts == [asked, *answers]:
            return [self._text(value, key, where) for key, value in values.items()]
        if set(texts) & set(answers):
            shapes = [f"{key!r} is {'text' if key in texts else 'messages'}" for key in values]
            shapes += [f"no {asked!r}"] * (asked not in values)
            raise UserError(", ".join(shapes), where=where, rule=PAIR_RULE, fix="fix or delete the row")
        if asked in texts:
            values[asked] = as_message("user", values[asked])
        keys = (asked, *answers)
        parts = _split_off(*(turns(values.get(key, []), key, where, filled=self._filled) for key in keys))
        if not (parts[0] or asked in values):
            what = f"{answers[0]!r} and {answers[1]!r} begin differently, and there is no {asked!r}"
            raise UserError(what, where=where, rule=PAIR_RULE, fix="fix or delete the row")
        return parts

    @staticmethod
    def _text(value: Any, column: str, where: str) -> Turns:
        return [{"role": "", "content": text_of(value, repr(column), where, "fix or delete the row")}]


def conversation(messages: Turns, tools: list[Any] | None = None) -> str | None:
    """The one text of a conversation, which its hash is made of; None if it is not valid Unicode.

    Args:
        messages: at least one.
        tools: definitions of tools; the first message has them in the text.
    """
    if tools:
        messages = [{**messages[0], TOOLS: tools}, *messages[1:]]
    return valid(json.dumps(messages, ensure_ascii=False))


PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
"""Parts of a pair, `part` of its messages. A part that is text and not messages has the role "" and one content."""


def pair(prompt: Turns, chosen: Turns, rejected: Turns, tools: list[Any] | None = None) -> str | None:
    """The one text of a pair of answers to a prompt, a list of messages as that of a conversation; None if it is not
    valid Unicode."""
    parts = {PROMPT: prompt, CHOSEN: chosen, REJECTED: rejected}
    return conversation([{**turn, "part": part} for part, turns in parts.items() for turn in turns], tools)


def contents(text: bytes) -> list[str]:
    """What the messages of such a text say."""
    return [message["content"] for message in json.loads(text)]


def beside_content(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """What messages say beside contents: reasoning, tools, and calls without their ids, which differ by chance."""
    said: list[str] = []
    for message in messages:
        said += [message[key] for key in REASONING if key in message]
        calls = [call.get("function", call) for call in message.get(TOOL_CALLS, ())]
        calls = [{key: value for key, value in call.items() if key != "id"} for call in calls]
        said += [json.dumps(each, sort_keys=True, ensure_ascii=False) for each in (*calls, *message.get(TOOLS, ()))]
    return said


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
