"""One rank of an evaluation."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.evaluation.request import Request
from llmrecipes.evaluation.result import Result
from llmrecipes.io import write_atomic
from llmrecipes.train.rank import failure_reported, rank_main
from llmrecipes.train.spec import RankSpec
from llmrecipes.workflow.pretrained import base_weights

if TYPE_CHECKING:
    from llmrecipes.data.tokenizer import TextTokenizer
    from llmrecipes.engine.base import Backend, Platform, TextModel
    from llmrecipes.plan.derive import Plan
    from llmrecipes.recipe.schema import Recipe


class EvaluationSpec(RankSpec):
    """An evaluation of a checkpoint, or of a folder of a Hugging Face model."""

    checkpoint: Path | None = None
    """Directory of the checkpoint, whose files have been checked."""
    folder: Path | None = None
    """Folder of the model, if there is no checkpoint."""
    request: Request
    progress: bool = False
    """Show on stderr how much is done."""
    output: Path | None = None
    """File for the results; None: they are returned."""


def run(spec: EvaluationSpec) -> ExitCode:
    """Evaluate, and write the results to the spec's file; of an isolated process, also what the user did wrong."""
    try:
        found = evaluate(spec)
    except UserError as error:
        if spec.output is None or not spec.request.trust_code:
            raise
        write_atomic(spec.output, json.dumps({"refused": error.as_dict()}))
        return error.code
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

    from llmrecipes.data.prepared import fingerprint, open_prepared
    from llmrecipes.engine.registry import backend
    from llmrecipes.evaluation.lead import Lead
    from llmrecipes.evaluation.run import Prepare
    from llmrecipes.hardware.cluster import detect
    from llmrecipes.plan.derive import derive
    from llmrecipes.tracking.progress import Counted

    recipe = spec.recipe
    # A tokenizer of Hugging Face is its own file: an imported model needs no prepared data.
    own = recipe.data.tokenizer.type == "huggingface" and not (spec.data_dir / fingerprint(recipe)).is_dir()
    prepared = None if own else open_prepared(recipe, spec.data_dir)
    tokenizer = _tokenizer_of(recipe) if prepared is None else prepared.tokenizer()
    plan = derive(recipe, int(os.environ.get("WORLD_SIZE", "1")), detect())
    work = None
    if os.environ.get("RANK", "0") == "0":
        positions = plan.shape.max_position_embeddings
        work = Prepare.of(spec.request, prepared, tokenizer, recipe.model.seq_length, positions)
    engines = backend(recipe)
    platform = engines.platform(int(os.environ.get("LOCAL_RANK", "0")))
    with engines.join(recipe, platform) as world, failure_reported(recipe):
        model = _model(spec, engines, plan, platform)
        progress = Counted() if spec.progress and work is not None else None
        lead = Lead(model.scorer(), world, tokenizer, spec.request.batch_size, progress=progress)
        try:
            return lead.run(lambda one: work.run(one) if work is not None else []) or []
        finally:
            if progress is not None:
                progress.close()


def _model(spec: EvaluationSpec, engines: Backend, plan: Plan, platform: Platform) -> TextModel:
    if spec.checkpoint is not None:
        from llmrecipes.checkpoint.inspection import Entry, read_manifest

        entry = Entry(spec.checkpoint, read_manifest(spec.checkpoint))
        with base_weights(spec.checkpoint.parents[1], spec.recipe) as base:  # of the run that has the checkpoint
            return engines.load_weights(plan, platform, entry, base)
    from llmrecipes.hf.weights import open_weights

    weights = open_weights(spec.folder or Path(), spec.recipe.model)
    try:
        return engines.load_given(plan, platform, weights)
    finally:
        weights.close()


def _tokenizer_of(recipe: Recipe) -> TextTokenizer:
    """The tokenizer in the folder of a model."""
    from llmrecipes.data.tokenizer import TextTokenizer, load_huggingface

    backend, eod = load_huggingface(recipe.data.tokenizer, recipe.model.vocab_size)
    return TextTokenizer(backend, eod, "")


if __name__ == "__main__":
    rank_main(EvaluationSpec, run)
