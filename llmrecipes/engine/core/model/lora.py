"""Low-rank adapters (arXiv 2106.09685) of megatron-core's linear layers and TransformerEngine's, in every layout.

An adapter sits next to its layer, which it leaves as it is: the base model's parameters keep their names. Of a matrix
that is cut by columns A is whole on each tensor-parallel rank and B is cut by columns; of one that is cut by rows A is
cut by rows and B is whole. So what ranks exchange for an adapter is only as wide as its rank.

A layer of TransformerEngine that has its norm inside returns the norm's result beside its own, for the adapter.

The gradient of what is whole is that of all tokens and all columns: without sequence parallelism because the gradient
of A's output is summed over the ranks, with it because the parameter is marked like a norm's. Experts whose matrices
are shared by ranks exchange tokens outside of them, and sum these gradients here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from llmrecipes.recipe.derived.adapters import EXPERTS, is_target
from llmrecipes.recipe.schema import Lora

SUFFIX = "_lora"
"""Follows the name of a layer in that of its adapter."""
ADAPTER = f"{SUFFIX}."
"""In the names of all its parameters, and in no other."""
A, B = "_lora.a.weight", "_lora.b.weight"
"""Ends of the names of an adapter's two matrices."""


@dataclass(frozen=True)
class _Base:
    """What an adapter has to know of its layer.

    Attributes:
        layer: megatron-core's own, or TransformerEngine's.
        width: of the whole input.
        height: of the whole output.
        by_rows: cut by rows, else by columns.
        is_expert: of a routed expert.
        group: ranks that share it.
        explicit: whether its communication is outside of it.
        sequence_parallel: whether the tokens are split outside of it.
        gather_output: whether its ranks put their outputs together.
    """

    layer: Any
    width: int
    height: int
    by_rows: bool
    is_expert: bool
    group: Any
    explicit: bool
    sequence_parallel: bool
    gather_output: bool


def _base(layer: Any, config: TransformerConfig) -> _Base:
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        return _Base(
            layer, layer.input_size, layer.output_size, isinstance(layer, RowParallelLinear), layer.is_expert,
            layer.tp_group, layer.explicit_expert_comm, layer.sequence_parallel,
            isinstance(layer, ColumnParallelLinear) and layer.gather_output,
        )  # fmt: skip
    by_rows = layer.parallel_mode == "row"
    ranks = layer._tp_group.size()
    width, height = layer.in_features, layer.out_features  # of this rank
    return _Base(
        layer, width * ranks if by_rows else width, height if by_rows else height * ranks, by_rows, False,
        layer._tp_group, False, config.sequence_parallel, False,
    )  # fmt: skip


class Adapter(torch.nn.Module):
    """B · A of one linear layer, times `alpha` / `rank`.

    Args:
        base: the layer.
        config: megatron-core's.
        lora: the recipe's section.
        gated: its rows are the two halves of a gated MLP.
    """

    def __init__(self, base: _Base, config: TransformerConfig, lora: Lora, *, gated: bool) -> None:
        super().__init__()
        self._config = config
        self._scale = lora.scale
        self._dropout = lora.dropout
        self._gated = gated
        self._by_rows, self._expert = base.by_rows, base.is_expert
        self.is_off = False
        """Whether the layer computes what it does without it (`dpo`: the reference)."""
        shared: dict[str, Any] = {
            "config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True,
            "is_expert": base.is_expert, "tp_group": base.group,
        }  # fmt: skip
        if self._by_rows:
            self.a: Any = RowParallelLinear(base.width, lora.rank, input_is_parallel=True, **shared)
            self.b: Any = Whole(lora.rank, base.height, base)
        else:
            self.a = Whole(base.width, lora.rank, base)
            self.b = ColumnParallelLinear(lora.rank, base.height, gather_output=base.gather_output, **shared)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the adapter adds to the layer's output.

        Args:
            inputs: of the layer: [s, b, in], or [tokens, in] of an expert; with sequence parallelism [s / TP, b, in] of
                a layer that is cut by columns; [..., in / TP] of one that is cut by rows.
        """
        inner, _ = self.a(self._dropped(inputs))
        outputs, _ = self.b(inner * self._scale)
        result: torch.Tensor = outputs
        return result

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """See megatron-core's `MegatronModule`."""
        state: dict[str, Any] = {}
        for name in ("a", "b"):
            state |= getattr(self, name).sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        if self._gated:
            key = f"{prefix}b.weight"
            state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets)
        return state

    def _dropped(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self._dropout or not self.training:
            return inputs
        # Ranks that have the same input drop the same of it, as megatron-core's hidden dropout does.
        if self._expert:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                return F.dropout(inputs, self._dropout)
        if self._by_rows or self._config.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                return F.dropout(inputs, self._dropout)
        return F.dropout(inputs, self._dropout)


class Whole(torch.nn.Module):
    """A linear layer without bias that every tensor-parallel rank has all of.

    Args:
        width: of the input.
        height: of the output.
        base: the layer whose adapter it belongs to.
    """

    def __init__(self, width: int, height: int, base: _Base) -> None:
        super().__init__()
        self._group = base.group
        weight = base.layer.weight
        self.weight = torch.nn.Parameter(torch.empty(height, width, dtype=weight.dtype, device=weight.device))
        self.weight.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
        if base.explicit:
            if base.group.size() > 1:
                self.weight.register_hook(partial(_summed, base.group))
            # Every expert counts in the gradient norm, also those on further tensor-parallel ranks.
            set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
            self.weight.shared = base.group.rank() > 0  # type: ignore[attr-defined]
        else:
            self.weight.sequence_parallel = base.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As megatron-core's linear layers."""
        return F.linear(inputs, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """See megatron-core's `MegatronModule`."""
        result: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        return result


def insert(module: HybridModel, lora: Lora) -> None:
    """Freeze a model, and give the layers that the recipe names adapters, which are not frozen.

    Args:
        module: one chunk of the model; nothing of it is initialised here.
        lora: the recipe's section.
    """
    module.requires_grad_(False)
    module.has_adapters = True
    for parent, name, layer in list(_layers(module, lora)):
        gated = name == "linear_fc1" and parent.config.gated_linear_unit
        adapter = Adapter(_base(layer, parent.config), parent.config, lora, gated=gated)
        parent.add_module(name + SUFFIX, adapter)
        add: Callable[..., tuple[torch.Tensor, Any]] = _add
        if hasattr(layer, "layer_norm_weight"):
            # TransformerEngine's own switch, which its constructor is not asked for by megatron-core.
            layer.return_layernorm_output = True
            add = _add_to_fused
        # Before other hooks, which put the ranks' parts together (`LatentAttention`).
        layer.register_forward_hook(partial(add, adapter), prepend=True)
    if hasattr(module, "embedding"):
        # Recomputed layers have gradients only if their input has: without this none of them would.
        module.embedding.register_forward_hook(with_gradient)


def adapters(module: torch.nn.Module) -> Iterator[Adapter]:
    """Those of a model."""
    return (submodule for submodule in module.modules() if isinstance(submodule, Adapter))


def _layers(module: HybridModel, lora: Lora) -> Iterator[tuple[Any, str, Any]]:
    """Layers that get adapters: the module that has each, its name there, and itself."""
    decoder = module.decoder
    experts = {
        id(expert) for mlp in decoder.modules() if isinstance(mlp, SequentialMLP) for expert in mlp.local_experts
    }
    for parent in list(decoder.modules()):
        for name, child in parent.named_children():
            target = f"{EXPERTS}{name}" if id(parent) in experts else name
            if _is_linear(child) and is_target(lora, target):
                yield parent, name, child


def _is_linear(module: Any) -> bool:
    """Whether it is one matrix: TransformerEngine's of experts are several in one module, and get no adapters."""
    of_transformer_engine = hasattr(module, "te_return_bias") and not hasattr(module, "num_gemms")
    return isinstance(module, ColumnParallelLinear | RowParallelLinear) or of_transformer_engine


def _add(adapter: Adapter, _layer: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> Any:
    if adapter.is_off:
        return output
    return output[0] + adapter(inputs[0]), *output[1:]


def _add_to_fused(adapter: Adapter, layer: Any, _inputs: Any, output: tuple[Any, ...]) -> tuple[torch.Tensor, Any]:
    """For a layer with a norm inside: (output, bias, norm's result), or ((output, norm's result), None)."""
    if layer.te_return_bias:
        result, bias, normed = output
    else:
        (result, normed), bias = output
    return (result if adapter.is_off else result + adapter(normed)), bias


def with_gradient(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Forward hook of what is frozen, so that a backward pass gets there."""
    return output if output.requires_grad else output.requires_grad_()


def _summed(group: Any, gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
