"""Jinja templates of tasks: they reach only a document, and are bounded in size and time."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from types import FrameType
from typing import Any

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_TEMPLATE = 64 * 1024
"""Characters of a template."""
LONGEST = 4 * 1024 * 1024
"""Characters or items of a value that a template makes, and of what it renders."""
LONGEST_PRODUCT = 64 * LONGEST
"""Product of the lengths of two values that one call gets: `replace` and `join` can make as many characters."""
LARGEST_NUMBER = 2**256
"""Absolute value of an operand of `*` and `**`."""
LARGEST_WIDTH = 10_000
"""A width, a count, or the end of a range."""
LOOPS = 2
"""Loops inside each other."""
CPU_SECONDS = 10.0
"""For one template or metric of one document; regular expressions and loops end after it."""
_STATEMENTS = (
    nodes.AssignBlock, nodes.Block, nodes.CallBlock, nodes.Extends, nodes.FilterBlock, nodes.Import, nodes.FromImport,
    nodes.Include, nodes.Macro,
)  # fmt: skip
_PADDING = frozenset(
    {
        "center",
        "ljust",
        "rjust",
        "zfill",
        "expandtabs",
        "to_bytes",
        "indent",
        "batch",
        "slice",
        "wordwrap",
        "tojson",
        "round",
        "safe_range",
    }
)
"""Functions, methods and filters whose result is as large as an integer says."""
_WIDTH = re.compile(r"\d{5,}|\{[^{}]*:[^{}]*\{|%[^a-zA-Z%]*\*")
"""In a format: a width that is large, or comes from a value."""


@contextmanager
def bounded(seconds: float = CPU_SECONDS) -> Iterator[None]:
    """A block that ends after some seconds of this process's CPU time; without effect off the main thread, or inside
    another such block.

    Raises:
        SecurityError: the time is over.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SecurityError(f"takes more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class _Bounded(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        """The text, piece by piece, so that it ends at the limit."""
        parts, size = [], 0
        with bounded():
            for part in self.generate(*args, **kwargs):
                parts.append(part)
                size += len(part)
                if size > LONGEST:
                    raise SecurityError(f"renders more than {LONGEST:,} characters")
        return "".join(parts)


class _Joins(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which keeps templates from Python's objects, with limits on what they compute.

    Args:
        filters: more of them.
        options: options of the environment.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    template_class = _Bounded
    code_generator_class = _Joins

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options)
        self.filters.update(filters)
        self.filters = {name: _limited(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self._compiled = lru_cache(256)(self._compile_one)

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Template:
        """A template; the same text is compiled once.

        Raises:
            SecurityError: it is too long, or has statements that tasks do not need.
        """
        return super().from_string(source, *args, **kwargs) if args or kwargs else self._compiled(source)

    def _compile_one(self, source: str) -> Template:
        if len(source) > LONGEST_TEMPLATE:
            raise SecurityError(f"a template has {len(source):,} characters, and at most {LONGEST_TEMPLATE:,} are read")
        try:
            tree = self.parse(source)
            for node in tree.find_all(_STATEMENTS):
                raise SecurityError(f"line {node.lineno}: {type(node).__name__} in the template of a task")
            _require_few_loops(tree, 0)
            with bounded():  # computes filters of constants
                return super().from_string(source)
        except RecursionError as error:
            raise SecurityError("a template is nested too deeply") from error

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`*`, `**`, `+` and `%`."""
        if operator in ("*", "**"):
            numbers = [value for value in (left, right) if isinstance(value, int | float)]
            for value in (left, right):
                if isinstance(value, str | list | tuple):
                    _require(len(value) * max([1, *numbers]) <= LONGEST, f"{operator} makes too long a value")
            _require(all(abs(number) <= LARGEST_NUMBER for number in numbers), f"{operator} of a large number")
            _require(operator == "*" or numbers[1:] == [] or abs(numbers[1]) <= 64, "** of more than 64")
        if operator == "%" and isinstance(left, str):
            _require_narrow((left,))
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A function or method."""
        owner = getattr(obj, "__self__", None)
        _require_small(getattr(obj, "__name__", ""), owner, (*args, *kwargs.values()))
        return _checked(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` in the sandbox; None for any other value."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _require_narrow((value.__self__,))
        return wrapped

    @staticmethod
    def joined(parts: Sequence[Any]) -> str:
        """`~`."""
        return str(_checked(str_join(parts)))


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # with what Jinja marks filters with
    def call(*args: Any, **kwargs: Any) -> Any:
        rest = args[1:] if hasattr(function, "jinja_pass_arg") else args
        _require_small(name, rest[0] if rest else None, (*rest[1:], *kwargs.values()))
        if name == "format":
            _require_narrow(args)
        return _checked(function(*args, **kwargs))

    return call


def _require(rule: bool, problem: str) -> None:
    if not rule:
        raise SecurityError(problem)


def _require_narrow(formats: Sequence[Any]) -> None:
    for text in formats:
        _require(not isinstance(text, str) or _WIDTH.search(text) is None, "a format with a large width")


def _require_small(name: str, value: Any, arguments: Sequence[Any]) -> None:
    sized = (argument for argument in (value, *arguments) if isinstance(argument, str | list | tuple | dict))
    sizes = sorted(map(len, sized), reverse=True)
    _require(len(sizes) < 2 or sizes[0] * sizes[1] <= LONGEST_PRODUCT, f"{name} of values that are too long together")
    for argument in arguments if name in _PADDING else ():
        wide = isinstance(argument, int) and abs(argument) > LARGEST_WIDTH
        _require(not wide, f"{name} with an argument above {LARGEST_WIDTH:,}")


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict | bytes):
        _require(len(value) <= LONGEST, f"a value of more than {LONGEST:,} characters or items")
    return value


def _require_few_loops(node: nodes.Node, outside: int) -> None:
    inside = outside + isinstance(node, nodes.For)
    _require(inside <= LOOPS, f"line {node.lineno}: {inside} loops inside each other")
    for child in node.iter_child_nodes():
        _require_few_loops(child, inside)


@contextmanager
def sandboxed_templates() -> Iterator[None]:
    """A block in which the harness renders its templates in `Sandbox`."""
    import lm_eval.utils

    before = lm_eval.utils.env
    if isinstance(before, Sandbox):
        yield
        return
    lm_eval.utils.env = sandbox()
    try:
        yield
    finally:
        lm_eval.utils.env = before


def sandbox() -> Sandbox:
    """The harness's environment, in the sandbox."""
    import lm_eval.utils

    plain = lm_eval.utils.env
    return Sandbox(
        {"regex_replace": lm_eval.utils.regex_replace},
        loader=plain.loader,
        undefined=plain.undefined,
        keep_trailing_newline=True,
    )
