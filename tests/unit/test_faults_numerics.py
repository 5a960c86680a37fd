"""The first number that is not finite, and the alarm of a loss that explodes, on losses of real runs."""

from __future__ import annotations

import math
import random

import torch

from llmrecipes.errors import ExitCode
from llmrecipes.faults.numerics import LossWatch, NonFinite, first_bad_parameter, named_gradients
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


# gpt-tiny before its search, the first 60 steps.
HEALTHY = [
    8.376, 8.39, 8.285, 8.205, 8.121, 8.038, 7.936, 7.971, 7.906, 7.809, 7.76, 7.774, 7.58, 7.543, 7.391, 7.46, 7.198,
    7.214, 7.123, 7.012, 6.894, 6.808, 6.771, 6.664, 6.48, 6.767, 6.59, 6.528, 6.553, 6.467, 6.352, 6.559, 6.4, 6.459,
    6.417, 6.334, 6.41, 6.294, 6.379, 6.378, 6.055, 6.095, 5.925, 6.257, 6.186, 5.975, 5.929, 6.042, 5.992, 6.124,
    6.399, 6.017, 5.937, 5.901, 5.81, 5.889, 6.062, 5.824, 5.828, 5.764,
]  # fmt: skip
# The same with optimizer.lr=1: it explodes while the rate is warmed up, and never comes back.
EXPLODING = [8.376, 8.39, 7.883, 10.165, 14.064, 18.132, 21.05, 19.102, 20.777, 15.468, 12.341, 13.37, 14.129, 57.164]


def alarms(losses: list[float]) -> list[int]:
    """Steps with an alarm, from 1."""
    watch = LossWatch()
    return [step for step, loss in enumerate(losses, 1) if watch.add(loss) is not None]


def test_a_healthy_run_raises_none_wherever_it_is_resumed() -> None:
    assert all(alarms(HEALTHY[start:]) == [] for start in range(len(HEALTHY)))


def test_an_explosion_is_one_alarm_though_it_lasts() -> None:
    assert alarms(EXPLODING) == [5]
    assert alarms([8.376, 110.491, 514.2, 433.1, 298.0]) == [2]  # without warm-up
    assert alarms(HEALTHY + EXPLODING) == [60 + 1]


def test_a_second_spike_after_recovery_is_a_second_alarm() -> None:
    watch = LossWatch()
    for loss in HEALTHY:
        watch.add(loss)
    spike = watch.add(9.0)
    assert spike is not None
    assert spike.loss == 9.0
    assert 5.7 < spike.usual < 6.5 < spike.limit < 9.0
    assert [watch.add(loss) is None for loss in (9.5, 8.0, 5.8, 9.0)] == [True, True, True, False]


def test_a_slow_rise_is_seen_and_the_noise_of_single_sequences_is_not() -> None:
    rising = HEALTHY + [HEALTHY[-1] + 0.02 * step for step in range(400)]
    assert len(alarms(rising)) == 1
    draw = random.Random(0)
    assert alarms([5.5 + draw.gauss(0, 0.45) for _ in range(20_000)]) == []  # as measured with a batch of 64 tokens
