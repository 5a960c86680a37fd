"""Output of `plan` with `--details`, `--speed` and `--placement`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from llmrecipes.cli.tables import TextTable, show
from llmrecipes.commandline import command_line
from llmrecipes.console import duration
from llmrecipes.data.sources.sources import text_bytes
from llmrecipes.engine.backends import configuration
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.check import gib
from llmrecipes.plan.communication import Communication
from llmrecipes.plan.layout import Layout
from llmrecipes.plan.placement import Placement, Range, groups
from llmrecipes.plan.plan_table import machine, rows
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.load import Loaded
from llmrecipes.recipe.schema import Recipe
from llmrecipes.units import MIB
from llmrecipes.workflow.feature_table import SpeedReport
from llmrecipes.workflow.plan import Preparation

_PASSES = 3
"""Forward passes that take as long as a step; more where activations are recomputed."""


def details_as_dict(
    loaded: Loaded,
    plan: RunPlan,
    cluster: Cluster,
    step_seconds: float | None = None,
    sent: Communication | None = None,
    data: Preparation | None = None,
) -> dict[str, Any]:
    """Output of `plan --details --json`.

    `step_seconds` is null until it is given, `engine_configuration` for an engine whose library has none,
    `communication` without a cluster profile, `preparation` where the size of a source is unknown.
    """
    whole = None if step_seconds is None else step_seconds * plan.full_steps
    return {
        "recipe": loaded.recipe.model_dump(mode="json"),
        "hash": loaded.hash,
        "plan": plan.as_dict(),
        "cluster": cluster.as_dict(),
        "engine": engine_name(plan.recipe),
        "engine_configuration": configuration(plan.largest),
        "communication": None if sent is None else sent.as_dict(),
        "preparation": None if data is None else data.as_dict(),
        "step_seconds": step_seconds,
        "total_seconds": whole,
    }


def print_details(
    loaded: Loaded,
    plan: RunPlan,
    cluster: Cluster,
    asked: tuple[str, ...],
    *,
    step_seconds: float | None = None,
    sent: Communication | None = None,
    data: Preparation | None = None,
    predicted: tuple[float, float] | None = None,
) -> None:
    """The plan as a table, the configuration of the engine's library if it has one, and warnings.

    `asked` is the recipe's name or path and the overrides, as the user wrote them; `sent` is known with a profile,
    `data` where the sizes of all sources are known, `predicted` the seconds of a step and of all where the GPU has
    coefficients.
    """
    measure = command_line("bench step", asked[0], overrides=asked[1:])
    time = _time(loaded.recipe, plan, cluster, step_seconds, measure, predicted)
    held_out = _held_out(loaded.recipe)
    values = [*rows(plan), *_preparation(loaded.recipe, data), *held_out, *_communication(plan, sent), *time]
    if plan.chosen is not None:
        show(f"layout auto: {plan.chosen['text']}")
    show(f"Plan on {machine(cluster)}", TextTable([("what", "value", "from"), *values], right=(1,)))
    configured = configuration(plan.largest)
    if configured is not None:
        show(f"\nConfiguration of {engine_name(plan.recipe)}", json.dumps(configured, indent=2))
    show(*(f"\nwarning: {warning}" for warning in plan.warnings))


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
        (
            "time to prepare",
            duration(data.seconds),
            f"on {data.cores:g} cores of one node, assuming {rate}{_not_counted(recipe)}",
        ),
    ]


def _not_counted(recipe: Recipe) -> str:
    """What `prepare` does besides tokenizing, whose time is not known before."""
    sources = recipe.data.sources
    remote = any(each.type == "hub" or "://" in each.location for each in sources)
    parts = {
        "download": remote,
        "training of the tokenizer": recipe.data.tokenizer.type == "bpe",
        "cleaning": bool(recipe.data.steps),
    }
    named = ", ".join(name for name, is_part in parts.items() if is_part)
    return f"; not counted: {named}" if named else ""


def _held_out(recipe: Recipe) -> list[tuple[str, str, str]]:
    """What an evaluation of several held-out sets takes, where there are several."""
    data, train = recipe.data, recipe.train
    parts = len(data.sources) if data.multiple_validation_sets else 0
    sets = bool(data.split[1]) + len(data.valid_sources) + parts
    if sets < 2:
        return []
    batches = sets * train.eval_iters
    share = batches / train.eval_interval / _PASSES
    often = f"every {train.eval_interval:,} steps"
    note = f"at most, of {sets} held-out sets {often}; about {share:.1%} of the time of all steps"
    return [("global batches of an evaluation", f"{batches:,}", note)]


def _communication(plan: RunPlan, sent: Communication | None) -> list[tuple[str, str, str]]:
    if sent is None or not sent.parts:
        return []
    stages = plan.largest.layout.pipeline_model_parallel_size
    where = "if nothing overlaps" + (f", stage {sent.stage}" if stages > 1 else "")
    lines = [("communication of a step", f"{sent.seconds:.3g} s", where)]
    for part in sent.parts:
        source = part.source if part.source == "measured" else f"profile, {part.source}"
        what = f"{part.group}: {part.kind} of {part.ranks}"
        calls = f"{part.calls:,} {'call' if part.calls == 1 else 'calls'} of {gib(part.bytes)} in total"
        lines.append((f"  {what}", f"{part.seconds:.3g} s", f"{source}; {calls}"))
    return lines


def _time(
    recipe: Recipe,
    run: RunPlan,
    cluster: Cluster,
    seconds: float | None,
    measure: str,
    predicted: tuple[float, float] | None,
) -> list[tuple[str, str, str]]:
    plan = run.largest
    origin = "--step-seconds"
    if seconds is not None:
        whole = seconds * run.full_steps
    elif predicted is not None:
        seconds, whole = predicted
        origin = f"predicted; measured by {measure}"
    else:
        return [("time of a step", "unknown", f"until measured: {measure}")]
    lines = [
        ("time of a step", f"{seconds:.4g} s", origin),
        ("time of all steps", duration(whole), f"{plan.layout.world_size * whole / 3600:,.1f} rank-hours"),
        ("tokens a second", f"{plan.tokens_per_step / seconds:,.0f}", f"{plan.layout.world_size} ranks"),
    ]
    peak = cluster.gpus[0].peak_tflops if cluster.gpus else None
    if peak is not None:
        rate = plan.tokens_per_step / seconds / (plan.layout.world_size * peak * 1e12)
        causal = f"{rate * plan.flops_per_token_causal:.1%} with causal attention"
        lines.append(("MFU", f"{rate * plan.flops_per_token_full:.1%}", causal))
    return lines


def speed_as_text(speed: SpeedReport) -> str:
    """A block for each feature: its value and why, what it gives, and how to change it; then the environment."""
    lines = ["Features (calculated or planned, not measured on a GPU)"]
    for row in speed.rows:
        value = {True: "on", False: "off", None: "unset"}.get(row.value, row.value)
        lines.append(f"  {row.key:46} {value!s:12} {row.reason}")
        if row.gives is not None:
            lines.append(f"      gives   {row.gives} ({row.source})")
        if row.change is not None:
            lines.append(f"      change  {row.change}")
    if speed.environment:
        lines += ["", "Environment of the ranks"]
        lines += [f"  {name}={value}\n      {reason}" for name, (value, reason) in speed.environment.items()]
    return "\n".join(lines)


MOST_ROWS = 64
MOST_GROUPS = 8
GROUP_NAMES = {
    "tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data", "ep": "expert", "expert_tp": "expert-tensor",
    "expert_dp": "expert-data",
}  # fmt: skip


def layout_as_dict(laid_out: Layout, ranks: Sequence[Placement]) -> dict[str, Any]:
    """Output of `plan --placement --json`."""
    return {
        "layout": asdict(laid_out),
        "groups": groups(laid_out),
        "ranks": [rank.as_dict() for rank in ranks],
    }


def layout_lines(laid_out: Layout, ranks: Sequence[Placement]) -> Iterator[str | TextTable]:
    """A row for each rank with what differs between ranks, then what they have in common, and the process groups.

    For a large world only the first data-parallel slice is shown: the others hold the same parts of the model.
    """
    shown = ranks if len(ranks) <= MOST_ROWS else [rank for rank in ranks if rank.data == 0]
    cells = [_cells(rank) for rank in shown]
    differ = [name for name in cells[0] if name == "rank" or any(row[name] != cells[0][name] for row in cells)]
    alike = [f"{name} {value}" for name, value in cells[0].items() if name not in differ and value]
    rows = [differ, *([row[name] for name in differ] for row in cells)]
    yield TextTable(rows)
    every = "every rank" if len(shown) == len(ranks) else "each of these ranks"
    notes = [f"{every}: {'; '.join(alike)}"] if alike else []
    if len(shown) == len(ranks):
        notes += _groups(laid_out, ranks)
    else:
        slices = f"data-parallel slice 0 of {laid_out.data_parallel_size}"
        notes.append(f"{len(shown)} of {len(ranks)} ranks are shown: {slices}; --json has all")
    if notes:
        yield ""
    yield from notes


def _groups(laid_out: Layout, ranks: Sequence[Placement]) -> list[str]:
    by_name = groups(laid_out)
    has_experts = ranks[0].experts != (0, 0)
    lines = []
    for name, words in GROUP_NAMES.items():
        if len(by_name[name][0]) > 1 and (has_experts or not name.startswith("e")):
            written = [f"({' '.join(map(str, group))})" for group in by_name[name]]
            rest = f" … {len(written)} groups" if len(written) > MOST_GROUPS else ""
            lines.append(f"{words}-parallel: {' '.join(written[:MOST_GROUPS])}{rest}")
    return lines


def _cells(rank: Placement) -> dict[str, str]:
    """One row of the table, by column; empty if the rank has no such part."""
    ends = [name for name, has in (("embedding", rank.has_embedding), ("output", rank.has_output)) if has]
    split = rank.residual_tokens != rank.tokens
    return {
        "rank": str(rank.rank),
        "stage": str(rank.stage),
        "layers": ", ".join(_span(part) for part in rank.layers if part[0] < part[1]),
        "vocabulary": f"{_span(rank.vocabulary)} ({' and '.join(ends)})" if ends else "",
        "heads": _span(rank.query_heads),
        "experts": _span(rank.experts),
        "tokens": ", ".join(map(_span, rank.tokens)),
        "residual stream": ", ".join(map(_span, rank.residual_tokens)) if split else "",
        "sequences": _listed(rank.sequences),
    }


def _span(numbers: Range) -> str:
    first, end = numbers
    if first >= end:
        return ""
    return str(first) if end == first + 1 else f"{first}-{end - 1}"


def _listed(parts: Sequence[Range], most: int = 2) -> str:
    words = ", ".join(_span(part) for part in parts[:most])
    return words if len(parts) <= most else f"{words}, … ({len(parts)} micro-batches)"
