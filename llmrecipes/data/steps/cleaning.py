"""Steps that change documents: the text of web pages, Unicode that was decoded wrongly, masks of personal data."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from llmrecipes.data.steps.steps import Step

_PAGE = re.compile(
    r"\s*+(?:<\?xml[^>]*+>\s*+|<!--.*?-->\s*+)*+<(?:!doctype\s++html|html|head|body)\b", re.IGNORECASE | re.DOTALL
)
_HEAD = 4096  # characters in which a page begins
MOST_CHARACTERS = 8 << 20
"""Of a page."""
MOST_NESTED = 512
"""Elements in each other, as in browsers."""
MOST_LISTS = 32
"""Lists in each other: the text indents every item by two spaces for each."""
MOST_ATTRIBUTES = 1000
"""Of a tag."""
MOST_OPTIONS = 10_000
"""Of a page's `select` elements. The extractor's time grows with the square of this and of the two above."""
_OPTION = re.compile(r"<option\b", re.IGNORECASE)
_TAG = re.compile(r"<[a-z](?:=\s*+(?:\"[^\"]*+\"|'[^']*+')|[^>])*+", re.IGNORECASE)
_VALUE = re.compile(r"\"[^\"]*+\"|'[^']*+'")
_SMALL_TAG = 4 * MOST_ATTRIBUTES
_BASE = re.compile(r"(?:(?<![\d.,])\d{1,3}|(?<!\w)[^\W\d_]{1,2}|\))$")
_EXPONENT = re.compile(r"[-+−–]?(?:\d{1,3}|[a-z])")
_LISTS = ("ul", "ol")
_SHALLOW = 6  # levels at which resiliparse takes every list for navigation
# RFC 5322's dot-atom as Dolma reduces it (Soldaini et al. 2024, arXiv 2402.00159, section 5.3).
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9_%+-][A-Za-z0-9._%+-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,24}(?![A-Za-z0-9-])"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = re.compile(rf"(?<![\w.]){_OCTET}(?:\.{_OCTET}){{3}}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:]|\.\d)")
_BEFORE_VERSION = re.compile(
    r"\b(?:ver|versions?|releases?|revision|rev|build|upgrade to|since)[.:]?\s*$|(?<![\w./])(?-i:[A-Z])\w*/$",
    re.IGNORECASE,
)
_AFTER_VERSION = re.compile(r"\s*(?:releases?|changelog|build)\b|-(?:rc|beta|alpha)", re.IGNORECASE)
EMAIL, ADDRESS = "|||EMAIL_ADDRESS|||", "|||IP_ADDRESS|||"
"""Masks, as in Dolma."""


def html(main_content: bool) -> Step:
    """Replace a document that is a web page by its text; one that does not begin like a page is left as it is.

    Extracted by resiliparse (Bevendorff et al. 2018), as in DataComp-LM (Li et al. 2024, arXiv 2406.11794): scripts,
    styles, comments, form fields, alternative texts of pictures and whatever is hidden are left out; lists keep their
    bullets and numbers, cells of tables are parted by tabs. Differently from it, exponents keep a mark (`10^6`), and
    lists near the root of a page are not taken for navigation unless half of their text is links.

    A page is dropped by `size` beyond `MOST_CHARACTERS`, by `depth` if elements are nested more deeply than
    `MOST_NESTED`, or lists than `MOST_LISTS`, by `attributes` if a tag has more than `MOST_ATTRIBUTES`, and by
    `options` beyond `MOST_OPTIONS`.

    Args:
        main_content: leave out navigation, headers, footers and forms.
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    def step(texts: list[str]) -> list[str] | str:
        extracted = []
        for text in texts:
            if not _PAGE.match(text, 0, _HEAD):
                extracted.append(text)
                continue
            if len(text) > MOST_CHARACTERS:
                return "size"
            if len(text) > _SMALL_TAG and any(_attributes(tag[0]) > MOST_ATTRIBUTES for tag in _TAG.finditer(text)):
                return "attributes"
            if sum(1 for _ in _OPTION.finditer(text)) > MOST_OPTIONS:
                return "options"
            tree = HTMLTree.parse(text)
            if tree.body is not None:
                if text.count("<") > MOST_NESTED and _nests_deeply(tree.body):
                    return "depth"
                _mark_exponents(tree)
                if main_content:
                    _keep_lists(tree)
            extracted.append(str(extract_plain_text(tree, main_content=main_content, alt_texts=False)))
        return extracted

    return step


def _attributes(tag: str) -> int:
    """About how many attributes a tag has, none of a short one."""
    return len(re.split(r"[\s/]+", _VALUE.sub(" ", tag))) if len(tag) > _SMALL_TAG else 0


def _nests_deeply(root: Any) -> bool:
    """Whether elements or lists are nested beyond the limits; ends at the first that is."""
    node = root
    depth = 1
    lists = 0
    while depth <= MOST_NESTED and lists <= MOST_LISTS:
        if (child := node.first_element_child) is not None:
            lists += node.tag in _LISTS
            node, depth = child, depth + 1
            continue
        while (following := node.next_element_sibling) is None:
            node, depth = node.parent, depth - 1
            lists -= node.tag in _LISTS
            if depth <= 1:
                return False
        node = following
    return True


def _elements(root: Any, tag: str) -> list[Any]:
    """The elements of a name; resiliparse's own collections count from their beginning for each element."""
    return [node for node in root if node.tag == tag]


def _mark_exponents(tree: Any) -> None:
    """`10<sup>6</sup>` becomes `10^6`; a note, which follows a word or is a link, stays."""
    for raised in _elements(tree.body, "sup"):
        before = raised.previous_sibling
        base = (before.text if before is not None else "")[-4:]
        if _EXPONENT.fullmatch(raised.text.strip()) and _BASE.search(base) and not raised.child_element_count:
            raised.parent.insert_before(tree.create_text_node("^"), raised)


def _keep_lists(tree: Any) -> None:
    """Put lists that are not mostly links so deep that they are not taken for navigation."""
    for listed in _elements(tree.body, "ul"):
        if listed.parent.closest("ul, ol") is not None:
            continue
        links = sum(len(link.text) for link in _elements(listed, "a"))
        if 2 * links >= len(listed.text):
            continue
        outermost = innermost = tree.create_element("div")
        for _ in range(_SHALLOW):
            innermost = innermost.append_child(tree.create_element("div"))
        listed.parent.insert_before(outermost, listed)
        innermost.append_child(listed)


def unicode(unescape_html: bool) -> Step:
    """Repair text that was decoded as the wrong encoding, and remove control characters, by ftfy (Speer 2019).

    The settings are those of FineWeb (Penedo et al. 2024, arXiv 2406.17557; `datatrove`'s `FTFYFormatter`): quotation
    marks, ligatures, wide characters and line breaks stay as they are, and nothing is normalized. Entities stay too,
    differently from there: in code and in texts about HTML they are meant.

    Args:
        unescape_html: replace entities such as `&amp;` in texts without `<`, as FineWeb does.
    """
    import ftfy

    settings = ftfy.TextFixerConfig(
        fix_latin_ligatures=False,
        fix_character_width=False,
        uncurl_quotes=False,
        fix_line_breaks=False,
        normalization=None,
        explain=False,
        unescape_html="auto" if unescape_html else False,
    )

    def fix(text: str) -> str:
        # ASCII has nothing to repair but entities and control characters.
        if text.isascii() and text.isprintable() and not (unescape_html and "&" in text):
            return text
        return str(ftfy.fix_text(text, settings))

    return lambda texts: [fix(text) for text in texts]


def personal_data() -> Step:
    """Mask e-mail addresses and public IP addresses (Dolma, Soldaini et al. 2024, arXiv 2402.00159, section 5.3).

    Private, loopback and otherwise reserved addresses name nobody and stay, as in FineWeb. So do version numbers of
    four parts, where the word beside them tells: `version 1.8.3.2`, `Chrome/1.0.2.3`, `1.8.3.2 release notes`.
    """

    def mask(text: str) -> str:
        if "@" in text:
            text = _EMAIL.sub(EMAIL, text)
        text = _IPV4.sub(_masked, text)
        return _IPV6.sub(_masked, text) if ":" in text else text

    return lambda texts: [mask(text) for text in texts]


def _masked(match: re.Match[str]) -> str:
    try:
        address = ipaddress.ip_address(match[0])
    except ValueError:
        return match[0]  # a time or a slice
    text = match.string
    version = _BEFORE_VERSION.search(text[max(0, match.start() - 20) : match.start()])
    version = version or _AFTER_VERSION.match(text, match.end())
    return ADDRESS if address.is_global and version is None else match[0]
