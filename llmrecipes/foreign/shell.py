"""Arguments in a shell script, read without executing anything.

Variables, arrays, defaults (`${A:-1}`), integer arithmetic and sourced files are expanded as bash does. What only a
shell can know (a positional argument, the output of a command, a branch of an `if`) stays visible as its text, so that
nothing is guessed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "<", ">")
_OPENERS = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac"}
_NAME = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PARAMETER = re.compile(r"(?P<name>\w+|[@*#?])(?:\[(?P<index>[@*]|\d+)\])?(?P<rest>.*)", re.DOTALL)
_DEFAULT = re.compile(r":?[-=?](.*)", re.DOTALL)
_PROGRAM = re.compile(r"(?:^|/)[\w.-]+\.py$")
_OPTION = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
_TRAINS = re.compile(r"--(num-layers|hidden-size|seq-length|micro-batch-size|train-iters|train-samples)(=.*)?")
_HERE = re.compile(r"\$0|BASH_SOURCE")
_WORDS = re.compile(r"[`$]\W*(?:[@*]|\w*\[[@*]\]|\w*(?:ARG|OPT|PARAM|FLAG|EXTRA)\w*).*", re.IGNORECASE | re.DOTALL)
"""An unknown expansion that stands for words, not for a value."""
MOST_WORDS = 20_000
MOST_SOURCED = 20
MOST_BYTES = 1 << 20
MOST_DEPTH = 5
UNKNOWN = "$"
"""In a value: it has a part that only a shell knows."""


@dataclass
class Script:
    """What a script runs.

    Attributes:
        program: the Python program that trains; empty: none, all words of the script are taken.
        words: words of the command that trains, after its program.
        launcher: words of that command before its program.
        skipped: what is in branches and loops, with its line: words with `--`, and values of variables that are used.
        unread: other commands with options, and sourced files, with the reason.
    """

    program: str = ""
    words: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)
    skipped: list[tuple[str, int]] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)


def read_script(text: str, path: Path | None = None) -> Script:
    """The arguments of the last command of a script that trains with a Python program.

    Args:
        text: the script.
        path: its file, beside which sourced files are looked for; None: none are read.
    """
    reader = _StatementReader(path)
    reader.read(text)
    return reader.script()


def arguments(words: list[str], flags: re.Pattern[str], lists: re.Pattern[str]) -> dict[str, list[str]]:
    """Options with their values; the last of a repeated option counts, as for argparse.

    Args:
        words: of a command line.
        flags: options without a value.
        lists: options that take several.

    Returns:
        By name with underscores; under the empty name, unknown expansions that may hold further options.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for whole in words:
        for word in whole.split() if re.match(r"--[a-z].*\s", whole) else [whole]:
            if re.match(r"--?[A-Za-z]", word):
                name, equals, value = word.lstrip("-").partition("=")
                name = name.replace("-", "_")
                found[name] = [value] if equals else []
            elif word[:1] in (UNKNOWN, "`") and (
                not name
                or flags.fullmatch(name)
                or _WORDS.fullmatch(word)
                or (found[name] and not lists.fullmatch(name))
            ):
                found.setdefault("", []).append(word)
            elif name:
                found[name].append(word.strip("'\""))
    return found


class _StatementReader:
    """Statements of a script, in order."""

    def __init__(self, path: Path | None) -> None:
        self._path = None if path is None else path.resolve()
        self._variables: dict[str, list[str]] = {}
        self._used: set[str] = set()
        self._branches: list[tuple[str, str, int]] = []
        self._commands: list[tuple[list[str], int, int]] = []
        self._everything: list[str] = []
        self._sourced = 0
        self._script = Script()

    def script(self) -> Script:
        """What was read."""
        script = self._script
        trains = [entry for entry in self._commands if any(map(_TRAINS.fullmatch, entry[0]))]
        chosen = next(reversed(trains or self._commands), None)
        for entry in self._commands:
            words, at, line = entry
            if entry is chosen:
                script.program = words[at]
                script.launcher = words[:at]
                script.words = words[at + 1 :]
            elif any(word.startswith("--") for word in words[at:]):
                script.unread.append((" ".join(words[at:])[:200], f"another command, line {line}"))
        if not script.words:
            listed = [word for values in self._variables.values() for value in values for word in value.split()]
            script.words = self._everything if any(word.startswith("--") for word in self._everything) else listed
        script.skipped += [(text, line) for name, text, line in self._branches if name in self._used]
        return script

    def read(self, text: str, depth: int = 0) -> None:
        """Add the statements of a text."""
        closing: list[str] = []
        for statement, line in _statements(text):
            first = statement[0]
            if first in _OPENERS:
                closing.append(_OPENERS[first])
            elif closing and first == closing[-1]:
                closing.pop()
                continue
            if closing:
                self._skip(statement, line)
            elif first in ("source", "."):
                self._source(statement[1:], depth)
            else:
                self._run(statement, line, depth)

    def _skip(self, statement: list[str], line: int) -> None:
        # Not expanded: an array is listed where it is written, if that is in a branch.
        options = [option for raw in statement for option in _OPTION.findall(raw)]
        self._script.skipped += [(option, line) for option in options]
        if not options and (match := _NAME.match(statement[0])):
            self._branches.append((match[1], " ".join(statement)[:80], line))

    def _run(self, statement: list[str], line: int, depth: int) -> None:
        while statement and statement[0] in ("export", "local", "readonly", "declare", "typeset", "-a", "-x"):
            statement = statement[1:]
        while statement and (match := _NAME.match(statement[0])):
            statement = self._assign(match, statement)
        words = [word for raw in statement for word in self._fields(raw)][:MOST_WORDS]
        program = next((number for number, word in enumerate(words) if _PROGRAM.search(word)), None)
        inner = [word for word in words if any(map(_PROGRAM.search, word.split()[:-1]))]
        if program is not None:
            self._commands.append((words, program, line))
        elif inner and depth < MOST_DEPTH:
            self.read(inner[-1], depth + 1)  # of bash -c "..."
            return
        self._everything += words

    def _assign(self, match: re.Match[str], statement: list[str]) -> list[str]:
        """Set a variable; the words after it."""
        rest = statement[0][match.end() :]
        before = self._variables.get(match[1], []) if match[2] else []
        if not rest and len(statement) > 1 and statement[1] == "(":
            end = statement.index(")", 2) if ")" in statement[2:] else len(statement)
            self._variables[match[1]] = [*before, *(word for raw in statement[2:end] for word in self._fields(raw))]
            return statement[end + 1 :]
        value = self._text(rest)
        self._variables[match[1]] = [before[0] + value, *before[1:]] if before else [value]
        return statement[1:]

    def _source(self, raws: list[str], depth: int) -> None:
        name = self._text(raws[0]).replace("\0", UNKNOWN) if raws else UNKNOWN
        bases = () if self._path is None else (Path.cwd(), self._path.parent)
        file = next((file for base in bases if (file := (base / name).resolve()).is_file()), None)
        if UNKNOWN in name or "`" in name or self._path is None:
            why = "only the shell knows which file it is"
        elif file is None:
            why = "no such file"
        elif not any(file.is_relative_to(base) for base in (Path.cwd(), self._path.parent.parent)):
            why = "it is in another folder"
        elif file.stat().st_size > MOST_BYTES or self._sourced >= MOST_SOURCED or depth >= MOST_DEPTH:
            why = "too large, or too many files"
        else:
            self._sourced += 1
            self.read(file.read_text("utf-8", "replace"), depth + 1)
            return
        self._script.unread.append((f"source {' '.join(raws)}", f"{why}: add what it sets"))

    # -- expansion -----------------------------------------------------------------------------------------------------

    def _text(self, raw: str) -> str:
        """A raw word as one text: a value of a variable is not split."""
        return " ".join(self._fields(raw, split=False))

    def _fields(self, raw: str, *, split: bool = True) -> list[str]:
        """The fields that a raw word becomes: what is not quoted is split at blanks."""
        found: list[str] = []
        word = ""
        begun = False
        quoted = False
        at = 0
        while at < len(raw):
            letter = raw[at]
            if letter == "\\" and at + 1 < len(raw):
                kept = quoted and raw[at + 1] not in '$`"\\\n'
                word = word + ("\\" if kept else "") + raw[at + 1].replace("\n", "")
                begun = True
                at = at + 2
            elif letter == "'" and not quoted:
                end = _closed(raw, at)
                word = word + raw[at + 1 : end - 1]
                begun = True
                at = end
            elif letter == '"':
                quoted = not quoted
                begun = True
                at = at + 1
            elif letter == "`" or (letter == "$" and at + 1 < len(raw)):
                pieces, known, at = self._expansion(raw, at, quoted)
                if known and split and not quoted:
                    text = " ".join(pieces)
                    pieces = text.split()
                    if text[:1].isspace() and begun:
                        found = [*found, word]
                        word = ""
                        begun = False
                for number, piece in enumerate(pieces):
                    if number and split:
                        found, word = [*found, word], ""
                    word = word + (" " if number and not split else "") + piece
                    begun = True
            else:
                word = word + letter
                begun = True
                at = at + 1
        return [*found, word] if begun else found

    def _expansion(self, raw: str, at: int, quoted: bool) -> tuple[list[str], bool, int]:
        """Values of the expansion at a place, whether it is known, and the place after it."""
        end = _closed(raw, at) if raw[at] == "`" or raw[at + 1] in "({" else 0
        if raw.startswith("$((", at):
            text = self._sum(raw[at + 3 : end - 2])
            return [raw[at:end] if text is None else text], text is not None, end
        if end and raw[at + 1] != "{":
            inside = raw[at:end]
            folder = self._path
            if folder is None or "dirname" not in inside or not _HERE.search(inside) or ".." in inside:
                return [inside], False, end
            for _ in range(inside.count("dirname")):
                folder = folder.parent
            return [str(folder)], True, end
        if not end:
            simple = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]").match(raw, at + 1)
            if simple is None:
                return ["$"], False, at + 1
            end = simple.end()
            inside = simple[0]
        else:
            inside = raw[at + 2 : end - 1]
        values = self._parameter(inside, quoted)
        return ([raw[at:end]], False, end) if values is None else (values, True, end)

    def _parameter(self, text: str, quoted: bool) -> list[str] | None:
        """Values of `${text}`; None: unknown."""
        match = _PARAMETER.fullmatch(text)
        if match is None:
            return None
        name = match["name"]
        index = match["index"]
        rest = match["rest"]
        self._used.add(name)
        if name == "BASH_SOURCE" and self._path is not None and not rest:
            return [str(self._path)]
        values = self._variables.get(name)
        default = _DEFAULT.fullmatch(rest)
        if default and (values is None or (rest[0] == ":" and not "".join(values))) and "?" not in rest[:2]:
            return [self._text(default[1])] if quoted else self._fields(default[1])
        if values is None:
            return None
        if rest.startswith(("+", ":+")):
            return self._fields(rest.partition("+")[2]) if rest[0] == "+" or "".join(values) else []
        if rest and not default:
            return None  # ${A%.*} and others
        if index in ("@", "*"):
            return [" ".join(values)] if index == "*" and quoted else list(values)
        return values[int(index or 0) :][:1]

    def _sum(self, text: str) -> str | None:
        """Integer arithmetic as its result; None: it is not."""
        named = re.sub(
            r"[A-Za-z_]\w*", lambda match: " ".join(self._parameter(match[0], True) or [match[0]]), self._text(text)
        )
        try:
            return str(_integer(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None


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
    at = 0
    line = 1
    word = ""
    while at < len(text):
        letter = text[at]
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
            if word:
                yield word, line
                word = ""
            continue
        if letter == "\\" and at + 1 < len(text):
            word = word + text[at : at + 2]
            at = at + 2
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
    opening = text[at + 1]
    closing = {"(": ")", "{": "}"}[text[at + 1]]
    depth, end = 0, at + 1
    while end < len(text):
        depth += (text[end] == opening) - (text[end] == closing)
        end += 1
        if not depth:
            break
    return end


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
