"""Running statistics of normalization layers: which buffers they are, and what happens to them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from gossamer.errors import UserError, nearest


class StatisticsPolicy(NamedTuple):
    """What happens to running statistics besides their use."""

    averaged: bool
    """In the average model."""

    mixed: bool
    """At every step, as parameters are."""


POLICIES: dict[str, StatisticsPolicy] = {
    "average": StatisticsPolicy(averaged=True, mixed=False),
    "local": StatisticsPolicy(averaged=False, mixed=False),
    "mix": StatisticsPolicy(averaged=True, mixed=True),
}


def policy_of(buffers: str) -> StatisticsPolicy:
    """Return the policy of a name."""
    if buffers not in POLICIES:
        raise UserError(
            f"buffers must be one of {', '.join(POLICIES)}, got {buffers!r}; "
            f"{nearest(buffers, POLICIES)}"
        )
    return POLICIES[buffers]


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of normalization layers by name, without counters."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, _NormBase)}
    return {
        f"{layer}.{name}".lstrip("."): buffer
        for layer, module in layers.items()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    }
