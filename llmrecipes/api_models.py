"""Models from Python: the commands that make one of others. `import llmrecipes` has these functions too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from llmrecipes.api import Run, directory
from llmrecipes.commandline import DATA_DIR, DATA_VARIABLE, RUNS_DIR, RUNS_VARIABLE


def merge_models(
    models: Sequence[str | Path],
    out: str | Path,
    *,
    method: str,
    weights: Sequence[float] | None = None,
    base: str | Path | None = None,
    density: float | Sequence[float] | None = None,
    t: float | None = None,
    scale: float | None = None,
    normalize: bool | None = None,
    seed: int | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    tokenizer: bool = True,
    runs_dir: str | Path | None = None,
    data_dir: str | Path | None = None,
) -> Path:
    """Merge models of one configuration and one tokenizer into a folder that transformers can load; returns it.

    Args:
        models: runs, `RUN@STEP`, or folders with config.json and safetensors.
        out: the folder, which must not exist.
        method: linear, slerp, task-arithmetic, ties, dare or dare-ties.
        weights: one for each model; default: 1 each.
        base: what the models were fine-tuned from, for all methods but linear and slerp.
        density: share of each task vector that stays, of all models or one for each (ties, dare); default: 1.
        t: position between two models (slerp); default: 0.5.
        scale: factor of the merged task vector, λ; default: 1.
        normalize: divide by the sum of the weights; default: linear and ties do.
        seed: of what dare drops; default: 0.
        dtype: of the weights; default: the first model's.
        tokenizer: compare and write tokenizers.
        runs_dir: default: `LLMRECIPES_RUNS`, else `runs`.
        data_dir: default: `LLMRECIPES_DATA`, else `data`.

    Raises:
        UserError: an option that the method does not have; a model that is missing, corrupt, named twice or of another
            kind; values that are not finite; a folder that exists; a full disk.
    """
    from llmrecipes.models.merge import Output, merge
    from llmrecipes.models.merge_options import MergeOptions

    densities = [density] if isinstance(density, int | float) else density
    options = MergeOptions(method, weights, densities, t, scale, normalize, seed)
    made = merge(
        [str(model) for model in models],
        options,
        Output(Path(out), dtype, tokenizer=tokenizer),
        directory(runs_dir, RUNS_VARIABLE, RUNS_DIR),
        directory(data_dir, DATA_VARIABLE, DATA_DIR),
        None if base is None else str(base),
    )
    return Path(made.path)


def import_model(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    revision: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    runs_dir: str | Path | None = None,
    data_dir: str | Path | None = None,
) -> Run:
    """Make a run from a Hugging Face model, with a checkpoint of step 0 that any layout loads.

    Args:
        source: folder with config.json and safetensors, or name on the Hub.
        overrides: of the recipe, as on the command line: `["train.train_iters=20"]`.
        revision: branch, tag or commit on the Hub.
        name: of the recipe; default: that of the model.
        run_id: of the new run; default: a new name.
        runs_dir: default: `LLMRECIPES_RUNS`, else `runs`.
        data_dir: default: `LLMRECIPES_DATA`, else `data`.

    Raises:
        UserError: the model cannot be found, read or described by a recipe; a run id in use; a full disk.
    """
    from llmrecipes.models.importing import import_model as make
    from llmrecipes.runfiles import checked_run_id

    made = make(
        str(source),
        overrides,
        directory(runs_dir, RUNS_VARIABLE, RUNS_DIR),
        checked_run_id(run_id),
        revision=revision,
        name=name,
    )
    return Run(Path(made.run_dir), directory(data_dir, DATA_VARIABLE, DATA_DIR))
