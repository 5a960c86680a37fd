"""The one way to open files that others may have written: runs, checkpoints, models, prepared data.

A folder that was downloaded, or that others can write, may have a FIFO, a device or a link in place of any file, a
file that grows while it is read, or JSON that exhausts the stack. Here the type of a file is checked on the open
descriptor, never by name beforehand; nothing is opened that could block or have a side effect; the size is known before
the first byte is read.
"""

from __future__ import annotations

import faulthandler
import io
import json
import math
import os
import re
import resource
import signal
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from llmrecipes.errors import UserError
from llmrecipes.units import GIB, MIB

RECORD = MIB
"""Bytes of the largest small record: a status, a list of starts, an id."""
MANIFEST = 256 * MIB
"""Bytes of the largest manifest, index or configuration: those of 16,384 ranks and a million tensors are smaller."""
LINE = 16 * MIB
"""Bytes of the longest line of a journal or of metrics."""
DEPTH = 64
"""Levels of nested lists and objects in JSON; Python's own limit depends on the stack of the caller."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_MEMORY = 2 * GIB
"""Bytes that an untrusted template or tokenizer may take more than this process has."""
_NO_MEMORY, _PANIC = 3, 4
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Refused(UserError, ValueError):
    """A file that is not read: what it is, or what it holds, breaks a rule.

    It is a `ValueError` too, for callers to which an unreadable record is the same as a corrupt one.
    """


def open_file(path: Path, *, root: Path | None = None, most: int | None = None) -> io.BufferedReader:
    """Open a regular file.

    Args:
        path: its name.
        root: folder that it must lie in, after all links; None: anywhere, for a path that the user has named.
        most: largest size in bytes.

    Raises:
        Refused: it is not a regular file, lies outside the root, or is too large.
        OSError: it does not exist or cannot be opened.
    """
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)  # neither waits for a FIFO's writer nor starts a device
    except ValueError as error:  # a null byte, or a character that no file name has
        raise Refused(f"is not a file name: {error}", where=repr(str(path))) from error
    try:
        _require(handle, path, root)
        descriptor = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)  # the same file, however renamed
    finally:
        os.close(handle)
    stream = os.fdopen(descriptor, "rb")
    size = os.fstat(descriptor).st_size
    if most is not None and size > most:
        stream.close()
        raise _too_large(path, size, most)
    return stream


def real(path: Path, *, root: Path | None = None) -> Path:
    """The real path of a regular file, for libraries that open files by name.

    Raises:
        Refused, OSError: as `open_file`.
    """
    with open_file(path, root=root) as stream:
        return _path_of(stream.fileno())


def model_root(folder: Path) -> Path:
    """Where the files of a model may lie: in its folder, or where the Hub's cache keeps what its snapshots link to."""
    resolved = folder.resolve()
    return resolved.parent.parent if resolved.parent.name == "snapshots" else resolved


def read(path: Path, *, root: Path | None = None, most: int = MANIFEST) -> bytes:
    """The content of a regular file; the arguments are those of `open_file`.

    Raises:
        Refused: as `open_file`; or the file grows while it is read.
        OSError: it does not exist or cannot be read.
    """
    with open_file(path, root=root, most=most) as stream:
        content = stream.read(os.fstat(stream.fileno()).st_size)
        if stream.read(1) and len(content) >= most:
            raise _too_large(path, len(content) + 1, most)
        return content


def read_json(
    path: Path,
    *,
    root: Path | None = None,
    most: int = MANIFEST,
    constant: Callable[[str], Any] | None = None,
) -> Any:
    """The value in a JSON file; the arguments are those of `open_file` and `parse_json`.

    Raises:
        Refused: as `read` and `parse_json`.
        OSError: it does not exist or cannot be read.
    """
    return parse_json(read(path, root=root, most=most), str(path), constant)


def parse_json(text: bytes | str, where: str = "", constant: Callable[[str], Any] | None = None) -> Any:
    """A JSON value, of at most `DEPTH` levels, whose strings can all be printed.

    Args:
        text: UTF-8.
        where: file, and line if it has several, for the message.
        constant: what NaN and infinities become; None: floats.

    Raises:
        Refused: it is not JSON, or nested too deeply.
    """
    try:
        value = json.loads(text, parse_constant=constant)
        if _may_be_deep(text):
            _require_shallow(value)
        if isinstance(text, bytes) and _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be printed
    except RecursionError as error:
        raise Refused("it is nested too deeply", where=where, rule=f"JSON may have at most {DEPTH} levels") from error
    except ValueError as error:
        raise Refused(f"it is not valid JSON: {str(error)[:200]}", where=where) from error
    return value


def parse_line(text: bytes) -> Any:
    """As `parse_json`, in half the time: a line of a file that may have millions.

    Raises:
        Refused: as `parse_json`.
    """
    try:
        value = from_json(text)
        if _may_be_deep(text):
            _require_shallow(value)
    except (ValueError, RecursionError):
        return parse_json(text)  # which knows more forms of text, or says what is wrong
    return value


_LARGE = 1 << 1000
"""Smaller integers are floats too."""


def number(value: object) -> float | int | None:
    """A JSON value if it is a number that can be computed with; else None: text, a boolean, infinity, 400 digits."""
    if type(value) is float:  # most, in files of a million of them
        return value if math.isfinite(value) else None
    if type(value) is int and -_LARGE < value < _LARGE:
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer that no float can hold
        return None


def lines(path: Path, *, root: Path | None = None, longest: int = LINE) -> Iterator[bytes]:
    """The lines of a regular file with their ends; one that is too long is cut and its rest left out.

    Raises:
        Refused, OSError: as `open_file`.
    """
    with open_file(path, root=root) as stream:
        while line := stream.readline(longest):
            yield line
            while len(line) == longest and not line.endswith(b"\n"):
                line = stream.readline(longest)


def require_ends(action: Callable[[], object], seconds: int, where: str, rule: str) -> None:
    """Try an action that runs what others wrote, such as a template or a regular expression, in a forked process.

    Neither Jinja nor the libraries of tokenizers can be told a limit of time or memory. What the action does or raises
    there is lost: it is repeated here by the caller, who now knows that it ends.

    Args:
        action: short, and without effects on others.
        seconds: most CPU time.
        where, rule: of the message.

    Raises:
        Refused: it takes longer or more than 2 GiB of memory, or a library in Rust panics.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # The child calls only the action, which must not need a lock that another thread may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 0
        try:
            _limit(seconds)
            action()
        except MemoryError:
            code = _NO_MEMORY
        except (Exception, SystemExit):
            code = 0  # the caller sees it again
        except BaseException:  # how a panic in Rust arrives here, which no caller expects
            code = _PANIC
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        raise Refused(f"it takes more than {seconds} seconds", where=where, rule=rule)
    if status in (_NO_MEMORY, -signal.SIGABRT):  # libraries in Rust abort
        raise Refused(f"it takes more than {_MEMORY // GIB} GiB of memory", where=where, rule=rule)
    if status == _PANIC:
        raise Refused("its library crashes, as on an endless regular expression", where=where, rule=rule)


def _limit(seconds: int) -> None:
    faulthandler.disable()
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silent, stream)
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    most = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _require(handle: int, path: Path, root: Path | None) -> None:
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        raise Refused(
            f"it is {_KINDS.get(stat.S_IFMT(mode), 'not a file')}, not a regular file",
            where=str(path),
            rule="only regular files are read: others could block or never end",
            fix="replace it with the file, or remove it",
        )
    if root is None:
        return
    folder = os.open(root, os.O_PATH | os.O_CLOEXEC)
    try:
        home, target = _path_of(folder), _path_of(handle)
    finally:
        os.close(folder)
    if not target.is_relative_to(home):
        raise Refused(
            f"it is a link to {target}",
            where=str(path),
            rule=f"links must stay in {root}: a link out of it could expose other files of this machine",
            fix="replace the link with the file, if you know what it is",
        )


def _path_of(descriptor: int) -> Path:
    """Where an open file lies, without links."""
    return Path(f"/proc/self/fd/{descriptor}").readlink()


_NESTED = frozenset((dict, list))
"""What JSON nests: the types themselves, because lines of metrics may have thousands of numbers."""


def _may_be_deep(text: bytes | str) -> bool:
    """False where there are too few lists and objects for that, as in most lines of metrics."""
    if isinstance(text, str):
        return text.count("[") + text.count("{") > DEPTH
    return text.count(b"[") + text.count(b"{") > DEPTH


def _require_shallow(value: Any) -> None:
    level = [value] if type(value) in _NESTED else []
    for _ in range(DEPTH):
        below = []
        for node in level:
            children = node.values() if type(node) is dict else node
            if not _NESTED.isdisjoint(map(type, children)):  # a pass in C: most lists have numbers only
                below += [child for child in children if type(child) in _NESTED]
        level = below
        if not level:
            return
    raise RecursionError


def _too_large(path: Path, size: int, most: int) -> Refused:
    return Refused(
        f"it has {size:,} bytes", where=str(path), rule=f"a file of this kind may have at most {most:,} bytes"
    )
