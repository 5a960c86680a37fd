"""`llmrecipes plan --details`: a recipe planned for this machine or for a cluster."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmrecipes.hardware.cluster import Cluster
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import planned
from llmrecipes.hardware.profile import Profile
from llmrecipes.packages import find_spec
from llmrecipes.plan.communication import Communication, communication
from llmrecipes.plan.derive import default_world_size
from llmrecipes.plan.placement import Layout, Placement, place
from llmrecipes.plan.run_plan import RunPlan, derive_run
from llmrecipes.plan.speed.choice import choose
from llmrecipes.recipe.derived.degrees import least_ranks
from llmrecipes.recipe.derived.stage_runs import stage_named, stage_recipes
from llmrecipes.recipe.reading.layouts import undecided
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.units import MIB
from llmrecipes.workflow.measured_steps import last_start, measured_steps

TEXT_RATE = {"words": 13.0 * MIB, "gigatoken": 50.0 * MIB, "tokenizers": 2.8 * MIB}
"""Bytes of text a second that `prepare` makes into files of tokens on one core, by what tokenizes it: a `bpe` with the
pattern `words`, gigatoken, Hugging Face's library. See benchmarks/RESULTS.md."""
_TWO_BYTES = 65500
"""Vocabularies below this have token ids of two bytes: megatron-core's `DType.optimal_dtype`."""


@dataclass(frozen=True)
class Preparation:
    """What `llmrecipes prepare` has to do for a recipe, from the sizes of its sources.

    Attributes:
        text_bytes: size in bytes of all sources together.
        tokens: at `bytes_per_token` bytes of text each, at most `max_tokens` of each source.
        disk_bytes: size in bytes of the token files.
        cores: cores of one node.
        bytes_per_second: bytes per second of one core, assumed.
        seconds: on `cores`.
    """

    text_bytes: float
    tokens: float
    disk_bytes: float
    cores: float
    bytes_per_second: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def preparation(recipe: Recipe, machine: Cluster) -> Preparation | None:
    """Size and time of `prepare` on one node of a machine; None where a source's size is unknown."""
    from llmrecipes.data.sources.sources import BYTES_PER_TOKEN, text_bytes

    sizes = [text_bytes(source) for source in recipe.data.sources]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    tokens = sum(known) / BYTES_PER_TOKEN
    cores = max(1.0, machine.cpu_cores / machine.nodes)
    rate = TEXT_RATE[_tokenizing(recipe)]
    return Preparation(
        text_bytes=sum(known),
        tokens=tokens,
        disk_bytes=tokens * (2 if recipe.model.vocab_size < _TWO_BYTES else 4),
        cores=cores,
        bytes_per_second=rate,
        seconds=sum(known) / rate / cores,
    )


def _tokenizing(recipe: Recipe) -> str:
    """What probably tokenizes a recipe's text, if the data is prepared with the packages that are installed here."""
    tokenizer = recipe.data.tokenizer
    if tokenizer.type == "bpe" and tokenizer.pattern == "words":
        return "words"
    return "gigatoken" if recipe.data.chat is None and find_spec("gigatoken") else "tokenizers"


def plan_on(
    recipe: Recipe, *, nproc: int | None, cluster: str | None, nodes: int | None, runs_dir: Path | None = None
) -> tuple[RunPlan, Cluster]:
    """The plan of a recipe, and the machine it is made for.

    Args:
        recipe: the resolved recipe.
        nproc: ranks; None: all GPUs of the machine, else the fewest that the layout needs.
        cluster: name or path of a cluster profile; None: this machine.
        nodes: nodes of the cluster; None: the fewest that fit the ranks.
        runs_dir: see `laid_out`.

    Raises:
        UserError: no such profile, or a layout that does not divide the ranks. A plan that does not fit raises nothing.
    """
    machine = planned(cluster, nodes, nproc or least_ranks(recipe))
    ranks = default_world_size(recipe, machine) if nproc is None else nproc
    return laid_out(recipe, ranks, machine, None if cluster is None else load_profile(cluster), runs_dir), machine


def placement(
    recipe: Recipe, nproc: int | None, cluster: str | None, nodes: int | None, stage: str | None
) -> tuple[Layout, tuple[Placement, ...]]:
    """What each rank holds of model and data; see `api_commands.layout_recipe`.

    Raises:
        UserError: the layout does not divide the ranks, or there is no such profile or stage.
    """
    ranks = least_ranks(recipe) if nproc is None else nproc
    of_stage = stage_recipes(recipe)[0] if stage is None else stage_named(recipe, stage)
    machine = None if cluster is None else planned(cluster, nodes, ranks)
    if undecided(recipe) and machine is not None:
        plan, machine = plan_on(recipe, nproc=nproc, cluster=cluster, nodes=nodes)
        if plan.chosen is not None:
            return place(plan.recipe, plan.world_size, machine)
    return place(of_stage, ranks, machine)


def laid_out(
    recipe: Recipe,
    ranks: int,
    machine: Cluster,
    profile: Profile | None,
    runs_dir: Path | None = None,
    run: Run | None = None,
) -> RunPlan:
    """The plan of a recipe with what `layout: auto` chooses for these ranks; arguments and errors as of `choose`.

    Args:
        runs_dir: directory of earlier runs, whose measured steps the choice uses; None: it uses none.
        run: that may have been started before, whose layout is kept then.
    """
    measured = measured_steps(recipe, machine, ranks, profile, runs_dir)
    last = None if run is None else last_start(recipe, machine, ranks, profile, run)
    choice = choose(recipe, machine, ranks, profile, measured, last)
    if choice is None:
        return derive_run(recipe, ranks, machine)
    return replace(derive_run(choice.recipe, ranks, machine), chosen=choice.as_dict())


def communication_on(plan: RunPlan, machine: Cluster, cluster: str | None) -> Communication | None:
    """Time of a step's collectives, in the largest stage; None without a profile, which has the links and what was
    measured.

    Args:
        plan, machine: those of `plan_on`.
        cluster: name or path of the profile.
    """
    if cluster is None:
        return None
    per_node = -(-(len(machine.gpus) or plan.world_size) // machine.nodes)
    return communication(plan.largest, load_profile(cluster), per_node)
