"""Summary of a submission: nodes, memory, limits, disk, and gated names that the job needs access to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmrecipes.plan.check import gib
from llmrecipes.recipe.schema import Recipe
from llmrecipes.workflow.submit import Submitted

GATED = ("meta-llama/", "mistralai/", "google/gemma", "bigcode/starcoder", "bigcode/the-stack", "CohereLabs/")
"""Names on the Hugging Face Hub with these prefixes need an account that has accepted their licence. The Hub is not
queried, because a login node may have no network."""
TOKEN = "HF_TOKEN"  # noqa: S105


@dataclass(frozen=True)
class Gated:
    """A name on the Hub that is likely to need a token."""

    key: str
    name: str


@dataclass(frozen=True)
class Preview:
    """What a job gets and needs.

    Attributes:
        place: where it is queued: Slurm's partition, or Kubernetes' namespace and queue.
        time_limit: in Slurm's format; None: the partition's default. Kubernetes has none.
        checkpoints_bytes: maximum disk use of checkpoints, without those kept by `checkpoint.keep_interval`.
        gated: names on the Hub that are likely to need a token.
        has_token: whether the job has `HF_TOKEN`.
        notes: what the launcher says about the job, by a short name.
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
    notes: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "gated": [asdict(each) for each in self.gated], "warnings": list(self.warnings)}

    def lines(self) -> Iterator[str]:
        """Human-readable lines."""
        nodes = f"{self.nodes} {'node' if self.nodes == 1 else 'nodes'}"
        hardware = f"{self.gpus} × {self.gpu}" if self.gpu else "no GPU"
        share = f"({self.memory_headroom:.0%} headroom)"
        rows = {
            "nodes": f"{nodes}, {hardware}, {self.ranks} ranks",
            "memory": f"{gib(self.memory_bytes)} of {gib(self.memory_capacity_bytes)} a rank {share}",
            **{name: value or "the site's default" for name, value in self.place.items()},
            "time limit": self.time_limit or "the partition's own",
            "checkpoint": f"{gib(self.checkpoint_bytes)}, at most {gib(self.checkpoints_bytes)} on disk",
            **self.notes,
        }
        yield from (f"{name:>10}  {text}" for name, text in rows.items())
        for each in self.gated:
            state = "the job has it" if self.has_token else "the job does not have it, see docs/data.md"
            yield f"{'gated':>10}  {each.name} ({each.key}) needs a Hugging Face token: {TOKEN}; {state}"
        yield from (f"{'warning':>10}  {text}" for text in self.warnings)


def gated_names(recipe: Recipe) -> tuple[Gated, ...]:
    """Tokenizers and datasets of a recipe that are likely to be gated on the Hugging Face Hub."""
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
        if name is not None and name.startswith(GATED) and not Path(name).exists()  # a local folder comes first
    )


def preview(submitted: Submitted) -> Preview:
    """The preview of a job that was submitted, or would be."""
    planned, rendering = submitted.planned, submitted.rendering
    plan = planned.plan
    return Preview(
        nodes=planned.nodes,
        gpus=len(planned.site.gpus),
        gpu=planned.site.gpus[0].name if planned.site.gpus else None,
        ranks=plan.layout.world_size,
        memory_bytes=plan.memory.total,
        memory_capacity_bytes=plan.memory_capacity_bytes,
        memory_headroom=round(plan.memory_headroom, 4),
        place=dict(rendering.place),
        time_limit=rendering.time_limit,
        checkpoint_bytes=plan.checkpoint_bytes,
        checkpoints_bytes=(planned.recipe.checkpoint.most_recent_k + 1) * plan.checkpoint_bytes,
        gated=gated_names(planned.recipe),
        has_token=rendering.has_token,
        warnings=(*plan.warnings, *rendering.warnings),
        notes=dict(rendering.notes),
    )
