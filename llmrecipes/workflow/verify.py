"""`llmrecipes verify` and `coordinates`: a recipe's small version, across layouts and across widths."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.launch.environment import detected_environment
from llmrecipes.launch.local import run_ranks
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.plan.layout import local_layers_reason
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.derived.degrees import smallest_world, undivided
from llmrecipes.recipe.schema import Recipe, Scheduler
from llmrecipes.recipe.speedups.features import key_of, needing_a_gpu, wanted_of
from llmrecipes.recipe.speedups.recompute import recomputation
from llmrecipes.recipe.variants.proxy import Degree, Device, Scaled, proxy, scaled
from llmrecipes.recipe.variants.width import at_width
from llmrecipes.runfiles import RunFiles, new_run_id
from llmrecipes.verify.coordinates import Coordinates, measure
from llmrecipes.verify.result import (
    PARAMETERS,
    REPLICAS,
    FirstDifference,
    FirstTensor,
    VerifyResult,
    first_differing_step,
)
from llmrecipes.verify.verify_spec import TrainingRecord, VerifySpec
from llmrecipes.workflow.run import Log, Paths, plan_run, prepare_data

MOST_RANKS = 8


@dataclass(frozen=True)
class VerifyOptions:
    """Options of the command line."""

    iters: int = 5
    tolerance: float = 1e-5
    nproc: int | None = None


@dataclass(frozen=True)
class Verification:
    """The result, and the directory it is stored in."""

    result: VerifyResult
    folder: Path


def start_ranks(spec: VerifySpec, ranks: int, cluster: Cluster) -> None:
    """Train in the layout, one process per rank.

    Raises:
        UserError: a rank failed, and has printed its error.
    """
    logs = RunFiles(spec.folder.parent).logs
    path = logs / "spec.json"
    path.write_text(spec.model_dump_json(indent=2) + "\n", "utf-8")
    threads = max(1, int(cluster.cpu_cores) // ranks)
    plan = derive_run(spec.recipe, ranks, cluster)
    code = run_ranks(
        "llmrecipes.verify.verify_worker",
        [str(path)],
        world_size=ranks,
        threads=threads,
        logs=logs,
        environment=detected_environment(cluster, plan, logs.absolute()),
    )
    if code:
        raise UserError(f"the layout ended with exit code {code}", where=str(logs), fix="see the messages above")


def verify(
    recipe: Recipe,
    paths: Paths,
    options: VerifyOptions,
    log: Log,
    train_layout: Callable[[VerifySpec, int, Cluster], None] = start_ranks,
) -> Verification:
    """Train a recipe's small version in one process and in its layout, and compare.

    Args:
        recipe: the full recipe.
        paths: where runs and data are kept; `<runs>/<recipe>-verify/<id>/` receives verify.json and verify.svg.
        options: steps, tolerance and ranks.
        log: receives one line for each slow step.
        train_layout: trains according to the spec, on a number of ranks.

    Raises:
        UserError: the layout cannot run on this machine, the reference has non-finite values, or a rank failed.
    """
    if not 0 < options.tolerance < math.inf:
        raise UserError(
            f"{options.tolerance:g}",
            where="--tolerance",
            rule="the tolerance is a relative difference above 0",
            fix="--tolerance 1e-5",
        )
    cluster = detect()
    small = verified_recipe(recipe, options.iters, cluster.device)
    run_plan = plan_run(small, cluster, _ranks(small, options.nproc, cluster))
    small, plan = run_plan.recipe, run_plan.largest
    one = reference_recipe(small, plan.layout.data_parallel_size)
    plan_run(one, cluster, 1)
    for variant in (one, small):
        require_packages(variant)
    prepare_data(small, paths.data_dir, log)
    run = RunFiles.of(paths.runs_dir, f"{recipe.name}-verify", new_run_id())
    folder = run.path
    run.logs.mkdir(parents=True)
    common = {"data_dir": paths.data_dir, "iters": options.iters, "tolerance": options.tolerance}
    single = VerifySpec(recipe=one, folder=folder / "one", **common)  # type: ignore[arg-type]
    spread = VerifySpec(recipe=small, folder=folder / "layout", reference=single.folder, **common)  # type: ignore[arg-type]
    log(f"verify {recipe.name}: {options.iters} steps in one process")
    _in_one_process(single, cluster)
    log(f"verify {recipe.name}: the same on {plan.layout.world_size} ranks")
    spread.folder.mkdir()
    train_layout(spread, plan.layout.world_size, cluster)
    compared = _compare(recipe.name, single, spread, cluster, _scaled(recipe, small, plan))
    from llmrecipes.verify.invariants import invariants
    from llmrecipes.verify.report import svg

    result = replace(compared, not_covered=tuple(_not_covered(recipe, small, cluster)))
    if result.ok:
        log(f"verify {recipe.name}: one step of one process in several ways")
        result = replace(result, invariants=invariants(one, paths.data_dir))
    (folder / "verify.json").write_text(json.dumps(result.as_record(), indent=2) + "\n", "utf-8")
    (folder / "verify.svg").write_text(svg(result, f"{recipe.name} on {plan.layout.world_size} ranks"), "utf-8")
    for records in (single.folder, spread.folder):
        shutil.rmtree(records)
    return Verification(result, folder)


SIZES = ("num_layers", "hidden_size", "seq_length", "vocab_size", "num_moe_experts")
RANDOM = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")


def _not_covered(recipe: Recipe, small: Recipe, cluster: Cluster) -> Iterator[str]:
    """What a recipe trains with that its small version, which ran, does not have."""
    if recipe.model.transformer_impl != "local" and local_layers_reason(recipe) is None:
        yield "TransformerEngine's layers, which GPUs use: megatron-core's own ran"
    if recipe.train.precision != "fp32":
        yield f"train.precision {recipe.train.precision}: fp32 ran"
    dropped = [
        f"model.{name} {getattr(recipe.model, name):g}"
        for name in RANDOM
        if getattr(recipe.model, name) != getattr(small.model, name)
    ]
    if recipe.lora is not None and recipe.lora.dropout:
        dropped.append(f"lora.dropout {recipe.lora.dropout:g}")
    if dropped:
        yield f"{', '.join(dropped)}: 0 ran"
    if recipe.layout.micro_batch_size != small.layout.micro_batch_size:
        yield f"layout.micro_batch_size {recipe.layout.micro_batch_size}: {small.layout.micro_batch_size} ran"
    if kernels := [name for name in needing_a_gpu() if wanted_of(name, recipe)]:
        yield f"{', '.join(map(key_of, kernels))}: unset"
    if cluster.device == "cpu":
        yield "NCCL and kernels of GPUs: gloo and the CPU ran"
    pairs = [(name, getattr(recipe.model, name), getattr(small.model, name)) for name in SIZES]
    sizes = [f"{name} {before:,} to {after:,}" for name, before, after in pairs if before != after]
    if sizes:
        yield f"the model's size: {', '.join(sizes)}"


def _ranks(small: Recipe, nproc: int | None, cluster: Cluster) -> int:
    """`nproc` ranks, else two replicas of the smallest layout if batch and machine allow them."""
    if nproc is not None:
        return nproc
    least = smallest_world(small.layout)
    twice = 2 * least
    if twice > (len(cluster.gpus) or MOST_RANKS):
        return least
    try:
        derive(small, twice, cluster)
    except UserError:  # the batch does not divide over two replicas
        if least == 1:
            raise  # one replica on one rank would be the reference itself
        return least
    return twice


def _scaled(recipe: Recipe, small: Recipe, plan: Plan) -> Scaled:
    degrees = scaled(recipe, plan.layout.as_dict())
    if plan.layout.data_parallel_size > 1:
        return degrees
    twice = f"one replica of the layout ran; --nproc {2 * smallest_world(small.layout)} runs two"
    return degrees.without(Degree("data_parallel_size", None, 1, twice))


def _in_one_process(spec: VerifySpec, cluster: Cluster) -> None:
    """Train the reference in this process.

    Raises:
        UserError: it has non-finite values, so that a comparison is impossible.
    """
    import torch

    from llmrecipes.verify.verify_worker import run

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", max(1, int(cluster.cpu_cores)))))
    spec.folder.mkdir(exist_ok=True)
    run(spec)
    for number, step in enumerate(TrainingRecord.read(spec.folder).steps, start=1):
        if not (math.isfinite(step.loss) and math.isfinite(step.grad_norm)):
            raise UserError(
                f"step {number} of the one-process training has loss {step.loss:g}, gradient norm {step.grad_norm:g}",
                where=f"recipe {spec.recipe.name}",
                rule="layouts can only be compared by finite numbers",
                fix="a lower optimizer.lr",
            )


def _compare(name: str, single: VerifySpec, spread: VerifySpec, cluster: Cluster, degrees: Scaled) -> VerifyResult:
    from llmrecipes.verify.observe import BEFORE, FINAL, GRADIENTS, TensorDifference, differences

    one = TrainingRecord.read(single.folder)
    layout = TrainingRecord.read(spread.folder)
    final = differences(single.folder / FINAL, spread.folder / FINAL)

    def first(kind: str, compared: list[TensorDifference]) -> FirstTensor | None:
        beyond = [tensor for tensor in compared if tensor.relative > spread.tolerance]
        if not beyond:
            return None
        return FirstTensor(beyond[0].name, beyond[0].layer, kind, beyond[0].relative, len(beyond), len(compared))

    where = first_differing_step(one, layout, spread.tolerance)
    difference = None
    if where is not None:
        step, quantity = where
        # Weights and gradients are large; the reference, which is cheap, is retrained to get those of one step.
        _in_one_process(single.model_copy(update={"keep_step": step}), cluster)
        tensor = None
        # Gradients of different weights differ, so the weights before the step are compared first.
        for kind, part in (("weights before the step", BEFORE), ("gradients", GRADIENTS)):
            tensor = tensor or first(kind, differences(single.folder / part, spread.folder / part))
        expected, got = (getattr(record.steps[step - 1], quantity) for record in (one, layout))
        difference = FirstDifference(step, quantity, expected, got, tensor)
    elif tensor := first("weights after the last step", final):
        worst = next(each for each in final if each.name == tensor.name)
        difference = FirstDifference(len(one.steps), PARAMETERS, worst.reference_norm, worst.norm, tensor)
    elif copy := layout.replicas:
        tensor = FirstTensor(copy.tensor, copy.layer, REPLICAS, math.nan, copy.differing, copy.copies)
        difference = FirstDifference(copy.step, REPLICAS, math.nan, math.nan, tensor)
    worst_weights = max(difference.relative for difference in final)
    return VerifyResult(
        name, spread.tolerance, one, layout, worst_weights, difference, degrees, spread.recipe.layout.zero
    )


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
            f"{len(set(widths))} width",
            where="--widths",
            rule="at least two widths are needed to see growth",
            fix="--widths 64,128,256,512",
        )
    if min(widths) < 1:
        raise UserError(
            f"{min(widths)}", where="--widths", rule="a width is a positive number", fix="--widths 64,128,256,512"
        )
    cluster = detect()
    small = [_small(recipe, iters, width, cluster) for width in sorted(set(widths))]
    for variant in small:
        plan_run(variant, cluster, 1)
    prepare_data(small[0], paths.data_dir, log)
    log(f"coordinates {recipe.name}: {iters} steps at hidden_size {', '.join(str(w) for w in sorted(set(widths)))}")
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", max(1, int(cluster.cpu_cores)))))
    return measure(small, iters, paths.data_dir)


def _small(recipe: Recipe, iters: int, width: int, cluster: Cluster) -> Recipe:
    small = reference_recipe(verified_recipe(recipe, iters, cluster.device), 1)
    # A schedule that warms up would hardly change anything in a few steps.
    optimizer = recipe.optimizer.model_copy(update={"min_lr": 0.0})
    constant = small.model_copy(update={"scheduler": Scheduler(lr_decay_style="constant"), "optimizer": optimizer})
    return at_width(constant, width)


MIN_ADAM_EPS = 1e-6
"""Some gradients are zero except for rounding (that of a key bias: the softmax cancels it). Adam normalizes a gradient
by its magnitude, so with a smaller eps rounding would move such weights, differently in every layout."""


def verified_recipe(recipe: Recipe, iters: int, device: Device) -> Recipe:
    """The scaled-down version of a recipe whose layout is verified, in fp32 and without what depends on it: jitter of
    routers, dropout of adapters, and on a GPU that of attention. The other dropout is the same in every layout.

    Raises:
        UserError: the recipe computes something different in another layout by design.
    """
    small = proxy(recipe, device)
    _require_same_meaning(small)
    lora = small.lora and small.lora.model_copy(update={"dropout": 0.0})
    schedule = small.scheduler
    if schedule.lr_decay_style == "inverse-square-root":  # its end is that of the run, which has more steps here
        schedule = schedule.model_copy(update={"lr_decay_iters": None})
    return small.model_copy(
        update={
            "lora": lora,
            "scheduler": schedule,
            "model": small.model.model_copy(
                update={
                    "attention_dropout": small.model.attention_dropout if device == "cpu" else 0.0,
                    "moe_input_jitter_eps": None,
                }
            ),
            "train": small.train.model_copy(
                update={"precision": "fp32", "train_iters": max(iters, small.train.train_iters)}
            ),
            "optimizer": small.optimizer.model_copy(update={"adam_eps": max(small.optimizer.adam_eps, MIN_ADAM_EPS)}),
            "data": small.data.model_copy(update={"num_workers": 0}),
        }
    )


def reference_recipe(small: Recipe, data_parallel_size: int) -> Recipe:
    """The same training in one process: no parallelism, no ZeRO, no recomputation.

    Args:
        small: from `verified_recipe`.
        data_parallel_size: data-parallel size of the layout.
    """
    # Micro-batches have the same sequences in both, except with global_aux_loss, which balances experts over those of
    # all data-parallel ranks.
    together = data_parallel_size if small.model.moe_router_load_balancing_type == "global_aux_loss" else 1
    micro = small.layout.micro_batch_size * (together if small.model.num_moe_experts else 1)
    return undivided(small, use_distributed_optimizer=False, micro_batch_size=micro, **recomputation())


def _require_same_meaning(small: Recipe) -> None:
    parallel = small.layout
    split = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    if small.model.num_moe_experts and small.model.moe_expert_capacity_factor is not None and split > 1:
        raise UserError(
            f"{small.model.moe_expert_capacity_factor:g} with sequences split over {split} ranks",
            where="model.moe_expert_capacity_factor",
            rule="each rank drops tokens within its own part of a sequence, and so different ones than one process: "
            "the training differs by design",
            fix="model.moe_expert_capacity_factor=null verifies everything else",
        )
