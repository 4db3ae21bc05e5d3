"""Methods by the names that papers give them: what each sets in a run's specification.

C_complete                     gradients averaged over all workers, one model (all-reduce)
D_ring, D_torus, D_…           any topology; parameters are mixed after the update (atc)
Ada, Ada(k0=10, gamma=0.02)    a lattice that thins out by the epoch, atc
local_sgd(every=8)             parameters averaged every so many steps, atc
DiLoCo(every=16, lr=0.7, momentum=0.9)   the same, and an outer Nesterov step
ring, one_peer_exponential, …  any topology; mixed while the gradient is computed (awc)
"""

from __future__ import annotations

from typing import Any

from gossamer.bench.strict import nearest
from gossamer.engine import CENTRALIZED
from gossamer.errors import UserError
from gossamer.topology import CATALOGUE
from gossamer.topology.catalogue import read_call

_OTHER_NAMES = ("C_complete", "Ada", "DiLoCo")
NAMES = [*_OTHER_NAMES, *(f"D_{name}" for name in CATALOGUE), *CATALOGUE]

_ADA_SHARE = 9
"""Ada's first degree at 1008 workers is 112, at 96 about 10: a ninth of the workers."""


def fields_of(method: str, workers: int, epochs: int) -> dict[str, Any]:
    """Return what a method sets in the specification of a run.

    >>> fields_of("D_lattice(k=4)", workers=16, epochs=10)
    {'topology': 'lattice(k=4)', 'order': 'atc'}
    """
    name, positional, named = read_call(method, "a method")
    if name not in NAMES:
        raise UserError(f"there is no method {name!r}; {nearest(name, NAMES)}")
    if name == "C_complete":
        return {"topology": CENTRALIZED}
    if name == "DiLoCo":
        return _diloco(*positional, **named)
    if name == "Ada":
        return {"topology": _ada(method, workers, epochs), "order": "atc"}
    if name.startswith("D_") or name == "local_sgd":
        return {"topology": method.strip().removeprefix("D_"), "order": "atc"}
    return {"topology": method.strip()}


def _ada(method: str, workers: int, epochs: int) -> str:
    if "(" in method:
        return f"ada{method.strip().removeprefix('Ada')}"
    k0 = max(4, workers // _ADA_SHARE // 2 * 2)
    return f"ada(k0={k0}, gamma={(k0 - 2) / epochs:.4g})"  # the ring in the last epoch


def _diloco(every: int = 16, lr: float = 0.7, momentum: float = 0.9) -> dict[str, Any]:
    return {
        "topology": f"local_sgd(every={every})",
        "order": "atc",
        "outer_lr": lr,
        "outer_momentum": momentum,
    }
