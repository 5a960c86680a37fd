"""Output of `show`."""

from __future__ import annotations

import json
from typing import Any

from llmrecipes.commandline import command_line
from llmrecipes.console import console, duration
from llmrecipes.data.sources import text_bytes
from llmrecipes.engine.configuration import configuration
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.check import gib
from llmrecipes.plan.communication import Communication
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.table import machine, rows
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.load import Loaded, to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.units import MIB
from llmrecipes.workflow.plan import Preparation


def as_dict(
    loaded: Loaded,
    plan: Plan,
    cluster: Cluster,
    step_seconds: float | None = None,
    sent: Communication | None = None,
    data: Preparation | None = None,
) -> dict[str, Any]:
    """Output of `show --json`.

    `step_seconds` is null until it is given, `engine_configuration` for an engine whose library has none,
    `communication` without a cluster profile, `preparation` where the size of a source is unknown.
    """
    whole = None if step_seconds is None else step_seconds * loaded.recipe.train.train_iters
    return {
        "recipe": loaded.recipe.model_dump(mode="json"),
        "hash": loaded.hash,
        "plan": plan.as_dict(),
        "cluster": cluster.as_dict(),
        "engine": engine_name(plan.recipe),
        "engine_configuration": configuration(plan),
        "communication": None if sent is None else sent.as_dict(),
        "preparation": None if data is None else data.as_dict(),
        "step_seconds": step_seconds,
        "total_seconds": whole,
    }


def print_plan(
    loaded: Loaded,
    plan: Plan,
    cluster: Cluster,
    asked: tuple[str, ...],
    *,
    plan_only: bool = False,
    step_seconds: float | None = None,
    sent: Communication | None = None,
    data: Preparation | None = None,
) -> None:
    """The resolved recipe unless `plan_only`, then the plan as a table, the configuration of the engine's library if it
    has one, and warnings.

    `asked` is the recipe's name or path and the overrides, as the user wrote them; `sent` is known with a profile,
    `data` where the sizes of all sources are known.
    """
    from rich.table import Table

    out = console()
    if not plan_only:
        out.print(f"# {loaded.path}, sha256 {loaded.hash[:12]}", markup=False)
        out.print(to_yaml(loaded.recipe), markup=False)
    table = Table(title=f"Plan on {machine(cluster)}", title_justify="left", box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("from", style="dim")
    measure = command_line("bench step", asked[0], overrides=asked[1:])
    time = _time(loaded.recipe, plan, cluster, step_seconds, measure)
    for row in [
        *rows(plan),
        *_preparation(loaded.recipe, data),
        *_communication(plan, sent),
        *time,
    ]:
        table.add_row(*row)
    out.print(table)
    configured = configuration(plan)
    if configured is not None:
        out.print(f"\nConfiguration of {engine_name(plan.recipe)}", markup=False)
        out.print(json.dumps(configured, indent=2), markup=False, highlight=False)
    for warning in plan.warnings:
        out.print(f"\nwarning: {warning}", markup=False)


def _preparation(recipe: Recipe, data: Preparation | None) -> list[tuple[str, str, str]]:
    if data is None:
        unknown = [f"data.sources[{n}]" for n, each in enumerate(recipe.data.sources) if text_bytes(each) is None]
        return [("prepared data", "unknown", f"size of {', '.join(unknown)}; max_tokens limits it")]
    rate = f"{data.bytes_per_second / MIB:g} MiB/s a core"
    return [
        (
            "prepared data",
            gib(round(data.disk_bytes)),
            f"about {data.tokens:,.0f} tokens, {gib(round(data.text_bytes))} of text",
        ),
        ("time to prepare", duration(data.seconds), f"on {data.cores:g} cores of one node, assuming {rate}"),
    ]


def _communication(plan: Plan, sent: Communication | None) -> list[tuple[str, str, str]]:
    if sent is None or not sent.parts:
        return []
    stages = plan.layout.pipeline_model_parallel_size
    where = "if nothing overlaps" + (f", stage {sent.stage}" if stages > 1 else "")
    lines = [("communication of a step", f"{sent.seconds:.3g} s", where)]
    for part in sent.parts:
        source = part.source if part.source == "measured" else f"profile, {part.source}"
        what = f"{part.group}: {part.kind} of {part.ranks}"
        calls = f"{part.calls:,} {'call' if part.calls == 1 else 'calls'} of {gib(part.bytes)} in all"
        lines.append((f"  {what}", f"{part.seconds:.3g} s", f"{source}; {calls}"))
    return lines


def _time(
    recipe: Recipe, plan: Plan, cluster: Cluster, seconds: float | None, measure: str
) -> list[tuple[str, str, str]]:
    if seconds is None:
        return [("time of a step", "unknown", f"until measured: {measure}")]
    whole = seconds * recipe.train.train_iters
    lines = [
        ("time of a step", f"{seconds:g} s", "--step-seconds"),
        ("time of all steps", duration(whole), f"{plan.layout.world_size * whole / 3600:,.1f} rank-hours"),
        ("tokens a second", f"{plan.tokens_per_step / seconds:,.0f}", f"{plan.layout.world_size} ranks"),
    ]
    peak = cluster.gpus[0].peak_tflops if cluster.gpus else None
    if peak is not None:
        rate = plan.tokens_per_step / seconds / (plan.layout.world_size * peak * 1e12)
        causal = f"{rate * plan.flops_per_token_causal:.1%} with causal attention"
        lines.append(("MFU", f"{rate * plan.flops_per_token_full:.1%}", causal))
    return lines
