"""Every kind of model as a GPU with TransformerEngine builds it, on the meta device and with `tests/stub_te`.

A program, because megatron-core looks for TransformerEngine when it is imported. It prints the names and global shapes
of each model's weights in a checkpoint: by model, then by layer implementation.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_device: (9, 0)

from llmrecipes.hardware.builds import import_megatron  # noqa: E402

import_megatron()  # as ranks do, before anything else imports it

import transformer_engine as te_stub  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.fp8_utils import get_fp8_recipe, is_first_last_bf16_layer  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate  # noqa: E402
from megatron.core.transformer import cuda_graphs  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.module import param_is_not_shared  # noqa: E402

from llmrecipes.engine.backends import backend  # noqa: E402
from llmrecipes.engine.core.checkpoint.slices import is_extra_state, other_state  # noqa: E402
from llmrecipes.engine.core.model.attention import apart  # noqa: E402
from llmrecipes.engine.core.model.gpt import construct  # noqa: E402
from llmrecipes.engine.core.model.init import parameter_slices  # noqa: E402
from llmrecipes.engine.core.platform.process_group import TIMEOUT  # noqa: E402
from llmrecipes.engine.core.world import model_parallel  # noqa: E402
from llmrecipes.engine.megatron.cuda_graphs import RecordedLayers  # noqa: E402
from llmrecipes.engine.megatron.data_parallel import data_parallel, data_parallel_config  # noqa: E402
from llmrecipes.engine.megatron.user_buffers import create_user_buffers  # noqa: E402
from llmrecipes.errors import UserError  # noqa: E402
from llmrecipes.hardware.cluster import DetectedGpu  # noqa: E402
from llmrecipes.plan.derive import derive  # noqa: E402
from llmrecipes.recipe.schema import LayoutKeys  # noqa: E402
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
    "experts with biases": {**LLAMA, **EXPERTS, "add_bias_linear": True},
    "latent attention": {**LATENT, "qk_layernorm": True},
    "latent attention, whole queries": {**LATENT, "q_lora_rank": None, "qk_layernorm": True},
    "latent attention without norms": {**LATENT, "qk_layernorm": False},
    "deepseek": DEEPSEEK,
}
ADAPTED = {
    "gpt with adapters": {},
    "llama with adapters": LLAMA,
    "experts with adapters": {
        **LLAMA, **EXPERTS, "num_layers": 3, "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 96,
    },
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "ep2": {"expert_model_parallel_size": 2},
}

SPLIT_EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


def weights(layout: dict[str, Any], platform: Any) -> dict[str, dict[str, dict[str, list[int]]]]:
    """By model and implementation: the global shape of each weight of which rank 0 of a layout has a part."""
    shapes: dict[str, dict[str, dict[str, list[int]]]] = {}
    for name, model in {**MODELS, **ADAPTED}.items():
        # Experts are split over ranks in one layout, everything else in the other.
        if layout and ("num_moe_experts" in model) != ("expert_model_parallel_size" in layout):
            continue
        shapes[name] = {}
        for implementation in ("local", "transformer_engine"):
            adapters: dict[str, Any] = {"lora": {"rank": 4}} if name in ADAPTED else {}
            recipe = tiny(
                model={**model, "transformer_impl": implementation},
                train={"precision": "bf16"}, layout=layout, **adapters,
            )  # fmt: skip
            built = construct(derive(recipe, WORLD, ROOMY), platform)
            assert built.implementation == implementation
            # Where APEX is missing, megatron-core's output layer raises unless its gradient is added by autograd.
            added = implementation == "transformer_engine" and not adapters
            assert built.config.gradient_accumulation_fusion is added
            assert built.module.output_layer.gradient_accumulation_fusion is False
            parts = parameter_slices(built.module.sharded_state())
            shapes[name][implementation] = {part.name: list(part.shape) for part in parts}
    return shapes


def counted(platform: Any) -> dict[str, dict[str, float]]:
    """By model: of each weight, how many times the gradient norm counts an element, on both tensor-parallel ranks.

    Experts are split as the other layers, or each rank has half of them.
    """
    cases = {name: (model, LAYOUTS["tp2"]) for name, model in MODELS.items() if name != "experts with biases"}
    halves = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    for name in ("experts", "deepseek", "experts with biases"):  # the last only so
        cases[f"{name}, ep2"] = MODELS[name], LAYOUTS["tp2"] | halves
    sums: dict[str, Counter[str]] = {name: Counter() for name in cases}
    sizes: dict[str, int] = {}
    for rank in range(WORLD):
        one = type(platform)(rank, WORLD, "cpu", 1.0)
        for name, (model, layout) in cases.items():
            recipe = tiny(
                model={**model, "transformer_impl": "transformer_engine"},
                train={"precision": "bf16"}, layout=layout)  # fmt: skip
            one.connect(TIMEOUT)
            with model_parallel(1, recipe.layout):
                groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "expt_tp"])
                for part in nested_values(construct(derive(recipe, WORLD, GPUS), one).module.sharded_state()):
                    if not isinstance(part.data, torch.nn.Parameter):
                        continue
                    counts = param_is_not_shared(part.data) and param_is_not_tensor_parallel_duplicate(
                        part.data, groups.tp, groups.expt_tp
                    )
                    for piece in parameter_slices({"": part}):
                        sums[name][piece.name] += piece.tensor.numel() * counts
                        sizes[f"{name} {piece.name}"] = math.prod(piece.shape)
            torch.distributed.destroy_process_group()
    return {
        name: {weight: number / sizes[f"{name} {weight}"] for weight, number in of_model.items()}
        for name, of_model in sums.items()
    }


def packed_arguments(platform: Any) -> dict[str, Any]:
    """What attention is called with for conversations of 10 tokens: by an engine's argument of the model."""
    model = {"position_embedding_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False}
    recipe = tiny(
        model=model,
        train={"precision": "bf16"},
        data={"sources": [{"type": "docstrings"}], "chat": {}},
        layout={"micro_batch_size": 1},
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
    """User buffers of each linear layer with `layout.tp_comm_overlap`, and what creating them says without a GPU."""
    recipe = tiny(
        model=LLAMA,
        train={"precision": "bf16"},
        layout={**LAYOUTS["tp2"], "tp_comm_overlap": True, "tp_comm_bulk_wgrad": False},
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
        layout={**LAYOUTS["ep2"], "overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
    )
    plan = derive(recipe, WORLD, GPUS)
    made = construct(plan, platform)
    delayed = [module.delayed for module in made.module.modules() if hasattr(module, "delayed")]
    return [*delayed, data_parallel_config(plan).delay_wgrad_compute]


def _normed(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """What a layer multiplies."""
    if not hasattr(layer, "layer_norm_weight"):
        return inputs
    size, weight = inputs.shape[-1:], layer.layer_norm_weight
    if hasattr(layer, "layer_norm_bias"):
        return F.layer_norm(inputs, size, weight, layer.layer_norm_bias, layer.eps)
    return F.rms_norm(inputs, size, weight, layer.eps)


def _computed(layer: Any, inputs: torch.Tensor, **_options: Any) -> Any:
    """As TransformerEngine returns it: output, bias and the norm's result, of these what is asked for."""
    normed, bias = _normed(layer, inputs), layer.bias if layer.use_bias else None
    outputs: list[Any] = [F.linear(normed, layer.weight, None if layer.te_return_bias else bias)]
    outputs += [bias] * layer.te_return_bias + [normed] * getattr(layer, "return_layernorm_output", False)
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def adapted_layers(platform: Any) -> dict[str, dict[str, float]]:
    """By model and layer: how far what a layer with an adapter returns is from (W + 2 B A) n, where n is what the layer
    multiplies."""
    result: dict[str, dict[str, float]] = {}
    for name in ("gpt with adapters", "llama with adapters"):
        recipe = tiny(
            model={**ADAPTED[name], "transformer_impl": "transformer_engine"},
            train={"precision": "bf16"},
            lora={"rank": 4, "alpha": 8.0},
        )
        layer = construct(derive(recipe, WORLD, ROOMY), platform).module.decoder.layers[0].to_empty(device="cpu")
        generator = torch.Generator().manual_seed(1)
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        result[name] = {}
        for parent, key in (
            (layer.self_attention, "linear_qkv"), (layer.self_attention, "linear_proj"),
            (layer.mlp, "linear_fc1"), (layer.mlp, "linear_fc2"),
        ):  # fmt: skip
            base, adapter = getattr(parent, key), getattr(parent, f"{key}_lora")
            inputs = torch.randn(5, 2, base.in_features, generator=generator)
            output, bias = base(inputs)
            assert (bias is not None) is base.te_return_bias
            normed = _normed(base, inputs)
            expected = F.linear(normed, base.weight, base.bias if base.use_bias and bias is None else None)
            expected = expected + 2 * normed @ adapter.a.weight.t() @ adapter.b.weight.t()
            result[name][key] = float((output - expected).abs().max() / expected.abs().max())
    return result


def eight_bits(platform: Any) -> dict[str, Any]:
    """By scaling: TransformerEngine's recipe, its options, and what the model with it has of layers and of state."""
    result: dict[str, Any] = {}
    for scaling, gpu in {"blockwise": "H100", "tensorwise": "H200", "mxfp8": "B200"}.items():
        node = replace(ROOMY, gpus=(DetectedGpu(f"NVIDIA {gpu}", 1 << 40, 1 << 40, None),) * WORLD)
        recipe = tiny(
            model={
                **DEEPSEEK, "q_lora_rank": 64, "qk_head_dim": 32, "qk_pos_emb_head_dim": 32, "v_head_dim": 32,
                "ffn_hidden_size": 192,
            },
            train={"precision": "bf16", "fp8": "hybrid", "fp8_recipe": scaling, "first_last_layers_bf16": True},
            )  # fmt: skip
        made = construct(derive(recipe, WORLD, node), platform)
        chosen = get_fp8_recipe(made.config)
        state = made.module.sharded_state()
        result[scaling] = {
            "recipe": type(chosen).__name__,
            "options": {name: getattr(option, "name", option) for name, option in chosen.options.items()},
            "in bf16": [is_first_last_bf16_layer(made.config, layer) for layer in range(recipe.model.num_layers)],
            "weights": sorted({str(parameter.dtype) for parameter in made.module.parameters()}),
            "extra states": sum(is_extra_state(each) for each in state.values()),
            "saved extra states": sum(is_extra_state(each) for each in other_state(state)),
        }
    return result


def recorded_layers(platform: Any) -> dict[str, Any]:
    """By model: what TransformerEngine is asked to record, in which step, and what is left after the end."""
    result: dict[str, Any] = {}
    models: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "llama": (LLAMA, {"cuda_graph_warmup_steps": 2}),
        "llama, attention": (LLAMA, {"cuda_graph_modules": ["attn"]}),
        "experts": ({**LLAMA, **EXPERTS, "num_layers": 3, "moe_layer_freq": [0, 1, 1]}, {}),
    }
    for name, (model, keys) in models.items():
        speed = {"cuda_graph_impl": "transformer_engine", **keys}
        overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}
        recipe = tiny(model=model, train={"precision": "bf16"}, layout={**overlap, **speed})
        plan = derive(recipe, WORLD, GPUS)
        made = construct(plan, platform)
        chunks = [data_parallel(plan, made, 0)]
        calls: list[dict[str, Any]] = []

        def record(modules: Any, samples: Any, calls: list[dict[str, Any]] = calls, **options: Any) -> Any:
            bound = te_stub.SIGNATURES["pytorch.graph.make_graphed_callables"].bind(modules, samples, **options)
            assert not any(module._forward_pre_hooks for module in modules), "TransformerEngine takes none with hooks"
            asked = {"layers": len(modules), "inputs": [list(each.shape) for (each,) in samples]}
            calls.append(asked | {"fp8": bound.arguments["fp8_enabled"]})
            return [Recording() for _ in modules]

        class Optimizer:
            def zero_grad(self) -> None: ...

        with (
            patch.object(cuda_graphs, "make_graphed_callables", record),
            patch.object(torch.cuda, "current_device", lambda: "meta"),
            patch.object(torch.cuda, "synchronize", lambda *_device: None),
            patch.dict(os.environ, {"NCCL_GRAPH_REGISTER": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ):
            layers = RecordedLayers(plan, chunks, Optimizer())
            steps = 0
            while not layers.recorded and steps < 10:
                layers.before_step()
                steps += 1
            first: Any = made.module.decoder.layers[0]
            hooks = len(first.cuda_graph_manual_hooks)
            graphs = list(first.cuda_graphs)
            layers.close()
        result[name] = {
            "recorded": calls, "in step": steps, "hooks that gather": hooks > 0,
            "deleted": all(graph.deleted for graph in graphs) and not first.cuda_graphs,
        }  # fmt: skip
        result[name]["parts"] = [part.name for part in made.config.cuda_graph_modules]
        result[name]["generators"] = made.config.use_te_rng_tracker
    with patch.dict(os.environ, {"NCCL_GRAPH_REGISTER": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}):
        try:
            RecordedLayers(plan, chunks, Optimizer())
        except UserError as error:
            result["refused"] = error.where
    return result


class Recording:
    """A graph, as TransformerEngine returns it."""

    deleted = False

    def reset(self) -> None:
        self.deleted = True


if __name__ == "__main__":
    chosen: Any = backend(tiny())
    platform = chosen.meta_platform(0, WORLD, "cpu", 1.0)
    result: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        platform.connect(TIMEOUT)
        with model_parallel(1, LayoutKeys.model_validate(layout)):
            result[name] = weights(layout, platform)
            if not layout:
                result["packed"] = packed_arguments(platform)
                result["recorded"] = recorded_layers(platform)
            if name == "tp2":
                result["hidden communication"] = hidden_communication(platform)
            if name == "ep2":
                result["late weight gradients"] = late_weight_gradients(platform)
                result["fp8"] = eight_bits(platform)
                with (
                    patch.object(te.Linear, "forward", _computed),
                    patch.object(te.LayerNormLinear, "forward", _computed),
                ):
                    result["adapters"] = adapted_layers(platform)
        torch.distributed.destroy_process_group()
    result["counted"] = counted(platform)
    print(json.dumps(result))
