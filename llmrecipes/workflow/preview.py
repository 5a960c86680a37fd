"""What a submission asks for, in a few lines: nodes, memory, limits, disk, and what the job must be allowed to read."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmrecipes.plan.check import gib
from llmrecipes.recipe.schema import Recipe
from llmrecipes.workflow.submit import Applied, Planned, Submitted

GATED = ("meta-llama/", "mistralai/", "google/gemma", "bigcode/starcoder", "bigcode/the-stack", "CohereLabs/")
"""Names on the Hugging Face Hub that begin so need an account which has accepted their licence. The Hub is not asked,
because a login node may have no network."""
TOKEN = "HF_TOKEN"  # noqa: S105
NO_LIMIT = "none"


@dataclass(frozen=True)
class Gated:
    """A name on the Hub that is likely to need a token."""

    key: str
    name: str


@dataclass(frozen=True)
class Preview:
    """What a job gets and needs.

    Attributes:
        place: where it waits: Slurm's partition, or Kubernetes' namespace and queue.
        time_limit: as Slurm is told it; None: the partition's own limit. Kubernetes has none.
        checkpoints_bytes: most that checkpoints take on disk, without those kept by `checkpoint.keep_interval`.
        gated: names on the Hub that are likely to need a token.
        has_token: whether the job is given `HF_TOKEN`.
    """

    nodes: int
    gpus: int
    gpu: str | None
    ranks: int
    memory_bytes: int
    memory_capacity_bytes: int
    memory_headroom: float
    place: dict[str, str | None]
    time_limit: str | None
    checkpoint_bytes: int
    checkpoints_bytes: int
    gated: tuple[Gated, ...]
    has_token: bool
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "gated": [asdict(each) for each in self.gated], "warnings": list(self.warnings)}

    def lines(self) -> Iterator[str]:
        """The same for people."""
        nodes = f"{self.nodes} {'node' if self.nodes == 1 else 'nodes'}"
        hardware = f"{self.gpus} × {self.gpu}" if self.gpu else "no GPU"
        share = f"({self.memory_headroom:.0%} headroom)"
        rows = {
            "nodes": f"{nodes}, {hardware}, {self.ranks} ranks",
            "memory": f"{gib(self.memory_bytes)} of {gib(self.memory_capacity_bytes)} a rank {share}",
            **{name: value or "the site's default" for name, value in self.place.items()},
            "time limit": self.time_limit or "the partition's own",
            "checkpoint": f"{gib(self.checkpoint_bytes)}, at most {gib(self.checkpoints_bytes)} on disk",
        }
        yield from (f"{name:>10}  {text}" for name, text in rows.items())
        for each in self.gated:
            state = "the job has it" if self.has_token else "the job does not have it, see docs/data.md"
            yield f"{'gated':>10}  {each.name} ({each.key}) needs a Hugging Face token: {TOKEN}; {state}"
        yield from (f"{'warning':>10}  {text}" for text in self.warnings)


def of_slurm(submitted: Submitted) -> Preview:
    """Of a job for Slurm. Jobs inherit the environment of sbatch, and with it a token."""
    given = dict(word[2:].split("=", 1) for word in submitted.command if word.startswith("--") and "=" in word)
    return _preview(
        submitted.planned, {"partition": given.get("partition")}, given.get("time"), bool(os.environ.get(TOKEN))
    )


def of_kubernetes(applied: Applied, queue: str | None, secrets: Collection[str]) -> Preview:
    """Of objects for Kubernetes. A pod has the variables that `--secret` gives it, and no others."""
    place = {"namespace": applied.namespace} | ({} if queue is None else {"queue": queue})
    return _preview(applied.planned, place, NO_LIMIT, TOKEN in secrets)


def gated_names(recipe: Recipe) -> tuple[Gated, ...]:
    """What of a recipe's data is likely to be gated on the Hugging Face Hub."""
    tokenizer = recipe.data.tokenizer
    names = [("data.tokenizer.path", tokenizer.path)] if tokenizer.type == "huggingface" else []
    names += [
        (f"data.sources.{number}.path", source.path)
        for number, source in enumerate(recipe.data.sources)
        if source.type == "hub"
    ]
    return tuple(
        Gated(key, name)
        for key, name in names
        if name is not None and name.startswith(GATED) and not Path(name).exists()  # a folder of that name comes first
    )


def _preview(planned: Planned, place: Mapping[str, str | None], time_limit: str | None, has_token: bool) -> Preview:
    plan, profile = planned.plan, planned.profile
    return Preview(
        nodes=planned.nodes,
        gpus=planned.nodes * profile.gpus_per_node,
        gpu=profile.gpu.name if profile.gpu else None,
        ranks=plan.layout.world_size,
        memory_bytes=plan.memory.total,
        memory_capacity_bytes=plan.memory_capacity_bytes,
        memory_headroom=round(plan.memory_headroom, 4),
        place=dict(place),
        time_limit=time_limit,
        checkpoint_bytes=plan.checkpoint_bytes,
        checkpoints_bytes=(planned.recipe.checkpoint.most_recent_k + 1) * plan.checkpoint_bytes,
        gated=gated_names(planned.recipe),
        has_token=has_token,
        warnings=plan.warnings,
    )
