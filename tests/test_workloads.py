"""Workloads: their parts fit, and they train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gossamer import workloads
from gossamer.errors import UserError
from gossamer.workloads import Data, Workload
from gossamer.workloads.bytes_of_text import windows
from gossamer.workloads.evaluation import accuracy

EMBEDDED = ("quadratic", "digits-mlp", "digits-cnn", "stdlib-gpt")


def batch(workload: Workload, data: Data, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.arange(num)
    inputs = workload.transform(data.train_inputs[chosen], None)
    return (inputs.float() if inputs.is_floating_point() else inputs), data.train_targets[chosen]


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_embedded_workload_has_parts_that_fit(name: str) -> None:
    """Data are as many as it says, its model takes them, its metric gets better by training."""
    torch.manual_seed(0)
    workload = workloads.find(name)
    data = workload.load()
    assert len(data.train_inputs) == len(data.train_targets) == workload.num_train
    assert len(data.test_inputs) == len(data.test_targets)
    model = workload.make_model()
    before = workload.evaluate(model.eval(), data)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs, targets = batch(workload, data, 64)
    model.train()
    for _ in range(5):
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
    after = workload.evaluate(model.eval(), data)
    assert (after > before) == workload.higher_is_better


def test_the_quadratic_has_its_optimum_at_the_mean_point() -> None:
    """There the gradient over all points vanishes, and the metric is f(x) − f* everywhere."""
    workload = workloads.find("quadratic")
    data = workload.load()
    model = workload.make_model().double()
    points, labels = batch(workload, data, workload.num_train)
    points = points.double()
    at_zero = workload.loss(model(points), labels)
    metric = workload.evaluate(model, data)
    with torch.no_grad():
        next(model.parameters()).copy_(points.mean(0))
    best = workload.loss(model(points), labels)
    best.backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    assert float(gradient.norm()) < 1e-12
    assert metric == pytest.approx((at_zero - best).item(), rel=1e-6)
    assert workload.evaluate(model, data) < 1e-12


def test_windows_follow_each_other_and_targets_are_one_ahead() -> None:
    """A sequence of 10 tokens makes 3 windows of 3: the last token is only ever a target."""
    inputs, targets = windows(torch.arange(10), 3)
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert torch.equal(targets, inputs + 1)


def test_accuracy_counts_all_test_samples_in_parts() -> None:
    """The share of right answers does not depend on how many go through the model at once."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(23, 5), torch.randint(5, (23,))
    data = Data(inputs, targets, inputs, targets)
    model = nn.Linear(5, 5)
    whole = float((model(inputs).argmax(1) == targets).double().mean())
    assert accuracy(batch_size=4)(model, data) == pytest.approx(whole)


def test_an_unknown_workload_suggests_the_nearest() -> None:
    """The error of a misspelt name suggests the nearest name."""
    with pytest.raises(UserError, match=r"workload 'digit-mlp' .did you mean 'digits-mlp'"):
        workloads.find("digit-mlp")
