"""`precompute`: parsing and printing only."""

from __future__ import annotations

import json
import os

import typer

from llmrecipes.cli.shared_options import (
    DATA,
    NO_OVERRIDES,
    RUNS,
    DataOption,
    JsonOption,
    NodeCountOption,
    NodeRankOption,
    OverridesArgument,
    RanksOption,
    RecipeArgument,
    RendezvousOption,
    RunsOption,
)
from llmrecipes.faults.signals import early_signals


@early_signals()
def precompute(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    nproc: RanksOption = None,
    nnodes: NodeCountOption = 1,
    node_rank: NodeRankOption = None,
    rdzv: RendezvousOption = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Compute the outputs of a recipe's frozen model for its data.

    Training then reads them instead of holding the model. The recipe names the folder: dpo.reference_log_probs or
    distill.logits. Repeat an interrupted command to continue.
    """
    from llmrecipes.console import duration, setup_logging

    setup_logging()  # before imports of which libraries warn
    from llmrecipes.launch.ranks import node
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.precompute import precompute as compute
    from llmrecipes.workflow.run import Paths

    here = node(nnodes, node_rank, rdzv, os.environ) if nnodes > 1 else None
    resolved = load(recipe, overrides).recipe
    done = compute(resolved, Paths(runs_dir, data_dir), nproc, here, lambda line: typer.echo(line, err=as_json))
    if isinstance(done, int):
        return done
    if as_json:
        print(json.dumps(done.as_dict()))
    else:
        print(f"{done.folder}: {done.values:,} {done.unit}, {done.bytes:,} bytes, in {duration(done.seconds)}")
    return 0
