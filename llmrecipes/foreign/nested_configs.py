"""torchtitan's TOML, and YAML of NeMo 2 and Megatron-Bridge, as a recipe.

These name a model whose shape is in Python code: it is that of a recipe in recipes/ (`SHAPES`), or of `--like`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.foreign.draft import NO_KEY, Draft, flat
from llmrecipes.foreign.megatron import DEFAULTS, REASONS
from llmrecipes.recipe.load import load

SHAPES: Mapping[str, str] = {
    "llama3 8b": "llama3-8b",
    "llama3 70b": "llama3-70b",
    "llama3 405b": "llama3-405b",
    "deepseek_v3 671b": "deepseek-v3",
    "qwen3 30b-a3b": "qwen3-30b-a3b",
    "llama3config8b": "llama3-8b",
    "llama31config8b": "llama3-8b",
    "llama3config70b": "llama3-70b",
    "llama31config70b": "llama3-70b",
    "llama31config405b": "llama3-405b",
    "mixtralconfig8x7b": "mixtral-8x7b",
    "deepseekv3config": "deepseek-v3",
    "gptconfig175b": "gpt-175b",
    "llama3_8b": "llama3-8b",
    "llama3_70b": "llama3-70b",
    "llama31_405b": "llama3-405b",
    "mixtral_8x7b": "mixtral-8x7b",
}
"""Names that torchtitan (name and flavor) and NeMo (class or factory) give to models, in lower case."""
TITAN_DEFAULTS: Mapping[str, Any] = {
    "model.seq_length": 2048,
    "train.train_iters": 10000,
    "layout.micro_batch_size": 8,
    "train.log_interval": 10,
    "train.eval_interval": 10,
    "optimizer.lr": 8e-4,
    "scheduler.lr_warmup_iters": 200,
    "scheduler.lr_decay_style": "linear",
    "checkpoint.save_interval": 500,
    "checkpoint.async_save": False,
    "checkpoint.most_recent_k": 10,
    "layout.recompute_granularity": "selective",
}
"""Defaults of torchtitan's JobConfig that a recipe does not share."""
_TITAN: Mapping[str, str] = {
    "training.steps": "train.train_iters",
    "training.seq_len": "model.seq_length",
    "training.local_batch_size": "layout.micro_batch_size",
    "training.max_norm": "optimizer.clip_grad",
    "training.seed": "train.seed",
    "optimizer.lr": "optimizer.lr",
    "optimizer.eps": "optimizer.adam_eps",
    "optimizer.beta1": "optimizer.adam_beta1",
    "optimizer.beta2": "optimizer.adam_beta2",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "lr_scheduler.warmup_steps": "scheduler.lr_warmup_iters",
    "checkpoint.interval": "checkpoint.save_interval",
    "checkpoint.keep_latest_k": "checkpoint.most_recent_k",
    "metrics.log_freq": "train.log_interval",
    "metrics.enable_tensorboard": "tracking.tensorboard",
    "metrics.enable_wandb": "tracking.wandb",
    "validation.freq": "train.eval_interval",
    "compile.enable": "layout.torch_compile",
    "parallelism.tensor_parallel_degree": "layout.tensor_model_parallel_size",
    "parallelism.pipeline_parallel_degree": "layout.pipeline_model_parallel_size",
    "parallelism.context_parallel_degree": "layout.context_parallel_size",
    "parallelism.expert_parallel_degree": "layout.expert_model_parallel_size",
}
_TITAN_WHY: tuple[tuple[str, str], ...] = (
    (r"job\..*|profiling\..*|comm\..*|metrics\..*|experimental\..*|memory_estimation\..*|training\.gc.*",
     "a run has its own folder, metrics and profile"),
    (r"checkpoint\..*", "a run saves and resumes in runs/RECIPE/RUN-ID, by its name"),
    (r"parallelism\.data_parallel_\w+|parallelism\.fsdp\w*",
     "data parallelism takes the ranks that are left; ZeRO-2 and -3 are layout.zero.stage"),
    (r"parallelism\..*|compile\..*|optimizer\.implementation|.*deterministic",
     "how it is computed, not what: see layout and llmrecipes plan --search"),
    (r"validation\..*", "evaluation takes data.split, train.eval_interval and train.eval_iters"),
)  # fmt: skip
_DATASETS = {"c4": {"type": "hub", "path": "allenai/c4", "name": "en"}}


def from_torchtitan(data: Mapping[str, Any], draft: Draft, ranks: int, like: str | None) -> None:
    """Translate a TOML file of torchtitan."""
    left = flat(data)
    name, flavor = left.pop("model.name", ""), left.pop("model.flavor", "")
    _shape(draft, f"{name} {flavor}".strip(), "model.name, model.flavor", like)
    for theirs, key in _TITAN.items():
        if theirs in left:
            draft.set(key, left.pop(theirs), theirs)
    for key, default in TITAN_DEFAULTS.items():
        draft.default(key, default)
    kind = left.pop("optimizer.name", "AdamW")
    if kind not in ("AdamW", "Adam"):
        draft.leave("optimizer.name", kind, "one of AdamW and Adam", differs=True)
    for theirs in ("model.hf_assets_path", "model.tokenizer_path"):
        if theirs in left:
            draft.set("data.tokenizer", {"type": "huggingface", "path": left.pop(theirs)}, theirs)
    dataset = left.pop("training.dataset", None)
    if dataset in _DATASETS and not left.get("training.dataset_path"):
        draft.set("data.sources", [dict(_DATASETS[dataset])], "training.dataset", dataset)
    elif dataset is not None:
        draft.leave("training.dataset", dataset, "set data.sources", differs=True)
    _titan_precision(left, draft)
    _titan_schedule(left, draft)
    _titan_batch(left, draft, ranks)
    _titan_recompute(left, draft)
    converters = left.pop("model.converters", None)
    if converters:
        draft.leave("model.converters", converters, "FP8 is train.fp8 and train.fp8_recipe", differs=True)
    for theirs in [theirs for theirs in left if theirs.startswith(("quantize.", "float8."))]:
        draft.leave(
            theirs, left.pop(theirs), "see model.converters" if converters else "no effect without model.converters"
        )
    for theirs, value in left.items():
        why = next((why for pattern, why in _TITAN_WHY if re.fullmatch(pattern, theirs)), "")
        draft.leave(theirs, value, why or NO_KEY, differs=not why)


def _titan_precision(left: dict[str, Any], draft: Draft) -> None:
    kind = left.pop("training.mixed_precision_param", None)
    if kind is None:
        draft.set("train.precision", "bf16", why="torchtitan's default")
    else:
        draft.set("train.precision", "fp32" if kind == "float32" else "bf16", "training.mixed_precision_param", kind)
    left.pop("training.mixed_precision_reduce", None)


def _titan_schedule(left: dict[str, Any], draft: Draft) -> None:
    share = left.pop("lr_scheduler.decay_ratio", None)
    kind = left.pop("lr_scheduler.decay_type", "linear")
    factor = left.pop("lr_scheduler.min_lr_factor", left.pop("lr_scheduler.lr_min", 0.0))
    if factor:
        draft.set("optimizer.min_lr", factor * draft.get("optimizer.lr"), "lr_scheduler.min_lr_factor", factor,
                  "× optimizer.lr")  # fmt: skip
    steps = draft.get("train.train_iters")
    warmup = draft.get("scheduler.lr_warmup_iters", 0)
    if isinstance(share, int | float) and round(steps * share) < steps - warmup:
        draft.set("scheduler.lr_decay_style", "WSD", "lr_scheduler.decay_ratio", share)
        decay = max(1, round(steps * share))
        draft.set("scheduler.lr_wsd_decay_iters", decay, "lr_scheduler.decay_ratio", share, f"× {steps:,} steps")
        style = {"sqrt": "minus_sqrt"}.get(kind, kind)
        draft.set("scheduler.lr_wsd_decay_style", style, "lr_scheduler.decay_type", kind)
    elif kind == "sqrt":
        draft.leave(
            "lr_scheduler.decay_type", kind, "only for a decay_ratio: set scheduler.lr_decay_style", differs=True
        )
    else:
        draft.set("scheduler.lr_decay_style", kind, "lr_scheduler.decay_type", kind)


def _titan_batch(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    batch = left.pop("training.global_batch_size", -1)
    if isinstance(batch, int) and batch > 0:
        draft.set("train.global_batch_size", batch, "training.global_batch_size")
        return
    degrees = [draft.get(f"layout.{kind}_parallel_size", 1) for kind in ("tensor_model", "pipeline_model", "context")]
    replicas = max(1, ranks // max(1, math.prod(degrees)))
    draft.set("train.global_batch_size", draft.get("layout.micro_batch_size") * replicas,
              why=f"local_batch_size × {replicas} data-parallel ranks")  # fmt: skip


def _titan_recompute(left: dict[str, Any], draft: Draft) -> None:
    mode = left.pop("activation_checkpoint.mode", None)
    if mode == "full":
        whole_layers(draft, "activation_checkpoint.mode", mode)
    elif mode == "none":
        draft.values.get("layout", {}).pop("recompute_granularity", None)
    for name in [name for name in left if name.startswith("activation_checkpoint.")]:
        draft.leave(name, left.pop(name), "recompute_granularity: auto finds the least that fits")


def whole_layers(draft: Draft, name: str, value: Any) -> None:
    """Recompute every layer, as other programs do."""
    for key, ours in (("granularity", "full"), ("method", "uniform"), ("num_layers", 1)):
        draft.set(f"layout.recompute_{key}", ours, name, value)


# -- NeMo and Megatron-Bridge ------------------------------------------------------------------------------------------

_PATHS = re.compile(r".*(?:_target_|_factory_|_partial_|_args_|_call_)$")
_NEMO_WHY: tuple[tuple[str, str], ...] = (
    (r"(log|logger|resume|checkpoint|nsys|profiling|recompute_spec|straggler|ft|inprocess_restart)\..*",
     "a run has its own folder, metrics and checkpoints"),
    (r"trainer\.(devices|num_nodes|accelerator|callbacks|num_sanity.*|use_distributed_sampler|enable_\w+|plugins.*)"
     r"|dist\..*|trainer\.strategy\..*|ddp\..*|comm_overlap.*", "llmrecipes submit starts the ranks; see layout"),
)  # fmt: skip
_NEMO: Mapping[str, str] = {
    "train.global_batch_size": "train.global_batch_size",
    "rng.seed": "train.seed",
    "peft.dim": "lora.rank",
    "peft.alpha": "lora.alpha",
    "peft.dropout": "lora.dropout",
    "peft.target_modules": "lora.target_modules",
    "trainer.val_check_interval": "train.eval_interval",
    "trainer.limit_val_batches": "train.eval_iters",
    "trainer.max_steps": "train.train_iters",
    "optim.lr_scheduler.min_lr": "optimizer.min_lr",
    "optim.lr_scheduler.warmup_steps": "scheduler.lr_warmup_iters",
}
_SECTIONS = (
    "model",
    "train",
    "optimizer",
    "scheduler",
    "ddp",
    "data",
    "dataset",
    "trainer",
    "optim",
    "checkpoint",
    "logger",
)


def from_nemo(data: Mapping[str, Any], draft: Draft, ranks: int, like: str | None) -> None:
    """Translate a YAML file of NeMo 2 or Megatron-Bridge, whose names are mostly Megatron's."""
    left = flat(data)
    named = [str(value).rpartition(".")[2] for name, value in left.items() if _PATHS.fullmatch(name)]
    whole = any(name.endswith("num_layers") and value for name, value in left.items())
    if not whole:
        known = next((name for name in named if name.lower() in SHAPES), " ".join(named[:1]))
        _shape(draft, known, "_target_", like)
        draft.leave("", "", "values that are not in the file come from Python code there, and here from --like or "
                    "the recipe's defaults", differs=True)  # fmt: skip
    _activation(left, draft)
    _mixed_precision(left, draft)
    paths = next(
        (left.pop(name) for name in ("dataset.data_path", "data.paths", "dataset.blend") if name in left), None
    )
    if paths:
        words = paths if isinstance(paths, list) else [paths]
        draft.set("data.sources", [{"type": "megatron", "path": str(word)} for word in words], "data paths", paths)
    for name, value in left.items():
        if _PATHS.fullmatch(name) or value is None:
            continue
        _nested(name, value, draft)
    for key, default in DEFAULTS.items() if draft.get("train.train_iters") and whole else ():
        draft.default(key, default)


def _nested(name: str, value: Any, draft: Draft) -> None:
    section = name.partition(".")[0]
    _ = name
    leaf = name.rpartition(".")[2]
    if name in _NEMO:
        draft.set(_NEMO[name], value, name)
        return
    known = section in _SECTIONS and isinstance(value, int | float | str | bool | list)
    if known and draft.take(leaf, value):
        row = draft.rows.pop()
        draft.set(row.key, value, name)
        return
    patterns = (*_NEMO_WHY, *((f".*\\.(?:{pattern})", why) for pattern, why in REASONS))
    why = next((why for pattern, why in patterns if re.fullmatch(pattern, name)), "")
    draft.leave(name, value, why or NO_KEY, differs=not why)


def _activation(left: dict[str, Any], draft: Draft) -> None:
    """A function as Python's path: torch.nn.functional.silu."""
    for name in [name for name in left if ".activation_func" in name]:
        value = str(left.pop(name)).rpartition(".")[2]
        known = {"silu": "silu", "gelu": "gelu", "squared_relu": "squared_relu", "fast_gelu": "gelu_tanh",
                 "quick_gelu": "quick_gelu"}  # fmt: skip
        if value in known:
            draft.set("model.activation_func", known[value], name, value)


def _mixed_precision(left: dict[str, Any], draft: Draft) -> None:
    for name in [name for name in left if name.endswith(("mixed_precision", ".precision"))]:
        value = str(left.pop(name))
        kind = next((kind for kind in ("bf16", "fp16", "fp32") if kind in value.replace("16-mixed", "fp16")), None)
        kind = "bf16" if "bf16" in value else kind
        if kind:
            draft.set("train.precision", kind, name, value)
        if "fp8" in value:
            draft.leave(name, value, "FP8 is train.fp8 and train.fp8_recipe", differs=True)
    for name, kind in (
        ("model.bf16", "bf16"),
        ("model.fp16", "fp16"),
        ("optimizer.bf16", "bf16"),
        ("optimizer.fp16", "fp16"),
    ):
        if left.pop(name, False):
            draft.set("train.precision", kind, name, True)


def _shape(draft: Draft, named: str, where: str, like: str | None) -> None:
    """The model section of the recipe with the shape of a name."""
    recipe = like or SHAPES.get(named.lower())
    if recipe is None:
        raise UserError(
            f"{named or 'the model'}: its shape is in {draft.kind}'s Python code",
            where=where,
            rule="the file names a model; its layers and widths are not in it",
            fix="--like RECIPE of the same shape, or --from its config.json for the model and copy the rest",
        )
    model = load(recipe).recipe.model.model_dump(mode="json", exclude_defaults=True)
    draft.set("model", model | draft.values.get("model", {}), where, named, f"the shape of {recipe}")
