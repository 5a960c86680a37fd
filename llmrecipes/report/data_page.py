"""The page about prepared data: how much, of what, how long, and what was dropped, with examples."""

from __future__ import annotations

from llmrecipes import webpage
from llmrecipes.console import number
from llmrecipes.data.folder.overview import DataStats, DroppedBy, SourceStats
from llmrecipes.data.folder.prepared import Prepared
from llmrecipes.data.steps.split import SPLITS
from llmrecipes.report import charts
from llmrecipes.report.run_page import STYLE
from llmrecipes.report.training_sections import nothing

_RULES = 12
"""Rules of a step in a cell; the manifest has all."""


def page(name: str, prepared: Prepared, stats: DataStats) -> str:
    """The page of a recipe's prepared data.

    Args:
        name: of the recipe.
        prepared: the opened folder.
        stats: with languages and domains, as far as they are known.
    """
    documents, tokens, size = (sum(getattr(s, key) for s in stats.sources) for key in ("documents", "tokens", "bytes"))
    read = sum(source.read for source in stats.sources)
    figures = [
        ("documents", f"{documents:,}"),
        ("kept of those read", f"{documents / read:.1%}" if read else "none"),
        ("tokens", number(tokens)),
        ("bytes of text", number(size)),
        ("bytes a token", f"{size / tokens:.2f}" if tokens else "none"),
        ("tokens a document", f"{tokens / documents:,.0f}" if documents else "none"),
    ]
    tiles = "".join(f"<div><dt>{webpage.text(key)}</dt><dd>{webpage.text(value)}</dd></div>" for key, value in figures)
    sections = {
        "Sources": _sources(prepared, stats),
        "Lengths": _lengths(stats),
        "Languages": _languages(stats),
        "Domains": _domains(stats),
        "What the steps dropped": _steps(stats),
    }
    body = [
        f"<h1>Data of {webpage.text(name)}</h1>",
        f'<p class="muted">{webpage.text(prepared.path)}</p>',
        f'<dl class="figures">{tiles}</dl><main>',
        *(f"<section><h2>{title}</h2>\n{content}</section>" for title, content in sections.items()),
        "</main>",
    ]
    return webpage.page(f"Data of {name}", "\n".join(body), style=charts.STYLE + STYLE)


def _sources(prepared: Prepared, stats: DataStats) -> str:
    rows = [
        (
            s.label,
            f"{s.read:,}",
            f"{s.documents:,}",
            f"{s.tokens:,}",
            f"{s.bytes:,}",
            "" if s.bytes_per_token is None else f"{s.bytes_per_token:.2f}",
            f"{weight:.1%}",
        )
        for s, weight in zip(stats.sources, _shares(prepared), strict=True)
    ]
    head = ("source", "read", "documents", "tokens", "bytes", "bytes a token", "share of samples")
    splits = [(split, prepared.manifest.counts(split)) for split in SPLITS]
    sets = [*splits, *((f"set {label}", counts) for label, counts in prepared.manifest.valid_sources.items())]
    drawn = [(s.label, float(s.tokens), number(s.tokens)) for s in stats.sources]
    return "\n".join(
        [
            charts.ranks("Tokens by source", drawn, "tokens") if len(drawn) > 1 else "",
            webpage.table(head, rows, numbers=range(1, len(head))),
            webpage.table(
                ("split", "documents", "tokens", "bytes"),
                [(name, f"{c.documents:,}", f"{c.tokens:,}", f"{c.bytes:,}") for name, c in sets],
                numbers=range(1, 4),
            ),
        ]
    )


def _shares(prepared: Prepared) -> list[float]:
    return [weight / sum(prepared.weights) for weight in prepared.weights]


def _lengths(stats: DataStats) -> str:
    named = [(f"{length.least:,} to {2 * length.least - 1:,}", length) for length in stats.lengths]
    documents = [(name, float(each.documents), f"{each.documents:,}") for name, each in named]
    tokens = [(name, float(each.tokens), number(each.tokens)) for name, each in named]
    return (
        '<div class="charts">'
        + charts.ranks("Documents by their tokens", documents, "documents")
        + charts.ranks("Tokens by the length of their document", tokens, "tokens")
        + "</div>"
    )


def _languages(stats: DataStats) -> str:
    languages = stats.languages
    if languages is None:
        return nothing("Not detected: the package of the step `language` is not installed (extra corpora).")
    rows = [(code, float(n), f"{n / languages.documents:.1%}") for code, n in list(languages.by_code.items())[:20]]
    note = f"Detected by py3langid in {languages.documents:,} evenly spaced documents. Short texts and code mislead it."
    return charts.ranks("Most frequent languages", rows, "documents", note)


def _domains(stats: DataStats) -> str:
    if not stats.domains:
        return nothing("No source on this machine has a column url.")
    return (
        '<div class="charts">'
        + "".join(
            charts.ranks(
                f"Top domains of {domain.source}",
                [(host, float(count), f"{count / domain.rows:.1%}") for host, count in domain.by_host.items()],
                "rows",
                f"{domain.hosts:,} in the first {domain.rows:,} rows, before the steps.",
            )
            for domain in stats.domains
        )
        + "</div>"
    )


def _steps(stats: DataStats) -> str:
    dropped: dict[str, int] = {}
    for source in stats.sources:
        for step in source.dropped:
            dropped[step.step] = dropped.get(step.step, 0) + step.dropped
    read = sum(source.read for source in stats.sources)
    rows = [(name, float(count), f"{count:,}") for name, count in dropped.items() if not name.startswith("fim_")]
    parts = [
        charts.ranks("Documents dropped by each step, in order", rows, "documents", f"Of {read:,} documents read.")
    ]
    table = [
        (source.label, step.step, f"{step.dropped:,}", f"{step.changed:,}", _rules(step))
        for source in stats.sources
        for step in source.dropped
        if step.dropped or step.changed
    ]
    parts.append(webpage.table(("source", "step", "dropped", "changed", "rules"), table, numbers=(2, 3)))
    examples = [_example(source, step) for source in stats.sources for step in source.dropped if step.example]
    if examples:
        parts.append("<h3>Examples of dropped documents</h3>" + "".join(examples))
    return "\n".join(parts)


def _rules(step: DroppedBy) -> str:
    rules = sorted(step.rules.items(), key=lambda each: -each[1])
    more = f", {len(rules) - _RULES:,} more" if len(rules) > _RULES else ""
    return ", ".join(f"{name} {count:,}" for name, count in rules[:_RULES]) + more


def _example(source: SourceStats, step: DroppedBy) -> str:
    return (
        f"<details><summary>{webpage.text(step.step)}, of {webpage.text(source.label)}</summary>"
        f"<pre>{webpage.text(step.example)}</pre></details>"
    )
