"""The rules of the sections `dpo` and `data.chat.preference`, and which model is the reference."""

from __future__ import annotations

from collections.abc import Iterator

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.rules.distill_rules import OF_TEACHERS, has_teacher, teacher_model
from llmrecipes.recipe.schema import Chat, Model, Recipe
from llmrecipes.recipe.sections.preference_section import SMOOTHED, Dpo


def has_reference(recipe: Recipe) -> bool:
    """Whether each step has forward passes of a reference model."""
    dpo = recipe.dpo
    return dpo is not None and not dpo.reference_free and dpo.reference_log_probs is None


def has_second_model(recipe: Recipe) -> bool:
    """Whether the reference is in memory beside the model that is trained; with adapters that model has it."""
    return has_reference(recipe) and (recipe.lora is None or _section(recipe).reference is not None)


def reference_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the reference's passes: the same model without adapters and dropout, in the same layout."""
    model = recipe.model.model_copy(update=OF_TEACHERS)
    lora = None if has_second_model(recipe) else recipe.lora
    plain = recipe.model_copy(update={"model": model, "dpo": None, "qat": None, "lora": lora})
    return plain.with_layout(loss_chunk_tokens=0, torch_compile=False)


def needs_start_weights(recipe: Recipe) -> bool:
    """Whether every start of a run reads the weights that the first one started from (`train.pretrained`)."""
    return recipe.lora is not None or (has_second_model(recipe) and _section(recipe).reference is None)


def named(recipe: Recipe) -> str | None:
    """The key that names the frozen model of a run, a teacher or a reference; None: it has none, or it is the start."""
    if recipe.distill is not None:
        return "distill.teacher" if has_teacher(recipe) else None
    return "dpo.reference" if has_reference(recipe) and _section(recipe).reference is not None else None


def precomputed_place(recipe: Recipe) -> tuple[str, str] | None:
    """The key that names the folder of what a frozen model says of the samples, and the folder; None: it is unset."""
    if recipe.dpo is not None and recipe.dpo.reference_log_probs is not None:
        return "dpo.reference_log_probs", recipe.dpo.reference_log_probs
    if recipe.distill is not None and recipe.distill.logits is not None:
        return "distill.logits", recipe.distill.logits
    return None


def with_frozen_model(recipe: Recipe) -> Recipe:
    """The recipe with the frozen model in place of what was computed with it."""
    if precomputed_place(recipe) is None:
        return recipe
    dpo, distill = recipe.dpo, recipe.distill
    live = {"dpo": dpo and dpo.model_copy(update={"reference_log_probs": None}),
            "distill": distill and distill.model_copy(update={"logits": None})}  # fmt: skip
    return recipe.model_copy(update=live)


def frozen_model(recipe: Recipe) -> Model:
    """The section `model` of that model."""
    return recipe.model.model_copy(update=OF_TEACHERS) if recipe.distill is None else teacher_model(recipe)


def _section(recipe: Recipe) -> Dpo:
    if recipe.dpo is None:
        raise ValueError(f"recipe {recipe.name} has no section dpo")
    return recipe.dpo


def rows_of_a_pair(recipe: Recipe) -> int:
    """Sequences of a pair: both answers in one, or one each (`data.chat.packing` false)."""
    chat = recipe.data.chat
    return 2 if chat is not None and chat.preference is not None and not chat.packing else 1


def rehearsed_chat(chat: Chat, seq_length: int) -> Chat:
    """The section of a rehearsal with sequences of this length and other tokens: pairs that are longer are dropped."""
    pairs = chat.preference is not None
    holds = seq_length // 2 + 1 if pairs and chat.packing else seq_length + 1
    longest = chat.max_length and min(chat.max_length, holds)
    update = {"max_length": longest, "chat_template": None, "overlong": "drop" if pairs else "truncate"}
    return chat.model_copy(update=update)


def rules(recipe: Recipe) -> Iterator[Problem]:
    """What preference tuning goes with."""
    chat = recipe.data.chat
    dpo = recipe.dpo
    pairs = chat is not None and chat.preference is not None
    if dpo is None:
        if pairs:
            yield Problem("data.chat.preference", "set without dpo", "preference pairs are only used by dpo",
                          "dpo: {}, or remove preference")  # fmt: skip
        return
    if not pairs:
        yield Problem("dpo", "set without data.chat.preference", "dpo needs pairs of answers",
                      "data.chat.preference: {}, or remove dpo")  # fmt: skip
    if dpo.label_smoothing and dpo.loss_type not in SMOOTHED:
        yield Problem("dpo.label_smoothing", f"{dpo.label_smoothing:g} with loss_type {dpo.loss_type}",
                      f"label_smoothing is only used with {' and '.join(SMOOTHED)}",
                      "remove label_smoothing, or loss_type: robust")  # fmt: skip
    if dpo.loss_type == "exo_pair" and not dpo.label_smoothing:
        yield Problem("dpo.label_smoothing", "0 with loss_type exo_pair", "exo_pair takes its logarithm",
                      "label_smoothing: 1e-3")  # fmt: skip
    if dpo.reference_free and dpo.reference is not None:
        yield Problem("dpo.reference", f"{dpo.reference!r} with reference_free",
                      "reference_free uses no reference model",
                      "remove one of them")  # fmt: skip
    if dpo.reference_free and dpo.reference_log_probs is not None:
        yield Problem("dpo.reference_log_probs", f"{dpo.reference_log_probs!r} with reference_free",
                      "reference_free uses no reference model", "remove one of them")  # fmt: skip
    sizes = {
        "layout.micro_batch_size": recipe.layout.micro_batch_size,
        "train.global_batch_size": recipe.train.global_batch_size,
    }
    for key, size in sizes.items():
        if size % rows_of_a_pair(recipe):
            yield Problem(key, f"{size} with data.chat.packing false",
                          "both answers of a pair must be in the same micro-batch, as two sequences",
                          f"{key} {size + 1}, or data.chat.packing true")  # fmt: skip
    yield from _combinations(recipe)


def _combinations(recipe: Recipe) -> Iterator[Problem]:
    layout, train, model = recipe.layout, recipe.train, recipe.model
    count = "the loss is averaged over pairs, but this term over tokens"
    obstacles = {
        "distill": (recipe.distill is not None, "a run can use distillation or preference pairs, not both",
                    "remove distill"),
        "train.label_smoothing": (
            train.label_smoothing > 0, "preference losses use dpo.label_smoothing instead", "dpo.label_smoothing",
        ),
        "train.adversarial": (
            train.adversarial is not None, "preference losses need a single pass per step", "remove adversarial",
        ),
        "train.z_loss_coeff": (train.z_loss_coeff > 0, count, "remove z_loss_coeff"),
        "train.rampup_batch_size": (
            train.rampup_batch_size is not None and rows_of_a_pair(recipe) > 1,
            "a growing batch could split a pair", "remove it, or data.chat.packing true",
        ),
        "model.mtp_num_layers": (
            model.mtp_num_layers is not None, "preference losses are computed on the next token only",
            "remove mtp_num_layers",
        ),
        "model.moe_aux_loss_coeff": (
            bool(model.num_moe_experts) and model.moe_aux_loss_coeff > 0, count, "moe_aux_loss_coeff 0",
        ),
        "model.moe_z_loss_coeff": (
            bool(model.num_moe_experts) and bool(model.moe_z_loss_coeff), count, "remove moe_z_loss_coeff",
        ),
        "layout.tp_comm_overlap": (
            bool(layout.tp_comm_overlap), "its user buffers fit one model only", "remove tp_comm_overlap",
        ),
        "layout.cuda_graph_impl": (
            layout.cuda_graph_impl is not None, "the reference's forward pass cannot be captured in CUDA graphs",
            "remove cuda_graph_impl",
        ),
        "layout.overlap_moe_expert_parallel_comm": (
            bool(layout.overlap_moe_expert_parallel_comm), "its schedule has no forward pass of a reference model",
            "remove overlap_moe_expert_parallel_comm",
        ),
    }  # fmt: skip
    for key, (wrong, rule, fix) in obstacles.items():
        if wrong:
            yield Problem(key, "set with dpo", rule, fix)
