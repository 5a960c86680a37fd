"""A recipe scaled down so that a laptop runs it in a minute; every architectural option is kept."""

from __future__ import annotations

import math
from typing import Any

from llmrecipes.recipe.degrees import model_parallel_size, smallest_world
from llmrecipes.recipe.engines import ENGINES, engine_name
from llmrecipes.recipe.lora import Lora
from llmrecipes.recipe.names import suffixed
from llmrecipes.recipe.plugins import DataStep, MetricSink, declared, settings
from llmrecipes.recipe.proxy_model import Device, small_layout, small_model
from llmrecipes.recipe.schema import (
    Checkpoint,
    Data,
    Model,
    Parallelism,
    Recipe,
    Scheduler,
    Source,
    Tracking,
    Train,
)
from llmrecipes.recipe.zero import Zero

SUFFIX = "-smoke"
ITERS = 20
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
    the standard library, the tokenizer by a small BPE (no network), given weights by initial ones, an explicit
    TransformerEngine by `auto`, NVMe by main memory. Disabled: torch.compile (not available on every CPU), ZeRO++
    except for quantized weights on GPUs, and the sinks of metrics that are not for rehearsals (a rehearsal is not an
    experiment).

    Args:
        recipe: the full recipe.
        device: of the ranks; on a CPU experts are not split (`expert_tensor_parallel_size` 1).
    """
    parallel = small_layout(recipe, device)
    model = small_model(recipe, parallel)
    return recipe.model_copy(
        update={
            "name": suffixed(recipe.name, SUFFIX),
            "description": f"rehearsal of {recipe.name}",
            "model": model,
            "parallelism": parallel,
            "zero": recipe.zero and _zero(recipe, recipe.zero, device),
            "train": _train(recipe.train, model, parallel),
            "scheduler": _scheduler(recipe.scheduler, recipe.train.train_iters),
            "data": _data(recipe.data, model),
            "checkpoint": _checkpoint(recipe.checkpoint),
            "tracking": _tracking(recipe.tracking),
            "lora": recipe.lora and _lora(recipe.lora),
        }
    )


def _zero(recipe: Recipe, zero: Zero, device: Device) -> Zero:
    """The same stage and offload, to main memory alone; buckets that the small model fills several times."""
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
        # Both depend on the number of ranks or nodes, and a rehearsal is on one node.
        update |= {"zero_hpz_partition_size": 1, "zero_quantized_gradients": False}
        if device == "cpu":
            update["zero_quantized_weights"] = False
    update |= {name: min(limit, getattr(zero, name)) for name, limit in limits.items()}
    return zero.model_copy(update=update)


def _lora(lora: Lora) -> Lora:
    """The same matrices and scale, with a rank that every small matrix has."""
    rank = min(lora.rank, MAX_RANK)
    return lora.model_copy(update={"rank": rank, "alpha": lora.scale * rank})


def _train(train: Train, model: Model, parallel: Parallelism) -> Train:
    micro = min(train.micro_batch_size, 2)
    ranks = smallest_world(parallel)
    replicas = ranks // model_parallel_size(parallel)
    # Four micro-batches if gradients are accumulated or ranks share a batch: it divides over 1, 2 and 4 ranks. A
    # pipeline has two for each stage, times the number of replicas.
    accumulated = train.global_batch_size > train.micro_batch_size or ranks > 1
    whole = micro * max(4, 2 * parallel.pipeline_model_parallel_size * replicas) if accumulated else micro
    layers = train.recompute_num_layers
    return train.model_copy(
        update={
            "pretrained": None,
            "train_iters": ITERS,
            "micro_batch_size": micro,
            "global_batch_size": whole,
            "eval_interval": ITERS // 2,
            "eval_iters": 1,
            "log_interval": 1,
            "recompute_num_layers": None if layers is None else min(layers, model.num_layers),
            "torch_compile": False,
        }
    )


def _scheduler(scheduler: Scheduler, iters: int) -> Scheduler:
    """The same shape over fewer steps: warm-up and decay keep their share of the run, at least one step each."""
    decay = scheduler.lr_decay_iters
    scale = ITERS / iters
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
    local = tuple(source for source in data.sources if source.type != "hub")
    longest = data.chat and data.chat.max_length
    # A file's template may have special tokens that a small tokenizer lacks.
    small = {"max_length": longest and min(longest, model.seq_length + 1), "chat_template": None}
    tokenizer = data.tokenizer.model_copy(update={"type": "bpe", "path": None, "revision": None})
    # Steps are set for the recipe's sources.
    steps = () if local else declared(type(data), DataStep)
    return data.model_copy(
        update={
            **{name: type(data).model_fields[name].default for name in steps},
            "sources": local or (Source(type="docstrings" if data.chat else "stdlib"),),
            "chat": data.chat and data.chat.model_copy(update={**small, "overlong": "truncate"}),
            "tokenizer": tokenizer,
            "num_workers": min(data.num_workers, 1),
        }
    )


def _checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint.model_copy(update={"save_interval": ITERS // 2, "keep_interval": None})


def _tracking(tracking: Tracking) -> Tracking:
    section, off = type(tracking), dict[str, object]()
    for name, sink in declared(section, MetricSink).items():
        if not sink.rehearsal:
            off |= {name: False, **{key: section.model_fields[key].default for key in settings(section, name)}}
    return tracking.model_copy(update={**off, "system_metrics_interval": None})
