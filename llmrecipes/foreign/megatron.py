"""Megatron-LM's arguments as a recipe (`megatron/training/arguments.py` of megatron-core 0.19 and before)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.foreign.draft import Draft, key_named, plain
from llmrecipes.foreign.shell import UNKNOWN, arguments, read_script
from llmrecipes.recipe.derived.layer_pattern import ATTENTION, LATENT, keys_of
from llmrecipes.recipe.reading.keys import keys
from llmrecipes.recipe.rules.megatron_lm import FIXED
from llmrecipes.recipe.rules.moe_rules import LATENT_YARN

DEFAULTS: Mapping[str, Any] = {
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "optimizer.weight_decay": 0.01,
    "optimizer.adam_beta2": 0.999,
    "scheduler.lr_decay_style": "linear",
    "train.eval_iters": 100,
    "train.log_interval": 100,
    "data.num_workers": 2,
    "checkpoint.async_save": False,
    "layout.use_distributed_optimizer": False,
}
"""Megatron-LM's defaults that a recipe does not share. A test compares all of them with its parser."""
DEFAULTS_IF: Mapping[str, tuple[str, Any, Any]] = {
    "train.initial_loss_scale": ("train.precision", "fp16", 2.0**32),
    "scheduler.lr_wsd_decay_style": ("scheduler.lr_decay_style", "WSD", "exponential"),
    "optimizer.muon_momentum": ("optimizer.optimizer", "muon", 0.9),
    "optimizer.muon_num_ns_steps": ("optimizer.optimizer", "muon", 5),
    "model.kv_lora_rank": ("model.multi_latent_attention", True, 32),
    "model.rotary_scaling_factor": ("model.rope_type", "yarn", 1.0),
}
"""Defaults that matter only where another key has a value: (key, value, default)."""
GPT2 = ("openai-community/gpt2", 50257)
"""The tokenizer that Megatron-LM reads from gpt2-vocab.json and gpt2-merges.txt, and its vocabulary."""

_LAUNCH = "llmrecipes submit starts the ranks and sets their network"
_STORE = "a run saves and resumes in runs/RECIPE/RUN-ID, by its name"
_LOGS = "metrics.jsonl and the sinks of `tracking` have it"
_SPEED = "follows from the device: llmrecipes plan --speed"
_ALWAYS = "always so here"
REASONS: tuple[tuple[str, str], ...] = (
    (r"calculate_per_token_loss|use_mcore_models|moe_grouped_gemm|check_for_nan.*|no_create_attention_mask.*"
     r"|use_checkpoint_opt_param_scheduler|exit_signal_handler.*", _ALWAYS),
    (r"n?proc_per_node|nnodes|node_rank|master_\w+|rdzv\w*|local_rank|distributed_\w+|\w*gloo\w*|use_tp_pp_dp_mapping"
     r"|lazy_mpu\w*|\w*nccl_ub|inprocess_\w+|ft_\w+|enable_ft_package|DDP_impl|use_sharp|sharp_\w+", _LAUNCH),
    (r"save|load|finetune|\w*ckpt\w*|\w*checkpoint_args|no_(save|load)_\w+|exit_\w+|async_strategy|replication\w*"
     r"|auto_detect\w*|override_opt\w*|verify_integrity", _STORE),
    (r"log_\w+|logging_level|timing_\w+|profile\w*|use_pytorch_profiler|tensorboard_\w+|no_log_\w+|\w*one_logger\w*"
     r"|record_memory\w*|memory_snapshot\w*|nvtx\w*|app_tag\w*|enable_experimental|barrier_with\w*", _LOGS),
    (r"\w*fusion\w*|\w*fuser|use_flash_attn|attention_backend|transformer_impl|tp_comm\w*|cross_entropy\w*|\w*persist\w*"
     r"|attention_softmax_in_fp32|te_rng_tracker|use_te\w*|empty_unused\w*|align_\w+|defer_embedding\w*|overlap_p2p\w*"
     r"|manual_gc\w*|ddp_\w+|use_cpu_initialization|moe_(flex|deepep|hybridep|enable_deepep|ncclep)\w*|cuda_graph\w*"
     r"|high_priority\w*|fp8_(amax|margin|interval|param)\w*|optimizer_cpu_offload|fsdp_\w+|use_megatron_fsdp", _SPEED),
    (r"(no_)?mmap_bin_files|data_cache_path|num_dataset_builder_threads|dataloader_type|\w*data_cache\w*|reset_\w+"
     r"|eod_mask_loss|dataloader_\w+|mid_level\w*", "data is prepared and cached by llmrecipes prepare"),
    (r"merge_file|vocab_extra_ids|tokenizer_\w+|null_tokenizer\w*|tiktoken\w*|trust_remote_code|pad_vocab_size",
     "the tokenizer is data.tokenizer"),
)  # fmt: skip
"""Patterns of arguments that are left out, and why."""
_OPTIONS = {
    "fp8_format": "fp8",
    "norm_epsilon": "layernorm_epsilon",
    "no_rope_fusion": "no_apply_rope_fusion",
    "muon_no_split_qkv": "no_muon_split_qkv",
    "num_experts": "num_moe_experts",
    "disable_bias_linear": "no_add_bias_linear",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "save_retain_interval": "keep_interval",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "model_parallel_size": "tensor_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "cuda_graph_scope": "cuda_graph_modules",
}
"""Options whose value has another name. Names of other programs are not read: `top_k` is that of generated text."""
LISTS = re.compile(
    r"(?:train_|valid_|test_)?data_path|rampup_batch_size|moe_router_load_balancing_type|moe_aux_loss_coeff|spec"
    r"|(?:recompute|offload|cuda_graph)_modules|cuda_graph_scope|\w+_context_parallel_sizes|mrope_section|profile_ranks"
    r"|iterations_to_skip|\w+_parsers|high_priority_stream_groups|ddp_param_name_patterns\w+|cp_comm_type"
    r"|validation_set_names|tokenizer_special_tokens|retriever_report_topk_accuracies"
)
"""Options that take several values."""
_FLAGS = (
    r"no_(?!rope_freq|weight_decay_cond)\w+|(?:disable|untie|use)_\w+|bf16|fp16|swiglu|squared_relu|quick_geglu|mock_data"
    r"|group_query_attention|(?:recompute|checkpoint)_activations|init_method_xavier_uniform|grad_reduce_in_bf16"
    r"|accumulate_allreduce_grads_in_fp32"
)
_OTHER_PROGRAMS = re.compile(
    r"pretrain_(?!gpt).*|train_rl|finetune_(?!gpt).*|.*(?:server|generat|inference|export|convert|preprocess|eval).*"
)
"""Python programs beside pretrain_gpt.py whose arguments have another meaning."""
_OTHER_MODELS: Mapping[str, str] = {
    "encoder_num_layers": "", "decoder_num_layers": "", "decoder_seq_length": "", "bert_no_binary_head": "",
    "is_hybrid_model": "", "perform_rl_step": "",
    "tokenizer_type": "BertWordPiece.*", "model_provider": "(?!gpt).*", "spec": ".*(?:mamba|hybrid).*",
}  # fmt: skip
"""Arguments of models and trainings that no recipe has, with the values for which they are; empty: any."""
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Names of the argument that says the layers of `pretrain_hybrid.py` (before, `pretrain_mamba.py`)."""
_HYBRID = ("pretrain_hybrid", "pretrain_mamba")
_LATENT = {"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", *LATENT_YARN}
_SWITCHES = {
    "untie_embeddings_and_output_weights": ("model.share_embeddings_and_output_weights", False),
    "init_method_xavier_uniform": ("model.init_method", "xavier_uniform"),
    "use_rotary_position_embeddings": ("model.position_embedding_type", "rope"),
    "use_rope_scaling": ("model.rope_scaling", True),
    "recompute_activations": ("layout.recompute_granularity", "selective"),
    "checkpoint_activations": ("layout.recompute_granularity", "full"),
}
_ACTIVATIONS = {"swiglu": ("silu", True), "quick_geglu": ("quick_gelu", True), "squared_relu": ("squared_relu", False)}
"""The function, and whether it is gated; the first that is given counts."""
_TRAINED_AS = ("learned_absolute", "rope", "yarn")


def from_script(text: str, draft: Draft, ranks: int, path: Path | None = None) -> None:
    """Translate a command line or a shell script, which is the file `path`.

    Raises:
        UserError: it has no arguments, or runs another program than pretrain_gpt.py.
    """
    script = read_script(text, path)
    given = arguments(script.words, flags(), LISTS)
    _require_gpt(script.program, given)
    unknown = given.pop("", [])
    if not given:
        raise UserError("no arguments found", where="--from", rule="a command line with --num-layers and others")
    translate({name: _value(name, words) for name, words in given.items()}, draft, ranks)
    for word in dict.fromkeys(unknown):
        draft.leave(word, "", "only the shell knows its value: add the arguments that it holds", differs=True)
    for name, words in arguments(script.launcher, flags(), LISTS).items():
        draft.leave(_option(name) if name else "launcher", " ".join(words), _LAUNCH)
    if script.program and Path(script.program).name != "pretrain_gpt.py":
        draft.leave(script.program, "", "read as pretrain_gpt.py")
    for command, why in script.unread:
        draft.leave(command, "", why, differs=command.startswith("source"))
    branches: dict[int, list[str]] = {}
    for option, line in script.skipped:
        branches.setdefault(line, []).append(option)
    for line, options in branches.items():
        why = f"in a branch or loop, line {line}, which is not followed: add what applies"
        names = [name.lstrip("-").replace("-", "_") for name in options]
        wanted = tuple(key for name in names if (key := key_named(_OPTIONS.get(name, name))))
        draft.leave(" ".join(options), "", why, differs=True, wanted=wanted)


def flags() -> re.Pattern[str]:
    """Options without a value."""
    switches = (dotted.rpartition(".")[2] for dotted, key in keys().items() if key.takes.startswith("true or false"))
    return re.compile("|".join((_FLAGS, *switches)))


def _require_gpt(program: str, given: Collection[str]) -> None:
    name = Path(program).stem
    layers_are_given = name in _HYBRID and any(pattern in given for pattern in PATTERNS)
    if _OTHER_PROGRAMS.fullmatch(name) and not layers_are_given:
        raise _refused(f"{name}.py does not train a GPT", "--from")


def _refused(what: str, where: str) -> UserError:
    return UserError(
        what, where=where, rule="recipes have the models of Megatron-LM's pretrain_gpt.py: decoders with attention",
        fix="the command of a pretrain_gpt.py, or llmrecipes new NAME --like RECIPE",
    )  # fmt: skip


def from_mapping(values: Mapping[str, Any], draft: Draft, ranks: int) -> None:
    """Translate arguments in a YAML file, with or without `--`."""
    nested = values.get("MODEL_ARGS")
    named = nested if isinstance(nested, Mapping) else values
    # In a list of options, true stands for one without a value; false, for one that is not there.
    options = {str(name).lstrip("-").replace("-", "_"): value for name, value in named.items()}
    lists = {name: value for name, value in options.items() if isinstance(value, str) and value[:1] == "["}
    options |= {name: _value(name, value.strip("[]").replace(",", " ").split()) for name, value in lists.items()}
    translate({name: value for name, value in options.items() if value not in (False, None)}, draft, ranks)


def translate(given: Mapping[str, Any], draft: Draft, ranks: int) -> None:
    """Write what arguments say, with Megatron-LM's defaults for the others."""
    given = _layers(dict(given), draft)
    for name, pattern in _OTHER_MODELS.items():
        if name in given and re.fullmatch(pattern or ".*", str(given[name])):
            raise _refused(f"{given[name]}: not of a GPT", _option(name))
    left = dict(given)
    for step in (
        _unknown, _precision, _switches, _activation, _attention, _positions, _experts, _layer_lists, _lengths, _batch,
        _data, _unlike,
    ):  # fmt: skip
        step(left, draft, ranks)
    for name, value in left.items():
        _by_name(name, value, draft)
    _defaults(given, draft)


def _defaults(given: Mapping[str, Any], draft: Draft) -> None:
    for key, default in DEFAULTS.items():
        if key != "train.eval_iters" or given.get("eval_iters") != 0:
            draft.default(key, default)
    for key, (other, needed, default) in DEFAULTS_IF.items():
        if draft.get(other) == needed:
            draft.default(key, default)
    if draft.get("model.num_moe_experts"):
        draft.default("model.moe_token_dispatcher_type", "allgather")
        if "moe_router_dtype" not in given:
            draft.set("model.moe_router_dtype", None, why="Megatron-LM's default")


def _by_name(name: str, value: Any, draft: Draft) -> None:
    inverted = re.fullmatch(r"(?:no|disable)_(\w+)", _OPTIONS.get(name, name))
    if inverted and draft.take(inverted[1], False, synonyms=False):
        row = draft.rows.pop()
        draft.set(row.key, False, _option(name), "")
        return
    ours = _OPTIONS.get(name, name)
    if draft.take(ours, _typed(ours, value), synonyms=False):
        row = draft.rows.pop()
        draft.set(row.key, row.value, _option(name), value)
        return
    why = next((why for pattern, why in REASONS if re.fullmatch(pattern, name)), "a recipe has no such key")
    draft.leave(_option(name), value, why, differs=_matters(name))


def _typed(name: str, value: Any) -> Any:
    """A single value as the list that a key takes."""
    takes = next((key.takes for dotted, key in keys().items() if dotted.endswith(f".{name}")), "")
    return [value] if re.match("(?:null or )?a (?:non-empty )?list", takes) and not isinstance(value, list) else value


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _matters(name: str) -> bool:
    """Whether an argument that is left out changes the model or what it learns."""
    known = any(re.fullmatch(pattern, name) for pattern, _ in REASONS)
    return not known or name in FIXED


def _value(name: str, words: list[str]) -> Any:
    """What an option's words mean; True for an option without any."""
    if name == "step_batch_size_schedule":
        return " ".join(words)
    values = [plain(word) for word in words]
    return True if not values else values[0] if len(values) == 1 else values


def _unknown(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    for name in [name for name, value in left.items() if UNKNOWN in str(value) and name != "vocab_file"]:
        key = "data.sources" if name == "data_path" else key_named(_OPTIONS.get(name, name))
        why = "only the shell knows its value" + (f": set {key}" if key and _matters(name) else "")
        wanted = (key,) if key else ()
        draft.leave(_option(name), left.pop(name), why, differs=_matters(name), wanted=wanted)


def _take(left: dict[str, Any], draft: Draft, name: str, key: str, value: Any, why: str = "") -> None:
    draft.set(key, value, _option(name), left.pop(name), why)


def _precision(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    name = next((name for name in ("bf16", "fp16") if left.get(name)), "")
    if name:
        _take(left, draft, name, "train.precision", name)
    else:
        draft.default("train.precision", "fp32", "Megatron-LM's default: neither --bf16 nor --fp16")
    if left.pop("grad_reduce_in_bf16", False):
        draft.set("train.grad_reduce_in_fp32", False, "--grad-reduce-in-bf16", "")
    elif name == "fp16" and not left.get("accumulate_allreduce_grads_in_fp32"):
        draft.default("train.grad_reduce_in_fp32", False)


def _switches(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    for name, (key, value) in _SWITCHES.items():
        if left.pop(name, False):
            draft.set(key, value, _option(name), "")


def _activation(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    name = next((name for name in _ACTIVATIONS if left.pop(name, False)), "")
    if name:
        function, gated = _ACTIVATIONS[name]
        draft.set("model.activation_func", function, _option(name), "")
        if gated:
            draft.set("model.gated_linear_unit", True, _option(name), "")
        if name == "swiglu" and "ffn_hidden_size" not in left and isinstance(left.get("hidden_size"), int):
            width = int(4 * left["hidden_size"] * 2 / 3 / 64) * 64
            draft.set("model.ffn_hidden_size", width, why="Megatron-LM's default with --swiglu")
    elif not any(left.get(name) for name in ("no_bias_gelu_fusion", "disable_bias_linear", "openai_gelu")):
        draft.set("model.activation_func", "gelu_tanh", why="Megatron-LM's default: bias_gelu_fusion is the tanh form")


def _attention(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    groups = left.pop("num_query_groups", None)
    if left.pop("group_query_attention", False):
        draft.set("model.num_query_groups", groups or 1, "--num-query-groups", groups)
    elif groups is not None:
        draft.leave("--num-query-groups", groups, "no effect without --group-query-attention")
    latent = left.get("multi_latent_attention")
    if latent and "rope_type" not in left:
        draft.set("model.rope_type", "yarn", why="Megatron-LM's default with --multi-latent-attention")
    why = "no effect with --multi-latent-attention" if latent else "no effect without --multi-latent-attention"
    for name in sorted(left.keys() & ({"kv_channels"} if latent else _LATENT)):
        draft.leave(_option(name), left.pop(name), why)


def _positions(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    kind = left.get("position_embedding_type")
    if kind is not None and kind not in _TRAINED_AS:
        value = left.pop("position_embedding_type")
        draft.leave("--position-embedding-type", value, f"one of {', '.join(_TRAINED_AS)}", differs=True)
    if left.pop("no_position_embedding", False):
        draft.leave(
            "--no-position-embedding", "", "no effect beside rotary embeddings", differs=kind not in ("rope", "yarn")
        )


def _layers(given: dict[str, Any], draft: Draft) -> dict[str, Any]:
    """Write what a pattern says of the layers; the arguments without it and those that it replaces."""
    name = next((name for name in PATTERNS if name in given), None)
    if name is None:
        return given
    pattern = str(given.pop(name))
    if UNKNOWN in pattern:
        raise UserError("only the shell knows its value", where=_option(name), rule="the layers must be known",
                        fix="write the pattern in the command")  # fmt: skip
    if given.get("multi_latent_attention") and ATTENTION in pattern:
        raise _refused(f"{ATTENTION} with --multi-latent-attention", _option(name))
    try:
        stages = given.get("pipeline_model_parallel_size", 1)
        values = keys_of(pattern, stages if isinstance(stages, int) and stages > 0 else 1,
                         mixture=bool(given.get("num_experts")))  # fmt: skip
    except UserError as error:
        raise UserError(error.what, where=_option(name), rule=error.rule, fix=error.fix) from error
    for key, value in values.items():
        draft.set(key, value, _option(name), pattern)
    for other in ("num_layers", "mtp_num_layers", "moe_layer_freq", "is_hybrid_model", "spec"):
        if other in given:
            draft.leave(_option(other), given.pop(other), f"{_option(name)} says the layers, two symbols each")
    return given | ({"multi_latent_attention": True} if pattern.startswith(LATENT) else {})


def _layer_lists(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    window = left.get("window_size")
    if isinstance(window, str):
        _take(left, draft, "window_size", "model.window_size", [plain(part) for part in window.strip("()").split(",")])
    for option in ("window_attn_skip_freq", "no_rope_freq", "moe_layer_freq"):
        if isinstance(layers := left.get(option), str):
            _take(left, draft, option, f"model.{option}", _pattern(layers, option))


def _experts(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    if not left.get("num_experts"):
        left.pop("num_experts", None)
        for name in [name for name in left if name.startswith("moe_")]:
            draft.leave(_option(name), left.pop(name), "no effect without --num-experts")


def _pattern(text: str, name: str) -> Any:
    """`([0]*3+[1]*58)` as a list, which Megatron-LM evaluates."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(number)) if abs(number) < 1 << 14:
                return number
            case ast.List(items):
                return [value(item) for item in items]
            case ast.BinOp(left, ast.Mult(), right):
                return value(left) * value(right)
            case ast.BinOp(left, ast.Add(), right):
                return value(left) + value(right)
        raise ValueError(text)

    try:
        return value(ast.parse(text.strip("'\""), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{text[:80]!r} is not a pattern of layers", where=_option(name), rule="a number, or lists of 0 and 1"
        ) from error


def _batch(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    if "global_batch_size" not in left and isinstance(left.get("micro_batch_size"), int):
        parts = [left.get(f"{kind}_parallel_size", 1) for kind in ("tensor_model", "pipeline_model", "context")]
        replicas = max(1, ranks // max(1, parts[0] * parts[1] * parts[2]))
        why = f"Megatron-LM's default: --micro-batch-size × {replicas} data-parallel ranks"
        draft.set("train.global_batch_size", left["micro_batch_size"] * replicas, why=why)
    growth = left.get("rampup_batch_size")
    if isinstance(growth, str):
        _take(left, draft, "rampup_batch_size", "train.rampup_batch_size", [plain(word) for word in growth.split()])


def _lengths(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    """Numbers of samples as numbers of steps, and shares of the decay as steps."""
    batch = left.get("global_batch_size")
    grows = left.get("rampup_batch_size") or left.get("step_batch_size_schedule")
    for name, key in (
        ("train_samples", "train.train_iters"),
        ("lr_decay_samples", "scheduler.lr_decay_iters"),
        ("lr_warmup_samples", "scheduler.lr_warmup_iters"),
        ("lr_wsd_decay_samples", "scheduler.lr_wsd_decay_iters"),
    ):
        if name not in left:
            continue
        if grows or not isinstance(batch, int) or not isinstance(left[name], int):
            why = "in samples, of a batch that grows or is not set: set the number of steps"
            draft.leave(_option(name), left.pop(name), why, differs=True, wanted=(key,))
            continue
        # Megatron-LM trains on whole batches.
        steps = left[name] // batch
        _take(left, draft, name, key, steps, f"samples / global_batch_size {batch}")
    share = left.get("lr_warmup_fraction")
    decay = left.get("lr_decay_iters") or draft.get("scheduler.lr_decay_iters") or left.get("train_iters")
    decay = decay or draft.get("train.train_iters")
    if share is not None and isinstance(decay, int):
        steps = int(Fraction(str(share)) * decay)
        _take(
            left, draft, "lr_warmup_fraction", "scheduler.lr_warmup_iters", steps, f"{share} × {decay:,} steps of decay"
        )


def _data(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    split = left.pop("split", None)
    if split is not None:
        shares = [float(part) for part in re.findall(r"[0-9.]+", str(split))]
        draft.set("data.split", [*shares, 0.0, 0.0][:3], "--split", split)
    elif "data_path" in left:
        draft.set("data.split", [969.0, 30.0, 1.0], why="Megatron-LM's default with --data-path")
    if left.get("eval_iters") == 0:
        train, *others = draft.get("data.split") or keys()["data.split"].default
        draft.set("data.split", [train, 0.0, sum(others)], "--split", split, "--eval-iters 0: no valid documents")
        draft.leave("--eval-iters", left.pop("eval_iters"), "no evaluation: data.split has no valid documents")
    name = next((name for name in ("data_path", "train_data_path") if name in left), None)
    if name is not None:
        _take(left, draft, name, "data.sources", _blend(left[name]))
    if left.pop("mock_data", False):
        draft.leave(
            "--mock-data", "", "the recipe reads Python's standard library, unless data.sources is set", differs=True
        )
    _tokenizer(left, draft)


def _blend(value: Any) -> list[dict[str, Any]]:
    """Prefixes of .bin and .idx files, each after its weight, or without weights."""
    words = [str(word) for word in value] if isinstance(value, list) else str(value).split()
    numbers = [plain(word) for word in words[::2]]
    weighted = len(words) > 1 and all(isinstance(number, int | float) for number in numbers)
    if not weighted:
        return [{"type": "megatron", "path": word} for word in words]
    return [
        {"type": "megatron", "path": path, "weight": float(weight)}
        for weight, path in zip(numbers, words[1::2], strict=False)
    ]


def _tokenizer(left: dict[str, Any], draft: Draft) -> None:
    kind, path = left.pop("tokenizer_type", None), left.pop("tokenizer_model", None)
    vocabulary = left.pop("vocab_file", None)
    if kind in ("GPT2BPETokenizer", None) and (kind or vocabulary):
        draft.set("data.tokenizer", {"type": "huggingface", "path": GPT2[0]}, "--tokenizer-type", kind,
                  "the same tokens as gpt2-vocab.json and gpt2-merges.txt")  # fmt: skip
        if "vocab_size" not in left:
            draft.set("model.vocab_size", GPT2[1], why="of GPT-2's tokenizer")
        if vocabulary:
            draft.leave("--vocab-file", vocabulary, f"read from {GPT2[0]}")
    elif kind == "HuggingFaceTokenizer" and path:
        draft.set("data.tokenizer", {"type": "huggingface", "path": str(path)}, "--tokenizer-model", path)
    elif kind is not None:
        draft.leave(
            "--tokenizer-type", kind, "only tokenizers of Hugging Face are read: set data.tokenizer", differs=True
        )
        if path is not None:
            draft.leave("--tokenizer-model", path, "see --tokenizer-type", differs=True)
    rows = left.pop("padded_vocab_size", None)
    if rows is not None and "vocab_size" not in left:
        draft.set("model.vocab_size", rows, "--padded-vocab-size", rows)


def _unlike(left: dict[str, Any], draft: Draft, ranks: int) -> None:
    """Arguments that make another model, which recipes cannot describe."""
    for name, needed in FIXED.items():
        if name in left:
            value = left.pop(name)
            if value != needed:
                draft.leave(_option(name), value, f"only {name}={json.dumps(needed)} is supported", differs=True)
    name = "num_layers_per_virtual_pipeline_stage"
    stages = left.get(name)
    pipeline = left.get("pipeline_model_parallel_size", 1)
    layers = left.get("num_layers")
    if isinstance(stages, int) and isinstance(layers, int) and layers % (pipeline * stages) == 0:
        chunks = layers // pipeline // stages
        _take(left, draft, name, "layout.virtual_pipeline_model_parallel_size", chunks,
              f"{layers} layers / {pipeline} stages / {stages}")  # fmt: skip
