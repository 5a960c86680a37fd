"""Weights in fewer bits, in the form of compressed-tensors: transformers and vLLM read it.

Formats, ranges, scales and packing are those of the package compressed-tensors, of vLLM's authors. A matrix is
read and quantised in pieces of its rows, which do not depend on each other: memory holds its result and one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from llmrecipes.engine.core import integers
from llmrecipes.errors import UserError
from llmrecipes.hf.safetensors import KEPT
from llmrecipes.recipe.rules.qat_rules import GROUPS
from llmrecipes.recipe.sections.qat import BITS, GROUP

if TYPE_CHECKING:
    from llmrecipes.hf.safetensors import PiecewiseSource

READ = 1 << 22
"""Elements that are read at once: a file is opened for each piece."""
PIECE = 1 << 19
"""Elements that are quantised at once, in fp32."""


@dataclass(frozen=True)
class QuantizationScheme:
    """A scheme by its name in `--scheme`.

    Attributes:
        preset: its name in compressed-tensors.
        bits: bits of a weight.
        group: input channels that share a scale; None: all of a row.
        activations: quantised too, when they are computed, with a scale for each token.
        methods: that go with it, the default first.
        form: `format` in config.json.
        experts: whether transformers unpacks experts in it (`CompressedTensorsDequantize`, transformers 5.23).
    """

    preset: str
    bits: int
    group: int | None
    activations: bool
    methods: tuple[str, ...]
    form: str
    experts: bool

    @property
    def integers(self) -> bool:
        """Whether weights are multiples of their scale (`engine.core.integers`)."""
        return self.form in ("pack-quantized", "int-quantized")


SCHEMES: Mapping[str, QuantizationScheme] = {
    "int8": QuantizationScheme("W8A16", BITS["int8"], None, False, ("rtn", "gptq", "awq"), "pack-quantized", True),
    "w8a8": QuantizationScheme("W8A8", 8, None, True, ("rtn", "gptq", "smoothquant"), "int-quantized", False),
    "int4": QuantizationScheme("W4A16", BITS["int4"], GROUP, False, ("rtn", "gptq", "awq"), "pack-quantized", True),
    "fp8": QuantizationScheme("FP8_DYNAMIC", 8, None, True, ("rtn", "smoothquant"), "float-quantized", True),
    "nvfp4": QuantizationScheme("NVFP4A16", 4, 16, False, ("rtn", "awq"), "nvfp4-pack-quantized", False),
}
METHODS = ("rtn", "gptq", "awq", "smoothquant")


class Scheme:
    """The arithmetic of a scheme, on one matrix [out, in] at a time.

    Args:
        name: a key of `SCHEMES`.
        group: input channels that share a scale; None: the scheme's.
        ignored: names of linear layers that stay as they are.

    Raises:
        UserError: the scheme has no groups, or only its own.
    """

    def __init__(self, name: str, group: int | None = None, ignored: Sequence[str] = ()) -> None:
        self.name, self.kind, self.ignored = name, SCHEMES[name], tuple(ignored)
        if group is not None and name != "int4":
            what = "one scale per row" if self.kind.group is None else f"groups of {self.kind.group}"
            raise UserError(
                f"{group} is not valid for {name}", where="--group-size", rule=f"{name} has {what}", fix="leave it out"
            )
        self.group = group or self.kind.group

    @cached_property
    def spec(self) -> Any:
        """A `QuantizationScheme` of compressed-tensors."""
        from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

        spec = preset_name_to_scheme(self.kind.preset, ["Linear"])
        values = spec.model_dump()
        weights = values["weights"]
        if self.kind.group is None and weights["strategy"] == "group":
            weights |= {"strategy": "channel", "group_size": None}
        elif weights["strategy"] == "group":
            weights["group_size"] = self.group
        return type(spec).model_validate({**values, "weights": weights, "format": self.kind.form})

    def config(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        from compressed_tensors import __version__
        from compressed_tensors.quantization import QuantizationConfig

        whole = QuantizationConfig(
            config_groups={"group_0": self.spec},
            format=self.kind.form,
            ignore=list(self.ignored),
            quantization_status="compressed",
        )
        values: dict[str, Any] = whole.model_dump(mode="json", exclude_none=True)
        return {**values, "version": __version__}

    def require(self, name: str, shape: Sequence[int]) -> None:
        """Refuse a matrix whose rows the scheme cannot divide.

        Raises:
            UserError: it cannot.
        """
        if self.group is None or shape[-1] % self.group == 0:
            return
        smaller = next((size for size in GROUPS if shape[-1] % size == 0), None)
        fix = f"--group-size {smaller}" if smaller is not None and self.name == "int4" else "--scheme int8"
        raise UserError(
            f"{name} has rows of {shape[-1]} elements",
            where="--scheme" if self.name == "nvfp4" else "--group-size",
            rule=f"{self.name} has a scale for every {self.group} elements, so rows must be a multiple of that",
            fix=fix,
        )

    def parts(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Names, shapes and types of the tensors that a matrix becomes.

        Args:
            name: name of the matrix, with `.weight`.
            shape: [out, in].
            dtype: dtype of its elements, and of its scales.
        """
        rows, columns = shape
        groups = columns // self.group if self.group else 1
        layer = name.removesuffix("weight")
        if self.kind.form == "nvfp4-pack-quantized":
            return {
                f"{layer}weight_packed": ((rows, columns // 2), torch.uint8),
                f"{layer}weight_scale": ((rows, groups), torch.float8_e4m3fn),
                f"{layer}weight_global_scale": ((1,), torch.float32),
            }
        scale = {f"{layer}weight_scale": ((rows, groups), dtype)}
        if self.kind.form == "pack-quantized":
            packed = {f"{layer}weight_packed": ((rows, -(-columns * self.kind.bits // 32)), torch.int32)}
            return {**packed, **scale, f"{layer}weight_shape": ((2,), torch.int64)}
        stored = torch.int8 if self.kind.form == "int-quantized" else torch.float8_e4m3fn
        return {name: ((rows, columns), stored), **scale}

    def scale(self, weight: torch.Tensor, whole: torch.Tensor | None = None) -> torch.Tensor:
        """Scales [out, groups] of a matrix, or of some of its rows.

        Args:
            weight: [out, in].
            whole: scale of the whole matrix (`whole_scale`).
        """
        if self.kind.integers:
            return integers.scales(integers.largest(weight, self.group), self.kind.bits, weight.dtype)
        from compressed_tensors.quantization.utils import calculate_qparams

        values = weight.float().unflatten(-1, (-1, self.group or weight.size(-1)))
        scale: torch.Tensor = calculate_qparams(values.amin(-1), values.amax(-1), self.spec.weights, whole)[0]
        return scale if self.kind.form == "nvfp4-pack-quantized" else scale.to(weight.dtype)

    def whole_scale(self, pieces: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """The scale [1] of scales, fp32; None in schemes without, which read nothing.

        Args:
            pieces: rows of a matrix.
        """
        if self.kind.form != "nvfp4-pack-quantized":
            return None
        from compressed_tensors.quantization.utils import generate_gparam

        ends = torch.stack([torch.stack(piece.aminmax()).float() for piece in pieces])
        made: torch.Tensor = generate_gparam(ends[:, 0].amin(), ends[:, 1].amax())
        return made

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """The values [out, in] that a matrix has after it is quantised, fp32."""
        if self.kind.integers:
            values = torch.empty_like(weight, dtype=torch.float32)
            integers.round_into(values, weight, self.scale(weight), self.kind.bits)
            return values
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize

        whole = self.whole_scale([weight])
        scale = self.scale(weight, whole).float()
        made: torch.Tensor = fake_quantize(
            weight.float(), scale, torch.zeros_like(scale), self.spec.weights, global_scale=whole
        )
        return made

    def compress(
        self, name: str, rows: int, pieces: Callable[[], Iterable[torch.Tensor]], scale: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The tensors that a matrix becomes, by their names in the file.

        Args:
            name: name of the matrix, with `.weight`.
            rows: rows of the matrix.
            pieces: begins to return its rows [some, in]; called twice if the scheme has a scale of the whole matrix.
            scale: [out, groups]; None: from the largest value of each group.
        """
        from compressed_tensors.compressors import BaseCompressor

        compressor = BaseCompressor.get_value_from_registry(self.kind.form)
        whole = self.whole_scale(pieces())
        made: dict[str, torch.Tensor] = {}
        start = columns = 0
        for part in (part for piece in pieces() for part in piece.split(max(1, PIECE // piece.size(-1)))):
            end = start + part.size(0)
            columns = part.size(1)
            state = {"weight_scale": self.scale(part, whole) if scale is None else scale[start:end]}
            if whole is not None:
                state["weight_global_scale"] = whole
            # In fp32: a quotient that is rounded in bf16 would be another integer.
            for key, value in compressor.compress({"weight": part.float(), **state}, self.spec).items():
                if key in ("weight_shape", "weight_global_scale"):
                    continue
                if key not in made:  # joined at the end, the results would be in memory twice
                    made[key] = value.new_empty(rows, *value.shape[1:])
                made[key][start:end] = value
            start = end
        if self.kind.form == "pack-quantized":
            made["weight_shape"] = torch.tensor([rows, columns])
        if whole is not None:
            made["weight_global_scale"] = whole
        return {f"{name.removesuffix('weight')}{key}": value for key, value in made.items()}


@dataclass(frozen=True)
class Changed:
    """What a calibration has made of a tensor.

    Attributes:
        value: its new values.
        scale: scale of a quantised matrix, [out, groups]; None: from the largest values.
    """

    value: torch.Tensor
    scale: torch.Tensor | None = None


class QuantizedSource:
    """A model whose matrices are quantised when they are read; see `hf.safetensors.PiecewiseSource`.

    Args:
        source: the model.
        scheme: scheme of its matrices.
        linears: names of the matrices, with `.weight`.
        dtype: dtype of scales, and of what is not quantised; None: as stored.
        changed: tensors with other values than those of the source.

    Raises:
        UserError: a matrix that the scheme cannot divide.
    """

    def __init__(
        self,
        source: PiecewiseSource,
        scheme: Scheme,
        linears: Sequence[str],
        dtype: torch.dtype | None = None,
        changed: Mapping[str, Changed] | None = None,
    ) -> None:
        self._source = source
        self._scheme = scheme
        self._dtype = dtype
        self._changed = changed or {}
        quantised = set(linears)
        self._parts: dict[str, tuple[str, tuple[int, ...], torch.dtype]] = {}
        for name in source.names():
            shape = source.shape(name)
            kind = self._kind(name)
            if name in quantised:
                scheme.require(name, shape)
                for part, (size, element) in scheme.parts(name, shape, kind).items():
                    self._parts[part] = name, size, element
            else:
                self._parts[name] = name, tuple(shape), kind
        self._quantised = quantised
        self._last: tuple[str, dict[str, torch.Tensor]] = "", {}

    def _kind(self, name: str) -> torch.dtype:
        stored = self._source.dtype(name)
        if self._dtype is None or not stored.is_floating_point or name.endswith(KEPT):
            return stored
        return self._dtype

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._parts[name][1]

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        return self._parts[name][2]

    def read(self, name: str) -> torch.Tensor:
        """See `TensorSource`."""
        origin = self._parts[name][0]
        kind = self._kind(origin)
        if origin not in self._quantised:
            changed = self._changed.get(origin)
            return (self._source.read(origin) if changed is None else changed.value).to(kind)
        if self._last[0] != origin:
            self._last = "", {}
            self._last = origin, self._compressed(origin, kind)
        return self._last[1].pop(name)

    def pieces(self, name: str, elements: int) -> Iterator[torch.Tensor]:
        """See `PiecewiseSource`."""
        origin = self._parts[name][0]
        if origin in self._quantised or origin in self._changed:
            yield self.read(name)
            return
        kind = self._kind(origin)
        for piece in self._source.pieces(origin, elements):
            yield piece.to(kind)

    def _compressed(self, name: str, kind: torch.dtype) -> dict[str, torch.Tensor]:
        changed = self._changed.get(name)
        rows = self._source.shape(name)[0]
        if changed is None:
            return self._scheme.compress(
                name, rows, lambda: (piece.to(kind) for piece in self._source.pieces(name, READ))
            )
        value, scale = changed.value, changed.scale
        if scale is None:
            return self._scheme.compress(name, rows, lambda: [value.to(kind)])
        return self._scheme.compress(name, rows, lambda: [value], scale.to(kind))
