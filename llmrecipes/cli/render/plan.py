"""Output of `show`."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from llmrecipes.commandline import command_line
from llmrecipes.console import console, duration
from llmrecipes.data.sources import text_bytes
from llmrecipes.engine.configuration import configuration
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.check import gib
from llmrecipes.plan.communication import Communication
from llmrecipes.plan.derive import Plan, decay_iters
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.load import Loaded, to_yaml
from llmrecipes.recipe.mup import mup
from llmrecipes.recipe.scaled import with_zero
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
    table = Table(title=f"Plan on {_machine(cluster)}", title_justify="left", box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("from", style="dim")
    measure = command_line("bench step", asked[0], overrides=asked[1:])
    time = _time(loaded.recipe, plan, cluster, step_seconds, measure)
    for row in [
        *rows(plan, cluster),
        *_start(loaded.recipe),
        *_disk(loaded.recipe, plan),
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


def _start(recipe: Recipe) -> list[tuple[str, str, str]]:
    found = recipe.train.pretrained
    return [] if found is None else [("starts from the weights of", found, "train.pretrained")]


def _disk(recipe: Recipe, plan: Plan) -> list[tuple[str, str, str]]:
    kept = recipe.checkpoint.most_recent_k
    newest = "the newest is kept" if kept == 1 else f"the newest {kept} are kept"
    # One more is on disk while it is written: the oldest is deleted when the new one is complete.
    most = f"at most {gib((kept + 1) * plan.checkpoint_bytes)}"
    more = f", and each of step {recipe.checkpoint.keep_interval:,} × n" if recipe.checkpoint.keep_interval else ""
    return [("checkpoint", gib(plan.checkpoint_bytes), f"{newest}: {most} on disk{more}")]


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


def rows(plan: Plan, cluster: Cluster) -> list[tuple[str, str, str]]:
    """Rows of the plan: name, value, origin."""
    parameters, memory = plan.num_parameters, plan.memory
    ranks = _degrees(plan)
    if cluster.gpus:
        ranks += f", of {len(cluster.gpus)} GPUs"
    lines = [("parameters", f"{parameters.total:,}", f"{parameters.embedding:,} in embeddings")]
    if parameters.experts or parameters.mtp:
        extra = f"; {parameters.mtp:,} predict more tokens" if parameters.mtp else ""
        lines.append(("active parameters", f"{parameters.active:,}", f"{parameters.experts:,} in experts{extra}"))
    if lora := plan.recipe.lora:
        share = f"{plan.num_adapter_parameters / parameters.total:.2%} in adapters of rank {lora.rank}"
        lines.append(("trained parameters", f"{plan.num_adapter_parameters:,}", share))
    if plan.num_parameters_on_rank != parameters.total:
        lines.append(("parameters of a rank", f"{plan.num_parameters_on_rank:,}", "of the rank that has most"))
    lines += [
        ("padded vocabulary", f"{plan.shape.vocab_size:,}", "vocab_size, make_vocab_size_divisible_by"),
        ("MLP width", f"{plan.shape.ffn_hidden_size:,}", "ffn_hidden_size"),
        (
            "key/value heads × channels",
            f"{plan.shape.num_query_groups} × {plan.shape.kv_channels}",
            "num_query_groups, kv_channels",
        ),
        *_mup(plan),
        ("longest sequence", f"{plan.shape.max_position_embeddings:,}", "max_position_embeddings"),
        ("ranks", f"{plan.layout.world_size}", ranks),
        *_stages(plan),
        ("micro-batches a step", f"{plan.num_microbatches}", "global_batch_size / micro_batch_size / data parallel"),
        ("tokens a step", f"{plan.tokens_per_step:,}", "global_batch_size × seq_length"),
        ("tokens in all", f"{plan.total_tokens:,}", "× train_iters"),
        ("learning rate decays until", f"{decay_iters(plan.recipe):,}", "lr_decay_iters"),
        (
            "FLOPs a token",
            f"{plan.flops_per_token_full:.4g}",
            f"{plan.flops_per_token_causal:.4g} with causal attention",
        ),
        ("FLOPs in all", f"{plan.flops_per_token_full * plan.total_tokens:.4g}", "forward and backward"),
    ]
    lines += [(f"memory: {name.replace('_', ' ')}", gib(size), "") for name, size in memory.as_dict().items() if size]
    share = "free on one GPU" if cluster.gpus else "available memory / ranks"
    if plan.host_memory_bytes:
        available = f"of {gib(plan.host_capacity_bytes)} of main memory"
        lines.append(("offloaded, a node", gib(plan.host_memory_bytes), available))
    lines.append(("fits" if plan.fits else "does NOT fit", gib(plan.memory_capacity_bytes), share))
    return lines


def _mup(plan: Plan) -> list[tuple[str, str, str]]:
    factors = mup(plan.recipe.model)
    if factors is None:
        return []
    rate = plan.recipe.optimizer.lr / factors.width_mult
    scales = f"logits × {factors.output_mult:.4g}, attention scores × {factors.softmax_scale:.4g}"
    return [
        ("width multiplier", f"{factors.width_mult:g}", "hidden_size / mup_base_hidden_size"),
        ("learning rate of hidden matrices", f"{rate:.3g}", f"lr / width multiplier; {scales}"),
    ]


def _degrees(plan: Plan) -> str:
    """`parallel: tensor 2 × pipeline 2 × data 4, ZeRO 1`, and how experts use the same ranks."""
    degrees = plan.layout
    dense = {
        "tensor": degrees.tensor_model_parallel_size,
        "context": degrees.context_parallel_size,
        "pipeline": degrees.pipeline_model_parallel_size,
    }
    words = [f"{name} {size}" for name, size in dense.items() if size > 1] + [f"data {plan.layout.data_parallel_size}"]
    text = with_zero(f"parallel: {' × '.join(words)}", plan.recipe.zero)
    if plan.num_parameters.experts and plan.layout.world_size > 1:
        experts = f"experts: expert {degrees.expert_model_parallel_size}"
        if degrees.expert_tensor_parallel_size > 1:
            experts += f" × tensor {degrees.expert_tensor_parallel_size}"
        text += f"; {experts} × data {degrees.expert_data_parallel_size}"
    return text


def _stages(plan: Plan) -> list[tuple[str, str, str]]:
    """Layers of the pipeline stages, with equal adjacent stages merged into one line."""
    stages, chunks = plan.layout.layers_per_stage, plan.layout.virtual_pipeline_model_parallel_size
    if len(stages) == 1:
        return []
    lines = []
    for layers, same in groupby(enumerate(stages), key=lambda pair: pair[1]):
        numbers = [number for number, _ in same]
        which = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]} to {numbers[-1]}"
        split = ", ".join(str(number) for number in layers) if len(set(layers)) > 1 else f"{chunks} × {layers[0]}"
        each = " each" if len(numbers) > 1 else ""
        lines.append((f"layers of {which}", f"{sum(layers)}{each}", f"chunks of {split}" if chunks > 1 else ""))
    return lines


def _machine(cluster: Cluster) -> str:
    of_site = f"{cluster.nodes} {'node' if cluster.nodes == 1 else 'nodes'} of {cluster.name}: " if cluster.name else ""
    if cluster.gpus:
        return f"{of_site}{len(cluster.gpus)} × {cluster.gpus[0].name}"
    return f"{of_site}{cluster.cpu_cores:g} CPU cores, {gib(cluster.memory_available_bytes)} of available memory"
