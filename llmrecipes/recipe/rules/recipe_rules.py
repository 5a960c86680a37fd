"""Rules between keys of one recipe. Rules that depend on the number of ranks are checked by the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llmrecipes.nested import leaves
from llmrecipes.recipe import step_parts
from llmrecipes.recipe.derived import adapters, freezing, layer_pattern, shape
from llmrecipes.recipe.derived.degrees import divisors, multiples
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.engines import DEEPSPEED, engine_name, unknown_engine
from llmrecipes.recipe.rules import (
    batch_rules,
    checkpoint_rules,
    data_rules,
    distill_rules,
    extra_rules,
    layer_kinds,
    layout_rules,
    moe_rules,
    optimizer_kinds,
    optimizer_rules,
    preference_rules,
    qat_rules,
    regularisation_rules,
    search_rules,
    stage_rules,
    zero_rules,
)
from llmrecipes.recipe.schema import Model, Recipe
from llmrecipes.recipe.sections.only_with import only_with
from llmrecipes.recipe.sections.plugins import MetricSink, declared, settings
from llmrecipes.recipe.sections.source import RowSource
from llmrecipes.recipe.speedups import features, recompute
from llmrecipes.redact import has_secret

CONVERSATIONS = ("docstrings", "jsonl", "parquet", "hub")
"""Types of sources that have conversations."""


def chat_sources(recipe: Recipe) -> Iterator[Problem]:
    """Whether the sources have what is read of them: text, or conversations."""
    for index, source in enumerate(recipe.data.sources):
        key = f"data.sources.{index}"
        if recipe.data.chat is None:
            if source.type == "docstrings":
                yield Problem(
                    f"{key}.type",
                    "docstrings without data.chat",
                    "docstrings sources contain questions and answers, not plain text",
                    "data.chat: {}, or type stdlib",
                )
            continue
        if source.type not in CONVERSATIONS:
            yield Problem(
                f"{key}.type",
                f"{source.type} with data.chat",
                f"conversations must come from {', '.join(CONVERSATIONS)}",
                "type jsonl, or remove data.chat",
            )
        if isinstance(source, RowSource) and source.text_key != "text":
            yield Problem(
                f"{key}.text_key",
                f"{source.text_key!r} with data.chat",
                "the columns of conversations are set in data.chat",
                "data.chat.messages_key, or data.chat.prompt_key and data.chat.completion_key",
            )


def chat_length(recipe: Recipe) -> Iterator[Problem]:
    """The longest conversation fits into one sequence."""
    chat = recipe.data.chat
    holds = recipe.model.seq_length + 1
    if chat is None or chat.max_length is None:
        return
    rule = "max_length must be from 2 to model.seq_length + 1"
    if chat.preference is not None and chat.packing:
        holds = recipe.model.seq_length // 2 + 1
        rule = "with packing, both answers of a pair, each with the prompt, must fit in one sequence"
    if not 1 < chat.max_length <= holds:
        yield Problem(
            "data.chat.max_length",
            f"{chat.max_length} tokens, but a sequence holds {holds}",
            rule,
            f"max_length {holds}, or remove it",
        )


def chat_template(recipe: Recipe) -> Iterator[Problem]:
    """A template comes from one place."""
    chat = recipe.data.chat
    if chat is not None and chat.template is not None and chat.chat_template is not None:
        yield Problem(
            "data.chat.template",
            f"{chat.template} with data.chat.chat_template",
            "use either a built-in template or a file",
            "remove one of template and chat_template",
        )


def packs_in_local_layers(recipe: Recipe) -> tuple[str, str] | None:
    """A key with which only the local layers keep packed conversations apart, and the reason."""
    if recipe.layout.micro_batch_size > 1:
        return (
            f"layout.micro_batch_size {recipe.layout.micro_batch_size}",
            "packed conversations form a single sequence",
        )
    if recipe.model.multi_latent_attention:
        return "model.multi_latent_attention true", "latent attention does not support packed sequences"
    if recipe.train.precision == "fp32":
        return "train.precision fp32", "attention to packed conversations needs 16 bits"
    if engine_name(recipe) == DEEPSPEED:
        return "engine deepspeed", "the engine deepspeed does not support packed sequences"
    return None


def chat_packing(recipe: Recipe) -> Iterator[Problem]:
    """What cannot keep the conversations of one sequence apart."""
    chat = recipe.data.chat
    if chat is None or not chat.packing:
        return
    local = packs_in_local_layers(recipe)
    obstacles = {
        "model.transformer_impl": (
            recipe.model.transformer_impl == "transformer_engine" and local is not None,
            f"with {local[0]}, only local layers separate packed conversations: in TransformerEngine's, {local[1]}"
            if local
            else "",
            "transformer_impl local or auto",
        ),
        "model.mtp_num_layers": (
            recipe.model.mtp_num_layers,
            "multi-token prediction would predict into the next conversation",
            "remove mtp_num_layers",
        ),
        "layout.context_parallel_size": (
            recipe.layout.context_parallel_size > 1,
            "context-parallel ranks split a sequence regardless of where conversations begin",
            "context_parallel_size 1",
        ),
    }
    for key, (violated, rule, fix) in obstacles.items():
        if violated:
            yield Problem(key, "set with data.chat.packing", rule, f"{fix}, or data.chat.packing false")


def chat_objectives(recipe: Recipe) -> Iterator[Problem]:
    """What trials are compared by."""
    if recipe.data.chat and recipe.search and "valid_bits_per_byte" in recipe.search.objectives:
        yield Problem(
            "search.objectives",
            "valid_bits_per_byte with data.chat",
            "the loss is over answers only, but bits per byte are over the whole text",
            "valid_loss",
        )


# 256 bytes and the end-of-document token: a smaller byte-level vocabulary cannot encode every text.
MIN_BPE_VOCAB = 257


def check(recipe: Recipe) -> list[Problem]:
    """All violated rules, each with the values, the rule as text and the nearest valid value."""
    base = recipe.model_copy(update={"stages": ()})
    problems = [problem for rule in _RULES for problem in rule(base)] + distill_rules.of_teacher(base, check)
    if not recipe.stages or problems:
        return problems
    of_each = (*_RULES, lambda each: iter(distill_rules.of_teacher(each, check)))
    return (
        stage_rules.check(recipe) or list(stage_rules.in_stages(recipe, of_each)) or list(stage_rules.elastic(recipe))
    )


def _heads(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads and not model.multi_latent_attention:
        yield Problem(
            "model.num_attention_heads",
            f"{heads} heads do not divide hidden_size {model.hidden_size}",
            "num_attention_heads must divide hidden_size, unless kv_channels is set",
            f"{divisors(model.hidden_size, heads)} heads, or hidden_size {multiples(model.hidden_size, heads)}",
        )
    groups = model.num_query_groups
    if groups is not None and heads % groups:
        yield Problem(
            "model.num_query_groups",
            f"{groups} query groups do not divide {heads} heads",
            "num_query_groups must divide num_attention_heads",
            f"num_query_groups {divisors(heads, groups)}",
        )


def _positions(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.max_position_embeddings is not None and model.seq_length > model.max_position_embeddings:
        yield Problem(
            "model.seq_length",
            f"{model.seq_length} is longer than max_position_embeddings {model.max_position_embeddings}",
            "seq_length must be at most max_position_embeddings",
            f"seq_length {model.max_position_embeddings}, or remove max_position_embeddings",
        )
    rope = model.position_embedding_type == "rope"
    if model.rope_scaling and not rope:
        yield Problem(
            "model.rope_scaling",
            f"true with position_embedding_type {model.position_embedding_type}",
            "rope_scaling needs position_embedding_type rope",
            "position_embedding_type rope, or rope_scaling false",
        )
    if model.rotary_seq_len_interpolation_factor is not None and (not rope or model.rope_scaling):
        yield Problem(
            "model.rotary_seq_len_interpolation_factor",
            f"set with position_embedding_type {model.position_embedding_type}, rope_scaling "
            f"{str(model.rope_scaling).lower()}",
            "linear interpolation is only used with position_embedding_type rope and rope_scaling false",
            "remove it",
        )
    yield from _yarn(model)
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    rotated = int(channels * model.rotary_percent)
    rotates = model.position_embedding_type != "learned_absolute"
    if rotates and channels and not model.multi_latent_attention and (rotated < 2 or rotated % 2):
        yield Problem(
            "model.rotary_percent",
            f"{model.rotary_percent:g} of {channels} channels per head is {rotated}",
            "rotary embeddings rotate pairs: the number of rotated channels must be even and at least 2",
            "an even kv_channels with rotary_percent 1",
        )


def _yarn(model: Model) -> Iterator[Problem]:
    if model.position_embedding_type != "yarn":
        names = tuple(name for name in Model.model_fields if name.startswith("yarn_"))
        yield from moe_rules.belongs(model, names, "YaRN", "position_embedding_type yarn")
        return
    for name, value in (
        ("yarn_rotary_scaling_factor", 4.0),
        ("yarn_original_max_position_embeddings", model.seq_length),
    ):
        if getattr(model, name) is None:
            yield Problem(
                f"model.{name}",
                "unset with position_embedding_type yarn",
                "YaRN needs yarn_rotary_scaling_factor and yarn_original_max_position_embeddings",
                f"{name} {value}",
            )
    if model.rotary_percent != 1:
        yield Problem(
            "model.rotary_percent",
            f"{model.rotary_percent:g} with position_embedding_type yarn",
            "megatron-core's YaRN must rotate all channels of a head",
            "rotary_percent 1, or position_embedding_type rope",
        )


def _loss_scale(recipe: Recipe) -> Iterator[Problem]:
    train = recipe.train
    if train.min_loss_scale > train.initial_loss_scale:
        yield Problem(
            "train.min_loss_scale",
            f"{train.min_loss_scale:g} is above initial_loss_scale {train.initial_loss_scale:g}",
            "min_loss_scale must be at most initial_loss_scale",
            f"min_loss_scale {train.initial_loss_scale:g}",
        )


def _overlap(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.layout
    if not parallel.overlap_param_gather:
        return
    for name in ("overlap_grad_reduce", "use_distributed_optimizer"):
        if not getattr(parallel, name):
            yield Problem(
                "layout.overlap_param_gather",
                f"true with {name} false",
                "overlap_param_gather needs overlap_grad_reduce and use_distributed_optimizer",
                f"layout.{name} true",
            )


def _vocabulary(recipe: Recipe) -> Iterator[Problem]:
    if recipe.data.tokenizer.type == "bpe" and recipe.model.vocab_size < MIN_BPE_VOCAB:
        yield Problem(
            "model.vocab_size",
            f"{recipe.model.vocab_size} for a bpe tokenizer",
            f"a byte-level BPE needs at least {MIN_BPE_VOCAB} tokens: 256 bytes and the end of a document",
            f"model.vocab_size {MIN_BPE_VOCAB}",
        )


def _spikes(recipe: Recipe) -> Iterator[Problem]:
    faults = recipe.faults
    if faults.loss_spike_action != "none" and engine_name(recipe) == DEEPSPEED:
        yield Problem(
            "faults.loss_spike_action",
            f"{faults.loss_spike_action} with engine deepspeed",
            "DeepSpeed updates the weights before the loss and the gradient norm of a step are known",
            "loss_spike_action none, or engine megatron",
        )
    save = recipe.checkpoint.save_interval
    kept = max(recipe.checkpoint.most_recent_k, 2)
    if faults.loss_spike_action == "rewind" and (kept - 1) * save < faults.loss_spike_rewind_steps:
        enough = 1 - (-faults.loss_spike_rewind_steps // save)
        yield Problem(
            "faults.loss_spike_rewind_steps",
            f"{faults.loss_spike_rewind_steps} with {kept} checkpoints, {save} steps apart",
            "one of the kept checkpoints must be that old: (most_recent_k - 1) × save_interval steps or more",
            f"checkpoint.most_recent_k {enough}, or a smaller loss_spike_rewind_steps",
        )
    needed: dict[str, tuple[str, ...]] = {
        "loss_spike_window": ("skip", "rewind"),
        "loss_spike_sigmas": ("skip", "rewind"),
        "loss_spike_rewind_steps": ("rewind",),
        "loss_spike_max_rewinds": ("rewind",),
    }
    for name, actions in needed.items():
        value = getattr(faults, name)
        if value != type(faults).model_fields[name].default and faults.loss_spike_action not in actions:
            yield Problem(
                f"faults.{name}",
                f"{value} with loss_spike_action {faults.loss_spike_action}",
                f"{name} is only used with loss_spike_action {' or '.join(actions)}",
                f"loss_spike_action {actions[-1]}, or remove {name}",
            )


def _same_results(recipe: Recipe) -> Iterator[Problem]:
    key = "check_results_across_dp_replicas_interval"
    interval = recipe.faults.check_results_across_dp_replicas_interval
    parallel = recipe.layout
    tensor = recipe.layout.tensor_model_parallel_size
    if interval is None:
        return
    if recipe.dpo is not None:
        yield Problem(f"faults.{key}", f"{interval} with dpo", "the comparison runs fixed tokens, not pairs of answers",
                      f"remove {key}")  # fmt: skip
    split = parallel.context_parallel_size > 1 or parallel.expert_tensor_parallel_size not in (None, tensor)
    if parallel.expert_model_parallel_size > 1 and split:
        yield Problem(
            f"faults.{key}",
            f"{interval} with expert_model_parallel_size {parallel.expert_model_parallel_size}",
            "ranks that hold the same experts must compute the same tokens: no context parallelism, and "
            "expert_tensor_parallel_size unset or equal to tensor_model_parallel_size",
            f"remove {key}",
        )


def _secrets(recipe: Recipe) -> Iterator[Problem]:
    def has_mappings(items: list[object]) -> bool:
        return isinstance(items[0], dict)

    for name, value in leaves(recipe.model_dump(mode="json"), enter=has_mappings):
        if isinstance(value, str) and has_secret(value) and name.rpartition(".")[2] != "storage":  # search_rules has it
            yield Problem(
                name,
                "contains a password or token",
                "recipes are stored with every run",
                "use an environment variable or credentials file of that service",
            )


def obstacle_to_chunks(recipe: Recipe) -> tuple[str, str] | None:
    """A key with which the loss cannot be computed in chunks, and the reason."""
    if recipe.distill:
        return "distill", "the distance to a teacher needs all logits of a micro-batch"
    if recipe.dpo:
        return "dpo", "preference losses need all tokens of an answer at once"
    if recipe.layout.zero is not None and recipe.layout.zero.stage == 3:
        return (
            "layout.zero.stage 3",
            "ZeRO 3 gathers the output weight only in the output layer's own forward and backward pass",
        )
    return None


def _loss_chunks(recipe: Recipe) -> Iterator[Problem]:
    obstacle = obstacle_to_chunks(recipe)
    if recipe.layout.loss_chunk_tokens and obstacle is not None:
        what = f"{recipe.layout.loss_chunk_tokens} with {obstacle[0]}"
        yield Problem("layout.loss_chunk_tokens", what, obstacle[1], "remove loss_chunk_tokens")
    unchunked = recipe.layout.loss_chunk_tokens == 0 or obstacle is not None
    if recipe.train.z_loss_coeff and unchunked:
        yield Problem(
            "train.z_loss_coeff",
            f"{recipe.train.z_loss_coeff:g} with {obstacle[0] if obstacle else 'layout.loss_chunk_tokens 0'}",
            "the z-loss needs the loss in chunks",
            "remove z_loss_coeff" if obstacle else "remove loss_chunk_tokens",
        )


def _sink_settings(recipe: Recipe) -> Iterator[Problem]:
    tracking = recipe.tracking
    section = type(recipe.tracking)
    for sink in declared(section, MetricSink):
        for name in settings(section, sink):
            value = getattr(tracking, name)
            if value == section.model_fields[name].default:
                continue
            if not getattr(tracking, sink):
                yield Problem(
                    f"tracking.{name}",
                    f"{value!r} with {sink} false",
                    f"{name} is only used with tracking.{sink} true",
                    f"remove {name}, or tracking.{sink} true",
                )
            elif isinstance(value, str) and not value.strip():
                yield Problem(f"tracking.{name}", "empty", f"{name} must not be empty", f"remove {name}")


_RULES: tuple[Callable[[Recipe], Iterator[Problem]], ...] = (
    unknown_engine, only_with, _heads, _positions, optimizer_rules.learning_rate, optimizer_rules.schedule,
    optimizer_rules.groups, batch_rules.rules, recompute.rules,
    _loss_chunks, _loss_scale, _overlap, data_rules.characters, data_rules.steps, data_rules.held_out_sets,
    data_rules.by_source,
    data_rules.fill_in_the_middle, data_rules.token_sets, data_rules.monitored,
    data_rules.curriculum,
    checkpoint_rules.retention, checkpoint_rules.also_export, checkpoint_rules.copies,
    _vocabulary, _spikes, _same_results, _secrets, _sink_settings,
    layer_pattern.unread,
    moe_rules.experts, moe_rules.dispatcher, moe_rules.latent_attention, moe_rules.multi_token_prediction,
    shape.mup_rules, adapters.rules, freezing.rules, distill_rules.rules, preference_rules.rules, chat_sources,
    qat_rules.rules, chat_template, chat_length, chat_packing, chat_objectives, regularisation_rules.adversarial,
    regularisation_rules.layer_drop,
    layer_kinds.rules,
    layout_rules.tensor, layout_rules.sequence, layout_rules.yarn, layout_rules.pipeline,
    layout_rules.expert, layout_rules.elastic,
    zero_rules.engine, zero_rules.optimizer_sharding, zero_rules.pipeline, zero_rules.unsupported, zero_rules.offload,
    step_parts.unsupported,
    zero_rules.stages, zero_rules.zeropp, zero_rules.quantized, zero_rules.precision, zero_rules.extra,
    search_rules.check,
    features.rules, extra_rules.rules, optimizer_rules.types, optimizer_rules.qk_clip, optimizer_kinds.rules,
)  # fmt: skip
