"""The rules: severity, title and advice of everything that a check or an alarm of the training says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmrecipes.diagnosis.finding import PAGE, SEVERITIES, RunFacts, RunFinding, Severity, Sighting
from llmrecipes.recipe.schema import Recipe


@dataclass(frozen=True)
class Tip:
    """A sentence of advice that is left out where the recipe already does what it says."""

    text: str
    done: Callable[[Recipe], bool]


@dataclass(frozen=True)
class Rule:
    """What is said wherever a rule applies.

    Attributes:
        advice: said to every run.
        tips: said after it, to those that do not follow them yet.
        by_rate: a learning rate that is too high is a cause, and is named where it is.
    """

    severity: Severity
    title: str
    advice: str
    tips: tuple[Tip, ...] = ()
    by_rate: bool = False


CLIP = Tip("Set optimizer.clip_grad to 1.0.", lambda recipe: 0 < recipe.optimizer.clip_grad <= 1)
QK_NORM = Tip("model.qk_layernorm keeps attention logits small.", lambda recipe: recipe.model.qk_layernorm)
REWIND = Tip(
    "faults.loss_spike_action=rewind goes back by itself.", lambda recipe: recipe.faults.loss_spike_action == "rewind"
)
SKIP = Tip(
    "faults.loss_spike_action=skip leaves such updates out, rewind goes back.",
    lambda recipe: recipe.faults.loss_spike_action in ("skip", "rewind"),
)
KEEP_BEST = Tip(
    "checkpoint.keep_best keeps the checkpoint of the lowest held-out loss (RUN@best).",
    lambda recipe: recipe.checkpoint.keep_best,
)
EARLY_STOP = Tip(
    "train.early_stop ends the run when the held-out loss stops falling.",
    lambda recipe: recipe.train.early_stop is not None,
)


CHECKED = {
    "divergence": Rule(
        "error",
        "Loss diverges",
        "Stop the run and go back to a checkpoint from before it, with a lower optimizer.lr or a longer "
        "scheduler.lr_warmup_iters.",
        (REWIND,),
        by_rate=True,
    ),
    "worse_than_guessing": Rule(
        "error",
        "Worse than guessing",
        "Start again: what this run has learnt is of no use. Lower optimizer.lr first; then check that tokenizer and "
        "data are those of the weights.",
        (CLIP, QK_NORM),
        by_rate=True,
    ),
    "learning_rate_high": Rule(
        "warning",
        "Learning rate too high",
        "Lower optimizer.lr by a factor of 3 to 10, or lengthen scheduler.lr_warmup_iters.",
        (CLIP,),
        by_rate=True,
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
        "Add data or take fewer steps; raise dropout or weight decay.",
        (KEEP_BEST, EARLY_STOP),
    ),
    "train_valid_gap": Rule(
        "info",
        "Training loss leaves held-out loss behind",
        "Watch whether the held-out loss still falls. More data, fewer passes over it, or regularisation close it.",
        (EARLY_STOP, KEEP_BEST),
    ),
    "exploding_gradients": Rule(
        "warning",
        "Gradients explode",
        "Lower optimizer.lr.",
        (CLIP, QK_NORM),
        by_rate=True,
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
        "Raise model.moe_aux_loss_coeff; lower optimizer.lr if routers collapse early.",
        (
            Tip(
                "model.moe_router_enable_expert_bias balances experts without a loss.",
                lambda recipe: recipe.model.moe_router_enable_expert_bias,
            ),
        ),
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
        "raise layout.micro_batch_size. Else llmrecipes train RECIPE --profile 3.",
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
        "Save less often (checkpoint.save_interval) or onto a faster file system.",
        (Tip("checkpoint.async_save writes while training continues.", lambda recipe: recipe.checkpoint.async_save),),
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
        "prepare --verify looks for near-copies in both training and held-out text.",
        (
            Tip(
                "The step near_duplicates of data.steps drops them.",
                lambda recipe: any(step.type == "near_duplicates" for step in recipe.data.steps),
            ),
        ),
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
        "If it does not recover: a lower optimizer.lr.",
        (SKIP,),
        by_rate=True,
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
    "export_failed": Rule(
        "warning",
        "A checkpoint was not exported",
        "The note has the error; training continued, and llmrecipes export RUN@STEP writes it.",
    ),
    "checkpoint_damaged": Rule(
        "warning", "A checkpoint is damaged", "The run resumed from an earlier one; check the file system."
    ),
    "unreadable": Rule("error", "Data could not be read", "Prepare the data again, and check the disk of that rank."),
    "tasks_failed": Rule("warning", "An evaluation failed", "The note has the error; training continued."),
}
"""Rules of alarms that the training raises by itself, by the event of their notes."""
RULES = CHECKED | ALARMS


def finding(seen: Sighting, first: Sighting | None = None, count: int = 1, facts: RunFacts | None = None) -> RunFinding:
    """A sighting in full.

    Args:
        seen: the last one of its rule.
        first: the first one of the same rule; None: this one.
        count: number of all of them.
        facts: of the recipe, which decide what is advised; None: unknown.
    """
    rule = RULES[seen.rule]
    facts = facts or RunFacts()
    cause = facts.rate_is_high if rule.by_rate else ""
    tips = [tip.text for tip in rule.tips if facts.recipe is None or not tip.done(facts.recipe)]
    lower = [f"Lower optimizer.lr to about {facts.usual_lr:.2g}."] if cause else []
    return RunFinding(
        rule=seen.rule,
        severity=rule.severity,
        title=rule.title,
        first_step=(first or seen).step,
        last_step=seen.step,
        count=count,
        text=f"{seen.text}; {cause}" if cause else seen.text,
        evidence=seen.evidence | ({"lr": facts.lr, "usual_lr": facts.usual_lr} if cause else {}),
        advice=" ".join([*lower, rule.advice, *tips]),
        link=f"{PAGE}#{seen.rule.replace('_', '-')}",
    )


def order(one: RunFinding) -> tuple[Any, ...]:
    """Sorts the most severe first, then by step."""
    return SEVERITIES.index(one.severity), one.first_step or 0, one.rule
