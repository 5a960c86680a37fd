"""The table of a plan: what `show` prints, and what a plan prints as."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.parameters import count, count_frozen
from llmrecipes.recipe.derived.batch_schedule import samples_of
from llmrecipes.recipe.derived.shape import mup, shape
from llmrecipes.recipe.derived.stages import Span
from llmrecipes.recipe.rules.distill_rules import sample_bytes, teacher_model
from llmrecipes.recipe.rules.preference_rules import has_reference, has_second_model
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.variants.proxy import with_zero
from llmrecipes.units import gib

if TYPE_CHECKING:
    from llmrecipes.plan.derive import Plan
    from llmrecipes.plan.run_plan import RunPlan


def text(plan: RunPlan) -> str:
    """The plan as lines: a title, aligned columns of name, value and origin, and warnings."""
    table = rows(plan)
    names, values = (max(len(row[column]) for row in table) for column in (0, 1))
    lines = [f"{name:{names}}  {value:>{values}}  {origin}".rstrip() for name, value, origin in table]
    warnings = [f"\nwarning: {warning}" for warning in plan.warnings]
    return "\n".join([f"Plan of {plan.recipe.name} on {machine(plan.cluster)}", *lines, *warnings])


def rows(run: RunPlan) -> list[tuple[str, str, str]]:
    """Rows of the plan: name, value, origin; of a run with stages, most are of the largest."""
    plan = run.largest
    parameters = plan.num_parameters
    memory = plan.memory
    cluster = plan.cluster
    ranks = f"parallel: {degrees(plan)}"
    if cluster.gpus:
        ranks += f", of {len(cluster.gpus)} GPUs"
    lines = [("parameters", f"{parameters.total:,}", f"{parameters.embedding:,} in embeddings")]
    if parameters.experts or parameters.mtp:
        extra = f"; {parameters.mtp:,} in multi-token prediction" if parameters.mtp else ""
        lines.append(("active parameters", f"{parameters.active:,}", f"{parameters.experts:,} in experts{extra}"))
    if lora := plan.recipe.lora:
        share = f"{plan.num_adapter_parameters / parameters.total:.2%} in adapters of rank {lora.rank}"
        lines.append(("trained parameters", f"{plan.num_adapter_parameters:,}", share))
    if plan.recipe.train.freeze:
        frozen, _ = count_frozen(plan.recipe)
        share = f"{1 - frozen / parameters.total:.2%}; {frozen:,} are frozen (train.freeze)"
        lines.append(("trained parameters", f"{parameters.total - frozen:,}", share))
    if plan.num_parameters_on_rank != parameters.total:
        lines.append(("parameters of a rank", f"{plan.num_parameters_on_rank:,}", "on the rank with the most"))
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
        *_recomputed(plan),
        *_chunks(plan),
        ("micro-batches a step", f"{plan.num_microbatches}", "global_batch_size / micro_batch_size / data parallel"),
        *_of_run(run),
        *_batches(plan),
        ("tokens a step", f"{plan.tokens_per_step:,}", "global_batch_size × seq_length"),
        ("tokens in total", f"{run.total_tokens:,}", "× train_iters" if plan.batches.is_constant else "over all steps"),
        ("learning rate decays until", f"{plan.lr_decay_iters:,}", "lr_decay_iters"),
        (
            "FLOPs a token",
            f"{plan.flops_per_token_full:.4g}",
            f"{plan.flops_per_token_causal:.4g} with causal attention",
        ),
        ("FLOPs in total", f"{_flops(run):.4g}", "forward and backward"),
    ]
    lines += [(f"memory: {name.replace('_', ' ')}", gib(size), "") for name, size in memory.as_dict().items() if size]
    share = "free on one GPU" if cluster.gpus else "available memory / ranks"
    if plan.host.total:
        parts = {
            "offloaded": plan.host.offloaded,
            "copies for saves": plan.host.staged,
            "processes": plan.host.processes,
        }
        kept = ", ".join(f"{gib(size)} {name}" for name, size in parts.items() if size)
        lines.append(("main memory per node", gib(plan.host.total), f"of {gib(plan.host_capacity_bytes)}: {kept}"))
    lines.append(("fits" if run.fits else "does NOT fit", gib(plan.memory_capacity_bytes), share))
    return [*lines, *_start(plan.recipe), *_disk(plan.recipe, plan)]


def _start(recipe: Recipe) -> list[tuple[str, str, str]]:
    pretrained = recipe.train.pretrained
    distill = recipe.distill
    rows = [] if pretrained is None else [("pretrained weights", pretrained, "train.pretrained")]
    if distill is not None:
        teacher = teacher_model(recipe)
        size = f"{count(teacher, shape(teacher)).total:,} parameters, forward only"
        if distill.logits is None:
            rows.append(("learns from", distill.teacher, f"distill.teacher: {size}"))
        else:
            disk = gib(samples_of(recipe) * sample_bytes(recipe))
            rows.append(
                ("learns from", f"{distill.top_k} logits a token", f"distill.logits: {disk} in {distill.logits}")
            )
    if recipe.dpo is not None:
        rows.append(("preference reference", _reference(recipe), "dpo.reference"))
    return rows


def _reference(recipe: Recipe) -> str:
    if recipe.dpo is not None and recipe.dpo.reference_log_probs is not None:
        return f"log-probabilities in {recipe.dpo.reference_log_probs}, 16 bytes a pair"
    if not has_reference(recipe):
        return "nothing"
    if not has_second_model(recipe):
        return "this model without its adapters"
    named = recipe.dpo and recipe.dpo.reference
    return f"{named or 'the initial weights'}, a second model, forward only"


def _disk(recipe: Recipe, plan: Plan) -> list[tuple[str, str, str]]:
    kept = recipe.checkpoint.most_recent_k
    best = " and the best" if recipe.checkpoint.keep_best else ""
    newest = "the newest is kept" if kept == 1 else f"the newest {kept} are kept"
    # One more is on disk while it is written: the oldest is deleted when the new one is complete.
    most = f"at most {gib((kept + 1 + bool(best)) * plan.checkpoint_bytes)}"
    more = f", plus one every {recipe.checkpoint.keep_interval:,} steps" if recipe.checkpoint.keep_interval else ""
    rows = [("checkpoint", gib(plan.checkpoint_bytes), f"{newest}{best}: {most} on disk{more}")]
    if recipe.checkpoint.also_export is not None:
        size = plan.num_parameters.total * (4 if recipe.train.precision == "fp32" else 2)
        every = recipe.checkpoint.also_export_interval or recipe.checkpoint.save_interval
        rows.append(("Hugging Face folder", gib(size), f"every {every:,} steps, kept as long as its checkpoint"))
    return rows


def _flops(run: RunPlan) -> float:
    return sum(stage.flops_per_token_full * stage.total_tokens for stage in run.stages)


def stage_facts(plan: Plan) -> dict[str, Any]:
    """What a stage is, as JSON values."""
    span = cast(Span, plan.span)
    return {
        "name": span.name,
        "first_step": span.first_step,
        "last_step": span.last_step,
        "tokens": plan.total_tokens,
        "seq_length": plan.recipe.model.seq_length,
        "global_batch_size": plan.recipe.train.global_batch_size,
        "micro_batch_size": plan.recipe.layout.micro_batch_size,
        "num_microbatches": plan.num_microbatches,
        "memory_bytes": plan.memory.total,
        "layout": degrees(plan),
        "degrees": plan.layout.as_dict(),
    }


def _of_run(run: RunPlan) -> list[tuple[str, str, str]]:
    """The stages of a run, their layouts where they differ, and which one the other lines are of."""
    if not run.recipe.stages:
        return []
    rows = []
    has_layouts = len({stage.layout for stage in run.stages}) > 1
    for stage in run.stages:
        facts = stage_facts(stage)
        name = f"stage {facts['name']}"
        steps = f"steps {facts['first_step'] + 1:,} to {facts['last_step']:,}"
        sizes = f"{facts['global_batch_size']:,} × {facts['seq_length']:,}"
        laid_out = f"; {degrees(stage)}" if has_layouts else ""
        text = f"{sizes}, {facts['tokens']:,} tokens, {gib(facts['memory_bytes'])} a rank{laid_out}"
        rows.append((name, steps, text))
    return [*rows, ("largest stage", stage_facts(run.largest)["name"], "all other lines are for this stage")]


def _batches(plan: Plan) -> list[tuple[str, str, str]]:
    """The global batches of a run whose batch grows."""
    if plan.batches.is_constant:
        return []
    used = plan.batches.until(plan.recipe.train.train_iters)
    sizes = f"{used[0].global_batch_size:,} to {used[-1].global_batch_size:,}"
    return [("global batches", sizes, f"{len(used)} sizes, the last from step {used[-1].first_step + 1:,}")]


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


def degrees(plan: Plan) -> str:
    """`tensor 2 × pipeline 2 × data 4, ZeRO 1`, and how experts use the same ranks."""
    laid_out = plan.layout
    dense = {
        "tensor": laid_out.tensor_model_parallel_size,
        "context": laid_out.context_parallel_size,
        "pipeline": laid_out.pipeline_model_parallel_size,
    }
    words = [f"{name} {size}" for name, size in dense.items() if size > 1] + [f"data {laid_out.data_parallel_size}"]
    text = with_zero(" × ".join(words), plan.recipe.layout.zero)
    if plan.num_parameters.experts and laid_out.world_size > 1:
        experts = f"experts: expert {laid_out.expert_model_parallel_size}"
        if laid_out.expert_tensor_parallel_size > 1:
            experts += f" × tensor {laid_out.expert_tensor_parallel_size}"
        text += f"; {experts} × data {laid_out.expert_data_parallel_size}"
    return text


def _chunks(plan: Plan) -> list[tuple[str, str, str]]:
    if not plan.loss_chunk_tokens:
        return []
    return [("loss", f"{plan.loss_chunk_tokens:,} tokens at a time", "loss_chunk_tokens: avoids keeping all logits")]


def _recomputed(plan: Plan) -> list[tuple[str, str, str]]:
    keys = plan.recipe.layout
    key = f"recompute_granularity {plan.recompute_granularity}"
    if plan.recompute_auto:
        key = "recompute_granularity auto: the least that leaves 5% of the memory free"
    if plan.recompute_granularity is None:
        return [("recomputed", "nothing", key)] if plan.recompute_auto else []
    if plan.recompute_granularity == "selective":
        return [("recomputed", ", ".join(plan.recompute_modules), key)]
    most = max(layers for stage in plan.layout.layers_per_stage for layers in stage)
    number = most if keys.recompute_method == "uniform" else min(most, keys.recompute_num_layers or most)
    return [("recomputed", f"{number} of {most} layers", f"{key}; in every chunk of a stage")]


def _stages(plan: Plan) -> list[tuple[str, str, str]]:
    """Layers of the pipeline stages, with equal adjacent stages merged into one line."""
    stages = plan.layout.layers_per_stage
    chunks = plan.layout.virtual_pipeline_model_parallel_size
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


def machine(cluster: Cluster) -> str:
    """A machine in words: `2 nodes of h100-ib: 16 × H100`."""
    of_site = f"{cluster.nodes} {'node' if cluster.nodes == 1 else 'nodes'} of {cluster.name}: " if cluster.name else ""
    if cluster.gpus:
        return f"{of_site}{len(cluster.gpus)} × {cluster.gpus[0].name}"
    return f"{of_site}{cluster.cpu_cores:g} CPU cores, {gib(cluster.memory_available_bytes)} of available memory"
