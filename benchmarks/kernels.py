"""Kernels and bytes of a training step by what they are for, beside what memory and products of a GPU allow.

    CUDA_VISIBLE_DEVICES= python -m benchmarks.kernels [RECIPE] [KEY=VALUE ...] [--json FILE]

The real code of one rank runs a step without data, with megatron-core's own layers and the kernels that a dry run
puts for a GPU's (flash attention, fused norms, and activations, rotary embeddings and the loss in one kernel where they
are fused). Each operation that computes is a kernel: bytes are those of the tensors that it reads and writes, time is
the longer of bytes at the data sheet's bandwidth and FLOPs at its peak, so a lower bound without launches.
"In one pass": the elementwise kernels of a group that follow one another read what comes from outside and write what is
read afterwards, once: the most that fusing them saves.

One rank, one micro-batch, and all layers: the default is gpt-1b. Nothing is timed, so a busy machine changes nothing.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any, cast

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.common import parser
from benchmarks.former import MICRO_BATCH
from llmrecipes.dryrun.recorder import pattern
from llmrecipes.dryrun.simulation import batches
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import MetaBackend
from llmrecipes.hardware.cluster import DetectedGpu, detect
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.plan.speed.device import device
from llmrecipes.recipe.load import load

# Dense bf16 FLOP/s and bytes/s of memory: H100 and H200 as the planner has them; DGX B200 data sheet.
B200 = (2.25e15, 8.0e12)
NO_KERNEL = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view"})
ONLY_WRITES = frozenset({"zero_", "fill_"})
GROUPS = (
    # What is in a module's name, and its group; the first that matches counts.
    ("core_attention", "core attention"),
    ("rope", "RoPE"),
    ("rotary", "RoPE"),
    ("norm", "norms"),
    ("router", "router"),
    ("experts", "experts"),
    ("token_dispatcher", "dispatch"),
    ("linear_fc", "MLP"),
    ("mlp", "MLP"),
    ("self_attention", "rest of attention"),
    ("embedding", "embedding"),
    ("output_layer", "output and loss"),
    ("logits", "output and loss"),
    ("decoder.layers", "residuals"),
    ("model", "output and loss"),
)
SWIGLU = "megatron.core.fusions.fused_bias_swiglu"
OPAQUE = ("swiglu", "bias_swiglu", "weighted_swiglu", "swiglu_back", "bias_swiglu_back", "weighted_swiglu_back")
VARIANTS: dict[str, dict[str, Any]] = {
    "as planned": {},
    "without bias_activation_fusion": {"layout.bias_activation_fusion": False},
    "without apply_rope_fusion": {"layout.apply_rope_fusion": False},
    "without cross_entropy_loss_fusion": {"layout.cross_entropy_loss_fusion": False},
}


@dataclass
class Kernel:
    """One launch: what it is for, and the storages that it reads and writes, with their bytes."""

    group: str
    reads: dict[int, int]
    writes: dict[int, int]
    flops: int = 0

    @property
    def bytes(self) -> int:
        """Of memory traffic, if nothing stays in a cache."""
        return sum(self.reads.values()) + sum(self.writes.values())

    def seconds(self, peak: float, bandwidth: float) -> float:
        """At the rates of a data sheet."""
        return max(self.flops / peak, self.bytes / bandwidth)


class Counter(TorchDispatchMode):
    """Records kernels; operations of the backward pass have the group of those whose gradient they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.module = "clip and update"
        self.hidden = 0
        self._storages: list[torch.UntypedStorage] = []  # alive, so that no other has the same address
        self._numbers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = _answer(func, args, options)
        if result is None:
            result = func(*args, **options)
            name = func._schema.name.partition("::")[2]
            if not self.hidden and func.namespace == "aten" and name not in NO_KERNEL and not func.is_view:
                formula: Any = flop_registry.get(func.overloadpacket)
                read = () if name in ONLY_WRITES else (args, options)
                self.add(read, result, formula(*args, **options, out_val=result) if formula else 0)
        return result

    def add(self, inputs: Any, outputs: Any, flops: int = 0) -> None:
        """A kernel that has a result on the device."""
        reads, writes = self._bytes(inputs), self._bytes(outputs)
        if writes:
            self.kernels.append(Kernel(self.group(), reads, writes, int(flops)))

    def group(self) -> str:
        """Of what runs."""
        node: Any = torch._C._current_autograd_node()
        if node is not None and "AccumulateGrad" in node.name():
            return "gradients into the buffer"
        name = self.module if node is None else str(node.metadata.get("module", "other gradients"))
        return next((group for part, group in GROUPS if part in name), name)

    @contextmanager
    def hiding(self) -> Iterator[None]:
        """A block whose operations are one kernel of a GPU."""
        self.hidden += 1
        try:
            yield
        finally:
            self.hidden -= 1

    def _bytes(self, values: Any) -> dict[int, int]:
        found: dict[int, int] = {}
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._numbers:
                    self._numbers[storage._cdata] = len(self._storages)
                    self._storages.append(storage)
                number = self._numbers[storage._cdata]
                found[number] = max(found.get(number, 0), min(tensor.nbytes, storage.nbytes()))
        return found


def _answer(func: Any, args: Any, options: Any) -> Any:
    """What the host asks for, without data; None: nothing."""
    name = func._schema.name.partition("::")[2]
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor):
        return None
    if name == "_local_scalar_dense" and first.is_meta:
        return 1.0 if first.is_floating_point() else 1
    if name == "_to_copy" and first.is_meta and options.get("device") == torch.device("cpu"):
        return torch.ones(first.shape, dtype=options.get("dtype") or first.dtype)
    if name == "copy_" and not first.is_meta and args[1].is_meta:
        return first.fill_(1)
    return None


class Labels(TorchFunctionMode):
    """Writes the running module on the autograd nodes of what it computes."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                label(tensor.grad_fn, self._counter.module)
        return result


def label(node: Any, module: str) -> None:
    """Write a module on a node, and on those before it that have none."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or "module" in node.metadata:
            continue
        node.metadata["module"] = module
        waiting += [each for each, _ in node.next_functions]


@contextmanager
def followed(counter: Counter, modules: Any) -> Iterator[None]:
    """A block in which the counter knows the running module, and fused kernels are one each."""
    from megatron.core.transformer import attention

    from llmrecipes.engine.core.platform import gelu, meta_kernels, rope

    names = {id(module): pattern(name) for chunk in modules for name, module in chunk.named_modules(prefix="model")}
    stack: list[str] = []

    def enter(module: torch.nn.Module, _inputs: Any) -> None:
        stack.append(counter.module)
        counter.module = names.get(id(module), counter.module)

    def leave(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                label(tensor.grad_fn, counter.module)
        counter.module = stack.pop()

    def one(function: Callable[..., Any], flops: Callable[..., int] = lambda *_: 0) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with counter.hiding():
                result = function(*args)
            read = getattr(args[0], "saved_tensors", ()) if hasattr(args[0], "save_for_backward") else ()
            counter.add((read, args), result, flops(*args))
            return result

        return call

    hooks = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
    before: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, inspect.getattr_static(owner, name)))
        setattr(owner, name, value)

    def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            module, counter.module = counter.module, name
            try:
                result = function(*args, **options)
            finally:
                counter.module = module
            label(result.grad_fn, name)
            return result

        return call

    put(attention, "apply_rotary_pos_emb", named(attention.apply_rotary_pos_emb, "rope"))
    swiglu = __import__(SWIGLU, fromlist=["swiglu"])
    for name in OPAQUE:
        put(swiglu, name, one(getattr(swiglu, name)))
    put(rope, "kernel", one(rope.kernel))
    for name in ("bias_gelu_kernel", "bias_gelu_kernel_back"):
        put(gelu, name, one(getattr(gelu, name)))
    for name in ("_statistics", "_gradient"):
        put(meta_kernels.LossShapes, name, staticmethod(one(getattr(meta_kernels.LossShapes, name))))
    for kind, forward, backward in (
        (meta_kernels._FlashAttention, _attention, _attention_back), (meta_kernels._RMSNorm, lambda *_: 0, lambda *_: 0)
    ):  # fmt: skip
        put(kind, "forward", staticmethod(one(kind.forward, forward)))
        put(kind, "backward", staticmethod(one(kind.backward, backward)))
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
        for hook in hooks:
            hook.remove()


def _attention(_ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> int:
    batch, heads, length, channels = query.shape
    return batch * heads * length * key.size(2) * 2 * (channels + value.size(-1)) // (2 if causal else 1)


def _attention_back(ctx: Any, *_gradients: torch.Tensor) -> int:
    query, key, value, *_ = ctx.saved_tensors
    return 5 * _attention(ctx, query, key, value, True) // 2


def count(plan: Plan) -> list[Kernel]:
    """Kernels of a step of the only rank."""
    engines = cast(MetaBackend, backend(plan.recipe))
    platform = engines.meta_platform(0, 1, "cuda, local", 1.0)
    with engines.join(plan.recipe, platform):
        engine = engines.construct_meta(plan, platform)
        counter = Counter()
        # Without data a mode must see even the first operations on what the host reads.
        with counter, Labels(counter), followed(counter, engine.modules):
            engine.train_step(batches(plan))
            engine.close()
    return counter.kernels


def summary(kernels: list[Kernel]) -> dict[str, dict[str, Any]]:
    """Of each group its kernels with and without products."""
    last = {number: place for place, kernel in enumerate(kernels) for number in kernel.reads}
    groups: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"kernels": 0, "elementwise": 0, "bytes": 0, "elementwise_bytes": 0, "one_pass_bytes": 0, "flops": 0}
    )
    run: list[int] = []
    for place, kernel in enumerate(kernels):
        group = groups[kernel.group]
        group["kernels"] += 1
        group["bytes"] += kernel.bytes
        group["flops"] += kernel.flops
        for name, (peak, bandwidth) in rates().items():
            group[name] = group.get(name, 0.0) + kernel.seconds(peak, bandwidth)
        if not kernel.flops:
            group["elementwise"] += 1
            group["elementwise_bytes"] += kernel.bytes
        if run and (kernel.flops or kernels[run[0]].group != kernel.group):
            groups[kernels[run[0]].group]["one_pass_bytes"] += _one_pass(kernels, run, last)
            run = []
        if not kernel.flops:
            run.append(place)
    if run:
        groups[kernels[run[0]].group]["one_pass_bytes"] += _one_pass(kernels, run, last)
    return dict(groups)


def _one_pass(kernels: list[Kernel], run: list[int], last: dict[int, int]) -> int:
    """Bytes that come into a run of kernels, and that are read after it or never."""
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    for place in run:
        for number, size in kernels[place].reads.items():
            if number not in written:
                read[number] = max(read.get(number, 0), size)
        for number, size in kernels[place].writes.items():
            written[number] = max(written.get(number, 0), size)
    kept = sum(size for number, size in written.items() if not run[0] <= last.get(number, -1) <= run[-1])
    return sum(read.values()) + kept


def rates() -> dict[str, tuple[float, float]]:
    """Peak and bandwidth of each GPU."""
    planned = {name: device(name) for name in ("H100", "H200")}
    return {**{name: (each.peak["bf16"], each.bandwidth) for name, each in planned.items()}, "B200": B200}


def planned(name: str, overrides: list[str], changes: dict[str, Any]) -> Plan:
    """A recipe on one H200 with one micro-batch."""
    texts = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    recipe = load(name, [*MICRO_BATCH.get(name, ()), *overrides, "model.transformer_impl=local", *texts]).recipe
    train = recipe.train.model_copy(update={"global_batch_size": recipe.layout.micro_batch_size})
    gpu = DetectedGpu("NVIDIA H200", 139 << 30, 139 << 30, 989.4)
    return derive(recipe.model_copy(update={"train": train}), 1, changed(detect(), gpus=(gpu,)))


def table(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Markdown."""
    gpus = list(rates())
    heads = ["what", "kernels", "of them elementwise", "GB", "of them elementwise", "in one pass", "TFLOP"]
    yield f"| {' | '.join([*heads, *(f'{name}, ms' for name in gpus)])} |"
    yield f"|{'---|' * (len(heads) + len(gpus))}"
    total: dict[str, float] = defaultdict(float)
    for group in found.values():
        for key, value in group.items():
            total[key] += value
    for name, group in [*sorted(found.items(), key=lambda item: -item[1]["H100"]), ("all", total)]:
        sizes = [f"{group[key] / 1e9:.2f}" for key in ("bytes", "elementwise_bytes", "one_pass_bytes")]
        times = [f"{group[gpu] * 1e3:.2f}" for gpu in gpus]
        counts = [f"{group[key]:.0f}" for key in ("kernels", "elementwise")]
        flops = f"{group['flops'] / 1e12:.2f}"
        yield f"| {' | '.join([name, *counts, *sizes, flops, *times])} |"


def main() -> None:
    """Count, and print the table of each variant as Markdown."""
    options = parser(__doc__)
    options.add_argument("recipe", nargs="?", default="gpt-1b", metavar="RECIPE")
    options.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    results = {}
    for variant, changes in VARIANTS.items():
        results[variant] = summary(count(planned(asked.recipe, asked.overrides, changes)))
        print(f"\n{asked.recipe}, {variant}\n")
        print("\n".join(table(results[variant])))
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1), "utf-8")


if __name__ == "__main__":
    main()
