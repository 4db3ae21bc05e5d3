from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch import nn

from gossamer.lab.compute import EmulatedModel, Pace, SleepLayer

TRIES = 5
"""Of which the fastest counts: on a busy machine a sleep may take longer, never shorter."""


@pytest.mark.parametrize("variance", [0.0017, 0.0134])
def test_the_pace_has_mean_one_and_the_variance_asked_for(variance: float) -> None:
    """Over many iterations the factor's mean is 1 and its variance is what was asked for."""
    pace = Pace(variance, seed=0)
    factors: list[float] = []
    for _ in range(20_000):
        pace.advance()
        factors.append(pace.factor)
    assert statistics.fmean(factors) == pytest.approx(1.0, abs=0.003)
    assert statistics.variance(factors) == pytest.approx(variance, rel=0.05)
    assert min(factors) > 0


def test_an_even_pace_is_one() -> None:
    """Without variance every iteration takes the mean time."""
    pace = Pace(0.0, seed=0)
    pace.advance()
    assert pace.factor == 1.0


def test_a_pace_is_decided_by_its_seed() -> None:
    """The same seed gives the same pace, another seed another one."""
    paces = [Pace(0.01, seed) for seed in (0, 0, 1)]
    for pace in paces:
        pace.advance()
    assert paces[0].factor == paces[1].factor != paces[2].factor


def test_a_negative_variance_is_refused() -> None:
    """A variance below zero is an error when the pace is made."""
    with pytest.raises(ValueError, match="must not be negative"):
        Pace(-1.0, seed=0)


def test_values_and_gradients_pass_unchanged() -> None:
    """A sleeping layer changes neither what goes forward nor what comes back."""
    layer = SleepLayer(0.0, 0.0, Pace(0.0, seed=0))
    inputs = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(3, 4, dtype=torch.float64)
    output = layer(inputs)
    output.backward(gradient)
    assert torch.equal(output, inputs)
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, gradient)


def test_a_model_has_about_the_parameters_asked_for() -> None:
    """The layers together hold the number of parameters within one percent."""
    model = EmulatedModel(num_params=1_000_000, num_layers=7, forward_s=0, backward_s=0)
    count = sum(param.numel() for param in model.parameters())
    assert count == pytest.approx(1_000_000, rel=0.01)
    assert sum(isinstance(layer, SleepLayer) for layer in model.layers) == 7


def test_the_passes_take_the_time_asked_for() -> None:
    """Forward and backward pass take their own times, and the optimizer's is not emulated."""
    model = EmulatedModel(num_params=100, num_layers=4, forward_s=0.05, backward_s=0.1)
    forward: list[float] = []
    backward: list[float] = []
    for _ in range(TRIES):
        start = time.perf_counter()
        loss = model(torch.randn(1, model.width)).sum()
        middle = time.perf_counter()
        loss.backward()
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
    assert min(forward) == pytest.approx(0.05, rel=0.2)
    assert min(backward) == pytest.approx(0.1, rel=0.2)


def test_gradients_become_ready_through_the_backward_pass() -> None:
    """The last layer's gradient is there about one share into the pass, the first's at its end."""
    model = EmulatedModel(num_params=100, num_layers=4, forward_s=0.0, backward_s=0.1)
    ready: list[float] = []
    for layer in model.layers:
        if isinstance(layer, nn.Linear):
            layer.weight.register_post_accumulate_grad_hook(
                lambda _: ready.append(time.perf_counter())
            )
    tries: list[list[float]] = []
    for _ in range(TRIES):
        ready.clear()
        loss = model(torch.randn(1, model.width)).sum()
        start = time.perf_counter()
        loss.backward()
        tries.append([at - start for at in ready])
    assert min(tries, key=max) == pytest.approx([0.025, 0.05, 0.075, 0.1], abs=0.02)
