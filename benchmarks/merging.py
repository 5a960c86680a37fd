"""Merging beside mergekit: its results as golden values of tests, and how far ours are from them.

pip install mergekit            # where it does not disturb the packages of this project
python -m benchmarks.merging golden tests/golden/mergekit.json
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, show
from llmrecipes.hf.safetensors import write
from llmrecipes.models.create import published
from llmrecipes.models.merge_formulas import keep
from llmrecipes.models.merge_options import METHODS

SEED = 7
SHAPES = {"matrix": (6, 5), "vector": (7,), "zeros": (4,), "one": (1,)}
MODELS = 3
CASES: tuple[dict[str, Any], ...] = (
    {"method": "linear", "weights": [1, 1, 1]},
    {"method": "linear", "weights": [0.5, 2, -0.25]},
    {"method": "linear", "weights": [0.5, 2, -0.25], "normalize": False},
    {"method": "slerp", "t": 0.0},
    {"method": "slerp", "t": 0.3},
    {"method": "slerp", "t": 1.0},
    {"method": "task-arithmetic", "weights": [1, 1, 1]},
    {"method": "task-arithmetic", "weights": [0.75, -0.5, 0.25], "scale": 0.5},
    {"method": "task-arithmetic", "weights": [0.75, 0.5, 0.25], "normalize": True},
    {"method": "ties", "weights": [1, 1, 1], "densities": [1, 1, 1]},
    {"method": "ties", "weights": [1, 1, 1], "densities": [0.4, 0.4, 0.4]},
    {"method": "ties", "weights": [0.5, 2, 1], "densities": [0.2, 0.55, 0.9], "scale": 0.7},
    {"method": "ties", "weights": [0.5, 2, 1], "densities": [0.2, 0.55, 0.9], "normalize": False},
    {"method": "dare", "weights": [1, 1, 1], "densities": [0.5, 0.5, 0.5]},
    {"method": "dare", "weights": [0.5, 2, 1], "densities": [0.5, 0.5, 0.5], "scale": 0.7},
    {"method": "dare-ties", "weights": [1, 1, 1], "densities": [0.5, 0.5, 0.5]},
    {"method": "dare-ties", "weights": [0.5, 2, 1], "densities": [0.5, 0.5, 0.5], "normalize": True},
)


def inputs() -> dict[str, list[torch.Tensor]]:
    """By name: the base's tensor and those of the models. JSON keeps the numbers exactly; no two have one magnitude."""
    generator = torch.Generator().manual_seed(SEED)
    made = {}
    for name, shape in SHAPES.items():
        tensors = [
            torch.randint(-(1 << 15), 1 << 15, shape, generator=generator) / (1 << 13) for _ in range(1 + MODELS)
        ]
        made[name] = [tensor * (name != "zeros") for tensor in tensors]
    return made


def merged_by_mergekit(case: dict[str, Any], name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What mergekit makes of a base's tensor and those of the models."""
    from mergekit.merge_methods import registry
    from mergekit.merge_methods.base import TensorGroup

    method = {"task-arithmetic": "task_arithmetic", "dare": "dare_linear", "dare-ties": "dare_ties"}
    given = {key: value for key, value in case.items() if key not in {"method", "scale", "weights", "densities"}}
    group = TensorGroup.from_tensors(tensors[1:])
    if case["method"] == "slerp":
        group = TensorGroup.from_tensors(tensors[1:3], base_index=0)
    elif case["method"] != "linear":
        group = TensorGroup.from_tensors(tensors, base_index=0)
        given["lambda"] = case.get("scale", 1.0)
    if "weights" in case:
        given["weight"] = [float(weight) for weight in case["weights"]]
    if "densities" in case:
        given["density"] = [float(density) for density in case["densities"]]
    kept: list[torch.Tensor] = []
    if case["method"].startswith("dare"):
        # The paper's factor, one over the density, is mergekit's lambda if all densities are equal.
        (density,) = set(case["densities"])
        given |= {"rescale": False, "lambda": case.get("scale", 1.0) / density}
        kept = [keep(tensors[0].shape, density, seed=SEED, name=name, model=model) for model in range(MODELS)]
    with drawing(kept):
        (result,) = registry.get(method.get(case["method"], case["method"]))([group], parameters=given)
    return result


@contextmanager
def drawing(kept: Sequence[torch.Tensor]) -> Iterator[None]:
    """mergekit draws with torch's own generator; here it gets our masks, in the order of the models."""
    original, masks = torch.bernoulli, iter(kept)
    torch.bernoulli = lambda probabilities: next(masks).to(probabilities.dtype)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.bernoulli = original


def golden(path: Path) -> None:
    """Write the file that tests/unit/test_merge_formulas.py reads."""
    tensors = inputs()
    cases = [
        {**case, "results": {name: merged_by_mergekit(case, name, each).tolist() for name, each in tensors.items()}}
        for case in CASES
    ]
    content = {
        "made_by": f"python -m benchmarks.merging golden FILE, with mergekit {metadata.version('mergekit')}",
        "seed": SEED,
        "inputs": {name: [each.tolist() for each in group] for name, group in tensors.items()},
        "cases": cases,
    }
    path.write_text(json.dumps(content, indent=None, separators=(",", ":")).replace('{"method"', '\n{"method"') + "\n")


LLAMA_1B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": True,
}  # fmt: skip


class RandomWeights:
    """Weights of `LLAMA_1B` in bf16, other ones for each seed; see `TensorSource`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        layer = {
            "self_attn.q_proj": (2048, 2048), "self_attn.k_proj": (512, 2048), "self_attn.v_proj": (512, 2048),
            "self_attn.o_proj": (2048, 2048), "mlp.gate_proj": (8192, 2048), "mlp.up_proj": (8192, 2048),
            "mlp.down_proj": (2048, 8192), "input_layernorm": (2048,), "post_attention_layernorm": (2048,),
        }  # fmt: skip
        layers = {f"model.layers.{n}.{name}.weight": shape for n in range(16) for name, shape in layer.items()}
        self._shapes = {"model.embed_tokens.weight": (128256, 2048), **layers, "model.norm.weight": (2048,)}

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._shapes[name]

    def dtype(self, _name: str) -> torch.dtype:
        """See `TensorSource`."""
        return torch.bfloat16

    def read(self, name: str) -> torch.Tensor:
        """See `TensorSource`."""
        generator = torch.Generator().manual_seed(hash((self._seed, self._shapes[name])))
        return torch.randn(self._shapes[name], generator=generator, dtype=torch.bfloat16).mul_(0.02)


def measure(folder: Path) -> None:
    """Merge models of 1.2 billion parameters by every method, each in a process of its own."""
    models = [folder / name for name in ("one", "two", "base")]
    for seed, model in enumerate(models):
        if not model.exists():
            with published(model) as part:
                write(RandomWeights(seed), LLAMA_1B, part)
    rows = []
    for method, found in METHODS.items():
        out = folder / method
        options = ["--base", str(models[2])] if found.base else []
        options += ["--density", "0.5"] if found.density else []
        command = [sys.executable, "-m", "llmrecipes.cli", "merge", str(models[0]), str(models[1]), "--method", method]
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        done = subprocess.run([*command, *options, "--no-tokenizer", "--json", "--out", str(out)], capture_output=True)
        if done.returncode:
            raise SystemExit(done.stderr.decode())
        result = json.loads(done.stdout)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # the largest so far
        rows.append((method, f"{result['seconds']:.1f}", f"{peak / 2**20:.2f}{'' if peak > before else ' or less'}"))
        shutil.rmtree(out)
    show("two models of 1.24 billion parameters in bf16", ["method", "seconds", "GiB at most"], rows)
    print(json.dumps(machine()))


def main() -> None:
    """Run the named part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["golden", "measure"])
    parser.add_argument("path", type=Path)
    given = parser.parse_args()
    parts: dict[str, Callable[[Path], None]] = {"golden": golden, "measure": measure}
    parts[given.what](given.path)


if __name__ == "__main__":
    main()
