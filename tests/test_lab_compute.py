from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gossamer.lab.compute import EmulatedModel, Pace, SleepLayer


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What happens in order: the seconds of each sleep, which are not slept, and other words."""
    seen: list[object] = []
    monkeypatch.setattr(time, "sleep", seen.append)
    return seen


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


def test_the_passes_take_the_time_asked_for(events: list[object]) -> None:
    """Forward and backward pass sleep for their own times, and the optimizer's is not emulated."""
    model = EmulatedModel(num_params=100, num_layers=4, forward_s=0.05, backward_s=0.1)
    loss = model(torch.randn(1, model.width)).sum()
    assert events == pytest.approx([0.0125] * 4)
    events.clear()
    loss.backward()
    assert events == pytest.approx([0.025] * 4)


def test_a_layer_sleeps_indeed() -> None:
    """On a busy machine a sleep may take longer, never shorter."""
    layer = SleepLayer(0.02, 0.0, Pace(0.0, seed=0))
    start = time.perf_counter()
    layer(torch.ones(1))
    assert time.perf_counter() - start >= 0.02


def test_gradients_become_ready_through_the_backward_pass(events: list[object]) -> None:
    """The last layer's gradient is there one share into the pass, the first's at its end."""
    model = EmulatedModel(num_params=100, num_layers=4, forward_s=0.0, backward_s=0.1)

    def note(place: int) -> Callable[[torch.Tensor], None]:
        return lambda _: events.append(f"gradient {place}")

    linear = [layer for layer in model.layers if isinstance(layer, nn.Linear)]
    for place, layer in enumerate(linear):
        layer.weight.register_post_accumulate_grad_hook(note(place))
    loss = model(torch.randn(1, model.width)).sum()
    events.clear()
    loss.backward()
    assert events == [part for place in (3, 2, 1, 0) for part in (0.025, f"gradient {place}")]
