"""A corpus that every machine has, with what real ones suffer from: documentation, licences, manual pages and code of
this machine, and planted copies, web pages, wrongly decoded text and junk. For trying the steps of `data.steps`."""

from __future__ import annotations

import gzip
import hashlib
import html
import os
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

_PACKAGES = Path(sysconfig.get_path("purelib"))
_KINDS: tuple[tuple[Path, tuple[str, ...]], ...] = (
    (_PACKAGES, ("*.dist-info/METADATA", "**/*.md", "**/*.rst", "*.dist-info/licenses/**/*")),
    (Path("/usr/share/doc"), ("**/*",)),
    (Path("/usr/share/common-licenses"), ("*",)),
    (Path("/usr/share/man"), ("man[1-8]/*",)),
    (_PACKAGES, ("**/*.py",)),
)
_LARGEST = 200_000  # bytes of a file
_MOST = 8 << 20  # bytes of a kind, compressed files as they are
_NAMES = ("copyright", "changelog", "license", "readme", "news", "faq", "metadata", "notice", "todo", "authors")
_SUFFIXES = (".gz", ".txt", ".md", ".rst", ".py", "")
_EVERY = 10
"""Of so many documents, each of the following happens to one."""
_EDITED = 150
"""One in so many words of a planted copy is another one."""
_JUNK = (
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit. " * 8,
    "Buy cheap watches now! Click here to win. " * 30,
    "Home\nProducts\nPrices\nAbout us\nContact\nLogin\n" * 12,
    "Dieser Text ist deutsch, und wer ein englisches Modell lernt, braucht ihn nicht. Er steht hier, damit der Schritt "
    "für Sprachen etwas zu tun hat, und er ist lang genug, um nicht als zu kurz zu gelten und um erkannt zu werden.",
)


@cache
def machine_files() -> list[Path]:
    """At most 8 MiB of each kind, chosen by a hash of the name; in the order of kinds and hashes."""
    return [file for root, patterns in _KINDS for file in _chosen(root, patterns)]


def _chosen(root: Path, patterns: Iterable[str]) -> list[Path]:
    named = {file for pattern in patterns for file in root.glob(pattern) if _wanted(file)}
    chosen, room = [], _MOST
    for file in sorted(named, key=lambda file: hashlib.sha256(str(file.relative_to(root)).encode()).digest()):
        if os.access(file, os.R_OK) and file.is_file() and 500 <= (size := file.stat().st_size) <= _LARGEST:
            chosen.append(file)
            room -= size
        if room <= 0:
            break
    return chosen


def _wanted(file: Path) -> bool:
    return file.suffix in _SUFFIXES or file.name.lower().startswith(_NAMES) or file.parent.name.startswith("man")


def machine_documents(files: Iterable[Path]) -> Iterator[str | None]:
    """The texts of the files, of which some are spoiled, and after some a copy or junk; the same ones in every call."""
    for number, file in enumerate(files):
        data = file.read_bytes()
        if file.suffix == ".gz":
            data = gzip.decompress(data)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            yield None
            continue
        what = number % _EVERY
        if what == 1:
            text = _web_page(file.name, text)
        elif what == 2:
            text = text.replace("'", "â€™")  # an apostrophe's UTF-8, read as Windows-1252
        yield text
        if what == 3:
            yield text.upper()
        elif what == 4:
            yield _edited(text, number)
        elif what == 5:
            yield f"{_JUNK[number // _EVERY % len(_JUNK)]}\n{number}"


def _web_page(title: str, text: str) -> str:
    paragraphs = "".join(f"<p>{html.escape(part)}</p>\n" for part in text.split("\n\n"))
    return (
        f"<!DOCTYPE html>\n<html><head><title>{html.escape(title)}</title><style>p {{ margin: 1em }}</style></head>\n"
        "<body><nav><ul><li><a href='/'>Home</a></li><li><a href='/about'>About</a></li></ul></nav>\n"
        f"<main>{paragraphs}</main>\n"
        "<footer>We use cookies. Read our privacy policy.</footer></body></html>"
    )


def _edited(text: str, number: int) -> str:
    """A near-copy: single words are other ones, and so is white space."""
    words = text.split()
    for place in range(number % _EDITED, len(words), _EDITED):
        words[place] = words[(place * 7 + number) % len(words)]
    return " ".join(words)
