"""Conversations that every machine has: functions and classes of the standard library, and what they do."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

_LONGEST_QUESTION, _LONGEST_ANSWER = 120, 400  # characters; longer ones are tables and whole manuals
_FOLLOWING = 3
"""Most methods in the conversation about their class."""
_Definition = ast.FunctionDef | ast.AsyncFunctionDef


def docstring_conversations(files: Iterable[Path], root: Path) -> Iterator[list[dict[str, str]]]:
    """Questions about functions and classes of the standard library, answered with their docstring's first paragraph.

    A small set of conversations that is on every machine: some 5,000, one in twelve of several turns. In the order of
    the files; none about tests.

    Args:
        files: Python source files.
        root: folder of the top-level modules among them.
    """
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        if {"test", "tests", "idlelib", "lib2to3"}.isdisjoint(parts):
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield from _module_conversations(name, file)


_SENTENCE = re.compile(r"(.+?[.!?]) +(?=[A-Z])")
Turns = list[dict[str, str]]


def brief_and_long(talks: Iterable[Turns]) -> Iterator[tuple[Turns, Turns, Turns]]:
    """Pairs of answers with a preference that is known: the first sentence of an answer is better than all of it.

    Args:
        talks: from `docstring_conversations`.

    Yields:
        A question, its first sentence of an answer, and the longer answer; of each turn that has both.
    """
    for talk in talks:
        for question, answer in zip(talk[::2], talk[1::2], strict=True):
            if first := _SENTENCE.match(answer["content"]):
                yield [question], [{**answer, "content": first[1]}], [answer]


def _module_conversations(name: str, file: Path) -> Iterator[list[dict[str, str]]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of old escapes in strings
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # a file that shows what a syntax error is
    for node in tree.body:
        if isinstance(node, _Definition) and (turn := _turn(f"{name}.{node.name}{_arguments(node)}", node)):
            yield turn
        elif isinstance(node, ast.ClassDef):
            yield from _class_conversations(f"{name}.{node.name}", node)


def _class_conversations(name: str, node: ast.ClassDef) -> Iterator[list[dict[str, str]]]:
    """A conversation about a class, then one for each of the methods that it has no room for."""
    methods = [method for method in node.body if isinstance(method, _Definition) and not method.name.startswith("_")]
    turns = [_turn(f"{name}.{method.name}{_arguments(method)}", method) for method in methods]
    answered = [turn for turn in turns if turn]
    first = _turn(name, node, "What is {}?")
    if first is not None:
        yield first + [message for turn in answered[:_FOLLOWING] for message in turn]
        answered = answered[_FOLLOWING:]
    yield from answered


def _turn(
    name: str, node: _Definition | ast.ClassDef, question: str = "What does {} do?"
) -> list[dict[str, str]] | None:
    answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    content = question.format(name)
    if not answer or len(answer) > _LONGEST_ANSWER or len(content) > _LONGEST_QUESTION:
        return None
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def _arguments(node: _Definition) -> str:
    names = [
        argument.arg for argument in (*node.args.posonlyargs, *node.args.args) if argument.arg not in ("self", "cls")
    ]
    return f"({', '.join(names)})"
