"""Running statistics of normalization layers: their buffers, and whether these are mixed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from gossamer.errors import UserError, nearest


class StatisticsRule(NamedTuple):
    """How running statistics are shared between workers."""

    averaged: bool
    """Whether the average model has their average."""

    mixed: bool
    """Whether they are mixed at every step, like parameters."""


RULES: dict[str, StatisticsRule] = {
    "average": StatisticsRule(averaged=True, mixed=False),
    "local": StatisticsRule(averaged=False, mixed=False),
    "mix": StatisticsRule(averaged=True, mixed=True),
}


def rule_of(buffers: str) -> StatisticsRule:
    """Return the rule with a name."""
    if buffers not in RULES:
        raise UserError(
            f"buffers must be one of {', '.join(RULES)}, got {buffers!r}; {nearest(buffers, RULES)}"
        )
    return RULES[buffers]


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of normalization layers by name, without counters."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, _NormBase)}
    return {
        f"{layer}.{name}".lstrip("."): buffer
        for layer, module in layers.items()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    }
