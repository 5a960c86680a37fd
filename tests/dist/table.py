"""The table of parallel layouts: each row is trained and compared with one process that trains the same model.

pytest runs it on gloo (`test_layouts.py`), `under_torchrun.py` on GPUs with NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from llmrecipes.recipe.schema import Recipe

Sections = dict[str, dict[str, Any]]

BOUND = 1e-5
"""Largest relative difference of a loss, a gradient norm or a parameter tensor, in fp32."""

BF16_BOUND = 2e-2
"""As `BOUND`, in bf16; `_BF16` says why."""

STEPS = 3
"""Of a row that a test makes itself; those of the tables take fewer (`_size`)."""

BASE: Sections = {
    "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 320},
    "train": {"train_iters": STEPS, "global_batch_size": 4, "precision": "fp32"},
    # Adam turns a gradient that is nothing but rounding noise (that of a key's bias is zero in exact arithmetic) into a
    # full step, and does not see a gradient that is too large by a factor; with a large epsilon it does neither.
    "optimizer": {"lr": 1e-2, "adam_eps": 1e-2},
    "layout": {"micro_batch_size": 1},
}

_ROPE: dict[str, Any] = {"position_embedding_type": "rope"}
_LLAMA: dict[str, Any] = {
    **_ROPE, "normalization": "RMSNorm", "activation_func": "silu", "gated_linear_unit": True, "ffn_hidden_size": 96,
    "add_bias_linear": False, "num_query_groups": 2, "share_embeddings_and_output_weights": False,
}  # fmt: skip
_MORE: dict[str, Any] = {
    "qk_layernorm": True, "share_embeddings_and_output_weights": False, "num_query_groups": 2,
    "activation_func": "silu", "gated_linear_unit": True, "ffn_hidden_size": 96,
}  # fmt: skip
"""With the base's biases, LayerNorms and learned positions, every key of a dense model that adds weights."""
_MOE: dict[str, Any] = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "add_bias_linear": False,
}  # fmt: skip
_ROOM: dict[str, Any] = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
_BIAS: dict[str, Any] = {
    "moe_router_load_balancing_type": "none", "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}  # fmt: skip
_MLA: dict[str, Any] = {
    **_ROPE, "multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8, "v_head_dim": 16, "normalization": "RMSNorm", "add_bias_linear": False,
    "qk_layernorm": True,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    **_LLAMA, **_MOE, **_MLA, **_BIAS, "num_query_groups": None, "moe_layer_freq": [0, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 64, "moe_router_num_groups": 2, "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5, "mtp_num_layers": 1,
}  # fmt: skip
# An eighth of the sequence, so that most positions of every context-parallel rank are beyond the original context.
_YARN: dict[str, Any] = {
    "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 8.0, "yarn_original_max_position_embeddings": 4,
    "yarn_beta_fast": 0.5, "yarn_beta_slow": 0.1,
}  # fmt: skip
# So small that the norm of the gradient, sinks included, sets each update.
_CLIPPED: Sections = {"optimizer": {"lr": 1e-2, "adam_eps": 1e-2, "clip_grad": 0.1}}
# Shorter than the chunks of context-parallel ranks; no two halves of the layers are alike.
_WINDOWS: dict[str, Any] = {"window_size": [5, 0], "window_attn_skip_freq": [1, 0, 1, 1]}
_GPT_OSS: dict[str, Any] = {
    **_LLAMA, **_MOE, **_YARN, "window_size": [5, 0], "window_attn_skip_freq": 2, "softmax_type": "learnable",
    "add_bias_linear": True, "activation_func": "quick_gelu", "activation_func_clamp_value": 0.05,
    "glu_linear_offset": 1.0,
}  # fmt: skip
_MLA_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rotary_scaling_factor": 8.0, "original_max_position_embeddings": 4, "mscale_all_dim": 1.0,
    "beta_fast": 0.5, "beta_slow": 0.1,
}  # fmt: skip
_MUP: dict[str, Any] = {
    "use_mup": True, "mup_base_hidden_size": 16, "mup_base_head_dim": 4.0, "mup_embedding_mult": 2.0,
}  # fmt: skip
_LORA: Sections = {"lora": {"rank": 4, "alpha": 16.0}}
_LONGER: dict[str, Any] = {"train_iters": 3, "global_batch_size": 8}
"""Of models that learn too little in the steps of `_size`, or whose batch grows."""
_EXPERTS_LORA: Sections = {
    "lora": {"rank": 4, "alpha": 16.0, "target_modules": ["linear_qkv", "experts.linear_fc1", "experts.linear_fc2"]},
    "optimizer": {"lr": 2e-2},
}

_WIDER: dict[str, Any] = {"num_layers": 8, "hidden_size": 96}
_TAUGHT: Sections = {
    # What the teacher of a rehearsal starts with is flat: a large weight makes it count.
    "distill": {"teacher": "none", "model": {**_WIDER, "init_method_std": 0.2}, "temperature": 2.0, "top_k": 40},
}
_TAUGHT_MSE: Sections = {
    "distill": {
        "teacher": "none", "loss": "mse", "alpha": 0.9,
        "model": {**_WIDER, "num_moe_experts": None, "add_bias_linear": True, "init_method_std": 0.2},
    },
}  # fmt: skip
_TAUGHT_LAYERS: Sections = {
    "distill": {
        "teacher": "none", "model": {"num_layers": 8, "init_method_std": 0.2}, "layers": [[1, 2], [2, 4], [4, 8]],
        "layers_weight": 0.5,
    },
}  # fmt: skip
_TAUGHT_COSINE: Sections = {"distill": {**_TAUGHT_LAYERS["distill"], "layers_loss": "cosine"}}

# With the rate of the base, weights that are rounded to the other side (`ROUNDED`) change the norm of the third step by
# up to the bound, depending on the processor.
_INT4: Sections = {"qat": {"scheme": "int4", "group_size": 16}, "optimizer": {"lr": 3e-3, "adam_eps": 1e-2}}
_INT8: Sections = {"qat": {"scheme": "int8"}}

_FGM: Sections = {"train": {"adversarial": {"type": "fgm", "epsilon": 0.5}}}
_PGD: Sections = {"train": {"adversarial": {"type": "pgd", "epsilon": 0.5, "alpha": 0.4, "steps": 2}}}
_FREELB: Sections = {
    "train": {"adversarial": {"type": "freelb", "epsilon": 0.02, "alpha": 0.015, "steps": 3, "norm": "linf"}},
}
_UNSHARDED: Sections = {"layout": {"use_distributed_optimizer": False}}
_SGD: Sections = {"optimizer": {"optimizer": "sgd", "lr": 0.05}, **_UNSHARDED}
_MUON: Sections = {
    "optimizer": {"optimizer": "muon", "lr": 2e-3, "muon_fp32_matmul_prec": "highest", "muon_nesterov": True},
    **_UNSHARDED,
}
_LION: Sections = {"optimizer": {"optimizer": "lion", "lr": 2e-3}, **_UNSHARDED}

_EMERGING: dict[str, Sections] = {
    "gpt with muon": _MUON,
    "gpt with distributed muon": {
        **_MUON, "optimizer": {**_MUON["optimizer"], "muon_tp_mode": "distributed", "muon_split_qkv": False},
    },
    "llama with muon": {"model": _LLAMA, **_MUON},
    "mla with muon": {"model": {**_MLA, "num_layers": 4}, **_MUON, "train": _LONGER},
    "moe with muon": {"model": _MOE, **_MUON},
    "gpt with lion": _LION,
}  # fmt: skip

_CLIP: Sections = {"optimizer": {"qk_clip": True, "qk_clip_alpha": 0.3, "qk_clip_threshold": 0.02}}
_DROP: Sections = {"model": {"layer_drop": 0.6}}
_DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}

_PACKED: Sections = {"data": {"sources": [{"type": "docstrings"}], "chat": {}}}
_PAIRS: Sections = {
    "data": {"sources": [{"type": "docstrings"}], "chat": {"packing": False, "preference": {}}},
    "dpo": {"beta": 1.0},
    "layout": {"micro_batch_size": 2},
}
_PACKED_PAIRS: Sections = {
    "data": {"sources": [{"type": "docstrings"}], "chat": {"preference": {}}},
    "dpo": {"beta": 1.0, "loss_type": "ipo"},
}

VARIANTS: dict[str, Sections] = {
    "gpt": {},
    "gpt of 5 layers": {"model": {"num_layers": 5}},
    "gpt of 6 layers": {"model": {"num_layers": 6}},
    "gpt of width 128": {"model": {"hidden_size": 128}},
    "gpt without weight tying": {"model": {"share_embeddings_and_output_weights": False}},
    "gpt with label smoothing": {"train": {"label_smoothing": 0.1}},
    "gpt with z-loss": {"train": {"z_loss_coeff": 0.05, "label_smoothing": 0.1}},
    "gpt with extra fields": {"model": {"extra": {"softmax_scale": 0.5}}},
    "gpt with more weights": {"model": _MORE},
    "gpt with muP": {"model": _MUP},
    "gpt with a growing batch": {"train": {"rampup_batch_size": [4, 2, 8], **_LONGER}},
    "gpt with sgd": _SGD,
    "gpt with sgd without momentum": {"optimizer": {**_SGD["optimizer"], "sgd_momentum": 0.0}, **_UNSHARDED},
    "moe with sgd": {"model": _MOE, **_SGD},
    **_EMERGING,
    "gpt in bf16": {"train": {"precision": "bf16"}},
    "gpt in fp16": {"train": {"precision": "fp16", "initial_loss_scale": 1024.0}},
    "llama": {"model": _LLAMA},
    "llama with yarn": {"model": {**_LLAMA, **_YARN}},
    "llama with windows": {"model": {**_LLAMA, **_WINDOWS}},
    "gpt with sinks": {"model": {"softmax_type": "learnable", "init_method_std": 0.2}, **_CLIPPED},
    # Without the sinks of other tensor-parallel ranks in the norm, each would be clipped otherwise.
    "gpt that learns sinks and a norm": {
        "model": {"softmax_type": "learnable", "init_method_std": 0.3},
        "train": {"freeze": ["embedding.*", "*.linear_*", "*.layers.*layernorm*"], **_LONGER},
        "optimizer": {"lr": 0.2, "adam_eps": 1e-2, "clip_grad": 0.1},
    },
    "gpt with a zero sink": {"model": {"softmax_type": "off-by-one"}},
    "llama with sinks": {"model": {**_LLAMA, **_WINDOWS, "softmax_type": "learnable"}, **_CLIPPED},
    "llama with sinks and dropout": {"model": {**_LLAMA, **_DROPOUT, "softmax_type": "learnable"}},
    "packed llama with sinks": {"model": {**_LLAMA, "softmax_type": "learnable"}, **_PACKED},
    "lora with sinks": {"model": {"softmax_type": "learnable"}, **_LORA},
    "llama without some rotations": {"model": {**_LLAMA, "no_rope_freq": [0, 1, 0, 0]}},
    "llama with windows and dropout": {"model": {**_LLAMA, **_WINDOWS, **_DROPOUT}},
    "llama in bf16": {"model": _LLAMA, "train": {"precision": "bf16"}},
    "moe": {"model": _MOE},
    "moe in bf16": {"model": _MOE, "train": {"precision": "bf16"}},
    "moe with allgather": {"model": {**_MOE, "moe_token_dispatcher_type": "allgather"}},
    "moe with aux_loss": {"model": {**_MOE, "moe_aux_loss_coeff": 0.1}},
    "moe with seq_aux_loss": {
        "model": {**_MOE, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
    },
    "moe with global_aux_loss": {
        "model": {**_MOE, "moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
    },
    "moe with expert bias": {"model": {**_MOE, **_BIAS}},
    "moe with z-loss": {"model": {**_MOE, "moe_z_loss_coeff": 0.1}},
    "moe with muP": {"model": {**_MOE, **_MUP, "share_embeddings_and_output_weights": False}},
    "moe with shared experts": {"model": {**_MOE, "moe_shared_expert_intermediate_size": 64}},
    "moe in every second layer": {"model": {**_MOE, "moe_layer_freq": 2}},
    "moe in the last layer": {"model": {**_MOE, "moe_layer_freq": [0, 0, 0, 1]}},
    "moe with room for all": {"model": {**_MOE, "moe_expert_capacity_factor": 2.0}},
    "moe with capacity": {"model": {**_MOE, "moe_expert_capacity_factor": 1.0}},
    "moe with padded capacity": {
        "model": {**_MOE, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    },
    "moe with padded room for all": {"model": {**_MOE, **_ROOM}},
    "moe with padded room for all and lora": {**_EXPERTS_LORA, "model": {**_LLAMA, **_MOE, **_ROOM}},
    "mixtral with windows": {"model": {**_LLAMA, **_MOE, "window_size": [5, 0], "window_attn_skip_freq": 2}},
    "moe with biases": {"model": {**_MOE, "add_bias_linear": True}, **_CLIPPED},
    "moe with biases and allgather": {
        "model": {**_MOE, "add_bias_linear": True, "moe_token_dispatcher_type": "allgather"},
        **_CLIPPED,
    },
    "gpt-oss": {"model": _GPT_OSS, **_CLIPPED},
    "gpt-oss with lora": {**_EXPERTS_LORA, "model": _GPT_OSS},
    "mixtral": {"model": {**_LLAMA, **_MOE, "moe_aux_loss_coeff": 0.1}},
    "mla": {"model": _MLA},
    "mla with windows": {"model": {**_MLA, **_WINDOWS}},
    "mla with yarn": {"model": {**_MLA, **_MLA_YARN}},
    "mla with more weights": {"model": {**_MLA, "add_bias_linear": True, "normalization": "LayerNorm"}},
    "mtp": {"model": {**_ROPE, "mtp_num_layers": 1}},
    "mtp without weight tying": {"model": {**_ROPE, "mtp_num_layers": 2, "share_embeddings_and_output_weights": False}},
    "mtp with windows": {
        "model": {**_ROPE, **_WINDOWS, "mtp_num_layers": 2, "share_embeddings_and_output_weights": False}
    },
    "deepseek": {"model": _DEEPSEEK},
    # A bias of experts moves by the sign of a difference: whole steps apart where bf16 rounds a score otherwise.
    "deepseek in bf16": {
        "model": {**_DEEPSEEK, "moe_router_enable_expert_bias": False},
        "train": {"precision": "bf16"},
    },
    "lora": _LORA,
    "llama with lora": {**_LORA, "model": _LLAMA},
    "llama with windows and lora": {**_LORA, "model": {**_LLAMA, **_WINDOWS}},
    "moe with lora": {**_EXPERTS_LORA, "model": {**_LLAMA, **_MOE}},
    "mla with lora": {**_LORA, "model": {**_MLA, "num_layers": 4}, "train": _LONGER},
    "lora in bf16": {**_LORA, "train": {"precision": "bf16"}},
    "taught gpt": _TAUGHT,
    "taught llama": {"model": _LLAMA, **_TAUGHT},
    "taught moe": {"model": _MOE, **_TAUGHT},
    "moe with a dense teacher": {"model": _MOE, **_TAUGHT_MSE},
    "gpt taught by layers": _TAUGHT_LAYERS,
    "moe taught by layers": {"model": _MOE, **_TAUGHT_COSINE},
    "gpt in int4": _INT4,
    "gpt in int8": _INT8,
    "llama in int4": {"model": _LLAMA, **_INT4},
    "moe in int8": {"model": {**_MOE, **_ROOM}, **_INT8},
    "mla in int8": {"model": _MLA, **_INT8},
    "attacked gpt": _PGD,
    "attacked llama": {"model": _LLAMA, **_FGM},
    "gpt with freelb": _FREELB,
    "attacked gpt with lora": {**_LORA, "train": {**_PGD["train"], **_LONGER}},
    "gpt without some layers": _DROP,
    "gpt with dropout": {"model": _DROPOUT},
    "llama with dropout": {"model": {**_LLAMA, **_DROPOUT}},
    "moe with dropout": {"model": {**_MOE, **_DROPOUT}},
    "mla with dropout": {"model": {**_MLA, **_DROPOUT}},
    "mtp with dropout": {
        "model": {**_ROPE, **_DROPOUT, "mtp_num_layers": 2, "share_embeddings_and_output_weights": False}
    },
    "packed llama with dropout": {**_PACKED, "model": {**_LLAMA, **_DROPOUT}},
    "gpt with dropout and freelb": {**_FREELB, "model": _DROPOUT},
    "gpt with qk-clip": _CLIP,
    "llama with qk-clip": {"model": _LLAMA, **_CLIP},
    "llama with windows and qk-clip": {"model": {**_LLAMA, **_WINDOWS}, **_CLIP},
    "mla with qk-clip": {"model": _MLA, **_CLIP},
    # What is frozen of tied embeddings has a copy on the last stage, and a layer may be frozen in part.
    "gpt with frozen weights": {"train": {"freeze": ["embedding.*", "decoder.layers.0.*", "decoder.layers.2.mlp.*"]}},
    "gpt with a frozen half": {"train": {"freeze": ["embedding.*", "decoder.layers.[01].*"]}},
    "gpt with frozen ends": {"train": {"freeze": ["embedding.*", "decoder.layers.[23].*", "decoder.final*"]}},
    "moe with frozen weights": {
        "model": {**_LLAMA, **_MOE},
        "train": {"freeze": ["decoder.layers.1.*", "decoder.layers.*.local_experts.[13].*", "*.router.weight"]},
    },
    "packed gpt": _PACKED,
    "packed llama": {"model": _LLAMA, **_PACKED},
    "packed llama with windows": {"model": {**_LLAMA, **_WINDOWS}, **_PACKED},
    "packed mla": {"model": _MLA, **_PACKED},
    "pairs": _PAIRS,
    "packed pairs": _PACKED_PAIRS,
    "pairs with lora": {**_PAIRS, **_LORA},
}

_DEGREES = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size", "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}  # fmt: skip
_OVERLAP = {"overlap_grad_reduce": True}
_OVERLAP_BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_SMALL_BUCKETS = {"ddp_bucket_size": 20_000, "ddp_pad_buckets_for_high_nccl_busbw": True}
_WHOLE = {"use_distributed_optimizer": False}

_BUCKETS = {"reduce_bucket_size": 20_000, "sub_group_size": 50_000, "stage3_param_persistence_threshold": 100}
"""Smaller than the model, so that there are several of each."""


def _zero(stage: int, **keys: Any) -> Sections:
    buckets = {0: {}, 3: _BUCKETS}.get(stage, {"reduce_bucket_size": 20_000})
    return {"layout": {"zero": {"stage": stage, **buckets, **keys}, "use_distributed_optimizer": stage > 0}}


_SELECTIVE = {"recompute_granularity": "selective"}
_CHUNKS: Sections = {"layout": {"loss_chunk_tokens": 12}}
"""Smaller than the 32 tokens of a micro-batch, and not a divisor."""

_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Row:
    """One layout of one model.

    Args:
        variant: the model, of `VARIANTS`.
        layout: degrees, such as `tp2 sp dp2`; data-parallel ranks are named too.
        changes: what else the layout sets; the reference does not have it.
        reference: what the reference alone sets.
        bound: largest relative difference; anything but `BOUND` has a reason.
        why: reason of another bound or reference.
        nccl: whether only NCCL can run it.
        engine: of the layout; the reference is always megatron-core's.
        size: steps, samples and layers of the layout and the reference, instead of the base's.
    """

    variant: str
    layout: str
    changes: Sections = field(default_factory=dict)
    reference: Sections = field(default_factory=dict)
    bound: float = BOUND
    why: str = ""
    nccl: bool = False
    engine: str = "megatron"
    size: Sections = field(default_factory=dict)

    @property
    def name(self) -> str:
        size = self.reference.get("layout", {}).get("micro_batch_size")
        extra = [f"one process takes {size} at a time"] if size else []
        if "zero" in self.changes.get("layout", {}):
            extra.append(self.engine)
        extra += [
            f"{key}={value}".replace("use_distributed_optimizer=False", "whole optimizer").removesuffix("=True")
            for section in self.changes.values()
            for key, value in _keys(section)
        ]
        return ", ".join([f"{self.variant}: {self.layout}", *extra])

    @property
    def engines(self) -> set[str]:
        """Engines that it needs."""
        return {self.engine}

    @property
    def core(self) -> bool:
        """Whether `make test` runs it."""
        return self.name in CORE

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees by their short name; `sp` is 1."""
        return degrees_of(self.layout)

    @property
    def ranks(self) -> int:
        size = 1
        for name in ("tp", "pp", "cp", "dp"):
            size *= self.degrees.get(name, 1)
        return size

    @property
    def recipe(self) -> Recipe:
        parallelism: dict[str, Any] = {_DEGREES[name]: size for name, size in self.degrees.items() if name in _DEGREES}
        if "sp" in self.degrees:
            parallelism["sequence_parallel"] = True
        recipe = make(self.size, VARIANTS[self.variant], {"layout": parallelism}, self.changes)
        return recipe.with_layout(engine=self.engine)

    @property
    def reference_recipe(self) -> Recipe:
        return make(self.size, VARIANTS[self.variant], self.reference)


def _keys(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """With the keys of ZeRO beside the others."""
    for key, value in section.items():
        yield from value.items() if key == "zero" and isinstance(value, dict) else [(key, value)]


def degrees_of(layout: str) -> dict[str, int]:
    """Degrees by their short name; `sp` is 1."""
    return {word.rstrip("0123456789"): int(word.lstrip("abcdefghijklmnopqrstuvwxyz") or 1) for word in layout.split()}


def make(*changes: Sections) -> Recipe:
    """The base recipe with changes, the later ones on top."""
    sections = BASE
    for each in changes:
        sections = _both(sections, each)
    return Recipe.model_validate({"name": "parity", **sections})


def _both(one: Sections, other: Sections) -> Sections:
    """Sections with the keys of both, the other's on top."""
    return {
        key: {**one.get(key, {}), **other.get(key, {})} for key in [*one, *(key for key in other if key not in one)]
    }


_BF16 = (
    "bf16 keeps 8 bits of a number: where a sum over ranks or micro-batches is cut elsewhere, the last of them differs "
    "(2^-9 = 2e-3 of each value; losses average it away, gradient norms and single tensors less)"
)
_FP16 = "as in bf16, with 11 bits of a number"
INT8_BOUND, INT4_BOUND = 1e-3, 1e-2
"""As `BOUND`, of rounded weights; `ROUNDED` says why."""
ROUNDED = (
    "the largest weight of a group is halfway between two integers, so that its last bit decides which it becomes, and "
    "with it the order in which the update before was summed (1/15 of the value of 16 in int4, 1/255 of that of a row "
    "in int8); the loss and gradients of the first step are within `BOUND`"
)
_TOGETHER = (
    "the balance counts over the micro-batches that run at the same time on data-parallel ranks and over those before: "
    "one process does the same with them in one micro-batch"
)
_ONE_BY_ONE = "a balance of each sequence by itself does not depend on how many are in a micro-batch"


def _stages(layout: str) -> Sections:
    return {"layout": {"pipeline_model_parallel_layout": layout}}


NVME_ROW = Row(
    # DeepSpeed writes groups of at least 1 MiB of a rank's master weights: the first of two here.
    "gpt of width 128",
    "dp2",
    _zero(3, offload_optimizer="nvme", nvme_path="nvme", sub_group_size=300_000),
    engine="deepspeed",
)
"""`Suite` chooses the folder."""


def _rows_of_windows() -> Iterator[Row]:
    for layout in ("dp2", "tp2", "tp2 sp", "pp2", "pp2 vpp2", "cp2", "cp4", "tp2 sp pp2 cp2", "pp2 vpp2 cp2 dp2"):
        yield Row("llama with windows", layout)
    for layout in ("dp2", "tp2", "tp4", "tp2 sp", "pp2 vpp2", "cp2", "tp2 sp pp2 cp2"):
        yield Row("gpt with sinks", layout)
    for layout in ("tp2 sp", "pp2 vpp2", "cp2 dp2"):
        yield Row("llama with sinks", layout)
    for layout in ("tp2", "tp4 sp"):
        yield Row("gpt that learns sinks and a norm", layout)
    yield Row("gpt with a zero sink", "tp2 cp2")
    yield Row("gpt with sinks", "dp2", _zero(3), engine="deepspeed")
    for variant in ("llama with sinks and dropout", "packed llama with sinks", "lora with sinks"):
        yield Row(variant, "tp2 sp")
    for layout in ("tp2 sp", "pp2 vpp2", "cp2"):
        yield Row("llama without some rotations", layout)
    yield Row("llama with windows", "pp2", {"layout": _FULL})
    yield Row("llama with windows", "dp2", _zero(3), engine="deepspeed")
    for layout in ("tp2 sp", "cp2", "pp2"):
        yield Row("llama with windows and dropout", layout)
    for layout in ("tp2 sp", "pp2 dp2"):
        yield Row("packed llama with windows", layout)
    for variant in ("llama with windows and qk-clip", "llama with windows and lora", "mla with windows"):
        yield Row(variant, "tp2 sp pp2")
    yield Row("llama with windows and qk-clip", "cp2")
    yield Row("mla with windows", "cp2")
    yield Row("mtp with windows", "pp2 vpp2")
    for layout in ("dp2 ep2", "tp2 sp ep2 etp1", "cp2 ep2"):
        yield Row("mixtral with windows", layout)


def _rows_of_biased_experts() -> Iterator[Row]:
    for layout in ("dp2", "dp2 ep2", "tp2 sp ep2 etp1", "tp2 sp cp2 ep2 etp1", "pp2 vpp2 dp2 ep2"):
        yield Row("moe with biases", layout)
    yield Row("moe with biases", "dp2 ep2", _zero(2), engine="deepspeed")
    for layout in ("dp2 ep2", "tp2 sp ep2 etp1"):
        yield Row("moe with biases and allgather", layout)
    for layout in ("tp2 sp ep4 dp2 etp1", "pp2 vpp2", "cp2 ep2", "dp2 ep2"):
        yield Row("gpt-oss", layout)
    yield Row("gpt-oss", "pp2 dp2 ep2", {"layout": _FULL})
    yield Row("gpt-oss with lora", "tp2 sp ep2 etp1")


def _rows() -> Iterator[Row]:
    # -- data parallel and the optimizer --
    for layout in ("dp2", "dp4"):
        yield Row("gpt", layout)
    for changes in (_WHOLE, _OVERLAP, _OVERLAP_BOTH):
        yield Row("gpt", "dp2", {"layout": changes})
    yield Row("gpt", "tp2 sp dp2", {"layout": _OVERLAP_BOTH})
    for layout in ("dp2", "tp2 sp pp2", "cp2 dp2"):
        yield Row("gpt with sgd", layout)
    yield Row("gpt with sgd without momentum", "tp2")
    yield Row("moe with sgd", "dp2 ep2")
    yield Row("gpt", "pp2 dp2", {"layout": _OVERLAP_BOTH})
    yield Row("gpt", "pp2 vpp2 dp2", {"layout": _OVERLAP_BOTH})
    yield Row("gpt", "tp2 pp2", {"layout": _WHOLE})
    # -- batches of 4, 6 and 8 --
    for layout in ("dp2", "tp2 sp pp2", "pp2 vpp2 cp2"):
        yield Row("gpt with a growing batch", layout)
    yield Row("gpt with a growing batch", "dp2", _zero(2), engine="deepspeed")
    # -- each degree, all pairs and products of a dense model --
    for layout in (
        "tp2", "tp4", "tp2 sp", "tp4 sp", "pp2", "pp4", "pp2 vpp2", "cp2", "cp4", "tp2 dp2", "tp2 pp2", "tp2 sp pp2",
        "tp2 cp2", "tp2 sp cp2", "pp2 dp2", "pp2 cp2", "cp2 dp2", "tp2 sp pp2 dp2", "tp2 sp pp2 cp2",
        "tp2 sp pp2 vpp2 dp2", "pp2 vpp2 cp2 dp2",
    ):  # fmt: skip
        yield Row("gpt", layout)
    for layout in ("tp2 sp", "cp2", "pp2", "tp2 sp cp2", "tp2 sp pp2"):
        yield Row("llama", layout)
    yield Row("llama with yarn", "tp2 sp cp2")
    yield from _rows_of_windows()
    yield from _rows_of_biased_experts()
    yield Row("gpt without weight tying", "pp2")
    yield Row("gpt without weight tying", "tp2 sp pp2")
    for layout in ("tp2", "tp4 sp", "pp2"):
        yield Row("gpt with label smoothing", layout)
    for layout in ("tp2 sp pp2", "tp2 pp2 dp2", "cp2"):
        yield Row("gpt with z-loss", layout)
    yield Row("gpt with z-loss", "tp4 sp", _CHUNKS)
    yield Row("gpt with extra fields", "tp2 sp")
    yield Row("gpt with extra fields", "dp2", _zero(2), engine="deepspeed")
    # -- the loss in chunks --
    for variant, layout in (
        ("gpt", "tp2 sp pp2"), ("gpt", "tp2 pp2 dp2"), ("gpt", "pp2 vpp2 cp2 dp2"), ("llama", "tp2 sp cp2"),
        ("gpt with label smoothing", "tp4 sp"), ("gpt with muP", "tp2"), ("deepseek", "tp2 sp ep2 etp1"),
        ("mtp without weight tying", "cp2"), ("llama with lora", "tp2 sp"), ("packed llama", "tp2 sp"),
    ):  # fmt: skip
        yield Row(variant, layout, _CHUNKS)
    yield Row("gpt", "dp2", _both(_CHUNKS, {"layout": _OVERLAP_BOTH}))
    yield Row("llama in bf16", "tp2 sp", _CHUNKS, bound=BF16_BOUND, why=_BF16)
    for stage in (1, 2):
        yield Row("gpt", "tp2 dp2", _both(_zero(stage), _CHUNKS), engine="deepspeed")
    # -- uneven stages --
    yield Row("gpt", "pp2", {"layout": {"num_layers_in_first_pipeline_stage": 1}})
    yield Row("gpt", "pp2", {"layout": {"num_layers_in_last_pipeline_stage": 1}})
    yield Row("gpt of 5 layers", "pp2", {"layout": {"account_for_embedding_in_pipeline_split": True}})
    yield Row("gpt of 5 layers", "pp2", {"layout": {"account_for_loss_in_pipeline_split": True}})
    both: dict[str, Any] = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    yield Row("gpt of 6 layers", "pp4", {"layout": both})
    yield Row("gpt of 6 layers", "pp2 vpp2", {"layout": both})
    yield Row("gpt", "pp4", _stages("E|t|ttt|L"))
    yield Row("llama", "tp2 sp pp2 vpp2", _stages("Ett|t|t|L"))
    yield Row("deepseek", "pp2 vpp2 dp2 ep2", _stages("Et|t|tt|mL"))
    yield Row("mtp without weight tying", "pp2", _both(_stages("Et*4|mmL"), {"layout": _BLOCK}))
    # -- recomputation --
    # On a CPU torch has no fused kernel for latent attention's heads, so there are scores to recompute.
    yield Row("mla", "tp2 sp", {"layout": _SELECTIVE})
    yield Row(
        "mla",
        "pp2",
        {"layout": {**_SELECTIVE, "recompute_modules": ["core_attn", "mla_up_proj", "layernorm"]}},
    )
    yield Row("llama", "tp2 sp", {"layout": {**_SELECTIVE, "recompute_modules": ["mlp", "layernorm"]}})
    yield Row("moe", "tp2 sp ep2 etp1", {"layout": {**_SELECTIVE, "recompute_modules": ["moe", "layernorm"]}})
    yield Row("gpt", "tp2 sp", {"layout": _FULL})
    yield Row("gpt", "pp2", {"layout": _FULL})
    yield Row("gpt", "pp2 vpp2", {"layout": _BLOCK})
    yield Row("moe", "tp2 sp ep2 etp1", {"layout": _FULL})
    # -- bf16 --
    for variant, layout in (("gpt", "dp2"), ("gpt", "tp2 sp"), ("gpt", "pp2"), ("llama", "tp2 sp cp2")):
        yield Row(f"{variant} in bf16", layout, bound=BF16_BOUND, why=_BF16)
    # -- experts --
    for layout in (
        "dp2 ep2", "tp2 sp ep2 etp1", "cp2 ep2", "pp2", "dp4 ep4", "dp4 ep2", "tp2 sp dp2 ep4 etp1",
        "tp2 sp dp2 ep2 etp1", "pp2 dp2 ep2", "cp2 dp2 ep2", "cp2 dp2 ep4", "tp2 sp cp2 ep2 etp1",
        "tp2 sp pp2 ep2 etp1", "tp2 sp pp2 dp2 ep2 etp1", "tp2 sp pp2 dp2 ep4 etp1", "pp2 vpp2 dp2 ep2",
    ):  # fmt: skip
        yield Row("moe", layout)
    for layout in ("dp2 ep2", "tp2 sp ep2 etp1"):
        yield Row("moe with allgather", layout)
    yield Row("moe", "dp2 ep2", {"layout": _OVERLAP_BOTH})
    yield Row("moe", "dp2 ep2", {"layout": _WHOLE})
    for balance in ("aux_loss", "seq_aux_loss", "expert bias", "z-loss"):
        for layout in ("dp2 ep2", "tp2 sp ep2 etp1", "cp2 ep2"):
            yield Row(f"moe with {balance}", layout)
    yield Row("moe with seq_aux_loss", "dp2 ep2", reference={"layout": {"micro_batch_size": 4}}, why=_ONE_BY_ONE)
    yield Row("moe with expert bias", "tp2 sp pp2 dp2 ep2 etp1")
    for layout in ("tp2 sp ep2 etp1", "cp2 ep2", "pp2"):
        yield Row("moe with global_aux_loss", layout)
    for layout in ("dp2 ep2", "pp2 dp2 ep2"):
        yield Row("moe with global_aux_loss", layout, reference={"layout": {"micro_batch_size": 2}}, why=_TOGETHER)
    for layout in ("dp2 ep2", "tp2 sp ep2 etp1", "pp2 dp2 ep2"):
        yield Row("moe with shared experts", layout)
    for layout in ("dp2 ep2", "pp2"):
        yield Row("moe in every second layer", layout)
        yield Row("moe with capacity", layout)
        yield Row("moe with padded capacity", layout)
    # Where a sequence is split, each rank drops among its own tokens; only without drops is that the same training.
    for layout in ("tp2 sp ep2 etp1", "cp2 ep2"):
        yield Row("moe with room for all", layout)
    for layout in ("pp2 dp2 ep2", "pp2 vpp2 dp2 ep2"):
        yield Row("moe in the last layer", layout)
    yield Row("mixtral", "tp2 sp pp2 dp2 ep2 etp1")
    for layout in ("tp2 sp ep2 etp2", "tp2 sp dp2 ep2 etp2"):
        yield Row("moe", layout, nccl=True, why="gloo cannot gather the uneven numbers of tokens of shared experts")
    # -- features of `speed` that a CPU has --
    for variant, layout, more in (
        ("moe in bf16", "dp2 ep2", {"layout": _OVERLAP_BOTH}),
        ("moe in bf16", "pp2 vpp2 dp2 ep2", {"layout": _OVERLAP_BOTH}),
        ("deepseek in bf16", "pp2 vpp2 dp2 ep2", _both(_stages("Et|t|tt|mL"), _CHUNKS)),
    ):
        together = _both(more, {"layout": {"overlap_moe_expert_parallel_comm": True}})
        yield Row(variant, layout, together, bound=BF16_BOUND, why=_BF16)
    fused = ("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion")
    yield Row("llama", "tp2 sp", {"layout": dict.fromkeys(fused, True)})
    yield Row("moe with shared experts", "dp2 ep2", {"layout": {"moe_shared_expert_overlap": True}})
    yield Row("gpt", "dp2", {"layout": {**_OVERLAP_BOTH, **_SMALL_BUCKETS}})
    yield Row("gpt", "tp2", {"layout": {"deterministic_mode": True, "bias_activation_fusion": True}})
    scattered: Sections = {
        "train": {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True}
    }  # fmt: skip
    yield Row("gpt in bf16", "dp2", scattered, bound=BF16_BOUND, why=_BF16)
    # -- latent attention and multi-token prediction --
    for layout in ("tp2", "tp2 sp", "cp2", "pp2", "tp2 sp cp2"):
        yield Row("mla", layout)
    yield Row("mla with yarn", "tp2 sp cp2")
    for layout in ("tp2", "tp2 sp", "cp2"):
        yield Row("mtp", layout)
    for layout in ("cp2", "pp2", "pp2 dp2", "pp2 vpp2", "tp2 sp pp2"):
        yield Row("mtp without weight tying", layout)
    for layout in ("dp2", "cp2 dp2"):
        yield Row("mtp", layout, {"layout": {"micro_batch_size": 2}})
    for layout in ("dp2 ep2", "tp2 sp ep2 etp1", "tp2 sp pp2 dp2 ep2 etp1"):
        yield Row("deepseek", layout)
    # -- maximal-update parametrisation: rates by parameter group, on stages that lack some of the groups --
    for layout in ("tp2 sp pp2", "pp2 vpp2 dp2"):
        yield Row("gpt with muP", layout)
    yield Row("gpt with muP", "pp2", {"layout": _WHOLE})
    yield Row("moe with muP", "tp2 sp pp2 ep2 etp1")
    for stage in (0, 1, 2, 3):
        yield Row("gpt with muP", "dp2", _zero(stage), engine="deepspeed")
    yield Row("gpt with muP", "tp2 sp dp2", _zero(3), engine="deepspeed")
    yield Row("gpt with muP", "dp2", _zero(2, offload_optimizer="cpu"), engine="deepspeed")
    # -- adapters --
    for layout in ("tp2", "tp2 sp", "pp2", "dp2"):
        yield Row("lora", layout)
    yield Row("lora", "dp2", {"layout": _WHOLE})
    yield Row("lora", "tp2 sp dp2", {"layout": _OVERLAP_BOTH})
    yield Row("lora", "pp2", {"layout": _FULL})
    for layout in ("tp2 sp", "pp2 vpp2", "tp2 sp cp2", "tp2 sp pp2 dp2"):
        yield Row("llama with lora", layout)
    for layout in ("dp2 ep2", "tp2 sp ep2 etp1", "tp2 sp pp2 dp2 ep2 etp1"):
        yield Row("moe with lora", layout)
    yield Row("moe with lora", "tp2 sp ep2 etp2", nccl=True, why="as for moe")
    for layout in ("tp2", "tp2 sp"):
        yield Row("mla with lora", layout)
    yield Row("lora in bf16", "tp2 sp", bound=BF16_BOUND, why=_BF16)
    # -- frozen weights --
    for layout in ("tp2 sp pp2", "tp2 dp2", "pp2 vpp2 dp2"):
        yield Row("gpt with frozen weights", layout)
    for layout in ("pp2", "pp2 dp2"):
        yield Row("gpt with a frozen half", layout)
        yield Row("gpt with frozen ends", layout)
    yield Row("gpt with frozen weights", "dp2", {"layout": _WHOLE})
    yield Row("gpt with frozen weights", "dp2", {"layout": {**_OVERLAP_BOTH, **_FULL}})
    for layout in ("dp2 ep2", "tp2 sp pp2 dp2 ep2 etp1"):
        yield Row("moe with frozen weights", layout)
    # -- a teacher in the same layout --
    for layout in ("dp2", "tp2", "tp2 sp", "tp4 sp", "pp2", "cp2", "tp2 sp pp2", "pp2 vpp2 cp2 dp2"):
        yield Row("taught gpt", layout)
    yield Row("taught gpt", "pp2", {"layout": _FULL})
    yield Row("taught gpt", "tp2 sp dp2", {"layout": _OVERLAP_BOTH})
    yield Row("taught llama", "tp2 sp cp2")
    for layout in ("dp2 ep2", "tp2 sp ep2 etp1", "tp2 sp pp2 dp2 ep2 etp1"):
        yield Row("taught moe", layout)
    for layout in ("dp2 ep2", "tp2 sp pp2 dp2 ep2 etp1"):
        yield Row("moe with a dense teacher", layout)
    for layout in ("dp2", "tp2", "tp4 sp", "cp2", "pp4", "tp2 sp pp2 dp2", "pp2 vpp2 cp2 dp2"):
        yield Row("gpt taught by layers", layout)
    yield Row("gpt taught by layers", "tp2 sp pp2", {"layout": _FULL})
    yield Row("gpt taught by layers", "pp2 vpp2", {"layout": _BLOCK})
    yield Row("gpt taught by layers", "tp2 sp dp2", {"layout": _OVERLAP_BOTH})
    yield Row("moe taught by layers", "tp2 sp pp2 dp2 ep2 etp1")
    # -- rounded weights: groups of whole matrices, and rows that ranks have parts of --
    int4: dict[str, Any] = {"bound": INT4_BOUND, "why": ROUNDED}
    int8: dict[str, Any] = {"bound": INT8_BOUND, "why": ROUNDED}
    for layout in ("dp2", "tp2 sp pp2", "tp4", "pp2 vpp2 cp2 dp2"):
        yield Row("gpt in int4", layout, **int4)
    for layout in ("tp2", "tp4 sp", "tp2 sp pp2 dp2"):
        yield Row("gpt in int8", layout, **int8)
    yield Row("gpt in int8", "tp2 pp2", {"layout": _FULL}, **int8)
    yield Row("gpt in int8", "tp2 sp dp2", {"layout": _OVERLAP_BOTH}, **int8)
    yield Row("llama in int4", "tp2 sp cp2", **int4)
    for layout in ("dp2 ep2", "tp2 sp", "tp2 sp pp2 dp2 ep2 etp1"):
        yield Row("moe in int8", layout, **int8)
    yield Row("mla in int8", "tp2 sp", **int8)
    # -- embeddings that are moved: the random start and the norm of a sequence are the same in parts --
    for layout in ("tp2", "tp2 sp cp2", "pp2 vpp2 cp2 dp2"):
        yield Row("attacked gpt", layout)
    yield Row("attacked gpt", "tp2 sp dp2", {"layout": _OVERLAP_BOTH})
    yield Row("attacked llama", "tp2 sp pp2", {"layout": {**_OVERLAP, **_FULL}})
    yield Row("gpt with freelb", "tp2 sp pp2 vpp2")
    yield Row("gpt with freelb", "cp2 dp2", _CHUNKS)
    yield Row("attacked gpt with lora", "tp2 sp pp2")
    # -- layers that are left out: the same by every rank --
    for layout in ("tp2 sp cp2", "pp2 vpp2 dp2"):
        yield Row("gpt without some layers", layout)
    yield Row("gpt without some layers", "pp2 dp2", {"layout": _FULL})
    yield Row("gpt without some layers", "tp2 pp2", {"layout": _BLOCK})
    # -- dropout: masks by the place of an element in the batch --
    for layout in ("dp2", "tp2", "cp4", "pp2 vpp2 cp2 dp2"):
        yield Row("gpt with dropout", layout)
    for layout in ("dp1", "dp2"):
        yield Row("gpt with dropout", layout, {"layout": {"micro_batch_size": 2}})
    yield Row("gpt with dropout", "tp2 sp pp2 vpp2", {"layout": _FULL})
    yield Row("gpt with dropout", "tp2 sp pp2", {"layout": _SELECTIVE})
    for stage, layout in ((0, "dp2"), (3, "tp2 sp dp2")):
        yield Row("gpt with dropout", layout, _zero(stage), engine="deepspeed")
    yield Row("gpt with dropout and freelb", "pp2 dp2")
    yield Row("llama with dropout", "tp2 sp cp2", {"layout": _FULL})
    yield Row("moe with dropout", "tp2 sp pp2 dp2 ep2 etp1", {"layout": _BLOCK})
    yield Row("mla with dropout", "tp2 sp cp2", {"layout": _SELECTIVE})
    for layout in ("cp2", "pp2 vpp2"):
        yield Row("mtp with dropout", layout, {"layout": _FULL} if layout == "cp2" else {})
    yield Row("packed llama with dropout", "tp2 sp pp2", {"layout": _FULL})
    for variant, layout in (
        ("gpt with qk-clip", "tp2 sp pp2"), ("llama with qk-clip", "tp2 sp cp2"), ("mla with qk-clip", "tp2 sp cp2"),
    ):  # fmt: skip
        yield Row(variant, layout)
    yield Row("llama with qk-clip", "pp2 vpp2 dp2", {"layout": _FULL})
    # Small buckets, so that ranks share matrices of queries and keys.
    yield Row("gpt with qk-clip", "dp2", {"layout": {**_OVERLAP_BOTH, "ddp_bucket_size": 12_000}})
    # -- conversations that share a sequence --
    for layout in ("dp2", "pp2 vpp2"):
        yield Row("packed gpt", layout)
    yield Row("packed llama", "tp2 sp pp2", {"layout": _FULL})
    yield Row("packed llama", "tp2 dp2")
    yield Row("packed mla", "tp2 sp")
    yield Row("packed gpt", "dp2", _zero(2), engine="deepspeed")
    # -- pairs, and their reference --
    for layout in ("dp2", "cp2", "tp2 sp pp2", "tp2 sp cp2", "pp2 vpp2 dp2"):
        yield Row("pairs", layout)
    yield Row("pairs", "tp2 dp2", {"layout": _OVERLAP_BOTH})
    yield Row("pairs", "dp2", {"layout": _WHOLE})
    for layout in ("tp2 sp dp2", "pp2"):
        yield Row("packed pairs", layout)
    for layout in ("tp2 sp", "pp2 vpp2 dp2", "cp2"):
        yield Row("pairs with lora", layout)
    yield Row("pairs with lora", "dp2", {"layout": _OVERLAP_BOTH})
    # -- ZeRO by DeepSpeed --
    for stage in (0, 1, 2, 3):
        yield Row("gpt", "dp2", _zero(stage), engine="deepspeed")
    for stage in (1, 2, 3):
        yield Row("gpt", "tp2 sp dp2", _zero(stage), engine="deepspeed")
        yield Row("gpt in bf16", "dp2", _zero(stage), bound=BF16_BOUND, why=_BF16, engine="deepspeed")
        yield Row("gpt", "dp2", _zero(stage, offload_optimizer="cpu"), engine="deepspeed")
    for stage in (2, 3):
        yield Row("gpt in fp16", "dp2", _zero(stage), bound=BF16_BOUND, why=_FP16, engine="deepspeed")
        yield Row("gpt", "dp2", _zero(stage, overlap_comm=True), engine="deepspeed")
    yield Row("moe with aux_loss", "dp2", _zero(3), engine="deepspeed")
    for stage, layout in ((1, "dp4 ep2"), (2, "dp2 ep2"), (2, "dp4 ep2")):
        yield Row("moe with aux_loss", layout, _zero(stage), engine="deepspeed")
    # Of other balances than that of the micro-batch, which needs no memory of the one before.
    for balance in ("seq_aux_loss", "z-loss"):
        yield Row(f"moe with {balance}", "dp2 ep2", _zero(1), engine="deepspeed")
    for stage, layout in ((2, "dp2"), (2, "dp2 ep2"), (3, "dp2")):
        at_once = {"layout": {"micro_batch_size": 2}}
        yield Row("moe with global_aux_loss", layout, _zero(stage), at_once, why=_TOGETHER, engine="deepspeed")
    yield Row("moe in bf16", "dp2 ep2", _zero(1), bound=BF16_BOUND, why=_BF16, engine="deepspeed")
    yield Row("moe", "dp4 ep2", _zero(2, offload_optimizer="cpu"), engine="deepspeed")
    for layout in ("dp1", "dp4"):
        yield Row("gpt", layout, _zero(3), engine="deepspeed")
    for variant in ("llama", "mla"):
        yield Row(variant, "tp2 sp dp2", _zero(3), engine="deepspeed")
    # -- experts whose matrices tensor-parallel ranks share: on gloo with even numbers of tokens --
    yield Row("moe with padded room for all", "tp2 sp")
    yield Row("moe with padded room for all and lora", "tp2 sp dp2 ep2")
    for stage in (1, 2):
        yield Row("moe with padded room for all", "tp2 sp dp2 ep2", _zero(stage), engine="deepspeed")
    yield Row("moe with padded room for all", "tp2 sp dp2", _zero(3), engine="deepspeed")
    yield Row("moe", "tp2 sp dp2", _zero(2), nccl=True, why="as for moe", engine="deepspeed")
    # -- every key that adds weights, where tensor-parallel ranks have the same tokens and where each has its own --
    for layout in ("tp2", "tp2 sp"):
        for variant in ("gpt with more weights", "mla with more weights"):
            yield Row(variant, layout)
            yield Row(variant, layout, _zero(1), engine="deepspeed")
            yield Row(variant, layout, _zero(3), engine="deepspeed")
    yield Row("gpt with more weights", "tp2", _zero(2), engine="deepspeed")
    # Decay that shows: of norms and biases it is none, whatever shape ZeRO gives them.
    decay: Sections = {"optimizer": {"weight_decay": 1.0}}
    yield Row("gpt with more weights", "tp2 pp2", decay, decay, why="the training itself")
    yield Row(
        "gpt with more weights", "tp2 sp dp2", {**_zero(3), **decay}, decay, why="the training itself",
        engine="deepspeed",
    )  # fmt: skip
    yield Row("gpt", "dp4", _zero(3, zero_hpz_partition_size=2), engine="deepspeed")
    for key in ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"):
        yield Row("gpt", "dp2", _zero(3, **{key: 10_000}), engine="deepspeed")
    extra: dict[str, Any] = {"zero_optimization": {"contiguous_gradients": False}}
    yield Row("gpt", "dp2", _zero(2, allgather_bucket_size=20_000, extra=extra), engine="deepspeed")
    yield Row("gpt", "dp2", _both(_zero(3), {"layout": _FULL}), engine="deepspeed")
    unclipped: Sections = {"optimizer": {"clip_grad": 0.0}}
    yield Row("gpt", "dp2", {**_zero(2), **unclipped}, unclipped, why="the training itself", engine="deepspeed")
    yield Row("gpt", "dp2", _zero(3, offload_optimizer="cpu", offload_param="cpu"), engine="deepspeed")
    yield Row("gpt in bf16", "dp2", _zero(2, offload_optimizer="cpu"), bound=BF16_BOUND, why=_BF16, engine="deepspeed")
    yield NVME_ROW


EMERGING_ROWS = (
    Row("gpt with muon", "dp2", {"layout": _OVERLAP}),
    Row("gpt with muon", "tp2 sp pp2"),
    Row("gpt with distributed muon", "tp2"),
    Row("llama with muon", "tp2 sp dp2"),
    Row("mla with muon", "tp2 sp"),
    Row("moe with muon", "tp2 sp ep2 etp1"),
    Row("gpt with lion", "tp2 sp pp2"),
)


def _size(variant: str, *layouts: str, zero: bool = False) -> Sections:
    """The least in which layouts of a model can differ.

    That is two steps, because the second one has moments; two micro-batches of each rank, or enough to fill its stages;
    and two layers where there are no stages.

    Args:
        variant: the model, of `VARIANTS`. What it sets itself stays.
        layouts: those that are compared with one process, or with one another, as in `Row`.
        zero: whether DeepSpeed cuts the model into buckets (`_BUCKETS`), for which two layers are too small.
    """
    sections = VARIANTS[variant]
    train, model = sections.get("train", {}), sections.get("model", {})
    degrees = [degrees_of(layout) for layout in layouts]
    micro_batches = max(2 * each.get("dp", 1) * each.get("pp", 1) for each in degrees)
    samples = max(4, micro_batches) * sections.get("layout", {}).get("micro_batch_size", 1)
    size: Sections = {"train": {"train_iters": max(2, len(layouts)), "global_batch_size": samples}}
    names_layers = (
        {"layer_drop", "moe_layer_freq", "window_attn_skip_freq", "no_rope_freq"} & model.keys()
        or "freeze" in train
        or "distill" in sections
    )
    if not (zero or names_layers or any("pp" in each for each in degrees)):
        size["model"] = {"num_layers": 2}
    return size


ROWS = tuple(
    replace(row, size=_size(row.variant, row.layout, zero=row.engine == "deepspeed"))
    for row in (*_rows(), *EMERGING_ROWS)
)

CORE = frozenset(
    (
        "gpt: dp2, whole optimizer",
        "gpt: dp2, overlap_grad_reduce, overlap_param_gather",
        "gpt: tp2",
        "gpt: tp2 sp pp2, loss_chunk_tokens=12",
        "deepseek: tp2 sp ep2 etp1, loss_chunk_tokens=12",
        "mla: tp2 sp, recompute_granularity=selective",
        "gpt: pp2, recompute_granularity=full, recompute_method=uniform, recompute_num_layers=1",
        "gpt: pp2 vpp2, recompute_granularity=full, recompute_method=block, recompute_num_layers=1",
        "gpt: pp2, num_layers_in_first_pipeline_stage=1",
        "gpt of 5 layers: pp2, account_for_embedding_in_pipeline_split",
        "llama: cp2",
        "llama with windows: tp2 sp pp2 cp2",
        "gpt that learns sinks and a norm: tp2",
        "mixtral with windows: dp2 ep2",
        "llama in bf16: tp2 sp cp2",
        "gpt: tp2 sp dp2, overlap_grad_reduce, overlap_param_gather",
        "gpt: tp2 sp pp2 vpp2 dp2",
        "gpt: pp2 vpp2 cp2 dp2",
        "moe: tp2 sp cp2 ep2 etp1",
        "moe: pp2 vpp2 dp2 ep2",
        "moe with allgather: dp2 ep2",
        "moe with aux_loss: dp2 ep2",
        "moe with seq_aux_loss: cp2 ep2",
        "moe with global_aux_loss: pp2",
        "moe with expert bias: tp2 sp ep2 etp1",
        "moe with biases: tp2 sp ep2 etp1",
        "moe with z-loss: dp2 ep2",
        "moe with capacity: pp2",
        "mla with more weights: tp2",
        "mtp without weight tying: pp2",
        "lora: pp2, recompute_granularity=full, recompute_method=uniform, recompute_num_layers=1",
        "moe with lora: dp2 ep2",
        "llama with lora: tp2 sp to pp2 dp2",
        "gpt with muP: tp2 sp pp2",
        "gpt with frozen weights: tp2 sp pp2",
        "taught gpt: tp2 sp pp2",
        "gpt with freelb: tp2 sp pp2 vpp2",
        "gpt in int8: tp2 sp pp2 dp2",
        "gpt without some layers: pp2 vpp2 dp2",
        "gpt with dropout: pp2 vpp2 cp2 dp2",
        "gpt with dropout: tp2 sp pp2, recompute_granularity=selective",
        "packed gpt: dp2",
        "pairs: tp2 sp pp2",
        "packed llama: tp2 sp pp2, recompute_granularity=full, recompute_method=uniform, recompute_num_layers=1",
        "deepseek: pp2 vpp2 dp2 ep2, pipeline_model_parallel_layout=Et|t|tt|mL",
        "gpt: pp2 vpp2 to cp2 dp2",
        "gpt: tp2, whole optimizer to dp2",
        "gpt with a growing batch: tp2 sp pp2",
        "moe: dp1 to tp2 sp ep2 etp1",
        "gpt: tp2 sp pp2, then cp2 dp2, then pp2 vpp2 dp2",
        "gpt with sgd: tp2 sp pp2",
        "gpt with muon: tp2 sp pp2",
        "moe with muon: dp2 ep2 to tp2 sp ep2 etp1",
    )
)
"""Names of the rows and resumes of `make test`; the others are left to `make test-deep`."""


SIMILAR = {
    "gpt of 6 layers", "gpt of width 128", "gpt without weight tying", "gpt with label smoothing",
    "gpt with z-loss",
    "gpt with extra fields",
    "gpt with more weights", "gpt in bf16", "gpt in fp16", "deepseek in bf16", "moe with muP",
    "moe with shared experts", "moe in every second layer", "moe in the last layer", "moe in bf16",
    "moe with room for all", "moe with padded capacity", "mixtral", "mtp", "mla with lora", "lora in bf16",
    "packed mla", "moe with padded room for all", "moe with padded room for all and lora", "llama with yarn",
    "mla with yarn", "taught llama", "taught moe", "moe with a dense teacher",
    "gpt taught by layers", "moe taught by layers",
    "gpt in int4", "llama in int4", "moe in int8", "mla in int8",
    "attacked gpt", "attacked llama", "attacked gpt with lora", "llama with lora", "pairs with lora",
    "packed pairs", "moe with frozen weights",
    "gpt with frozen ends", "gpt with a frozen half",
    "llama with dropout", "moe with dropout", "mla with dropout", "mtp with dropout", "packed llama with dropout",
    "gpt with dropout and freelb",
    "gpt with sgd without momentum", "gpt with qk-clip", "llama with qk-clip",
    "mla with qk-clip",
    "moe with sgd", *(set(_EMERGING) - {"gpt with muon"}),
    "llama with windows and dropout", "llama with windows and lora", "llama with windows and qk-clip",
    "mla with windows", "mtp with windows", "packed llama with windows", "llama without some rotations",
    "gpt with sinks", "gpt with a zero sink", "llama with sinks", "llama with sinks and dropout", "lora with sinks",
    "packed llama with sinks", "moe with biases and allgather", "gpt-oss", "gpt-oss with lora",
}  # fmt: skip
"""Models that differ little from one of the core, for a layout."""


def news(row: Row) -> set[object]:
    """What a row may be the only one to have: its model, its options, and for a model of its own each kind of
    parallelism, because megatron-core has code for the two together (replicas and what belongs to another kind aside).
    """
    found: set[object] = {row.variant}
    found |= {
        f"{section}.{key}" if key == "pipeline_model_parallel_layout" else f"{section}.{key}={value}"
        for section, keys in row.changes.items()
        for key, value in keys.items()
    }
    if row.variant not in SIMILAR:
        found |= {(row.variant, kind) for kind in row.degrees if kind not in ("dp", "sp", "etp")}
    return found


@cache
def essential(engine: str) -> frozenset[str]:
    """Names of the rows of an engine that no other rows replace: the core, and few that have everything new."""
    rows = [row for row in ROWS if row.engine == engine and not row.nccl]
    chosen = [row for row in rows if row.core]
    known = set[object]().union(*map(news, chosen))
    while not all(news(row) <= known for row in rows):
        chosen.append(max(rows, key=lambda row: len(news(row) - known)))
        known |= news(chosen[-1])
    return frozenset(row.name for row in chosen)


def _engine(changes: Sections) -> str:
    return "deepspeed" if "zero" in changes.get("layout", {}) else "megatron"


@dataclass(frozen=True)
class Resume:
    """A checkpoint of one layout that goes on in another.

    Args:
        variant: the model, of `VARIANTS`.
        saved, resumed: degrees, as in `Row`.
        saved_changes, resumed_changes: what else each layout sets; one with a section `zero` is DeepSpeed's.
    """

    variant: str
    saved: str
    resumed: str
    saved_changes: Sections = field(default_factory=dict)
    resumed_changes: Sections = field(default_factory=dict)

    @property
    def saved_row(self) -> Row:
        return Row(self.variant, self.saved, self.saved_changes, engine=_engine(self.saved_changes), size=self._size)

    @property
    def resumed_row(self) -> Row:
        changes = self.resumed_changes
        return Row(self.variant, self.resumed, changes, engine=_engine(changes), size=self._size)

    @property
    def _size(self) -> Sections:
        return _size(self.variant, self.saved, self.resumed, zero="deepspeed" in self.engines)

    @property
    def engines(self) -> set[str]:
        """Engines that it needs."""
        return {_engine(self.saved_changes), _engine(self.resumed_changes)}

    @property
    def bound(self) -> float:
        return BF16_BOUND if "16" in self.variant else INT8_BOUND if "int8" in self.variant else BOUND

    @property
    def core(self) -> bool:
        """Whether `make test` runs it."""
        return self.name in CORE

    @property
    def name(self) -> str:
        return f"{self.saved_row.name} to {self.resumed_row.name.removeprefix(f'{self.variant}: ')}"


EMERGING_RESUMES = (
    Resume("gpt with muon", "tp2 sp", "pp2"),
    Resume("llama with muon", "dp2", "tp2 sp"),
    Resume("moe with muon", "dp2 ep2", "tp2 sp ep2 etp1"),
)

RESUMES = (
    Resume("gpt with sgd", "tp2 sp", "pp2 dp2"),
    Resume("gpt", "dp1", "tp2 sp"),
    Resume("gpt with sinks", "tp2 sp", "pp2 dp2"),
    Resume("gpt with sinks", "dp1", "tp4"),
    Resume("gpt-oss", "tp2 sp ep2 etp1", "pp2 dp2 ep2"),
    Resume("gpt-oss", "dp1", "dp2 ep2"),
    Resume("pairs", "dp2", "tp2 sp"),
    Resume("gpt", "tp2 sp", "pp2"),
    Resume("gpt in int8", "tp2 sp", "pp2 dp2"),
    Resume("gpt", "pp2", "pp2 vpp2"),
    Resume("gpt", "pp2 vpp2", "cp2 dp2"),
    Resume("gpt", "cp2 dp2", "dp1"),
    Resume("gpt with a growing batch", "dp2", "tp2 sp"),
    Resume("gpt", "tp2 sp pp2 dp2", "dp2"),
    Resume("gpt", "dp4", "tp2 pp2"),
    Resume("gpt of 5 layers", "dp2", "pp2", {}, {"layout": {"account_for_embedding_in_pipeline_split": True}}),
    Resume("deepseek", "pp2 vpp2 dp2 ep2", "pp2", _stages("Et|t|tt|mL"), _stages("Et*3|tmL")),
    Resume("gpt", "tp2 sp", "pp4", {}, _stages("E|t|ttt|L")),
    Resume("gpt", "tp2", "pp2", {"layout": _WHOLE}, {"layout": _WHOLE}),
    Resume("gpt", "tp2", "dp2", {"layout": _WHOLE}),
    Resume("gpt", "dp2", "tp2 sp", {}, {"layout": _WHOLE}),
    Resume("gpt with muP", "tp2 sp", "pp2"),
    Resume("gpt with muP", "dp2", "tp2", {}, {"layout": _WHOLE}),
    Resume("gpt with muP", "dp2", "dp2", {}, _zero(3)),
    Resume("gpt", "dp4", "dp2", {"layout": _WHOLE}, {"layout": _OVERLAP_BOTH}),
    Resume("gpt", "tp2 sp dp2", "dp4", {"layout": _OVERLAP_BOTH}),
    Resume("gpt in bf16", "tp2 sp", "pp2", {"layout": _WHOLE}, {"layout": _WHOLE}),
    Resume("gpt in bf16", "dp2", "pp2", {}, {"layout": _WHOLE}),
    Resume("moe", "dp1", "dp2 ep2", {"layout": _WHOLE}, {"layout": _WHOLE}),
    Resume("moe in the last layer", "dp2 ep2", "pp2 dp2 ep2"),
    Resume("llama", "tp2 sp", "dp2"),
    Resume("moe", "dp2 ep2", "dp1"),
    Resume("moe", "dp1", "tp2 sp ep2 etp1"),
    Resume("moe", "dp4 ep4", "pp2 dp2 ep2"),
    Resume("moe", "tp2 sp pp2 dp2 ep2 etp1", "dp2 ep2"),
    Resume("mixtral", "tp2 sp ep2 etp1", "cp2 dp2 ep2"),
    Resume("deepseek", "dp2 ep2", "tp2 sp pp2 ep2 etp1"),
    Resume("llama with lora", "tp2 sp", "pp2 dp2"),
    Resume("lora", "dp2", "tp2", {}, {"layout": _WHOLE}),
    Resume("gpt with dropout", "tp2 sp", "pp2 dp2"),
    Resume("gpt with frozen weights", "tp2 sp pp2", "dp2"),
    Resume("gpt with a frozen half", "pp2", "dp2"),
    Resume("gpt with a frozen half", "dp2", "pp2 dp2"),
    Resume("gpt with frozen weights", "dp2", "pp2 vpp2", {"layout": _WHOLE}),
    Resume("moe with frozen weights", "tp2 sp ep2 etp1", "dp2 ep2"),
    Resume("moe with lora", "dp2 ep2", "tp2 sp ep2 etp1"),
    # -- ZeRO by DeepSpeed, and from and to megatron-core --
    Resume("gpt", "dp2", "dp4", _zero(1), _zero(3)),
    Resume("gpt", "dp4", "dp2", _zero(3), _zero(2)),
    Resume("gpt", "dp2", "tp2 sp", _zero(3)),
    Resume("gpt", "pp2", "dp2", {}, _zero(3)),
    Resume("gpt in bf16", "dp2", "dp2", {}, _zero(2)),
    Resume("gpt in fp16", "dp2", "dp2", _zero(2), _zero(3)),
    Resume("gpt", "dp2", "dp2", _zero(2, offload_optimizer="cpu"), _zero(3)),
    Resume(NVME_ROW.variant, "dp2", "dp2", NVME_ROW.changes, NVME_ROW.changes),
    Resume("gpt", "tp2 sp dp2", "dp1", _zero(3)),
    Resume("llama", "dp4", "dp2", _zero(3), _zero(3)),
    Resume("gpt in bf16", "dp2", "tp2 sp", _zero(3)),
    Resume("gpt in fp16", "dp2", "dp2", {}, _zero(3)),
    Resume("gpt in fp16", "dp2", "dp2", _zero(3)),
    Resume("gpt", "dp2", "tp2 dp2", _zero(0), _zero(3)),
    Resume("moe", "dp2 ep2", "dp2", {}, _zero(3)),
    Resume("moe", "dp1", "dp2 ep2", {}, _zero(2)),
    Resume("moe", "dp4 ep2", "dp2 ep2", _zero(2)),
    *EMERGING_RESUMES,
)


@dataclass(frozen=True)
class Staged:
    """A run of several stages, each in another layout of the same ranks.

    Args:
        variant: the model, of `VARIANTS`.
        layouts: of the stages: degrees, as in `Row`.
        changes: what else all stages set.
    """

    variant: str
    layouts: tuple[str, ...]
    changes: Sections = field(default_factory=dict)

    @property
    def rows(self) -> tuple[Row, ...]:
        (engine,) = self.engines
        size = _size(self.variant, *self.layouts, zero=engine == "deepspeed")
        return tuple(Row(self.variant, each, self.changes, engine=engine, size=size) for each in self.layouts)

    @property
    def engines(self) -> set[str]:
        """Engines that it needs."""
        return {_engine(self.changes)}

    @property
    def bound(self) -> float:
        return BF16_BOUND if "16" in self.variant else BOUND

    @property
    def core(self) -> bool:
        """Whether `make test` runs it."""
        return self.name in CORE

    @property
    def name(self) -> str:
        return ", then ".join([self.rows[0].name, *self.layouts[1:]])


STAGED = (
    Staged("gpt", ("dp2", "tp2 sp")),
    Staged("gpt", ("tp2 sp pp2", "cp2 dp2", "pp2 vpp2 dp2")),
    Staged("llama in bf16", ("tp2 sp", "cp2")),
    Staged("gpt with a growing batch", ("dp2", "pp2")),
    Staged("deepseek", ("dp2 ep2", "tp2 sp ep2 etp1", "cp2 ep2")),
    Staged("llama with lora", ("tp2 sp", "pp2")),
    Staged("taught gpt", ("dp2", "tp2 sp")),
    Staged("gpt", ("dp2", "tp2"), _zero(2)),
    Staged("gpt", ("dp4", "tp2 dp2", "dp4"), _zero(3)),
    Staged("moe", ("dp2", "dp2 ep2"), _zero(1)),
)
