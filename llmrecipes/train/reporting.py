"""The header that a run prints, and its tracker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmrecipes.checkpoint.store import LEAST_KEPT
from llmrecipes.console import console, number
from llmrecipes.data.prepared import Prepared
from llmrecipes.engine.base import Implementation, Progress, World
from llmrecipes.files import checkout
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.check import gib
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.proxy import with_zero
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.events import Note
from llmrecipes.tracking.run_environment import capture
from llmrecipes.tracking.run_tracker import RunTracker
from llmrecipes.train.loop import NoTracker, Tracker
from llmrecipes.train.spec import RunSpec


def describe(
    recipe: Recipe,
    plan: Plan,
    implementation: Implementation,
    cluster: Cluster,
    prepared: Prepared,
    progress: Progress,
    run_dir: Path,
    network: str | None = None,
) -> None:
    """Print what is about to run."""
    device = cluster.gpus[0].name if cluster.gpus else f"CPU, {cluster.cpu_cores:g} cores"
    train = recipe.train
    counts, talks = prepared.manifest.counts("train"), prepared.manifest.chat
    tokens = counts.tokens
    data = f"{number(tokens)} training tokens, {plan.total_tokens / max(tokens, 1):.2f} epochs"
    if talks is not None:
        chat_tokens = sum(source.tokens for source in talks.sources)
        answers = sum(source.answer_tokens for source in talks.sources) / max(chat_tokens, 1)
        data = f"{counts.documents:,} conversations, {number(tokens)} tokens, {answers:.0%} of them answers"
    layers = f"{implementation.name} layers ({implementation.reason})"
    rows = {
        "run": str(run_dir),
        "model": f"{number(plan.num_parameters.total)} parameters, {layers}",
        **_adapters(plan),
        "device": f"{plan.layout.world_size} × {device}, {train.precision}, about {gib(plan.memory.total)} a rank",
        "batch": f"{train.global_batch_size} × {recipe.model.seq_length} = {number(plan.tokens_per_step)} tokens, "
        f"micro-batch {train.micro_batch_size} × {plan.num_microbatches} × "
        + with_zero(f"{plan.layout.data_parallel_size} data-parallel", recipe.zero),
        "data": data,
        "steps": f"{progress.step} done, {train.train_iters - progress.step} to go",
    }
    if network is not None:
        rows["network"] = network
    if recipe.checkpoint.most_recent_k < LEAST_KEPT:
        rows["saves"] = (
            f"the newest {LEAST_KEPT} checkpoints are kept, not {recipe.checkpoint.most_recent_k}: one may be corrupt"
        )
    for name, text in [*rows.items(), *(("warning", text) for text in plan.warnings)]:
        console().print(f"{name:>7}  {text}", markup=False)


@contextmanager
def open_tracker(
    spec: RunSpec, plan: Plan, implementation: Implementation, world: World, progress: Progress
) -> Iterator[Tracker]:
    """The tracker of this rank: a real one on rank 0, a `NoTracker` elsewhere."""
    if not world.is_first:
        yield NoTracker()
        return
    layers = {"transformer_impl": implementation.name, "transformer_impl_reason": implementation.reason}
    plan_values = {**plan.as_dict(), **layers}
    with RunTracker.open(
        spec.recipe,
        plan=plan_values,
        environment=capture(checkout()),
        run_dir=spec.run_dir,
        runs_dir=spec.runs_dir,
        resumed_step=progress.step,
        total_steps=spec.recipe.train.train_iters,
        tags={"layout": f"dp{world.data_parallel_size}", **spec.tags},
        console=console(),
    ) as tracker:
        if spec.restart:
            tracker.note(Note(step=progress.step, event="restarted", details={"restart": spec.restart, **spec.tags}))
        yield tracker


def _adapters(plan: Plan) -> dict[str, str]:
    lora, added = plan.recipe.lora, plan.num_adapter_parameters
    if lora is None:
        return {}
    share = f"{added / plan.num_parameters.total:.2%}"
    return {"trained": f"{number(added)} parameters in adapters of rank {lora.rank}, {share} of the model"}
