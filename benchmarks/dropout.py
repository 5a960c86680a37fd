"""Processor time of a training step with dropout, by our masks and by torch's random states, beside none.

    OMP_NUM_THREADS=1 python -m benchmarks.dropout

gpt-tiny on one rank and one thread, in turns, so that the ratios hold where the machine is busy with something else.
"""

from __future__ import annotations

import statistics
import time
from unittest.mock import patch

from benchmarks.common import close, machine, parser, show
from benchmarks.ranks import small

WAYS = ("no dropout", "torch's", "ours")
RATES = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}


def main() -> None:
    """Print one line a way."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=3, help="turns of each way, of which the median counts")
    made.add_argument("--steps", type=int, default=4, help="steps of a turn")
    arguments = made.parse_args()
    started_on = machine()
    from llmrecipes.engine.core.model import dropout
    from llmrecipes.engine.core.platform import select
    from llmrecipes.engine.core.world import join
    from tests.helpers import close_engines, engine_of, random_batches

    rated = [f"{key}={rate}" for key, rate in RATES.items()]
    recipes = {way: small("gpt-tiny", *(rated if way != WAYS[0] else ())) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    platform = select()
    platform.install()
    with join(platform, 1, recipes[WAYS[0]].layout):
        for _ in range(arguments.rounds):
            for way, recipe in recipes.items():
                create = dropout.create if way != WAYS[1] else lambda *_args, **_options: None
                with patch.object(dropout, "create", create):
                    engine = engine_of(recipe)
                batches = random_batches(recipe)
                engine.train_step(batches)
                begun = time.process_time()
                for _ in range(arguments.steps):
                    engine.train_step(batches)
                times[way].append((time.process_time() - begun) / arguments.steps)
                close_engines()
    medians = {way: statistics.median(each) for way, each in times.items()}
    rows = [[way, f"{each * 1e3:.0f}", f"{each / medians[WAYS[0]]:.2f}"] for way, each in medians.items()]
    show("One step", ["masks", "core ms", "× no dropout"], rows)
    close({"seconds": medians, "turns": times}, started_on, arguments.json)


if __name__ == "__main__":
    main()
