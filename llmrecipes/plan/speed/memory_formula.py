"""Bytes of a rank at the fullest moment of a step, by formula, for any framework.

After Korthikanti et al. 2022 (arXiv 2205.05198). A recipe's memory is counted exactly by `plan.memory`; this is for
runs that are known by their shapes only.
"""

from __future__ import annotations

from llmrecipes.plan.speed.device import Device, Stack
from llmrecipes.plan.speed.step import stage_parameters
from llmrecipes.plan.speed.work import Work


def estimate(device: Device, stack: Stack, work: Work) -> float:
    """Bytes that the allocator holds on the fullest stage."""
    dense, routed = stage_parameters(work)
    ranks = work.dp * work.cp
    most = 0.0
    for stage in range(work.pp):
        states = _states(stack, dense[stage], ranks, work.stages[stage])
        copies = max(1, ranks * work.tp // (work.ep * work.etp))
        states += _states(stack, routed[stage], copies, work.stages[stage])
        most = max(most, states + activations(stack, work, stage))
    return most + stack.base


def _states(stack: Stack, parameters: float, ranks: int, layers: int) -> float:
    optimizer = 12.0 / (ranks if stack.zero >= 1 or stack.sharded else 1)
    held = 2.0 + stack.gradient_bytes + stack.gradient_copy
    if stack.sharded:
        # Two layers' weights and one's gradients are whole at a time.
        held = held / ranks + 6.0 / max(1, layers)
    return parameters * (held + optimizer)


def activations(stack: Stack, work: Work, stage: int) -> float:
    """Bytes kept for the backward passes, and the logits of the last stage."""
    tokens, tp = work.tokens, work.tp
    split = tp if stack.sequence_parallel else 1
    layers = work.stages[stage]
    edge = 2.0 * work.hidden / split
    if work.recomputed:
        per_layer = edge
        again = _layer(stack, work) * tokens
    else:
        per_layer = _layer(stack, work)
        again = 0.0
    if work.vpp > 1:
        chunks = 2 * (work.pp - stage - 1) + (work.vpp - 1) * work.pp + 1
        pending = min(work.microbatches * work.vpp, chunks) / work.vpp
    else:
        pending = min(work.microbatches, work.pp - stage)
    kept = tokens * per_layer * layers * pending + again
    if stage == 0:
        kept += tokens * edge * stack.inputs * pending
    if stage == work.pp - 1:
        kept += tokens * work.vocab / tp * (stack.logits + (stack.logits_before if work.microbatches > 1 else 0.0))
    return kept


def _layer(stack: Stack, work: Work) -> float:
    """Bytes per token of one layer."""
    tp = work.tp
    split = tp if stack.sequence_parallel else 1
    edge = 2.0 * work.hidden * (stack.edges / split + (stack.gathered if tp > 1 and work.pp == 1 else 0.0))
    inner = 2.0 * work.channels * (2 * work.heads + 2 * work.kv_heads) / tp
    if work.latent[1]:
        inner = 2.0 * work.heads * (2 * (work.latent[2] + work.latent[3]) + 2 * work.latent[4]) / tp
    wide = 3 if work.gated else 2
    if work.experts:
        inner += 2.0 * (work.topk * (wide * work.moe_ffn + 2 * work.hidden) + wide * work.shared_ffn) / tp
    else:
        inner += 2.0 * wide * work.ffn / tp
    if not stack.flash and "core_attn" not in work.recomputed_modules:
        inner += 5.0 * work.heads * work.seq / tp
    return edge + stack.act * inner
