"""A student that learns from a teacher: its loss is plain PyTorch's, and its plan has the teacher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.engine.parts.distillation import Teacher, TeacherComparison, compared_losses, hidden_distances
from llmrecipes.plan.derive import derive
from llmrecipes.plan.frozen import teacher_plan
from llmrecipes.plan.memory import teacher_bytes
from llmrecipes.plan.parameters import count
from llmrecipes.plan.speed.forecast import forecast
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.load import load
from llmrecipes.recipe.rules.distill_rules import teacher_recipe
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.distill import Distill
from llmrecipes.recipe.variants.proxy import proxy
from llmrecipes.workflow.plan import plan_on
from tests.helpers import ROOMY, engine_of, random_batches, steps, tiny
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("world")

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "temperature": {"temperature": 3.0, "alpha": 0.9},
    "top_k": {"top_k": 5, "temperature": 0.5},
    "mse": {"loss": "mse", "alpha": 0.3},
    "teacher only": {"alpha": 1.0},
}


def plain(logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, distill: Distill, words: int) -> Any:
    """The loss of each token by torch's functions, of [n, padded vocabulary]."""
    own, taught = logits[:, :words], teacher[:, :words]
    if distill.loss == "mse":
        distance = F.mse_loss(own, taught, reduction="none").mean(-1)
    else:
        taught = taught / distill.temperature
        if distill.top_k is not None:
            taught = taught.masked_fill(taught < taught.topk(distill.top_k).values[:, -1:], -1e30)
        student = F.log_softmax(own / distill.temperature, -1)
        distance = F.kl_div(student, F.softmax(taught, -1), reduction="none").sum(-1) * distill.temperature**2
    return (1 - distill.alpha) * F.cross_entropy(logits, labels, reduction="none") + distill.alpha * distance


@pytest.mark.parametrize("keys", SETTINGS.values(), ids=SETTINGS)
def test_losses_and_gradients_are_those_of_torch(keys: dict[str, Any]) -> None:
    distill = Distill(teacher="any", **keys)
    draw = torch.Generator().manual_seed(0)
    student = torch.randn(9, 40, generator=draw).requires_grad_()
    teacher, labels = torch.randn(9, 40, generator=draw), torch.randint(0, 37, (9,), generator=draw)
    weights = torch.rand(9, generator=draw)
    losses = compared_losses(student, teacher, labels, TeacherComparison(distill, 37))
    (gradient,) = torch.autograd.grad((losses * weights).sum(), student)
    exact = student.detach().double().requires_grad_()
    expected = plain(exact, teacher.double(), labels, distill, 37)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), exact)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-7)


def test_a_loss_that_is_not_finite_stays_so() -> None:
    """A mask of what has no share must not hide it from the check of a step."""
    student = torch.zeros(1, 8)
    student[0, 3] = torch.nan
    for loss in ("kl", "mse"):
        distill = Distill(teacher="any", loss=loss)
        losses = compared_losses(
            student, torch.zeros(1, 8), torch.zeros(1, dtype=torch.long), TeacherComparison(distill, 8)
        )
        assert not losses.isfinite().any()


DISTILL: dict[str, Any] = {"teacher": "any", "model": {"num_layers": 3, "hidden_size": 96}, "temperature": 2.0}


def taught(*, train: dict[str, Any] | None = None, layout: dict[str, Any] | None = None, **keys: Any) -> Recipe:
    train = {"train_iters": 12, **(train or {})}
    return tiny(distill={**DISTILL, **keys}, train=train, layout=layout or {}, optimizer={"lr": 1e-2})


def logits_of(engine: MegatronEngine, batch: dict[str, torch.Tensor], *, teacher: bool) -> torch.Tensor:
    """[b × s, padded vocabulary]."""
    if teacher:
        other = engine_of(teacher_plan(engine.plan).recipe)
        modules = other.modules
    else:
        modules = engine.modules
    with torch.no_grad():
        out = modules[0].eval()(batch["tokens"], batch["position_ids"], None)
    modules[0].train()
    return out.flatten(0, 1)


@pytest.mark.parametrize("keys", [{}, {"loss": "mse", "temperature": 1.0}, {"top_k": 7}], ids=["kl", "mse", "top_k"])
def test_a_step_has_the_loss_of_plain_pytorch(keys: dict[str, Any]) -> None:
    recipe = taught(**keys)
    engine = engine_of(recipe)
    batches = [batch for batch, _ in zip(random_batches(recipe), range(engine.plan.num_microbatches), strict=False)]
    total, tokens = 0.0, 0.0
    for batch in batches:
        mask = batch["loss_mask"].flatten()
        losses = plain(
            logits_of(engine, batch, teacher=False),
            logits_of(engine, batch, teacher=True),
            batch["labels"].flatten(),
            recipe.distill or Distill(teacher=""),
            recipe.model.vocab_size,
        )
        total, tokens = total + float((losses * mask).sum()), tokens + float(mask.sum())
    assert engine.train_step(iter(batches)).loss == pytest.approx(total / tokens, rel=1e-5)


def test_the_teacher_stays_as_it_is_and_only_training_has_its_loss() -> None:
    recipe = taught()
    engine = engine_of(recipe)
    alone = engine_of(recipe.model_copy(update={"distill": None}))
    before = engine.evaluate(random_batches(recipe), 1)
    assert before == alone.evaluate(random_batches(recipe), 1)
    engine.parts.load()
    weights = [each.clone() for module in engine.parts.the(Teacher).modules for each in module.parameters()]
    names = {name for name, _ in engine.named_tensors()}
    first = engine.train_step(random_batches(recipe)).loss
    assert first != alone.train_step(random_batches(recipe)).loss
    for _ in range(5):
        last = engine.train_step(random_batches(recipe)).loss
    assert last < first
    after = [each for module in engine.parts.the(Teacher).modules for each in module.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(weights, after, strict=True))
    assert names == {name for name, _ in alone.named_tensors()}, "a checkpoint has the student only"


# -- hidden states ---------------------------------------------------------------------------------------------------

HIDDEN: dict[str, Any] = {"model": {"num_layers": 3}, "layers": [[1, 2], [2, 3]], "layers_weight": 0.7}


def distance(student: torch.Tensor, teacher: torch.Tensor, loss: str) -> torch.Tensor:
    """Of each token, by torch's functions."""
    if loss == "mse":
        return F.mse_loss(student, teacher, reduction="none").mean(-1)
    return 1 - F.cosine_similarity(student, teacher, dim=-1)


def passed(engine: MegatronEngine, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits [b × s, padded vocabulary], and the output [s, b, h] of each layer, from 1."""
    (module,), seen = engine.modules, dict[int, torch.Tensor]()
    hooks = [
        layer.register_forward_hook(lambda layer, _, output: seen.update({layer.layer_number: output[0]}))
        for layer in module.decoder.layers
    ]
    logits = module.eval()(batch["tokens"], batch["position_ids"], None)
    for hook in hooks:
        hook.remove()
    return logits.flatten(0, 1), seen


@pytest.mark.parametrize("loss", ["mse", "cosine"])
def test_distances_of_hidden_states_are_those_of_torch(loss: str) -> None:
    draw = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 3, 24, generator=draw)
    distances, gradient = hidden_distances(
        student, teacher, Distill.model_validate({"teacher": "a", "layers_loss": loss})
    )
    exact = student.double().requires_grad_()
    expected = distance(exact, teacher.double(), loss)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(distances.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["mse", "cosine"])
def test_a_step_compares_hidden_states_as_plain_pytorch_does(loss: str) -> None:
    recipe = taught(**HIDDEN, layers_loss=loss)
    engine, distill = engine_of(recipe), recipe.distill
    hidden = engine.parts.the(Teacher).hidden
    assert distill is not None and hidden is not None
    student = engine_of(recipe.model_copy(update={"distill": None}))
    teacher = engine_of(teacher_plan(engine.plan).recipe)
    batches = [batch for batch, _ in zip(random_batches(recipe), range(engine.plan.num_microbatches), strict=False)]
    total, apart, tokens = torch.zeros(()), 0.0, 0.0
    for batch in batches:
        logits, own = passed(student, batch)
        with torch.no_grad():
            said, others = passed(teacher, batch)
        losses = plain(logits, said, batch["labels"].flatten(), distill, recipe.model.vocab_size)
        pairs = [distance(own[mine], others[theirs], loss).t().flatten() for mine, theirs in distill.layers]
        mean, mask = torch.stack(pairs).mean(0), batch["loss_mask"].flatten()
        total = total + ((losses + distill.layers_weight * mean) * mask).sum()
        apart, tokens = apart + float((mean.detach() * mask).sum()), tokens + float(mask.sum())
    gradients = torch.autograd.grad(total / tokens, list(student.modules[0].parameters()))
    hidden.start()
    step = engine.train_step(iter(batches))
    assert step.loss == pytest.approx(total.item() / tokens, rel=1e-5)
    assert step.grad_norm == pytest.approx(float(torch.stack([each.norm() for each in gradients]).norm()), rel=1e-5)
    assert hidden.take() == pytest.approx(apart / tokens, rel=1e-5)


@pytest.mark.parametrize(("method", "layers"), [("uniform", 2), ("block", 1)])
def test_recomputed_layers_are_compared_once(method: str, layers: int) -> None:
    again = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    engines = [engine_of(taught(**HIDDEN, layout=layout)) for layout in ({}, again)]
    kept, recomputed = ([(step.loss, step.grad_norm) for step in steps(engine, 2)] for engine in engines)
    for one, other in zip(kept, recomputed, strict=True):
        assert other == pytest.approx(one, rel=1e-6)


def test_the_gradient_of_hidden_states_is_scaled_for_fp16() -> None:
    norms = []
    for scale in (1.0, 64.0):
        train = {"precision": "fp16", "initial_loss_scale": scale}
        norms.append(steps(engine_of(taught(**{**HIDDEN, "layers_weight": 1000.0}, train=train)), 1)[0].grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)


def test_only_training_compares_hidden_states() -> None:
    recipe = taught(**HIDDEN)
    engine, alone = (engine_of(each) for each in (recipe, taught(model=HIDDEN["model"])))
    assert engine.evaluate(random_batches(recipe), 1) == alone.evaluate(random_batches(recipe), 1)
    assert steps(engine, 1)[0].loss > steps(alone, 1)[0].loss
    hidden = engine.parts.the(Teacher).hidden
    assert hidden is not None and alone.parts.the(Teacher).hidden is None
    hidden.start()
    assert engine.evaluate(random_batches(recipe), 1) is not None
    assert hidden.take() == 0


# -- plan ------------------------------------------------------------------------------------------------------------


def test_the_plan_has_the_teachers_memory_and_work() -> None:
    recipe = taught()
    plan, alone = (derive(each, 1, ROOMY) for each in (recipe, recipe.model_copy(update={"distill": None})))
    teacher = teacher_recipe(recipe)
    weights = 4 * count(teacher.model, shape(teacher.model)).total
    assert weights < plan.memory.teacher < weights + 4 * 2 * 64 * 96 * 2
    assert plan.memory.as_dict()["total"] - alone.memory.as_dict()["total"] >= plan.memory.teacher
    assert "teacher" not in alone.memory.as_dict()
    own = derive(teacher, 1, ROOMY).flops_per_token_full
    assert plan.flops_per_token_full == pytest.approx(alone.flops_per_token_full + own / 3)


def test_the_plan_has_the_hidden_states_that_are_compared() -> None:
    with_layers, without = (
        tiny(
            model={"num_layers": 4}, layout={"pipeline_model_parallel_size": 2},
            distill={**DISTILL, "model": {"num_layers": 8}, **keys},
        )
        for keys in ({"layers": [[1, 2], [2, 4], [4, 8]]}, {})
    )  # fmt: skip
    plan = derive(with_layers, 2, ROOMY)
    states = 4 * plan.num_microbatches * 2 * 64 * 64
    for stage, pairs in enumerate((2, 1)):
        of_stage = plan.layout, plan.num_microbatches, stage, "cpu"
        assert teacher_bytes(with_layers, *of_stage) - teacher_bytes(without, *of_stage) == pairs * states
    one, other = (derive(taught(**keys), 1, ROOMY).memory.teacher for keys in (HIDDEN, {"model": HIDDEN["model"]}))
    assert one - other == 2 * 4 * 2 * 64 * 64  # of a micro-batch


def test_a_forecast_has_the_teachers_passes() -> None:
    size = ["distill.teacher=a", "distill.model={num_layers: 64}"]
    steps = {}
    for name, keys in {"taught": size, "alone": []}.items():
        plan, _ = plan_on(load("llama3-8b", keys).recipe, nproc=None, cluster="h100-ib", nodes=8)
        steps[name] = forecast(plan.largest, None).step
    # Twice the layers, forward only: two thirds of the student's own passes.
    passes = steps["alone"].compute + steps["alone"].tensor
    assert 0.5 < steps["taught"].teacher / passes < 0.9
    assert steps["taught"].seconds == pytest.approx(sum(steps["taught"].parts().values()))
    assert steps["alone"].teacher == 0 and "teacher" not in steps["alone"].parts()


# -- rules -----------------------------------------------------------------------------------------------------------

LAYERS = ["distill.model={}", "distill.layers=[[2, 2]]"]
REFUSED: dict[str, tuple[list[str], str]] = {
    "another width": (["distill.layers=[[2, 2]]"], "distill.layers"),
    "no layer of the student": ([*LAYERS, "distill.layers=[[3, 2]]"], "distill.layers"),
    "no layer of the teacher": ([*LAYERS, "distill.layers=[[2, 3]]"], "distill.layers"),
    "a layer twice": ([*LAYERS, "distill.layers=[[2, 1], [2, 2]]"], "distill.layers"),
    "half a pair": ([*LAYERS, "distill.layers=[[2]]"], "distill.layers.0"),
    "a weight of nothing": (["distill.layers_weight=2.0"], "distill.layers_weight"),
    "a distance of nothing": (["distill.layers_loss=cosine"], "distill.layers_loss"),
    "logits on a disk": ([*LAYERS, "distill.logits=there", "distill.top_k=4"], "distill.layers"),
    "compiled layers": ([*LAYERS, "layout.torch_compile=true"], "layout.torch_compile"),
    "two stages": (
        ["model.num_layers=4", "distill.model={num_layers: 8}", "layout.pipeline_model_parallel_size=2",
         "distill.layers=[[2, 5]]"],
        "distill.layers",
    ),
    "layout.engine": (["layout.engine=deepspeed"], "distill"),
    "smoothing": (["train.label_smoothing=0.1"], "train.label_smoothing"),
    "chunks": (["layout.loss_chunk_tokens=64"], "layout.loss_chunk_tokens"),
    "predictions": (["model.mtp_num_layers=1"], "model.mtp_num_layers"),
    "temperature of logits": (["distill.loss=mse", "distill.temperature=2.0"], "distill.temperature"),
    "top_k of logits": (["distill.loss=mse", "distill.temperature=1.0", "distill.top_k=3"], "distill.top_k"),
    "more than there are": (["distill.top_k=5000"], "distill.top_k"),
    "other tokens": (["distill.model={vocab_size: 512}"], "distill.model.vocab_size"),
    "other sequences": (["distill.model={seq_length: 512}"], "distill.model.seq_length"),
    "unknown key": (["distill.model={layers: 2}"], "distill.model.layers"),
    "no model": (["distill.model={num_attention_heads: 5}"], "distill.model.num_attention_heads"),
    "no layout": (
        ["layout.pipeline_model_parallel_size=2", "distill.model={num_layers: 3}"], "distill.model",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "key"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_teacher_is_refused(keys: list[str], key: str) -> None:
    with refused(key):
        load("gpt-tiny-distil", keys)


def test_a_dense_teacher_needs_no_word_about_experts() -> None:
    recipe = load("moe-tiny", ["distill.teacher=a", "distill.model={num_moe_experts: null}"]).recipe
    assert teacher_recipe(recipe).model.num_moe_experts is None
    assert not check(teacher_recipe(recipe))


@pytest.mark.parametrize("heads", [32, 64])
def test_a_rehearsal_compares_layers_that_it_has(heads: int) -> None:
    keys = ["distill.teacher=a", f"distill.model={{num_layers: 64, num_attention_heads: {heads}}}"]
    stages = ["layout.pipeline_model_parallel_size=2", "distill.layers=[[16, 32], [20, 40], [32, 64]]"]
    recipe = load("llama3-8b", [*keys, *stages]).recipe
    small = proxy(recipe)
    assert not check(small)
    assert small.distill is not None and len(small.distill.layers) == 2


def test_a_rehearsal_has_a_small_teacher() -> None:
    keys = ["distill.teacher=a", "distill.model={num_layers: 64, hidden_size: 8192, num_attention_heads: 64}"]
    small = proxy(load("llama3-8b", [*keys, "distill.top_k=20000"]).recipe)
    assert not check(small)
    assert count(teacher_recipe(small).model, shape(teacher_recipe(small).model)).total < 10e6
