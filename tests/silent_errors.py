# ruff: noqa: E501
"""Reports of composed parallelism that silently computes something else, and what happens here.

`python -m tests.silent_errors` writes docs/reference/silent-errors.md; `tests/unit/test_silent_errors.py` compares it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "silent-errors.md"

LAYOUTS = "tests/dist/test_layouts.py::test_a_layout_changes_nothing"
RESUMED = "tests/dist/test_layouts.py::test_a_checkpoint_resumes_in_a_different_layout"
INVARIANTS = "tests/unit/test_step_invariants.py"
CHECK = "tests/dist/test_gradient_check.py"
LAYOUT_RULES = "tests/unit/test_recipe_layout_rules.py::test_a_broken_rule_names_values_and_what_works"
PLAN_RULES = "tests/unit/test_plan_layout.py::test_an_impossible_layout_suggests_a_possible_one"
ZERO_RULES = "tests/unit/test_recipe_zero.py::test_what_is_refused"

HERE = {
    "equal": "the test shows the same numbers as one process, or as the same step without the condition",
    "once": "the same numbers as one process when it was run once (2026-11-28 or 29); no test has this combination",
    "refused": "a rule names the keys and the fix",
    "absent": "no key leads there",
    "unknown": "not tried",
}
ASIDE = {"absent": "Cannot happen here", "unknown": "Not tried"}


@dataclass(frozen=True)
class Claim:
    """A report of others.

    Args:
        what: goes wrong upstream, with the condition.
        reports: repository and number, as `Megatron-LM#7452`.
        here: a key of `HERE`.
        test: of "equal" and "refused": its file and name, with the row of the table of layouts in brackets.
        note: the reason, or what else is to be said.
    """

    what: str
    reports: str
    here: str
    test: str = ""
    note: str = ""


def row(name: str) -> str:
    """The test of one row of the table of layouts."""
    return f"{LAYOUTS}[{name}]"


CLAIMS: dict[str, tuple[Claim, ...]] = {
    "Loss": (
        Claim("a mean per rank or micro-batch weighs tokens by how few count beside them", "torchtitan#1842, #2206", "equal", row("gpt: pp2 vpp2 cp2 dp2"), "samples of all rows have different masks"),
        Claim("a validation loss is the mean of the means of batches: 6.0 instead of 9.2", "torchtitan#4167", "equal", "tests/unit/test_engine_step.py::test_the_loss_is_the_mean_over_tokens_that_count"),
        Claim("label smoothing with tensor parallelism takes the mean over the rank's part of the vocabulary", "Megatron-LM#7452 (1), #737, #7464, #5522, #7466", "equal", row("gpt with label smoothing: tp2")),
        Claim("labels with gathered logits: loss + log TP, the target's gradient is lost", "Megatron-LM#7452 (2)", "absent", note="logits are gathered only without labels"),
        Claim("context parallelism with unequal masks and a mean per micro-batch halves or quarters the gradient", "Megatron-LM#7452 (9), #7513, #673, #906; verl#6609, #6049", "equal", row("gpt: cp2 dp2"), "every token counts the same (`calculate_per_token_loss`)"),
        Claim("a loss per token without its finalizer under context parallelism: 2.66 instead of 1.48", "Megatron-Bridge#4974", "equal", row("llama: cp2")),
        Claim("a chunked loss takes a partial gradient for the whole one", "torchtitan#3412", "equal", row("gpt: tp2 pp2 dp2, loss_chunk_tokens=12")),
        Claim("log-probabilities over tensor-parallel ranks give the other parts no gradient", "ms-swift#9947", "equal", row("pairs: tp2 sp cp2")),
        Claim("losses drift with tensor parallelism in bf16", "torchtitan#1750", "equal", row("gpt in bf16: tp2 sp"), "within 2e-2 in bf16: another order of sums; 1e-5 in fp32"),
    ),
    "Gradients": (
        Claim("norms' gradients differ between tensor-parallel ranks with sequence parallelism", "Megatron-LM#1446; apex#1686", "equal", row("gpt with more weights: tp2 sp")),
        Claim("copies of a norm drift with tensor parallelism and without sequence parallelism (GDN's `out_norm`)", "Megatron-LM#7452 (11)", "absent", note="no GDN; norms of queries, keys and latent attention: `gpt with more weights: tp2`, `mla with more weights: tp2`"),
        Claim("tied embeddings with pipeline stages and a sharded optimizer: a wrong sum of both copies", "Megatron-LM#844", "equal", row("gpt: pp2 dp2")),
        Claim("tied embeddings with overlap come apart", "Megatron-LM#656", "equal", row("gpt: pp2 dp2, overlap_grad_reduce, overlap_param_gather")),
        Claim("the loss does not fall with both overlaps", "Megatron-LM#663", "equal", row("gpt: tp2 sp dp2, overlap_grad_reduce, overlap_param_gather")),
        Claim("several instances of the optimizer with overlap: a wrong sum", "Megatron-LM#3693, #3670", "absent", note="one instance of the optimizer"),
        Claim("without expert parallelism, and expert tensor ≠ tensor parallelism, experts' gradients are summed over too few ranks", "Megatron-LM#5916 (uncommon case)", "refused", PLAN_RULES),
        Claim("gradients of experts have another scale with generalized tensor parallelism", "Megatron-LM#7165, #4967", "absent", note="no generalized tensor parallelism"),
        Claim("gradient accumulation at ZeRO's stages changes the loss by 0.02 to 0.4", "DeepSpeed#1488, #966, #4298; accelerate#3877", "equal", row("gpt: dp2, deepspeed, stage=2, reduce_bucket_size=20000, use_distributed_optimizer")),
        Claim("ZeRO 2 with accumulation by hand: only the last micro-batch counts", "open-instruct#1498", "equal", row("gpt with a growing batch: dp2, deepspeed, stage=2, reduce_bucket_size=20000, use_distributed_optimizer")),
        Claim("ZeRO 2 with overlap: faulty gradients", "DeepSpeed#2343, #5294", "equal", row("gpt: dp2, deepspeed, stage=2, reduce_bucket_size=20000, overlap_comm, use_distributed_optimizer")),
        Claim("Megatron's CPU-offloaded optimizer: stale gradients, 0.31 becomes 10 after a resume", "Megatron-LM#6871, #1842", "absent", note="offload is DeepSpeed's: `gpt: dp2, deepspeed, stage=2, …, offload_optimizer=cpu`"),
        Claim("layer-wise Muon with `overlap_param_gather`: gradients on top of stale data", "Megatron-LM#4609", "refused", "tests/unit/test_engine_optimizers.py::test_what_they_do_not_go_with_is_refused", "Muon needs `use_distributed_optimizer: false`"),
        Claim("a residual stream in fp32 is silently bf16", "Megatron-LM#3504", "absent", note="no residual stream in fp32"),
        Claim("cross attention with an explicit tensor-parallel group takes QKV of another group", "Megatron-LM#7452 (6)", "absent", note="no cross attention"),
    ),
    "Gradient norm and clipping": (
        Claim("TransformerEngine's grouped layers: the experts of other tensor-parallel ranks are missing in the norm", "Megatron-LM#5916 (common case), #6470, #6099, #6080", "equal", f"{CHECK}::test_weights_that_the_norm_counts_wrongly", "gone in megatron-core 0.19; the check of the first step finds it when it is put back"),
        Claim("TransformerEngine's layers: latent attention's down-projections are in the norm once per tensor-parallel rank (1.36 to 1.52 times at 8)", "ROCm/TransformerEngine#715", "equal", f"{CHECK}::test_weights_that_the_norm_counts_wrongly", "as above"),
        Claim("each pipeline stage clips by its own norm, not by the model's", "torchtitan#596, #649", "equal", row("gpt: pp4")),
        Claim("ZeRO 2 since 0.17.6: norm 1.63 instead of 4.74", "DeepSpeed#7718", "equal", row("gpt: dp2, deepspeed, stage=2, reduce_bucket_size=20000, use_distributed_optimizer")),
        Claim("norms are decayed where they are told by a name or a class", "DeepSpeedExamples#755; bigscience-workshop/Megatron-DeepSpeed#262", "equal", row("gpt with more weights: tp2 sp dp2, deepspeed, stage=3, reduce_bucket_size=20000, sub_group_size=50000, stage3_param_persistence_threshold=100, use_distributed_optimizer, weight_decay=1.0")),
        Claim("experts with their own optimizer: norm 11.51 instead of 12.28", "radixark/Megatron-LM#80", "equal", row("moe: dp2 ep2, whole optimizer")),
        Claim("each expert-parallel group clips by its own norm", "Automodel#3816", "equal", row("moe: dp4 ep2")),
        Claim("whole parameters are in the norm once per tensor-parallel rank", "transformers#36132; NeMo-RL#3788; torchtune#2420, #2641", "equal", row("gpt with more weights: tp2, deepspeed, stage=2, reduce_bucket_size=20000, use_distributed_optimizer")),
        Claim("ZeRO 0 with expert parallelism: norm 7.24 instead of 10.95", "DeepSpeed#8475, #8478", "refused", ZERO_RULES, "experts are distributed at stages 1 and 2 only"),
        Claim("learnable attention sinks: the norm has those of one rank", "Megatron-LM#7452 (8), #7530", "equal", row("gpt that learns sinks and a norm: tp2")),
        Claim("sinks with context parallelism by p2p: plain softmax", "TransformerEngine#3551, #3018", "unknown", note="refused; GPU only"),
    ),
    "Mixtures of experts": (
        Claim("the weight of auxiliary and z-losses follows tensor and context parallelism", "Megatron-LM#5047, #1652, #3768", "equal", row("moe with aux_loss: tp2 sp ep2 etp1")),
        Claim("`global_aux_loss` with unequal valid tokens: a wrong denominator", "Megatron-LM#7197, #7213", "equal", row("moe with global_aux_loss: cp2 ep2")),
        Claim("recomputation logs the auxiliary loss twice", "Megatron-LM#1478, #1585", "equal", "tests/unit/test_train_balance.py::test_recomputation_and_evaluation_are_not_counted"),
        Claim("recomputation counts tokens twice for the expert bias", "torchtitan#1593", "equal", f"{INVARIANTS}::test_the_bias_of_experts_counts_each_trained_token_once"),
        Claim("`seq_aux_loss` with padded capacity is always 1.0", "Megatron-LM#1617", "equal", f"{INVARIANTS}::test_padding_experts_to_a_capacity_that_holds_all_changes_no_loss_per_sequence"),
        Claim("`seq_aux_loss` counts tokens after drops", "Megatron-LM#1513", "once", note="equal where capacity holds all tokens; with drops it is a definition"),
        Claim("`seq_aux_loss` takes a pack for one sequence", "Megatron-LM#5996, #6108", "once", note="in layouts; a pack is one sequence here by definition"),
        Claim("the auxiliary loss is not in the graph, or shrinks with the ranks", "Automodel#1412", "equal", row("moe with aux_loss: dp2 ep2")),
        Claim("padding masks of routers with sequence or expert parallelism: masks of other tokens, doubled gradients", "Megatron-LM#7452 (5, 10), #7481", "absent", note="no padding mask is passed"),
        Claim("padding counts in the balance", "Megatron-LM#1984, #2142", "equal", f"{INVARIANTS}::test_a_routers_loss_has_the_same_gradient_however_many_tokens_are_masked", "every token is routed and counted, by definition"),
        Claim("the bias is balanced neither in prediction layers nor after a layer without experts", "torchtitan#4494, #3686", "equal", row("deepseek: dp2 ep2")),
        Claim("copies of the router diverge with sequence parallelism", "Megatron-LM#619; torchtitan#2388", "equal", row("moe: tp2 sp ep2 etp1")),
        Claim("gathered probabilities detach the router", "Automodel#2995; transformers#48687", "equal", row("moe with allgather: tp2 sp ep2 etp1")),
        Claim("the bias counts tokens of validation", "prime-rl#2953", "equal", f"{INVARIANTS}::test_the_bias_of_experts_counts_each_trained_token_once"),
        Claim("gate of the shared expert and `kv_a_proj` diverge", "Pai-Megatron-Patch#397", "equal", row("mla with more weights: tp2 sp"), "no gate of the shared expert"),
    ),
    "Multi-token prediction": (
        Claim("unequal counts of tokens: gradient 14/3 instead of 4", "Megatron-LM#7452 (3), #7498, #1532, #4896", "equal", f"{INVARIANTS}::test_a_predicted_token_has_the_same_weight_in_every_micro_batch"),
        Claim("full recomputation with another explicit tensor-parallel group mixes replicas", "Megatron-LM#7452 (4), #7403", "equal", row("mtp without weight tying: pp2, pipeline_model_parallel_layout=Et*4|mmL, recompute_granularity=full, recompute_method=block, recompute_num_layers=1"), "there is one tensor-parallel group"),
        Claim("answers only: the prediction loss is over padding", "Megatron-Bridge#6103; Pai-Megatron-Patch#559", "equal", f"{INVARIANTS}::test_labels_of_masked_tokens_have_no_effect_on_predictions"),
        Claim("packing or context parallelism shifts labels over boundaries", "Megatron-LM#6205; miles#3219", "refused", "tests/unit/test_data_chat.py::test_rules"),
        Claim("prediction layers alone on a stage: their embedding drifts", "Megatron-Bridge#5380", "refused", LAYOUT_RULES),
    ),
    "Adapters": (
        Claim("experts' adapters with expert tensor parallelism: wrong deltas", "Megatron-Bridge#5634, #5635", "equal", row("moe with lora: tp2 sp ep2 etp2")),
        Claim("the whole factor's gradient is not summed with sequence parallelism", "mcore-bridge#173; ART#619", "equal", row("llama with lora: tp2 sp")),
        Claim("the initial standard deviation grows with √TP", "Megatron-Bridge#5843", "equal", row("llama with lora: tp2 sp"), "initial weights do not depend on the layout"),
        Claim("adapters of latent attention's whole down-projections mix tokens", "Megatron-Bridge#5900", "equal", row("mla with lora: tp2 sp")),
        Claim("shared adapters of experts with fused gradients drift by 0.09", "Megatron-Bridge#6009; miles#2723", "absent", note="no shared adapters"),
    ),
    "Checkpoints and resumes": (
        Claim("FSDP's checkpoint in another number of stages: stage 2 gets stage 1's layers", "Megatron-LM#7452 (12)", "absent", note="no Megatron FSDP; resumes over stages: `gpt: pp2 vpp2 to cp2 dp2`"),
        Claim("a resume begins the schedule of the learning rate again, or advances it twice", "verl#7953; slime#1547, #1775; miles#1627", "equal", "tests/train/test_train_batches.py::test_a_run_with_a_growing_batch_goes_on_bit_for_bit"),
        Claim("Muon with sharded state: the weights differ after a resume", "Megatron-LM#6920", "equal", f"{RESUMED}[gpt with muon: tp2 sp to pp2]"),
        Claim("experts' optimizer state is lost with expert parallelism", "Megatron-LM#761; ms-swift#8240", "equal", f"{RESUMED}[moe: dp4 ep4 to pp2 dp2 ep2]"),
        Claim("a checkpoint has the experts of one expert-parallel rank", "KempnerForge#202", "equal", f"{RESUMED}[moe: dp4 ep4 to pp2 dp2 ep2]"),
        Claim("master weights are made of the rounded ones at every resume", "OpenTau#185", "equal", "tests/dist/test_resume_state.py::test_masters_and_moments_are_those_that_were_saved"),
        Claim("ZeRO 0 in bf16 saves no state of the optimizer", "DeepSpeed#7786", "refused", ZERO_RULES),
        Claim("a resume in a later pass takes the order of the first, or skips the beginning of every further one", "Megatron-Bridge#4565; ms-swift#10050", "equal", "tests/unit/test_data_passes.py::test_a_resume_in_a_later_pass_goes_on_in_its_order"),
    ),
    "Random numbers": (
        Claim("data-parallel ranks draw the same masks for their different samples", "Megatron-LM#6566; tt-metal#55947", "equal", row("gpt with dropout: dp2")),
        Claim("context-parallel ranks draw the same masks for their parts of a sequence", "Megatron-LM#4828", "equal", row("gpt with dropout: cp4")),
        Claim("dropout of layers whose experts' messages are overlapped: one mask for all tensor-parallel ranks, another when recomputed", "Megatron-LM#5841", "once", note="the first loss, bit for bit: `moe with dropout: pp2 vpp2 dp2 ep2` in bf16"),
        Claim("dropout with sequence parallelism takes the wrong random state", "Megatron-LM#1256", "equal", row("gpt with dropout: tp2 sp pp2, recompute_granularity=selective")),
    ),
    "Not judged": (
        Claim("finding 7 and the appendices of the issue", "Megatron-LM#7452 (7, A, B)", "unknown", note="text not read"),
        Claim("a finding about Megatron-Bridge's own code", "Megatron-LM#7452 (13)", "unknown", note="text not read"),
    ),
}  # fmt: skip


FOUND: tuple[tuple[str, str, str], ...] = (
    ("routers' losses are multiplied by tokens ÷ counted tokens: 8 times where answers are an eighth, in every layout", "scaled back", f"{INVARIANTS}::test_a_routers_loss_has_the_same_gradient_however_many_tokens_are_masked"),
    ("`global_aux_loss` with DeepSpeed never resets its counts: norm 9e-3, weights 3e-2 off after 3 steps", "reset", row("moe with global_aux_loss: dp2, one process takes 2 at a time, deepspeed, stage=2, reduce_bucket_size=20000, use_distributed_optimizer")),
    ("`moe_pad_expert_input_to_capacity` with an expert bias: the bias never moves", "counted before padding", f"{INVARIANTS}::test_experts_that_are_padded_to_their_capacity_are_balanced_alike"),
    ("an fp16 step that overflows moves the expert bias", "left as it is", f"{INVARIANTS}::test_a_step_without_an_update_leaves_the_bias_of_experts"),
    ("latent attention without sequence parallelism loses gradients of the shared rotary key; losses agree", "summed", row("mla with more weights: tp2")),
    ("biases of experts are summed over tensor-parallel ranks, which have other experts", "corrected", row("moe with biases: tp2 sp ep2 etp1")),
    ("the gradient of latent attention's query norm is summed twice", "corrected", row("mla with more weights: tp2")),
    ("`global_aux_loss` has another weight over data-parallel ranks", "corrected", row("moe with global_aux_loss: dp2 ep2, one process takes 2 at a time")),
    ("two optimizers with two loss scales: fp16 with expert parallelism comes apart at the first overflow", "refused", LAYOUT_RULES),
    ("multi-token prediction under context parallelism weighs tokens by rank", "weighted by token", row("mtp: cp2")),
    ("interleaved stages on two ranks with batched messages mix them up: a wrong loss from the first step", "sent separately", row("gpt: pp2 vpp2")),
)  # fmt: skip
"""What was found here in megatron-core, what happens now, and the test."""

HEAD = """# Silent errors of composed parallelism

Generated from `tests/silent_errors.py` by `python -m tests.silent_errors`; do not edit.

A wrong sum over ranks often leaves the loss falling while gradients, norms or balances are wrong. This page lists such
reports about other programs, collected in November 2026, and what happens here under the same condition; whether they
have been fixed there since was not checked. A test alone shows the same numbers as one process, or as the same step
without the condition; `gpt: tp2` is a row of [the table of layouts](../../tests/dist/table.py). Everything was compared
in fp32 over gloo on CPUs with the local layers, unless the test names 16 bits: TransformerEngine's layers and NCCL were
not compared ([what verify checks](verify.md#what-was-verified)).
The [first step of every start](../guide/resilience.md#gradients-of-the-first-step) checks the norm and the copies of
weights in any precision and with any layers.
"""


def _test(test: str) -> str:
    path, _, name = test.partition("::")
    case = name.partition("[")[2].removesuffix("]") if path == LAYOUTS.partition("::")[0] else ""
    shown = (case or name).replace("|", "\\|")
    return f"[`{shown}`](../../{path})" if test else ""


def _answer(claim: Claim) -> str:
    said = {"equal": "", "once": "equal when run once (2026-11-28 or 29), no test"}.get(claim.here, claim.here)
    return "; ".join(filter(None, (said, _test(claim.test), claim.note)))


def page() -> str:
    """The Markdown page."""
    lines = [HEAD.rstrip()]
    every = [claim for claims in CLAIMS.values() for claim in claims]
    for title, claims in CLAIMS.items():
        rows = [f"| {each.what} | {each.reports} | {_answer(each)} |" for each in claims if each.here not in ASIDE]
        if rows:
            lines += ["", f"## {title}", "", "| upstream | reports | here |", "|---|---|---|", *rows]
    lines += ["", "## Found here", ""]
    lines += ["In megatron-core 0.19 or its use with DeepSpeed; tests compare with one process or within it.", ""]
    lines += ["| what goes wrong | here | test |", "|---|---|---|"]
    lines += [f"| {what} | {now} | {_test(test)} |" for what, now, test in FOUND]
    for here, title in ASIDE.items():
        lines += ["", f"## {title}", "", "| reports | reason |", "|---|---|"]
        lines += [f"| {each.reports} | {each.note} |" for each in every if each.here == here]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
