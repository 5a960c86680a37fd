"""Signatures of the published TransformerEngine, for the stub: `python tests/stub_te/parse.py FOLDER`.

FOLDER is an unpacked `transformer_engine-*-py3-none-any.whl`, whose Python is parsed and not imported.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

SIGNATURES = Path(__file__).parent / "transformer_engine" / "signatures.json"
CLASSES = {
    "pytorch": {
        "module/linear": ["Linear"],
        "module/layernorm_linear": ["LayerNormLinear"],
        "module/grouped_linear": ["GroupedLinear"],
        "module/layernorm": ["LayerNorm"],
        "module/rmsnorm": ["RMSNorm"],
        "module/fp8_padding": ["Fp8Padding"],
        "module/fp8_unpadding": ["Fp8Unpadding"],
        "attention/dot_product_attention/dot_product_attention": ["DotProductAttention"],
    },
    "pytorch.distributed": {"distributed": ["CudaRNGStatesTracker", "activation_recompute_forward"]},
    "pytorch.optimizers": {"optimizers/fused_adam": ["FusedAdam"], "optimizers/fused_sgd": ["FusedSGD"]},
    "pytorch.module.base": {"module/base": ["TransformerEngineBaseModule", "UserBufferQuantizationMode"]},
}
FUNCTIONS = {
    "pytorch.cpp_extensions": {"cpp_extensions/gemm": ["general_gemm"]},
    "pytorch.distributed": {"distributed": ["checkpoint", "is_fp8_activation_recompute_enabled"]},
    "pytorch.attention.rope": {"attention/rope": ["apply_rotary_pos_emb", "apply_fused_qkv_rotary_pos_emb"]},
    "pytorch.permutation": {
        "permutation": [
            "moe_permute", "moe_permute_with_probs", "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs",
            "moe_unpermute", "moe_permute_and_pad_with_probs",
        ]
    },
    "pytorch.router": {
        "router": ["fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"]
    },
    "pytorch.cross_entropy": {"cross_entropy": ["parallel_cross_entropy"]},
    "pytorch.fp8": {"quantization": ["fp8_autocast", "fp8_model_init"]},
    "pytorch.graph": {
        "graph": [
            "make_graphed_callables", "save_fp8_tensors", "restore_fp8_tensors", "set_capture_start", "set_capture_end",
        ]
    },
    "pytorch.utils": {"utils": ["make_weak_ref"]},
    "pytorch.module.base": {"module/base": ["get_dummy_wgrad", "initialize_ub", "destroy_ub"]},
}  # fmt: skip
"""What megatron-core imports: public module → file below `pytorch/` that defines it → names."""

Parameter = tuple[str, str, bool]
"""Name, kind as `inspect.Parameter.kind`, and whether it has a default."""


def parameters(function: ast.FunctionDef, *, method: bool) -> list[Parameter]:
    """The parameters of a function, those of a method without `self`."""
    spec = function.args
    plain = [*spec.posonlyargs, *spec.args]
    first = len(plain) - len(spec.defaults)
    result = [(arg.arg, "POSITIONAL_OR_KEYWORD", place >= first) for place, arg in enumerate(plain)][int(method) :]
    if spec.vararg:
        result.append((spec.vararg.arg, "VAR_POSITIONAL", False))
    for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        result.append((arg.arg, "KEYWORD_ONLY", default is not None))
    if spec.kwarg:
        result.append((spec.kwarg.arg, "VAR_KEYWORD", False))
    return result


def collect(folder: Path) -> dict[str, list[Parameter]]:
    """Dotted public names, below the package, and the parameters of the function or of the class's `__init__`."""
    collected = {}
    for wanted, is_class in ((CLASSES, True), (FUNCTIONS, False)):
        for public, files in wanted.items():
            for file, names in files.items():
                tree = ast.parse((folder / "transformer_engine" / "pytorch" / f"{file}.py").read_text("utf-8"))
                for node in tree.body:
                    if isinstance(node, ast.ClassDef) and is_class and node.name in names:
                        functions = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                        init = [part for part in functions if part.name == "__init__"]
                        collected[f"{public}.{node.name}"] = parameters(init[0], method=True) if init else []
                    if isinstance(node, ast.FunctionDef) and not is_class and node.name in names:
                        collected[f"{public}.{node.name}"] = parameters(node, method=False)
                missing = [name for name in names if f"{public}.{name}" not in collected]
                assert not missing, f"{file}.py has no {missing}"
    return collected


if __name__ == "__main__":
    (wheel,) = Path(sys.argv[1]).glob("transformer_engine-*.dist-info")
    version = wheel.name.split("-")[1].removesuffix(".dist")
    recorded = {"version": version, **dict(sorted(collect(wheel.parent).items()))}
    lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in recorded.items())
    SIGNATURES.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
