"""Every kind of model as a GPU with TransformerEngine builds it, on the meta device and with `tests/stub_te`.

A program, because megatron-core looks for TransformerEngine when it is imported. It prints the names and global shapes
of each model's weights in a checkpoint: by model, then by layer implementation.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_device: (9, 0)

from megatron.core.transformer.enums import AttnMaskType  # noqa: E402

from llmrecipes.engine.backends import backend  # noqa: E402
from llmrecipes.engine.core.model.attention import apart  # noqa: E402
from llmrecipes.engine.core.model.gpt import construct  # noqa: E402
from llmrecipes.engine.core.model.init import parameter_slices  # noqa: E402
from llmrecipes.engine.core.platform.rendezvous import TIMEOUT  # noqa: E402
from llmrecipes.engine.core.world import model_parallel  # noqa: E402
from llmrecipes.engine.megatron.engine import create_user_buffers, data_parallel_config  # noqa: E402
from llmrecipes.errors import UserError  # noqa: E402
from llmrecipes.hardware.cluster import DetectedGpu  # noqa: E402
from llmrecipes.plan.derive import derive  # noqa: E402
from llmrecipes.recipe.schema import Parallelism  # noqa: E402
from tests.helpers import LLAMA, ROOMY, tiny  # noqa: E402
from tests.unit.test_plan_model import EXPERTS, LATENT  # noqa: E402

WORLD = 2
GPUS = replace(ROOMY, gpus=(DetectedGpu("NVIDIA H100", 1 << 40, 1 << 40, None),) * WORLD)
DEEPSEEK = {
    **LATENT, **EXPERTS, "num_layers": 3, "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 96,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "mtp_num_layers": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "norms of queries and keys": {**LLAMA, "qk_layernorm": True},
    "experts": {**LLAMA, **EXPERTS, "num_layers": 3, "moe_layer_freq": [0, 1, 1]},
    "latent attention": {**LATENT, "qk_layernorm": True},
    "latent attention, whole queries": {**LATENT, "q_lora_rank": None, "qk_layernorm": True},
    "latent attention without norms": {**LATENT, "qk_layernorm": False},
    "deepseek": DEEPSEEK,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "ep2": {"expert_model_parallel_size": 2},
}


def weights(layout: dict[str, Any], platform: Any) -> dict[str, dict[str, dict[str, list[int]]]]:
    """By model and implementation: the global shape of each weight of which rank 0 of a layout has a part."""
    shapes: dict[str, dict[str, dict[str, list[int]]]] = {}
    for name, model in MODELS.items():
        # Experts are split over ranks in one layout, everything else in the other.
        if layout and ("num_moe_experts" in model) != ("expert_model_parallel_size" in layout):
            continue
        shapes[name] = {}
        for implementation in ("local", "transformer_engine"):
            recipe = tiny(
                model={**model, "transformer_impl": implementation}, train={"precision": "bf16"}, parallelism=layout
            )
            built = construct(derive(recipe, WORLD, ROOMY), platform)
            assert built.implementation == implementation
            # Where APEX is missing, megatron-core's output layer raises unless its gradient is added by autograd.
            assert built.config.gradient_accumulation_fusion is (implementation == "transformer_engine")
            assert built.module.output_layer.gradient_accumulation_fusion is False
            parts = parameter_slices(built.module.sharded_state())
            shapes[name][implementation] = {part.name: list(part.shape) for part in parts}
    return shapes


def packed_arguments(platform: Any) -> dict[str, Any]:
    """What attention is called with for conversations of 10 tokens: by an engine's argument of the model."""
    model = {"position_embedding_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False}
    recipe = tiny(
        model=model,
        train={"precision": "bf16", "micro_batch_size": 1},
        data={"sources": [{"type": "docstrings"}], "chat": {}},
    )
    made = construct(derive(recipe, WORLD, ROOMY), platform)
    assert made.implementation == "transformer_engine", made.reason
    arguments = apart(recipe, torch.device("cpu"), made.implementation)(torch.arange(64)[None] % 10)
    assert arguments["attention_mask"] is None
    core: Any = made.module.decoder.layers[0].self_attention.core_attention
    seen: dict[str, Any] = {}

    def forward(_core: Any, query: Any, key: Any, value: Any, _mask: Any, **options: Any) -> Any:
        seen.update({name: option for name, option in options.items() if option is not None})
        seen["shapes"] = [list(each.shape) for each in (query, key, value)]
        return query

    base: Any = type(core).__mro__[1]
    base.forward = forward
    heads = torch.empty(64, 4, 16, device="meta")
    packed = arguments["packed_seq_params"]
    core(heads, heads, heads, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed)
    return {name: each.tolist() if isinstance(each, torch.Tensor) else each for name, each in seen.items()}


def hidden_communication(platform: Any) -> dict[str, Any]:
    """User buffers of each linear layer with `speed.tp_comm_overlap`, and what creating them says without a GPU."""
    recipe = tiny(
        model=LLAMA,
        train={"precision": "bf16"},
        parallelism=LAYOUTS["tp2"],
        speed={"tp_comm_overlap": True, "tp_comm_bulk_wgrad": False},
    )
    plan = derive(recipe, WORLD, GPUS)
    made = construct(plan, platform)
    assert made.config.tp_comm_overlap
    linears = {name.rpartition(".")[2]: module for name, module in made.module.decoder.layers[0].named_modules()}
    buffers = {name: linears[name].user_buffer for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")}
    try:
        create_user_buffers(plan)
    except UserError as error:
        return {"buffers": buffers, "refused": error.where}
    raise AssertionError("the stub has no GPU")


def late_weight_gradients(platform: Any) -> list[bool]:
    """Whether linear layers compute the gradients of their weights apart, and gradient buffers wait for them."""
    recipe = tiny(
        model={**LLAMA, **EXPERTS, "num_layers": 2},
        train={"precision": "bf16"},
        parallelism=LAYOUTS["ep2"],
        speed={"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
    )
    plan = derive(recipe, WORLD, GPUS)
    made = construct(plan, platform)
    delayed = [module.delayed for module in made.module.modules() if hasattr(module, "delayed")]
    return [*delayed, data_parallel_config(plan).delay_wgrad_compute]


if __name__ == "__main__":
    chosen: Any = backend(tiny())
    platform = chosen.meta_platform(0, WORLD, "cpu", 1.0)
    result: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        platform.connect(TIMEOUT)
        with model_parallel(1, Parallelism.model_validate(layout)):
            result[name] = weights(layout, platform)
            if not layout:
                result["packed"] = packed_arguments(platform)
            if name == "tp2":
                result["hidden communication"] = hidden_communication(platform)
            if name == "ep2":
                result["late weight gradients"] = late_weight_gradients(platform)
        torch.distributed.destroy_process_group()
    print(json.dumps(result))
