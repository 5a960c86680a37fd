"""`card`: parsing and printing only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import RUNS, JsonOption, RunsOption
from llmrecipes.errors import UserError

if TYPE_CHECKING:
    from lab.cards.cards import Card, CardPart

_DONE = {"dryrun": "dry run", "verify": "verified", "smoke": "rehearsed", "run": "run"}


def card(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="Name of a recipe in recipes/.", autocompletion=completion.recipes),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All recipes; print a table of those for GPUs.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Repeat the plan and search, and write the card.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Fail if a recipe or its plan has changed since its card was written.")
    ] = False,
    do: Annotated[
        list[str] | None,
        typer.Option(
            "--do", metavar="PART", help="With --write: run dryrun, verify or smoke, and record it; repeatable."
        ),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="With --write: record this run.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="NAME", help="With --write: plan for this profile.", autocompletion=completion.clusters
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=1, help="With --write: number of GPUs.")
    ] = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Show, write or check the card of a recipe.

    A card, recipes/cards/RECIPE.json, records what was planned, searched, dry run, verified, rehearsed and run, with
    commands, commits, dates and figures.
    """
    from lab.cards import cards as workflow
    from llmrecipes.recipe.load import names

    if every == (recipe is not None):
        raise UserError("missing" if recipe is None else "set with --all", where="RECIPE",
                        rule="needs either a recipe or --all",
                        fix="python -m lab card gpt-tiny")  # fmt: skip
    chosen = names() if recipe is None else [recipe]
    of_write = {"--do": do, "--run": run, "--cluster": cluster, "--gpus": gpus}
    for option, value in of_write.items():
        if value and (not write or (every and option != "--do")):
            raise UserError("set without --write RECIPE", where=option, rule="only valid when writing a card",
                            fix="--write")  # fmt: skip
    if unknown := [part for part in do or () if part not in workflow.PARTS]:
        raise UserError(f"{unknown[0]!r}", where="--do", rule=f"one of {', '.join(workflow.PARTS)}")
    if write:
        parts = tuple(cast("workflow.PartName", part) for part in do or ())
        asked = workflow.Asked(cluster, gpus, parts, run)
        for name in chosen:
            result = workflow.make(name, asked, runs_dir, lambda line: print(line, file=sys.stderr))
            print(f"wrote {workflow.write(result)}", file=sys.stderr)
        workflow.renew_guide(list(table(workflow.all_cards())))
    if check:
        changed = {name: reason for name in chosen if (reason := workflow.stale(name)) is not None}
        if changed:
            said = "; ".join(f"{name}: {reason}" for name, reason in changed.items())
            raise UserError(
                f"out of date: {said}", where="recipes/cards", rule="cards must have current figures",
                fix="python -m lab card --all --write",
            )  # fmt: skip
    cards = [workflow.read(name) for name in chosen]
    if as_json:
        values = [card.model_dump(mode="json") for card in cards]
        print(json.dumps(values if every else values[0], indent=2))
    elif check and not write:
        print(f"{len(cards)} up to date")
    elif every:
        print("\n".join(table(cards)))
    else:
        print("\n".join(lines(cards[0])))


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
        yield from wrap(_text(part), 120, initial_indent=f"{name:12}", subsequent_indent=" " * 12)
        yield f"{'':12}{part.date}, commit {part.commit}{older}: {part.command}"


def _text(part: CardPart) -> str:
    return "; ".join(f"{key} {_value(value)}" for key, value in part.figures.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_value(each)}" for key, each in value.items()) + ")"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


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
        cells = (card.recipe, where, _layout(planned), searched, published, done or "planned")
        # A notation of stages has bars.
        escaped = (cell.replace("|", r"\|") for cell in cells)
        yield f"| {' | '.join(escaped)} |"


def _layout(figures: dict[str, Any]) -> str:
    if figures.get("layout") is None:
        return str(figures.get("reason", ""))
    return f"{figures['layout']}: {figures['tokens_per_second_per_gpu']:,.0f}, {figures['memory_gib']:.1f} GiB"
