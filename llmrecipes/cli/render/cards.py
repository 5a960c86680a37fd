"""Output of `card`: one card as lines, all of them as a table of Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llmrecipes.workflow.card import Card, Part

_DONE = {"dryrun": "dry run", "verify": "verified", "smoke": "rehearsed", "run": "run"}


def lines(card: Card) -> Iterator[str]:
    """What was done with a recipe, and what was not."""
    planned = card.planned.figures
    yield f"{'recipe':12}{card.recipe}, on {card.gpus:,} {'GPUs' if planned.get('gpu') else 'ranks'} of {card.cluster}"
    if card.layout_source:
        yield f"{'layout':12}{card.layout_source}"
    if card.published is not None:
        speed = card.published.tokens_per_second_per_gpu
        measured = "" if speed is None else f", {speed:,.1f} tokens/s/GPU measured there"
        where = f"on {card.published.gpus:,} GPUs by {card.published.source}"
        yield f"{'published':12}{card.published.layout} {where}{measured}"
    parts = {"planned": card.planned, "searched": card.searched, **{n: getattr(card, a) for a, n in _DONE.items()}}
    for name, part in parts.items():
        if part is None:
            yield f"{name:12}not done"
            continue
        older = "" if part.recipe_hash == card.planned.recipe_hash else ", with an earlier version of the recipe"
        yield f"{name:12}{_text(part)}"
        yield f"{'':12}{part.date}, commit {part.commit}{older}: {part.command}"


def _text(part: Part) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in part.figures.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_value(each)}" for key, each in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(cards: Sequence[Card]) -> Iterator[str]:
    """Recipes for GPUs: the recipe's layout, the fastest of the search and the vendor's."""
    yield "| recipe | GPUs | recipe | the search's fastest | published | done |"
    yield "|---|---|---|---|---|---|"
    for card in cards:
        planned = card.planned.figures
        if not planned.get("gpu"):
            continue
        searched = "" if card.searched is None else _layout(card.searched.figures)
        published = "not known"
        if card.published is not None:
            speed = card.published.tokens_per_second_per_gpu
            measured = "" if speed is None else f": {speed:,.0f}"
            published = f"{card.published.layout}{measured} ({card.published.gpus:,} GPUs, {card.published.source})"
        done = ", ".join(name for attribute, name in _DONE.items() if getattr(card, attribute) is not None)
        where = f"{card.gpus:,} × {planned['gpu']}"
        yield f"| {card.recipe} | {where} | {_layout(planned)} | {searched} | {published} | {done or 'planned'} |"


def _layout(figures: dict[str, Any]) -> str:
    if figures.get("layout") is None:
        return str(figures.get("reason", ""))
    return f"{figures['layout']}: {figures['tokens_per_second_per_gpu']:,.0f}, {figures['memory_gib']:.1f} GiB"
