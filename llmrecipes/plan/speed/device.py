"""What the time model knows of a GPU and of the software on it: a few physical coefficients, with their sources."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import is_named

_DATA = Path(__file__).with_name("data")
_SHARES = ("gemm", "gemm_fp8", "gemm_depth", "attention", "memory", "launch", "links", "hop_near", "hop_far")
_LIMIT = 0.95
"""Share of a peak that no product exceeds."""


@dataclass(frozen=True, eq=False)
class Device:
    """A GPU and its links. Rates in units per second, `launch` and latencies in seconds."""

    name: str
    multiprocessors: int
    memory_bytes: float
    """Capacity."""
    peak: dict[str, float]
    """Dense FLOP/s of matrix products by precision: fp32, bf16, fp8."""
    bandwidth: float
    """Bytes per second of its memory."""
    nvlink: float
    """Bytes per second that one GPU sends over NVLink."""
    nic: float
    """Bytes per second that one GPU sends to other nodes."""
    gpus_per_node: int
    """GPUs of an NVLink domain."""
    gemm: float
    """Share of the peak that a large matrix product reaches in 16 bits."""
    gemm_fp8: float
    """The same in 8 bits, quantisation of its inputs included."""
    gemm_depth: float
    """Inner dimension at which a product reaches half of its share."""
    attention: float
    """Share of the peak that a fused attention kernel reaches forward; backward it is four fifths of that."""
    memory: float
    """Share of `bandwidth` that element-wise kernels reach."""
    launch: float
    """Host time of one kernel."""
    links: float
    """Share of the links' bandwidth that large collectives reach."""
    hop_near: float
    """Latency of one step of a ring over NVLink."""
    hop_far: float
    """The same between nodes."""
    queue: bool = True
    """Whether kernels run behind the host, which launches the next ones meanwhile; a CPU does one after the other."""
    rails: float = 1.0
    """Power of the ranks on a node with which a ring's bandwidth between nodes grows; 1 where it uses all adapters."""
    crowd: float = 0.0
    """How much longer a ring's bytes take for each doubling of its nodes."""
    alike: tuple[str, ...] = ()
    """No run on this GPU was fitted, and its shares are another's: more GPUs, with whose shares it may be as fast."""

    def with_shares(self, other: str) -> Device:
        """The same rates with the shares and latencies of another GPU."""
        known = device(other)
        return replace(self, **{name: getattr(known, name) for name in _SHARES})

    def gemm_speed(self, factor: float) -> float:
        """A framework's speed of products relative to `gemm`, as far as hardware goes."""
        return min(factor, _LIMIT / self.gemm)

    def peak_of(self, precision: str) -> float:
        """Dense FLOP/s of matrix products in a precision of a recipe."""
        return self.peak["fp32" if precision == "fp32" else "bf16"]


@dataclass(frozen=True)
class Stack:
    """What a training framework does or leaves out: switches, and what it costs the host."""

    name: str
    measured_on: tuple[str, ...] = ()
    """GPUs of the runs that its kernels' factors were fitted to; empty: of all."""
    flash: bool = True
    """Fused attention; otherwise the scores are written to memory."""
    attention: float = 1.0
    """Speed of its attention kernel, relative to the GPU's best."""
    gemm: float = 1.0
    """Speed of its matrix products, relative to the GPU's best: kernels picked, power limit, clocks."""
    passes: float = 1.0
    """Bytes of element-wise work, relative to fused kernels."""
    host: float = 1.0
    """Host time of a layer, relative to fused kernels."""
    links: float = 1.0
    """Speed of its collectives and of the network it was measured on, relative to the GPU's best."""
    nic: float = 1.0
    """Bandwidth between the nodes that it was measured on, relative to the GPU's."""
    overlap_hops: bool = True
    """With virtual stages, messages between stages are sent beside the passes."""
    sequence_parallel: bool = True
    """Norms split over tensor-parallel ranks."""
    overlap_gradients: float = 0.8
    """Share of the gradients' communication that can hide behind a backward pass."""
    overlap_tensor: float = 0.0
    """Share of tensor-parallel communication that hides behind matrix products."""
    overlap_expert: float = 0.0
    """Share of the experts' communication that hides behind computation."""
    once_per_node: bool = False
    """A token goes once to every node with experts of its, and on over NVLink (DeepEP, HybridEP)."""
    sharded: bool = False
    """Weights, gradients and optimizer split over data-parallel ranks (FSDP, ZeRO-3)."""
    zero: int = 1
    """Stage of ZeRO of the others: 1 splits the optimizer's state, 2 reduces gradients after each micro-batch."""
    by_tensor: bool = False
    """With ZeRO-1: gradients and weights travel tensor by tensor after the last backward pass."""
    gradient_bytes: int = 4
    """Bytes of a gradient that is reduced."""
    hop: float = 0.0
    """Host time of handing a tensor to the next pipeline stage."""
    hop_slow: float = 0.0
    """More of it where a job has very many nodes."""
    stall: float = 0.0
    """Time that a layer loses per tensor-parallel rank where the pipeline crosses nodes."""
    loss_bytes: float = 10.0
    """Bytes per logit at the loss: its copies in 16 and 32 bits, and their gradients."""
    rails: float = 1.0
    """That of the network it was measured on."""
    crowd: float = 0.0
    """That of the network it was measured on."""
    by_cost: bool = False
    """Blocks are cut into stages by parameters, the output layer among them, so that a stage can be empty."""
    edges: float = 4.0
    """Tensors of the residual stream's width that a layer keeps."""
    act: float = 1.0
    """Bytes that attention and MLP keep, relative to fused kernels."""
    inputs: float = 0.0
    """Tensors of the residual stream's width that the first stage keeps of a micro-batch besides."""
    gathered: float = 0.0
    """Tensors of the residual stream's width that a layer keeps on every tensor-parallel rank."""
    logits: float = 10.0
    """Bytes per logit at the fullest moment of the loss."""
    logits_before: float = 0.0
    """Bytes per logit that are still there of the micro-batch before."""
    gradient_copy: float = 0.0
    """Bytes per parameter of transient buffers."""
    base: float = 1.0e9
    """Bytes of a rank without a model."""


@cache
def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8"))
    return data


def device_names() -> list[str]:
    """GPUs that have a data file."""
    return sorted(path.stem for path in _DATA.glob("*.json") if path.stem != "stacks")


class SpeedUnknownError(UserError):
    """The time model has no coefficients of the machine. Its memory can be planned all the same."""


@cache
def device(name: str) -> Device:
    """A GPU by a name such as `H100-80GB` or `NVIDIA A100-SXM4-40GB`.

    Raises:
        SpeedUnknownError: nothing is known of it.
    """
    text = name.upper().replace("NVIDIA", "").replace("_", "-")
    for stem in sorted(device_names(), key=len, reverse=True):
        if not is_named(stem, name):
            continue
        data = _read(stem)
        values = {**(_read(data["like"])["values"] if "like" in data else {}), **data["values"]}
        values["alike"] = tuple(data.get("alike", ()))
        for variant, changes in data["variants"].items():
            if variant in text:
                return of_json(stem, {**values, **changes})
        return of_json(stem, values)
    raise SpeedUnknownError(
        f"{name} has no coefficients",
        where="gpu",
        rule="the time model needs coefficients of the GPU",
        fix=f"one of {', '.join(device_names())}",
    )


def of_json(name: str, values: dict[str, Any]) -> Device:
    """A device of a data file's values."""
    return Device(name=name, **{f.name: values[f.name] for f in fields(Device) if f.name in values})


@cache
def stack(source: str) -> Stack:
    """The software that a description names: the first of the data file with a word in it, else
    its default; then what single words say."""
    text = source.lower()
    entries = _read("stacks")["stacks"]
    name = next((key for key, entry in entries.items() if any(word in text for word in entry["words"])), "default")
    values = _values(name)
    for entry in _read("stacks")["words"]:
        if any(word in text for word in entry["words"]) and entry.get("of", name) == name:
            values = {**values, **entry["values"]}
    return Stack(name=name, **values)


def stack_of(name: str) -> Stack:
    """A framework of the data file by its name."""
    return Stack(name=name, **_values(name))


def kernels_on(device: Device, software: Stack) -> Stack:
    """The framework on a GPU; with the default's kernels on one without runs of it.

    Factors are relative to the GPU's shares. Those of H100 would have an A100 exceed what its products reach.
    """
    if not software.measured_on or device.name in software.measured_on:
        return software
    default = stack_of("default")
    return replace(software, gemm=default.gemm, attention=default.attention, passes=default.passes, host=default.host)


def _values(name: str) -> dict[str, Any]:
    data = _read("stacks")
    values = data["default"] if name == "default" else data["stacks"][name]["values"]
    return {**values, "measured_on": tuple(values.get("measured_on", ()))}
