"""Shapes of a run, and the time that the kernels of its layers take.

A matrix product of m × n × k takes the larger of its arithmetic and its memory traffic. Its arithmetic runs in waves of
tiles over the multiprocessors (NVIDIA, Matrix Multiplication Background, DU-09799), so that few or odd tiles leave some
idle; a short inner dimension pays more for the beginning and the end of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil

from llmrecipes.plan.speed.device import Device, Stack


@dataclass(frozen=True)
class Work:
    """A model and its layout on a number of GPUs; names as in Megatron's arguments."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    gpus: int
    tp: int
    pp: int
    cp: int
    dp: int
    mbs: int
    gbs: int
    head_dim: int = 0
    gated: bool = True
    tied: bool = False
    experts: int = 0
    topk: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    """Layers without experts of a model that has some."""
    latent: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    """Latent attention: ranks of queries and of keys, channels of a head without and with rotation, and of values."""
    mtp: int = 0
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    """Ranks over which an expert is split."""
    precision: str = "bf16"
    bf16_layers: int = 0
    """Layers whose products are in bf16 although `precision` has others in fp8."""
    recomputed: float = 0.0
    """Share of the layers whose whole forward pass is repeated in the backward pass."""
    recomputed_modules: tuple[str, ...] = ()
    """Parts that every layer recomputes, as in `layout.recompute_modules`."""
    keys: float = 0.0
    """Tokens that attention multiplies a token with, on average over the layers; 0: all, or half with `causal`."""
    causal: bool = True
    stage_layers: tuple[tuple[int, ...], ...] = field(default=())
    """Layers of each chunk of each pipeline stage; empty: as even as possible."""

    @property
    def channels(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def width(self) -> float:
        """Bytes of an activation and of a weight in a message."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step."""
        return max(1, round(self.gbs / (self.dp * self.mbs)))

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.mbs * self.seq / self.cp

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers of each stage."""
        if self.stage_layers:
            return tuple(sum(chunks) for chunks in self.stage_layers)
        each, more = divmod(self.layers, self.pp)
        # The last stage has the output layer and gets no further layer.
        return tuple(each + (stage < more) for stage in range(self.pp))

    @property
    def chunks(self) -> tuple[tuple[float, ...], ...]:
        """Layers of each chunk of each stage; fractions where only the layers of a stage are known."""
        return self.stage_layers or tuple((layers / self.vpp,) * self.vpp for layers in self.stages)

    def kinds(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Layers without and with experts of each chunk of each stage; those without come first in the model."""
        kinds: list[list[tuple[float, float]]] = [[] for _ in self.chunks]
        first = 0.0
        # Chunk by chunk: the layers go through all stages before they come back to the first one.
        for chunk in range(self.vpp):
            for stage, layers in enumerate(each[chunk] for each in self.chunks):
                some = max(0.0, min(layers, first + layers - self.dense_layers)) if self.experts else 0.0
                kinds[stage].append((layers - some, some))
                first += layers
        return tuple(tuple(kind) for kind in kinds)

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of one layer."""
        if self.latent[1]:
            query, key, plain, rotated, value = self.latent
            queries = self.heads * (plain + rotated)
            up = query * (self.hidden + queries) if query else self.hidden * queries
            return (
                up
                + self.hidden * (key + rotated)
                + key * self.heads * (plain + value)
                + self.heads * value * self.hidden
            )
        size = self.channels * self.heads
        return self.hidden * (2 * size + 2 * self.channels * self.kv_heads)

    @property
    def dense_parameters(self) -> int:
        """Parameters of one dense MLP."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.moe_ffn

    @property
    def shared_parameters(self) -> int:
        """Parameters of the shared experts of a layer and its router."""
        return (3 if self.gated else 2) * self.hidden * self.shared_ffn + self.hidden * self.experts

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def parameters(self) -> int:
        """All of them."""
        return self._count(self.experts)

    @property
    def active_parameters(self) -> int:
        """Those that a token uses."""
        return self._count(self.topk)

    def _count(self, experts: int) -> int:
        dense = (self.layers - self.moe_layers) * self.dense_parameters
        sparse = self.moe_layers * (experts * self.expert_parameters + self.shared_parameters)
        return (
            self.layers * self.attention_parameters
            + dense
            + sparse
            + self.vocab * self.hidden * (1 if self.tied else 2)
        )

    def flops(self, *, causal: bool) -> float:
        """Model FLOPs per token of a training step; attention as if it were full, or its causal half."""
        products = self.active_parameters - (0 if self.tied else self.vocab * self.hidden)
        values = self.latent[4] or self.channels
        keys = self.latent[2] + self.latent[3] or self.channels
        scores = 2 * self.seq * self.heads * (keys + values) * self.layers
        return 6 * products + 3 * scores / (2 if causal else 1)


_TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.72), (64, 64, 0.5))
"""Tiles of cuBLAS and the share of the best rate at which one works: smaller ones load more bytes per FLOP."""


@lru_cache(maxsize=200_000)
def product(device: Device, m: int, n: int, k: int, kind: str, batch: int = 1) -> float:
    """Seconds of `batch` products of m × k and k × n in a precision."""
    if m <= 0 or n <= 0 or k <= 0:
        return 0.0
    rate = device.peak[kind] * (device.gemm_fp8 if kind == "fp8" else device.gemm)
    depth = k / (k + device.gemm_depth * (2 if kind == "fp8" else 1))
    best = float("inf")
    for rows, columns, share in _TILES:
        tiles = min(ceil(m / rows) * ceil(n / columns), ceil(m / columns) * ceil(n / rows)) * batch
        waves = ceil(tiles / device.multiprocessors)
        # Tiles of the last wave finish earlier than a full one: clocks and caches are theirs.
        full = tiles / device.multiprocessors
        waves_taken = full + 0.6 * (waves - full) if full > 1 else 1.0
        best = min(best, waves_taken * device.multiprocessors * rows * columns * 2.0 * k / (rate * share * depth))
    size = {"fp32": 4, "bf16": 2, "fp8": 1}[kind]
    moved = batch * (size * (m * k + k * n) + (4 if kind == "fp32" else 2) * m * n)
    return max(best, moved / (device.bandwidth * device.memory)) + 2e-6


@dataclass(frozen=True)
class Kernels:
    """Seconds of the GPU of one layer forward and backward, and kernels that the host launches for it."""

    forward: float
    backward: float
    launches: int


_ROWWISE = 0.65
"""Speed of fp8 products with a scale a row, relative to one scale a tensor (torchtitan, benchmarks/asyncTP_llama3)."""


def _kind(work: Work) -> str:
    if "fp8" in work.precision:
        return "fp8"
    return "fp32" if work.precision == "fp32" else "bf16"


def _linear(
    device: Device, m: float, n: float, k: float, kind: str, speed: float, batch: int = 1
) -> tuple[float, float]:
    rows, columns, depth = max(1, ceil(m)), max(1, ceil(n)), max(1, ceil(k))
    forward = product(device, rows, columns, depth, kind, batch)
    data = product(device, rows, depth, columns, kind, batch)
    weights = product(device, columns, depth, rows, kind, batch)
    return forward / speed, (data + weights) / speed


def layer(device: Device, stack: Stack, work: Work, *, experts: bool) -> Kernels:
    """One layer of a micro-batch on one rank, communication left out; the mean of those in fp8 and in bf16."""
    kernels = _layer(device, stack, work, experts=experts)
    if not work.bf16_layers or _kind(work) != "fp8":
        return kernels
    plain = _layer(device, stack, replace(work, precision="bf16"), experts=experts)
    share = work.bf16_layers / work.layers
    return Kernels(
        kernels.forward + share * (plain.forward - kernels.forward),
        kernels.backward + share * (plain.backward - kernels.backward),
        kernels.launches,
    )


def _layer(device: Device, stack: Stack, work: Work, *, experts: bool) -> Kernels:
    kind = _kind(work)
    speed = device.gemm_speed(stack.gemm)
    tokens = work.tokens
    if "rowwise" in work.precision:
        # A scale a row is computed, and applied, for every product.
        speed *= _ROWWISE
    forward = backward = 0.0

    def add(n: float, k: float, rows: float = tokens, batch: int = 1, precision: str = kind) -> None:
        nonlocal forward, backward
        ahead, back = _linear(device, rows, n, k, precision, speed, batch)
        forward = forward + ahead
        backward = backward + back

    hidden, tp = work.hidden, work.tp
    if work.latent[1]:
        query, key, plain, rotated, value = work.latent
        queries = work.heads * (plain + rotated) / tp
        if query:
            add(query, hidden)
            add(queries, query)
        else:
            add(queries, hidden)
        add(key + rotated, hidden)
        add(work.heads * (plain + value) / tp, key)
        context = work.heads * value / tp
    else:
        context = work.heads * work.channels / tp
        add((work.heads + 2 * max(work.kv_heads, tp if work.kv_heads < tp else 0)) * work.channels / tp, hidden)
    add(hidden, context)
    wide = 2 if work.gated else 1
    if experts:
        local = max(1, work.experts // work.ep)
        width = work.moe_ffn / work.etp
        share = tokens * work.topk / tp * work.ep * work.etp / max(1, work.experts)
        add(wide * width, hidden, rows=share, batch=local)
        add(hidden, width, rows=share, batch=local)
        if work.shared_ffn:
            add(wide * work.shared_ffn / tp, hidden)
            add(hidden, work.shared_ffn / tp)
    else:
        add(wide * work.ffn / tp, hidden)
        add(hidden, work.ffn / tp)
    ahead, back = _attention(device, stack, work)
    moved = _elementwise(stack, work, experts=experts)
    rate = device.bandwidth * device.memory
    launches = 14 + (0 if stack.flash else 4) + (6 if kind == "fp8" else 0)
    if experts:
        # Router, sorting and dispatch, and a product of each local expert.
        launches += 30 + 2 * max(1, work.experts // work.ep)
    return Kernels(forward + ahead + moved / rate, backward + back + 1.6 * moved / rate, launches)


def repeated(device: Device, stack: Stack, work: Work, *, experts: bool) -> float:
    """Seconds of the kernels that `recomputed_modules` repeat in the backward pass of a layer."""
    kind = _kind(work)
    tokens = work.tokens
    tp = work.tp
    wide = 3 if work.gated else 2
    split = tp if stack.sequence_parallel else 1

    def products(*shapes: tuple[float, float], rows: float = tokens, batch: int = 1) -> float:
        return sum(_linear(device, rows, n, k, kind, device.gemm_speed(stack.gemm), batch)[0] for n, k in shapes)

    def traffic(values: float) -> float:
        return tokens * stack.passes * 2 * 2 * values / (device.bandwidth * device.memory)

    def mlp(width: float) -> float:
        inner = ((wide - 1) * width / tp, work.hidden), (work.hidden, width / tp)
        return products(*inner) + traffic(wide * width / tp)

    seconds = 0.0
    local = max(1, work.experts // work.ep)
    rows = tokens * work.topk / tp * work.ep * work.etp / max(1, work.experts)
    act = traffic(work.topk / tp * wide * work.moe_ffn)
    for name in work.recomputed_modules:
        if name == "core_attn":
            seconds += _attention(device, stack, work)[0]
        elif name == "layernorm":
            seconds += traffic(2 * work.hidden / split)
        elif name == "mla_up_proj" and work.latent[1]:
            query, key, plain, rotated, value = work.latent
            queries = ((work.heads * (plain + rotated) / tp, query),) if query else ()
            seconds += products(*queries, (work.heads * (plain + value) / tp, key))
        elif name == "mlp" and not experts:
            seconds += mlp(work.ffn)
        elif name == "moe_act" and experts:
            seconds += act
        elif name == "shared_experts" and experts and work.shared_ffn:
            seconds += mlp(work.shared_ffn)
        elif name == "moe" and experts:
            width = work.moe_ffn / work.etp
            inner = ((wide - 1) * width, work.hidden), (work.hidden, width)
            seconds += products(*inner, rows=rows, batch=local) + act + traffic(work.topk / tp * 6 * work.hidden)
            seconds += mlp(work.shared_ffn) if work.shared_ffn else 0.0
    return seconds


def _attention(device: Device, stack: Stack, work: Work) -> tuple[float, float]:
    keys = work.latent[2] + work.latent[3] or work.channels
    values = work.latent[4] or work.channels
    heads = work.heads / work.tp
    scores = work.mbs * heads * work.seq * work.seq / work.cp
    seen = work.mbs * heads * work.seq * (work.keys or work.seq * (0.5 if work.causal else 1.0)) / work.cp
    flops = 2.0 * seen * (keys + values)
    if stack.flash:
        rate = device.peak["bf16"] * device.attention * stack.attention * min(1.0, keys / 128) ** 0.3
        # A head's blocks of 128 rows fill the multiprocessors; short sequences leave some idle.
        blocks = work.mbs * heads * max(1.0, work.seq / work.cp / 128)
        rate *= min(1.0, blocks / device.multiprocessors) * work.seq / (work.seq + 256)
        return flops / rate, 2.5 * flops / rate / 0.8
    rate = device.peak["bf16"] * device.gemm * 0.6
    traffic = scores * 2 * 8 / (device.bandwidth * device.memory)
    return 2 * flops / rate + traffic, 4 * flops / rate + 1.5 * traffic


def _elementwise(stack: Stack, work: Work, *, experts: bool) -> float:
    """Bytes of norms, residuals, rotation, activation and, for experts, of sorting tokens, forward."""
    tokens, hidden, tp = work.tokens, work.hidden, work.tp
    split = tp if stack.sequence_parallel else 1
    edge = 12 * 2 * hidden / split
    inner = 2 * (work.heads + work.kv_heads) * work.channels * 2 / tp
    if experts:
        visits = work.topk / tp
        inner += 2 * visits * ((3 if work.gated else 2) * work.moe_ffn + 6 * hidden)
        inner += 2 * (3 if work.gated else 2) * work.shared_ffn / tp
    else:
        inner += 2 * (3 if work.gated else 2) * work.ffn / tp
    if "fp8" in work.precision:
        inner += 3 * 2 * hidden / split
    return tokens * stack.passes * (edge + inner)


def ends(device: Device, stack: Stack, work: Work) -> tuple[float, float]:
    """Seconds of the output layer and the loss of a micro-batch, forward and backward."""
    kind = "bf16" if _kind(work) == "fp8" else _kind(work)
    rows = work.vocab / work.tp
    ahead, back = _linear(device, work.tokens, rows, work.hidden, kind, device.gemm_speed(stack.gemm))
    logits = work.tokens * rows * stack.loss_bytes / (device.bandwidth * device.memory)
    return ahead + logits, back + logits
