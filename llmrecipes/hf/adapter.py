"""Adapters as PEFT has them, and a model with its adapters added to its weights.

Megatron's fused matrices have one adapter, transformers' parts of them one each: the rows of a fused product B · A are
those of the parts, so each part has the same A and its own rows of B.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llmrecipes.errors import UserError
from llmrecipes.hf.safetensors import TensorSource
from llmrecipes.hf.table import FUSED_QKV, TRANSPOSED, Family
from llmrecipes.hf.weights import FolderWeights
from llmrecipes.recipe.derived.weight_names import weights
from llmrecipes.recipe.schema import Lora, Model

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
KEYS = frozenset({"rank", "alpha", "dropout", "target_modules"})
"""Keys of `lora` that adapters are written and merged with: of other keys, PEFT supports only the default."""
SUFFIX = "_lora"
"""Follows the name of a matrix in that of its adapter, in checkpoints."""
_EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.local_experts\.\d+\.(linear_fc[12])")
"""A matrix of an expert: its layer, and which."""
_PARAMETERS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
"""Parameters with those of all experts of a layer in transformers, in this order in their module."""


class WrittenAdapters(NamedTuple):
    """Summary of a written file: adapters, parameters, bytes."""

    adapters: int
    parameters: int
    bytes: int


class Merged:
    """Weights with adapters added: W + alpha / rank · B · A, in fp32; see `TensorSource`.

    Args:
        base: the weights that the adapters were trained on.
        adapters: a checkpoint's, by the names of megatron-core.
        model, lora: those of the recipe.
    """

    def __init__(self, base: FolderWeights, adapters: TensorSource, model: Model, lora: Lora) -> None:
        self._base = base
        self._adapters = adapters
        self._scale = lora.scale
        self._sizes = weights(model)
        self._adapted = set(matrices(adapters))

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return list(self._sizes)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._sizes[name]

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        return torch.float32

    def read(self, name: str) -> torch.Tensor:
        """See `TensorSource`."""
        size = self._sizes[name]
        weight = self._base.read(name, tuple(0 for _ in size), size).float()
        matrix = name.removesuffix(".weight")
        if matrix not in self._adapted:
            return weight
        a, b = (self._adapters.read(f"{matrix}{SUFFIX}.{side}.weight").float() for side in "ab")
        return weight.addmm_(b, a, alpha=self._scale)


def matrices(adapters: TensorSource) -> Iterator[str]:
    """Matrices that have adapters, by their names without `.weight`."""
    end = f"{SUFFIX}.a.weight"
    return (name.removesuffix(end) for name in adapters.names() if name.endswith(end))


def write(adapters: TensorSource, family: Family, model: Model, lora: Lora, base: str, folder: Path) -> WrittenAdapters:
    """Write adapter_config.json and adapter_model.safetensors, which `PeftModel.from_pretrained` loads.

    All adapters are in memory, some thousandths of the model.

    Args:
        adapters: a checkpoint's, by the names of megatron-core.
        family: family of the base model.
        model, lora: those of the recipe.
        base: folder or name of the base model.
        folder: an empty folder.

    Raises:
        UserError: dense layers or shared experts of a model with experts have adapters.
        OSError: a disk error.
    """
    from safetensors.torch import save

    adapted = sorted(matrices(adapters), key=_order)
    of_experts = [matrix for matrix in adapted if _EXPERT.fullmatch(matrix)]
    others = [matrix for matrix in adapted if not _EXPERT.fullmatch(matrix)]
    _refuse_mlps(others, model)
    tensors, parameters = _of_experts(adapters, of_experts, family, model)
    modules: set[str] = set()
    transposed = False
    for matrix in others:
        pair = family.pair(f"{matrix}.weight", model.num_layers)
        a, b = (adapters.read(f"{matrix}{SUFFIX}.{side}.weight") for side in "ab")
        parts = pair.transform.split(b, model)
        if pair.transform in (TRANSPOSED, FUSED_QKV):
            # GPT-2's matrices are transposed on disk, its adapters are not.
            transposed = True
            parts = [part.t() for part in parts]
        for name, part in zip(pair.theirs, parts, strict=True):
            module = name.removesuffix(".weight")
            modules.add(_without_layer(module))
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.clone()
            tensors[f"base_model.model.{module}.lora_B.weight"] = part.contiguous().clone()
    # Not `save_file`, whose file only its owner may read.
    (folder / WEIGHTS_NAME).write_bytes(save(tensors, {"format": "pt"}))
    alpha = lora.scale * lora.rank
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        # PEFT has no dropout for adapters of parameters; here it would only act in training.
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "target_modules": sorted(modules),
        **({"target_parameters": parameters} if parameters else {}),
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    size = sum(tensor.nbytes for tensor in tensors.values())
    return WrittenAdapters(len(tensors) // 2, sum(tensor.numel() for tensor in tensors.values()), size)


def _of_experts(
    adapters: TensorSource, matrices_of_experts: Iterable[str], family: Family, model: Model
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Adapters of experts as PEFT has them: two matrices for all experts of a layer, whose weights are one parameter.

    With E experts, A is [E rank, in], expert by expert; B is [out, rank E], where the expert changes fastest. Of two
    parameters of a module, PEFT wraps the first and then the second around it.

    Returns:
        Tensors by name, and `target_parameters`.
    """
    layers: dict[tuple[str, str], list[str]] = {}
    for matrix in matrices_of_experts:
        if match := _EXPERT.fullmatch(matrix):
            layers.setdefault((match[1], match[2]), []).append(matrix)
    names = {name for _, name in layers}
    tensors: dict[str, torch.Tensor] = {}
    for (layer, name), experts in layers.items():
        a, b = ([adapters.read(f"{expert}{SUFFIX}.{side}.weight") for expert in experts] for side in "ab")
        pair = family.pair(f"{experts[0]}.weight", model.num_layers)
        if pair.expert is not None:  # the rows are in another order, and the matrix is transposed, the adapter is not
            b = [pair.transform.split(each, model)[0].t() for each in b]
        inner = ".base_layer" if name == "linear_fc1" and len(names) > 1 else ""
        place = f"base_model.model.model.layers.{layer}.mlp.experts{inner}"
        tensors[f"{place}.lora_A.weight"] = torch.cat(a)
        tensors[f"{place}.lora_B.weight"] = torch.stack(b, -1).flatten(1)
    return tensors, [f"experts.{_PARAMETERS[name]}" for name in sorted(names)]


def _refuse_mlps(adapted: Iterable[str], model: Model) -> None:
    """Refuse adapters that PEFT would apply to experts.

    In a model with experts, PEFT turns every `gate_proj`, `up_proj` and `down_proj`, those of dense layers and shared
    experts too, into the parameter that has all experts of a layer.
    """
    if model.num_moe_experts is None:
        return
    names = sorted({name.rpartition(".")[2] for name in adapted if name.endswith(("linear_fc1", "linear_fc2"))})
    if names:
        raise UserError(
            f"adapters of {', '.join(names)} outside of the experts of a model with experts",
            where="lora.target_modules",
            rule="PEFT cannot store them: it would apply each to all experts of a layer",
            fix="--to hf --merge-adapter, which writes the complete model; or train without them",
        )


def _order(matrix: str) -> tuple[object, ...]:
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in matrix.split("."))


def _without_layer(module: str) -> str:
    """`self_attn.q_proj` of `model.layers.3.self_attn.q_proj`: PEFT compares the ends of names."""
    parts = module.split(".")
    number = next(index for index, part in enumerate(parts) if part.isdecimal())
    return ".".join(parts[number + 1 :])
