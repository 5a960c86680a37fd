"""Removes secrets from text: the one redactor of terminal, logs, records of runs and trackers.

What counts as a secret: values of environment variables whose names say so, user and password of URLs, query parameters
such as `token` or `X-Amz-Signature`, `Authorization` headers, and tokens of known form. A value that is shorter than
`SHORTEST` is only hidden where its position shows what it is (`NAME=value`, a URL), because it may be an ordinary word.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

T = TypeVar("T")

HIDDEN = "<hidden>"
SHORTEST = 8
"""Characters of a value that is hidden wherever it appears."""

# A partition key (NCCL_IB_PKEY, UCX_IB_PKEY) is not a secret but a number of the fabric.
_NAME = re.compile(r"TOKEN|(?<!_P)KEY|SECRET|PASSW|CREDENTIAL|AUTH|JWT|WEBHOOK", re.IGNORECASE)

# Narrower, because the values are hidden everywhere: GIT_AUTHOR_NAME, TOKENIZERS_PARALLELISM and XAUTHORITY are not
# secrets, nor is the path of a file that holds one.
_VARIABLE = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|WEBHOOK|API_?KEY|ACCESS_?KEY|(?:^|_)(?:TOKEN|JWT)(?:_|$)"
    r"|(?<!_P)(?:TOKEN|KEY|PASS|AUTH|SAS|DSN)$"
)
_NOT_ITSELF = re.compile(r"_(?:FILE|PATH|DIR|HOME|SOCK|NAME|TYPE|URL|URI|ENDPOINT|HEADER|EXPIRES|TTL|LENGTH|ENABLED)$")
_ORDINARY = re.compile(r"[\d.:+-]*|true|false|none|null|yes|no|on|off|auto|required|disabled|enabled", re.IGNORECASE)

_PARAMETER = re.compile(
    r"token(?!s|iz)|(?:^|[_.-]|api|access|account|shared|auth|secret)key(?:$|[_.-]?id$)|secret|passw|passphrase|credential"
    r"|signature|jwt|^(?:sig|pwd|pass|auth|authorization|code)$",
    re.IGNORECASE,
)
_OUTSIDE = r"\s\"'<>\\"  # ends a value; a URL in JSON or a shell keeps its quotes

_USERINFO = re.compile(
    # A password may contain @, or a slash that should have been escaped; a port is not a password.
    rf"(?<=://)[^/?#@:\[{_OUTSIDE}]*+:(?!\d++(?:[/?#]|$))(?:[^/?#{_OUTSIDE}]*@|[^{_OUTSIDE}]{{0,200}}@)"
    rf"|(?:(?<=http://)|(?<=https://))[^/?#@:\[{_OUTSIDE}]++@"  # a token instead of a user
)
_BARE_USERINFO = re.compile(
    r"(?<![\w.+\-:/@])(?!mailto:)[A-Za-z_][\w.+\-]*+:(?!//)[^:/@,;(){}\[\]" + _OUTSIDE + r"]++@"
    r"(?!sha\d+:)(?=[A-Za-z][\w\-]*+(?:\.[\w\-]++)+|\d+\.\d+\.\d+\.\d|localhost\b|[A-Za-z][\w\-]*+:\d)"
)
_QUERY = re.compile(rf"(?<=[?&;#])([\w.\-]++)=([^&#{_OUTSIDE}]++)")
_ASSIGNED = re.compile(
    rf"(?<![\w.\-/])(?<!--secret )(?!KEY=)([A-Z][A-Z0-9_]*+=)(?!\$)(\"[^\"\n]++\"|'[^'\n]++'|[^{_OUTSIDE}]++)"
)
_QUOTED = re.compile(  # in lower case, the keys of JSON and of Python's arguments; in upper case, those of variables
    r"((?<![A-Za-z0-9])(?:password|passwd|passphrase|api[_-]?[kK]ey|access[_-]?[tT]oken|auth[_-]?[tT]oken"
    r"|client[_-]?[sS]ecret|secret[_-]?(?:access[_-]?)?[kK]ey)(?:\\?[\"']\s*+[:=]\s*+\\?[\"']|=\\?[\"']?))"
    rf"([^,;{_OUTSIDE}]++)"
)
_ENTRY = re.compile(r"(\\?[\"'])([A-Z][A-Z0-9_]*+)(\1\s*+:\s*+)(\\?[\"'])((?:(?!\4)[^\\\n])++)\4")
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|x-api-key|x-auth-token|x-amz-security-token|private-token)"
    r"(\\?[\"']?\s*+[:=]\s*+\\?[\"']?)((?:basic|bearer|digest|token|negotiate)\s++)?"
    rf"([^,;{_OUTSIDE}]++)"
)
_SCHEME = re.compile(r"\b((?:Bearer|Basic)\s++)([A-Za-z0-9._~+/=\-]{16,})")
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{40,}|glpat-[\w\-]{20,}|sk-[\w\-]{32,}"
    r"|xox[abprs]-[\w\-]{20,}|AKIA[0-9A-Z]{16}|eyJ[\w\-]{10,}\.eyJ[\w\-]{10,}\.[\w\-]+)"
)

_remembered: set[str] = set()


def is_secret(name: str) -> bool:
    """Whether the name of a variable or option suggests that its value must not be shown or shared."""
    return _NAME.search(name) is not None


def redact(text: str) -> str:
    """`text` with `<hidden>` in place of every secret; ordinary text is returned unchanged.

    Takes about 50 µs for a line: for messages and records, not for a loop over steps or documents.
    """
    return _redact(text, _known())


def _redact(text: str, known: re.Pattern[str] | None) -> str:
    if known is not None:
        text = known.sub(HIDDEN, text)
    if "@" in text:
        text = _USERINFO.sub(f"{HIDDEN}@", text)
        text = _BARE_USERINFO.sub(f"{HIDDEN}@", text)
    if "=" in text:
        text = _QUERY.sub(_parameter, text)
        text = _ASSIGNED.sub(_assignment, text)
    if '":' in text or "':" in text:  # JSON, or a mapping of Python
        text = _ENTRY.sub(_entry, text)
    text = _QUOTED.sub(rf"\1{HIDDEN}", text)
    text = _HEADER.sub(_header, text)
    text = _SCHEME.sub(rf"\1{HIDDEN}", text)
    return _FORMS.sub(HIDDEN, text)


def redacted(value: T) -> T:
    """A JSON value with all of its strings redacted, keys too; numbers keep their types."""
    return _redacted(value, _known())


def _redacted(value: T, known: re.Pattern[str] | None) -> T:
    if isinstance(value, str):
        return cast(T, _redact(value, known))
    if isinstance(value, Mapping):
        return cast(T, {_redacted(key, known): _redacted(item, known) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return cast(T, [_redacted(item, known) for item in value])
    return value


def has_secret(text: str) -> bool:
    """Whether `text` has a token of known form, or a URL with a password or token, whatever variables are set."""
    if _FORMS.search(text) is not None:
        return True
    if "://" not in text:
        return False
    return _USERINFO.search(text) is not None or any(_PARAMETER.search(name[1]) for name in _QUERY.finditer(text))


def address(uri: str) -> str:
    """The address of a server without user, password, query and fragment, whatever their names are."""
    parts = urlsplit(uri)
    return redact(urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")))


def remember(value: str) -> None:
    """Hide a value that is in no environment variable, such as a key that was read from a file."""
    _remembered.update(_forms(value))


class Guarded:
    """A text stream whose output is redacted; anything but writing is the stream's own.

    `before_write` is called with each text.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unguarded = stream
        self.before_write: Callable[[str], None] | None = None

    def write(self, text: str) -> int:
        if self.before_write is not None:
            self.before_write(text)
        self.unguarded.write(redact(text) if len(text) > 1 else text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


def escape(error: UnicodeError) -> tuple[str, int]:
    r"""Handler of characters that a stream's encoding lacks: `\uXXXX`, which JSON reads as the same character."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return re.sub("(....)", r"\\u\1", lacking), error.end


def guard_streams() -> None:
    """Redact what this process prints from now on, tracebacks and warnings included: first call of a process.

    What a terminal cannot show (`LC_ALL=C`, a file's name that is not text) is printed as `escape` writes it.
    """
    codecs.register_error("llmrecipes.escape", escape)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `>&-`
            stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="llmrecipes.escape")
        if not isinstance(stream, Guarded):
            setattr(sys, name, Guarded(stream))


def _parameter(match: re.Match[str]) -> str:
    return f"{match[1]}={HIDDEN}" if _PARAMETER.search(match[1]) else match[0]


def _assignment(match: re.Match[str]) -> str:
    name, value = match.groups()
    quoting = value[0] if value[0] in "\"'" else ""
    known = not _is_sensitive(name[:-1]) or _is_ordinary(value.strip("\"'")) or value == f"{quoting}{HIDDEN}{quoting}"
    return match[0] if known else f"{name}{quoting}{HIDDEN}{quoting}"


def _entry(match: re.Match[str]) -> str:
    _, name, between, quoting, value = match.groups()
    known = not _is_sensitive(name) or _is_ordinary(value) or value == HIDDEN
    return match[0] if known else f"{match[1]}{name}{between}{quoting}{HIDDEN}{quoting}"


def _header(match: re.Match[str]) -> str:
    name, between, scheme, value = match.groups()
    if scheme is None and (len(value) < SHORTEST or not re.search(r"\d", value)):  # "authorization: required"
        return match[0]
    return f"{name}{between}{scheme or ''}{HIDDEN}"


def _is_sensitive(name: str) -> bool:
    name = name.upper()
    return _VARIABLE.search(name) is not None and _NOT_ITSELF.search(name) is None


def _is_ordinary(value: str) -> bool:
    """Numbers, switches and existing paths."""
    if _ORDINARY.fullmatch(value):
        return True
    try:
        return value.startswith(("/", "~/", "./")) and Path(value).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def _known() -> re.Pattern[str] | None:
    """Everything that environment variables hold now or have held, and what `remember` was called with."""
    for name, value in os.environ.items():
        _remembered.update(_of_variable(name, value))
    return _alternatives(frozenset(_remembered)) if _remembered else None


@cache
def _of_variable(name: str, value: str) -> frozenset[str]:
    secrets = set(_of_url(value)) if "://" in value else set()
    if _is_sensitive(name) and not _is_ordinary(value):
        secrets.update(_forms(value))
    return frozenset(secrets)


def _of_url(value: str) -> Iterator[str]:
    """Password and secret parameters of a URL, which clients take apart before they name them in an error."""
    try:
        parts = urlsplit(value)
        password, user = parts.password, parts.username
    except ValueError:  # an invalid port or address
        return
    if password:
        yield from _forms(password)
    elif user and parts.scheme in ("http", "https"):
        yield from _forms(user)
    for name, item in parse_qsl(parts.query) + parse_qsl(parts.fragment):
        if _PARAMETER.search(name):
            yield from _forms(item)


def _forms(value: str) -> Iterator[str]:
    """A value as it is, and as URLs, JSON, Python and shells write it."""
    value = value.strip()
    for form in (value, quote(value), quote(value, safe=""), unquote(value), json.dumps(value)[1:-1], repr(value)[1:-1],
                 shlex.quote(value)):  # fmt: skip
        if len(form) >= SHORTEST:
            yield form


@cache
def _alternatives(values: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(values, key=lambda value: (-len(value), value)))))
