"""The options of `plan`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from llmrecipes.errors import UserError
from llmrecipes.options import Option


def day(text: str) -> datetime:
    """The beginning of a day, of `--by`."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError as error:
        raise UserError(f"{text!r}", where="--by", rule="must be a date", fix="--by 2027-01-31") from error


@dataclass(frozen=True)
class PlanOptions:
    """What is planned, and how it is shown."""

    gpus: Annotated[
        str | None,
        Option(
            "Number of GPUs, or of ranks on processors; default: the fewest, or all of --nodes. With --what-if, "
            "several: 64,128.",
            metavar="N",
            also="nproc",
        ),
    ] = None
    details: Annotated[bool, Option("Print all derived numbers: memory, FLOPs, communication, data.")] = False
    step_seconds: Annotated[
        float | None,
        Option("With --details: plan the total time from this measured step time.", metavar="S", least=1e-6),
    ] = None
    placement: Annotated[bool, Option("Show which part of the model and data every rank holds.")] = False
    stage: Annotated[
        str | None,
        Option("With --placement: this stage of a recipe; default: the first.", name="in", metavar="STAGE"),
    ] = None
    speed: Annotated[bool, Option("List features that affect speed: on or off, why, and what they give.")] = False
    search: Annotated[bool, Option("Find the fastest layouts that fit instead of the recipe's.")] = False
    pin: Annotated[bool, Option("Print the section layout that is chosen for the GPUs, for the recipe's file.")] = False
    dryrun: Annotated[bool, Option("With --search: dry run the fastest layouts with torch, until one fits.")] = False
    out: Annotated[
        Path | None,
        Option(
            "With --search: save the fastest layout as a recipe. With --calibration: save the corrected --cluster.",
            name="write",
            metavar="FILE",
        ),
    ] = None
    picture: Annotated[
        Path | None,
        Option(
            "Draw memory and passes of the stages to FILE.svg or FILE.png; not with --search.",
            name="plot",
            metavar="FILE",
        ),
    ] = None
    calibration: Annotated[bool, Option("Compare predictions with measurements of RUN... (default: all runs).")] = False
    experiment: Annotated[
        str | None, Option("With --calibration or --what-if: use the runs of this MLflow experiment.", metavar="NAME")
    ] = None
    what_if: Annotated[bool, Option("Compare clusters and numbers of GPUs: days, cost and energy.")] = False
    clusters: Annotated[
        str | None,
        Option("With --what-if: cluster profiles to compare; default: three GPU types.", metavar="NAME,..."),
    ] = None
    prices: Annotated[
        str | None,
        Option(
            "Price instead of the profile's; with --what-if also NAME=PRICE,... per profile of --clusters.",
            name="usd-per-gpu-hour",
            metavar="PRICE",
        ),
    ] = None
    loss: Annotated[float | None, Option("With --what-if: train to this loss, in nats per token.", metavar="X")] = None
    tokens: Annotated[str | None, Option("With --what-if: train on N tokens, such as 15e12.", metavar="N")] = None
    by: Annotated[
        datetime | None,
        Option("With --what-if: finish by this date, starting now.", metavar="DATE", read=day),
    ] = None
    law: Annotated[
        tuple[str, ...],
        Option(
            "With --what-if: fit the loss to these runs; repeatable. Default: Chinchilla's.",
            metavar="RUN",
        ),
    ] = ()
    curve: Annotated[
        Path | None,
        Option(
            "Draw MFU and speed from 8 to 16,384 GPUs to FILE.svg or FILE.png.", name="scaling-curve", metavar="FILE"
        ),
    ] = None
