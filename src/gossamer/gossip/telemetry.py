"""Counters of bytes, messages and seconds of a gossip, and their totals, ``Stats``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Protocol, final

from gossamer.topology.cost import ring_bytes, ring_messages


class ScalarWriter(Protocol):
    """A writer of scalars, such as ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Record one scalar."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Totals of one rank since ``decentralize``.

    Times are measured on the host: on a device, queued work may finish later.
    """

    num_steps: int
    bytes_sent: int
    messages_sent: int
    exposed_s: float
    """Time that training was blocked by an exchange."""

    in_flight_s: float
    """Time between the start of exchanges and the end of the wait for them."""

    collective_s: float
    """Time that training was blocked by collectives: GradScaler, join(), a control, averages."""

    left_out: Mapping[int, int] = field(default_factory=dict[int, int])
    """By rank, in how many of this rank's rounds it was left out because its parameters were not
    finite: this rank itself, or one that it would have mixed with."""

    mean_moved: int = 0
    """Number of rounds that moved the mean of the ranks that mixed: weights are not symmetric, and
    a rank was left out, or its message to this one was not decoded."""

    undecoded: Mapping[int, int] = field(default_factory=dict[int, int])
    """By rank, how many of its buckets this rank did not mix with, because one of the two could not
    decode the other's: numbers differed by more than the range of the wire format."""

    failures: int = 0
    """How often training continued without workers that were lost."""

    joins: int = 0
    """How often training continued with workers that joined, one or several at a time."""

    recovery_s: float = 0.0
    """Time from the detection of a loss or join until this rank was connected to the members of the
    next epoch."""

    @property
    def exposed_per_step_s(self) -> float:
        """Mean time that a step was blocked by its exchange."""
        return self.exposed_s / max(self.num_steps, 1)

    @property
    def overlap(self) -> float:
        """1 − exposed/in flight: the share of the time in flight in which this rank computed."""
        return 1 - self.exposed_s / self.in_flight_s if self.in_flight_s else 1.0

    def write_to(self, writer: ScalarWriter) -> None:
        """Write all totals to a TensorBoard writer, under ``gossip/``."""
        scalars = {
            **asdict(self),
            "left_out": sum(self.left_out.values()),
            "undecoded": sum(self.undecoded.values()),
            "exposed_per_step_s": self.exposed_per_step_s,
            "overlap": self.overlap,
        }
        for name, value in scalars.items():
            writer.add_scalar(f"gossip/{name}", value, self.num_steps)


@final
@dataclass(slots=True)
class Telemetry:
    """Mutable counters of one rank."""

    bytes_sent: int = 0
    messages_sent: int = 0
    exposed_s: float = 0.0
    in_flight_s: float = 0.0
    collective_s: float = 0.0
    left_out: Counter[int] = field(default_factory=Counter[int])
    mean_moved: int = 0
    undecoded: Counter[int] = field(default_factory=Counter[int])
    failures: int = 0
    joins: int = 0
    recovery_s: float = 0.0

    def count(self, messages: int, num_bytes: int) -> None:
        """Count messages that were sent."""
        self.messages_sent += messages
        self.bytes_sent += num_bytes

    def count_all_reduce(self, size: int, num_bytes: int) -> None:
        """Count a ring all-reduce. Gathered integers and sketches are not counted."""
        self.count(ring_messages(size), ring_bytes(size, num_bytes))

    def stats(self, num_steps: int) -> Stats:
        """Return the totals after this many steps."""
        return Stats(
            num_steps=num_steps,
            bytes_sent=self.bytes_sent,
            messages_sent=self.messages_sent,
            exposed_s=self.exposed_s,
            in_flight_s=self.in_flight_s,
            collective_s=self.collective_s,
            left_out=dict(self.left_out),
            mean_moved=self.mean_moved,
            undecoded=dict(self.undecoded),
            failures=self.failures,
            joins=self.joins,
            recovery_s=self.recovery_s,
        )
