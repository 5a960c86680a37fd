"""Keys of the section `faults`: what a run does by itself where something goes wrong."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.section import Beta, PosFloat, PosInt, Section


class Faults(Section):
    """What a run does by itself about numbers that are not finite, spikes, silent corruption and hangs."""

    rerun_mode: Literal["validate_results", "disabled"] | None = None
    """A loss or gradient that is not finite: compute the step again from the same batches before any update. If it is
    finite then, training continues and the rank is reported; else, and with `disabled`, the run stops (exit code 93).
    Unset: `validate_results` with the engine megatron; deepspeed stops at once."""
    rank_heartbeat_timeout: PosFloat | None = 600.0
    """Seconds in which a rank has to go on with a step, a read, an evaluation or a save, or ten times the longest it
    took before if that is more; else it is reported and killed, and the run may be restarted. Null: no watchdog."""
    initial_rank_heartbeat_timeout: PosFloat = 3600.0
    """The same for the first of each kind, which may compile and connect."""
    check_weight_hash_across_dp_replicas_interval: PosInt | None = None
    """Steps between comparisons of the weights of data-parallel replicas, by their hashes: before an update, and before
    each save too. A difference stops the run (exit code 93). Unset: none."""
    check_results_across_dp_replicas_interval: PosInt | None = None
    """Steps between comparisons of what data-parallel replicas compute: all of them pass the same fixed tokens forward,
    and the results have to be equal bit for bit. A difference is an alarm (`results_differ`). Unset: none."""
    straggler_threshold: Beta | None = 0.65
    """Speed of a rank's own work, as part of that of its peers, below which it is an alarm in two reports in a row."""
    straggler_exclude_reports: PosInt | None = None
    """Reports in a row in which a rank is that slow, after which a Slurm job of several nodes saves and is requeued
    without its node. Unset: it stays an alarm."""
    loss_spike_action: Literal["none", "skip", "rewind"] = "none"
    """A spike of the loss or of the gradient norm: `skip` leaves out its update; `rewind` loads a checkpoint from
    before it and leaves out the batches that led to it. `none`: an alarm if the loss stays high."""
    loss_spike_window: Annotated[int, Field(ge=2)] = 128
    """Last steps whose median and spread decide what a spike is; none before half of them are known."""
    loss_spike_sigmas: PosFloat = 6.0
    """Standard deviations above the median at which a spike begins, estimated by the median absolute deviation."""
    loss_spike_rewind_steps: PosInt = 100
    """For `rewind`: age of the checkpoint in steps, at least, and the number of batches that are left out."""
    loss_spike_max_rewinds: PosInt = 3
    """For `rewind`: how often a run does so; at the next spike it stops (exit code 93)."""

    def without_spikes(self) -> Faults:
        """The same without an action on spikes."""
        fields = {name: field.default for name, field in type(self).model_fields.items() if "loss_spike" in name}
        return self.model_copy(update=fields)
