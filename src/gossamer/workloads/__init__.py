"""What is trained: a model, its data, a loss, a metric and a recipe; nothing about distribution."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from gossamer.errors import UserError
from gossamer.workloads import bytes_of_text, digits, quadratic
from gossamer.workloads.sharding import Draw, draw_batches, parse_sharding
from gossamer.workloads.workload import Data, Recipe, Samples, Workload

__all__ = [
    "WORKLOADS",
    "Data",
    "Draw",
    "Recipe",
    "Samples",
    "Workload",
    "draw_batches",
    "find",
    "parse_sharding",
]

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "quadratic": quadratic.quadratic,
    "digits-mlp": digits.mlp,
    "digits-cnn": digits.cnn,
    "stdlib-gpt": bytes_of_text.stdlib_gpt,
}


def find(name: str) -> Workload:
    """Return a workload by its name."""
    if name not in WORKLOADS:
        near = difflib.get_close_matches(name, WORKLOADS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(WORKLOADS)}"
        raise UserError(f"a workload must be one that exists, got {name!r}; {hint}")
    return WORKLOADS[name]()
