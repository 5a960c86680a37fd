"""Finds tests that quote the prose of an error, so that rewording a message would break them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

PROGRAMS = {"llmrecipes", "make", "scontrol", "sbatch", "kubectl"}  # a command may be two words

Function = ast.FunctionDef | ast.AsyncFunctionDef
# For each function: which of its results are the text of an error; indices of tuple items, or None for the result.
Messages = Mapping[str, Set[int | None]]


def is_prose(text: str) -> bool:
    """Whether a text has words that are the author's choice: two in a row, or a single one."""
    words = [word.strip("()").rstrip(".,;!?") for word in text.split()]
    plain = [bool(re.fullmatch(r"[A-Z]?[a-z]+(?:'[a-z]+)?", word)) and word not in PROGRAMS for word in words]
    return (plain == [True] and text.islower()) or any(a and b for a, b in pairwise(plain))


def in_file(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each assertion on the prose of an error: `match=`, `in`, `==`, startswith and endswith."""
    functions = [node for node in ast.walk(_parsed(path)) if isinstance(node, Function)]
    messages = {function.name: _returned(function) for function in functions}
    for function in functions:
        yield from _in_function(function, messages)


def own_raises(path: Path) -> Iterator[int]:
    """Lines that expect a `UserError` without naming what it is about."""
    for node in ast.walk(_parsed(path)):
        match node:
            case ast.Call(func=ast.Attribute(ast.Name(id="pytest"), "raises")):
                if any(isinstance(child, ast.Name) and child.id == "UserError" for child in ast.walk(node)):
                    yield node.lineno


@lru_cache(1)
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def _in_function(function: Function, messages: Messages) -> Iterator[tuple[int, str]]:
    known = _messages_in(function, messages)
    table = _table(function)
    for node in ast.walk(function):
        for tested in _tested(node, known):
            for line, text in _constants(tested, table):
                if len(text.split()) > 1 and is_prose(text):
                    yield line, text


def _tested(node: ast.AST, known: set[str]) -> Iterator[ast.expr]:
    """The values that an error's text is compared with."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.Eq):
        sides = (node.left, node.comparators[0])
        if _is_message(sides[1], known):
            yield sides[0]
        elif isinstance(node.ops[0], ast.Eq) and _is_message(sides[0], known):
            yield sides[1]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("startswith", "endswith", "index", "count") and _is_message(node.func.value, known):
            yield from node.args
        elif node.func.attr == "raises" and "UserError" in ast.unparse(node.args[0]):
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "match")


def _is_message(expression: ast.expr, known: set[str]) -> bool:
    """Whether an expression is an error's text: of a `UserError`, or the output of a command."""
    return any(_is_text_of_error(node, known) for node in ast.walk(expression))


def _is_text_of_error(node: ast.AST, known: set[str]) -> bool:
    match node:
        case ast.Name(id=name):
            return name in known
        case ast.Attribute(attr="stderr" | "err" | "what" | "rule" | "fix"):
            return True
        case ast.Subscript(slice=ast.Constant(value="error" | "rule" | "fix")):
            return True
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id="error") | ast.Attribute(ast.Name(), "value")]):
            return True
    return False


def _messages_in(function: Function, messages: Messages) -> set[str]:
    """Names in a function that hold an error's text, or name a function or fixture that returns one."""
    known = {name for name, items in messages.items() if None in items}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign | ast.NamedExpr):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        function_of = node.value.func if isinstance(node.value, ast.Call) else None
        called = function_of.id if isinstance(function_of, ast.Name) else ""
        if isinstance(target, ast.Tuple) and called in messages:
            known |= {ast.unparse(target.elts[item]) for item in messages[called] if item is not None}
        elif isinstance(target, ast.Name) and _is_message(node.value, known):
            known.add(target.id)
    return known


def _returned(function: Function) -> set[int | None]:
    """Items of `Messages`, also for a fixture that returns a function."""
    known, found = _messages_in(function, {}), set[int | None]()
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value and not function.name.startswith("test_"):
            if isinstance(node.value, ast.Tuple):
                found |= {n for n, item in enumerate(node.value.elts) if _is_message(item, known)}
            elif not isinstance(node.value, ast.DictComp) and _is_message(node.value, known):
                found.add(None)
    return found


def _table(function: Function) -> dict[str, list[ast.expr]]:
    """The values of each parameter of a parametrized test."""
    found: dict[str, list[ast.expr]] = {}
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("parametrize"):
            written = [str(each.value) for each in ast.walk(mark.args[0]) if isinstance(each, ast.Constant)]
            names = [name.strip() for each in written for name in each.split(",")]
            rows = mark.args[1].elts if isinstance(mark.args[1], ast.List | ast.Tuple) else []
            for row in rows:
                cells = row.elts if isinstance(row, ast.Tuple) and len(names) > 1 else [row]
                for name, cell in zip(names, cells, strict=False):
                    found.setdefault(name, []).append(cell)
    return found


def _constants(tested: ast.expr, table: dict[str, list[ast.expr]]) -> Iterator[tuple[int, str]]:
    expressions = table.get(tested.id, []) if isinstance(tested, ast.Name) else [tested]
    for expression in expressions:
        for node in ast.walk(expression):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value
