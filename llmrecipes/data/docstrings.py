"""Questions about functions and classes of Python's standard library, answered with their docstring's first paragraph.

A small set of conversations that is on every machine: some 5,000, one in twelve of several turns.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmrecipes.data.rows import conversation

_LONGEST_QUESTION, _LONGEST_ANSWER = 120, 400  # characters; longer ones are tables and whole manuals
_FOLLOWING = 3
"""Methods that are asked about in the conversation about their class, at most."""
_Definition = ast.FunctionDef | ast.AsyncFunctionDef


def conversations(files: Iterable[Path], root: Path) -> Iterator[str | None]:
    """The conversations, in the order of the files; none about tests.

    Args:
        files: Python source files.
        root: folder of the top-level modules among them.
    """
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        if {"test", "tests", "idlelib", "lib2to3"}.isdisjoint(parts):
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield from map(conversation, _module(name, file))


def _module(name: str, file: Path) -> Iterator[list[dict[str, str]]]:
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
            yield from _class(f"{name}.{node.name}", node)


def _class(name: str, node: ast.ClassDef) -> Iterator[list[dict[str, str]]]:
    """A conversation about a class, then one for each of the methods that it has no room for."""
    methods = [each for each in node.body if isinstance(each, _Definition) and not each.name.startswith("_")]
    turns = [_turn(f"{name}.{each.name}{_arguments(each)}", each) for each in methods]
    found = [turn for turn in turns if turn]
    first = _turn(name, node, "What is {}?")
    if first is not None:
        yield first + [message for turn in found[:_FOLLOWING] for message in turn]
        found = found[_FOLLOWING:]
    yield from found


def _turn(
    name: str, node: _Definition | ast.ClassDef, question: str = "What does {} do?"
) -> list[dict[str, str]] | None:
    answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    asked = question.format(name)
    if not answer or len(answer) > _LONGEST_ANSWER or len(asked) > _LONGEST_QUESTION:
        return None
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _arguments(node: _Definition) -> str:
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args) if each.arg not in ("self", "cls")]
    return f"({', '.join(names)})"
