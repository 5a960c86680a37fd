"""Finding the first number that is not finite."""

from __future__ import annotations

import math

import torch

from llmrecipes.errors import ExitCode
from llmrecipes.faults.numerics import NonFinite, first_bad_parameter, named_gradients
from tests.refusals import require_refusal


def model_with_gradients() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model(torch.randn(5, 3)).square().mean().backward()
    return model


def gradient(model: torch.nn.Module, name: str) -> torch.Tensor:
    found = model.get_parameter(name).grad
    assert found is not None
    return found


def test_a_poisoned_gradient_is_named_with_step_and_rank() -> None:
    model = model_with_gradients()
    assert first_bad_parameter(named_gradients(model)) is None
    gradient(model, "1.weight")[0, 1] = math.nan
    gradient(model, "1.weight")[1, 1] = math.inf
    bad = first_bad_parameter(named_gradients(model))
    error = NonFinite(step=17, rank=3, quantity="gradient norm", value=math.nan, first_bad=bad)
    require_refusal(error, "step 17, rank 3", rule=("1.weight.grad", "2 of 8"), code=ExitCode.STOP)
    assert error.what.startswith(f"{error.quantity} is {error.value}")


def test_parameters_come_before_gradients() -> None:
    model = model_with_gradients()
    gradient(model, "1.bias").fill_(math.inf)
    bad = first_bad_parameter(named_gradients(model))
    assert bad is not None
    assert (bad.name, bad.kind, bad.count) == ("1.bias.grad", "inf", 2)
    model.state_dict()["1.bias"][0] = math.nan
    bad = first_bad_parameter(named_gradients(model))
    assert bad is not None
    assert (bad.name, bad.kind, bad.count) == ("1.bias", "nan", 1)


def test_megatron_gradients_in_main_grad_are_seen() -> None:
    model = torch.nn.Linear(2, 2)
    setattr(model.weight, "main_grad", torch.full((2, 2), math.inf))  # noqa: B010
    bad = first_bad_parameter(named_gradients(model))
    assert bad is not None
    assert bad.name == "weight.grad"


def test_a_bad_loss_without_a_bad_tensor_says_so() -> None:
    error = NonFinite(step=1, rank=0, quantity="loss", value=math.inf, first_bad=None)
    require_refusal(error, "step 1, rank 0", code=ExitCode.STOP)
