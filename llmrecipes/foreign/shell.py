"""Arguments in a shell script, read without executing anything.

Variables, arrays, defaults (`${A:-1}`) and integer arithmetic are expanded. What only a shell can know (a positional
argument, the output of a command, a branch of an `if`) stays visible as its text, so that nothing is guessed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "<", ">")
_OPENERS = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac"}
_NAME = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_EXPANSION = re.compile(
    r"\$\{(?P<braced>\w+)(?P<all>\[[@*]\])?(?::?[-=](?P<default>[^}]*))?\}|\$(?P<plain>[A-Za-z_]\w*|[0-9@*#?])"
)
_PROGRAM = re.compile(r"(?:^|/)[\w.-]+\.py$")
_OPTION = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
MOST_WORDS = 20_000
UNKNOWN = "$"
"""In a value: it has a part that only a shell knows."""


@dataclass
class Script:
    """What a script runs.

    Attributes:
        words: words of the command that trains, after its program; of all lines if there is no command.
        launcher: words of that command before its program.
        skipped: words with `--` in branches and loops, with their line.
    """

    words: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)
    skipped: list[tuple[str, int]] = field(default_factory=list)


def read_script(text: str) -> Script:
    """The arguments of the last command of a script that runs a Python program."""
    script = Script()
    variables: dict[str, list[str]] = {}
    everything: list[str] = []
    closing: list[str] = []
    for statement, line in _statements(text):
        first = statement[0]
        if first in _OPENERS:
            closing.append(_OPENERS[first])
        elif closing and first == closing[-1]:
            closing.pop()
            continue
        if closing:
            # Not expanded: an array is listed where it is written, if that is in a branch.
            script.skipped += [(option, line) for raw in statement for option in _OPTION.findall(raw)]
            continue
        while statement and statement[0] in ("export", "local", "readonly", "declare", "-a", "-x"):
            statement = statement[1:]
        while statement and (match := _NAME.match(statement[0])):
            value, statement = _value(statement, match.end(), variables)
            before = variables.get(match[1], []) if match[2] else []
            variables[match[1]] = [*before, *value]
        words = [word for raw in statement for word in _fields(raw, variables)][:MOST_WORDS]
        program = next((number for number, word in enumerate(words) if _PROGRAM.search(word)), None)
        if program is not None:
            script.launcher = words[:program]
            script.words = words[program + 1 :]
        everything += words
    if not script.words:
        listed = (word for values in variables.values() for word in values)
        script.words = everything if any(word.startswith("--") for word in everything) else list(listed)
    return script


def arguments(words: list[str]) -> dict[str, list[str]]:
    """Options with their values; the last of a repeated option counts, as for argparse."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word.strip("'\""))
    return found


def _value(statement: list[str], start: int, variables: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """The value of an assignment that begins a statement, and the words after it."""
    rest = statement[0][start:]
    if not rest and len(statement) > 1 and statement[1] == "(":
        end = statement.index(")", 2) if ")" in statement[2:] else len(statement)
        return [word for raw in statement[2:end] for word in _fields(raw, variables)], statement[end + 1 :]
    return _fields(rest, variables), statement[1:]


def _statements(text: str) -> Iterator[tuple[list[str], int]]:
    """Raw words of each command, with its line; an array's parentheses are words of their own."""
    statement: list[str] = []
    started, depth = 1, 0
    for word, line in _tokens(text):
        if not statement:
            started = line
        if word == "(" and statement and re.fullmatch(r"\w+\+?=", statement[-1]):
            depth += 1
            statement.append(word)
        elif word == ")" and depth:
            depth -= 1
            statement.append(word)
        elif word == "\n" and depth:
            continue
        elif word in ("\n", "(", ")", *_OPERATORS) or word in ("then", "do", "else", "{", "}"):
            if statement:
                yield statement, started
            statement = []
        else:
            statement.append(word)
    if statement:
        yield statement, started


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Raw words (with their quotes), operators and ends of lines, with line numbers."""
    at, line, word = 0, 1, ""
    while at < len(text):
        letter = text[at]
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
            if word:
                yield word, line
                word = ""
            continue
        if letter == "\\" and at + 1 < len(text):
            word, at = word + text[at : at + 2], at + 2
            continue
        if letter in "'\"`" or text.startswith(("$(", "${"), at):
            end = _closed(text, at)
            line += text.count("\n", at, end)
            word, at = word + text[at:end], end
            continue
        if letter == "#" and not word:
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        operator = next((each for each in _OPERATORS if text.startswith(each, at)), "")
        if letter in "<>" and word.isdecimal():
            word = ""  # the number of a stream, in 2>&1
        if letter.isspace() or operator:
            if word:
                yield word, line
                word = ""
            if letter == "\n" or operator:
                yield operator or letter, line
            line += letter == "\n"
            at += max(1, len(operator))
            continue
        word, at = word + letter, at + 1
    if word:
        yield word, line


def _closed(text: str, at: int) -> int:
    """The end of a quoted text or an expansion that begins at a place."""
    if text[at] in "'\"`":
        quote, end = text[at], at + 1
        while end < len(text) and text[end] != quote:
            end += 2 if text[end] == "\\" and quote != "'" else 1
        return min(end + 1, len(text))
    opening, closing = text[at + 1], {"(": ")", "{": "}"}[text[at + 1]]
    depth, end = 0, at + 1
    while end < len(text):
        depth += (text[end] == opening) - (text[end] == closing)
        end += 1
        if not depth:
            break
    return end


def _fields(raw: str, variables: dict[str, list[str]]) -> list[str]:
    """The fields that a raw word becomes."""
    if raw.startswith("'") and raw.endswith("'") and raw.count("'") == 2:
        return raw[1:-1].split()
    text = re.sub(r"\\\n", " ", raw)
    text = re.sub(r"\$\(\((?P<sum>.*?)\)\)", lambda match: _sum(match["sum"], variables), text)
    text = _expanded(text, variables)
    return re.sub(r"(?<!\\)[\"']", "", text).replace("\\", "").split()


def _expanded(text: str, variables: dict[str, list[str]]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        if name in variables:
            return " ".join(variables[name])
        return match[0] if match["default"] is None else match["default"]

    return _EXPANSION.sub(value, text)


def _sum(text: str, variables: dict[str, list[str]]) -> str:
    """Integer arithmetic as its result, or as it is written."""
    named = _expanded(text, variables)
    plain = re.sub(r"[A-Za-z_]\w*", lambda match: " ".join(variables.get(match[0], [match[0]])), named)
    try:
        return str(_integer(ast.parse(plain.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return f"$(({text}))"


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if abs(number) < 1 << 63:
            return number
        case ast.BinOp(left, ast.Add(), right):
            return _integer(left) + _integer(right)
        case ast.BinOp(left, ast.Sub(), right):
            return _integer(left) - _integer(right)
        case ast.BinOp(left, ast.Mult(), right):
            return _integer(left) * _integer(right)
        case ast.BinOp(left, ast.Div() | ast.FloorDiv(), right):
            return _integer(left) // _integer(right)
    raise ValueError("not integer arithmetic")
