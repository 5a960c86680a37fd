"""The options of `llmrecipes merge`: the methods and their parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

from llmrecipes.errors import UserError
from llmrecipes.options import Option


@dataclass(frozen=True)
class Method:
    """Parameters of a method; its formula is in `models.merge_formulas`.

    Attributes:
        reference: its source.
        models: fewest models, without the base.
        only: exact number; None: any.
        base: it merges task vectors, so it needs the model that the others were fine-tuned from.
        normalize: default of the option; None: it has no weights.
        density: it drops elements of task vectors.
        random: it drops them at random.
    """

    reference: str
    models: int = 1
    only: int | None = None
    base: bool = True
    normalize: bool | None = False
    density: bool = False
    random: bool = False


METHODS = {
    "linear": Method("Wortsman et al. 2022, arXiv 2203.05482", models=2, base=False, normalize=True),
    "slerp": Method("Shoemake 1985", models=2, only=2, base=False, normalize=None),
    "task-arithmetic": Method("Ilharco et al. 2022, arXiv 2212.04089"),
    "ties": Method("Yadav et al. 2023, arXiv 2306.01708", normalize=True, density=True),
    "dare": Method("Yu et al. 2023, arXiv 2311.03099", density=True, random=True),
    "dare-ties": Method("Yu et al. 2023, arXiv 2311.03099", density=True, random=True),
}
"""By name; what is normalized by default is so in mergekit."""


@dataclass(frozen=True)
class Merge:
    """A merge with all its numbers.

    Attributes:
        method: its name in `METHODS`.
        weights: one for each model; empty for slerp.
        densities: one for each model, above 0 and at most 1; empty where there are none.
        t: position between the models, for slerp.
        scale: factor of the merged task vector (λ), for methods with a base.
        normalize: divide by the sum of the weights.
        seed: seed of the dropped elements.
    """

    method: str
    weights: tuple[float, ...] = ()
    densities: tuple[float, ...] = ()
    t: float = 0.5
    scale: float = 1.0
    normalize: bool = False
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Its numbers by name, without those that its method does not have."""
        method = METHODS[self.method]
        has = {
            "weights": method.normalize is not None,
            "densities": method.density,
            "t": self.method == "slerp",
            "scale": method.base,
            "normalize": method.normalize is not None,
            "seed": method.random,
        }
        return {key: value for key, value in asdict(self).items() if has.get(key, True)}


def _parsed(option: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise UserError(f"{text!r}", where=option, rule="must be comma-separated numbers", fix="0.5,0.5") from None


@dataclass(frozen=True)
class MergeOptions:
    """Options of a merge, of `merge` and of `merge_models`; None is the default of the method."""

    method: Annotated[str, Option(f"Merge by: {', '.join(METHODS)}.", metavar="NAME")]
    weights: Annotated[
        Sequence[float] | None,
        Option("Weight the models; default: 1.", metavar="W,W,...", read=partial(_parsed, "--weights")),
    ] = None
    density: Annotated[
        float | Sequence[float] | None,
        Option(
            "Keep this fraction of each task vector (ties, dare); default: 1.",
            metavar="P[,P...]",
            read=partial(_parsed, "--density"),
        ),
    ] = None
    """Of all models, or one for each."""
    t: Annotated[
        float | None,
        Option("Interpolate from the first model (0) to the second (1) (slerp); default: 0.5.", metavar="T"),
    ] = None
    scale: Annotated[
        float | None, Option("Scale the merged task vector by L; default: 1.", name="lambda", metavar="L")
    ] = None
    normalize: Annotated[bool | None, Option("Divide by the sum of the weights; default: on for linear and ties.")] = (
        None
    )
    seed: Annotated[int | None, Option("Seed dare; default: 0.", metavar="N")] = None


def resolve(options: MergeOptions, models: int, *, base: bool) -> Merge:
    """Check options against the method and the number of models.

    Args:
        models: their number, without the base.
        base: whether a base is named.

    Raises:
        UserError: an unknown method, an option that it does not have, a wrong count, or a number out of range.
    """
    name = options.method
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}", where="--method", rule=f"one of {', '.join(METHODS)}")
    method = METHODS[name]
    _require_models(name, method, models, base)
    _require_taken(name, method, options)
    weights = () if method.normalize is None else _numbers("--weights", options.weights, 1.0, models)
    densities: tuple[float, ...] = ()
    if method.density:
        requested = [options.density] if isinstance(options.density, int | float) else options.density
        if requested is not None and len(requested) == 1:
            requested = [*requested] * models
        densities = _numbers("--density", requested, 1.0, models)
        for density in densities:
            if not 0 < density <= 1:
                raise UserError(f"{density:g}", where="--density", rule="a density must be above 0 and at most 1")
    normalize = method.normalize if options.normalize is None else options.normalize
    if name == "linear" and normalize and abs(math.fsum(weights)) < 1e-8:
        raise UserError(
            "the weights add up to 0",
            where="--weights",
            rule="their sum must not be 0, as weights are divided by it",
            fix="--no-normalize",
        )
    (t,) = _numbers("--t", None if options.t is None else [options.t], 0.5, 1)
    if not 0 <= t <= 1:
        raise UserError(f"{t:g}", where="--t", rule="t must be 0 (the first model) to 1 (the second)")
    (scale,) = _numbers("--lambda", None if options.scale is None else [options.scale], 1.0, 1)
    seed = options.seed or 0
    if seed < 0:
        raise UserError(f"{seed}", where="--seed", rule="a seed must be 0 or more")
    return Merge(name, weights, densities, t, scale, bool(normalize), seed)


def _require_models(name: str, method: Method, models: int, base: bool) -> None:
    if method.only is not None and models != method.only:
        raise UserError(
            f"{models} models",
            where=f"--method {name}",
            rule=f"exactly {method.only} models are needed",
            fix="--method linear takes more",
        )
    if models < method.models:
        raise UserError(
            f"{models} model{'s' * (models != 1)}",
            where=f"--method {name}",
            rule=f"at least {method.models} models are needed",
        )
    if method.base and not base:
        raise UserError(
            "a base model is required",
            where=f"--method {name}",
            rule="task vectors are differences from a base",
            fix="--base MODEL",
        )
    if base and not method.base:
        raise _unused(name, "--base", [other for other, candidate in METHODS.items() if candidate.base])


def _require_taken(name: str, method: Method, options: MergeOptions) -> None:
    """Refuse options without effect."""
    checks = {
        "--weights": (options.weights, lambda kind: kind.normalize is not None),
        "--normalize": (options.normalize, lambda kind: kind.normalize is not None),
        "--density": (options.density, lambda kind: kind.density),
        "--t": (options.t, lambda kind: kind is METHODS["slerp"]),
        "--lambda": (options.scale, lambda kind: kind.base),
        "--seed": (options.seed, lambda kind: kind.random),
    }
    for option, (value, taken) in checks.items():
        if value is not None and not taken(method):
            raise _unused(name, option, [other for other, candidate in METHODS.items() if taken(candidate)])


def _unused(name: str, option: str, methods: Sequence[str]) -> UserError:
    rule = f"only used by {', '.join(methods)}"
    return UserError(f"not used by --method {name}", where=option, rule=rule, fix="leave it out")


def _numbers(option: str, values: Sequence[float] | None, default: float, count: int) -> tuple[float, ...]:
    numbers = tuple(map(float, values)) if values is not None else (default,) * count
    if len(numbers) != count:
        raise UserError(
            f"{len(numbers)} values for {count} models", where=option, rule="one value is needed for each model"
        )
    for number in numbers:
        if not math.isfinite(number):
            raise UserError(f"{number}", where=option, rule="the value must be a finite number")
    return numbers
