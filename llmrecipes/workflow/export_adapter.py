"""`llmrecipes export --to peft`: the adapters of a checkpoint in the form of PEFT."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.workflow.adapters import base_of, lora_of
from llmrecipes.workflow.recorded import run_recipe
from llmrecipes.workflow.tensors import find_checkpoint


@dataclass(frozen=True)
class ExportedAdapter:
    """What was written.

    Attributes:
        path: the folder.
        run: directory of the run.
        step: of the checkpoint.
        base: folder of the model that the adapters belong to.
        family: its `model_type`.
        adapters: matrices of transformers that have one.
        parameters: of all adapters.
        bytes: of the weights.
        seconds: that it took.
    """

    path: str
    run: str
    step: int
    base: str
    family: str
    adapters: int
    parameters: int
    bytes: int
    seconds: float


def export_adapter(reference: str, out: Path | None, runs_dir: Path) -> ExportedAdapter:
    """Write the adapters of a checkpoint as `PeftModel.from_pretrained(base, out)` loads them.

    Args:
        reference: `RUN` (its newest checkpoint) or `RUN@STEP`.
        out: the folder, which must not exist; None: `peft/step-<step>` in the run's directory.
        runs_dir: where runs are kept.

    Raises:
        UserError: no such run or checkpoint, a run without adapters or base model, adapters without a form in PEFT, a
            folder that exists, or a full disk. Nothing is left behind.
    """
    from llmrecipes.engine.registry import backend
    from llmrecipes.hf.adapter import write
    from llmrecipes.hf.family import family_named
    from llmrecipes.hf.folder import published, require_absent
    from llmrecipes.hf.reading import read_config

    started = time.monotonic()
    run, entry = find_checkpoint(reference, runs_dir)
    out = run / "peft" / f"step-{entry.step:08d}" if out is None else out
    require_absent(out)
    recipe = run_recipe(run)
    lora = lora_of(recipe, run)
    base = base_of(run, recipe)
    # Names and matrices are those of the base model's own family.
    family = family_named(read_config(base).get("model_type"), str(base))
    named = recipe.train.pretrained if recipe.train.pretrained and not Path(recipe.train.pretrained).exists() else None
    with published(out) as folder:
        written = write(backend(recipe).tensors(entry), family, recipe.model, lora, named or str(base), folder)
    return ExportedAdapter(
        path=str(out),
        run=str(run),
        step=entry.step,
        base=str(base),
        family=family.name,
        adapters=written.adapters,
        parameters=written.parameters,
        bytes=written.bytes,
        seconds=round(time.monotonic() - started, 3),
    )
