"""A recipe scaled down until a laptop rehearses it in a minute; every architectural switch stays."""

from __future__ import annotations

import math

from llmrecipes.recipe.rules import MIN_BPE_VOCAB
from llmrecipes.recipe.schema import Checkpoint, Data, Model, Recipe, Scheduler, Source, Tokenizer, Tracking, Train

SUFFIX = "-smoke"
MAX_NAME = 63
MAX_LAYERS = 4
MAX_HEADS = 8
MAX_HEAD_CHANNELS = 16
MAX_HIDDEN = 128
MAX_SEQUENCE = 128
MAX_VOCAB = 1024
ITERS = 20


def proxy(recipe: Recipe) -> Recipe:
    """The small version that `smoke` trains on a CPU.

    Kept: norm, positions, activation and gate, biases, tying, grouping of queries, dropout, initialisation, precision,
    recomputation, optimizer, shape of the schedule, gradient accumulation, local sources. Scaled: sizes, batch,
    lengths. Replaced: Hub sources by the standard library, the tokenizer by a small BPE (no network), an explicit
    TransformerEngine by `auto` and torch.compile by none (neither is there on every CPU), MLflow by none (a rehearsal
    is not an experiment).
    """
    model = _model(recipe.model)
    return Recipe(
        name=recipe.name[: MAX_NAME - len(SUFFIX)] + SUFFIX,
        description=f"rehearsal of {recipe.name}",
        model=model,
        parallelism=recipe.parallelism,
        train=_train(recipe.train, model),
        optimizer=recipe.optimizer,
        scheduler=_scheduler(recipe.scheduler, recipe.train.train_iters),
        data=_data(recipe.data),
        checkpoint=_checkpoint(recipe.checkpoint),
        tracking=Tracking(mlflow=False, tensorboard=False, system_metrics_interval=None),
    )


def _model(model: Model) -> Model:
    heads, groups = _heads(model.num_attention_heads, model.num_query_groups)
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    small = min(channels, MAX_HEAD_CHANNELS)
    width = model.hidden_size / (model.num_attention_heads * channels)
    hidden = heads * small if model.kv_channels is None else _even(width * heads * small, model.hidden_size)
    sequence = min(model.seq_length, MAX_SEQUENCE)
    ffn = model.ffn_hidden_size
    longest = model.max_position_embeddings
    return model.model_copy(
        update={
            "num_layers": min(model.num_layers, MAX_LAYERS),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": None if model.kv_channels is None else small,
            "ffn_hidden_size": None if ffn is None else max(8, round(ffn * hidden / model.hidden_size / 8) * 8),
            "seq_length": sequence,
            # Twice the sequence where there was room, so that a table longer than the sequence stays one.
            "max_position_embeddings": None if longest is None else min(longest, 2 * sequence),
            "rotary_percent": _rotary_percent(model, small),
            "vocab_size": max(MIN_BPE_VOCAB, min(model.vocab_size, MAX_VOCAB)),
            "make_vocab_size_divisible_by": min(model.make_vocab_size_divisible_by, 128),
            "transformer_impl": "local" if model.transformer_impl == "local" else "auto",
        }
    )


def _rotary_percent(model: Model, channels: int) -> float:
    """The recipe's share, or the nearest one that rotates a whole number of pairs of the smaller head."""
    rotated = int(channels * model.rotary_percent)
    if model.position_embedding_type != "rope" or (rotated >= 2 and rotated % 2 == 0):
        return model.rotary_percent
    return max(2, 2 * (rotated // 2)) / channels


def _heads(heads: int, groups: int | None) -> tuple[int, int | None]:
    """At most `MAX_HEADS` heads with the same queries a group, as far as that many heads can show it."""
    if groups is None or groups == heads:
        small = min(heads, MAX_HEADS)
        return small, None if groups is None else small
    each = heads // groups
    if each > MAX_HEADS or (groups > 1 and 2 * each > MAX_HEADS):
        # Too many to keep the ratio: keep that there is one group, or that there are several.
        return MAX_HEADS, min(groups, 2)
    small_groups = min(groups, MAX_HEADS // each)
    return small_groups * each, small_groups


def _even(width: float, limit: int) -> int:
    return max(8, min(MAX_HIDDEN, limit, round(width / 8) * 8))


def _train(train: Train, model: Model) -> Train:
    micro = min(train.micro_batch_size, 2)
    # Four micro-batches where gradients are accumulated or ranks share a batch: it divides over 1, 2 and 4 ranks.
    whole = 4 * micro if train.global_batch_size > train.micro_batch_size else micro
    layers = train.recompute_num_layers
    return train.model_copy(
        update={
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
    """The same shape over fewer steps: warm-up and decay keep their share of the run, and at least one step each."""
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


def _data(data: Data) -> Data:
    local = tuple(source for source in data.sources if source.type != "hub")
    return Data(
        sources=local or (Source(type="stdlib"),),
        tokenizer=Tokenizer(type="bpe"),
        split=data.split,
        num_workers=min(data.num_workers, 1),
        prefetch_factor=data.prefetch_factor,
        pin_memory=data.pin_memory,
    )


def _checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint.model_copy(update={"save_interval": ITERS // 2, "keep_interval": None})
