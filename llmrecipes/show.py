"""What `list` and `show` print."""

from __future__ import annotations

from typing import Any

from llmrecipes.cluster import Cluster
from llmrecipes.console import console, number
from llmrecipes.errors import UserError
from llmrecipes.plan.check import gib
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.parameters import count
from llmrecipes.recipe.load import Loaded, load, to_yaml


def summaries(names: list[str]) -> list[dict[str, Any]]:
    """Name, parameters, training tokens and description of recipes; a broken one has its `error` instead."""
    return [_summary(name) for name in names]


def summary_table(rows: list[dict[str, Any]]) -> str:
    """The summaries as aligned lines."""
    cells = [("recipe", "parameters", "tokens", "description")]
    for row in rows:
        if "error" in row:
            cells.append((row["name"], "-", "-", f"broken: {row['error'].splitlines()[0]}"))
        else:
            cells.append((row["name"], number(row["parameters"]), number(row["tokens"]), row["description"]))
    wide, parameters, tokens = (max(len(row[column]) for row in cells) for column in range(3))
    lines = (f"{name:{wide}}  {n:>{parameters}}  {t:>{tokens}}  {text}".rstrip() for name, n, t, text in cells)
    return "\n".join(lines)


def _summary(name: str) -> dict[str, Any]:
    try:
        recipe = load(name).recipe
    except UserError as error:  # one broken file must not hide the others
        return {"name": name, "error": str(error)}
    tokens = recipe.train.train_iters * recipe.train.global_batch_size * recipe.model.seq_length
    parameters = count(recipe.model).total
    return {"name": name, "parameters": parameters, "tokens": tokens, "description": recipe.description}


def as_dict(loaded: Loaded, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Everything `show` knows, for programs."""
    return {
        "recipe": loaded.recipe.model_dump(mode="json"),
        "hash": loaded.hash,
        "plan": plan.as_dict(),
        "cluster": cluster.as_dict(),
    }


def print_plan(loaded: Loaded, plan: Plan, cluster: Cluster) -> None:
    """The resolved recipe, then the plan as a table."""
    from rich.table import Table

    out = console()
    out.print(f"# {loaded.path}, sha256 {loaded.hash[:12]}", markup=False)
    out.print(to_yaml(loaded.recipe), markup=False, end="")
    table = Table(title=f"Plan on {_machine(cluster)}", title_justify="left", box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("from", style="dim")
    for row in rows(plan, cluster):
        table.add_row(*row)
    out.print()
    out.print(table)


def rows(plan: Plan, cluster: Cluster) -> list[tuple[str, str, str]]:
    """The plan in words: what, value, where it comes from."""
    parameters, memory = plan.num_parameters, plan.memory
    ranks = f"data parallel {plan.data_parallel_size}"
    if cluster.gpus:
        ranks += f", of {len(cluster.gpus)} GPUs"
    lines = [
        ("parameters", f"{parameters.total:,}", f"{parameters.embedding:,} in embeddings"),
        ("padded vocabulary", f"{plan.padded_vocab_size:,}", "vocab_size, make_vocab_size_divisible_by"),
        ("MLP width", f"{plan.ffn_hidden_size:,}", "ffn_hidden_size"),
        (
            "key/value heads × channels",
            f"{plan.num_query_groups} × {plan.kv_channels}",
            "num_query_groups, kv_channels",
        ),
        ("longest sequence", f"{plan.max_position_embeddings:,}", "max_position_embeddings"),
        ("ranks", f"{plan.world_size}", ranks),
        ("micro-batches a step", f"{plan.num_microbatches}", "global_batch_size / micro_batch_size / ranks"),
        ("tokens a step", f"{plan.tokens_per_step:,}", "global_batch_size × seq_length"),
        ("tokens in all", f"{plan.total_tokens:,}", "× train_iters"),
        ("learning rate decays until", f"{plan.lr_decay_iters:,}", "lr_decay_iters"),
        (
            "FLOPs a token",
            f"{plan.flops_per_token_full:.4g}",
            f"{plan.flops_per_token_causal:.4g} with causal attention",
        ),
        ("FLOPs in all", f"{plan.flops_per_token_full * plan.total_tokens:.4g}", "forward and backward"),
    ]
    lines += [(f"memory: {name.replace('_', ' ')}", gib(size), "") for name, size in memory.as_dict().items() if size]
    share = "free on one GPU" if cluster.gpus else "available memory / ranks"
    lines.append(("fits" if plan.fits else "does NOT fit", gib(plan.memory_capacity_bytes), share))
    return lines


def _machine(cluster: Cluster) -> str:
    if cluster.gpus:
        return f"{len(cluster.gpus)} × {cluster.gpus[0].name}"
    return f"{cluster.cpu_cores:g} CPU cores, {gib(cluster.memory_available_bytes)} of available memory"
