"""Rules between parallel degrees and model. Rules that depend on the number of ranks are checked by the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator

from llmrecipes.recipe.derived import stage_layout
from llmrecipes.recipe.derived.degrees import divisors, elastic_worlds, model_parallel_size, multiples, replica_ranks
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Recipe


def tensor(recipe: Recipe) -> Iterator[Problem]:
    """Sizes that are split over tensor-parallel ranks are divisible by their number."""
    degree = recipe.layout.tensor_model_parallel_size
    sizes = shared_sizes(recipe)
    wrong = [f"{name} {size}" for name, size in sizes.items() if size % degree]
    if wrong:
        yield Problem(
            "layout.tensor_model_parallel_size",
            f"{degree} does not divide {', '.join(wrong)}",
            "tensor_model_parallel_size must divide heads, query groups, MLP width and vocabulary",
            f"tensor_model_parallel_size {divisors(math.gcd(*sizes.values()), degree)}",
        )


def shared_sizes(recipe: Recipe) -> dict[str, int]:
    """Sizes that are split over tensor-parallel ranks, by name."""
    s = shape(recipe.model)
    model = recipe.model
    sizes = {"num_attention_heads": s.num_attention_heads, "padded vocab_size": s.vocab_size}
    if s.moe_layers(0, s.num_layers) < s.num_layers:
        sizes["ffn_hidden_size"] = s.ffn_hidden_size
    if s.moe_shared_ffn_hidden_size:
        sizes["moe_shared_expert_intermediate_size"] = s.moe_shared_ffn_hidden_size
    if model.multi_latent_attention:
        sizes["kv_lora_rank + qk_pos_emb_head_dim"] = model.kv_lora_rank + model.qk_pos_emb_head_dim
        if model.q_lora_rank:
            sizes["q_lora_rank"] = model.q_lora_rank
    else:
        sizes["num_query_groups"] = s.num_query_groups
    if s.mtp_num_layers:
        sizes["hidden_size"] = s.hidden_size
    return sizes


def sequence(recipe: Recipe) -> Iterator[Problem]:
    """Sequence parallelism needs tensor parallelism, and the sequence divides over context and sequence parallelism."""
    parallel, model = recipe.layout, recipe.model
    tensor_size = parallel.tensor_model_parallel_size
    context_size = parallel.context_parallel_size
    if parallel.sequence_parallel and tensor_size == 1:
        yield Problem(
            "layout.sequence_parallel",
            "true with tensor_model_parallel_size 1",
            "sequence parallelism splits tokens over tensor-parallel ranks",
            "tensor_model_parallel_size 2, or sequence_parallel false",
        )
    if model.num_moe_experts and tensor_size > 1 and not parallel.sequence_parallel:
        yield Problem(
            "layout.sequence_parallel",
            f"false with num_moe_experts and tensor_model_parallel_size {tensor_size}",
            "experts with tensor parallelism need sequence parallelism; otherwise every rank would route the same "
            "tokens",
            "sequence_parallel true, or tensor_model_parallel_size 1",
        )
    chunks = 2 * context_size if context_size > 1 else 1
    ranks = tensor_size if parallel.sequence_parallel else 1
    step = math.lcm(chunks, context_size * ranks)
    if model.seq_length % step:
        parts = [f"2 × context_parallel_size {context_size}"] if chunks > 1 else []
        if ranks > 1:
            context = f"context_parallel_size {context_size} × " if context_size > 1 else ""
            parts.append(f"{context}tensor_model_parallel_size {ranks}")
        yield Problem(
            "model.seq_length",
            f"{model.seq_length} is not a multiple of {' and of '.join(parts)}",
            "every rank needs the same number of tokens, with context parallelism in two chunks of equal length",
            f"seq_length {multiples(model.seq_length, step)}",
        )


def yarn(recipe: Recipe) -> Iterator[Problem]:
    """The context before YaRN divides over context-parallel ranks: megatron-core prepares its angles for it."""
    model = recipe.model
    ranks = recipe.layout.context_parallel_size
    name = "original_max_position_embeddings"
    if model.position_embedding_type == "yarn":
        name = f"yarn_{name}"
    elif not model.multi_latent_attention or model.rope_type != "yarn":
        return
    length = getattr(model, name)
    if ranks > 1 and length is not None and length % (2 * ranks):
        yield Problem(
            f"model.{name}",
            f"{length} is not a multiple of 2 × context_parallel_size {ranks}",
            "context-parallel ranks split the original context into two chunks of equal length each",
            f"{name} {multiples(length, 2 * ranks)}",
        )


def pipeline(recipe: Recipe) -> Iterator[Problem]:
    """Layers, and embedding and loss if counted as layers, divide over stages and their chunks."""
    parallel = recipe.layout
    layers = recipe.model.num_layers
    stages = parallel.pipeline_model_parallel_size
    chunks = parallel.virtual_pipeline_model_parallel_size
    ends = {
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
    }
    counted = {
        "account_for_embedding_in_pipeline_split": parallel.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": parallel.account_for_loss_in_pipeline_split,
    }
    written = {stage_layout.KEY: parallel.pipeline_model_parallel_layout}
    used = [name for name, value in {**ends, **counted, **written}.items() if value]
    if stages == 1:
        if chunks:
            used.insert(0, "virtual_pipeline_model_parallel_size")
        for name in used:
            yield Problem(
                f"layout.{name}",
                f"{getattr(parallel, name)} with pipeline_model_parallel_size 1".replace("True", "true"),
                f"{name} is only used with pipeline stages",
                f"pipeline_model_parallel_size 2, or remove {name}",
            )
        return
    if parallel.pipeline_model_parallel_layout:
        if len(used) > 1:
            yield Problem(
                f"layout.{stage_layout.KEY}",
                f"set with {', '.join(used[:-1])}",
                f"{stage_layout.KEY} defines all stages, so the other keys cannot be set too",
                f"remove {', '.join(used[:-1])}, or {stage_layout.KEY}",
            )
            return
        yield from stage_layout.problems(recipe)
        return
    if any(ends.values()) and any(counted.values()):
        yield Problem(
            f"layout.{used[0]}",
            f"set with {used[-1]}",
            "num_layers_in_*_pipeline_stage and account_for_* cannot be combined",
            f"remove {used[0]} or {used[-1]}",
        )
        return
    yield from _uneven(recipe, ends) if any(ends.values()) else _even(recipe, sum(counted.values()), layers)


def _even(recipe: Recipe, extra: int, layers: int) -> Iterator[Problem]:
    """All stages have the same number of layers, with embedding and loss if they are counted as layers."""
    parallel = recipe.layout
    stages = parallel.pipeline_model_parallel_size
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    together = layers + extra
    if together % (stages * chunks) == 0:
        return
    counted = f" and {extra} for embedding and loss" if extra else ""
    degree = f"pipeline_model_parallel_size {stages}"
    degree += f" × virtual_pipeline_model_parallel_size {chunks}" if chunks > 1 else ""
    room = together // chunks if together % chunks == 0 else 1
    fits = f"pipeline_model_parallel_size {divisors(room, stages)}, or " if room > 1 else ""
    step = stages * chunks
    around = (together // step * step - extra, -(-together // step) * step - extra)
    near = " or ".join(str(number) for number in around if number > 0)
    yield Problem(
        "layout.pipeline_model_parallel_size",
        f"{layers} layers{counted} do not divide evenly over {degree}",
        "all pipeline stages and their chunks must have the same number of layers",
        f"{fits}num_layers {near}",
    )


def _uneven(recipe: Recipe, ends: dict[str, int | None]) -> Iterator[Problem]:
    """First and last stage have the given number of layers, the others share the rest."""
    parallel = recipe.layout
    layers = recipe.model.num_layers
    stages = parallel.pipeline_model_parallel_size
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    given = {name: value for name, value in ends.items() if value}
    for name, value in given.items():
        if value % chunks:
            yield Problem(
                f"layout.{name}",
                f"{value} is not a multiple of virtual_pipeline_model_parallel_size {chunks}",
                "all chunks of a stage must have the same number of layers",
                f"{name} {multiples(value, chunks)}",
            )
            return
    middle = stages - len(given)
    rest = layers - sum(given.values())
    if rest < middle or (rest and not middle) or (middle and rest % (middle * chunks)):
        first = next(iter(given))
        words = " and ".join(f"{value} in {name}" for name, value in given.items())
        others = sum(given.values()) - given[first]
        fitting = [
            value
            for value in range(chunks, min(layers, 10_000), chunks)
            if (left := layers - others - value) >= middle and (left % (middle * chunks) == 0 if middle else left == 0)
        ]
        near = sorted(fitting, key=lambda value: abs(value - given[first]))[:2]
        yield Problem(
            f"layout.{first}",
            f"{words} leave {rest} of {layers} layers to {middle} stages",
            "stages without an explicit number must share the remaining layers evenly",
            f"{first} {' or '.join(str(value) for value in sorted(near))}" if near else "fewer pipeline stages",
        )


def expert(recipe: Recipe) -> Iterator[Problem]:
    """Experts divide over expert-parallel ranks, and one expert over expert-tensor-parallel ranks."""
    parallel = recipe.layout
    model = recipe.model
    s = shape(recipe.model)
    degree = parallel.expert_model_parallel_size
    inner = parallel.expert_tensor_parallel_size
    if not model.num_moe_experts:
        for name, value, nothing in (
            ("expert_model_parallel_size", degree, 1),
            ("expert_tensor_parallel_size", inner, None),
        ):
            if value != nothing:
                yield Problem(
                    f"layout.{name}",
                    f"{value} without model.num_moe_experts",
                    f"{name} is only used with experts",
                    f"model.num_moe_experts, or remove {name}",
                )
        return
    if model.num_moe_experts % degree:
        yield Problem(
            "layout.expert_model_parallel_size",
            f"{degree} does not divide num_moe_experts {model.num_moe_experts}",
            "expert_model_parallel_size must divide num_moe_experts",
            f"expert_model_parallel_size {divisors(model.num_moe_experts, degree)}",
        )
    if degree > 1 and recipe.train.precision == "fp16":
        yield Problem(
            "train.precision",
            f"fp16 with expert_model_parallel_size {degree}",
            "megatron-core uses a separate optimizer with a separate loss scale for these experts; the two scales "
            "diverge at the first overflow",
            "precision bf16, or expert_model_parallel_size 1",
        )
    inner = inner or parallel.tensor_model_parallel_size
    if s.moe_ffn_hidden_size % inner:
        yield Problem(
            "layout.expert_tensor_parallel_size",
            f"{inner} does not divide moe_ffn_hidden_size {s.moe_ffn_hidden_size}",
            "expert_tensor_parallel_size must divide the width of an expert",
            f"expert_tensor_parallel_size {divisors(s.moe_ffn_hidden_size, inner)}",
        )


def elastic(recipe: Recipe) -> Iterator[Problem]:
    """Some number of replicas that `train.elastic` names shares the global batch evenly."""
    if recipe.train.elastic is None:
        return
    least, most = recipe.train.elastic
    micro = recipe.layout.micro_batch_size
    if least > most:
        yield Problem(
            "train.elastic",
            f"[{least}, {most}]",
            "the minimum must not exceed the maximum",
            f"elastic [{most}, {least}]",
        )
    elif recipe.train.global_batch_size % micro == 0 and not elastic_worlds(recipe):
        # Replicas of the recipe's layout, which those of a stage may be larger than.
        ranks = recipe.train.global_batch_size // micro * model_parallel_size(recipe.layout)
        widest = recipe.train.model_copy(update={"elastic": (1, -(-ranks // replica_ranks(recipe)))})
        worlds = elastic_worlds(recipe.model_copy(update={"train": widest}))
        replicas = list(dict.fromkeys(max(1, ranks // replica_ranks(recipe)) for ranks in worlds))
        near = sorted(replicas, key=lambda number: abs(number - least))[:4]
        yield Problem(
            "train.elastic",
            f"no number of replicas from {least} to {most} divides global_batch_size {recipe.train.global_batch_size} "
            f"with micro_batch_size {micro}",
            "global_batch_size must be a multiple of micro_batch_size × data-parallel size",
            f"a range that includes {' or '.join(map(str, sorted(near)))}" if near else "a different global_batch_size",
        )
