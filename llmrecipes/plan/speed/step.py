"""Seconds of a training step: passes of each stage, communication that does not hide, pipeline, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from llmrecipes.plan.sharding import OWNERS
from llmrecipes.plan.speed import network
from llmrecipes.plan.speed.device import Device, Stack
from llmrecipes.plan.speed.schedule import shortest, simulate
from llmrecipes.plan.speed.work import Work, ends, layer, repeated

_STEP_KERNELS = 40
"""Kernels of a step besides its passes: gradient norm, optimizer, data."""


@dataclass(frozen=True)
class StepTime:
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
    passes: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...] = ()
    """Seconds of a micro-batch forward and backward on each stage, on each of its chunks."""
    hop: float = 0.0
    """Seconds of a message between stages."""
    teacher: float = 0.0
    """The passes of a teacher (`distill`), its communication included."""
    attack: float = 0.0
    """All passes but the last on moved embeddings (`train.adversarial`), with their communication."""
    rounding: float = 0.0
    """Rounding of the matrices (`qat`), once a step."""

    @property
    def seconds(self) -> float:
        """All together."""
        return sum(self.parts().values())

    @property
    def communication(self) -> float:
        """What of `seconds` are collectives that do not hide; messages between stages are in `bubble`."""
        return self.tensor + self.expert + self.context + self.gradients

    def parts(self) -> dict[str, float]:
        """Seconds by name."""
        rare = {"teacher": self.teacher, "attack": self.attack, "rounding": self.rounding}
        return {name: getattr(self, name) for name in _PARTS} | {name: each for name, each in rare.items() if each}


_PARTS = ("compute", "tensor", "expert", "context", "bubble", "gradients", "optimizer")


def _either(device: Device, gpu: float, host: float) -> float:
    """Seconds of a layer whose kernels take `gpu` and whose launches `host`: the longer, rounded where they meet."""
    if not device.queue:
        return gpu + host
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
    tokens = work.tokens
    near = device.gpus_per_node
    tensor_ahead = tensor_back = expert = context = 0.0
    if work.tp > 1:
        one = network.reduce(device, work.width * tokens * work.hidden, work.tp, near)
        shown = 1 - stack.overlap_tensor
        # With sequence parallelism the backward pass gathers its inputs once more, beside the data gradient.
        tensor_ahead = tensor_back = 2 * one * shown
        if experts and (work.ep > 1 or work.etp > 1):
            tensor_ahead = tensor_back = one * shown
        if stack.sequence_parallel:
            tensor_back += 0.5 * one * shown
    if experts and work.ep > 1:
        size = work.width * tokens * work.topk * work.hidden / work.tp
        copies = work.topk if stack.once_per_node else 0
        expert = 2 * network.exchange(device, size, work.ep, max(1, near // work.tp), copies)
        expert *= 1 - stack.overlap_expert
    if experts and work.etp > 1:
        # Ranks that share an expert gather each other's tokens and sum its results.
        size = work.width * tokens * work.topk * work.hidden / work.tp * work.etp
        expert += 2 * network.gather(device, size, work.etp, near)
    if work.cp > 1:
        channels = work.latent[2] + work.latent[3] or work.channels
        size = work.width * tokens * work.cp * 2 * work.kv_heads * channels / work.tp
        whole = network.gather(device, size, work.cp, max(1, near // work.tp))
        context = max(0.0, whole - 0.8 * kernels.forward * 0.3)
    ahead = kernels.forward + tensor_ahead + expert + context
    back = kernels.backward + tensor_back + expert + 2 * context
    dispatched = experts and "moe" in work.recomputed_modules
    back += work.recomputed * ahead + repeated(device, stack, work, experts=experts) + dispatched * expert
    host = device.launch * stack.host
    ahead = _either(device, ahead, host * kernels.launches)
    back = _either(device, back, host * (1.5 + work.recomputed) * kernels.launches)
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
    words = work.vocab * work.hidden
    for stage, chunks in enumerate(work.kinds()):
        plain, some = (sum(chunk[kind] for chunk in chunks) for kind in (0, 1))
        layer_parameters = (
            (plain + some) * work.attention_parameters + plain * work.dense_parameters + some * work.shared_parameters
        )
        layer_parameters += words * ((stage == 0) + (stage == work.pp - 1) * (0 if work.tied and work.pp == 1 else 1))
        dense.append(layer_parameters / work.tp)
        sparse.append(some * work.experts * work.expert_parameters / (work.ep * work.etp))
    return dense, sparse


ADAMW_BYTES = 28
"""Bytes that AdamW reads (gradient, weight, two moments) and writes (but for the gradient) of a parameter."""
_COPIED_BYTES = 8
"""Bytes of a parameter that are copied for any optimizer, from its gradient and to its weight in 16 bits."""


def linked(device: Device, stack: Stack) -> Device:
    """The device with the network that a stack sees."""
    network_of_stack = (stack.links, stack.rails, stack.crowd, stack.nic)
    return device if network_of_stack == (1.0, 1.0, 0.0, 1.0) else _with_links(device, *network_of_stack)


@lru_cache(maxsize=1024)
def _with_links(device: Device, share: float, rails: float, crowd: float, nic: float) -> Device:
    return replace(device, links=device.links * share, rails=rails, crowd=crowd, nic=device.nic * nic)


def forward_seconds(step: StepTime, microbatches: int) -> float:
    """Seconds of a step's forward passes alone: those of the slowest stage, after the others have their first."""
    stages = [sum(ahead) for ahead, _ in step.passes]
    return microbatches * max(stages) + sum(stages) - max(stages)


def with_attack(step: StepTime, passes: int) -> StepTime:
    """A step that passes all its micro-batches several times."""
    once = step.compute + step.tensor + step.expert + step.context + step.bubble
    return replace(step, attack=(passes - 1) * once)


@dataclass(frozen=True)
class _Layers:
    """A layer with a dense MLP and one with experts; None: the model has none."""

    plain: _Pass | None
    sparse: _Pass | None

    @classmethod
    def of(cls, device: Device, stack: Stack, work: Work) -> _Layers:
        has_dense = work.dense_layers or not work.experts
        return cls(
            _layer(device, stack, work, experts=False) if has_dense else None,
            _layer(device, stack, work, experts=True) if work.experts else None,
        )

    def seconds(self, name: str, few: float, many: float) -> float:
        """One of the times of so many layers with a dense MLP and with experts."""
        numbers = ((self.plain, few), (self.sparse, many))
        return sum((getattr(each, name) * number for each, number in numbers if each is not None), 0.0)


def _hop(device: Device, stack: Stack, work: Work) -> float:
    """Seconds of a message between stages."""
    if work.pp == 1:
        return 0.0
    far = work.gpus > device.gpus_per_node
    message = work.width * work.tokens * work.hidden / (work.tp if stack.sequence_parallel else 1)
    hop = network.send(device, message, far=far) + stack.hop
    if work.dp > 1 and far:
        slow_nodes = (work.gpus / device.gpus_per_node / 32) ** 4
        hop += stack.hop_slow * slow_nodes / (1 + slow_nodes)
    return hop


def _of_stages(
    device: Device, stack: Stack, work: Work, layers: _Layers, added: Sequence[float]
) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of the forward and of the backward pass of each chunk of each stage, which adds some to the latter."""
    ahead = [[layers.seconds("forward", *chunk) for chunk in chunks] for chunks in work.kinds()]
    back = [
        [layers.seconds("backward", *chunk) + more for chunk in chunks]
        for chunks, more in zip(work.kinds(), added, strict=True)
    ]
    # The last chunk of the last stage has the loss, and the layers of multi-token prediction with one each.
    loss_ahead, loss_back = ends(device, stack, work)
    ahead[-1][-1] += loss_ahead * (1 + work.mtp)
    back[-1][-1] += loss_back * (1 + work.mtp)
    if predicting := layers.sparse or layers.plain:
        ahead[-1][-1] += predicting.forward * work.mtp
        back[-1][-1] += predicting.backward * work.mtp
    return ahead, back


def predict(device: Device, stack: Stack, work: Work, *, at_least: bool = False) -> StepTime:
    """Seconds of one step.

    Args:
        at_least: the pipeline takes no longer than its slowest stage requires, which is computed at once.
    """
    device = linked(device, stack)
    layers = _Layers.of(device, stack, work)
    dense, routed = stage_parameters(work)
    rate = device.bandwidth * device.memory
    # Weight gradients are added to those of the micro-batches before.
    added = [(d + r) * 2 * stack.gradient_bytes / rate / work.vpp for d, r in zip(dense, routed, strict=True)]
    ahead, back = _of_stages(device, stack, work, layers, added)
    hop = _hop(device, stack, work)
    slowest = max(range(work.pp), key=lambda stage: sum(ahead[stage]) + sum(back[stage]))
    number = work.microbatches
    if stack.sharded and work.dp > 1:
        ahead, back = _sharded(device, stack, work, ahead, back, dense)
    blocking = work.vpp == 1 or not stack.overlap_hops
    passes = shortest(ahead, back, number) if at_least else simulate(ahead, back, number, hop, blocking=blocking)
    exposed = _gradients(device, stack, work, dense, routed, [sum(chunk_seconds) for chunk_seconds in back])
    held = max(d + r for d, r in zip(dense, routed, strict=True))
    ranks = work.dp * work.cp if (stack.zero >= 1 or stack.sharded) else 1
    optimizer = (
        held / ranks * (ADAMW_BYTES + _COPIED_BYTES) / rate
        + held * 8 / rate
        + _STEP_KERNELS * device.launch * stack.host
    )
    few, many = (sum(count[kind] for count in work.kinds()[slowest]) for kind in (0, 1))
    of_layers = number * layers.seconds("tensor", few, many)
    of_experts = number * layers.seconds("expert", 0, many)
    of_context = number * layers.seconds("context", few, many)
    busy = number * (sum(ahead[slowest]) + sum(back[slowest]))
    return StepTime(
        compute=busy - of_layers - of_experts - of_context,
        tensor=of_layers,
        expert=of_experts,
        context=of_context,
        bubble=passes - busy,
        gradients=exposed,
        optimizer=optimizer,
        passes=tuple((tuple(f), tuple(b)) for f, b in zip(ahead, back, strict=True)),
        hop=hop,
    )


def _sharded(
    device: Device, stack: Stack, work: Work, ahead: list[list[float]], back: list[list[float]], dense: list[float]
) -> tuple[list[list[float]], list[list[float]]]:
    """Passes in which weights are gathered layer by layer: a layer's kernels hide the next one's communication."""
    near = max(1, device.gpus_per_node // work.tp)
    result_ahead, result_back = [], []
    for forward, backward, parameters in zip(ahead, back, dense, strict=True):
        share = parameters / work.vpp
        ranks = work.dp * work.cp
        weights = network.gather(device, 2.0 * share, ranks, near)
        gradients = network.gather(device, float(stack.gradient_bytes) * share, ranks, near)
        one = 1 - stack.overlap_gradients
        result_ahead.append([max(seconds + one * weights, weights) for seconds in forward])
        result_back.append([max(seconds + one * (weights + gradients), weights + gradients) for seconds in backward])
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
    elif stack.zero == 2:
        # As often as there are micro-batches, all of them behind a backward pass or after it.
        collective = network.reduce if ranks > OWNERS else network.gather
        once = collective(device, stack.gradient_bytes * most, ranks, near)
        left = max(once * (1 - overlap), once - overlap * min(back))
        return work.microbatches * left + network.gather(device, work.width * most, ranks, near)
    elif stack.zero >= 1:
        whole = network.gather(device, stack.gradient_bytes * most, ranks, near)
        whole += network.gather(device, work.width * most, ranks, near)
    else:
        whole = network.reduce(device, stack.gradient_bytes * most, ranks, near)
    copies = max(1, ranks * work.tp // (work.ep * work.etp)) if work.experts else 1
    if copies > 1 and routed:
        whole += network.reduce(
            device, 0.75 * stack.gradient_bytes * max(routed), copies, max(1, near * work.tp // work.ep)
        )
    return max(whole * (1 - overlap), whole - overlap * min(back))
