"""All that connects one rank to the others, opened and ended together."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import final

import torch
from torch.distributed import ProcessGroup

from gossamer.gossip.collectives import Collectives
from gossamer.gossip.connections import Connections
from gossamer.gossip.failures import ExchangeError, FailureDetector
from gossamer.gossip.telemetry import Telemetry
from gossamer.gossip.transport import Transport
from gossamer.topology import Round, Schedule

_SHUTDOWN_S = 10.0
"""How long an interpreter may take to shut down."""

MOST_ROUNDS_CONNECTED = 64
"""Of a schedule with a period: more would cost too many sockets. All ranks compare as many, for
ranks with different ones would wait for each other."""


def rounds_to_connect(schedule: Schedule) -> Iterable[Round]:
    """Return the rounds whose groups are worth a process group each.

    Schedules with a longer period average in groups by messages.
    """
    period = schedule.period or 0
    return map(schedule.round, range(period)) if period <= MOST_ROUNDS_CONNECTED else ()


@final
class Network:
    """The exchanges and collectives of one rank.

    Args:
        process_group: the ranks that take part; nothing is sent on it.
        detector: who explains what fails.
        device: where the tensors live.
        rounds: rounds whose groups get process groups of their own; see ``Transport``.
        telemetry: what to count in, where there was a network before this one.
        opening: how long ranks may take to connect, where that is less than the timeout.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        detector: FailureDetector,
        device: torch.device,
        *,
        rounds: Iterable[Round] = (),
        telemetry: Telemetry | None = None,
        opening: timedelta | None = None,
    ) -> None:
        self.rank, self.size = process_group.rank(), process_group.size()
        self.detector = detector
        self.telemetry = telemetry or Telemetry()
        self._connections = Connections(process_group, detector, device, opening=opening)
        try:
            self.collectives = Collectives(self._connections, self.telemetry)
            self.transport = Transport(self._connections, self.telemetry, rounds=rounds)
        except ExchangeError:
            if opening is not None:  # others are to see at once that this rank does not wait on
                self._connections.drop()
            raise
        self._connections.allow_computation()

    def close(self) -> None:
        """Leave all groups, when gathers in flight have ended; no exchange may be."""
        # A thread of ours that waits in Gloo must not be woken when the interpreter is gone.
        self.collectives.wait_idle(self.detector.timeout.total_seconds())
        self.transport.close()
        self.collectives.close()
        self._connections.close()

    def drop(self) -> None:
        """Let go of everything, whatever is in flight, so that peers see connections close."""
        self.transport.close()
        self.collectives.close()
        self._connections.drop()

    def wait_dropped(self, seconds: float) -> bool:
        """Return whether nothing waits on what was dropped any more, within a time."""
        deadline = time.monotonic() + seconds
        idle = [
            waiting.wait_idle(max(deadline - time.monotonic(), 0.0))
            for waiting in (self.transport, self.collectives)
        ]
        return self._connections.wait_dropped(deadline - time.monotonic()) and all(idle)

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
