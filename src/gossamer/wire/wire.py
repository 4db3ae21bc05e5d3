"""What a wire format is: what of a bucket travels, and how what arrives is mixed.

Where a message is not the bucket itself, workers mix by differences with what they sent,

    x_i + Σ_j w_ij (Q(x_j) − Q(x_i))

where Q(x_i) is exactly what others take for x_i. What rounding adds to one worker it then takes
from another, so that the mean stays where weights are doubly stochastic. Rounding is to the
nearest, without random numbers, and every operation is elementwise: both engines call the same code
on the same numbers, so they agree to the bit.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms import Algorithm
from gossamer.topology import Round, Schedule

BLOCK = 1 << 17
"""Numbers that are worked on at a time: a few tensors of as many stay in cache, and calls of torch
cost little beside them (`python -m benchmarks.wire`: with a quarter of it 1.6 times as long)."""

CODED_BUCKET_MB = 4.0
"""Where a bucket is full by default that is written, sent and read: small enough that one is
written while another travels, and a third is read."""


class Fate(enum.Enum):
    """What became of a message."""

    TAKEN = "taken"
    MARKED = "marked"
    """It says that its sender is left out."""

    UNDECODED = "undecoded"
    """What it stands for could not be told; nothing of it was taken."""

    ONE_SIDED = "one-sided"
    """The sender cannot decode what the receiver sent; nothing was taken, as nothing is there."""


class Arrival(NamedTuple):
    """A message that arrived, as far as the next one depends on it."""

    fate: Fate
    seen: float = 0.0
    """The largest difference between the sender's numbers and the receiver's."""

    range: float = 0.0
    """The sender's; where its message could not be decoded, what was too narrow for that."""


class Range(NamedTuple):
    """How far apart workers' numbers are taken to be."""

    width: float = 0.0
    failures: int = 0
    """Exchanges in a row that widened it, less those after them that shrank it again."""


class Codec(ABC):
    """Writes and reads messages of buckets of one dtype; its scratch is for one thread at a time.

    A range is how far apart workers' numbers may be, as far as the sender knows; a codec that needs
    none ignores it. It is zero as long as nothing has moved.
    """

    has_range: ClassVar[bool] = False
    """Whether messages depend on it."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.work = torch.float64 if dtype == torch.float64 else torch.float32
        """The dtype that differences are summed in."""
        self.device = device

    @abstractmethod
    def new_message(self, numel: int) -> Tensor:
        """Return memory for what is sent of a bucket."""

    @abstractmethod
    def encode(self, x: Tensor, range: float, message: Tensor) -> float:
        """Write what is sent of a bucket; return its largest number, where ranges depend on it."""

    @abstractmethod
    def mark(self, message: Tensor) -> None:
        """Write what says that the sender is left out."""

    @abstractmethod
    def take(
        self,
        message: Tensor,
        own: Tensor,
        x: Tensor,
        weight: float,
        into: Tensor,
        *,
        first: bool,
        mutual: bool = False,
    ) -> Arrival:
        """Add w (Q(x_j) − Q(x_i)), unless the message cannot be taken.

        Args:
            message: what j sent.
            own: what i sent, of x.
            x: the bucket of i, as it was sent.
            weight: that i gives to j.
            into: the sum, in the dtype ``work``.
            first: whether the sum is nothing yet, whatever is in its memory.
            mutual: whether j gets what i sent. Both take the other's message then, or neither does.
        """

    @abstractmethod
    def add_own(self, own: Tensor, factor: float, into: Tensor, *, first: bool) -> None:
        """Add a multiple of Q(x_i), where weights do not sum to one."""

    def first_range(self, x: Tensor, start: Tensor) -> float:
        """Return the range of a worker that has seen nothing of others yet.

        Args:
            x: its numbers.
            start: what all workers started from.
        """
        return 0.0

    def next_range(self, range: Range, largest: float, arrivals: Sequence[Arrival]) -> Range:
        """Return the range after an exchange.

        Args:
            range: that of the worker's own message.
            largest: the largest number in it.
            arrivals: what came of others.
        """
        return range


class Wire(ABC):
    """A format in which buckets travel; instances hold settings, and nothing that changes."""

    name: ClassVar[str]
    """What errors and tables call it."""

    write_passes: ClassVar[float] = 0.0
    """What writing a message takes, in passes of a mean over the bucket (`python -m
    benchmarks.wire`)."""

    read_passes: ClassVar[float] = 0.0
    """What reading that of one neighbour takes, besides mixing."""

    bucket_mb: ClassVar[float] = 25.0
    """Where a bucket is full by default, in megabytes."""

    on_cpu_only: ClassVar[bool] = False
    """Whether it works on main memory alone."""

    def __repr__(self) -> str:
        # Ranks compare it, and errors say it: a format with arguments adds them.
        return self.name

    def check(
        self, algorithm: Algorithm, schedule: Schedule, *, rounds_are_chosen: bool = False
    ) -> None:
        """Refuse what cannot travel in it.

        Args:
            algorithm: what it exchanges.
            schedule: the rounds, without local steps between them.
            rounds_are_chosen: whether a control may take others, an average of all among them.
        """
        return

    def check_round(self, round: Round, where: str) -> None:
        """Refuse a round that cannot be run in it."""
        return

    @abstractmethod
    def num_bytes(self, numel: int, itemsize: int) -> int:
        """Return the bytes of a bucket's message.

        Args:
            numel: how many numbers.
            itemsize: bytes of each in memory.
        """

    @abstractmethod
    def codec(self, dtype: torch.dtype, device: torch.device) -> Codec | None:
        """Return what writes and reads messages; None where a message is the bucket itself.

        Args:
            dtype: of buckets.
            device: where they are.
        """
