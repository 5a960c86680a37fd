"""`dryrun`: parsing and printing only."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from llmrecipes.cli.options import (
    RUNS,
    ClusterOption,
    JsonOption,
    NodesOption,
    OverridesArgument,
    RecipeArgument,
    RunsOption,
)


def dryrun(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    cluster_name: ClusterOption = None,
    nodes: NodesOption = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="R", help="Measure this rank; default: 0.")] = None,
    stages: Annotated[bool, typer.Option("--stages", help="Measure the first rank of each pipeline stage.")] = False,
    skew: Annotated[
        float,
        typer.Option("--skew", metavar="F", help="Send F times the even share of tokens to the rank's first expert."),
    ] = 1.0,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Measure one rank of a run of any size, without GPUs.

    A step of the real model, schedule, optimizer and save runs on tensors without data: memory by part and module,
    traffic, host waits and the order of passes.
    """
    from llmrecipes.cli.render import dryrun as render
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.dryrun import dry_run

    result = dry_run(
        load(recipe, overrides or []).recipe,
        runs_dir,
        lambda line: print(line, file=sys.stderr),
        cluster=cluster_name,
        nodes=nodes,
        rank=rank,
        stages=stages,
        skew=skew,
    )
    if as_json:
        reports = [report.contract() for report in result.reports]
        print(json.dumps(reports if stages else reports[0], indent=2))
    else:
        print(render.as_text(result.plan, result.reports, result.folder))
