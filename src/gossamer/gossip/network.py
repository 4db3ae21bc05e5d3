"""All that connects one rank to the others, opened and ended together."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import final

import torch
from torch.distributed import ProcessGroup

from gossamer.gossip.collectives import Collectives
from gossamer.gossip.connections import Connections
from gossamer.gossip.failures import FailureDetector
from gossamer.gossip.telemetry import Telemetry
from gossamer.gossip.transport import Transport
from gossamer.topology import Round

_SHUTDOWN_S = 10.0
"""How long an interpreter may take to shut down."""


@final
class Network:
    """The exchanges and collectives of one rank.

    Args:
        process_group: the ranks that take part; nothing is sent on it.
        detector: who explains what fails.
        device: where the tensors live.
        rounds: rounds whose groups get process groups of their own; see ``Transport``.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        detector: FailureDetector,
        device: torch.device,
        *,
        rounds: Iterable[Round] = (),
    ) -> None:
        self.rank, self.size = process_group.rank(), process_group.size()
        self.detector = detector
        self.telemetry = Telemetry()
        self._connections = Connections(process_group, detector, device)
        self.collectives = Collectives(self._connections, self.telemetry)
        self.transport = Transport(self._connections, self.telemetry, rounds=rounds)

    def close(self) -> None:
        """Leave all groups, when gathers in flight have ended; no exchange may be."""
        # A thread of ours that waits in Gloo must not be woken when the interpreter is gone.
        self.collectives.wait_idle(self.detector.timeout.total_seconds())
        self.transport.close()
        self.collectives.close()
        self._connections.close()

    def abandon(self, seconds: float) -> None:
        """Let the process end, or go on without this network, though peers have failed it.

        A thread that waits in Gloo would abort the process if it were woken while the interpreter
        shuts down: by its timeout, a peer's end, or that of its own group. So it gets time to be
        woken before, and all connections stay until the process is gone.
        """
        left = self.detector.seconds_left
        deadline = time.monotonic() + (left + 1 if left < seconds + _SHUTDOWN_S else seconds)
        for waiting in (self.transport, self.collectives):
            waiting.wait_idle(deadline - time.monotonic())
        self._connections.keep_until_exit()
