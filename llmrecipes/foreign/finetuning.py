"""YAML of axolotl and LLaMA-Factory as a recipe: fine-tuning of a published model on conversations or pairs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from llmrecipes.commandline import command_line
from llmrecipes.errors import UserError
from llmrecipes.foreign.draft import NO_KEY, Draft
from llmrecipes.foreign.nested_configs import whole_layers
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.preference_section import LossType

TRAINER_DEFAULTS: Mapping[str, Any] = {
    "optimizer.weight_decay": 0.0,
    "optimizer.adam_beta2": 0.999,
    "train.seed": 42,
}
"""Defaults of transformers' Trainer, which both programs have, that a recipe does not share."""
AXOLOTL_SCHEDULE, AXOLOTL_WARMUP, AXOLOTL_MOST_WARMUP = "cosine", 0.03, 100
"""Of axolotl without lr_scheduler and warm-up: the share of the steps, and the most steps."""
FACTORY_DEFAULTS: Mapping[str, Any] = {
    "cutoff_len": 2048, "learning_rate": 5e-5, "num_train_epochs": 3.0, "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "lora_rank": 8, "save_steps": 500,
    "logging_steps": 500,
}  # fmt: skip
"""Defaults of LLaMA-Factory and transformers' TrainingArguments."""
MATRICES: Mapping[str, str] = {
    "q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv", "o_proj": "linear_proj",
    "gate_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2",
}  # fmt: skip
"""Names of adapted matrices, in transformers and in Megatron."""
SCHEDULES: Mapping[str, str] = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
    "polynomial": "polynomial", "inverse_sqrt": "inverse-square-root", "cosine_with_min_lr": "cosine",
}  # fmt: skip
REASONS: tuple[tuple[str, str], ...] = (
    (r"output_dir|overwrite\w*|dataset_prepared_path|resume\w*|save_only_model|save_safetensors|hub_\w+|save_strategy"
     r"|load_best\w*|lora_model_dir|adapter_name_or_path|cache_dir|save_first_step|push\w*",
     "a run has its own folder, and resumes by its name"),
    (r"report_to|plot_loss|wandb_(?:watch|log\w+|mode|run_id)|mlflow_\w+|comet_\w+|trackio_\w+|use_tensorboard|run_name|logging_(?!steps)\w+"
     r"|debug|strict",
     "metrics are in metrics.jsonl and the sinks of `tracking`"),
    (r"flash_attn\w*|flash_attention|attn_implementation|liger_\w+|lora_\w+_kernel|plugins|unsloth\w*|use_unsloth\w*|xformers\w*|sdp\w*"
     r"|tf32|gradient_checkpointing_kwargs|use_reentrant\w*|activation_offloading|torch_compile_\w+|enable_liger\w*"
     r"|sample_packing_\w+|eval_sample_packing|pad_to_sequence_len|group_by_length|use_kernels|low_cpu\w*|ddp_\w+"
     r"|remove_unused_columns|preprocessing_num_workers|dataset_processes|skip_prepare_dataset|upcast\w*|neat_packing",
     "how it is computed, not what"),
    (r"trust_remote_code|model_type|tokenizer_type|tokenizer_use_fast|processor_type|tokenizer_legacy|special_tokens|is_\w+_derived_model",
     "model and tokenizer are those of the folder; its code is never run"),
    (r"deepspeed|fsdp\w*|dp_shard_size|tensor_parallel_size", "ZeRO is layout.zero.stage, other degrees are in layout"),
    (r"do_train|do_eval|predict_with_generate|eval_strategy|evaluation_strategy|per_device_eval_batch_size"
     r"|eval_batch_size|eval_table\w*|eval_max\w*|include\w*", "evaluation takes data.split and train.eval_interval"),
)  # fmt: skip


def from_axolotl(data: Mapping[str, Any], draft: Draft, ranks: int) -> None:
    """Translate a file of axolotl; `draft` has the model already."""
    left = {name: value for name, value in data.items() if value is not None and name != "base_model"}
    method = left.pop("rl", None)
    _require_method("rl", method, (None, "dpo", "ipo"))
    kind = left.pop("adapter", None)
    _adapters(left, draft, kind in ("lora", "qlora"), left.pop("lora_target_modules", None), "lora_target_modules")
    left.pop("lora_target_linear", None)
    for name in ("load_in_4bit", "load_in_8bit"):
        if left.pop(name, False):
            draft.leave(name, True, "the frozen weights stay in train.precision", differs=True)
    _sources(left.pop("datasets", left.pop("pretraining_dataset", [])), draft, method)
    if method:
        beta = left.pop("rl_beta", left.pop("dpo_beta", 0.1))
        draft.set("dpo.beta", beta, "rl_beta", beta)
        draft.set("dpo.loss_type", "ipo" if method == "ipo" else "sigmoid", "rl", method)
    draft.set("model.seq_length", left.pop("sequence_len", 512), "sequence_len")
    if draft.get("data.chat") is not None:
        draft.set("data.chat.packing", bool(left.pop("sample_packing", False)), "sample_packing")
        _template(left.pop("chat_template", None), draft, "chat_template")
    if left.pop("train_on_inputs", False):
        draft.leave("train_on_inputs", True, "the loss is on answers only", differs=True)
    _split(left.pop("val_set_size", 0.0), "val_set_size", draft)
    _precision(left, draft)
    _optimizer(left.pop("optimizer", "adamw_torch"), draft)
    _batch(left, draft, ranks, "micro_batch_size", 1)
    if left.pop("gradient_checkpointing", False):
        whole_layers(draft, "gradient_checkpointing", True)
    style = left.pop("lr_scheduler", AXOLOTL_SCHEDULE)
    share = left.pop("cosine_min_lr_ratio", None)
    epochs = left.pop("num_epochs", 1)
    if (rate := left.pop("learning_rate", None)) is not None:
        draft.set("optimizer.lr", float(rate), "learning_rate", rate)
    steps = _steps(left, draft, epochs, "num_epochs")
    _schedule(left, draft, steps, style, "lr_scheduler")
    if "scheduler.lr_warmup_iters" not in {row.key for row in draft.rows}:
        warmup = min(int(AXOLOTL_WARMUP * steps), AXOLOTL_MOST_WARMUP)
        draft.set("scheduler.lr_warmup_iters", warmup, why="axolotl's default: 3 % of the steps, at most 100")
    if share is not None and (rate := draft.get("optimizer.lr")) is not None:
        draft.set("optimizer.min_lr", share * rate, "cosine_min_lr_ratio", share, "× optimizer.lr")
    for name, key in (("evals_per_epoch", "train.eval_interval"), ("saves_per_epoch", "checkpoint.save_interval")):
        if count := left.pop(name, None):
            draft.set(key, max(1, math.ceil(steps / max(epochs, 1) / count)), name, count, "as a number of steps")
    _rest(left, draft)
    _advice(draft, data["base_model"], epochs)


def from_llamafactory(data: Mapping[str, Any], draft: Draft, ranks: int, path: Path) -> None:
    """Translate a file of LLaMA-Factory; `draft` has the model already."""
    left = {name: value for name, value in data.items() if value is not None and name != "model_name_or_path"}
    stage = left.pop("stage", "sft")
    _require_method("stage", stage, ("sft", "pt", "dpo"))
    kind = left.pop("finetuning_type", "lora")
    if kind not in ("lora", "full"):
        draft.leave("finetuning_type", kind, "lora or full: set train.freeze for other weights", differs=True)
    left.setdefault("lora_rank", FACTORY_DEFAULTS["lora_rank"])
    left.setdefault("lora_alpha", 2 * left["lora_rank"])
    _adapters(left, draft, kind == "lora", left.pop("lora_target", "all"), "lora_target")
    named = left.pop("dataset", "")
    _registered(named, left.pop("dataset_dir", "data"), draft, stage, path)
    if stage == "dpo":
        loss = left.pop("pref_loss", "sigmoid")
        if loss not in get_args(LossType):
            _require_method("pref_loss", loss, ("sigmoid", "hinge", "ipo"))
        draft.set("dpo.loss_type", loss, "pref_loss", loss)
        draft.set("dpo.beta", left.pop("pref_beta", 0.1), "pref_beta")
    draft.set("model.seq_length", left.pop("cutoff_len", FACTORY_DEFAULTS["cutoff_len"]), "cutoff_len")
    packing = left.pop("packing", stage == "pt")
    if draft.get("data.chat") is not None:
        draft.set("data.chat.packing", bool(packing), "packing")
        _template(left.pop("template", None), draft, "template")
    _split(left.pop("val_size", 0.0), "val_size", draft)
    _precision(left, draft)
    _optimizer(left.pop("optim", "adamw_torch"), draft)
    _batch(left, draft, ranks, "per_device_train_batch_size", FACTORY_DEFAULTS["per_device_train_batch_size"])
    if not left.pop("disable_gradient_checkpointing", False):
        whole_layers(draft, "", "LLaMA-Factory's default")
    given = "learning_rate" in left
    rate = left.pop("learning_rate", FACTORY_DEFAULTS["learning_rate"])
    draft.set("optimizer.lr", float(rate), "learning_rate" if given else "", rate)
    for name in ("save_steps", "logging_steps"):
        left.setdefault(name, FACTORY_DEFAULTS[name])
    epochs = left.pop("num_train_epochs", FACTORY_DEFAULTS["num_train_epochs"])
    steps = _steps(left, draft, epochs, "num_train_epochs")
    _schedule(
        left, draft, steps, left.pop("lr_scheduler_type", FACTORY_DEFAULTS["lr_scheduler_type"]), "lr_scheduler_type"
    )
    _rest(left, draft)
    _advice(draft, data["model_name_or_path"], epochs)


def _require_method(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        names = ", ".join(str(each) for each in known if each)
        raise UserError(
            f"{value!r} has no counterpart", where=name, rule=f"fine-tuning here is supervised or by pairs: {names}",
            fix=f"remove {name} for supervised fine-tuning",
        )  # fmt: skip


def _adapters(left: dict[str, Any], draft: Draft, used: bool, targets: Any, name: str) -> None:
    if not used:
        for unused in [each for each in left if each.startswith("lora_")]:
            draft.leave(unused, left.pop(unused), "no adapters are trained")
        return
    for theirs, key in (
        ("lora_r", "rank"),
        ("lora_rank", "rank"),
        ("lora_alpha", "alpha"),
        ("lora_dropout", "dropout"),
    ):
        if theirs in left:
            value = left.pop(theirs)
            draft.set(f"lora.{key}", value if key == "rank" else float(value), theirs, value)
    words = targets if isinstance(targets, list) else [] if targets in (None, "all") else str(targets).split(",")
    matrices = [MATRICES[word.strip()] for word in words if word.strip() in MATRICES]
    if matrices:
        why = "queries, keys and values are one matrix" if "linear_qkv" in matrices else ""
        draft.set("lora.target_modules", list(dict.fromkeys(matrices)), name, targets, why)
    unknown = [word for word in words if word.strip() not in MATRICES]
    if unknown:
        draft.leave(name, unknown, f"one of {', '.join(MATRICES)}", differs=True)
    for theirs in (
        "lora_modules_to_save",
        "additional_target",
        "use_dora",
        "peft_use_dora",
        "use_rslora",
        "peft_use_rslora",
    ):
        if left.get(theirs):
            draft.leave(theirs, left.pop(theirs), "adapters are plain LoRA, and nothing else is trained", differs=True)


def _sources(datasets: Any, draft: Draft, method: str | None) -> None:
    """axolotl's datasets: a path with its type and columns."""
    sources = []
    chat: dict[str, Any] = {}
    entries = datasets if isinstance(datasets, list) else [datasets]
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            entry = {"path": entry}
        where = f"datasets.{number}"
        left = {name: value for name, value in entry.items() if value is not None}
        kind = str(left.pop("type", "completion"))
        files = left.pop("data_files", None)
        path = files if isinstance(files, str) else files[0] if files else left.pop("path", "")
        left.pop("path", None)
        source = _source(str(path), left.pop("ds_type", None), left.pop("name", None))
        split = left.pop("split", None)
        if split and re.fullmatch(r"\w+", str(split)) and source["type"] == "hub":
            source["split"] = split
        elif split and split != "train":
            draft.leave(f"{where}.split", split, "a whole split is read: set max_tokens", differs=True)
        sources.append(source)
        _columns(kind, left, chat, source, draft, where, method)
        for name, value in left.items():
            draft.leave(f"{where}.{name}", value, NO_KEY, differs=True)
    draft.set("data.sources", sources, "datasets", [source["path"] for source in sources])
    if chat or method:
        draft.values.setdefault("data", {}).setdefault("chat", {}).update(chat)
        if method:
            draft.values["data"]["chat"].setdefault("preference", {})


def _columns(
    kind: str, left: dict[str, Any], chat: dict[str, Any], source: dict[str, Any], draft: Draft, where: str,
    method: str | None,
) -> None:  # fmt: skip
    if method:
        for name, key in (("field_chosen", "chosen_key"), ("field_rejected", "rejected_key")):
            if name in left:
                chat.setdefault("preference", {})[key] = left.pop(name)
        draft.leave(f"{where}.type", kind, "pairs are read from prompt, chosen and rejected: data.chat.preference")
    elif kind.startswith("chat_template") or kind.startswith("sharegpt"):
        chat["messages_key"] = left.pop("field_messages", "messages")
        renamed = left.pop("message_property_mappings", None)
        forms = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
        if renamed and dict(renamed) not in forms:
            why = "messages have role and content, or from and value"
            draft.leave(f"{where}.message_property_mappings", renamed, why, differs=True)
    elif kind.startswith("alpaca"):
        chat["prompt_key"] = "instruction"
        chat["completion_key"] = "output"
        why = "instruction, input and output are read; Alpaca's frame around them is not"
        draft.leave(f"{where}.type", kind, why, differs=True)
    elif kind in ("completion", "pretrain"):
        source["text_key"] = left.pop("field", "text")
    else:
        chat.setdefault("messages_key", "messages")
        draft.leave(f"{where}.type", kind, "a way to write prompts in Python code: set data.chat", differs=True)


def _source(path: str, kind: str | None, name: str | None) -> dict[str, Any]:
    suffix = Path(path).suffix.lstrip(".")
    types = {"jsonl": "jsonl", "json": "jsonl", "parquet": "parquet", "txt": "text", "text": "text"}
    found = types.get(suffix) or (types.get(kind or "") if Path(path).exists() else None)
    source: dict[str, Any] = {"type": found or "hub", "path": path}
    return source if name is None or found else {**source, "name": name}


def _registered(named: str, folder: str, draft: Draft, stage: str, source: Path) -> None:
    """LLaMA-Factory's datasets, by their entries in dataset_info.json."""
    names = [name.strip() for name in str(named).split(",") if name.strip()]
    home, entries = _entries(folder, source)
    sources = []
    chat: dict[str, Any] = {}
    for name in names:
        entry = entries.get(name)
        if not isinstance(entry, dict):
            draft.leave("dataset", name, f"not in {folder}/dataset_info.json here: set data.sources", differs=True)
            continue
        file = entry.get("file_name")
        location = str(home / file) if home and file else str(entry.get("hf_hub_url", name))
        sources.append(_source(location, None, entry.get("subset")))
        columns = entry.get("columns", {})
        if stage == "pt":
            sources[-1]["text_key"] = columns.get("prompt", "text")
        elif entry.get("formatting") == "sharegpt":
            chat["messages_key"] = columns.get("messages", "conversations")
        else:
            chat["prompt_key"] = columns.get("prompt", "instruction")
            chat["completion_key"] = columns.get("response", "output")
        if entry.get("ranking"):
            chat["preference"] = {f"{key}_key": columns.get(key, key) for key in ("chosen", "rejected")}
    if sources:
        draft.set("data.sources", sources, "dataset", named)
    elif draft.get("data.sources") is None:
        raise UserError(
            f"{named or 'not set'}: in no {folder}/dataset_info.json here", where="dataset",
            rule="what LLaMA-Factory's names stand for is in that file", fix="data.sources=[{type: jsonl, path: FILE}]",
        )  # fmt: skip
    if stage != "pt":
        draft.values.setdefault("data", {}).setdefault("chat", {}).update(chat)
        if stage == "dpo":
            draft.values["data"]["chat"].setdefault("preference", {})


def _entries(folder: str, source: Path) -> tuple[Path | None, dict[str, Any]]:
    """The folder of the nearest dataset_info.json and what it says; nothing if it cannot be read."""
    candidates = [above / folder for above in (Path(), *source.parents[:2])]
    home = next((each for each in candidates if (each / "dataset_info.json").is_file()), None)
    try:
        entries = json.loads((home / "dataset_info.json").read_text("utf-8")) if home else {}
    except (OSError, ValueError):
        entries = {}
    return home, entries if isinstance(entries, dict) else {}


def _template(value: Any, draft: Draft, name: str) -> None:
    known = {"chatml": "chatml", "llama3": "llama3", "qwen": "chatml", "qwen3": "qwen3"}
    if value in known:
        draft.set("data.chat.template", known[value], name, value)
    elif value is not None:
        draft.leave(name, value, "the tokenizer's template is used; another is data.chat.chat_template",
                    differs=value not in ("tokenizer_default", "default"))  # fmt: skip


def _split(value: Any, name: str, draft: Draft) -> None:
    if isinstance(value, int | float) and 0 <= value < 1:
        draft.set("data.split", [round(100 - 100 * value, 6), round(100 * value, 6), 0.0], name, value)
    else:
        draft.leave(name, value, "a share of the rows: set data.split", differs=True)


def _precision(left: dict[str, Any], draft: Draft) -> None:
    half = left.pop("fp16", False) is True
    brain = left.pop("bf16", left.pop("bfloat16", None))
    left.pop("pure_bf16", None)
    kind = "fp16" if half else "bf16" if brain in (True, "auto", "full") else "fp32"
    draft.set("train.precision", kind, "fp16" if half else "bf16", brain)


def _optimizer(kind: Any, draft: Draft) -> None:
    text = str(kind)
    ours = next((ours for ours in ("muon", "lion", "sgd") if ours in text), "adam" if "adam" in text else None)
    if ours is None or "adafactor" in text:
        draft.leave("optimizer", kind, "adam, sgd, muon or lion: AdamW is used", differs=True)
        return
    why = "its states are in fp32 here" if "8bit" in text or "paged" in text else ""
    draft.set("optimizer.optimizer", ours, "optimizer", kind, why)


def _batch(left: dict[str, Any], draft: Draft, ranks: int, name: str, default: int) -> None:
    micro = left.pop(name, default)
    steps = left.pop("gradient_accumulation_steps", 1)
    draft.set("layout.micro_batch_size", micro, name)
    why = f"{micro} × {steps} accumulation steps × {ranks} rank{'' if ranks == 1 else 's'}; --cluster sets the ranks"
    draft.set("train.global_batch_size", micro * steps * ranks, "gradient_accumulation_steps", steps, why)


def _steps(left: dict[str, Any], draft: Draft, epochs: float, name: str) -> int:
    """The number of steps: in the file, or of the epochs over the data, which are read for it."""
    steps = left.pop("max_steps", None)
    if isinstance(steps, int) and steps > 0:
        draft.set("train.train_iters", steps, "max_steps")
        return steps
    given = draft.get("train.train_iters")
    if given is not None:  # by an override
        return int(given)
    batch = draft.get("train.global_batch_size")
    share = draft.get("data.split", [98.0])[0] / 100
    try:
        rows = _sequences(draft)
    except UserError as error:
        raise UserError(
            f"{epochs:g} epochs of data that cannot be read here: {error.what}",
            where=name,
            rule="a recipe has a number of steps, which follows from the number of rows",
            fix="train.train_iters=STEPS; or data.sources.0.path=FILE with the data of this machine",
        ) from error
    steps = max(1, math.ceil(rows * share * epochs / batch))
    draft.set("train.train_iters", steps, name, epochs, f"× {rows:,.0f} sequences / {batch}")
    return steps


def _sequences(draft: Draft) -> float:
    """Sequences of one pass over the data: packed conversations by their tokens, others by their number."""
    from llmrecipes.data.sources import sources
    from llmrecipes.models.finetune import measured

    values = {**draft.values, "train": {**draft.values["train"], "train_iters": 1}, "name": "draft"}
    values["optimizer"] = {"lr": 1.0}
    recipe = Recipe.model_validate(values)
    chat = recipe.data.chat
    if chat is not None and chat.packing and chat.preference is None:
        return measured(recipe).tokens / recipe.model.seq_length
    return float(sum(1 for source in recipe.data.sources for _ in sources.documents(source, chat)))


def _schedule(left: dict[str, Any], draft: Draft, steps: int, style: Any, name: str) -> None:
    if style in SCHEDULES:
        draft.set("scheduler.lr_decay_style", SCHEDULES[style], name, style)
    else:
        draft.leave(name, style, f"one of {', '.join(SCHEDULES)}", differs=True)
    if (share := left.pop("warmup_ratio", None)) is not None:
        draft.set("scheduler.lr_warmup_iters", int(share * steps), "warmup_ratio", share, f"× {steps:,} steps")
    if (count := left.pop("warmup_steps", None)) is not None:
        value = int(count * steps) if isinstance(count, float) and count < 1 else int(count)
        draft.set("scheduler.lr_warmup_iters", value, "warmup_steps", count)


def _rest(left: dict[str, Any], draft: Draft) -> None:
    if left.get("wandb_project"):
        draft.set("tracking.wandb", True, "wandb_project", left["wandb_project"])
    if name := left.pop("wandb_name", None):
        draft.set("tracking.wandb_exp_name", name, "wandb_name")
    for name, value in left.items():
        why = next((why for pattern, why in REASONS if re.fullmatch(pattern, name)), None)
        if why is not None or isinstance(value, dict) or not draft.take(name, value):
            off = value in (False, [], {}, "")
            draft.leave(name, value, why or NO_KEY, differs=why is None and not off)
    for key, default in TRAINER_DEFAULTS.items():
        draft.default(key, default, "transformers' default")


def _advice(draft: Draft, base: str, epochs: float) -> None:
    """The command that does the same with values of its own."""
    if draft.get("dpo") is not None or draft.get("data.chat") is None:
        return
    sources = draft.get("data.sources") or [{"type": "jsonl", "path": "FILE"}]
    options = {
        "data": f"{sources[0]['type']}:{sources[0]['path']}",
        "lora": draft.get("lora") is not None,
        "template": draft.get("data.chat.template"),
        "epochs": epochs,
        "lr": draft.get("optimizer.lr"),
    }
    draft.advice.append(f"all steps at once: {command_line('finetune', base, options=options)}")
