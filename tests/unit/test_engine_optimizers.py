"""SGD, Muon and Lion: their updates against plain PyTorch, what they keep, resuming, and where they are refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.former import ADAMW
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.base import Progress
from llmrecipes.engine.core.checkpoint import initial
from llmrecipes.engine.core.checkpoint.reading import read_index
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.errors import UserError
from llmrecipes.models.create import first_checkpoint
from llmrecipes.plan.derive import derive
from llmrecipes.plan.muon import products
from llmrecipes.recipe.load import load
from llmrecipes.recipe.rules.optimizer_kinds import OF_MATRICES
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.optimizer_section import MUON_STEPS
from tests.helpers import LLAMA, ROOMY, engine_of, random_batches, steps, tiny
from tests.refusals import refused
from tests.unit.test_checkpoint_optimizer_state import saved, whole

Update = Callable[[str, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], None]
KINDS = ["sgd", *OF_MATRICES]
LR, DECAY = 1e-2, 0.1
UNSHARDED = "layout.use_distributed_optimizer=false"


def recipe(kind: str, precision: str = "fp32", **optimizer: Any) -> Recipe:
    return tiny(
        model={**LLAMA, "share_embeddings_and_output_weights": False},
        optimizer={"optimizer": kind, "lr": LR, "weight_decay": DECAY, "clip_grad": 0.0, **optimizer},
        scheduler={"lr_decay_style": "constant"},
        layout={"use_distributed_optimizer": False},
        train={"precision": precision},
    )


def state(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Copies of weights, master weights and momenta, by their names in a checkpoint."""
    found = engine.state(Progress())
    return {name: value.clone() for name, value in whole({key: found[key] for key in ("model", "optimizer")}).items()}


def is_matrix(name: str, value: torch.Tensor) -> bool:
    return value.dim() == 2 and not name.startswith(("embedding.", "output_layer."))


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz iterations of Muon with the coefficients of modded-nanogpt, times √max(out, in)."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / x.norm()
    for a, b, c in (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
    ):  # fmt: skip
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x if wide else x.T) * max(matrix.shape) ** 0.5


def muon(name: str, weight: torch.Tensor, gradient: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
    momentum = kept.setdefault(name, torch.zeros_like(weight))
    momentum.mul_(0.95).add_(gradient, alpha=0.05)
    update = 0.05 * gradient + 0.95 * momentum
    weight.mul_(1 - LR * DECAY)
    if name.endswith("linear_qkv.weight"):
        sizes = [32, 16, 16]  # two heads of 16 share a key and a value
        width = weight.shape[-1]
        grouped = update.view(-1, sum(sizes), width).split(sizes, dim=1)
        changes = [orthogonalized(each.reshape(-1, width)).view_as(each) for each in grouped]
        update = torch.cat(changes, dim=1).view_as(weight)
    else:
        update = orthogonalized(update)
    weight.sub_(LR * update)


def lion(name: str, weight: torch.Tensor, gradient: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
    momentum = kept.setdefault(name, torch.zeros_like(weight))
    weight.mul_(1 - LR * DECAY).sub_(LR * (0.9 * momentum + 0.1 * gradient).sign())
    momentum.mul_(0.95).add_(gradient, alpha=0.05)


def trained_beside(chosen: Recipe, update: Update | None, rest: type[torch.optim.Optimizer], **options: Any) -> None:
    """Compare three updates of an engine with those of plain PyTorch from the same gradients."""
    engine = engine_of(chosen)
    names = dict(engine.modules[0].named_parameters())
    mine = {name: parameter.detach().clone().requires_grad_() for name, parameter in names.items()}
    matrices = {name for name, value in mine.items() if update is not None and is_matrix(name, value)}
    others = {name: value for name, value in mine.items() if name not in matrices}
    reference = rest(
        [{"params": [value], "lr": LR, "weight_decay": DECAY if value.dim() > 1 else 0.0} for value in others.values()],
        **options,
    )
    kept: dict[str, torch.Tensor] = {}
    batches = random_batches(chosen)
    for _ in range(3):
        engine.train_step(batches)
        gradients = {name: value.clone() for name, value in engine.named_tensors() if name.endswith(".grad")}
        with torch.no_grad():
            for name in matrices:
                assert update is not None
                update(name, mine[name], gradients[f"{name}.grad"].view_as(mine[name]), kept)
        for name, value in others.items():
            value.grad = gradients[f"{name}.grad"].view_as(value)
        reference.step()
    for name, value in mine.items():
        torch.testing.assert_close(names[name].detach(), value.detach(), rtol=1e-5, atol=1e-6, msg=name)
    engine.close()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", [*KINDS, "sgd without momentum"])
def test_updates_are_those_of_plain_pytorch(kind: str) -> None:
    """Muon and Lion are those of their papers for matrices, and AdamW for the rest."""
    if kind.startswith("sgd"):
        momentum = 0.0 if "without" in kind else 0.9
        trained_beside(recipe("sgd", sgd_momentum=momentum), None, torch.optim.SGD, momentum=momentum)
        return
    options = {"muon_nesterov": True, "muon_fp32_matmul_prec": "highest"} if kind == "muon" else {"adam_beta1": 0.9}
    chosen = recipe(kind, **options)
    settings = chosen.optimizer
    trained_beside(
        chosen, {"muon": muon, "lion": lion}[kind], torch.optim.AdamW,
        betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps,
    )  # fmt: skip


@pytest.mark.parametrize("kind", MUON_STEPS)
def test_accepted_iterations_of_muon_orthogonalize(kind: str) -> None:
    """The library is the judge, also of a matrix that is nearly of rank one, as many momenta are."""
    utils = import_module("emerging_optimizers.orthogonalized_optimizers.muon_utils")  # it has no types
    length = len(utils._COEFFICIENT_SETS[kind])
    assert MUON_STEPS[kind] == (5 if kind == "simple" else length)
    columns = torch.linalg.qr(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))[0]

    def singular_values(steps: int) -> torch.Tensor:
        """Of what several matrices become, in the directions of their own."""
        shares = [torch.tensor([1.0] + [rest] * 7) for rest in (1.0, 0.5, 0.1)]
        return torch.cat([(columns * utils.newton_schulz(columns * each, steps, kind)).sum(0) for each in shares])

    def accepted(*overrides: str) -> bool:
        try:
            load("gpt-tiny", ["optimizer.optimizer=muon", UNSHARDED, *overrides])
        except UserError:
            return False
        return True

    chosen = f"optimizer.muon_coefficient_type={kind}"
    values = singular_values(MUON_STEPS[kind])
    assert accepted(chosen) == bool(values.min() > 0.6 and values.max() < 1.3), values
    assert accepted(chosen) or values.min() < -0.5, "uphill"
    assert accepted(chosen, f"optimizer.muon_num_ns_steps={length + 1}") == (kind in ("simple", "polar_express"))
    if kind == "quintic":
        assert singular_values(length + 1).max() < 0.2, "the set begins again"


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rotating
def test_a_resumed_run_goes_on_bit_for_bit_and_again(kind: str, precision: str, tmp_path: Path) -> None:
    """Twice, because a count of updates that a load leaves behind is only read by the next save."""
    chosen = recipe(kind, precision, ema_decay=0.5)
    batches = random_batches(chosen)
    straight = engine_of(chosen)
    first = engine_of(chosen)
    for number in range(3):
        steps(straight, 1, batches)
        resumed = engine_of(chosen)
        resumed.load_state(saved(first, tmp_path / str(number)))
        steps(resumed, 1, random_batches(chosen, consumed=number * chosen.train.global_batch_size))
        expected, found = state(straight), state(resumed)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{name} after {number + 1} steps"
        first = resumed


class Ones:
    """Weights to start from."""

    def read(self, _name: str, _offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return torch.ones(shape)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_from_weights_of_others(kind: str, tmp_path: Path) -> None:
    """Its first checkpoint has what the optimizer keeps, and nothing else."""
    engine = engine_of(recipe(kind))
    store = CheckpointStore(tmp_path)
    store.claim()
    folder = store.temporary_path(0, "import")
    written, versions = initial.write(engine.plan, Ones(), folder)
    info = first_checkpoint(engine.recipe, engine.plan, "megatron")
    store.publish(folder, info, versions=versions, known=written.files)
    store.release()
    entry = store.latest_valid()
    assert entry is not None
    assert set(read_index(entry).tensors) == set(state(engine))
    engine.load_state(entry)
    found = state(engine)
    kept = [value for name, value in found.items() if name.startswith(("optimizer.state.exp", "optimizer.state.mom"))]
    assert kept and not any(value.any() for value in kept)
    assert all((value == 1).all() for name, value in found.items() if not name.startswith("optimizer."))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [*KINDS, "sgd without momentum"])
def test_the_plan_knows_what_is_kept(kind: str, precision: str) -> None:
    name, *without = kind.split(" ", 1)
    engine = engine_of(recipe(name, precision, **({"sgd_momentum": 0.0} if without else {})))
    kept = sum(tensor.numel() * tensor.element_size() for tensor in engine.model_states()["optimizer"])
    assert engine.plan.memory.optimizer == kept
    parameters = engine.plan.num_parameters.total
    weights, masters = (4, 4 * parameters) if precision == "fp32" else (2, 0)
    assert engine.plan.checkpoint_bytes == kept + masters + weights * parameters


EXPERTS = {
    "num_moe_experts": 4, "moe_ffn_hidden_size": 48, "moe_layer_freq": [0, 1],
    "moe_shared_expert_intermediate_size": 80,
}  # fmt: skip


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ({}, {}),
        ({}, {"muon_split_qkv": False, "muon_tp_mode": "distributed"}),
        ({"mtp_num_layers": 2, "position_embedding_type": "rope"}, {}),
        (EXPERTS, {"muon_num_ns_steps": 3}),
    ],
)
def test_the_plan_multiplies_as_an_update_does(model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """Muon's step has that many FLOPs more than that of AdamW, from the same weights."""
    found = []
    for kind, options in (("muon", {"muon_coefficient_type": "simple", **optimizer}), ("adam", {})):
        chosen = recipe(kind, **options)
        chosen = chosen.model_copy(update={"model": chosen.model.model_copy(update=model)})
        with FlopCounterMode(display=False) as counter:
            steps(engine_of(chosen), 1)
        plan = derive(chosen, 1, ROOMY)
        expected = products(chosen, plan.shape, plan.layout, plan.device, 0)
        found.append((counter.get_total_flops(), sum(2 * m * n * k * times for m, n, k, times in expected)))
    (muons, planned), (adams, nothing) = found
    assert muons - adams == pytest.approx(planned, rel=0 if model is not EXPERTS else 2e-4)  # routers are left out
    assert planned > nothing == 0


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("layout.use_distributed_optimizer", ["optimizer.optimizer=sgd"]),
        ("layout.use_distributed_optimizer", ["optimizer.optimizer=muon"]),
        ("optimizer.optimizer",
         ["optimizer.optimizer=sgd", UNSHARDED, "layout.engine=deepspeed", "layout.zero={stage: 0}"]),
        ("model.use_mup", ["optimizer.optimizer=sgd", UNSHARDED, "model.use_mup=true", "model.mup_base_hidden_size=8"]),
        ("train.precision", ["optimizer.optimizer=muon", UNSHARDED, "train.precision=fp16"]),
        ("optimizer.optimizer", ["optimizer.optimizer=muon", UNSHARDED, "lora={rank: 4, alpha: 8}"]),
        ("optimizer.use_precision_aware_optimizer",
         ["optimizer.optimizer=sgd", UNSHARDED, "train.precision=bf16",
          "optimizer.use_precision_aware_optimizer=true"]),
        ("optimizer.muon_momentum", ["optimizer.muon_momentum=0.9"]),
        ("optimizer.sgd_momentum", ["optimizer.optimizer=muon", UNSHARDED, "optimizer.sgd_momentum=0.5"]),
        ("optimizer.sgd_momentum", ["optimizer.optimizer=sgd", UNSHARDED, "optimizer.sgd_momentum=1.0"]),
        ("optimizer.muon_tp_mode", ["optimizer.optimizer=muon", UNSHARDED, "optimizer.muon_tp_mode=blockwise"]),
        ("optimizer.muon_num_ns_steps", ["optimizer.muon_num_ns_steps=6"]),
        ("optimizer.muon_num_ns_steps",
         ["optimizer.muon_coefficient_type=polar_express", "optimizer.muon_num_ns_steps=7"]),
        ("optimizer.muon_num_ns_steps", ["optimizer.optimizer=muon", UNSHARDED, "optimizer.muon_num_ns_steps=6"]),
        ("optimizer.muon_coefficient_type",
         ["optimizer.optimizer=muon", UNSHARDED, "optimizer.muon_coefficient_type=aol"]),
        ("optimizer.optimizer", ["optimizer.optimizer=soap"]),
    ],
)  # fmt: skip
def test_what_they_do_not_go_with_is_refused(key: str, overrides: list[str]) -> None:
    with refused(key):
        load("gpt-tiny", [*ADAMW, *overrides])
