"""`llmrecipes grow`: a checkpoint of a run becomes step 0 of a run with a deeper or wider model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.models.create import CreatedRun, create_run, require_unused, write_checkpoint
from llmrecipes.plan.parameters import count
from llmrecipes.recipe.derived.shape import Shape, shape
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.schema import Model
from llmrecipes.recipe.variants.growth import Growth, layers, load_grown, preserves
from llmrecipes.rundir import Run
from llmrecipes.workflow.model_source import find_checkpoint

if TYPE_CHECKING:
    import torch

    from llmrecipes.hf.safetensors import TensorSource
    from llmrecipes.tracking.progress import Counted


RECORD = "grown.json"
FIRST_PART = 0.625
"""Share of the first of two copies. With equal shares both would have the same gradients, and stay the same for ever.
What is left after at least a half has been taken is exact in every floating-point type (Sterbenz' lemma), so that the
copies of a weight sum to it in the precision of the checkpoint."""


def grow(
    reference: str,
    growth: Growth,
    overrides: Sequence[str],
    runs_dir: Path,
    run_id: str,
    progress: Counted | None = None,
) -> CreatedRun:
    """Create a run directory that `llmrecipes train <run_dir>/recipe.yaml --run-id <run_id>` resumes.

    One process without a GPU reads one tensor of the small model at a time. The optimizer state is new, and data starts
    from the beginning.

    Args:
        reference: `RUN` (its newest checkpoint), `RUN@STEP` or `RUN@best`.
        growth: the sizes.
        overrides: keys of the new recipe, such as its length and learning rate.
        runs_dir: where runs are kept.
        run_id: run id of the new run.
        progress: shows how much is written.

    Returns:
        With the origin: `from_run` and its `step`; `sizes`, each as it was and is; `by`, how layers were added (None:
        none were), and `new_layers`, their numbers; whether it `preserves` what the small model computes; and
        `parameters_before` and `parameters`.

    Raises:
        UserError: as `load_grown`; no valid checkpoint, a run id in use, or a full disk. Nothing remains.
    """
    run, entry = find_checkpoint(reference, runs_dir)
    small, grown = load_grown(Run(run).recipe_file, growth, overrides)
    run_dir = Run.of(runs_dir, grown.name, run_id).path
    require_unused(run_dir)
    new_layers = layers(small.model.num_layers, grown.model.num_layers, growth.method)

    def write(folder: Path) -> dict[str, Any]:
        from llmrecipes.engine.backends import stored_weights

        weights = GrownWeights(stored_weights(small, entry), small.model, grown.model, growth)
        write_checkpoint(grown, weights, folder, progress)
        before, after = shape(small.model), shape(grown.model)
        added = [number for number, layer in enumerate(new_layers) if layer.added]
        return {
            "from_run": str(run),
            "step": entry.step,
            "sizes": _sizes(before, after),
            "by": growth.method if added else None,
            "new_layers": added,
            "preserves": preserves(small.model, grown.model, growth),
            "parameters_before": count(small.model, before).total,
            "parameters": count(grown.model, after).total,
        }

    return create_run(run_dir, grown, write, text=to_yaml(grown), record=RECORD)


def _sizes(before: Shape, after: Shape) -> dict[str, tuple[int, int]]:
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_moe_experts",
             "moe_ffn_hidden_size")  # fmt: skip
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in names}
    unused = set() if before.num_moe_experts else {"moe_ffn_hidden_size"}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in unused}


@dataclass(frozen=True)
class Axis:
    """A dimension of a tensor that grows: its new elements are copies of the old ones, in their order again and again.

    Attributes:
        before, after: sizes.
        shared: the copies of an element sum to it, instead of being equal to it.
        parts: the dimension is this many times as long, one part after the other: 2 of a gated MLP.
    """

    before: int
    after: int
    shared: bool = False
    parts: int = 1


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.local_experts)\.(\d+)\.(.+)")


class GrownWeights:
    """Weights of a grown model, read in slices from those of the small one (`engine.base.WeightSource`).

    Args:
        source: the small model; its last tensor is kept in memory.
        small, grown: sections of the recipes.
        growth: how layers are added.
    """

    def __init__(self, source: TensorSource, small: Model, grown: Model, growth: Growth) -> None:
        self._source = source
        self._model = small
        self._before, self._after = shape(small), shape(grown)
        self._layers = layers(small.num_layers, grown.num_layers, growth.method)
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """See `WeightSource`."""
        import torch

        experts = Axis(self._before.num_moe_experts, self._after.num_moe_experts)
        source = name
        silent = False
        copy = 0
        if match := _LAYER.fullmatch(name):
            layer = self._layers[int(match[1])]
            source = f"decoder.layers.{layer.source}.{match[2]}"
            silent = layer.silent and _is_output(match[2])
        if match := _EXPERT.fullmatch(source):
            copy, number = divmod(int(match[2]), experts.before)
            source = f"{match[1]}.{number}.{match[3]}"
        if silent:
            return torch.zeros(shape, dtype=self._source.dtype(source))
        values = self._tensor(source)
        for dimension, axis in enumerate(self._axes(source, values.dim())):
            values = _grown(values, dimension, axis, offset[dimension], shape[dimension])
        copies = experts.after // experts.before if experts.before else 1
        if copies > 1 and _EXPERT.fullmatch(source) and ".linear_fc2." in source:
            # A token visits all copies of an expert, each with its share of the expert's probability.
            values = _part(values, torch.tensor(copies), torch.tensor(copy)) * copies
        if source.startswith("decoder.final_layernorm.") and self._model.share_embeddings_and_output_weights:
            # The output layer is the embedding, whose columns are copies: its products sum over them.
            values = values / (self._after.hidden_size // self._before.hidden_size)
        return values

    def _tensor(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # frees its memory before the next is read
            self._last = name, self._source.read(name)
        return self._last[1]

    def _axes(self, name: str, dimensions: int) -> tuple[Axis | None, ...]:
        """How the dimensions of a tensor of the small model grow; None: not at all."""
        b, a = self._before, self._after
        hidden, read = (Axis(b.hidden_size, a.hidden_size, shared=shared) for shared in (False, True))
        module = name.rsplit(".", 2)[-2]
        heads = self._heads(module)
        routed = ".local_experts." in name
        width = (b.moe_ffn_hidden_size, a.moe_ffn_hidden_size) if routed else (b.ffn_hidden_size, a.ffn_hidden_size)
        if ".shared_experts." in name:
            width = (b.moe_shared_ffn_hidden_size, a.moe_shared_ffn_hidden_size)
        experts = Axis(b.num_moe_experts, a.num_moe_experts)
        of_module: dict[str, tuple[Axis | None, Axis | None]] = {
            "word_embeddings": (None, hidden),
            "position_embeddings": (None, hidden),
            "output_layer": (None, read),
            "input_layernorm": (hidden, None),
            "pre_mlp_layernorm": (hidden, None),
            "final_layernorm": (hidden, None),
            "q_layernorm": (None, None),
            "k_layernorm": (None, None),
            "kv_layernorm": (None, None),
            "linear_qkv": (heads, read),
            "linear_q_proj": (heads, read),
            "linear_q_down_proj": (None, read),
            "linear_q_up_proj": (heads, None),
            "linear_kv_down_proj": (None, read),
            "linear_kv_up_proj": (heads, None),
            "linear_proj": (hidden, Axis(b.context_size, a.context_size, shared=True)),
            "router": (experts, read),
            "linear_fc1": (Axis(*width, parts=2 if self._model.gated_linear_unit else 1), read),
            "linear_fc2": (hidden, Axis(*width, shared=True)),
        }
        if module not in of_module:
            raise RuntimeError(f"{name} has no rule of growth")
        return of_module[module][:dimensions]

    def _heads(self, module: str) -> Axis | None:
        """Rows of a projection to heads: the queries, keys and values of a group of heads are beside each other."""
        sizes = []
        for s in (self._before, self._after):
            latent = self._model.qk_head_dim + self._model.v_head_dim
            rows = {
                "linear_qkv": s.query_size + s.key_size + s.value_size,
                "linear_kv_up_proj": s.num_attention_heads * latent,
            }
            sizes.append(rows.get(module, s.query_size))
        return Axis(sizes[0], sizes[1])


def _is_output(rest: str) -> bool:
    """Whether a tensor of a layer writes into the residual stream."""
    return rest.rsplit(".", 2)[-2] in ("linear_proj", "linear_fc2")


def _grown(values: torch.Tensor, dimension: int, axis: Axis | None, start: int, size: int) -> torch.Tensor:
    """The elements `start` to `start` + `size` of a dimension of the grown tensor."""
    import torch

    if axis is None or axis.before == axis.after:
        return values.narrow(dimension, start, size)
    number = torch.arange(start, start + size)
    part = number // axis.after
    inside = number % axis.after
    if number[-1] >= axis.parts * axis.after:
        raise RuntimeError(f"a slice ends at {start + size} of {axis.parts * axis.after}")
    source = inside % axis.before
    chosen = values.index_select(dimension, part * axis.before + source)
    if not axis.shared:
        return chosen
    copies = (axis.after - source + axis.before - 1) // axis.before
    wide = [-1 if axis == dimension else 1 for axis in range(values.dim())]
    return _part(chosen, copies.view(wide), (inside // axis.before).view(wide))


def _part(values: torch.Tensor, copies: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """What a copy of each value has of it: all copies together sum to the value, without rounding.

    Args:
        values: values of any floating-point type.
        copies: copies of each value; as `values`, or broadcast to it.
        place: number of the copy among them, from 0.
    """
    import torch

    rest = values.float()
    part = torch.zeros_like(values, dtype=torch.float32)
    for number in range(int(copies.max())):
        first = (rest * FIRST_PART).to(values.dtype).float()
        mine = torch.where(copies == number + 1, rest, first)
        part = torch.where(place == number, mine, part)
        rest = rest - mine
    return part.to(values.dtype)
