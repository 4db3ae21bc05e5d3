"""Process groups over Gloo that connect no more ranks than will talk to each other.

torch's own constructor connects every rank of a group with every other: at a thousand ranks three
groups would be three thousand sockets per process, for a graph in which a worker has a few
neighbours. Two kinds of group avoid that. A *lane* has two ranks and is connected when it is made.
A group for collectives connects lazily: Gloo reduces along a ring and broadcasts along a tree, so
each rank meets two others and their logarithm.

Note [Lazy connections]
A lazy group may keep a rank for half a minute, whatever its timeout, when it sends to or receives
from a peer that ended before they were connected (pytorch/gloo#520). Messages therefore never go
over a lazy group, and whoever makes one runs a collective on it at once, which does time out.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, final

from torch.distributed import ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

_gloo: Any = ProcessGroupGloo  # torch has neither public names nor types for options and devices

_LONGEST_CONNECTING = timedelta(minutes=1)
"""For two ranks of which each knows that the other is there: one that dies now says nothing. What
waits for a message later brings its own timeout."""


@final
class Gloo:
    """Makes the groups of one rank.

    Args:
        timeout: how long a group waits for its ranks, and for each piece of work.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._lane_devices: dict[str, list[Any]] = {}

    def group(self, store: Store, rank: int, size: int) -> ProcessGroupGloo:
        """Return a group for collectives; see Note [Lazy connections]."""
        # On a device of its own: lazy groups that shared one would take each other's connections.
        return self._make(store, rank, size, _make_devices(lazy=True), self._timeout, threads=2)

    def lane(
        self, store: Store, rank: int, direction: str, patience: timedelta
    ) -> ProcessGroupGloo:
        """Return a group of ranks 0 and 1 for messages; waits for the other one.

        Args:
            store: where they find each other.
            rank: 0 or 1.
            direction: lanes of one direction share a device, which is a listening socket and the
                thread that serves them; those of two go side by side.
            patience: how long the other one may take, which is known to be there.
        """
        if direction not in self._lane_devices:
            self._lane_devices[direction] = _make_devices(lazy=False)
        # Threads are for collectives; a device serves messages by itself.
        timeout = min(patience, _LONGEST_CONNECTING)
        return self._make(store, rank, 2, self._lane_devices[direction], timeout, threads=0)

    def close(self) -> None:
        """Let go of sockets and threads, as soon as no lane uses them."""
        self._lane_devices.clear()

    def _make(
        self,
        store: Store,
        rank: int,
        size: int,
        devices: list[Any],
        timeout: timedelta,
        *,
        threads: int,
    ) -> ProcessGroupGloo:
        options = _gloo._Options()
        options._devices = devices
        options._threads = threads * len(devices)
        options._timeout = timeout
        return ProcessGroupGloo(store, rank, size, options)


def _make_devices(*, lazy: bool) -> list[Any]:
    try:
        # Said either way: TORCH_GLOO_LAZY_INIT would make lanes lazy.
        return _on_interfaces(lazy_init=lazy)
    except TypeError:  # a torch that cannot connect lazily: then all connect at once
        return _on_interfaces()


def _on_interfaces(**options: bool) -> list[Any]:
    """Return a device for each of the interfaces that torch would use."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not interfaces:
        return [_gloo.create_default_device(**options)]
    return [_gloo.create_device(interface=name, **options) for name in interfaces]
