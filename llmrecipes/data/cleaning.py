"""Steps that change documents: the text of web pages, Unicode that was decoded wrongly, masks of personal data."""

from __future__ import annotations

import ipaddress
import re

from llmrecipes.data.steps import Step

_PAGE = re.compile(
    r"\s*(?:<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL
)
_HEAD = 4096  # characters in which a page begins
# RFC 5322's dot-atom as Dolma reduces it (Soldaini et al. 2024, arXiv 2402.00159, section 5.3).
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9_%+-][A-Za-z0-9._%+-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,24}(?![A-Za-z0-9-])"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = re.compile(rf"(?<![\w.]){_OCTET}(?:\.{_OCTET}){{3}}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:]|\.\d)")
EMAIL, ADDRESS = "|||EMAIL_ADDRESS|||", "|||IP_ADDRESS|||"
"""Masks, as in Dolma."""


def html(main_content: bool) -> Step:
    """Replace a document that is a web page by its text; one that does not begin like a page is left as it is.

    Extracted by resiliparse (Bevendorff et al. 2018), as in DataComp-LM (Li et al. 2024, arXiv 2406.11794).

    Args:
        main_content: leave out navigation, headers, footers and forms.
    """
    from resiliparse.extract.html2text import extract_plain_text

    def extract(text: str) -> str:
        if not _PAGE.match(text, 0, _HEAD):
            return text
        return str(extract_plain_text(text, main_content=main_content, alt_texts=False))

    return lambda texts: [extract(text) for text in texts]


def unicode() -> Step:
    """Repair text that was decoded as the wrong encoding, and remove control characters, by ftfy (Speer 2019).

    The settings are those of FineWeb (Penedo et al. 2024, arXiv 2406.17557; `datatrove`'s `FTFYFormatter`): quotation
    marks, ligatures, wide characters and line breaks stay as they are, and nothing is normalized.
    """
    import ftfy

    settings = ftfy.TextFixerConfig(
        fix_latin_ligatures=False,
        fix_character_width=False,
        uncurl_quotes=False,
        fix_line_breaks=False,
        normalization=None,
        explain=False,
    )

    def fix(text: str) -> str:
        # ASCII has nothing to repair but entities and control characters.
        if text.isascii() and text.isprintable() and "&" not in text:
            return text
        return str(ftfy.fix_text(text, settings))

    return lambda texts: [fix(text) for text in texts]


def personal_data() -> Step:
    """Mask e-mail addresses and public IP addresses (Dolma, Soldaini et al. 2024, arXiv 2402.00159, section 5.3).

    Private, loopback and otherwise reserved addresses name nobody and stay, as in FineWeb.
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
    return ADDRESS if address.is_global else match[0]
