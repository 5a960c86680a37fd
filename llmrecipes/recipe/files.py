"""Documents by name or path, and their problems as one message; shared by recipes and cluster profiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.recipe import document
from llmrecipes.recipe.document import Document, Problem, clip
from llmrecipes.untrusted import open_file

MAX_SHOWN = 20


@dataclass(frozen=True)
class Kind:
    """Names of a document in messages (`recipe`), of its argument (`RECIPE`) and folder, and its required keys."""

    name: str
    argument: str
    folder: str
    least: str

    @property
    def rule(self) -> str:
        return f"{self.argument} is a name in {self.folder} or the path of a YAML file"


def names(directory: Path) -> list[str]:
    """Names of the documents in a folder, sorted."""
    return sorted(path.stem for path in directory.glob("*.yaml"))


def find(name_or_path: str, directory: Path, kind: Kind) -> Path:
    """The file of a document; UserError with the nearest names if there is none."""
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        if not path.is_file():
            what = "is a directory" if path.is_dir() else "no such file"
            raise UserError(what, where=str(path), rule=kind.rule)
        return path
    known = names(directory)
    if name_or_path in known:
        return directory / f"{name_or_path}.yaml"
    close = get_close_matches(name_or_path, known, n=3, cutoff=0.4)
    raise UserError(
        f"no {kind.name} of this name in {directory}",
        where=f"{clip(name_or_path)!r}",
        rule=kind.rule,
        fix=f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known) or 'none'}",
    )


def read(path: Path, kind: Kind) -> str:
    """The text of a document; UserError if it cannot be read, is not text, or is too large."""
    try:
        with open_file(path) as file:
            raw = file.read(document.MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(raw) > document.MAX_BYTES:
        raise UserError("larger than 1 MiB", where=str(path), rule=f"a {kind.name} is a short text file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"byte 0x{raw[error.start]:02x} is not UTF-8", where=f"{path}:{line}",
                        rule=f"{kind.name}s are UTF-8 text") from error  # fmt: skip


def shown(path: Path) -> Path:
    """The path as shown in messages: relative to the working directory if it is below it."""
    here = Path.cwd()
    absolute = path.absolute()
    return absolute.relative_to(here) if absolute.is_relative_to(here) else path


def require_mapping(parsed: Document, kind: Kind) -> list[Problem]:
    """The problem of a document that is empty or not a mapping; none if it is one, or has other problems."""
    if isinstance(parsed.data, dict) or (parsed.data is None and parsed.problems):
        return []
    if parsed.data is None:
        return [Problem("", "the file is empty", f"a {kind.name} has at least {kind.least}")]
    what = "a list" if isinstance(parsed.data, list) else "a single value"
    return [Problem("", f"{what} at the top", f"a {kind.name} is a mapping of keys", line=1)]


def where(key: str, path: Path, lines: Mapping[str, int], overridden: Mapping[str, str]) -> str:
    """Location of a key or of the nearest section around it: file and line, or the override that set it."""
    name = key
    while name:
        if name in overridden:
            return f"override {clip(overridden[name])!r}"
        if name in lines:
            return f"{path}:{lines[name]}"
        name = name.rpartition(".")[0]
    return str(path)


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
