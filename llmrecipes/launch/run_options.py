"""The options of a start, declared once.

`train` and `submit` show them (`cli/shared_options.py`), launchers pass them on to their jobs (`words`), a job parses
them (`add_arguments`), and the ranks have them in their spec.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict

from llmrecipes.options import Option, declared, made


@dataclass(frozen=True)
class RunOption(Option):
    """An option of `train`."""

    in_jobs: bool = False
    """Whether `submit` has it too, and every launcher passes it on."""


class RunOptions(BaseModel):
    """Options of a training on the command line; every field is an option of `train`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    overfit_batch: Annotated[bool, RunOption("Overfit one global batch (sanity check).")] = False
    anomaly: Annotated[bool, RunOption("Name the first module that outputs a NaN or infinity (slow).")] = False
    profile_steps: Annotated[
        int, RunOption("Profile N steps with torch.profiler.", name="profile", metavar="N", least=0)
    ] = 0
    """After two warm-up steps."""
    profile_trace: Annotated[bool, RunOption("With --profile, also write a Chrome trace (large).")] = False
    sample: Annotated[bool, RunOption("Generate sample text at the end.")] = True
    accept_changes: Annotated[
        bool, RunOption("Resume even if the learning rate or the data order changes.", in_jobs=True)
    ] = False
    allow_socket: Annotated[
        bool,
        RunOption(
            "Train even if NCCL does not use the cluster's InfiniBand, RoCE or EFA with GPUDirect.", in_jobs=True
        ),
    ] = False
    max_restarts: Annotated[int, RunOption("Restart failed ranks at most N times.", metavar="N", least=0)] = 0
    """Of ranks on this machine. Not `in_jobs`: schedulers restart in their own way, each with its own default."""
    warm_spares: Annotated[
        bool, RunOption("With --max-restarts, keep a warm spare process per rank that has already imported everything.")
    ] = True
    """It takes host memory only. Without it a restart imports torch and megatron-core again."""
    from_best: Annotated[
        bool, RunOption("Resume from the checkpoint with the lowest held-out loss, and delete later ones.")
    ] = False
    from_scratch: Annotated[bool, RunOption("Move the run's earlier output aside and restart at step 0.")] = False

    def words(self, true: str | None = None) -> tuple[str, ...]:
        """The options of a job that do not have their defaults, for its command line.

        Args:
            true: value of a flag, for a program whose options all have one.
        """
        words: list[str] = []
        for name, field in JOB_FIELDS.items():
            value = getattr(self, name)
            if value != field.default:
                value_words = ([] if true is None else [true]) if value is True else [str(value)]
                words += [f"--{field.word}", *value_words]
        return tuple(words)

    @classmethod
    def parsed(cls, arguments: Namespace) -> Self:
        """The options of a job's process, which prints no sample; see `add_arguments`."""
        return cls(sample=False, **{name: getattr(arguments, name) for name in JOB_FIELDS})


JOB_FIELDS = {name: field for name, field in declared(RunOptions).items() if field.option.in_jobs}
JOB_OPTIONS = frozenset(field.word for field in JOB_FIELDS.values())
"""Those that every launcher has."""


def add_arguments(parser: ArgumentParser) -> None:
    """The options of a job, for the parser of its process."""
    for name, field in JOB_FIELDS.items():
        kind: dict[str, Any] = {"action": "store_true"} if field.default is False else {"type": type(field.default)}
        parser.add_argument(f"--{field.word}", dest=name, default=field.default, **kind)


def taken(launcher_options: Mapping[str, Any]) -> tuple[RunOptions, dict[str, Any]]:
    """The options of a start among those of a launcher, by their names on the command line; and the others.

    Raises:
        UserError: a value of the wrong type.
    """
    by_word = {field.word: name for name, field in JOB_FIELDS.items()}
    ours = {by_word[word]: value for word, value in launcher_options.items() if word in by_word}
    others = {word: value for word, value in launcher_options.items() if word not in by_word}
    return made(RunOptions, {"sample": False, **ours}, words=True), others
