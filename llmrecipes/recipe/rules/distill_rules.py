"""The recipe of a teacher, and the rules of the section `distill`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError

from llmrecipes.recipe.derived.stage_layout import layer_places
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.rules.layout_rules import pipeline
from llmrecipes.recipe.schema import LayoutKeys, Model, Recipe
from llmrecipes.recipe.sections.distill import Distill

SHARED = ("seq_length", "vocab_size", "make_vocab_size_divisible_by")
"""Keys of `model` that teacher and student have alike: the same tokens are read, and the same ones predicted."""
OF_TEACHERS: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "layer_drop": 0.0,
    "moe_input_jitter_eps": None,
    "mtp_num_layers": None,
}
"""Keys of `model` that say how a model is trained: a teacher is not."""
NOT_COMPARED = ("transformer_impl", "mtp_loss_scaling_factor", "init_method", "init_method_std")
"""Keys of `model` on which neither a teacher's weights nor its passes depend."""
CHECKSUM = 4
"""Bytes of the CRC-32 of a sample."""
WIDTH = ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
"""Keys of `model` that a rehearsal's teacher takes from its student where hidden states are compared."""


def section(recipe: Recipe) -> Distill:
    """The section of a recipe that has one."""
    if recipe.distill is None:
        raise ValueError(f"recipe {recipe.name} has no teacher")
    return recipe.distill


def has_teacher(recipe: Recipe) -> bool:
    """Whether each step has forward passes of a teacher."""
    return recipe.distill is not None and recipe.distill.logits is None


def sample_bytes(recipe: Recipe) -> int:
    """Bytes on a disk of what the teacher says of a sample (`distill.logits`): an id and a logit for each of `top_k`
    tokens, and a checksum."""
    size = (2 if recipe.model.vocab_size <= 1 << 16 else 4) + (4 if recipe.train.precision == "fp32" else 2)
    return recipe.model.seq_length * (section(recipe).top_k or 0) * size + CHECKSUM


def teacher_model(recipe: Recipe) -> Model:
    """The section `model` of the teacher.

    Raises:
        ValidationError: `distill.model` has another key or value than such a section.
    """
    different = section(recipe).model
    values = {**recipe.model.model_dump(), **different, **OF_TEACHERS}
    if values["num_moe_experts"] is None:
        # What the student says of its experts is nothing to a dense teacher.
        values = {key: value for key, value in values.items() if not key.startswith("moe_") or key in different}
    return type(recipe.model).model_validate(values)


def teacher_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the teacher's passes: its model in the layout, precision and batch of the student."""
    train = recipe.train.model_copy(update={"label_smoothing": 0.0, "freeze": ()})
    model = teacher_model(recipe)
    keys: dict[str, Any] = {"loss_chunk_tokens": 0, "torch_compile": False}
    if not model.num_moe_experts:  # the ranks that share the student's experts have the same dense teacher
        keys |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    update = {"model": model, "train": train, "distill": None, "lora": None, "qat": None}
    return recipe.model_copy(update=update).with_layout(**keys)


def differing(student: Model, teacher: Model) -> dict[str, Any]:
    """What `distill.model` has to be for a teacher of this section `model`, as JSON values."""
    now = student.model_dump(mode="json")
    then = teacher.model_dump(mode="json")
    skipped = {*SHARED, *OF_TEACHERS, *NOT_COMPARED}
    if teacher.num_moe_experts is None:
        skipped |= {key for key in then if key.startswith("moe_")}
    return {key: value for key, value in then.items() if now[key] != value and key not in skipped}


def rehearsed(recipe: Recipe, student: Model, parallel: LayoutKeys, small: Callable[[Recipe], Model]) -> Distill | None:
    """The section of a rehearsal, whose teacher has random weights.

    Args:
        student: the small model.
        parallel: its layout.
        small: makes a small model of a recipe.
    """
    distill = recipe.distill
    if distill is None:
        return None
    top_k = distill.top_k and min(distill.top_k, student.vocab_size)
    teacher = small(teacher_recipe(recipe))
    if distill.layers and teacher.hidden_size != student.hidden_size:
        teacher = teacher.model_copy(update={key: getattr(student, key) for key in WIDTH})
    values = teacher.model_dump(mode="json")
    different = {key: values[key] for key in distill.model} | differing(student, teacher)
    models = (recipe.model_copy(update={"model": model, "layout": parallel}) for model in (student, teacher))
    layers = _last_of_each_place(*models)[-len(distill.layers) :] if distill.layers else ()
    return distill.model_copy(update={"model": different, "top_k": top_k, "logits": None, "layers": layers})


def _last_of_each_place(student: Recipe, teacher: Recipe) -> tuple[tuple[int, int], ...]:
    """The last layers, from 1, that both have on a chunk of a pipeline stage."""
    mine, theirs = (
        {place: number for number, place in enumerate(layer_places(each), 1)} for each in (student, teacher)
    )
    return tuple((mine[place], theirs[place]) for place in mine if place in theirs)


def rules(recipe: Recipe) -> Iterator[Problem]:
    """What a teacher goes with."""
    distill = recipe.distill
    if distill is None:
        return
    for key in ("temperature", "top_k"):
        default = type(distill).model_fields[key].default
        if distill.loss == "mse" and getattr(distill, key) != default:
            yield Problem(
                f"distill.{key}",
                f"{getattr(distill, key)} with loss mse",
                "only loss kl uses probabilities",
                f"remove {key}, or loss kl",
            )
    if distill.top_k is not None and distill.top_k > recipe.model.vocab_size:
        yield Problem(
            "distill.top_k",
            f"{distill.top_k} of {recipe.model.vocab_size} tokens",
            "top_k must be at most model.vocab_size",
            "remove top_k",
        )
    if distill.logits is not None and distill.top_k is None:
        yield Problem(
            "distill.top_k",
            "unset with distill.logits",
            "distill.logits needs top_k: otherwise all logits of every token would be stored",
            "top_k: 32",
        )
    yield from _combinations(recipe)
    for key in SHARED:
        if key in distill.model:
            yield Problem(
                f"distill.model.{key}",
                f"{distill.model[key]!r}",
                "teacher and student must read and predict the same tokens",
                f"remove it, or change model.{key}",
            )
    try:
        teacher = teacher_model(recipe)
    except ValidationError as error:
        for problem in error.errors():
            yield Problem(
                ".".join(["distill.model", *map(str, problem["loc"])]),
                problem["msg"],
                "keys and values as in model",
            )
    else:
        yield from _layers(recipe, distill, teacher)


def _layers(recipe: Recipe, distill: Distill, teacher: Model) -> Iterator[Problem]:
    """What the comparison of hidden states goes with."""
    if not distill.layers:
        return
    if distill.logits is not None:
        yield Problem(
            "distill.layers",
            "set with distill.logits",
            "the precomputed folder has no hidden states of the teacher",
            "remove logits or layers",
        )
    if recipe.layout.torch_compile:
        yield Problem(
            "layout.torch_compile",
            "true with distill.layers",
            "the output of compiled layers cannot be read",
            "remove torch_compile",
        )
    if teacher.hidden_size != recipe.model.hidden_size:
        yield Problem(
            "distill.layers",
            f"hidden_size is {recipe.model.hidden_size}, but {teacher.hidden_size} in the teacher",
            "hidden states are compared without a projection, so both models need the same hidden_size",
            f"model.hidden_size {teacher.hidden_size}, or remove layers",
        )
    for place, (name, model) in enumerate({"the student": recipe.model, "the teacher": teacher}.items()):
        if beyond := sorted({pair[place] for pair in distill.layers if pair[place] > model.num_layers}):
            yield Problem(
                "distill.layers",
                f"layer {beyond[-1]} of {name}, which has {model.num_layers} layers",
                "a pair is a student layer and a teacher layer, counted from 1",
                f"at most {model.num_layers}",
            )
    own = [layer for layer, _ in distill.layers]
    if twice := sorted({layer for layer in own if own.count(layer) > 1}):
        yield Problem(
            "distill.layers",
            f"student layer {twice[0]} is in {own.count(twice[0])} pairs",
            "a student layer can be compared with only one teacher layer",
            f"only one pair with layer {twice[0]}",
        )


def _combinations(recipe: Recipe) -> Iterator[Problem]:
    layout = recipe.layout
    obstacles = {
        "train.label_smoothing": (
            recipe.train.label_smoothing > 0,
            "the teacher already smooths the targets",
            "label_smoothing 0",
        ),
        "model.mtp_num_layers": (
            recipe.model.mtp_num_layers is not None,
            "a teacher predicts the next token only",
            "remove mtp_num_layers",
        ),
        "layout.tp_comm_overlap": (
            bool(layout.tp_comm_overlap),
            "its user buffers fit the width of one model only",
            "remove tp_comm_overlap",
        ),
        "layout.cuda_graph_impl": (
            layout.cuda_graph_impl is not None,
            "the teacher's forward pass cannot be captured in CUDA graphs",
            "remove cuda_graph_impl",
        ),
        "layout.overlap_moe_expert_parallel_comm": (
            bool(layout.overlap_moe_expert_parallel_comm),
            "its schedule has no forward pass of a teacher",
            "remove overlap_moe_expert_parallel_comm",
        ),
    }
    for key, (wrong, rule, fix) in obstacles.items():
        if wrong:
            yield Problem(key, "set with distill", rule, fix)


def of_teacher(recipe: Recipe, check: Callable[[Recipe], list[Problem]]) -> list[Problem]:
    """What keeps the teacher from being a model that fits the layout, if the section itself has no problem.

    Args:
        check: the rules of a recipe.
    """
    of_section = list(rules(recipe))
    if not has_teacher(recipe) or any(problem.key.startswith("distill.model") for problem in of_section):
        return []
    problems = []
    teacher = teacher_recipe(recipe)
    for problem in check(teacher):
        what = f"the teacher: {problem.what} ({problem.key})"
        if problem.key.startswith("model."):
            problems.append(Problem(f"distill.{problem.key}", what, problem.rule, problem.fix))
        elif problem.key.startswith("layout."):
            problems.append(Problem("distill.model", what, problem.rule, problem.fix))
    if not problems and not any(problem.key == "distill.layers" for problem in of_section):
        problems += _apart(recipe, teacher)
    return problems


def _apart(recipe: Recipe, teacher: Recipe) -> Iterator[Problem]:
    """Pairs of layers that are not on the same chunk of a pipeline stage."""
    if any(pipeline(recipe)) or not section(recipe).layers:
        return
    mine, theirs = layer_places(recipe), layer_places(teacher)
    for layer, other in section(recipe).layers:
        place = mine[layer - 1]
        elsewhere = theirs[other - 1]
        if place == elsewhere:
            continue
        there = [number for number, each in enumerate(theirs, 1) if each == place]
        near = min(there, key=lambda number: abs(number - other), default=None)
        beside = f"teacher layers {there[0]}-{there[-1]} are" if there else "no teacher layer is"
        yield Problem(
            "distill.layers",
            f"student layer {layer} is on {_name(recipe, place)}, teacher layer {other} on {_name(recipe, elsewhere)}",
            f"both layers of a pair must be on the same stage: {beside} on {_name(recipe, place)}",
            f"[{layer}, {near}]" if near else f"no pair with layer {layer}",
        )


def _name(recipe: Recipe, place: tuple[int, int]) -> str:
    """A pipeline stage and chunk, as text."""
    chunks = recipe.layout.virtual_pipeline_model_parallel_size
    return f"stage {place[0]}, chunk {place[1]}" if chunks else f"stage {place[0]}"
