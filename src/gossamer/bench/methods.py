"""Methods by the names that papers give them: what each sets in a run's specification.

C_complete                     gradients averaged over all workers, one model (all-reduce)
D_ring, D_torus, D_…           any topology; parameters are mixed after the update (atc)
Ada, Ada(k0=10, gamma=0.02)    a lattice that thins out by the epoch, atc
local_sgd(every=8)             parameters averaged every so many steps, atc
DiLoCo(every=16, lr=0.7, momentum=0.9)   the same, and an outer Nesterov step
ring, one_peer_exponential, …  any topology; mixed while the gradient is computed (awc)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from gossamer.engine import CENTRALIZED
from gossamer.errors import UserError, nearest
from gossamer.topology import CATALOGUE
from gossamer.topology.catalogue import read_call

_ADA_SHARE = 9
"""Ada's first degree at 1008 workers is 112, at 96 about 10: a ninth of the workers."""


def fields_of(method: str, workers: int, epochs: int) -> dict[str, Any]:
    """Return what a method sets in the specification of a run.

    >>> fields_of("D_lattice(k=4)", workers=16, epochs=10)
    {'topology': 'lattice(k=4)', 'order': 'atc'}
    """
    name, positional, named = read_call(method, "a method")
    text = method.strip()
    if name not in NAMES:
        raise UserError(f"there is no method {name!r}; {nearest(name, NAMES)}")
    if name in _SPECIAL:
        build = partial(_SPECIAL[name], workers, epochs)
        try:
            return build(*positional, **named)
        except TypeError as error:
            takes = ", ".join(list(signature(build).parameters)) or "no arguments"
            raise UserError(f"{name} takes {takes}, got {text!r}: {error}") from None
    if name.startswith("D_") or name == "local_sgd":
        return {"topology": text.removeprefix("D_"), "order": "atc"}
    return {"topology": text}


def _centralized(workers: int, epochs: int, /) -> dict[str, Any]:
    return {"topology": CENTRALIZED}


def _ada(
    workers: int, epochs: int, /, k0: int | None = None, gamma: float | None = None
) -> dict[str, Any]:
    k0 = max(4, workers // _ADA_SHARE // 2 * 2) if k0 is None else k0
    if gamma is None:  # the ring in the last epoch
        gamma = math.ceil(1e4 * (k0 - 2) / max(1, epochs - 1)) / 1e4
    return {"topology": f"ada(k0={k0}, gamma={gamma})", "order": "atc"}


def _diloco(
    workers: int, epochs: int, /, every: int = 16, lr: float = 0.7, momentum: float = 0.9
) -> dict[str, Any]:
    return {
        "topology": f"local_sgd(every={every})",
        "order": "atc",
        "outer_lr": lr,
        "outer_momentum": momentum,
    }


_SPECIAL: dict[str, Callable[..., dict[str, Any]]] = {
    "C_complete": _centralized,
    "Ada": _ada,
    "DiLoCo": _diloco,
}
NAMES = [*_SPECIAL, *(f"D_{name}" for name in CATALOGUE), *CATALOGUE]
