"""What reading a node's energy and serving a run's values cost: microseconds a read, medians.

    python -m benchmarks.metering

Nothing of it is on the path of a step but `NodeReadings.take`, once in ten steps, and the sink's `step`.
"""

from __future__ import annotations

import mmap
import socket
import statistics
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llmrecipes.tracking.energy import Energy
from llmrecipes.tracking.events import StepMetrics
from llmrecipes.tracking.prometheus import PrometheusSink
from llmrecipes.tracking.spread import spread
from llmrecipes.train.observers.node_monitor import GAUGES, Modelled, NodeReadings, NodeSampler
from llmrecipes.train.observers.telemetry import METERS, RANK_COLUMNS

RANKS = 16_384
READS = 300


def microseconds(call: Callable[[], object], reads: int = READS) -> float:
    """Median of a call."""
    times = []
    for _ in range(reads):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def main() -> None:
    began = time.perf_counter(), time.process_time()
    model = Modelled()
    took = time.perf_counter() - began[0], time.process_time() - began[1]
    print(f"codecarbon, once a start, in the node's process: {took[0]:.2f} s, of which {took[1]:.2f} s of a processor")
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    readings = NodeReadings(memory)
    sampler, modelled = NodeSampler(Path("/"), None), NodeSampler(Path("/"), None, model=model)
    data = sampler.sample()
    memory[: len(data)] = data
    print(f"a sample of a node, every 5 s, in its process: {microseconds(sampler.sample):.0f}")
    print(f"  with codecarbon's model: {microseconds(modelled.sample):.0f}")
    print(f"the rank reads it, every tenth step: {microseconds(readings.take):.1f}")
    table = np.random.default_rng(0).random((RANKS, len(METERS)))
    print(f"joules of {RANKS:,} ranks are added up: {microseconds(lambda: np.nansum(table, axis=0)):.0f}")
    values = np.random.default_rng(0).random(RANKS)
    names = [*RANK_COLUMNS, *GAUGES]
    every = {name: each for name in names if (each := spread(values, "rank")) is not None}
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = int(one.getsockname()[1])
    sink = PrometheusSink("gpt-tiny/one", port=port, total_steps=10)
    step = StepMetrics(
        step=1, loss=1.0, grad_norm=1.0, lr=1.0, consumed_samples=1, consumed_tokens=1, step_seconds=1.0,
        tokens_per_second=1.0, ranks=every, nodes=every, energy=Energy().plus(1.0, ["nvml"], None).values(),
    )  # fmt: skip
    print(f"the Prometheus sink takes a step: {microseconds(lambda: sink.step(step)):.2f}")

    def scrape() -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return bytes(answer.read())

    print(f"a scrape of {len(scrape()):,} bytes, in a thread: {microseconds(scrape, 100):.0f}")
    sink.close("FINISHED")


if __name__ == "__main__":
    main()
