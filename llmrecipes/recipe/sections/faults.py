"""Keys of the section `faults`: what a run does by itself where something goes wrong."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.sections.only_with import OnlyWith
from llmrecipes.recipe.sections.section import EXECUTION, LEARNED, Beta, PosFloat, PosInt, Section


class Faults(Section):
    """How a run reacts to non-finite numbers, spikes, silent corruption and hangs."""

    half = EXECUTION

    rerun_mode: Literal["validate_results", "disabled"] | None = None
    """What to do about a loss or gradient that is not finite. `validate_results`: compute the step again before any
    update; if it is finite then, training continues and the rank is reported, otherwise the run stops (exit code
    93). `disabled`: stop at once, as the engine deepspeed does. Unset: `validate_results` with the engine megatron."""
    rank_heartbeat_timeout: PosFloat | Literal["learned"] | None = "learned"
    """Seconds in which a rank must make progress (a step, a read, an evaluation or a save), or ten times the longest
    so far if that is more; otherwise it is killed, and the run may be restarted. `learned`: 30 seconds, once the
    first of its kind has ended. Null: no watchdog."""
    initial_rank_heartbeat_timeout: Annotated[PosFloat, OnlyWith("rank_heartbeat_timeout")] = 3600.0
    """The same for the first step, read, evaluation and save, which may compile and connect."""
    check_weight_hash_across_dp_replicas_interval: PosInt | None = None
    """Steps between comparisons of the weights of data-parallel replicas by their hashes, in addition to those
    before each save. A difference stops the run (exit code 93). Unset: none."""
    check_results_across_dp_replicas_interval: PosInt | None = None
    """Steps between comparisons of what data-parallel replicas compute from the same fixed tokens, which must be
    bitwise equal; otherwise an alarm (`results_differ`). Unset: none."""
    gradient_check_action: Literal["stop", "alarm", "none"] = "stop"
    """What to do if the first step of a start clips by another norm than that of all weights, or if copies of a
    weight have different gradients: `stop` (exit code 93), or only raise an `alarm`. `none`: not compared."""
    straggler_threshold: Beta | None = 0.65
    """Speed of a rank's own work relative to its peers, below which two reports in a row raise an alarm. Null: none."""
    straggler_exclude_reports: PosInt | None = None
    """Consecutive slow reports of a rank after which a multi-node Slurm job saves and is requeued without its node.
    Unset: alarms only."""
    loss_spike_action: Annotated[Literal["none", "skip", "rewind"], LEARNED] = "none"
    """What to do about a spike of the loss or the gradient norm: `skip` its update; `rewind` to a checkpoint from
    before it and leave out the batches that led to it. `none`: an alarm if the loss stays high."""
    loss_spike_window: Annotated[int, Field(ge=2), LEARNED] = 128
    """Number of recent steps whose median and spread define a spike; none is detected before half of them are known."""
    loss_spike_sigmas: Annotated[PosFloat, LEARNED] = 6.0
    """Standard deviations above the median at which a spike begins, estimated by the median absolute deviation."""
    loss_spike_rewind_steps: Annotated[PosInt, LEARNED] = 100
    """For `rewind`: minimum age of the checkpoint in steps, and number of batches to leave out."""
    loss_spike_max_rewinds: Annotated[PosInt, LEARNED] = 3
    """For `rewind`: maximum number of rewinds; the next spike stops the run (exit code 93)."""

    def without_spikes(self) -> Faults:
        """The same without an action on spikes."""
        fields = {name: field.default for name, field in type(self).model_fields.items() if "loss_spike" in name}
        return self.model_copy(update=fields)
