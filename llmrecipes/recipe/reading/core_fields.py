"""The fields of megatron-core's configurations, read from its source: importing it would import torch."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import ConfigDict, Field, TypeAdapter

CONFIGURATIONS = {
    "MLATransformerConfig": "transformer/transformer_config.py",
    "TransformerConfig": "transformer/transformer_config.py",
    "ModelParallelConfig": "model_parallel_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
}
"""Class and file, of those that the engine makes; a later one is named for a field that several have."""
OF_MODELS = ("ModelParallelConfig", "TransformerConfig")
"""The classes of a model's configuration, the base first."""
LATENT = "MLATransformerConfig"
"""That of a model with latent attention, after these."""

MOST_ITEMS, MOST_CHARACTERS = 1 << 14, 1 << 10
_PLAIN: Mapping[str, Any] = {
    "int": Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)],
    "float": float,
    "bool": bool,
    "str": Annotated[str, Field(max_length=MOST_CHARACTERS)],
}


@cache
def _declared() -> Mapping[str, Mapping[str, ast.expr]]:
    try:
        folder = Path(str(metadata.distribution("megatron-core").locate_file("megatron/core")))
    except metadata.PackageNotFoundError:
        return {}
    return {each: _fields(folder / file, each) for each, file in CONFIGURATIONS.items()}


def _fields(file: Path, wanted: str) -> dict[str, ast.expr]:
    classes = (node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in classes if node.name == wanted)
    lines = (line for line in body if isinstance(line, ast.AnnAssign))
    return {line.target.id: line.annotation for line in lines if isinstance(line.target, ast.Name)}


def core_fields() -> Mapping[str, str]:
    """The class of each field, by the field's name; empty where megatron-core is not installed, as on a login node."""
    return {name: each for each, fields in _declared().items() for name in fields}


def fields_of_model(*, latent: bool) -> Mapping[str, ast.expr]:
    """The declared type of each field of a model's configuration; empty as `core_fields`.

    Args:
        latent: of a model with latent attention.
    """
    declared = _declared()
    kinds = [*OF_MODELS, *([LATENT] if latent else [])]
    return {name: kind for each in kinds for name, kind in declared.get(each, {}).items()}


def type_of(declared: ast.expr) -> Any:
    """The part of a declared type that JSON can have, for pydantic; None for a type that it cannot: a function, a data
    type of torch."""
    match declared:
        case ast.Constant(value=None):
            return type(None)
        case ast.Name(id=name):
            return _PLAIN.get(name)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            return Literal[ast.literal_eval(values)]
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return None if (kind := type_of(inner)) is None else Optional[kind]  # noqa: UP045 - a value, not a name
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
            kinds = tuple(kind for part in parts if (kind := type_of(part)) is not None)
            return Union[kinds] if kinds else None  # noqa: UP007 - as above
        case ast.Subscript(value=ast.Name(id="List" | "list"), slice=inner):
            kind = type_of(inner)
            return None if kind is None else Annotated[list[kind], Field(max_length=MOST_ITEMS)]  # type: ignore[valid-type]
        case ast.Subscript(value=ast.Name(id="Tuple" | "tuple"), slice=ast.Tuple(elts=parts)):
            return tuple[tuple(type_of(part) for part in parts)]  # type: ignore[misc]
    return None


def converted(value: object, declared: ast.expr) -> Any:
    """A JSON value as its field takes it: a list as a tuple, where the field is one.

    Raises:
        pydantic.ValidationError: it is not of the declared type, or too large.
    """
    # JSON has one kind of list, and pydantic's `Literal` accepts what equals a number: `true` for 1.
    adapter = TypeAdapter(type_of(declared), config=ConfigDict(strict=True, allow_inf_nan=False))
    return adapter.validate_json(json.dumps(value))
