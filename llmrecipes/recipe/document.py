"""YAML text to plain data with line numbers; independent of recipes.

The dialect is YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema): `3e-4` is a number and `yes` is a
string, unlike in PyYAML's default. Deliberately not supported, because a recipe must be self-contained and safe to
open: tags, anchors and aliases, several documents in one file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import yaml

from llmrecipes.errors import UserError
from llmrecipes.units import MIB
from llmrecipes.untrusted import open_file

MAX_BYTES = MIB
MAX_DEPTH = 32
MAX_NODES = 50_000  # keys, values, lists and mappings: read in well under a second
MAX_KEY = 200
MAX_INT = 2**63 - 1
_WIDTH = 120

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One problem: `key` is dotted (may be empty), `line` counts from 1 (0: no line)."""

    key: str
    what: str
    rule: str = ""
    fix: str = ""
    line: int = 0


@dataclass(frozen=True)
class ParsedDocument:
    """Parsed text.

    `lines` maps the dotted key of everything in the text (list items by index) to its line. With problems, `data`
    holds what could be read.
    """

    data: Any
    lines: dict[str, int]
    problems: tuple[Problem, ...]


class _Loader(yaml.CBaseLoader):
    """libyaml's parser without constructors, so that no tag can run code."""


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or YAML 1.2 would read as another type."""


class _ShortDumper(_Dumper):
    """Lists of scalars on one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        plain = all(not isinstance(item, (dict, list)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=plain if flow_style is None else flow_style)


for _name, _pattern, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, _first)
    _ShortDumper.add_implicit_resolver(_TAG + _name, _pattern, _first)


def clip(text: str, length: int = 200) -> str:
    """The text, truncated to about `length` characters, with its full length."""
    return text if len(text) <= length else f"{text[:length]}… ({len(text):,} characters)"


def dotted(path: KeyPath) -> str:
    """`("data", "sources", 0)` as `data.sources.0`."""
    return ".".join(str(part) for part in path)


def parse(text: str) -> ParsedDocument:
    """Read one YAML document.

    All problems that leave the rest readable (duplicate keys, keys that are not strings, bad scalars) are collected;
    after one that does not (a syntax error, an alias, a tag) `data` is None.
    """
    refused = _refuse(text)
    if refused:
        return ParsedDocument(None, {}, (refused,))
    node = _Loader(text).get_single_node()
    builder = _Builder()
    data = None if node is None else builder.build(node, ())
    return ParsedDocument(data, builder.lines, tuple(builder.problems))


def dump(data: Any) -> str:
    """Plain data as YAML that `parse` (and any YAML 1.1 or 1.2 reader) reads back to the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH)


def dump_for_people(data: Mapping[str, Any], comments: Mapping[str, str], header: str = "") -> str:
    """`dump` with comments, lists of scalars on one line, and an empty line before each section.

    Args:
        data: as for `dump`.
        comments: by dotted key, a line of text without `#`; of a key that is not there, none.
    """
    text = yaml.dump(dict(data), Dumper=_ShortDumper, sort_keys=False, allow_unicode=True, width=1 << 16)
    lines = text.splitlines()
    for key, number in sorted(parse(text).lines.items(), key=lambda item: -item[1]):
        line = lines[number - 1]
        if comment := comments.get(key):
            short = f"{line}  # {comment}"
            indent = line[: len(line) - len(line.lstrip())]
            lines[number - 1 : number] = [short] if len(short) <= _WIDTH else [f"{indent}# {comment}", line]
    spaced = [
        f"\n{line}" if number and line.endswith(":") and line[0].isalpha() else line
        for number, line in enumerate(lines)
    ]
    return "\n".join([*(f"# {line}" for line in header.splitlines()), *spaced]) + "\n"


def _refuse(text: str) -> Problem | None:
    """The first unsupported construct. Events are read iteratively, so that depth cannot exhaust the stack."""
    depth = documents = nodes = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            line = event.start_mark.line + 1 if event.start_mark else 0
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    return Problem(
                        "", "a second document starts here", "a recipe must be a single YAML document", line=line
                    )
            if isinstance(event, yaml.NodeEvent):
                nodes += 1
                if nodes > MAX_NODES:
                    return Problem("", "too many keys and values", f"at most {MAX_NODES:,} in a file", line=line)
            if isinstance(event, yaml.NodeEvent) and event.anchor:
                return Problem(
                    "",
                    f"anchor or alias {clip(event.anchor)!r}",
                    "anchors and aliases are not allowed in recipes",
                    "write out the value",
                    line,
                )
            if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag:
                return Problem(
                    "", f"tag {clip(event.tag)!r}", "tags are not allowed in recipes", "remove the tag", line
                )
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    return Problem("", "nested too deeply", f"at most {MAX_DEPTH} levels", line=line)
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        fix = "indent with spaces, not tabs" if "\t" in text and "cannot start any token" in what else ""
        if "unexpected ':'" in what:
            fix = "put a space after each colon between a key and its value"
        if "scanning an alias" in what:
            fix = "quote a value that begins with *"
        return Problem("", f"not valid YAML: {what}", fix=fix, line=mark.line + 1 if mark else 0)
    except yaml.YAMLError as error:
        return Problem("", f"not valid YAML: {' '.join(str(error).split())}")
    return None


class _Builder:
    """Turns nodes into dicts, lists and scalars."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        if path:
            self.lines.setdefault(dotted(path), node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(cast(yaml.ScalarNode, node), path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag != _TAG + "str":
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                self._problem(path, f"{clip(shown)} as a key", "keys must be strings", line=line)
                continue
            key = key_node.value
            if len(key) > MAX_KEY:
                self._problem(
                    path, f"{clip(key, 40)!r} as a key", f"keys may have at most {MAX_KEY} characters", line=line
                )
                continue
            if key in first:
                lines = f"lines {first[key]} and {line}"
                self._problem(
                    (*path, key), f"duplicate key, on {lines}", "a key may appear only once", "remove one", line
                )
                continue
            first[key] = line
            self.lines[dotted((*path, key))] = line
            result[key] = self.build(value_node, (*path, key))
        return result

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        kind = node.tag.removeprefix(_TAG)
        text = node.value
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            return self._integer(text, path, node.start_mark.line + 1)
        if kind == "float":
            # The core schema spells infinity and not-a-number with a leading dot, Python without.
            return float(re.sub(r"\.(?=[a-zA-Z])", "", text))
        return text

    def _integer(self, text: str, path: KeyPath, line: int) -> int | None:
        # Compared by length first: int() itself refuses thousands of digits with an exception.
        if len(text.lstrip("-+")) <= 24:
            base = {"0o": 8, "0x": 16}.get(text[:2], 10)
            number = int(text[2:] if base != 10 else text, base)
            if abs(number) <= MAX_INT:
                return number
        shown = text if len(text) <= 40 else f"{text[:20]}… ({len(text)} digits)"
        self._problem(path, f"{shown} is too large", f"integers may be at most 2^63 - 1 = {MAX_INT}", line=line)
        return None

    def _problem(self, path: KeyPath, what: str, rule: str, fix: str = "", line: int = 0) -> None:
        self.problems.append(Problem(dotted(path), what, rule, fix, line))


MAX_SHOWN = 20


@dataclass(frozen=True)
class Kind:
    """Names of a document in messages (`recipe`), of its argument (`RECIPE`) and folder, and its required keys."""

    name: str
    argument: str
    folder: str
    least: str
    gone: Mapping[str, str] = field(default_factory=dict)
    """Names that there were, and what is to be written for them."""

    @property
    def rule(self) -> str:
        return f"{self.argument} must be a name in {self.folder} or the path of a YAML file"


def names(directory: Path) -> list[str]:
    """Names of the documents in a folder, sorted."""
    return sorted(path.stem for path in directory.glob("*.yaml"))


def find(name_or_path: str, directory: Path, kind: Kind) -> Path:
    """The file of a document; UserError with the nearest names if there is none."""
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        within = directory / f"{name_or_path}.yaml"
        if not path.exists() and len(name_or_path) <= MAX_KEY and within.is_file():  # such as data/fineweb
            return within
        if not path.is_file():
            what = "is a directory" if path.is_dir() else "no such file"
            raise UserError(what, where=str(path), rule=kind.rule)
        return path
    path = directory / f"{name_or_path}.yaml"
    if len(name_or_path) <= MAX_KEY and path.exists():
        return path
    known = names(directory)
    if name_or_path in kind.gone:
        raise UserError(f"this {kind.name} was replaced", where=name_or_path, fix=kind.gone[name_or_path])
    if name_or_path in known:  # a link to a file that is gone
        return path
    close = get_close_matches(name_or_path, known, n=3, cutoff=0.4)
    raise UserError(
        f"no such {kind.name} in {directory}",
        where=f"{clip(name_or_path)!r}",
        rule=kind.rule,
        fix=f"did you mean {' or '.join(close)}?" if close else f"known: {_some(known)}",
    )


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}" if names else "none"


def read(path: Path, kind: Kind) -> str:
    """The text of a document; UserError if it cannot be read, is not text, or is too large."""
    try:
        with open_file(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(raw) > MAX_BYTES:
        raise UserError("larger than 1 MiB", where=str(path), rule=f"a {kind.name} file may be at most 1 MiB")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"byte 0x{raw[error.start]:02x} is not UTF-8",
            where=f"{path}:{line}",
            rule=f"{kind.name} files must be UTF-8 text",
        ) from error


def shown(path: Path) -> Path:
    """The path as shown in messages: relative to the working directory if it is below it."""
    folder = Path.cwd()
    absolute = path.absolute()
    return absolute.relative_to(folder) if absolute.is_relative_to(folder) else path


def require_mapping(parsed: ParsedDocument, kind: Kind) -> list[Problem]:
    """The problem of a document that is empty or not a mapping; none if it is one, or has other problems."""
    if isinstance(parsed.data, dict) or (parsed.data is None and parsed.problems):
        return []
    if parsed.data is None:
        return [Problem("", "the file is empty", f"a {kind.name} needs at least {kind.least}")]
    what = "a list" if isinstance(parsed.data, list) else "a single value"
    return [Problem("", f"{what} at the top level", f"a {kind.name} must be a mapping of keys to values", line=1)]


def where(key: str, path: Path, lines: Mapping[str, int], overridden: Mapping[str, str]) -> str:
    """Location of a key or of the nearest section around it: the override that set it, or file and line."""
    parts = key.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    if set_by := next((overridden[name] for name in names if name in overridden), None):
        return f"override {clip(set_by)!r}"
    line = next((lines[name] for name in names if name in lines), None)
    return str(path) if line is None else f"{path}:{line}"


def in_order(problems: Iterable[Problem], lines: Mapping[str, int]) -> list[Problem]:
    """Problems in the order of the file; those without a line come first."""
    return sorted(problems, key=lambda each: each.line or lines.get(each.key, 0))


def error_of(
    problems: Sequence[Problem],
    misspelt: Sequence[UserError],
    path: Path,
    lines: Mapping[str, int],
    overridden: Mapping[str, str],
) -> UserError:
    """One error for everything: problems of the file in its order, then overrides that could not be read.

    At most `MAX_SHOWN` are listed, with the number of the others.
    """
    errors = []
    for problem in in_order(problems, lines)[:MAX_SHOWN]:
        place = f"{path}:{problem.line}" if problem.line else where(problem.key, path, lines, overridden)
        at = f"{place}: {clip(problem.key)}" if problem.key else place
        errors.append(UserError(problem.what, where=at, rule=problem.rule, fix=problem.fix))
    errors += misspelt[: MAX_SHOWN - len(errors)]
    total = len(problems) + len(misspelt)
    if total == 1:
        return errors[0]
    more = [f"… and {total - len(errors):,} more"] if total > len(errors) else []
    what = "\n".join([f"{total:,} problems", *(str(error) for error in errors), *more])
    return UserError(what, where=str(path), parts=errors)
