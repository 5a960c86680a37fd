"""`llmrecipes prune`: a run's newest checkpoint becomes the start of a smaller or sparser run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.models.create import CreatedRun, create_run, require_unused, write_checkpoint
from llmrecipes.plan.check import gib
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.load import DEFAULTS_NOTE, short
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.variants.pruned_models import METHODS, PruneOptions, load_pruned
from llmrecipes.rundir import Run
from llmrecipes.workflow.run import on_one_rank

if TYPE_CHECKING:
    import torch

    from llmrecipes.checkpoint.store import Entry
    from llmrecipes.engine.meters import Importance, Sparsified
    from llmrecipes.models.pruned_weights import SmallerWeights
    from llmrecipes.tracking.progress import Counted

RECORD = "pruned.json"


@dataclass(frozen=True)
class PruningText:
    """Text on which parts of a model are compared.

    Attributes:
        data: as `llmrecipes eval --data`: a split of the run's data, or a source.
        sequences: sequences of the model's length.
    """

    data: str = "train"
    sequences: int = 128


def prune(
    run: Path,
    options: PruneOptions,
    calibration: PruningText,
    overrides: Sequence[str],
    runs_dir: Path,
    data_dir: Path,
    run_id: str,
    progress: Counted | None = None,
) -> CreatedRun:
    """Create a run directory that `llmrecipes train <run_dir>/recipe.yaml --run-id <run_id>` resumes.

    One process holds the weights of the whole model while it is measured; the result is written tensor by tensor. The
    optimizer state is new, and data starts from the beginning.

    Args:
        run: directory of the run.
        options: what to remove.
        calibration: text; unused by `magnitude`.
        overrides: more keys of the new recipe.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept.
        run_id: run id of the new run.
        progress: shows how much is measured and written.

    Returns:
        With the origin: `run`, `step`, `method`, `parameters_before`, `parameters`, `tokens` of calibration, the
        `layers` that stay if some were removed, with their block influence in `influence`; with zeros `zeros`, their
        share in the matrices of the layers.

    Raises:
        UserError: as `load_pruned`; no valid checkpoint, too little text or memory, a run id in use, or a full disk.
            Nothing remains.
    """
    before, after = load_pruned(Run(run).recipe_file, overrides, options)
    run_dir = Run.of(runs_dir, after.name, run_id).path
    require_unused(run_dir)
    plan = derive(_plainly(before), 1, detect())
    entry = Run(run).require_checkpoint(data_dir)
    origin = {
        "run": str(run),
        "step": entry.step,
        "method": options.method or f"into {options.into}",
        "parameters_before": plan.num_parameters.total,
        "parameters": derive(_plainly(after), 1, detect()).num_parameters.total,
    }
    measured = None
    if options.method != "magnitude":
        _require_memory(plan)
        measured = _measured(plan, entry, calibration_rows(before, data_dir, calibration), options, progress)

    def write(folder: Path) -> dict[str, Any]:
        return {**origin, **_write(entry, before, after, options, measured, folder, progress)}

    return create_run(run_dir, after, write, text=short(after, None, DEFAULTS_NOTE), record=RECORD)


def _plainly(recipe: Recipe) -> Recipe:
    """The recipe for one process, of layers whose parts can be watched; they do not show in a checkpoint."""
    single = on_one_rank(recipe)
    return single.model_copy(
        update={
            "model": single.model.model_copy(update={"transformer_impl": "local"}),
            "distill": None,
            "qat": None,
        }
    ).with_layout(torch_compile=False)


def _require_memory(plan: Plan) -> None:
    if plan.memory.weights > plan.memory_capacity_bytes:
        raise UserError(
            f"weights need {gib(plan.memory.weights)}, {gib(plan.memory_capacity_bytes)} available",
            where=f"recipe {plan.recipe.name}",
            rule="one process holds the whole model while it is measured",
            fix="prune on a machine with more memory, or with --method magnitude, which needs no measurement",
        )


def calibration_rows(recipe: Recipe, data_dir: Path, calibration: PruningText) -> torch.Tensor:
    """Sequences of text for a recipe's model: documents one after another, each with its end token.

    Returns:
        [sequences, length] token ids.

    Raises:
        UserError: no such text, or too little of it.
    """
    import torch

    from llmrecipes.data.folder.prepared import open_prepared
    from llmrecipes.evaluation.texts import Texts

    length = shape(recipe.model).seq_length
    texts = Texts.parse(calibration.data)
    prepared = open_prepared(recipe, data_dir)
    texts.require(prepared)
    tokenizer = prepared.tokenizer()
    needed = calibration.sequences * length
    stream: list[int] = []
    for text in texts.documents(tokenizer, prepared):
        stream += [*tokenizer.prefix, *text.tokens, tokenizer.eod]
        if len(stream) >= needed:
            break
    if len(stream) < needed:
        raise UserError(
            f"{len(stream):,} tokens in {calibration.data}, {needed:,} needed",
            where="--sequences",
            rule=f"{calibration.sequences} sequences of {length} tokens each",
            fix=f"--sequences {len(stream) // length}" if len(stream) >= length else "--data with more text",
        )
    return torch.tensor(stream[:needed]).view(calibration.sequences, length)


def _measured(
    plan: Plan, entry: Entry, rows: torch.Tensor, options: PruneOptions, progress: Counted | None
) -> Importance | Sparsified:
    from llmrecipes.engine.backends import backend

    engines = backend(plan.recipe)
    platform = engines.platform()
    size = plan.recipe.layout.micro_batch_size

    with engines.join(plan.recipe, platform):
        if options.method == "sparsegpt":
            return engines.sparsify(plan, platform, entry, rows.split(size), options, progress)
        return engines.importance(plan, platform, entry, _shown(rows, size, progress))


def _shown(rows: torch.Tensor, size: int, progress: Counted | None) -> Iterator[torch.Tensor]:
    """Batches of `size` rows, whose measuring is shown."""
    if progress is None:
        yield from rows.split(size)
        return
    progress.begin("sequences", len(rows))
    try:
        for batch in rows.split(size):
            yield batch
            progress.add(len(batch))
    finally:
        progress.close()


def _write(
    entry: Entry,
    before: Recipe,
    after: Recipe,
    options: PruneOptions,
    measured: Importance | Sparsified | None,
    folder: Path,
    progress: Counted | None,
) -> dict[str, Any]:
    from llmrecipes.engine.backends import stored_weights
    from llmrecipes.engine.meters import Importance, Sparsified
    from llmrecipes.models.merge import Boxes
    from llmrecipes.models.pruned_weights import SmallerWeights, SparseWeights

    tensors = stored_weights(before, entry)
    tokens = {} if measured is None else {"tokens": measured.tokens}
    if options.unstructured:
        if isinstance(measured, Sparsified):
            sparse = SparseWeights(tensors, options, pruned=measured.weights)
        else:
            sparse = SparseWeights(tensors, options, None if measured is None else measured.inputs)
        write_checkpoint(after, Boxes(sparse), folder, progress)
        return {**tokens, "zeros": round(sparse.zeros / max(1, sparse.weights), 4)}
    if not isinstance(measured, Importance):
        raise ValueError(f"{METHODS[options.method or 'depth']} without importance")
    smaller = SmallerWeights(tensors, before.model, after.model, measured)
    write_checkpoint(after, Boxes(smaller), folder, progress)
    return {**tokens, **_layers(smaller, measured, before, after)}


def _layers(smaller: SmallerWeights, importance: Importance, before: Recipe, after: Recipe) -> dict[str, Any]:
    if before.model.num_layers == after.model.num_layers:
        return {}
    influence = [round(value, 5) for value in (importance.layers / importance.tokens).tolist()]
    return {"layers": smaller.layers, "influence": influence}
