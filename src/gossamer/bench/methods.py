"""Methods by their names in papers: the fields that each sets in a run's specification.

C_complete                     gradients averaged over all workers, one model (all-reduce)
D_ring, D_torus, D_…           any topology; parameters are mixed after the update (atc)
Ada, Ada(k0=10, gamma=0.02)    a lattice whose degree decreases by the epoch, atc
local_sgd(every=8)             parameters averaged over all workers every 8 steps, atc
DiLoCo(every=16, lr=0.7, momentum=0.9)   the same, and an outer Nesterov step
ring, one_peer_exponential, …  any topology; exchanged while the gradient is computed (awc)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer.engine import CENTRALIZED
from gossamer.registry import Registry, absolute
from gossamer.topology.catalogue import TOPOLOGY_REGISTRY

_ADA_SHARE = 9
"""Ada's first degree at 1008 workers is 112, at 96 about 10: a ninth of the workers."""

_UNDER_ATC = "D_"


def fields_of(method: str, workers: int, epochs: int, folder: Path | None = None) -> dict[str, Any]:
    """Return the fields that a method sets in the specification of a run.

    Args:
        method: its name, with arguments where it takes any.
        workers: of the run.
        epochs: of the run.
        folder: that paths of plug-ins are relative to; by default the current one.

    >>> fields_of("D_lattice(k=4)", workers=16, epochs=10)
    {'topology': 'lattice(k=4)', 'algorithm': 'atc'}
    """
    text = method.strip()
    under_atc = text.startswith(_UNDER_ATC)
    named = absolute(text.removeprefix(_UNDER_ATC), folder or Path.cwd())
    call = METHOD_REGISTRY.read(named)
    if not under_atc and METHOD_REGISTRY.has(call.name):
        return METHOD_REGISTRY.bind(call).make(workers, epochs)
    if TOPOLOGY_REGISTRY.has(call.name):
        return {"topology": named, "algorithm": "atc"} if under_atc else {"topology": named}
    topologies = TOPOLOGY_REGISTRY.names
    names = [*METHOD_REGISTRY.names, *(_UNDER_ATC + name for name in topologies), *topologies]
    raise METHOD_REGISTRY.unknown(text.partition("(")[0], names)


def _centralized(workers: int, epochs: int, /) -> dict[str, Any]:
    return {"topology": CENTRALIZED}


def _ada(
    workers: int, epochs: int, /, k0: int | None = None, gamma: int | float | None = None
) -> dict[str, Any]:
    k0 = max(4, workers // _ADA_SHARE // 2 * 2) if k0 is None else k0
    if gamma is None:  # such that the last epoch has the ring
        gamma = math.ceil(1e4 * (k0 - 2) / max(1, epochs - 1)) / 1e4
    return {"topology": f"ada(k0={k0}, gamma={gamma})", "algorithm": "atc"}


def _local_sgd(workers: int, epochs: int, /, every: int = 8) -> dict[str, Any]:
    return {"topology": "complete", "algorithm": "atc", "every": every}


def _diloco(
    workers: int, epochs: int, /, every: int = 16, lr: float = 0.7, momentum: float = 0.9
) -> dict[str, Any]:
    local = _local_sgd(workers, epochs, every)
    return {**local, "outer_lr": lr, "outer_momentum": momentum}


# A new method is one function and one row here.
METHODS: dict[str, Callable[..., dict[str, Any]]] = {
    "C_complete": _centralized,
    "Ada": _ada,
    "local_sgd": _local_sgd,
    "DiLoCo": _diloco,
}

METHOD_REGISTRY: Registry[dict[str, Any]] = Registry(
    kind="method",
    table=METHODS,
    group="gossamer.methods",
    example="C_complete, D_ring or Ada(k0=10)",
    makes=(dict,),
    given=2,
    remedy=f"return fields of a run; before a topology of yours write {_UNDER_ATC}",
)
"""Functions of the numbers of workers and of epochs that return fields of a ``RunSpec``."""
