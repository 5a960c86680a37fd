"""All engines, by name. A new one needs only a line here and a folder in `engine/`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.layout_section import AUTO

MEGATRON, DEEPSPEED = "megatron", "deepspeed"


@dataclass(frozen=True)
class EngineEntry:
    """One engine; its parts are `module:name`, imported on demand."""

    backend: str
    """Its `engine.base.Backend`."""
    tensors: str = "llmrecipes.engine.core.checkpoint.tensors:StoredWeights"
    """What reads the weights of its checkpoints, without its library: see `engine.backends.stored_weights`."""
    configuration: str | None = None
    """Function from a plan to its library's configuration, which `llmrecipes plan --details` prints. It must not import
    torch."""
    reads: frozenset[str] = frozenset()
    """Other engines whose checkpoints it can load, weights and optimizer state alike."""
    extra: str | None = None
    """Extra of pyproject.toml that a run needs; None: the project's dependencies are enough."""
    packages: tuple[str, ...] = ()
    """What a run imports from the extra."""
    requirements: str | None = None
    """Function that raises a `UserError` if a recipe needs what this machine lacks besides packages; without torch."""
    all_of_zero: bool = False
    """Whether it has every stage and key of `layout.zero`; otherwise stages 0 and 1 without further keys."""
    needs_data: str | None = None
    """Function that raises a `UserError` if a recipe cannot run on tensors without data (`llmrecipes dryrun`); without
    torch. None: every recipe can."""


ENGINES = {
    MEGATRON: EngineEntry("llmrecipes.engine.megatron.backend:MegatronBackend", reads=frozenset({DEEPSPEED})),
    DEEPSPEED: EngineEntry(
        "llmrecipes.engine.deepspeed.backend:DeepSpeedBackend",
        configuration="llmrecipes.engine.deepspeed.configuration:deepspeed_config",
        reads=frozenset({MEGATRON}),
        extra="zero",
        packages=("deepspeed",),
        requirements="llmrecipes.engine.deepspeed.installation:require_offload",
        all_of_zero=True,
        needs_data="llmrecipes.engine.deepspeed.installation:require_no_data",
    ),
}
"""Engines by name in a recipe."""


def engine_name(recipe: Recipe) -> str:
    """The engine that a recipe selects, or the default."""
    if recipe.layout.engine != AUTO:
        return recipe.layout.engine
    zero = recipe.layout.zero
    needs_deepspeed = zero is not None and (zero.stage >= 2 or zero.offload_optimizer != "none")
    return DEEPSPEED if needs_deepspeed else MEGATRON


def without_zero(recipe: Recipe) -> Recipe:
    """The same training without ZeRO, by the engine that then runs it."""
    return recipe if recipe.layout.zero is None else recipe.with_layout(zero=None, engine=AUTO)


def can_read(name: str, written_by: str) -> bool:
    """Whether an engine can load a checkpoint that another one, or itself, wrote."""
    return name == written_by or written_by in ENGINES[name].reads


def unknown_engine(recipe: Recipe) -> Iterator[Problem]:
    """The problem of an unknown engine."""
    if recipe.layout.engine != AUTO and recipe.layout.engine not in ENGINES:
        yield Problem(
            "layout.engine", repr(recipe.layout.engine), f"one of {', '.join([AUTO, *ENGINES])}", "layout.engine: auto"
        )
