"""What the loop does about a step whose numbers are wrong: stop, or report the rank and train on."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from llmrecipes.data.read.batches import after_skipped, sample_ids
from llmrecipes.engine.base import Accept, Engine, Progress, StepResult, World
from llmrecipes.engine.meters import GradientFault, ReplicaFault
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.numerics import BadParameter, NonFinite, SpikeRule, StepSpike, first_bad_parameter
from llmrecipes.faults.watchdog import Beat
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.schema import Train
from llmrecipes.recipe.sections.faults import Faults
from llmrecipes.tracking.events import Note, Tracker

logger = logging.getLogger(__name__)

MOST_NAMED = 16
"""Ranks or samples that a note or message names."""
MOST_IN_TEXT = 4
"""Weights that a sentence names; the note has more."""


@dataclass(frozen=True)
class RankFinding:
    """What one rank says about numbers that are not finite."""

    rank: int
    node: str
    data_parallel_rank: int
    is_local: bool
    """Its own loss or gradients were not finite before they were reduced."""
    bad: BadParameter | None


class SpikeGuard:
    """Decides on every rank whether a step's update is made, from numbers that are the same on all of them.

    Args:
        faults: faults of the recipe, with an action.
        progress: progress of the run, with the last losses and norms.
    """

    def __init__(self, faults: Faults, progress: Progress) -> None:
        window, sigmas = faults.loss_spike_window, faults.loss_spike_sigmas
        self._rule = SpikeRule(window, sigmas, progress.recent_losses, progress.recent_norms)
        self._spike: StepSpike | None = None

    def accept(self, loss: float, norm: float) -> bool:
        """Whether to make the update of the next step."""
        self._spike = self._rule.add(loss, norm)
        return self._spike is None

    def take(self) -> StepSpike | None:
        """The spike of the last step, once: a step whose fp16 gradients overflow is not judged."""
        spike = self._spike
        self._spike = None
        return spike

    def recent(self) -> dict[str, tuple[float, ...]]:
        """The fields of `Progress` that continue the statistic."""
        return {"recent_losses": tuple(self._rule.losses), "recent_norms": tuple(self._rule.norms)}


def spike_guard(plan: Plan, progress: Progress) -> SpikeGuard | None:
    """That of a start from `progress`, if the recipe has an action.

    A stage begins without a statistic: the losses of other text, and norms of other sequences, would look like spikes.
    """
    faults = plan.recipe.faults
    if faults.loss_spike_action == "none":
        return None
    begins = plan.span is not None and progress.step == plan.span.first_step
    return SpikeGuard(faults, Progress() if begins else progress)


def first_sample(progress: Progress, plan: Plan) -> int:
    """Where the batch of the step after `progress` begins."""
    return after_skipped(progress.consumed_samples, plan.batches.of_step(progress.step), progress.skipped_samples)


def require_finite(progress: Progress, result: StepResult, engine: Engine, world: World) -> None:
    """Raise on every rank if the loss or gradient norm of the step after `progress` is not finite.

    The reduced numbers are the same on all ranks, so all of them decide alike; only then do they exchange findings to
    determine the rank where it started.

    Raises:
        NonFinite: naming step, rank, quantity, first bad parameter and samples.
    """
    # fp16 overflow is not an error: the scaler skipped the step, and the loss of a skipped step may be anything.
    if result.skipped:
        return
    loss_is_bad = not math.isfinite(result.loss)
    norm_is_bad = result.grad_norm is not None and not math.isfinite(result.grad_norm)
    if not (loss_is_bad or norm_is_bad):
        return
    is_local = result.is_local or not math.isfinite(engine.local_loss)
    cause = _exchanged(world, is_local, first_bad_parameter(engine.named_tensors()))[0]
    raise NonFinite(
        step=progress.step + 1,
        rank=cause.rank,
        node=cause.node,
        quantity="loss" if loss_is_bad else "gradient norm",
        value=result.loss if loss_is_bad else float(result.grad_norm or 0.0),
        first_bad=cause.bad,
        samples=samples_of(first_sample(progress, engine.plan), engine.plan, cause.data_parallel_rank),
        again=result.first_attempt is not None,
    )


def hardware_suspect(progress: Progress, result: StepResult, engine: Engine, world: World) -> Note | None:
    """The note of a step that was finite only when it was computed again: the same on every rank, None if it was not.

    Equal inputs gave unequal results, which is a fault of a device, its memory or a link. A collective of all ranks if
    there was such a step.
    """
    first = result.first_attempt
    if first is None:
        return None
    findings = _exchanged(world, first.is_local, first.first_bad)
    cause = findings[0]
    details = {
        # Where no rank's own numbers were bad, they became so when they were reduced.
        "rank": cause.rank if cause.is_local else None,
        "node": cause.node if cause.is_local else None,
        "ranks": [finding.rank for finding in findings if finding.is_local][:MOST_NAMED],
        "parameter": None if cause.bad is None else cause.bad.name,
        "loss": str(first.loss),
        "grad_norm": str(first.grad_norm),
        "samples": samples_of(first_sample(progress, engine.plan), engine.plan, cause.data_parallel_rank)[:MOST_NAMED],
    }
    return Note(step=progress.step + 1, event="hardware_suspect", details=details, alarm=True)


def require_loss_scale(step: int, result: StepResult, train: Train) -> None:
    """Stop if fp16 gradients overflow at the smallest loss scale.

    Raises:
        UserError: with `ExitCode.STOP`.
    """
    if result.skipped and result.loss_scale is not None and result.loss_scale <= train.min_loss_scale:
        raise UserError(
            f"fp16 gradients overflow in step {step} even at the smallest loss scale, {train.min_loss_scale:g}",
            where="train.min_loss_scale",
            rule="the loss scale may not fall below train.min_loss_scale",
            fix="train.precision=bf16, or a lower optimizer.lr; the newest checkpoint predates this",
            code=ExitCode.STOP,
        )


def compare_replicas(step: int, engine: Engine, tracker: Tracker, beat: Beat, *, saving: bool) -> None:
    """Compare data-parallel replicas after a step, where the recipe does; a collective of all ranks.

    Args:
        saving: the step is saved, so that its weights are compared.

    Raises:
        UserError: on every rank, with `ExitCode.STOP`: some weights differ.
    """
    faults = engine.recipe.faults
    if faults.check_weight_hash_across_dp_replicas_interval and saving:
        require_equal_replicas(step, engine, tracker)
    interval = faults.check_results_across_dp_replicas_interval
    if interval is None or step % interval:
        return
    beat("evaluate", step)
    with engine.params_synced():
        fault = engine.result_fault()
    if fault is not None:
        which = "most others" if fault.is_outvoted else "the only other replica, which may be the wrong one"
        text = (
            f"the replica of rank {fault.rank} on {fault.node} computes other {fault.parameter} from the same "
            f"tokens than that of rank {fault.other} ({which})"
        )
        if dist.get_rank() == 0:
            logger.error("ALARM: step %d: %s", step, text)
        tracker.note(Note(step=step, event="results_differ", details={"text": text, **asdict(fault)}, alarm=True))


def require_equal_replicas(step: int, engine: Engine, tracker: Tracker) -> None:
    """Compare the weights of data-parallel replicas after a step; a collective of all ranks.

    Raises:
        UserError: on every rank, with `ExitCode.STOP`: some differ.
    """
    with engine.params_synced():
        _require_none(engine.replica_fault(), step, f"after step {step}", tracker)


def acceptance(step: int, engine: Engine, tracker: Tracker, spikes: SpikeGuard | None) -> Accept | None:
    """What decides about the update of a step; None: it is made.

    Where replicas are compared, that is before the update, with which the distributed optimizer gathers all weights: a
    bit that has flipped since the last gather is gone after it, and only a gradient remains of it.
    """
    accept = None if spikes is None else spikes.accept
    interval = engine.recipe.faults.check_weight_hash_across_dp_replicas_interval
    if interval is None or step % interval:
        return accept

    def accepted(loss: float, norm: float) -> bool:
        _require_none(engine.replica_fault(), step, f"before the update of step {step}", tracker)
        return accept is None or accept(loss, norm)

    return accepted


def _require_none(fault: ReplicaFault | None, step: int, when: str, tracker: Tracker) -> None:
    if fault is None:
        return
    tracker.note(Note(step=step, event="replicas_differ", details=asdict(fault), alarm=True))
    which = "most others" if fault.is_outvoted else "the only other replica, which may be the wrong one"
    raise UserError(
        f"{when}, {fault.differing} parameters differ from those of rank {fault.other} ({which}); the first "
        f"is {fault.parameter}",
        where=f"rank {fault.rank} on {fault.node}",
        rule="data-parallel replicas must have the same weights, bit for bit "
        "(faults.check_weight_hash_across_dp_replicas_interval)",
        fix="run llmrecipes doctor on that node and exclude it; the newest checkpoint was saved before this was found",
        code=ExitCode.STOP,
    )


def require_right_gradients(step: int, engine: Engine, tracker: Tracker) -> None:
    """Answer to what the engine has found in the gradients of a step, once in a start.

    Raises:
        UserError: on every rank, with `ExitCode.STOP`: a fault, with `faults.gradient_check_action` `stop`.
    """
    fault = next(filter(None, (part.fault() for part in engine.parts)), None)
    if fault is None:
        return
    text = " ".join(_sentences(fault))
    tracker.note(Note(step=step, event="gradients_wrong", details={"text": text, **asdict(fault)}, alarm=True))
    if engine.recipe.faults.gradient_check_action == "stop":
        raise UserError(
            f"the gradients of step {step} are wrong in this layout: {text}",
            where=f"recipe {engine.recipe.name}",
            rule="a layout changes neither the gradient norm nor the gradient of any copy of a weight",
            fix="another layout or version of megatron-core or TransformerEngine, and report it; "
            "faults.gradient_check_action=alarm trains on",
            code=ExitCode.STOP,
        )
    if dist.get_rank() == 0:
        logger.error("ALARM: step %d: %s", step, text)


def _sentences(fault: GradientFault) -> Iterator[str]:
    if fault.is_miscounted:
        weights = f": {_first(fault.miscounted)}" if fault.miscounted else ""
        norms = f"{fault.norm:.6g}, but all weights have {fault.of_each_weight:.6g}"
        yield f"They are clipped by a norm of {norms}{weights}."
    if fault.copies:
        yield f"Copies of a weight have gradients of different norms: {_first(fault.copies)}."


def _first(names: Sequence[str]) -> str:
    more = len(names) - MOST_IN_TEXT
    return ", ".join(names[:MOST_IN_TEXT]) + (f" and {more} more" if more > 0 else "")


def samples_of(consumed: int, plan: Plan, data_parallel_rank: int) -> list[int]:
    """Ids of a data-parallel rank's samples in the global batch that begins after `consumed` samples."""
    size = plan.batches.of_sample(consumed)
    micro_batches = sample_ids(
        consumed + size,
        consumed_samples=consumed,
        micro_batch_size=plan.recipe.layout.micro_batch_size,
        global_batch_size=size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=plan.layout.data_parallel_size,
    )
    return [sample for micro_batch in micro_batches for sample in micro_batch]


def _exchanged(world: World, is_local: bool, bad: BadParameter | None) -> Sequence[RankFinding]:
    """Findings of all ranks, the likeliest cause first."""
    mine = RankFinding(world.rank, socket.gethostname(), world.data_parallel_rank, is_local, bad)
    findings = [mine] * world.size
    dist.all_gather_object(findings, mine)
    return sorted(findings, key=_distance_from_cause)


def _distance_from_cause(finding: RankFinding) -> tuple[bool, bool, bool, int]:
    # A bad weight is the most likely cause. Gradients are summed over ranks, so a bad one is bad everywhere; one that
    # was bad before the sum, or a bad local loss, identifies the rank and its batch.
    bad = finding.bad
    return bad is None or bad.name.endswith(".grad"), not finding.is_local, bad is None, finding.rank
