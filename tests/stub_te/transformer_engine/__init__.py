"""A TransformerEngine without kernels: the signatures of the published one, and the names and shapes of its parameters.

It shows on a CPU how megatron-core builds its layers for a GPU: a call that the published signature does not accept
raises TypeError, and every computation raises unless its tensors are on a GPU, as the real one does.
`signatures.json` is written by `tests/stub_te/parse.py`.
"""

from __future__ import annotations

import enum
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("signatures.json").read_text("utf-8"))
__version__ = _RECORDED.pop("version")
SIGNATURES = {
    name: inspect.Signature(
        [
            inspect.Parameter(
                parameter, inspect._ParameterKind[kind], default=None if optional else inspect.Parameter.empty
            )
            for parameter, kind, optional in parameters
        ]
    )
    for name, parameters in _RECORDED.items()
}


def _require_cuda(*values: Any) -> None:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors or not all(tensor.is_cuda for tensor in tensors):
        raise RuntimeError(f"TransformerEngine computes on CUDA, not on {[tensor.device for tensor in tensors]}")


def _module(name: str) -> Any:
    """The module below this package, which is made with its parents."""
    made: Any = sys.modules[__name__]
    for place, part in enumerate(parts := name.split(".")):
        dotted = ".".join((__name__, *parts[: place + 1]))
        if dotted not in sys.modules:
            sys.modules[dotted] = ModuleType(dotted)
            sys.modules[dotted].__path__ = []  # a package: `import a.b.c` asks its parent
            setattr(made, part, sys.modules[dotted])
        made = sys.modules[dotted]
    return made


def _function(name: str) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        SIGNATURES[name].bind(*args, **options)
        _require_cuda(*args, *options.values())

    return call


class _Module(torch.nn.Module):
    """A module whose arguments are checked, and whose forward pass needs a GPU."""

    public: str

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        bound = SIGNATURES[self.public].bind(*args, **options)
        self.create(**{name: value for name, value in bound.arguments.items() if name != "kwargs"})

    def create(self, **_options: Any) -> None: ...

    def parameter(self, name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        # Not where `device` says: a GPU that is not there.
        values = torch.empty(shape, device="meta", dtype=options["params_dtype"])
        self.register_parameter(name, torch.nn.Parameter(values))

    def forward(self, *args: Any, **options: Any) -> Any:
        _require_cuda(*args, *options.values())

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


def _mark_split(values: Any, dim: int) -> None:
    vars(values).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)


class _Linear(_Module):
    """A split or unsplit matrix, as `parallel_mode` and the group say.

    Its parameters have the marks of 2.20.2 (`reset_parameters`, `set_tensor_parallel_attributes`): each matrix that of
    one that is split, also without a `parallel_mode`; none those of `GroupedLinear`.
    """

    def sizes(self, **options: Any) -> tuple[int, int]:
        self.user_buffer = {name: value for name, value in options.items() if name.startswith("ub_")}
        self.delayed = options.get("delay_wgrad_compute", False)
        self.parallel_mode, self.use_bias = options.get("parallel_mode"), options.get("bias", True)
        group = options.get("tp_group")
        self.tp_size = group.size() if group is not None else options.get("tp_size", 1)
        self.sequence_parallel = self.tp_size > 1 and bool(options.get("sequence_parallel"))
        self.in_features, self.out_features = options["in_features"], options["out_features"]
        if self.parallel_mode == "column":
            self.out_features //= self.tp_size
        elif self.parallel_mode == "row":
            self.in_features //= self.tp_size
        return self.out_features, self.in_features

    def create(self, **options: Any) -> None:
        self.parameter("weight", self.sizes(**options), options)
        _mark_split(self.weight, int(self.parallel_mode == "row"))
        if self.use_bias:
            self.parameter("bias", (self.out_features,), options)
            if self.parallel_mode == "column":
                _mark_split(self.bias, 0)
            elif self.parallel_mode == "row":
                vars(self.bias)["sequence_parallel"] = self.sequence_parallel


class Linear(_Linear):
    public = "pytorch.Linear"
    save_original_input = False


class LayerNormLinear(_Linear):
    public = "pytorch.LayerNormLinear"

    def create(self, **options: Any) -> None:
        self.eps = options.get("eps")
        self.parameter("layer_norm_weight", (options["in_features"],), options)
        if options.get("normalization", "LayerNorm") == "LayerNorm":
            self.parameter("layer_norm_bias", (options["in_features"],), options)
        super().create(**options)
        for name, values in self.named_parameters():
            if name.startswith("layer_norm"):
                vars(values)["sequence_parallel"] = self.sequence_parallel


class GroupedLinear(_Linear):
    public = "pytorch.GroupedLinear"
    save_original_input = False

    def create(self, **options: Any) -> None:
        self.num_gemms = options["num_gemms"]
        # megatron-core splits the state of fp8 between the experts of a checkpoint.
        self.fp8_meta, self.fp8, self.fp8_calibration = {"fp8_checkpoint": False}, False, False
        shape = self.sizes(**options)
        for number in range(self.num_gemms):
            self.parameter(f"weight{number}", shape, options)
            if self.use_bias:
                self.parameter(f"bias{number}", shape[:1], options)


class RMSNorm(_Module):
    public = "pytorch.RMSNorm"

    def create(self, **options: Any) -> None:
        size = options["normalized_shape"]
        for name in self.names():
            self.parameter(name, (size,), options)
        for values in self.parameters():
            vars(values)["sequence_parallel"] = bool(options.get("sequence_parallel"))

    def names(self) -> tuple[str, ...]:
        return ("weight",)


class LayerNorm(RMSNorm):
    public = "pytorch.LayerNorm"

    def names(self) -> tuple[str, ...]:
        return ("weight", "bias")


class DotProductAttention(_Module):
    public = "pytorch.DotProductAttention"


class Fp8Padding(_Module):
    public = "pytorch.Fp8Padding"


class Fp8Unpadding(_Module):
    public = "pytorch.Fp8Unpadding"


class FusedAdam(torch.optim.Optimizer):
    """Refuses parameters that are not on a GPU, where it creates its buffers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        bound = SIGNATURES["pytorch.optimizers.FusedAdam"].bind(*args, **options)
        groups = list(bound.arguments["params"])
        _require_cuda(*(p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])))
        super().__init__(groups, {"lr": bound.arguments.get("lr", 1e-3)})


_CLASSES = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention, Fp8Padding, Fp8Unpadding)
for _name in SIGNATURES:
    _public, _, _last = _name.rpartition(".")
    # A class that no test builds is one that only exists.
    setattr(_module(_public), _last, type(_last, (), {}) if _last[0].isupper() else _function(_name))
for _class in _CLASSES:
    setattr(_module("pytorch"), _class.__name__, _class)
_optimizers = _module("pytorch.optimizers")
_optimizers.FusedAdam = FusedAdam
for _last in ("multi_tensor_applier", "multi_tensor_scale", "multi_tensor_l2norm"):
    setattr(_optimizers, _last, lambda *args, **options: _require_cuda(*args, *options.values()))

_module("pytorch.fp8").FP8GlobalStateManager = type("FP8GlobalStateManager", (), {})
_module("pytorch.tensor").QuantizedTensor = type("QuantizedTensor", (torch.Tensor,), {})
_module("pytorch.tensor.float8_tensor").Float8Tensor = type("Float8Tensor", (torch.Tensor,), {})
_module("pytorch.float8_tensor").Float8Tensor = _module("pytorch.tensor.float8_tensor").Float8Tensor


class UserBufferQuantizationMode(enum.Enum):
    NONE = 1
    FP8 = 2


_module("pytorch.module.base").UserBufferQuantizationMode = UserBufferQuantizationMode


class Format(enum.Enum):
    E4M3 = 1
    HYBRID = 2


_recipe = _module("common.recipe")
_recipe.Format = Format


class _Scaling:
    """How values in fp8 are scaled; it keeps its options."""

    def __init__(self, **options: Any) -> None:
        self.options = options


for _last in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"):
    setattr(_recipe, _last, type(_last, (_Scaling,), {}))
# megatron-core evaluates annotations with these names.
for _last in ("Sequential", "FusibleOperation"):
    setattr(_module("pytorch.ops"), _last, type(_last, (), {}))
