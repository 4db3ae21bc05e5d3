"""The one way to run a specification, whichever engine it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gossamer.engine import distributed, simulated
from gossamer.engine.spec import RunSpec
from gossamer.records import Record

ENGINES: dict[str, Callable[[RunSpec], Iterator[Record]]] = {
    "simulated": simulated.run,
    "distributed": distributed.run,
}


def run(spec: RunSpec) -> Iterator[Record]:
    """Train as specified; yield records while it goes on."""
    return ENGINES[spec.engine](spec)
