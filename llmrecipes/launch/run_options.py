"""The options of a start, declared once.

`train` and `submit` show them (`cli/options.py`), launchers pass them on to their jobs (`words`), a job parses them
(`add_arguments`), and the ranks have them in their spec.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmrecipes.errors import UserError


@dataclass(frozen=True)
class Option:
    """How a field appears on command lines."""

    help: str
    name: str | None = None
    """Without dashes; None: that of the field."""
    metavar: str | None = None
    in_jobs: bool = False
    """Whether `submit` has it too, and every launcher passes it on."""


class RunOptions(BaseModel):
    """Options of a training on the command line; every field is an option of `train`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    overfit_batch: Annotated[bool, Option("Overfit one global batch (sanity check).")] = False
    anomaly: Annotated[bool, Option("Name the first module that outputs a NaN or infinity (slow).")] = False
    profile_steps: Annotated[
        int, Field(ge=0), Option("Profile N steps with torch.profiler.", name="profile", metavar="N")
    ] = 0
    """After two warm-up steps."""
    profile_trace: Annotated[bool, Option("With --profile, also write a Chrome trace (large).")] = False
    sample: Annotated[bool, Option("Generate sample text at the end.")] = True
    accept_changes: Annotated[
        bool, Option("Resume even if the learning rate or the data order changes.", in_jobs=True)
    ] = False
    allow_socket: Annotated[
        bool,
        Option("Train even if NCCL does not use the cluster's InfiniBand, RoCE or EFA with GPUDirect.", in_jobs=True),
    ] = False
    max_restarts: Annotated[int, Field(ge=0), Option("Restart failed ranks at most N times.", metavar="N")] = 0
    """Of ranks on this machine. Not `in_jobs`: schedulers restart in their own way, each with its own default."""
    warm_spares: Annotated[
        bool, Option("With --max-restarts, keep a warm spare process per rank that has already imported everything.")
    ] = True
    """It takes host memory only. Without it a restart imports torch and megatron-core again."""
    from_best: Annotated[
        bool, Option("Resume from the checkpoint with the lowest held-out loss, and delete later ones.")
    ] = False
    from_scratch: Annotated[bool, Option("Move the run's earlier output aside and restart at step 0.")] = False

    def words(self, true: str | None = None) -> tuple[str, ...]:
        """The options of a job that do not have their defaults, for its command line.

        Args:
            true: value of a flag, for a program whose options all have one.
        """
        words: list[str] = []
        for name, option in declared(in_jobs=True):
            value = getattr(self, name)
            if value != RunOptions.model_fields[name].default:
                value_words = ([] if true is None else [true]) if value is True else [str(value)]
                words += [f"--{flag(name, option)}", *value_words]
        return tuple(words)

    @classmethod
    def parsed(cls, arguments: Namespace) -> Self:
        """The options of a job's process, which prints no sample; see `add_arguments`."""
        return cls(sample=False, **{name: getattr(arguments, name) for name, _ in declared(in_jobs=True)})


def declared(*, in_jobs: bool = False) -> Iterator[tuple[str, Option]]:
    """Fields with their options; with `in_jobs` only those of jobs."""
    for name, field in RunOptions.model_fields.items():
        option = next(option for option in field.metadata if isinstance(option, Option))
        if option.in_jobs or not in_jobs:
            yield name, option


def flag(name: str, option: Option) -> str:
    """The name of a field on command lines, without dashes."""
    return option.name or name.replace("_", "-")


JOB_OPTIONS = frozenset(flag(name, option) for name, option in declared(in_jobs=True))
"""Those that every launcher has."""


def add_arguments(parser: ArgumentParser) -> None:
    """The options of a job, for the parser of its process."""
    for name, option in declared(in_jobs=True):
        default = RunOptions.model_fields[name].default
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        parser.add_argument(f"--{flag(name, option)}", dest=name, default=default, **kind)


def taken(launcher_options: Mapping[str, Any]) -> tuple[RunOptions, dict[str, Any]]:
    """The options of a start among those of a launcher, by their names on the command line; and the others.

    Raises:
        UserError: a value of the wrong type.
    """
    by_flag = {flag(name, option): name for name, option in declared(in_jobs=True)}
    ours = {by_flag[name]: value for name, value in launcher_options.items() if name in by_flag}
    try:
        options = RunOptions(sample=False, **ours)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise UserError(f"{first['input']!r}: {first['msg']}", where=name.replace("_", "-")) from error
    return options, {name: value for name, value in launcher_options.items() if name not in by_flag}
