"""Processor time that the guards of `faults` add to a step of one rank, part by part.

    torchrun --nproc-per-node 2 -m benchmarks.guard_overhead [RECIPE]

Processor time of this process rather than the clock, so that other work on the machine counts little.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable

from llmrecipes.engine.backends import backend
from llmrecipes.engine.core.replicas import first_difference
from llmrecipes.engine.core.rerun import RerunState
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.faults.numerics import SpikeRule
from llmrecipes.faults.watchdog import HangLimits, RankHeartbeat
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load
from tests.helpers import random_batches

STEPS = 8


def seconds(what: Callable[[], object], times: int) -> float:
    """Median processor seconds of a call."""
    taken = []
    for _ in range(times):
        started = time.process_time()
        what()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


def main() -> None:
    """Measure, and print the table on the first rank."""
    recipe = load(sys.argv[1] if len(sys.argv) > 1 else "gpt-tiny").recipe
    engines = backend(recipe)
    platform = engines.platform(int(os.environ["LOCAL_RANK"]))
    with engines.join(recipe, platform) as world:
        engine = engines.build(derive(recipe, world.size, detect()), platform)
        assert isinstance(engine, MegatronEngine)
        batches = random_batches(recipe, rank=world.data_parallel_rank, ranks=world.data_parallel_size)
        engine.train_step(batches)
        step = seconds(lambda: engine.train_step(batches), STEPS)
        buckets = [
            bucket.grad_data for chunk in engine.chunks for group in chunk.bucket_groups for bucket in group.buckets
        ]
        beat = RankHeartbeat(HangLimits(600.0, 3600.0), mmap.mmap(-1, 64))
        rule = SpikeRule(128, 6.0, [3.0 + number % 7 / 100 for number in range(128)], [1.0] * 128)
        reads = 2 * engine.plan.num_microbatches + 1
        parts = {
            "state to compute a step again": seconds(lambda: RerunState(engine.modules, engine.optimizer), 50),
            "sums of the gradients": seconds(lambda: [bucket.sum() for bucket in buckets], 50),
            "heartbeats": seconds(lambda: beat("step"), 1000) * reads,
            "statistic of spikes (faults.loss_spike_action)": seconds(lambda: rule.add(3.0, 1.0), 100),
        }
        named = [pair for pair in engine.named_tensors() if not pair[0].endswith(".grad")]
        hashes = seconds(lambda: first_difference(named, platform.device), 10)
        if world.is_first:
            print(f"step of {recipe.name}, {world.size} ranks: {step * 1e3:.1f} ms of processor time")
            for name, taken in parts.items():
                print(f"  {name}: {taken * 1e3:.3f} ms, {taken / step:.3%}")
            print(f"  together: {sum(parts.values()) / step:.3%}")
            print(f"  one comparison of replicas: {hashes * 1e3:.2f} ms, {hashes / step:.2%} of a step")
        engine.close()


if __name__ == "__main__":
    main()
