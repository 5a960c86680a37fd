"""One rank of an evaluation."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import ExitCode
from llmrecipes.evaluation.request import Request
from llmrecipes.evaluation.result import Result
from llmrecipes.io import write_atomic
from llmrecipes.train.rank import failure_reported, rank_main
from llmrecipes.train.spec import RankSpec


class EvaluationSpec(RankSpec):
    """An evaluation of a checkpoint."""

    checkpoint: Path
    """Directory of the checkpoint, whose files have been checked."""
    request: Request
    output: Path | None = None
    """File for the results; None: they are returned."""


def run(spec: EvaluationSpec) -> ExitCode:
    """Evaluate, and write the results to the spec's file."""
    found = evaluate(spec)
    if spec.output is not None and os.environ.get("RANK", "0") == "0":
        write_atomic(spec.output, json.dumps([asdict(result) for result in found]))
    return ExitCode.DONE


def evaluate(spec: EvaluationSpec) -> list[Result]:
    """Join the ranks that a launcher started, or form a world of one, and evaluate; results on the first rank.

    Raises:
        UserError: a problem the user can fix. What the tasks and the data lack is found before the model is loaded.
    """
    require_packages(spec.recipe)
    # Imported here so that a rank with an invalid spec fails before torch is loaded.
    from llmrecipes.checkpoint.inspection import Entry, read_manifest
    from llmrecipes.data.prepared import open_prepared
    from llmrecipes.engine.registry import backend
    from llmrecipes.evaluation.lead import Lead
    from llmrecipes.evaluation.run import Prepare
    from llmrecipes.hardware.cluster import detect
    from llmrecipes.plan.derive import derive

    recipe = spec.recipe
    prepared = open_prepared(recipe, spec.data_dir)
    tokenizer = prepared.tokenizer()
    plan = derive(recipe, int(os.environ.get("WORLD_SIZE", "1")), detect())
    work = None
    if os.environ.get("RANK", "0") == "0":
        work = Prepare.of(spec.request, prepared, tokenizer, plan.shape.max_position_embeddings)
    engines = backend(recipe)
    platform = engines.platform(int(os.environ.get("LOCAL_RANK", "0")))
    with engines.join(recipe, platform) as world, failure_reported(recipe):
        entry = Entry(spec.checkpoint, read_manifest(spec.checkpoint))
        model = engines.load_weights(plan, platform, entry)
        lead = Lead(model.scorer(), world, tokenizer, spec.request.batch_size)
        return lead.run(lambda one: work.run(one) if work is not None else []) or []


if __name__ == "__main__":
    rank_main(EvaluationSpec, run)
