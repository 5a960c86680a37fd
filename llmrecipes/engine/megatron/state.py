"""The state in a checkpoint, as a megatron-core sharded state dict.

Weights and optimizer state are stored by global name, shape and offset, so that any layout can read them. Random
states are byte tensors and progress is plain numbers: nothing in a checkpoint needs unpickling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import Progress
from llmrecipes.engine.megatron.checkpoint.loader import load
from llmrecipes.engine.megatron.checkpoint.optimizer_state import load_optimizer_state, sharded_optimizer_state
from llmrecipes.engine.megatron.model.gpt import CHECKPOINT_FORMAT, RecipeGPTModel
from llmrecipes.engine.megatron.random_states import load_random_states, same_random_states, sharded_random_states

if TYPE_CHECKING:
    from llmrecipes.engine.megatron.engine import MegatronEngine


def sharded_state(
    engine: MegatronEngine, progress: Progress, *, loading: bool = False, random: bool = True
) -> dict[str, Any]:
    """The state to save, or the state dict that a checkpoint is loaded into.

    Args:
        engine: the engine; its tensors are referenced, not copied.
        progress: of the run; ignored when loading.
        loading: whether the result is for loading.
        random: whether to include random states, which only the same layout can use.
    """
    model = model_state(engine.modules)
    optimizer = sharded_optimizer_state(engine.optimizer, model, _metadata(), loading=loading)
    state = {
        **model,
        "optimizer": optimizer,
        "scheduler": engine.scheduler.state_dict(),
        "progress": asdict(progress),
    }
    if random:
        state["random"] = sharded_random_states()
    return state


def model_state(modules: Sequence[RecipeGPTModel]) -> dict[str, Any]:
    """Sharded state dict of the weights only, by chunk; the names inside are global."""
    if len(modules) == 1:
        return {"model": modules[0].sharded_state()}
    return {f"model{number}": module.sharded_state() for number, module in enumerate(modules)}


def load_model(modules: Sequence[RecipeGPTModel], loaded: dict[str, Any]) -> None:
    """Copy loaded weights into the chunks."""
    for number, module in enumerate(modules):
        module.load_state_dict(loaded["model" if len(modules) == 1 else f"model{number}"])


def load_state(engine: MegatronEngine, entry: Entry) -> Progress:
    """Load a checkpoint into the engine and the random generators; a collective of all ranks.

    Without random states, which only the layout that saved them can use, dropout is reseeded for this step.

    Returns:
        Progress of the run.
    """
    random = same_random_states(engine.recipe, entry)
    loaded = load(entry, sharded_state(engine, Progress(), loading=True, random=random))
    load_model(engine.modules, loaded)
    load_optimizer_state(engine.optimizer, loaded["optimizer"])
    engine.scheduler.load_state_dict(loaded["scheduler"])
    progress = Progress(**loaded["progress"])
    load_random_states(loaded.get("random"), engine.recipe.train.seed + progress.step)
    return progress


def _metadata() -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**CHECKPOINT_FORMAT, "dp_cp_group": group, "singleton_local_shards": False}
