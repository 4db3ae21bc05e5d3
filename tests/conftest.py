from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from gossamer.gossip.connections import Connections
from gossamer.gossip.transport import Transport
from tests.pool import ProcessPool

# One seed for everyone: a failure here is a failure on every machine.
settings.register_profile("gossamer", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("gossamer")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """Four processes in one Gloo group."""
    processes = ProcessPool(4, tmp_path_factory.mktemp("pool"))
    yield processes
    processes.close()


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every send, receive and wait is late by a random time, different on each rank."""

    def late(method: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(self: object, *args: Any) -> Any:
            time.sleep(random.uniform(0, 1e-3))
            return method(self, *args)

        return delayed

    for owner, name in (
        *((Transport, "_send"), (Transport, "_receive")),
        *((Connections, "begin_sum"), (Connections, "wait")),
    ):
        monkeypatch.setattr(owner, name, late(getattr(owner, name)))
