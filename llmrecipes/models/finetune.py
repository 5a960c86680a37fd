"""`llmrecipes finetune`: from a model and conversations to a folder that can be served, in steps that can be repeated.

The state of a step is what it has written: a step that is done is not repeated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmrecipes.commandline import command_line
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.files import recipes_dir
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.io import write_atomic
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.plan.check import fitted
from llmrecipes.recipe.load import DEFAULTS_NOTE, load, load_values, short
from llmrecipes.rundir import Run
from llmrecipes.workflow.new import as_values, source_of
from llmrecipes.workflow.pretrained import recipe_name, recipe_values, require_tokenizer
from llmrecipes.workflow.run import Log, Paths, TrainOptions, is_prepared, prepare_data
from llmrecipes.workflow.train import train

if TYPE_CHECKING:
    from llmrecipes.hf.reading import Located
    from llmrecipes.recipe.schema import Recipe


STEPS = ("recipe", "prepare", "train", "export")
RUN_ID = "finetune"
RECORD = "finetune.json"
MEASURED = 20_000
"""Conversations whose length is measured; the others are assumed to be alike."""
LORA = {"rank": 16, "alpha": 32.0, "dropout": 0.05}
LEARNING_RATE = {False: 1e-5, True: 2e-4}
"""Without and with adapters: those of Tülu 3 (arXiv 2411.15124) and QLoRA (arXiv 2305.14314), rounded."""
MOST_BATCH, LEAST_STEPS = 64, 100
"""Sequences of a step, as long as the run has that many steps."""
HELD_OUT = 0.05
_FILL = 0.95
"""Share of packed sequences that is not padding, for the number of steps."""
_MULTIPLE = 64
"""Of `model.seq_length`."""
COMMENTS = {
    "model.seq_length": "the longest measured conversation, up to the model's positions",
    "train.pretrained": "weights that the run starts from",
    "layout.micro_batch_size": "the largest that fits in memory, by the plan",
    "data.split": "training, validation and test, by the hash of a conversation",
    "lora.rank": "only adapters are trained",
}


@dataclass(frozen=True)
class Finetuning:
    """Options of a fine-tuning.

    Attributes:
        model: folder, name on the Hub, or a run (`RUN`, `RUN@STEP` or `RUN@best`).
        data: `FILE.jsonl`, `FILE.parquet`, or `TYPE:PATH` of a source.
        out: folder of the recipe and the exported model; None: named after the model.
        lora: train adapters, and merge them into the exported model.
        template: template of `data.chat.template`; None: that of the tokenizer.
        epochs: passes over the training split.
        lr: None: `LEARNING_RATE`.
        revision: revision of the model on the Hub.
        overrides: `key.path=value` of the recipe.
    """

    model: str
    data: str
    out: Path | None = None
    lora: bool = False
    template: str | None = None
    epochs: float = 2.0
    lr: float | None = None
    revision: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Folder of the recipe and the exported model."""
        return self.out or Path(f"{recipe_name(self.model)[:58]}-{'lora' if self.lora else 'sft'}")

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return recipe_name(self.folder.absolute().name)

    @property
    def recipe(self) -> Path:
        """Its file."""
        return self.folder / f"{self.name}.yaml"

    @property
    def exported(self) -> Path:
        """Folder of the fine-tuned model."""
        return self.folder / "model"

    def command(self, paths: Paths, step: str | None = None) -> str:
        """The command that does this, or one step of it."""
        options: dict[str, Any] = {
            "data": self.data,
            "lora": self.lora,
            "template": self.template,
            "epochs": None if self.epochs == Finetuning.epochs else self.epochs,
            "lr": self.lr,
            "out": self.out,
            "revision": self.revision,
            "step": step,
        }
        where: dict[str, Any] = {"runs_dir": paths.runs_dir, "data_dir": paths.data_dir}
        return command_line("finetune", self.model, overrides=self.overrides, options=options, **where)


@dataclass(frozen=True)
class FinetuneStep:
    """One step.

    Attributes:
        name: one of `STEPS`.
        command: its command line.
        done: whether its result exists.
    """

    name: str
    command: str
    done: bool


@dataclass(frozen=True)
class ConversationLengths:
    """Conversations of the data.

    Attributes:
        conversations: rows of all sources, including those that cannot be used.
        used: conversations that were measured and can be used.
        tokens: tokens of all, extrapolated from those measured.
        longest: tokens of the longest that was measured.
    """

    conversations: int
    used: int
    tokens: int
    longest: int


def steps(request: Finetuning, paths: Paths) -> list[FinetuneStep]:
    """The steps, and which of them are done.

    Raises:
        UserError: the folder belongs to another fine-tuning, or its recipe is not valid.
    """
    _require_same(request)
    recipe = load(str(request.recipe)).recipe if request.recipe.exists() else None
    run = Run.of(paths.runs_dir, request.name, RUN_ID).path
    where: dict[str, Any] = {"data_dir": paths.data_dir}
    options: dict[str, Any] = {"to": "hf", "out": request.exported, "merge-adapter": request.lora}
    commands = {
        "recipe": request.command(paths, "recipe"),
        "prepare": command_line("prepare", request.recipe, **where),
        "train": command_line("train", request.recipe, options={"run-id": RUN_ID}, runs_dir=paths.runs_dir, **where),
        "export": command_line("export", f"{request.name}/{RUN_ID}", options=options, runs_dir=paths.runs_dir, **where),
    }
    trained = recipe is not None and Run(run).is_finished(recipe.train)
    done = {
        "recipe": recipe is not None,
        "prepare": recipe is not None and is_prepared(recipe, paths.data_dir),
        "train": trained,
        "export": trained and request.exported.exists(),
    }
    return [FinetuneStep(name, commands[name], done[name]) for name in STEPS]


def finetune(request: Finetuning, paths: Paths, log: Log, only: str | None = None) -> int:
    """Run the steps that are not done.

    Args:
        request: the model, the data, and how.
        paths: where runs and prepared data are kept.
        log: receives lines.
        only: the only step to do.

    Returns:
        The exit code: of a training that was interrupted, else 0. The same call continues it.

    Raises:
        UserError: a model that cannot be read, data without conversations, a tokenizer without a template, a model that
            does not fit this machine, or a folder of another fine-tuning.
    """
    for number, step in enumerate(steps(request, paths), 1):
        if only is not None and step.name != only:
            continue
        log(f"{number}/{len(STEPS)} {step.name:<8} {step.command}")
        if step.done:
            log("             already done")
            continue
        code = _do(step.name, request, paths, log)
        if code:
            log(f"to continue: {request.command(paths)}")
            return code
    return int(ExitCode.DONE)


def _do(step: str, request: Finetuning, paths: Paths, log: Log) -> int:
    if step == "recipe":
        _write_recipe(request, paths, log)
        return 0
    recipe = load(str(request.recipe)).recipe
    if step == "prepare":
        prepare_data(recipe, paths.data_dir, log)
    elif step == "train":
        return train(recipe, paths, TrainOptions(run_id=RUN_ID, run=RunOptions(sample=False)), log)
    else:
        from llmrecipes.models.export import export
        from llmrecipes.models.export_options import ExportOptions

        options = ExportOptions(merge_adapter=request.lora)
        exported = export(f"{request.name}/{RUN_ID}", request.exported, paths.runs_dir, paths.data_dir, options)
        log(
            f"exported step {exported.step} to {exported.path}: {exported.family}, {exported.dtype}, "
            f"{exported.bytes / 2**20:,.1f} MiB"
        )
    return 0


def _exported(request: Finetuning, paths: Paths, log: Log) -> Finetuning:
    """The request with the exported model of a run instead of the run; unchanged if it names none."""
    name, _, _ = request.model.rpartition("@")
    if Path(request.model).exists() or not name:
        name = request.model
    if (Path(request.model) / "config.json").is_file() or Run.named(name, paths.runs_dir) is None:
        return request
    if request.revision is not None:
        raise UserError(
            f"{request.revision} given for a run",
            where="--revision",
            rule="only models on the Hub have revisions",
            fix=f"{name}@STEP",
        )
    from llmrecipes.models.export import default_folder, export
    from llmrecipes.models.export_options import ExportOptions
    from llmrecipes.workflow.model_source import find_checkpoint

    run, entry = find_checkpoint(request.model, paths.runs_dir)
    folder = default_folder(run, entry)
    if not folder.exists():
        log(f"exporting step {entry.step:,} of {run}, from which the fine-tuning starts, to {folder}")
        options = ExportOptions(merge_adapter=Run(run).recipe_of(entry.step).lora is not None)
        export(f"{run}@{entry.step}", folder, paths.runs_dir, paths.data_dir, options)
    return replace(request, model=str(folder), out=request.folder)


def _write_recipe(request: Finetuning, paths: Paths, log: Log) -> None:
    recipe, lengths = make_recipe(_exported(request, paths, log), detect(), log)
    rows = f"{lengths.conversations:,} conversations"
    tokens = f"{lengths.tokens:,} tokens"
    header = f"{rows} of {request.data}, {tokens}, {request.epochs:g} epochs.\n{DEFAULTS_NOTE}"
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(request.folder / RECORD, json.dumps(_record(request), indent=2) + "\n")
        write_atomic(request.recipe, short(recipe, COMMENTS, header))
    except OSError as error:
        raise UserError(
            f"cannot write: {error.strerror}", where=str(error.filename or request.folder), fix="--out DIR"
        ) from error
    log(
        f"{rows}, about {tokens}, the longest {lengths.longest:,}; {recipe.train.train_iters:,} steps of "
        f"{recipe.train.global_batch_size} sequences of {recipe.model.seq_length:,} tokens"
    )
    log(f"wrote {request.recipe}; it can be edited before the next steps")


def make_recipe(request: Finetuning, cluster: Cluster, log: Log) -> tuple[Recipe, ConversationLengths]:
    """The recipe of a fine-tuning, and what was measured for it.

    Args:
        request: the model, the data, and how.
        cluster: the machine that it must fit.
        log: receives lines.

    Raises:
        UserError: as `finetune`.
    """
    from llmrecipes.data.tokens import templates
    from llmrecipes.hf.match import section_of, validated
    from llmrecipes.hf.reading import CONFIG, read_config

    source = source_of(request.data, "--data", chat=True)
    base_model = _located(request)
    config = read_config(base_model.path)
    _, section = section_of(config, base_model.path)
    validated(section, 1, str(base_model.path / CONFIG))
    values = recipe_values(base_model, section, request.name)
    bound = section.get("max_position_embeddings") or values["model"]["seq_length"]
    precision: Literal["bf16", "fp32"] = "bf16" if cluster.gpus else "fp32"
    learned = source.location or source.type
    values["description"] = f"{recipe_name(base_model.name)} on the conversations of {learned}"[:200]
    values["model"]["seq_length"] = bound
    values["train"] |= {"pretrained": base_model.pinned, "precision": precision}
    values["optimizer"] = {"lr": request.lr or LEARNING_RATE[request.lora], "weight_decay": 0.0}
    values["scheduler"] = {"lr_decay_style": "linear"}
    values["data"] |= {"sources": [as_values(source)], "chat": {"template": request.template}}
    values["data"]["split"] = [100 - 100 * HELD_OUT, 100 * HELD_OUT, 0.0]
    if request.lora:
        values["lora"] = dict(LORA)
    draft = load_values(values, base_model.path / CONFIG, request.overrides).recipe
    require_tokenizer(base_model, draft, request.overrides)
    _require_template(request, draft)
    log(f"measuring the conversations of {request.data} as {templates.of_recipe(draft).origin} writes them")
    lengths = measured(draft)
    length = min(bound, math.ceil(max(lengths.longest - 1, 1) / _MULTIPLE) * _MULTIPLE)
    sequences = lengths.tokens * (1 - HELD_OUT) * request.epochs / (length * _FILL)
    batch = MOST_BATCH
    while batch > 1 and sequences / batch < LEAST_STEPS:
        batch //= 2
    values["model"]["seq_length"] = length
    values["train"]["global_batch_size"] = batch
    recipe, _ = fitted(load_values(values, base_model.path / CONFIG, request.overrides).recipe, cluster)
    return _with_length(recipe, sequences, values, base_model.path / CONFIG, request.overrides), lengths


def _located(request: Finetuning) -> Located:
    """The base model; the error of an unknown name says where it was looked for."""
    from llmrecipes.hf.reading import is_path, resolve

    try:
        return resolve(request.model, request.revision)
    except UserError as error:
        if is_path(request.model):
            raise
        raise UserError(
            f"no run and no folder has this name, and the Hugging Face Hub gave no model: {error.what}",
            where=error.where,
            rule="RUN, RUN@STEP, a folder with config.json, or a name on the Hub",
            fix=f"llmrecipes runs lists all runs; {error.fix}",
        ) from error


def _with_length(
    recipe: Recipe, sequences: float, values: dict[str, Any], path: Path, overrides: Sequence[str]
) -> Recipe:
    """The recipe with as many steps as its batch takes for the sequences; overrides are applied last."""
    batch = recipe.train.global_batch_size
    iters = max(1, math.ceil(sequences / batch))
    chosen = recipe.model_dump(mode="json", include={"layout", "train"}, exclude_defaults=True)
    valid = sequences * HELD_OUT / (1 - HELD_OUT)
    values = {**values, **chosen}
    values["train"] |= {
        "train_iters": iters,
        "eval_interval": max(1, iters // 8),
        "eval_at_start": True,
        "eval_iters": min(max(1, math.ceil(valid / batch)), 20),
        "log_interval": max(1, iters // 100),
    }
    values["scheduler"]["lr_warmup_iters"] = math.ceil(iters * 0.03) if iters > 1 else 0
    values["checkpoint"] = {"save_interval": max(1, iters // 4)}
    return load_values(values, path, overrides).recipe


def measured(recipe: Recipe) -> ConversationLengths:
    """Tokens of the conversations of a recipe with a Hugging Face tokenizer, cut at what a sequence holds.

    Raises:
        UserError: the sources cannot be read, or have no conversation that can be used.
    """
    from llmrecipes.data.folder.prepared import max_length
    from llmrecipes.data.sources import sources
    from llmrecipes.data.tokens import templates
    from llmrecipes.data.tokens.chat import ChatSpec, chat_encoder
    from llmrecipes.data.tokens.tokenizer import load_huggingface

    backend, _ = load_huggingface(recipe.data.tokenizer, recipe.model.vocab_size)
    spec = ChatSpec(templates.of_recipe(recipe), max_length(recipe), truncate=True)
    encode = chat_encoder(backend.to_str(), "uint32", spec)
    rows, refusal = 0, ""
    lengths: list[int] = []
    batch: list[bytes] = []
    for source in recipe.data.sources:
        for text in sources.documents(source, recipe.data.chat):
            rows += 1
            if text and rows <= MEASURED:
                batch.append(text.encode())
            if len(batch) == 256:
                encoded = encode(batch)
                lengths = [*lengths, *encoded.lengths]
                refusal = refusal or encoded.refusal
                batch = []
    encoded = encode(batch)
    used = [length for length in (*lengths, *encoded.lengths) if length]
    if not used:
        refusal = refusal or encoded.refusal
        raise UserError(
            f"none of {rows:,} conversations can be used" + (f"; the template: {refusal}" if refusal else ""),
            where="--data",
            rule="a conversation needs an answer of the assistant, and no text of special tokens",
            fix="see docs/guide/finetuning.md#conversations",
        )
    tokens = math.ceil(sum(used) * max(1, rows / MEASURED))
    return ConversationLengths(rows, len(used), tokens, max(used))


def _require_template(request: Finetuning, recipe: Recipe) -> None:
    from llmrecipes.data.tokens import templates
    from llmrecipes.data.tokens.tokenizer import huggingface_template

    chat = recipe.data.chat
    if chat is None or chat.template is not None or chat.chat_template is not None:
        return
    if recipe.data.tokenizer.type == "huggingface" and huggingface_template(recipe.data.tokenizer)[0] is None:
        names = templates.fitting(recipe.data.tokenizer)
        raise UserError(
            f"the tokenizer of {request.model} has no chat template",
            where="--template",
            rule="a chat template turns messages into text; tokenizers of base models usually have none",
            fix=" or ".join(f"--template {name}" for name in names)
            or f"data.chat.chat_template={recipes_dir() / 'templates' / 'plain.jinja'}, which needs no special tokens",
        )


def _record(request: Finetuning) -> dict[str, Any]:
    return {name: value for name, value in asdict(request).items() if name != "out"} | {
        "overrides": [*request.overrides]
    }


def _require_same(request: Finetuning) -> None:
    """The folder is new, or that of the same call.

    Raises:
        UserError: it is of another one.
    """
    path = request.folder / RECORD
    try:
        then = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        then = None
    except (OSError, ValueError):
        then = {}
    if then is None and not request.recipe.exists() and not request.exported.exists():
        return
    now = _record(request)
    changed = sorted(name for name in now if not isinstance(then, dict) or then.get(name) != now[name])
    if changed:
        what = f"was made with another {', '.join(changed)}" if then else "was not made by finetune"
        raise UserError(
            what,
            where=str(request.folder),
            rule="a folder holds one fine-tuning; the same command continues it",
            fix="--out DIR for a new one; or edit the recipe in it, and repeat the later steps",
        )
