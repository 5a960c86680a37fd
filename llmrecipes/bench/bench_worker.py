"""One rank of a benchmark."""

from __future__ import annotations

import os

from pydantic import BaseModel

from llmrecipes.bench.results import ANSWER, BenchSpec, Collectives
from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import ExitCode
from llmrecipes.train.rank import failure_reported, nodes, rank_main


def run(spec: BenchSpec) -> ExitCode:
    """Join the ranks that a launcher started, and measure; rank 0 writes the results.

    Raises:
        UserError: a problem the user can fix.
    """
    require_packages(spec.recipe)
    # Imported here so that a rank with an invalid spec fails before torch is loaded.
    from llmrecipes.bench import measure
    from llmrecipes.engine.backends import backend
    from llmrecipes.hardware.cluster import detect

    engines = backend(spec.recipe)
    platform = engines.platform(int(os.environ.get("LOCAL_RANK", "0")))
    cluster = detect().times(nodes())
    with engines.join(spec.recipe, platform) as world, failure_reported(spec.recipe):
        answer: BaseModel
        if spec.what == "collectives":
            groups = engines.process_groups()
            ranks_per_node = world.size // nodes()
            rows = tuple(measure.measure_collectives(groups, platform, spec.sizes, spec.repeats, ranks_per_node))
            answer = Collectives(
                backend=platform.backend,
                world_size=world.size,
                ranks_per_node=ranks_per_node,
                reach=measure.reach(groups),
                rows=rows,
            )
        elif spec.what == "ranks":
            answer = measure.measure_ranks(platform, spec.repeats)
        elif spec.what == "machine":
            answer = measure.measure_machine(platform, spec.repeats)
        elif spec.what == "step":
            answer = measure.steps(spec, engines, world, platform, cluster)
        else:
            answer = measure.reading(spec, world, platform, cluster)
        if world.is_first:
            (spec.out / ANSWER).write_text(answer.model_dump_json() + "\n", "utf-8")
    return ExitCode.DONE


if __name__ == "__main__":
    rank_main(BenchSpec, run)
