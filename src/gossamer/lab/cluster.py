"""A cluster in a box: the hosts of a layout, and commands that run on all of them.

`network.py` owns the network and `processes.py` the processes; this module orders their creation
and removal, and sets the environment of workers.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Self, final

from gossamer.lab.layout import Host, Layout
from gossamer.lab.network import INTERFACE, Network, sent_bytes, set_link
from gossamer.lab.processes import HostProcesses, Launch, Sink
from gossamer.lab.verify import Measurement, measure

_MASTER_PORT = 29500
_print_lock = threading.Lock()


def print_line(host: str, line: str) -> None:
    """Print a line of a command's output, prefixed with its host.

    The output itself is unchanged, as that of a child of ``subprocess.run`` is.
    """
    with _print_lock:
        print(f"[{host}] {line}", flush=True)


@final
class Cluster:
    """Hosts with shaped links, which exist for the duration of a `with` block.

    ```python
    with Cluster(one_switch(4, "300mbit")) as cluster:
        cluster.run(["python", "train.py"])
    ```

    Args:
        layout: the hosts and the rates of their links.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._network = Network(layout)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._network.make()
        self._open.callback(self._network.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def id(self) -> str:
        """The id by which another process names this lab."""
        return self._network.id

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        sink: Sink = print_line,
    ) -> HostProcesses:
        """Start a command on every host and return at once.

        Args:
            command: the program and its arguments.
            environment: variables for it, beyond those of this process and torchrun's.
            sink: where its output goes, line by line; printed by default.
        """
        launches = [
            Launch(
                host.name,
                self._network.namespace(host.name),
                {**_worker_environment(self.layout, host), **(environment or {})},
            )
            for host in self.layout.hosts
        ]
        processes = HostProcesses(command, launches, sink)
        self._open.callback(processes.stop)
        return processes

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        sink: Sink = print_line,
        timeout_s: float = math.inf,
    ) -> None:
        """Run a command on every host and wait for it; see `HostProcesses.wait`."""
        self.start(command, environment=environment, sink=sink).wait(timeout_s)

    def cut(self, link: str) -> None:
        """Cut a link, as if its cable were pulled.

        Args:
            link: a host (`host0`), or in a layout of nodes an uplink (`node0`).
        """
        set_link(self.id, link, up=False)

    def restore(self, link: str) -> None:
        """Restore a link that was cut."""
        set_link(self.id, link, up=True)

    def sent_bytes(self) -> list[int]:
        """Return the bytes that each host has sent on its link, frame headers included."""
        return [sent_bytes(self._network.namespace(host.name)) for host in self.layout.hosts]

    def measure(self, window_s: float = 0.5) -> list[Measurement]:
        """Measure the rate from each host to the next one."""
        return measure(self._network, self.layout, window_s)


def _worker_environment(layout: Layout, host: Host) -> dict[str, str]:
    """Return the environment of a host's worker: this process's, and torchrun's variables."""
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "RANK": str(host.rank),
        "WORLD_SIZE": str(len(layout.hosts)),
        "LOCAL_RANK": str(host.local_rank),
        "LOCAL_WORLD_SIZE": str(layout.hosts_per_node),
        "GROUP_RANK": str(host.node),
        "GROUP_WORLD_SIZE": str(layout.num_nodes),
        "MASTER_ADDR": layout.hosts[0].address,
        "MASTER_PORT": str(_MASTER_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
    }
