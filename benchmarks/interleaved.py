"""Interleaved timing of several tasks, so that a disturbance affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def median_ms(tasks: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each task; the first turn is warm-up."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats + 1):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            times[name].append(time.perf_counter() - start)
    return {name: round(1e3 * statistics.median(t[1:]), 2) for name, t in times.items()}


def mlp_step(parameters: int, batch: int) -> Callable[[], object]:
    """Return a training step of an MLP with so many parameters."""
    width = round((parameters / 3) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    return _step_of(model, torch.randn(batch, width))


def transformer_step(parameters: int) -> Callable[[], object]:
    """Return a training step of a transformer with so many parameters, on 8 x 64 tokens."""
    layers = max(1, parameters // (12 * 384**2))
    layer = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True)
    return _step_of(nn.TransformerEncoder(layer, layers), torch.randn(8, 64, 384))


def _step_of(model: nn.Module, inputs: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step
