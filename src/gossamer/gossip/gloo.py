"""Process groups over Gloo that connect only ranks that exchange messages.

torch's own constructor connects every rank of a group with every other: at a thousand ranks three
groups would be three thousand sockets per process, for a graph in which a worker has a few
neighbours. Two kinds of group avoid that. A *lane* has two ranks and is connected when it is
created. A group for collectives connects lazily: Gloo reduces along a ring and broadcasts along a
tree, so each rank connects to two others and to log2(n).

Note [Lazy connections]
On a lazy group, a send to or receive from a peer that ended before they were connected may block
for half a minute, whatever the timeout (pytorch/gloo#520). So messages never use a lazy group, and
a collective is run on it as soon as it is created, which does time out.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, final

from torch.distributed import ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

_gloo: Any = ProcessGroupGloo  # torch has neither public names nor types for options and devices

_LONGEST_CONNECTING = timedelta(minutes=1)
"""How long two ranks may take to connect once both are ready: one that dies in between reports
nothing. Later waits for messages have their own timeout."""


@final
class Gloo:
    """Creates the groups of one rank.

    Args:
        timeout: how long a group waits for its ranks, and for each piece of work.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._lane_devices: dict[str, list[Any]] = {}

    def group(self, store: Store, rank: int, size: int) -> ProcessGroupGloo:
        """Return a group for collectives; see Note [Lazy connections]."""
        # On a device of its own: lazy groups on one device would accept each other's connections.
        return self._make(store, rank, size, _make_devices(lazy=True), self._timeout, threads=2)

    def lane(
        self, store: Store, rank: int, direction: str, patience: timedelta
    ) -> ProcessGroupGloo:
        """Return a group of ranks 0 and 1 for messages; blocks until both are connected.

        Args:
            store: where they exchange addresses.
            rank: 0 or 1.
            direction: lanes of one direction share a device, that is a listening socket and the
                thread that serves it; the two directions run in parallel.
            patience: how long the other rank, which is known to be ready, may take.
        """
        if direction not in self._lane_devices:
            self._lane_devices[direction] = _make_devices(lazy=False)
        # Threads are for collectives; messages are served by the device's own thread.
        timeout = min(patience, _LONGEST_CONNECTING)
        return self._make(store, rank, 2, self._lane_devices[direction], timeout, threads=0)

    def close(self) -> None:
        """Release sockets and threads; they close when the last lane is released."""
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
        # Set explicitly either way: TORCH_GLOO_LAZY_INIT would make lanes lazy.
        return _on_interfaces(lazy_init=lazy)
    except TypeError:  # a torch without lazy connections: then all ranks connect at once
        return _on_interfaces()


def _on_interfaces(**options: bool) -> list[Any]:
    """Return a device for each network interface that torch would use."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not interfaces:
        return [_gloo.create_default_device(**options)]
    return [_gloo.create_device(interface=name, **options) for name in interfaces]
