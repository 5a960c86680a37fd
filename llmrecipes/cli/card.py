"""`card`: parsing and printing only."""

from __future__ import annotations

import json
import sys
from typing import Annotated, cast

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.options import RUNS, JsonOption, RunsOption
from llmrecipes.errors import UserError


def card(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="Name of a recipe in recipes/.", autocompletion=completion.recipes),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All recipes; prints a table of those for GPUs.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Plan and search again, and write the card.")] = False,
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
    """Show, write or check what is known of a recipe.

    A card, recipes/cards/RECIPE.json, has what was planned, searched, dry run, verified, rehearsed and run, with
    commands, commits, dates and figures.
    """
    from llmrecipes.cli.render.cards import lines, table
    from llmrecipes.recipe.load import names
    from llmrecipes.workflow import card as workflow

    if every == (recipe is not None):
        raise UserError("missing" if recipe is None else "set with --all", where="RECIPE", rule="a recipe, or --all",
                        fix="llmrecipes card gpt-tiny")  # fmt: skip
    chosen = names() if recipe is None else [recipe]
    of_write = {"--do": do, "--run": run, "--cluster": cluster, "--gpus": gpus}
    for option, value in of_write.items():
        if value and (not write or (every and option != "--do")):
            raise UserError("set without --write RECIPE", where=option, rule="it is for a card that is written",
                            fix="--write")  # fmt: skip
    if unknown := [part for part in do or () if part not in workflow.PARTS]:
        raise UserError(f"{unknown[0]!r}", where="--do", rule=f"one of {', '.join(workflow.PARTS)}")
    if write:
        parts = tuple(cast("workflow.PartName", part) for part in do or ())
        asked = workflow.Asked(cluster, gpus, parts, run)
        for name in chosen:
            made = workflow.make(name, asked, runs_dir, lambda line: print(line, file=sys.stderr))
            print(f"wrote {workflow.write(made)}", file=sys.stderr)
        workflow.renew_guide(list(table(workflow.all_cards())))
    if check:
        changed = {name: reason for name in chosen if (reason := workflow.stale(name)) is not None}
        if changed:
            said = "; ".join(f"{name}: {reason}" for name, reason in changed.items())
            raise UserError(
                f"out of date: {said}", where="recipes/cards", rule="a card has the figures of now",
                fix="llmrecipes card --all --write",
            )  # fmt: skip
    cards = [workflow.read(name) for name in chosen]
    if as_json:
        values = [each.model_dump(mode="json") for each in cards]
        print(json.dumps(values if every else values[0], indent=2))
    elif check and not write:
        print(f"{len(cards)} up to date")
    elif every:
        print("\n".join(table(cards)))
    else:
        print("\n".join(lines(cards[0])))
