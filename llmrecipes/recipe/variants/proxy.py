"""A recipe scaled down so that a laptop runs it in a minute: every option is kept, sizes and degrees are reduced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from llmrecipes.recipe.derived import freezing, stage_layout
from llmrecipes.recipe.derived.batch_schedule import without_ramp
from llmrecipes.recipe.derived.degrees import model_parallel_size, smallest_world
from llmrecipes.recipe.engines import ENGINES, engine_name
from llmrecipes.recipe.rules import qat_rules
from llmrecipes.recipe.rules.distill_rules import rehearsed
from llmrecipes.recipe.rules.layer_kinds import small_no_rope, small_pattern, small_windows
from llmrecipes.recipe.rules.optimizer_rules import small
from llmrecipes.recipe.rules.preference_rules import rehearsed_chat
from llmrecipes.recipe.rules.recipe_rules import MIN_BPE_VOCAB
from llmrecipes.recipe.schema import (
    Data,
    LayoutKeys,
    Lora,
    Model,
    Recipe,
    Scheduler,
    Tracking,
    Train,
)
from llmrecipes.recipe.sections.plugins import DataStep, MetricSink, declared, settings
from llmrecipes.recipe.sections.source import DocstringsSource, StdlibSource
from llmrecipes.recipe.sections.tokenizer_section import BpeTokenizer
from llmrecipes.recipe.sections.zero import Zero
from llmrecipes.recipe.speedups.features import by_rule, needing_a_gpu

MAX_NAME = 63  # characters that the schema allows: a label in Kubernetes


def suffixed(name: str, suffix: str, spare: int = 0) -> str:
    """A recipe's name with a suffix, shortened to leave `spare` characters for more."""
    return name[: MAX_NAME - len(suffix) - spare] + suffix


Device = Literal["cpu", "cuda"]

MAX_DEGREE = 2
MAX_LAYERS = 4
MAX_HEADS = 8
MAX_HEAD_CHANNELS = 16
MAX_ROTATED_CHANNELS = 8
MAX_HIDDEN = 128
MAX_SEQUENCE = 128
MAX_VOCAB = 1024
MAX_EXPERTS, MAX_EXPERT_GROUPS = 8, 4


def small_layout(recipe: Recipe, device: Device) -> LayoutKeys:
    """The recipe's kinds of parallelism, each on two ranks: at most 8, as experts use the dense layers' ranks.

    On a CPU experts are not split, because gloo cannot gather uneven numbers of tokens; the tensor-parallel ranks
    that shared each expert get different experts. A first or last stage with more, as many or fewer layers than the
    others has 2, 1 or 1 of them, and the others have 1, 1 or 2; twice that with virtual stages.
    """
    parallel = recipe.layout
    update: dict[str, Any] = {
        name: min(getattr(parallel, name), MAX_DEGREE)
        for name in (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size",
        )
    }  # fmt: skip
    inner = parallel.expert_tensor_parallel_size
    if recipe.model.num_moe_experts and device == "cuda":
        update["expert_tensor_parallel_size"] = inner and min(inner, MAX_DEGREE)
    elif recipe.model.num_moe_experts:
        update["expert_tensor_parallel_size"] = 1
        if update["tensor_model_parallel_size"] > 1:
            # Without expert parallelism megatron-core splits experts like the dense layers, which gloo cannot do.
            update["expert_model_parallel_size"] = MAX_DEGREE
    chunks = parallel.virtual_pipeline_model_parallel_size
    update["virtual_pipeline_model_parallel_size"] = chunks and MAX_DEGREE
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if first or last:
        other = _other_layers(recipe)
        unit = MAX_DEGREE if chunks else 1
        update["num_layers_in_first_pipeline_stage"] = first and unit * (2 if first > (last or other) else 1)
        update["num_layers_in_last_pipeline_stage"] = last and unit * (2 if last > (first or other) else 1)
    update[stage_layout.KEY] = stage_layout.small(parallel, update["pipeline_model_parallel_size"], MAX_DEGREE)
    return parallel.model_copy(update=update)


def small_model(recipe: Recipe, parallel: LayoutKeys) -> Model:
    """The model for the small layout `parallel`."""
    model = recipe.model
    ranks = parallel.tensor_model_parallel_size
    heads, groups = small_heads(model.num_attention_heads, model.num_query_groups, ranks)
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    small = min(channels, MAX_HEAD_CHANNELS)
    width = model.hidden_size / (model.num_attention_heads * channels)
    hidden = heads * small if model.kv_channels is None else _even(width * heads * small, model.hidden_size)
    sequence = _sequence(model.seq_length, parallel)
    longest = model.max_position_embeddings
    layers = _layers(recipe, parallel)
    shrink = hidden / model.hidden_size
    vocabulary = max(MIN_BPE_VOCAB, min(model.vocab_size, MAX_VOCAB))
    step = min(model.make_vocab_size_divisible_by, 128)
    return model.model_copy(
        update={
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": None if model.kv_channels is None else small,
            "ffn_hidden_size": _scaled(model.ffn_hidden_size, shrink),
            "seq_length": sequence,
            # Twice the sequence if the recipe's table is longer than its sequence, so that it stays longer.
            "max_position_embeddings": None if longest is None else max(sequence, min(longest, 2 * sequence)),
            "rotary_percent": _rotary_percent(model, small),
            **_yarn(model, sequence, parallel),
            **small_windows(model, layers, sequence),
            "no_rope_freq": small_no_rope(model, layers),
            "vocab_size": vocabulary,
            "make_vocab_size_divisible_by": step * ranks if -(-vocabulary // step) * step % ranks else step,
            "transformer_impl": "local" if model.transformer_impl == "local" else "auto",
            "mtp_num_layers": model.mtp_num_layers and 1,
            **(_experts(model, parallel, layers, shrink) if model.num_moe_experts else {}),
            **(_latent(model, shrink) if model.multi_latent_attention else {}),
        }
    )


def small_heads(heads: int, groups: int | None, ranks: int) -> tuple[int, int | None]:
    """At most `MAX_HEADS` heads, divisible by `ranks`, with the same queries per group if that many heads
    allow it."""
    if groups is None or groups == heads:
        small = max(ranks, min(heads, MAX_HEADS) // ranks * ranks)
        return small, None if groups is None else small
    each = heads // groups
    if each > MAX_HEADS or (groups > 1 and 2 * each > MAX_HEADS):
        # Too many to keep the ratio: only keep whether there is one group or several.
        return MAX_HEADS, min(groups, 2)
    small_groups = max(ranks, min(groups, MAX_HEADS // each) // ranks * ranks)
    return small_groups * each, small_groups


def _layers(recipe: Recipe, parallel: LayoutKeys) -> int:
    """Layers for all stages: about `MAX_LAYERS`, at least one per chunk, counting embedding and loss if they count."""
    pieces = parallel.pipeline_model_parallel_size * (chunks := parallel.virtual_pipeline_model_parallel_size or 1)
    if parallel.pipeline_model_parallel_layout:
        return stage_layout.parts_of(parallel.pipeline_model_parallel_layout, stage_layout.LAYER)
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if first or last:
        if first and last:
            return first + last
        of_recipe = recipe.layout
        end = of_recipe.num_layers_in_first_pipeline_stage or of_recipe.num_layers_in_last_pipeline_stage or 0
        return (first or last or 0) + chunks * (2 if end < _other_layers(recipe) else 1)
    if extra := parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split:
        return 2 * pieces - extra
    return max(pieces, min(recipe.model.num_layers, MAX_LAYERS) // pieces * pieces)


def _other_layers(recipe: Recipe) -> int:
    """Layers of a stage without an explicit number; 0 if there is none."""
    parallel = recipe.layout
    ends = (parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage)
    others = parallel.pipeline_model_parallel_size - sum(1 for number in ends if number)
    return (recipe.model.num_layers - sum(number or 0 for number in ends)) // others if others else 0


def _experts(model: Model, parallel: LayoutKeys, layers: int, shrink: float) -> dict[str, Any]:
    """At most `MAX_EXPERTS`, of which two are active if the recipe has more than one active."""
    number, shares = model.num_moe_experts or 1, parallel.expert_model_parallel_size
    small = max(shares, min(number, MAX_EXPERTS) // shares * shares)
    topk, groups, chosen = model.moe_router_topk, model.moe_router_num_groups, model.moe_router_group_topk
    frequency = model.moe_layer_freq
    if small != number:
        topk = min(topk, 2, small)
        if groups and chosen:
            one_each = chosen == groups
            groups = max(size for size in range(1, MAX_EXPERT_GROUPS + 1) if small % size == 0 and size <= groups)
            chosen = groups if one_each else max(1, groups // 2)
            topk = chosen  # one from each
    return {
        "num_moe_experts": small,
        "moe_router_topk": topk,
        "moe_token_dispatcher_type": {"flex": "alltoall"}.get(sent := model.moe_token_dispatcher_type, sent),
        "moe_router_pre_softmax": model.moe_router_pre_softmax or topk == 1,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_ffn_hidden_size": _scaled(model.moe_ffn_hidden_size, shrink),
        "moe_shared_expert_intermediate_size": _scaled(model.moe_shared_expert_intermediate_size, shrink),
        "moe_layer_freq": small_pattern(frequency, layers) if isinstance(frequency, list) else frequency,
    }


def _latent(model: Model, shrink: float) -> dict[str, Any]:
    return {
        "q_lora_rank": _scaled(model.q_lora_rank, shrink),
        "kv_lora_rank": _scaled(model.kv_lora_rank, shrink),
        "qk_head_dim": min(model.qk_head_dim, MAX_HEAD_CHANNELS),
        "qk_pos_emb_head_dim": min(model.qk_pos_emb_head_dim, MAX_ROTATED_CHANNELS),
        "v_head_dim": min(model.v_head_dim, MAX_HEAD_CHANNELS),
    }


def _sequence(length: int, parallel: LayoutKeys) -> int:
    """At most `MAX_SEQUENCE` tokens that context- and sequence-parallel ranks can share."""
    contexts = parallel.context_parallel_size
    shares = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    step = math.lcm(2 * contexts if contexts > 1 else 1, contexts * shares)
    return max(step, min(length, MAX_SEQUENCE) // step * step)


def _yarn(model: Model, sequence: int, parallel: LayoutKeys) -> dict[str, Any]:
    """The context before YaRN: as many times shorter as the sequence, in two chunks for each context-parallel rank."""
    step = 2 * parallel.context_parallel_size
    return {
        name: max(step, length * sequence // model.seq_length // step * step)
        for name, used in (
            ("yarn_original_max_position_embeddings", model.position_embedding_type == "yarn"),
            ("original_max_position_embeddings", model.multi_latent_attention and model.rope_type == "yarn"),
        )
        if used and (length := getattr(model, name)) is not None
    }


def _rotary_percent(model: Model, channels: int) -> float:
    """The recipe's share, or the nearest one that rotates a whole number of pairs of the smaller head."""
    rotated = int(channels * model.rotary_percent)
    rotates = model.position_embedding_type != "learned_absolute"
    if not rotates or model.multi_latent_attention or (rotated >= 2 and rotated % 2 == 0):
        return model.rotary_percent
    return max(2, 2 * (rotated // 2)) / channels


def _scaled(width: int | None, shrink: float) -> int | None:
    return None if width is None else max(8, round(width * shrink / 8) * 8)


def _even(width: float, limit: int) -> int:
    return max(8, min(MAX_HIDDEN, limit, round(width / 8) * 8))


SUFFIX, ITERS = "-smoke", 20
# Elements: of a reduction, of what ZeRO-3 gathers at a time, and of parameters that it leaves whole.
MAX_BUCKET = 1_000_000
MAX_GATHERED = 100_000
MAX_WHOLE = 100
MAX_RANK = 4


def proxy(recipe: Recipe, device: Device = "cpu") -> Recipe:
    """The small version that `smoke` and `verify` train, on at most 8 ranks; `scaled` compares their layouts.

    Kept: norm, positions, activation and gate, biases, tying, grouping of queries, routing of experts, latent
    attention, dropout, initialisation, precision, recomputation, every kind of parallelism, optimizer, shape of the
    schedule, gradient accumulation, local sources. Scaled: sizes, degrees, batch, lengths. Replaced: Hub sources by
    the standard library, the tokenizer by a small BPE, given weights by initial ones, features of GPUs by what rules
    choose, moments in bf16 by fp32, NVMe by main memory. Disabled: torch.compile, ZeRO++ but for quantized weights,
    sinks of experiments.

    Args:
        device: of the ranks; on a CPU experts are not split (`expert_tensor_parallel_size` 1).
    """
    recipe = by_rule(recipe, needing_a_gpu())
    parallel = small_layout(recipe, device)
    model = small_model(recipe, parallel)
    return recipe.model_copy(
        update={
            "name": suffixed(recipe.name, SUFFIX),
            "description": f"rehearsal of {recipe.name}",
            "model": model,
            "layout": _layout(recipe, parallel, model),
            "train": _train(recipe, model, parallel, device),
            "optimizer": small(recipe.optimizer, model),
            "scheduler": _scheduler(recipe.scheduler, recipe.train.train_iters),
            "data": _data(recipe.data, model),
            "checkpoint": recipe.checkpoint.of_short_run(ITERS // 2),
            "faults": recipe.faults.without_spikes(),  # too short for one, and with other checkpoints
            "tracking": _tracking(recipe.tracking),
            "lora": recipe.lora and _lora(recipe.lora),
            "stages": (),
            "dpo": recipe.dpo and recipe.dpo.model_copy(update={"reference": None, "reference_log_probs": None}),
            "qat": qat_rules.rehearsed(recipe.qat, model, parallel),
            "distill": rehearsed(recipe, model, parallel, lambda teacher: small_model(teacher, parallel)),
        }
    )


def _zero(recipe: Recipe, zero: Zero) -> Zero:
    """The same stage and offload, to main memory only; buckets that the small model fills several times."""
    if not ENGINES[engine_name(recipe)].all_of_zero:
        return zero
    update: dict[str, Any] = {"nvme_path": None}
    if zero.offload_optimizer == "nvme":
        update["offload_optimizer"] = "cpu"
    limits = {} if zero.stage == 0 else {"reduce_bucket_size": MAX_BUCKET}
    if zero.stage in (1, 2):
        limits["allgather_bucket_size"] = MAX_BUCKET
    if zero.stage == 3:
        gathered = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
        limits |= {"stage3_param_persistence_threshold": MAX_WHOLE, **dict.fromkeys(gathered, MAX_GATHERED)}
        update["zero_hpz_partition_size"] = 1  # depends on the number of ranks, and a rehearsal is on one node
    update |= {name: min(limit, getattr(zero, name)) for name, limit in limits.items()}
    return zero.model_copy(update=update)


def _lora(lora: Lora) -> Lora:
    """The same matrices and scale, with a rank that every small matrix has."""
    return lora.model_copy(update={"rank": (rank := min(lora.rank, MAX_RANK)), "alpha": lora.scale * rank})


def _layout(recipe: Recipe, parallel: LayoutKeys, model: Model) -> LayoutKeys:
    return parallel.model_copy(
        update={
            "name": None,
            "zero": parallel.zero and _zero(recipe, parallel.zero),
            "micro_batch_size": min(parallel.micro_batch_size, 2),
            "recompute_num_layers": (layers := parallel.recompute_num_layers) and min(layers, model.num_layers),
            "torch_compile": False,
        }
    )


def _train(recipe: Recipe, model: Model, parallel: LayoutKeys, device: Device) -> Train:
    train, micro = recipe.train, min(parallel.micro_batch_size, 2)
    replicas = (ranks := smallest_world(parallel)) // model_parallel_size(parallel)
    # Four micro-batches, which 1, 2 and 4 ranks divide, if there are several; two for each stage of a pipeline.
    accumulated = train.global_batch_size > parallel.micro_batch_size or ranks > 1
    whole = micro * max(4, 2 * parallel.pipeline_model_parallel_size * replicas) if accumulated else micro
    return without_ramp(
        train.without_stops(),
        pretrained=None,
        freeze=freezing.kept(train.freeze, model),
        train_iters=ITERS,
        global_batch_size=whole,
        eval_interval=ITERS // 2,
        eval_iters=1,
        log_interval=1,
        elastic=None,
        zero_quantized_weights=train.zero_quantized_weights and device == "cuda",
        zero_quantized_gradients=False,  # of several nodes
    )


def _scheduler(scheduler: Scheduler, iters: int) -> Scheduler:
    """The same shape over fewer steps: warm-up and decay keep their share of the run, at least one step each."""
    decay, scale = scheduler.lr_decay_iters, ITERS / iters
    small_decay = None if decay is None else max(3, math.ceil(decay * scale))
    end = small_decay or ITERS
    warmup = min(math.ceil(scheduler.lr_warmup_iters * scale), end - 2)
    wsd = scheduler.lr_wsd_decay_iters
    return scheduler.model_copy(
        update={
            "lr_warmup_iters": warmup,
            "lr_decay_iters": small_decay,
            "lr_wsd_decay_iters": None if wsd is None else max(1, min(math.ceil(wsd * scale), end - warmup)),
        }
    )


def _data(data: Data, model: Model) -> Data:
    local = tuple(source for source in data.sources if source.type != "hub" and not source.tokenized)
    steps = () if local else ("steps", "fim", *declared(type(data), DataStep))  # set for the recipe's sources
    return data.model_copy(
        update={
            **{name: type(data).model_fields[name].default for name in steps},
            "valid_sources": tuple(s for s in data.valid_sources if s.type != "hub" and not s.tokenized),
            "sources": local or (DocstringsSource(type="docstrings") if data.chat else StdlibSource(type="stdlib"),),
            "chat": data.chat and rehearsed_chat(data.chat, model.seq_length),
            "curriculum": data.curriculum and data.curriculum.rehearsed,
            "tokenizer": data.tokenizer if isinstance(data.tokenizer, BpeTokenizer) else BpeTokenizer(),
            "num_workers": min(data.num_workers, 1),
        }
    )


def _tracking(tracking: Tracking) -> Tracking:
    section, off = type(tracking), dict[str, object]()
    for name, sink in declared(section, MetricSink).items():
        if not sink.rehearsal:
            off |= {name: False, **{key: section.model_fields[key].default for key in settings(section, name)}}
    return tracking.model_copy(update={**off, "system_metrics_interval": None, "layers_interval": None})


SHORT = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
    "data_parallel_size": "DP",
}
"""Common abbreviations of degrees."""

UNEVEN = "gloo, used by CPU ranks, cannot gather uneven numbers of tokens; verify it on GPUs"
SPREAD = "experts are spread over the tensor-parallel ranks, because they cannot be sharded on a CPU"


@dataclass(frozen=True)
class Degree:
    """A degree that ran with a different value than in the recipe."""

    degree: str
    """Its key in the recipe, or `data_parallel_size`."""
    asked: int | None
    """None: the recipe does not set it."""
    ran: int
    reason: str | None = None

    @property
    def change(self) -> str:
        """Such as `TP 8 to 2`."""
        return f"{SHORT[self.degree]} {self.asked} to {self.ran}"


@dataclass(frozen=True)
class Scaled:
    """The recipe's degrees compared with those that ran."""

    asked: dict[str, int]
    """Degrees of the recipe by key; an unset `expert_tensor_parallel_size` is that of tensor parallelism."""
    reduced: tuple[Degree, ...]
    """Still above 1: the same kind of parallelism on fewer ranks."""
    added: tuple[Degree, ...]
    """Larger than in the recipe."""
    not_run: tuple[Degree, ...]
    """Above 1 in the recipe, and 1 here: this kind of parallelism was not tested."""

    def without(self, degree: Degree) -> Scaled:
        """The same with one more degree that did not run."""
        return replace(self, not_run=(*self.not_run, degree))

    def lines(self, not_run: str) -> list[tuple[str, str]]:
        """Human-readable (heading, text); none if all ran as in the recipe.

        Args:
            not_run: heading for degrees that did not run.
        """
        rows = [("reduced", ", ".join(degree.change for degree in self.reduced))] if self.reduced else []
        rows += [("added", f"{degree.change}: {degree.reason}") for degree in self.added]
        for degree in self.not_run:
            number = "" if degree.asked is None else f" {degree.asked}"
            rows.append((not_run, f"{degree.degree}{number}: {degree.reason}"))
        return rows

    def as_dict(self, not_run: str) -> dict[str, Any]:
        """JSON values: `asked`, `reduced`, `added`, and degrees that did not run under the given name."""
        return {
            "asked": self.asked,
            "reduced": [_without_reason(degree) for degree in self.reduced],
            "added": [asdict(degree) for degree in self.added],
            not_run: [asdict(degree) for degree in self.not_run],
        }


def with_zero(layout: str, zero: Zero | None) -> str:
    """The name of a layout with its ZeRO stage: `DP2, ZeRO 3`."""
    return layout if zero is None else f"{layout}, ZeRO {zero.stage}"


def asked(recipe: Recipe) -> dict[str, int]:
    """The parallel degrees of a recipe by key."""
    parallel = recipe.layout
    degrees = {name: getattr(parallel, name, None) or 1 for name in SHORT if name != "data_parallel_size"}
    if recipe.model.num_moe_experts:
        inner = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
        return {**degrees, "expert_tensor_parallel_size": inner}
    return {name: size for name, size in degrees.items() if not name.startswith("expert_")}


def scaled(recipe: Recipe, ran: Mapping[str, int]) -> Scaled:
    """Compare a recipe's degrees with those of a plan.

    Args:
        ran: degrees by name, of the plan of its small version.
    """
    wanted = asked(recipe)
    other = [Degree(name, size, ran[name]) for name, size in wanted.items() if ran[name] != size]
    return Scaled(
        asked=wanted,
        reduced=tuple(degree for degree in other if 1 < degree.ran < wanted[degree.degree]),
        added=tuple(replace(degree, reason=SPREAD) for degree in other if degree.ran > wanted[degree.degree]),
        # `small_layout` disables expert-tensor parallelism only.
        not_run=tuple(replace(degree, reason=UNEVEN) for degree in other if degree.ran == 1),
    )


def _without_reason(degree: Degree) -> dict[str, Any]:
    return {"degree": degree.degree, "asked": degree.asked, "ran": degree.ran}
