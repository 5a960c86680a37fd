"""Seconds of a training step: passes of each stage, communication that does not hide, pipeline, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from llmrecipes.plan.speed import network
from llmrecipes.plan.speed.device import Device, Stack
from llmrecipes.plan.speed.schedule import simulate
from llmrecipes.plan.speed.work import Work, ends, layer, repeated

_STEP_KERNELS = 40
"""Kernels of a step besides its passes: gradient norm, optimizer, data."""


@dataclass(frozen=True)
class Step:
    """Seconds of one step of the slowest rank, and what they consist of.

    `compute` are the kernels of the slowest stage, `tensor`, `expert`, `context` communication within its layers that
    does not hide, `bubble` the rest of the pipeline's time, `gradients` what is left of their reduction.
    """

    compute: float
    tensor: float
    expert: float
    context: float
    bubble: float
    gradients: float
    optimizer: float
    passes: tuple[tuple[float, float], ...] = ()
    """Seconds of a micro-batch forward and backward on each stage, over all its chunks."""
    hop: float = 0.0
    """Seconds of a message between stages."""

    @property
    def seconds(self) -> float:
        """All together."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Seconds by name."""
        return {name: getattr(self, name) for name in _PARTS}


_PARTS = ("compute", "tensor", "expert", "context", "bubble", "gradients", "optimizer")


def _either(gpu: float, host: float) -> float:
    """Seconds of a layer whose kernels take `gpu` and whose launches `host`: the longer, rounded where they meet."""
    return float((gpu**8 + host**8) ** 0.125)


@dataclass(frozen=True)
class _Pass:
    forward: float
    backward: float
    tensor: float
    expert: float
    context: float


def _layer(device: Device, stack: Stack, work: Work, *, experts: bool) -> _Pass:
    """One layer of one micro-batch with its communication."""
    kernels = layer(device, stack, work, experts=experts)
    tokens, near = work.tokens, device.gpus_per_node
    tensor_ahead = tensor_back = expert = context = 0.0
    if work.tp > 1:
        one = network.reduce(device, 2.0 * tokens * work.hidden, work.tp, near)
        shown = 1 - stack.overlap_tensor
        # With sequence parallelism the backward pass gathers its inputs once more, beside the data gradient.
        tensor_ahead = tensor_back = 2 * one * shown
        if experts and work.ep > 1:
            tensor_ahead = tensor_back = one * shown
        if stack.sequence_parallel:
            tensor_back += 0.5 * one * shown
    if experts and work.ep > 1:
        size = 2.0 * tokens * work.topk * work.hidden / work.tp
        copies = work.topk if stack.once_per_node else 0
        expert = 2 * network.exchange(device, size, work.ep, max(1, near // work.tp), copies)
        expert *= 1 - stack.overlap_expert
    if work.cp > 1:
        channels = work.latent[2] + work.latent[3] or work.channels
        size = 2.0 * tokens * work.cp * 2 * work.kv_heads * channels / work.tp
        whole = network.gather(device, size, work.cp, max(1, near // work.tp))
        context = max(0.0, whole - 0.8 * kernels.forward * 0.3)
    ahead = kernels.forward + tensor_ahead + expert + context
    back = kernels.backward + tensor_back + expert + 2 * context
    dispatched = experts and "moe" in work.recomputed_modules
    back += work.recomputed * ahead + repeated(device, stack, work, experts=experts) + dispatched * expert
    host = device.launch * stack.host
    ahead = _either(ahead, host * kernels.launches)
    back = _either(back, host * (1.5 + work.recomputed) * kernels.launches)
    if stack.stall and work.pp > 1 and work.tp > 1 and work.gpus > near:
        slow = stack.stall * (3.0 + min(work.tp, near) - 1 + 14.0 * (ceil(work.tp / near) - 1))
        if ahead + back < slow:
            ahead, back = slow / 3, slow * 2 / 3
    again = 1 + work.recomputed
    return _Pass(
        ahead, back, tensor_ahead * again + tensor_back, expert * (1 + again + dispatched), context * (2 + again)
    )


def stage_parameters(work: Work) -> tuple[list[float], list[float]]:
    """Dense and expert parameters of a rank of each stage."""
    dense, sparse = [], []
    first = 0
    for stage, layers in enumerate(work.stages):
        plain = sum(1 for index in range(first, first + layers) if not _expert(work, index))
        some = layers - plain
        first += layers
        own = layers * work.attention_parameters + plain * work.dense_parameters + some * work.shared_parameters
        words = work.vocab * work.hidden
        own += words * ((stage == 0) + (stage == work.pp - 1) * (0 if work.tied and work.pp == 1 else 1))
        dense.append(own / work.tp)
        sparse.append(some * work.experts * work.expert_parameters / (work.ep * work.etp))
    return dense, sparse


def _expert(work: Work, index: int) -> bool:
    return bool(work.experts) and index >= work.dense_layers


@lru_cache(maxsize=1024)
def _with_links(device: Device, share: float, rails: float, crowd: float, nic: float) -> Device:
    return replace(device, links=device.links * share, rails=rails, crowd=crowd, nic=device.nic * nic)


def predict(device: Device, stack: Stack, work: Work) -> Step:
    """Seconds of one step."""
    network_of_stack = (stack.links, stack.rails, stack.crowd, stack.nic)
    if network_of_stack != (1.0, 1.0, 0.0, 1.0):
        device = _with_links(device, *network_of_stack)
    plain = _layer(device, stack, work, experts=False) if work.dense_layers or not work.experts else None
    sparse = _layer(device, stack, work, experts=True) if work.experts else None
    ahead, back, first = [], [], 0
    counts = []
    for layers in work.stages:
        some = max(0, min(layers, first + layers - work.dense_layers)) if work.experts else 0
        counts.append((layers - some, some))
        first += layers
    loss_ahead, loss_back = ends(device, stack, work)
    dense, routed = stage_parameters(work)
    rate = device.bandwidth * device.memory
    slow_nodes = (work.gpus / device.gpus_per_node / 32) ** 4
    hop = 0.0
    if work.pp > 1:
        message = 2.0 * work.tokens * work.hidden / (work.tp if stack.sequence_parallel else 1)
        hop = network.send(device, message, far=work.gpus > device.gpus_per_node) + stack.hop
        if work.dp > 1 and work.gpus > device.gpus_per_node:
            hop += stack.hop_slow * slow_nodes / (1 + slow_nodes)
    for stage, (few, many) in enumerate(counts):
        forward = (plain.forward * few if plain else 0.0) + (sparse.forward * many if sparse else 0.0)
        backward = (plain.backward * few if plain else 0.0) + (sparse.backward * many if sparse else 0.0)
        # Weight gradients are added to those of the micro-batches before.
        backward += (dense[stage] + routed[stage]) * 2 * stack.gradient_bytes / rate
        if stage == work.pp - 1:
            forward, backward = forward + loss_ahead * (1 + work.mtp), backward + loss_back * (1 + work.mtp)
            if work.mtp:
                for part in (sparse or plain,):
                    forward += part.forward * work.mtp if part else 0.0
                    backward += part.backward * work.mtp if part else 0.0
        ahead.append(forward)
        back.append(backward)
    slowest = max(range(work.pp), key=lambda stage: ahead[stage] + back[stage])
    number = work.microbatches
    if stack.sharded and work.dp > 1:
        ahead, back = _sharded(device, stack, work, ahead, back, dense)
    blocking = work.vpp == 1 or not stack.overlap_hops
    passes = simulate(ahead, back, number, work.vpp, hop, blocking=blocking)
    exposed = _gradients(device, stack, work, dense, routed, back)
    held = max(d + r for d, r in zip(dense, routed, strict=True))
    ranks = work.dp * work.cp if (stack.zero >= 1 or stack.sharded) else 1
    optimizer = held / ranks * 36 / rate + held * 8 / rate + _STEP_KERNELS * device.launch * stack.host
    of_layers = number * sum(
        (part.tensor if part else 0.0) * count for part, count in zip((plain, sparse), counts[slowest], strict=True)
    )
    of_experts = number * (sparse.expert * counts[slowest][1] if sparse else 0.0)
    of_context = number * sum(
        (part.context if part else 0.0) * count for part, count in zip((plain, sparse), counts[slowest], strict=True)
    )
    busy = number * (ahead[slowest] + back[slowest])
    return Step(
        compute=busy - of_layers - of_experts - of_context,
        tensor=of_layers,
        expert=of_experts,
        context=of_context,
        bubble=passes - busy,
        gradients=exposed,
        optimizer=optimizer,
        passes=tuple(zip(ahead, back, strict=True)),
        hop=hop,
    )


def _sharded(
    device: Device, stack: Stack, work: Work, ahead: list[float], back: list[float], dense: list[float]
) -> tuple[list[float], list[float]]:
    """Passes in which weights are gathered layer by layer: a layer's kernels hide the next one's communication."""
    near = max(1, device.gpus_per_node // work.tp)
    result_ahead, result_back = [], []
    for forward, backward, parameters in zip(ahead, back, dense, strict=True):
        weights = network.gather(device, 2.0 * parameters, work.dp * work.cp, near)
        gradients = network.gather(device, float(stack.gradient_bytes) * parameters, work.dp * work.cp, near)
        one = 1 - stack.overlap_gradients
        result_ahead.append(max(forward + one * weights, weights))
        result_back.append(max(backward + one * (weights + gradients), weights + gradients))
    return result_ahead, result_back


def _gradients(
    device: Device, stack: Stack, work: Work, dense: list[float], routed: list[float], back: list[float]
) -> float:
    """What of the reduction of gradients, and of the gathering of weights, is left after the last backward pass."""
    ranks = work.dp * work.cp
    if ranks <= 1 or stack.sharded:
        return 0.0
    near = max(1, device.gpus_per_node // work.tp)
    most = max(dense)
    overlap = stack.overlap_gradients
    if stack.zero >= 1 and stack.by_tensor:
        # Two messages a tensor, of which a layer has about nine.
        overlap = 0.0
        whole = 18 * max(work.stages) * network.gather(device, 0.0, ranks, near)
        whole += network.gather(device, (stack.gradient_bytes + 2.0) * most, ranks, near)
    elif stack.zero >= 1:
        whole = network.gather(device, stack.gradient_bytes * most, ranks, near)
        whole += network.gather(device, 2.0 * most, ranks, near)
    else:
        whole = network.reduce(device, stack.gradient_bytes * most, ranks, near)
    copies = max(1, ranks * work.tp // (work.ep * work.etp)) if work.experts else 1
    if copies > 1 and routed:
        whole += network.reduce(
            device, 0.75 * stack.gradient_bytes * max(routed), copies, max(1, near * work.tp // work.ep)
        )
    return max(whole * (1 - overlap), whole - overlap * min(back))
