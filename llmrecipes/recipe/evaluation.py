"""The section `train.eval_tasks`: tasks of lm-evaluation-harness during training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmrecipes.recipe.section import NonNegInt, PosInt, Section


class EvalTasks(Section):
    """Tasks of lm-evaluation-harness that the training engine itself is given; training is not affected."""

    tasks: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """Tasks, groups or tags of the harness, or paths of task files. Their data is read before training starts."""
    interval: PosInt
    """Steps between these evaluations; after the last step there is one too."""
    limit: PosInt | None = None
    """Documents of each task; unset: all."""
    num_fewshot: NonNegInt | None = None
    """Examples in the context; unset: as each task says."""
