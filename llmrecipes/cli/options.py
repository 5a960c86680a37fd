"""Arguments and options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llmrecipes.cli import completion
from llmrecipes.commandline import DATA_DIR, DATA_VARIABLE, RUNS_DIR, RUNS_VARIABLE

RUNS, DATA = RUNS_DIR, DATA_DIR

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Recipe: a name in recipes/, or the path of a YAML file.",
        autocompletion=completion.recipes,
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Override recipe keys, for example train.train_iters=50.",
        autocompletion=completion.overrides,
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run directory, recipe/run-id, run id, or recipe name (its newest run).",
        autocompletion=completion.runs,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
RunsOption = Annotated[
    Path, typer.Option("--runs-dir", metavar="DIR", envvar=RUNS_VARIABLE, help="Keep runs in this directory.")
]
DataOption = Annotated[
    Path, typer.Option("--data-dir", metavar="DIR", envvar=DATA_VARIABLE, help="Keep prepared data in this directory.")
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--nproc", metavar="N", help="Number of ranks; default: all GPUs, else the fewest that the layout needs."
    ),
]
RunIdOption = Annotated[
    str | None,
    typer.Option("--run-id", metavar="ID", help="Run id; an existing run is resumed. Default: a new id."),
]
NewRunIdOption = Annotated[
    str | None, typer.Option("--run-id", metavar="ID", help="Run id of the new run; default: a new id.")
]
AllowSocketOption = Annotated[
    bool,
    typer.Option(
        "--allow-socket", help="Train even if NCCL does not use the cluster's InfiniBand, RoCE or EFA with GPUDirect."
    ),
]
AcceptChangesOption = Annotated[
    bool,
    typer.Option("--accept-changes", help="Resume even if the learning rate or the data order changes."),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="Plan for this cluster profile (or YAML file) instead of this machine.",
        autocompletion=completion.clusters,
    ),
]


def site_option(text: str) -> Any:
    """`--cluster` of a command that runs on the site itself, which may set LLMRECIPES_CLUSTER for its users."""
    return typer.Option(
        "--cluster", metavar="NAME", envvar="LLMRECIPES_CLUSTER", help=text, autocompletion=completion.clusters
    )


NodesOption = Annotated[
    int | None,
    typer.Option("--nodes", metavar="N", min=1, help="Number of nodes; default: the fewest that fit the layout."),
]
HostsOption = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        metavar="HOST,...",
        help="All nodes of the job, n[0-3] for a range; start the command on all at once. Default: the Slurm step's.",
    ),
]
PatienceOption = Annotated[
    float, typer.Option("--patience", metavar="S", min=1, help="Wait at most S seconds for the other nodes.")
]
