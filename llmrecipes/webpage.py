"""HTML pages that need no network and run no scripts: escaping, tables, and the frame with its style.

Text comes from runs that others may have written, so it is redacted and escaped where it is put into a page, and the
policy lets a browser load nothing, whatever a page contains.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable, Sequence

from llmrecipes.redact import redact

_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that HTML does not allow; an encoder refuses half of a surrogate pair."""
_PLAIN = re.compile(r"[\d .,%+\-]*|[\w .,%+\-/]{0,7}", re.ASCII)
"""What has neither a secret (`redact.SHORTEST`) nor a sign of HTML: most cells."""

_FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{head}<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

STYLE = """\
:root {
  color-scheme: light dark;
  --page: #fff; --panel: #f6f7f9; --text: #1b1f24; --muted: #555d66; --line: #d5d9de; --grid: #e7eaee;
  --bad: #a61b12; --bad-page: #fdeeec; --warn: #7a4d00; --warn-page: #fff6df; --good: #176b2c;
  --c0: #0b5cad; --c1: #b03d00; --c2: #176b2c; --c3: #7336bf; --c4: #9a0f63; --c5: #4a5560;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --panel: #1d2127; --text: #e6e9ed; --muted: #a9b2bc; --line: #3a414a; --grid: #2a3038;
    --bad: #ff9b90; --bad-page: #3a1a18; --warn: #f2c14e; --warn-page: #33290f; --good: #6fd684;
    --c0: #6fb3ff; --c1: #ffa263; --c2: #6fd684; --c3: #c6a0ff; --c4: #ff85c2; --c5: #b4bec9;
  }
}
* { box-sizing: border-box; }
body {
  background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  margin: 0 auto; max-width: 90rem; padding: 1rem clamp(.75rem, 3vw, 2rem) 4rem;
}
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .5rem 0; }
h2 { border-top: 1px solid var(--line); font-size: 1.2rem; margin: 2rem 0 .75rem; padding-top: 1rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p { margin: .4rem 0; max-width: 60rem; }
a { color: var(--c0); }
code, pre, bdi { overflow-wrap: anywhere; unicode-bidi: isolate; }
code, pre { font: .87em/1.45 ui-monospace, monospace; }
pre { background: var(--panel); margin: .5rem 0; max-height: 32rem; overflow: auto; padding: .6rem .8rem; }
table { border-collapse: collapse; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem 1rem .25rem 0; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; unicode-bidi: isolate; }
td:not(.number, .swatch, :empty) { min-width: 6.5rem; }
@media (min-width: 45rem) { td:first-child { overflow-wrap: break-word; } } /* names stay whole where there is room */
th { font-weight: 600; }
td.number, th.number { overflow-wrap: normal; text-align: right; white-space: nowrap; }
tr.off td { background: var(--bad-page); }
tr.skipped td, .muted { color: var(--muted); }
caption { font-weight: 600; padding: .25rem 0; text-align: left; }
.scroll { margin: .5rem 0; overflow-x: auto; }
.scroll:focus-visible, summary:focus-visible, a:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
"""
"""Every colour of text has a contrast of 4.5 : 1 or more on both pages; `prefers-color-scheme` chooses one."""


def text(value: object) -> str:
    """Text as HTML, without secrets."""
    plain = str(value)
    if _PLAIN.fullmatch(plain):
        return plain
    return html.escape(redact(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", plain)))


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Collection[int] = (),
    caption: str = "",
    classes: Iterable[str] | None = None,
) -> str:
    """A table that scrolls where a screen is too narrow for it.

    Args:
        head: names of the columns.
        rows: their cells, as text.
        numbers: columns that are aligned at the right.
        caption: above it; empty: none.
        classes: of the rows; None: none.
    """
    name = f' tabindex="0" role="region" aria-label="{text(caption or "table: " + ", ".join(filter(None, head)))}"'
    lines = [f'<div class="scroll"{name}><table>']
    if caption:
        lines.append(f"<caption>{text(caption)}</caption>")
    lines.append(
        "<thead><tr>" + "".join(_cell("th", n, cell, numbers) for n, cell in enumerate(head)) + "</tr></thead>"
    )
    kinds = iter(classes or ())
    for row in rows:
        kind = next(kinds, "")
        cells = "".join(_cell("td", n, cell, numbers) for n, cell in enumerate(row))
        lines.append(f'<tr class="{kind}">{cells}</tr>' if kind else f"<tr>{cells}</tr>")
    lines.append("</table></div>")
    return "\n".join(lines)


def page(title: str, body: str, *, style: str = "", refresh: int | None = None) -> str:
    """A whole page.

    Args:
        title: of the window, as text.
        body: HTML.
        style: CSS after `STYLE`.
        refresh: seconds after which a browser loads it again; None: never.
    """
    head = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">\n'
    return _FRAME.format(head=head, title=text(title), style=STYLE + style, body=body)


def _cell(tag: str, column: int, value: object, numbers: Collection[int]) -> str:
    kind = ' class="number"' if column in numbers else ""
    scope = ' scope="col"' if tag == "th" else ""
    return f"<{tag}{scope}{kind}>{text(value)}</{tag}>"
