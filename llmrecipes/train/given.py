"""The weights that a new run starts from, where its recipe names some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmrecipes.train.spec import RunSpec

if TYPE_CHECKING:
    from llmrecipes.hf.weights import FolderWeights


@contextmanager
def given_weights(spec: RunSpec, *, resumed: bool = False) -> Iterator[FolderWeights | None]:
    """Open the weights that `train.pretrained` names; None: the recipe names none, or a checkpoint has all weights.

    Args:
        spec: of the run.
        resumed: a checkpoint is loaded next; one with adapters has nothing else.

    Raises:
        UserError: they are not those of the recipe's model.
    """
    if spec.recipe.train.pretrained is None or (resumed and spec.recipe.lora is None):
        yield None
        return
    from llmrecipes.hf.reading import resolve
    from llmrecipes.hf.weights import open_weights

    # A rank that was started without the folder finds what the Hub's cache has.
    path = spec.pretrained or resolve(spec.recipe.train.pretrained).path
    weights = open_weights(path, spec.recipe.model)
    try:
        yield weights
    finally:
        weights.close()
