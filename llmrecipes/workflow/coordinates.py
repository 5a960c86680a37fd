"""`llmrecipes coordinates`: the recipe's small version at several widths, and how its activations grow with them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.recipe.schema import Recipe, Scheduler
from llmrecipes.recipe.width import at_width
from llmrecipes.verify.coordinates import Coordinates, measure
from llmrecipes.verify.subject import reference, subject
from llmrecipes.workflow.run import Log, Paths, plan_run, prepare_data

WIDTHS = (64, 128, 256, 512)


def coordinates(recipe: Recipe, paths: Paths, widths: Sequence[int], iters: int, log: Log) -> Coordinates:
    """Train a recipe's small version at each width, in this process, and record the sizes of its activations.

    Args:
        recipe: the full recipe; its learning rate is used from the first step on.
        paths: where data is kept.
        widths: values of `hidden_size`.
        iters: steps at each width.
        log: receives one line for each slow step.

    Raises:
        UserError: fewer than two widths, one that the heads do not divide, or one that does not fit.
    """
    if len(set(widths)) < 2:
        raise UserError(
            f"{len(set(widths))} width", where="--widths", rule="growth takes two widths or more", fix="64,128,256,512"
        )
    if min(widths) < 1:
        raise UserError(f"{min(widths)}", where="--widths", rule="a width is a positive number", fix="64,128,256,512")
    cluster = detect()
    small = [_small(recipe, iters, width, cluster) for width in sorted(set(widths))]
    for each in small:
        plan_run(each, cluster, 1)
    prepare_data(small[0], paths.data_dir, log)
    log(f"coordinates {recipe.name}: {iters} steps at hidden_size {', '.join(str(w) for w in sorted(set(widths)))}")
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", max(1, int(cluster.cpu_cores)))))
    return measure(small, iters, paths.data_dir)


def _small(recipe: Recipe, iters: int, width: int, cluster: Cluster) -> Recipe:
    small = reference(subject(recipe, iters, cluster.device), 1)
    # A schedule that warms up would hardly change anything in a few steps.
    optimizer = recipe.optimizer.model_copy(update={"min_lr": 0.0})
    constant = small.model_copy(update={"scheduler": Scheduler(lr_decay_style="constant"), "optimizer": optimizer})
    return at_width(constant, width)
