"""`llmrecipes export`: a checkpoint as a folder for transformers, or its adapters for PEFT."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from llmrecipes import __version__
from llmrecipes.commandline import command_line
from llmrecipes.errors import UserError
from llmrecipes.models.create import published, require_absent
from llmrecipes.models.export_options import ExportOptions
from llmrecipes.recipe.derived.weight_names import weights
from llmrecipes.recipe.rules.optimizer_kinds import named
from llmrecipes.recipe.schema import Model, Recipe, Source
from llmrecipes.rundir import Run
from llmrecipes.workflow.model_source import base_of, find_checkpoint, lora_of, open_run, require_merge

if TYPE_CHECKING:
    from llmrecipes.checkpoint.store import Entry
    from llmrecipes.data.folder.data_manifest import DataManifest
    from llmrecipes.data.folder.prepared import Prepared
    from llmrecipes.tracking.energy import Energy
    from llmrecipes.tracking.progress import Counted
    from llmrecipes.workflow.model_source import OpenedRun


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the folder.
        run: directory of the run.
        step: step of the checkpoint.
        family: `model_type`.
        dtype: element type of the weights.
        parameters: parameters of the model, without padding of the vocabulary.
        bytes: size in bytes of the weights.
        shards: files of the weights.
        largest_shard: bytes of the largest.
        notes: what users of the model must know.
        seconds: duration.
    """

    path: str
    run: str
    step: int
    family: str
    dtype: str
    parameters: int
    bytes: int
    shards: int
    largest_shard: int
    notes: tuple[str, ...]
    seconds: float


def export(
    reference: str,
    out: Path | None,
    runs_dir: Path,
    data_dir: Path,
    options: ExportOptions,
    progress: Counted | None = None,
) -> Exported:
    """Write a checkpoint as safetensors with configuration, tokenizer and model card.

    Any layout's checkpoint can be exported by one process without a GPU, tensor by tensor: memory holds the largest
    tensor about twice.

    Args:
        reference: `RUN` (its newest checkpoint) or `RUN@STEP`.
        out: the folder, which must not exist; None: `hf/step-<step>` in the run's directory.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept, with the tokenizer.
        options: how.
        progress: shows how much is written.

    Raises:
        UserError: no such run or checkpoint, a model without a form in transformers (with the key in the way), a
            corrupt checkpoint, a folder that exists, or a full disk. Nothing is left behind.
    """
    from llmrecipes.hf.safetensors import write
    from llmrecipes.hf.tokenizer_files import write_companions

    started = time.monotonic()
    options.require_valid_for("hf")
    run, entry = find_checkpoint(reference, runs_dir)
    out = default_folder(run, entry, averaged=options.averaged) if out is None else out
    require_absent(out)
    require_merge(Run(run).recipe(), run, requested=options.merge_adapter)
    opened = open_run(run, entry, options.family, averaged=options.averaged)
    recipe = opened.recipe
    prepared = prepared_of(opened, data_dir) if options.tokenizer else None
    dtype = options.dtype or recipe.train.precision
    notes = _notes(recipe, averaged=options.averaged)
    with published(out) as folder:
        special = write_companions(folder, recipe, prepared, run, tokenizer=options.tokenizer)
        written = write(opened.source, {**opened.config, **special}, folder, dtype, options.max_shard_bytes, progress)
        measured = _measured(run, entry)
        data = prepared.manifest if prepared else None
        parameters = parameters_of(recipe.model)
        text = card(recipe, opened.family.name, parameters, measured, data, notes)
        (folder / "README.md").write_text(text, "utf-8")
    return Exported(
        path=str(out),
        run=str(run),
        step=entry.step,
        family=opened.family.name,
        dtype=dtype,
        parameters=parameters,
        bytes=written.bytes,
        shards=len(written.shards),
        largest_shard=written.largest_shard,
        notes=(*notes, *opened.notes),
        seconds=round(time.monotonic() - started, 3),
    )


def parameters_of(model: Model) -> int:
    """Elements of the weights of a model, without padding of the vocabulary; copies in its files are not counted."""
    sizes = weights(model.model_copy(update={"make_vocab_size_divisible_by": 1}))
    return sum(prod(size) for size in sizes.values())


def default_folder(run: Path, entry: Entry, *, averaged: bool = False) -> Path:
    """Where an export is written in the directory of a run if no folder is named."""
    return run / "hf" / f"step-{entry.step:08d}{'-ema' if averaged else ''}"


def _notes(recipe: Recipe, *, averaged: bool) -> tuple[str, ...]:
    model = recipe.model
    notes = []
    if averaged:
        decay = recipe.optimizer.ema_decay
        notes.append(f"the weights are their moving average (ema_decay {decay}); losses were measured without it")
    if model.mtp_num_layers:
        notes.append(
            "transformers uses the layers of multi-token prediction only in generate(use_mtp=True), and may otherwise "
            "list them as unexpected; vLLM and SGLang draft tokens with them"
        )
    if model.moe_expert_capacity_factor is not None:
        notes.append("experts had a limited capacity in training; transformers drops no token")
    return tuple(notes)


def prepared_of(opened: OpenedRun, data_dir: Path) -> Prepared | None:
    """The data of a run, with the tokenizer that made it.

    None: it has none yet, as an imported model, whose tokenizer is the one that its recipe names.

    Raises:
        UserError: it is not prepared.
    """
    from llmrecipes.data.folder.prepared import fingerprint, open_prepared

    recipe = opened.recipe
    absent = not (data_dir / fingerprint(recipe)).is_dir()
    if absent and opened.entry.step == 0 and recipe.data.tokenizer.type == "huggingface":
        return None
    try:
        return open_prepared(recipe, data_dir)
    except UserError as error:
        fix = error.fix
        if absent:
            fix = command_line("prepare", Run(opened.folder).recipe_file, data_dir=data_dir)
        fix = f"{fix}; or --no-tokenizer" if fix else "--no-tokenizer"
        raise UserError(error.what, where=error.where, rule=error.rule, fix=fix) from error


def _measured(run: Path, entry: Entry) -> Losses:
    """What metrics.jsonl says up to the checkpoint."""
    from llmrecipes.tracking.energy import Energy
    from llmrecipes.tracking.jsonl import parse
    from llmrecipes.untrusted import lines

    manifest = entry.manifest
    losses: dict[str, Any] = {}
    try:
        read = lines(Run(run).metrics, root=run)
        records = [record for line in read if (record := parse(line)) is not None]
    except OSError:
        records = []
    for record in records:
        if record.get("step", 0) <= entry.step:
            losses["energy"] = Energy.of(record) or losses.get("energy")
            if "valid_loss" in record:
                losses |= {"valid_loss": record["valid_loss"], "bits_per_byte": record.get("valid_bits_per_byte")}
            elif "loss" in record:
                losses["loss"] = record["loss"]
    return Losses(entry.step, manifest.consumed_tokens, **losses)


@dataclass(frozen=True)
class ExportedAdapter:
    """What was written.

    Attributes:
        path: the folder.
        run: directory of the run.
        step: step of the checkpoint.
        base: folder of the model that the adapters belong to.
        family: its `model_type`.
        adapters: matrices of transformers that have one.
        parameters: parameters of all adapters.
        bytes: size in bytes of the weights.
        seconds: duration.
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
    from llmrecipes.engine.backends import stored_weights
    from llmrecipes.hf.adapter import write
    from llmrecipes.hf.family import family_named
    from llmrecipes.hf.reading import read_config

    started = time.monotonic()
    run, entry = find_checkpoint(reference, runs_dir)
    out = run / "peft" / f"step-{entry.step:08d}" if out is None else out
    require_absent(out)
    recipe = Run(run).recipe()
    lora = lora_of(recipe, run)
    base = base_of(run, recipe)
    # Names and matrices are those of the base model's own family.
    family = family_named(read_config(base).get("model_type"), str(base))
    named = recipe.train.pretrained if recipe.train.pretrained and not Path(recipe.train.pretrained).exists() else None
    with published(out) as folder:
        written = write(stored_weights(recipe, entry), family, recipe.model, lora, named or str(base), folder)
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


@dataclass(frozen=True)
class Losses:
    """Metrics up to the checkpoint.

    Attributes:
        step: step of the checkpoint.
        tokens: consumed until then.
        loss: loss of the last step.
        valid_loss: validation loss of the last evaluation; None if there was none.
        bits_per_byte: bits per byte of the same, on the held-out text.
        energy: that all starts of the run have used until then; None: unknown.
    """

    step: int
    tokens: int
    loss: float | None = None
    valid_loss: float | None = None
    bits_per_byte: float | None = None
    energy: Energy | None = None


def card(
    recipe: Recipe, family: str, parameters: int, measured: Losses, data: DataManifest | None, notes: Sequence[str]
) -> str:
    """README.md of an exported model.

    Args:
        recipe: recipe of the run.
        family: `model_type`.
        parameters: parameters of the model.
        measured: losses.
        data: manifest of the prepared data; None: unknown.
        notes: what users of the model must know.
    """
    text = [
        front_matter(
            "llmrecipes", "megatron-core", task="text-generation", emissions=_emissions(recipe, measured.energy)
        ),
        f"# {recipe.name}\n",
        f"{recipe.description}\n" if recipe.description else "",
        f"A model of type `{family}` with {parameters:,} parameters, {_how(recipe)} with llmrecipes {__version__} on "
        "Megatron-core and exported for transformers.\n",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".")\ntokenizer = AutoTokenizer.from_pretrained(".")\n```\n',
        *(f"Note: {note}.\n" for note in notes),
        "## Model\n",
        _table(_model(recipe)),
        "## Training\n",
        _table(_training(recipe, measured)),
        "## Data\n",
        _sources(recipe, data),
        "## Losses\n",
        _losses(measured),
        "## Environmental impact\n",
        _impact(recipe, measured),
        "## Use\n",
        f"{_use(recipe)} It has the gaps and biases of its data. No license is stated: before publishing this "
        "model, add one that is compatible with the licenses of its data, its tokenizer and its base model, if any.\n",
    ]
    return "\n".join(part for part in text if part)


def front_matter(*tags: str, task: str | None = None, emissions: Mapping[str, Any] | None = None) -> str:
    """Metadata at the head of a model card, which the Hub reads."""
    from huggingface_hub import ModelCardData

    carbon = {"co2_eq_emissions": dict(emissions)} if emissions else {}
    data = ModelCardData(library_name="transformers", pipeline_tag=task, tags=list(tags), **carbon)
    return f"---\n{data}\n---\n"


def _emissions(recipe: Recipe, energy: Energy | None) -> dict[str, Any] | None:
    """As the Hub reads it, in grams: https://huggingface.co/docs/hub/model-cards-co2. None: unknown."""
    if energy is None or energy.kg_co2 is None:
        return None
    kind = "pre-training" if recipe.train.pretrained is None else "fine-tuning"
    return {
        "emissions": float(f"{1000 * energy.kg_co2:.4g}"),
        "source": f"llmrecipes, energy {energy.how()}",
        "training_type": kind,
    }


def _impact(recipe: Recipe, measured: Losses) -> str:
    energy = measured.energy
    if energy is None:
        return "The energy used by the training is not known.\n"
    rows = {"energy": f"{energy.kwh:,.4g} kWh, {energy.how()}"}
    if energy.kg_co2 is not None:
        rows["carbon"] = f"{energy.kg_co2:,.4g} kg CO2"
    rows["tokens a joule"] = f"{measured.tokens / energy.joules:,.3g}"
    begun = "" if recipe.train.pretrained is None else "\nThis does not include the training of its initial weights.\n"
    return _table(rows) + begun


def _how(recipe: Recipe) -> str:
    kind = "fine-tuned on conversations" if recipe.data.chat is not None else "trained"
    if recipe.lora is not None:
        kind += " by LoRA, merged into its base,"
    begun = recipe.train.pretrained
    return kind if begun is None else f"{kind} from the weights of {_public(begun)}"


def _use(recipe: Recipe) -> str:
    if recipe.data.chat is not None:
        return "Fine-tuned on conversations; not aligned for safety or preference."
    if recipe.train.pretrained is not None:
        return "The provenance of its initial weights is not recorded."
    return "A base model: it continues text, and was not trained to follow or refuse instructions."


def _model(recipe: Recipe) -> dict[str, str]:
    model = recipe.model
    rows = {
        "layers": str(model.num_layers),
        "width": str(model.hidden_size),
        "attention heads": str(model.num_attention_heads),
        "context": f"{model.seq_length:,} tokens",
        "vocabulary": f"{model.vocab_size:,}",
    }
    if model.num_moe_experts:
        rows["experts"] = f"{model.num_moe_experts}, {model.moe_router_topk} active per token"
    return rows


def _training(recipe: Recipe, measured: Losses) -> dict[str, str]:
    train, optimizer = recipe.train, recipe.optimizer
    return {
        "steps": f"{measured.step:,} of {train.train_iters:,}",
        "tokens": f"{measured.tokens:,}",
        "batch": f"{train.global_batch_size:,} × {recipe.model.seq_length:,} tokens",
        "precision": train.precision,
        "optimizer": f"{named(optimizer)}, peak learning rate {optimizer.lr:g}, "
        f"weight decay {optimizer.weight_decay:g}",
        "schedule": f"{recipe.scheduler.lr_decay_style}, {recipe.scheduler.lr_warmup_iters:,} steps of warm-up",
        "seed": str(train.seed),
    }


def _sources(recipe: Recipe, data: DataManifest | None) -> str:
    total = sum(source.weight for source in recipe.data.sources)
    rows = [["source", "share of the training samples", "documents", "training tokens"], ["---"] * 4]
    for index, source in enumerate(recipe.data.sources):
        counts = ["unknown"] * 2
        if data is not None:
            record = data.sources[index]
            kept = sum(split.documents for split in record.splits.values())
            counts = [f"{kept:,}", f"{record.splits['train'].tokens:,}"]
        rows.append([_name(source), f"{source.weight / total:.0%}", *counts])
    kind = recipe.data.tokenizer
    named = "byte-level BPE, trained on this data" if kind.type == "bpe" else f"{_public(kind.path)}"
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\nTokenizer: {named}.\n"


def _name(source: Source) -> str:
    if source.type == "hub":
        return f"{source.location} (Hugging Face dataset)"
    if source.type == "stdlib":
        return "source code of Python's standard library"
    if source.type == "machine":
        return "documentation and code of a machine, with planted junk"
    return f"{source.type} files {_public(source.location)}"


def _public(path: str | None) -> str:
    """The last part of a path: a card is published, the paths of a machine are not."""
    return "" if path is None else path if path.count("/") == 1 and not path.startswith("/") else PurePath(path).name


def _losses(measured: Losses) -> str:
    rows = {}
    if measured.loss is not None:
        rows["training loss, last step"] = f"{measured.loss:.4f}"
    if measured.valid_loss is not None:
        rows["validation loss, nats per token"] = f"{measured.valid_loss:.4f}"
    if measured.bits_per_byte is not None:
        rows["validation, bits per byte"] = f"{measured.bits_per_byte:.4f}"
    return _table(rows) if rows else "None were recorded.\n"


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]) + "\n"
