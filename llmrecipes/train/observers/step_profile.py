"""Profiles of steps: where the time of a device goes, by kind of kernel."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from llmrecipes.train.observers.base import Observer, StepDone
from llmrecipes.train.spec import RunSpec

logger = logging.getLogger(__name__)

WARMUP_STEPS = 2
MOST_NAMES = 40
"""Kernels that are listed by name."""

KINDS = {
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv",
    "attention": r"flash|fmha|attention|attn|sdpa",
    "loss": r"cross_?entropy|softmax|nll_loss",
    "norm": r"(layer|rms)_?norm|ln_(fwd|bwd)|_norm_kernel",
    "gemm": r"gemm|cutlass|nvjet|cublas|xmma|wgmma|triton_(tem|b?mm)_"
    r"|::(mm|addmm|bmm|baddbmm|_grouped_mm|mkldnn_linear\w*|linear)$",
    "copy": r"memcpy|memset|copy|catarray|index|embedding|gather|scatter|::(cat|clone|fill_|zero_)$",
}
"""Kinds of kernels by their names on GPUs and those of operations on CPUs; the first that matches counts."""
REST, IDLE = "elementwise", "idle"
_PATTERNS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS.items()]
_GENERATED = re.compile(r"triton_(poi|red|per|for|spl|coo)_fused_(\w+?)_?\d*$")
"""A kernel that torch.compile generates, other than a template's; its name has all operations that it fuses."""
_MOVED = (
    "_to_copy|clone|copy_?|cat|embedding|index(_put_?|_select)?|gather|scatter|view|_unsafe_view|transpose|permute|t"
)
_ONLY_MOVED = re.compile(rf"({_MOVED})(_({_MOVED}))*")


def kind_of(name: str) -> str:
    """The kind of a kernel or operation; what no pattern matches is elementwise."""
    if generated := _GENERATED.match(name):
        # It neither multiplies matrices nor attends, and a conversion or a gather among its operations is free.
        kinds = [kind for kind, pattern in _PATTERNS if kind in ("loss", "norm") and pattern.search(name)]
        return kinds[0] if kinds else "copy" if _ONLY_MOVED.fullmatch(generated[2]) else REST
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), REST)


class Kernel(NamedTuple):
    """One run of a kernel, in microseconds since any moment."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class KernelTable:
    """Time of a step by kind of kernel."""

    device: str
    steps: int
    seconds: float
    """Of a step, from the begin of its first kernel to that of the next step's."""
    kinds: dict[str, float]
    """Seconds of a step by kind. Kernels that overlap count twice; `idle` is time without any."""
    calls: dict[str, int]
    """Kernels of a step by kind."""
    names: dict[str, float]
    """Seconds of a step of the `MOST_NAMES` longest kernels."""

    def as_text(self) -> str:
        """One line for each kind, the longest first."""
        rows = sorted(self.kinds.items(), key=lambda item: -item[1])
        lines = [
            f"  {kind:<14}{1e3 * seconds:10.2f} ms {seconds / self.seconds:7.1%} {self.calls.get(kind, 0):8,}"
            for kind, seconds in rows
        ]
        return "\n".join([f"a step of {1e3 * self.seconds:.2f} ms by kind of kernel ({self.device}), calls:", *lines])


def table(kernels: Iterable[Kernel], window: float, steps: int, device: str) -> KernelTable:
    """Sum kernels up.

    Args:
        kernels: kernels of all steps.
        window: seconds of all steps.
        steps: how many they are.
        device: `cuda` or `cpu`.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.begin)
    kinds: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    names: defaultdict[str, float] = defaultdict(float)
    busy, reached = 0.0, float("-inf")
    for kernel in ordered:
        seconds = (kernel.end - kernel.begin) * 1e-6 / steps
        kind = kind_of(kernel.name)
        kinds[kind] += seconds
        calls[kind] += 1
        names[kernel.name] += seconds
        busy += max(0.0, kernel.end - max(kernel.begin, reached))
        reached = max(reached, kernel.end)
    kinds[IDLE] = max(0.0, window - busy * 1e-6) / steps
    longest = sorted(names.items(), key=lambda item: -item[1])[:MOST_NAMES]
    per_step = {kind: round(number / steps) for kind, number in calls.items()}
    return KernelTable(device, steps, window / steps, dict(kinds), per_step, dict(longest))


def of_profiler(profiler: Any, steps: int) -> KernelTable:
    """The table of what a profiler has recorded."""
    events = list(profiler.events())
    marks = [event for event in events if event.name.startswith("ProfilerStep") and event.device_type == DeviceType.CPU]
    window = sum(mark.time_range.elapsed_us() for mark in marks) * 1e-6
    on_device = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    if on_device:
        return table(on_device, window, steps, "cuda")
    # On a CPU operations contain others: only their own time counts, and an operation has no interval to itself.
    operations = []
    at = 0.0
    for event in events:
        if "::" in event.name and not event.name.startswith("ProfilerStep"):
            operations.append(Kernel(event.name, at, at + event.self_cpu_time_total))
            at = operations[-1].end
    return table(operations, window, steps, "cpu")


@contextmanager
def profiled(steps: int, folder: Path, rank: int, *, trace: bool = False) -> Iterator[Callable[[], None]]:
    """Profile a few steps; yields the function to call after every step.

    Args:
        steps: how many, after `WARMUP_STEPS`.
        folder: `kernels-rank-<rank>.json` goes there.
        rank: rank of this process.
        trace: write `trace-rank-<rank>.json` too, for chrome://tracing or Perfetto.
    """

    def write(profiler: Any) -> None:
        result = of_profiler(profiler, steps)
        path = folder / f"kernels-rank-{rank}.json"
        path.write_text(json.dumps(asdict(result), indent=2) + "\n", "utf-8")
        logger.info("profile of %d steps: %s\n%s", steps, path, result.as_text())
        if trace:
            profiler.export_chrome_trace(str(folder / f"trace-rank-{rank}.json"))

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    plan = schedule(wait=0, warmup=WARMUP_STEPS, active=steps, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write, record_shapes=trace) as profiler:
        yield profiler.step


class Profiler(Observer):
    """See `profiled`."""

    @classmethod
    def wanted(cls, spec: RunSpec) -> bool:
        """With --profile."""
        return bool(spec.profile_steps)

    def begin(self) -> None:
        """Begin to record."""
        spec = self.joined.spec
        self._step = self.stack.enter_context(
            profiled(spec.profile_steps, spec.run.logs, self.loop.world.rank, trace=spec.profile_trace)
        )

    def after_step(self, done: StepDone) -> None:
        """The profiler counts steps."""
        self._step()
