"""Coordinate check (arXiv 2203.03466, appendix D.1): sizes of activations over widths, in the first steps of training.

With the maximal-update parametrisation they do not grow with the width; otherwise they do after the first updates, and
so does what a learning rate does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.schema import Recipe

if TYPE_CHECKING:
    import torch

    from llmrecipes.engine.base import Engine

MOST_GROWTH = 0.2
"""Largest exponent of the width that counts as flat; without the parametrisation gpt-tiny's are 0.7 to 1.5 after five
steps (docs/guide/scaling.md#learning-rates-that-transfer-across-widths)."""

_WATCHED = (
    (re.compile(r"embedding"), "embedding"),
    (re.compile(r"decoder\.layers\.(\d+)\.self_attention"), "layer {} attention"),
    (re.compile(r"decoder\.layers\.(\d+)\.mlp"), "layer {} MLP"),
    (re.compile(r"decoder\.layers\.(\d+)"), "layer {}"),
    (re.compile(r"logits"), "logits"),
)
"""Modules of a model by name, and what their output is called."""


@dataclass(frozen=True)
class Coordinates:
    """Mean absolute activations: `values[name][step][width]`, with steps from the first one on."""

    widths: tuple[int, ...]
    values: Mapping[str, Sequence[Sequence[float]]]

    @property
    def steps(self) -> int:
        return len(next(iter(self.values.values())))

    def growth(self, name: str, step: int = -1) -> float:
        """Exponent of the width in a step, by least squares: 0 is flat, 1 doubles when the width doubles."""
        xs = [math.log(width) for width in self.widths]
        ys = [math.log(value) if value > 0 else -math.inf for value in self.values[name][step]]
        if not all(map(math.isfinite, ys)):
            return math.inf
        middle_x = math.fsum(xs) / len(xs)
        middle_y = math.fsum(ys) / len(ys)
        over = math.fsum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
        return over / math.fsum((x - middle_x) ** 2 for x in xs)

    @property
    def worst(self) -> str:
        """The activation that grows fastest in the last step."""
        return max(self.values, key=self.growth)

    @property
    def ok(self) -> bool:
        """Whether nothing grows with the width."""
        return self.growth(self.worst) <= MOST_GROWTH

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "widths": list(self.widths),
            "ok": self.ok,
            "most_growth": MOST_GROWTH,
            "activations": {
                name: {
                    "mean_absolute": [list(step) for step in steps],
                    "growth": [self.growth(name, step) for step in range(len(steps))],
                }
                for name, steps in self.values.items()
            },
        }


def measure(recipes: Sequence[Recipe], iters: int, data_dir: Path) -> Coordinates:
    """Train each recipe for some steps in this process.

    Args:
        recipes: the same one at several widths, of one process.
        data_dir: where their prepared data is.

    Raises:
        UserError: the engine's model has none of the watched modules.
    """
    from llmrecipes.data.folder.prepared import open_prepared
    from llmrecipes.engine.backends import backend
    from llmrecipes.hardware.cluster import detect
    from llmrecipes.plan.derive import derive
    from llmrecipes.train.loaders import open_loaders

    first = recipes[0]
    engines = backend(first)
    platform = engines.platform()
    seen: list[list[dict[str, float]]] = []
    with engines.join(first, platform) as world:
        for recipe in map(_with_logits, recipes):
            loaders = open_loaders(recipe, open_prepared(recipe, data_dir), world, pin_memory=False)
            engine = engines.build(derive(recipe, world.size, detect()), platform)
            try:
                with closing(loaders.train(0)) as batches, watched(engine) as activations:
                    seen.append([])
                    for _ in range(iters):
                        engine.train_step(batches)
                        seen[-1].append(dict(activations))
            finally:
                engine.close()
    if not seen[0][0]:
        raise UserError(
            f"engine {engine_name(first)}",
            where="layout.engine",
            rule="only the engine megatron can measure activations",
        )
    values = {name: [[width[step][name] for width in seen] for step in range(iters)] for name in seen[0][0]}
    return Coordinates(tuple(recipe.model.hidden_size for recipe in recipes), values)


def _with_logits(recipe: Recipe) -> Recipe:
    """The recipe with a loss that has the logits of a micro-batch together, to be watched."""
    train = recipe.train.model_copy(update={"z_loss_coeff": 0.0})
    return recipe.model_copy(update={"train": train}).with_layout(loss_chunk_tokens=0)


@contextmanager
def watched(engine: Engine) -> Iterator[dict[str, float]]:
    """A block in which the mapping has the mean absolute activations of the last forward pass."""
    sizes: dict[str, float] = {}

    def watch(module: torch.nn.Module, name: str) -> Any:
        def see(_module: Any, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            sizes[name] = float(tensor.detach().float().abs().mean())

        return module.register_forward_hook(see)

    hooks = []
    for part in engine.modules:
        for path, module in part.named_modules():
            for pattern, name in _WATCHED:
                if match := pattern.fullmatch(path):
                    hooks.append(watch(module, name.format(*(int(group) + 1 for group in match.groups()))))
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()
