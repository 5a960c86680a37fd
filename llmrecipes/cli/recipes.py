"""`list`, `show`, `layout`, `clusters`, `schema` and `docs`: parsing and printing only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from llmrecipes.cli.options import (
    ClusterOption,
    JsonOption,
    NodesOption,
    OverridesArgument,
    RanksOption,
    RecipeArgument,
)
from llmrecipes.errors import UserError


def list_recipes(as_json: JsonOption = False) -> None:
    """List recipes with their size."""
    from llmrecipes.cli.render import recipes
    from llmrecipes.recipe.load import names, recipes_dir

    rows = recipes.summaries(names(recipes_dir()))
    print(json.dumps(rows, indent=2) if as_json else recipes.table(rows))


def show(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    as_json: JsonOption = False,
    nproc: RanksOption = None,
    cluster_name: ClusterOption = None,
    nodes: NodesOption = None,
    plan_only: Annotated[bool, typer.Option("--plan", help="Print the plan without the recipe.")] = False,
    step_seconds: Annotated[
        float | None,
        typer.Option("--step-seconds", metavar="S", min=1e-6, help="Measured step time, to plan the total time."),
    ] = None,
) -> None:
    """Show a resolved recipe and its plan: memory, FLOPs, fit.

    The plan is for this machine, or with --cluster for nodes of a cluster. The configuration of an engine's library
    (a ds_config.json) follows it.
    """
    from llmrecipes.cli.render import plan as render
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.plan import communication_on, plan_on, preparation

    loaded = load(recipe, overrides or [])
    plan, cluster = plan_on(loaded.recipe, nproc=nproc, cluster=cluster_name, nodes=nodes)
    sent = communication_on(plan, cluster, cluster_name)
    data = preparation(loaded.recipe, cluster)
    if as_json:
        print(json.dumps(render.as_dict(loaded, plan, cluster, step_seconds, sent, data), indent=2))
    else:
        asked = (recipe, *(overrides or []))
        render.print_plan(
            loaded, plan, cluster, asked, plan_only=plan_only, step_seconds=step_seconds, sent=sent, data=data
        )


def layout(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    as_json: JsonOption = False,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", min=1, help="Ranks; default: the fewest that the layout needs."),
    ] = None,
    cluster_name: ClusterOption = None,
    nodes: NodesOption = None,
) -> None:
    """Show which part of model and data each rank holds."""
    from llmrecipes.cli.render import layout as render
    from llmrecipes.hardware.machine import planned
    from llmrecipes.plan.placement import place
    from llmrecipes.recipe.degrees import smallest_world
    from llmrecipes.recipe.load import load

    loaded = load(recipe, overrides or []).recipe
    ranks = smallest_world(loaded.parallelism) if nproc is None else nproc
    found = place(loaded, ranks, None if cluster_name is None else planned(cluster_name, nodes, ranks))
    print(json.dumps(render.as_dict(*found), indent=2) if as_json else render.as_text(*found))


def clusters(as_json: JsonOption = False) -> None:
    """List cluster profiles."""
    from llmrecipes.cli.render import clusters as render
    from llmrecipes.hardware.load import clusters_dir, names

    rows = render.summaries(names(clusters_dir()))
    print(json.dumps(rows, indent=2) if as_json else render.table(rows))


def schema() -> None:
    """Print the JSON Schema of recipe files, for editors."""
    from llmrecipes.recipe.reference import json_schema

    print(json_schema(), end="")


def docs(check: Annotated[bool, typer.Option("--check", help="Fail if they are out of date.")] = False) -> None:
    """Generate docs/reference.md and recipes/schema.json."""
    from llmrecipes.recipe.reference import generated

    root = Path(__file__).parents[2]
    stale = [path for path, text in generated(root).items() if not path.is_file() or path.read_text("utf-8") != text]
    if check and stale:
        raise UserError(
            f"out of date: {', '.join(str(path.relative_to(root)) for path in stale)}", fix="llmrecipes docs"
        )
    for path in stale:
        path.write_text(generated(root)[path], "utf-8")
        print(f"wrote {path.relative_to(root)}")
    if not stale:
        print("up to date")
