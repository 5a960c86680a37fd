"""The fields of megatron-core's configurations, read from its source: importing it would import torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

CONFIGURATIONS = {
    "TransformerConfig": "transformer/transformer_config.py",
    "ModelParallelConfig": "model_parallel_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
}
"""Class and file, of those that the engine makes."""


@cache
def core_fields() -> Mapping[str, str]:
    """The class of each field, by the field's name; empty where megatron-core is not installed, as on a login node."""
    try:
        folder = Path(str(metadata.distribution("megatron-core").locate_file("megatron/core")))
    except metadata.PackageNotFoundError:
        return {}
    return {name: each for each, file in CONFIGURATIONS.items() for name in _fields(folder / file, each)}


def _fields(file: Path, wanted: str) -> list[str]:
    classes = (node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in classes if node.name == wanted)
    declared = (line.target for line in body if isinstance(line, ast.AnnAssign))
    return [target.id for target in declared if isinstance(target, ast.Name)]
