"""Layouts drawn at random from what recipes may say, and how far the plan is from the dry run of each.

Sizes are those of small real models, so that activations outweigh the gradients of single weights and of
attention, which the plan does not count: 1,024 to 2,048 wide, 2,048 to 8,192 tokens a sequence, one to four layers a
chunk.
Combinations that the rules of recipe and plan refuse are drawn again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.former import FORMER
from llmrecipes.dryrun.dry_run_spec import DryRunSpec, RankReport
from llmrecipes.errors import UserError
from llmrecipes.hardware.machine import planned
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.plan.traffic import SMALL, calls
from llmrecipes.recipe.derived.degrees import model_parallel_size, smallest_world
from llmrecipes.recipe.load import load

SEED = 12
CLOSE = 0.03
"""Share by which planned activations may differ from those of the dry run."""
LARGEST_WORLD = 256
_BASE = "gpt-tiny"


class Deviation(NamedTuple):
    """Plan against dry run of one rank; shares are plan / dry run - 1."""

    weights: int
    gradients: int
    optimizer: float
    most_activations: float
    """Of the most that are kept at a time."""
    total: float
    """Of all memory at its peak, at which the plan counts the gradients of some weights and activations only."""
    traffic: tuple[str, ...]
    """Collectives whose bytes differ, with both numbers."""


def drawn(number: int, seed: int = SEED) -> DryRunSpec:
    """A layout; all ranks that it lists are the first of their pipeline stage.

    Args:
        number: of the layout: the same for the same seed, whichever others are drawn.
        seed: of all of them.
    """
    chance = random.Random(f"{seed}-{number}")
    while True:
        on_cpu = chance.random() < 0.25
        keys = dict(_keys(chance, on_cpu=on_cpu))
        overrides = [f"{name}={_text(value)}" for name, value in keys.items() if value is not None]
        try:
            recipe = load(_BASE, [*FORMER, *overrides]).recipe
            least = smallest_world(recipe.layout)
            world = least * chance.choice((1, 1, 2, 4))
            # A multiple of all micro-batches that the ranks and an interleaved pipeline take at once.
            replicas = world // model_parallel_size(recipe.layout)
            stages = recipe.layout.pipeline_model_parallel_size
            together = recipe.layout.micro_batch_size * replicas
            number_of = stages * chance.choice((1, 2)) if stages > 1 else chance.choice((1, 2))
            recipe = load(_BASE, [*FORMER, *overrides, f"train.global_batch_size={together * number_of}"]).recipe
            cluster = planned("laptop" if on_cpu else "h100-ib", None, world)
            if world > LARGEST_WORLD:
                continue
            derive(recipe, world, cluster)
        except UserError:
            continue
        ranks = tuple(range(0, world, world // stages))
        return DryRunSpec(recipe=recipe, cluster=cluster, world_size=world, ranks=ranks)


def deviations(spec: DryRunSpec) -> list[Deviation]:
    """How far the plan is from the dry run of each rank; megatron-core stays patched in this process."""
    from llmrecipes.dryrun.simulation import dry_run  # imports torch

    plan = derive(spec.recipe, spec.world_size, spec.cluster)
    return [deviation(dry_run(spec, rank), plan) for rank in spec.ranks]


def deviation(report: RankReport, plan: Plan) -> Deviation:
    """How far the plan is from a dry run."""
    real, expected = report.memory, report.planned
    return Deviation(
        weights=expected["weights"] - real["weights"],
        gradients=expected["gradients"] - real["gradients"],
        optimizer=expected["optimizer"] / max(real["optimizer"], 1) - 1,
        most_activations=report.planned_most_activations / report.most_activations - 1,
        total=sum(expected.values()) / sum(real.values()) - 1,
        traffic=tuple(_differing(report, plan)),
    )


def described(spec: DryRunSpec) -> str:
    """The layout in a line: what was set, in the words of a command line."""
    base, found = load(_BASE, list(FORMER)).recipe.model_dump(), spec.recipe.model_dump()
    changed = [
        f"{section}.{key}={_text(value)}"
        for section in ("model", "layout", "train")
        for key, value in found[section].items()
        if value != base[section][key]
    ]
    return f"{_BASE} {' '.join(changed)} on {spec.world_size} ranks of {spec.cluster.name}"


def _keys(chance: random.Random, *, on_cpu: bool) -> Iterator[tuple[str, Any]]:
    stages = chance.choice((1, 1, 2, 2, 4))
    chunks = chance.choice((None, None, 2, 3)) if stages > 1 else None
    tensor = chance.choice((1, 1, 2, 4))
    yield from {
        "layout.tensor_model_parallel_size": tensor,
        "layout.sequence_parallel": tensor > 1 and chance.random() < 0.7,
        "layout.pipeline_model_parallel_size": stages,
        "layout.virtual_pipeline_model_parallel_size": chunks,
        "layout.context_parallel_size": chance.choice((1, 1, 1, 2, 4)),
        "layout.use_distributed_optimizer": (distributed := chance.random() < 0.75),
        "layout.overlap_grad_reduce": (overlap := chance.random() < 0.5),
        "layout.overlap_param_gather": distributed and overlap and chance.random() < 0.5,
        "train.grad_reduce_in_fp32": chance.random() < 0.75,
        # Of such small models it is a part that the formulas, which leave it out, would be blamed for.
        "layout.ddp_pad_buckets_for_high_nccl_busbw": False,
        "layout.micro_batch_size": chance.choice((1, 1, 2, 4)),
        "train.precision": chance.choice(("bf16", "bf16", "bf16", "fp16", "fp32")),
    }.items()
    layers = stages * (chunks or 1) * chance.choice((1, 2, 2, 4))
    if chance.random() < 0.2:
        yield "layout.account_for_loss_in_pipeline_split", True
        layers -= 1
    yield "model.num_layers", layers
    yield from _recompute(chance)
    latent = chance.random() < 0.2
    experts = chance.choice((None, None, 8, 16))
    heads = chance.choice((8, 16, 32))
    rope = latent or chance.random() < 0.6
    gated = chance.random() < 0.5
    yield from {
        "model.hidden_size": (hidden := chance.choice((1024, 1536, 2048))),
        "model.num_attention_heads": heads,
        "model.seq_length": chance.choice((2048, 4096, 8192)),
        "model.vocab_size": chance.choice((8192, 32000, 50257)),
        "model.ffn_hidden_size": chance.choice((None, 3 * hidden)),
        "model.position_embedding_type": "rope" if rope else "learned_absolute",
        "model.normalization": chance.choice(("LayerNorm", "RMSNorm")),
        "model.gated_linear_unit": gated,
        "model.activation_func": "silu" if gated else chance.choice(("gelu", "squared_relu")),
        "model.add_bias_linear": not experts and chance.random() < 0.5,
        "model.qk_layernorm": chance.random() < 0.4,
        "model.share_embeddings_and_output_weights": chance.random() < 0.5,
        "model.hidden_dropout": chance.choice((0.0, 0.0, 0.1)),
        "model.attention_dropout": chance.choice((0.0, 0.0, 0.1)),
    }.items()
    if latent:
        yield from {
            "model.multi_latent_attention": True,
            "model.q_lora_rank": chance.choice((None, 512, 768)),
            "model.kv_lora_rank": chance.choice((256, 512)),
            "model.qk_head_dim": chance.choice((64, 128)),
            "model.qk_pos_emb_head_dim": chance.choice((32, 64)),
            "model.v_head_dim": chance.choice((64, 128)),
        }.items()
    else:
        yield from {
            "model.num_query_groups": chance.choice((None, 4, 8)),
            "model.kv_channels": chance.choice((None, None, 128)),
            "model.add_qkv_bias": chance.random() < 0.2,
        }.items()
    if experts:
        yield from _experts(chance, experts, layers, tensor, on_cpu=on_cpu)


def _recompute(chance: random.Random) -> Iterator[tuple[str, Any]]:
    granularity = chance.choice((None, None, "selective", "full"))
    yield "layout.recompute_granularity", granularity
    if granularity == "full":
        yield "layout.recompute_method", chance.choice(("uniform", "block"))
        yield "layout.recompute_num_layers", chance.choice((1, 2))


def _experts(
    chance: random.Random, number: int, layers: int, tensor: int, *, on_cpu: bool
) -> Iterator[tuple[str, Any]]:
    yield from {
        "model.num_moe_experts": number,
        "model.moe_router_topk": chance.choice((2, 2, 4)),
        "model.moe_ffn_hidden_size": chance.choice((512, 768, 1024)),
        "model.moe_shared_expert_intermediate_size": chance.choice((None, 1024)),
        "model.moe_layer_freq": chance.choice((1, 1, 2, [0, *[1] * (layers - 1)])),
        "model.moe_router_load_balancing_type": chance.choice(("aux_loss", "seq_aux_loss", "global_aux_loss")),
        "model.moe_aux_loss_coeff": chance.choice((0.0, 0.01)),
        "model.moe_z_loss_coeff": chance.choice((None, 0.001)),
        "model.moe_router_score_function": chance.choice(("softmax", "sigmoid")),
        "model.moe_router_pre_softmax": chance.random() < 0.3,
        "model.moe_router_dtype": chance.choice(("fp32", "fp32", "fp64", None)),
        "model.moe_token_dispatcher_type": chance.choice(("alltoall", "alltoall", "alltoall", "allgather")),
        "layout.expert_model_parallel_size": chance.choice((1, 2, 4, 8)),
        "layout.expert_tensor_parallel_size": 1 if on_cpu else chance.choice((None, 1, tensor)),
    }.items()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _differing(report: RankReport, plan: Plan) -> Iterator[str]:
    """Collectives whose bytes are not the plan's, beside bookkeeping and what pads buffers."""
    expected, real = planned_bytes(plan, report.stage), sent_bytes(report)
    for key in sorted(expected | real):
        calls_of = sum(each.calls for each in report.traffic if (each.op, each.ranks) == key)
        most = expected[key] * 1.001 + SMALL * max(calls_of, 1)
        if not expected[key] <= real[key] <= most:
            yield f"{key[0]} of {key[1]} ranks: {expected[key]:,} planned, {real[key]:,} sent"


def planned_bytes(plan: Plan, stage: int) -> Counter[tuple[str, int]]:
    """Planned bytes by collective and number of ranks; those of messages have 0."""
    found: Counter[tuple[str, int]] = Counter()
    for call in calls(plan, stage):
        key = ("send", 0) if call.kind == "message" else (call.kind, call.ranks)
        found[key] += call.payload
    return found


def sent_bytes(report: RankReport) -> Counter[tuple[str, int]]:
    """Bytes of the same; a message is counted at its sender."""
    found: Counter[tuple[str, int]] = Counter()
    for each in report.traffic:
        if each.op != "receive":
            # Between two stages megatron-core sends one way in the pipeline's group, and the other way in the world's.
            found[each.op, 0 if each.op == "send" else each.ranks] += each.bytes
    return found
