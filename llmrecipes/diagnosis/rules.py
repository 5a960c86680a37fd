"""The rules: severity, title and advice of everything that a check or an alarm of the training says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmrecipes.diagnosis.finding import PAGE, SEVERITIES, RunFinding, Severity, Sighting


@dataclass(frozen=True)
class Rule:
    """What is said wherever a rule applies."""

    severity: Severity
    title: str
    advice: str


CHECKED = {
    "divergence": Rule(
        "error",
        "Loss diverges",
        "Stop the run and go back to a checkpoint from before it, with a lower optimizer.lr or a longer "
        "scheduler.lr_warmup_iters; faults.loss_spike_action=rewind does so by itself.",
    ),
    "learning_rate_high": Rule(
        "warning",
        "Learning rate too high",
        "Lower optimizer.lr by a factor of 3 to 10, or lengthen scheduler.lr_warmup_iters; keep clip_grad 1.0.",
    ),
    "learning_rate_low": Rule(
        "warning",
        "Learning rate too low",
        "Raise optimizer.lr by a factor of 3 to 10 in a short run, and compare them: llmrecipes compare.",
    ),
    "plateau": Rule(
        "warning",
        "Loss has stopped falling",
        "Compare with a run of another optimizer.lr; look at gradients and layers; a model that has learnt all that "
        "its size allows needs more parameters, not more steps.",
    ),
    "underfitting": Rule(
        "info",
        "Underfitting",
        "More parameters, a larger optimizer.lr, or less dropout and weight decay.",
    ),
    "overfitting": Rule(
        "warning",
        "Overfitting",
        "Use the checkpoint of the lowest held-out loss (checkpoint.keep_best, RUN@best); add data or take fewer steps "
        "(train.early_stop); raise dropout or weight decay.",
    ),
    "train_valid_gap": Rule(
        "info",
        "Training loss leaves held-out loss behind",
        "Watch whether the held-out loss still falls: train.early_stop ends the run when it does not, and "
        "checkpoint.keep_best keeps its best state. More data, fewer passes over it, or regularisation close the gap.",
    ),
    "exploding_gradients": Rule(
        "warning",
        "Gradients explode",
        "Set optimizer.clip_grad to 1.0 and lower optimizer.lr; model.qk_layernorm keeps attention logits small.",
    ),
    "vanishing_gradients": Rule(
        "warning",
        "Gradients vanish",
        "Check normalization, model.init_method_std and the precision; llmrecipes train RECIPE --overfit-batch shows "
        "whether the model learns at all.",
    ),
    "frozen_layer": Rule(
        "warning",
        "Layer is not trained",
        "Check that it belongs to the optimizer and that its output is used; adapters freeze the base on purpose.",
    ),
    "dead_experts": Rule(
        "warning",
        "Experts without tokens",
        "Raise model.moe_aux_loss_coeff, or use model.moe_router_enable_expert_bias; lower optimizer.lr if routers "
        "collapse early.",
    ),
    "fp16_scale_collapse": Rule(
        "error",
        "fp16 loss scale collapses",
        "train.precision=bf16 has no loss scale; else lower optimizer.lr.",
    ),
    "gpu_use_low": Rule(
        "warning",
        "GPUs wait",
        "Data: raise data.num_workers. Communication: llmrecipes plan RECIPE --search for another layout. Small batch: "
        "raise train.micro_batch_size. Else llmrecipes train RECIPE --profile 3.",
    ),
    "loader_bound": Rule(
        "warning",
        "Waiting for data",
        "Raise data.num_workers and data.prefetch_factor, and put prepared data on a local disk.",
    ),
    "clock_throttling": Rule(
        "warning",
        "Clocks are throttled",
        "llmrecipes doctor on its node names the reason: heat (cooling, air flow), power limit, a fault of the board.",
    ),
    "slow_rank": Rule(
        "warning",
        "A rank is always slightly slower",
        "All others wait for it. llmrecipes doctor on its node: clocks, temperature, PCIe, other processes.",
    ),
    "slow_storage": Rule(
        "warning",
        "Slow storage",
        "Save less often (checkpoint.save_interval) or onto a faster file system; keep checkpoint.async_save on.",
    ),
    "memory_creep": Rule(
        "warning",
        "Memory grows",
        "The run ends when memory is used up; a restart from a checkpoint frees it. Look for what keeps tensors "
        "alive: callbacks, lists of losses, allocator caches.",
    ),
    "duplicate_data": Rule(
        "warning",
        "Duplicate documents",
        "They were dropped. Check whether a source is listed twice or has copies: there is less text than it seems. "
        "Near-copies may be in both training and held-out text: add the step near_duplicates to data.steps, then "
        "prepare --verify.",
    ),
    "leaking_data": Rule(
        "info",
        "Training data contained evaluation text",
        "These documents were dropped. Paraphrases are not detected: trust scores on these files less.",
    ),
}
"""Rules that checks of records apply, live and after the fact."""

ALARMS = {
    "loss_spike": Rule(
        "warning",
        "Loss spike",
        "If it does not recover: a lower optimizer.lr, or faults.loss_spike_action=skip or rewind.",
    ),
    "spike_skipped": Rule("info", "Update skipped at a spike", "Check the samples of the step if it happens often."),
    "rewound": Rule("warning", "Went back after a spike", "Check the samples that it has skipped since."),
    "hardware_suspect": Rule(
        "error",
        "Equal inputs gave unequal results",
        "Run llmrecipes doctor on that node, and take it out of service if it happens again.",
    ),
    "replicas_differ": Rule(
        "error",
        "Replicas have different weights",
        "Run llmrecipes doctor on that node and exclude it; resume from a checkpoint from before it.",
    ),
    "results_differ": Rule(
        "error",
        "Replicas compute different results",
        "Run llmrecipes doctor on that node, and exclude it if it happens again.",
    ),
    "gradients_wrong": Rule(
        "error",
        "The layout computes wrong gradients",
        "The note names weights and sizes; use another layout or other versions, and report it.",
    ),
    "straggler": Rule(
        "warning",
        "A rank is slower than its peers",
        "Run llmrecipes doctor on that node: clocks, temperature, PCIe, other processes; exclude it if it stays slow.",
    ),
    "xid": Rule("error", "A GPU reported an error", "Look up the Xid, and run llmrecipes doctor on that node."),
    "hang": Rule("error", "A rank hung", "The note has its stacks; llmrecipes doctor checks nodes and network."),
    "save_failed": Rule(
        "error", "A checkpoint was not written", "Free disk space; the run stops after several failures in a row."
    ),
    "checkpoint_damaged": Rule(
        "warning", "A checkpoint is damaged", "The run resumed from an earlier one; check the file system."
    ),
    "unreadable": Rule("error", "Data could not be read", "Prepare the data again, and check the disk of that rank."),
    "tasks_failed": Rule("warning", "An evaluation failed", "The note has the error; training continued."),
}
"""Rules of alarms that the training raises by itself, by the event of their notes."""
RULES = CHECKED | ALARMS


def finding(seen: Sighting, first: Sighting | None = None, count: int = 1) -> RunFinding:
    """A sighting in full.

    Args:
        first: the first one of the same rule; None: this one.
        count: number of all of them.
    """
    rule = RULES[seen.rule]
    return RunFinding(
        rule=seen.rule,
        severity=rule.severity,
        title=rule.title,
        first_step=(first or seen).step,
        last_step=seen.step,
        count=count,
        text=seen.text,
        evidence=seen.evidence,
        advice=rule.advice,
        link=f"{PAGE}#{seen.rule.replace('_', '-')}",
    )


def order(one: RunFinding) -> tuple[Any, ...]:
    """Sorts the most severe first, then by step."""
    return SEVERITIES.index(one.severity), one.first_step or 0, one.rule
