"""Collective operations: every rank must start them, in the same order.

They have connections or tags of their own: a collective that one rank starts alone must not be
mistaken for a message of a round.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import TypeVar, final

import torch
from torch import Tensor

from gossamer.gossip.all_gather import AllGather
from gossamer.gossip.connections import Connections
from gossamer.gossip.notices import name_ranks
from gossamer.gossip.telemetry import Telemetry

_T = TypeVar("_T")


@final
class Collectives:
    """Runs collective operations on behalf of one rank.

    Args:
        connections: the connections to all ranks.
        telemetry: counts the bytes of averages, and the time that this rank waits.
    """

    def __init__(self, connections: Connections, telemetry: Telemetry) -> None:
        self._connections = connections
        self._detector = connections.detector
        self._telemetry = telemetry
        self._group = connections.open(connections.everyone, "collectives")
        self._rows = AllGather(connections) if connections.on_cpu else None
        self._num_gathers = 0

    @property
    def rank(self) -> int:
        """The index of this rank."""
        return self._connections.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._connections.size

    def average(self, tensor: Tensor) -> Tensor:
        """Return the mean over all ranks; of 16-bit numbers, in 32 bits.

        All ranks must have reached this call, as checked by ``assemble``.
        """
        wide = tensor.float() if tensor.element_size() == 2 else tensor
        mean = wide / self.size
        self._telemetry.count_all_reduce(self.size, mean.nbytes)
        self._wait_in(self._begin_sum(mean, "an average"))
        return mean

    def assemble(self, call: str, num_steps: int) -> None:
        """Block until all ranks have reached this call; raise if their step counts differ."""
        steps = self.begin_gather(num_steps, call)()
        if others := self._ranks_that_differ(steps):
            raise self._detector.difference(
                others,
                f"all ranks must have called optimizer.step() as often in {call}, got {steps} "
                f"steps on ranks 0 to {self.size - 1}; where ranks have fewer batches than others, "
                "use join()",
            )

    def begin_gather(self, value: int, call: str) -> Callable[[], list[int]]:
        """Start to gather an integer from every rank; return the function that waits for them.

        Args:
            value: this rank's integer.
            call: the purpose; it is an error if another rank gathers for another one.
        """
        # The count tells two gathers of the same name apart: a rank that skipped one would
        # otherwise take the next for it, and ranks would be one call apart from then on. A digest
        # of 7 bytes fits into an int64.
        self._num_gathers += 1
        digest = hashlib.blake2b(f"{self._num_gathers} {call}".encode(), digest_size=7).digest()
        pair = torch.tensor([int.from_bytes(digest), value], device=self._connections.device)
        collect_pairs = self.begin_gather_rows(pair, f"all ranks to come to {call}")

        def collect() -> list[int]:
            pairs = collect_pairs()
            if others := self._ranks_that_differ(pairs[:, 0].tolist()):
                raise self._detector.difference(
                    others,
                    f"all ranks must make the same calls in the same order, but rank {self.rank} "
                    f"is in {call}, and {self._detector.calls_of(others)}",
                )
            return pairs[:, 1].tolist()

        return collect

    def begin_gather_rows(self, row: Tensor, what: str) -> Callable[[], Tensor]:
        """Start to gather a vector from every rank; return the function that waits for them.

        Args:
            row: this rank's vector, [m]; of the same size on all ranks.
            what: what the vectors are, for error messages.
        """
        self._detector.raise_failure()
        if self._rows is not None:
            gathered = self._rows.begin(row, what)
            return lambda: self._wait_in(gathered)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        wait = self._connections.begin(
            lambda: self._group.allgather([rows], [row]), what, self._others
        )

        def collect() -> Tensor:
            self._wait_in(wait)
            return torch.stack(rows)

        return collect

    def begin_comparison(self, digest: str) -> Callable[[], None]:
        """Start to compare rounds across ranks; return the function that raises if they differ.

        Args:
            digest: the digest of a round, or of all rounds of a step.
        """
        collect = self.begin_gather(int(digest[:15], 16), "the comparison of rounds")

        def compare() -> None:
            if others := self._ranks_that_differ(collect()):
                raise self._detector.difference(
                    others,
                    f"all ranks must mix with the same round, but {name_ranks(others)} had another "
                    f"one than rank {self.rank}; they must depend on the step and on what all "
                    "ranks know",
                )

        return compare

    def begin_all_gather(self, bucket: Tensor) -> Callable[[], None]:
        """Start to all-gather the slices of a bucket; return the function that waits for them.

        Args:
            bucket: one slice per rank, of the same length; this rank's is filled in.
        """
        self._detector.raise_failure()
        as_bytes = bucket.view(torch.uint8)  # Gloo does not support every dtype
        own = as_bytes.chunk(self.size)[self.rank]
        gather = self._group._allgather_base  # pyright: ignore[reportPrivateUsage]
        wait = self._connections.begin(
            lambda: gather(as_bytes, own), "the slices of a bucket", self._others
        )
        return lambda: self._wait_in(wait)

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrite the tensor with rank 0's."""
        received = tensor.detach().clone(memory_format=torch.contiguous_format)
        as_bytes = received.view(-1).view(torch.uint8)  # Gloo does not support every dtype
        wait = self._connections.begin(
            lambda: self._group.broadcast([as_bytes]), "what rank 0 broadcasts", self._others
        )
        with self._detector.blocked():
            wait()
        tensor.detach().copy_(received)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until no gather is in flight; return whether that is so before the timeout."""
        return self._rows is None or self._rows.wait_idle(seconds)

    def close(self) -> None:
        """Release the connections; nothing may be in flight."""
        if self._rows is not None:
            self._rows.close()
        del self._group

    @property
    def _others(self) -> tuple[int, ...]:
        return self._connections.others_in(self._connections.everyone)

    def _begin_sum(self, tensor: Tensor, what: str) -> Callable[[], None]:
        everyone = self._connections.everyone
        return self._connections.begin_sum(self._group, everyone, tensor, what)

    def _wait_in(self, wait: Callable[[], _T]) -> _T:
        """Wait for a collective, and count the time."""
        began = time.perf_counter()
        with self._detector.blocked():
            result = wait()
        self._telemetry.collective_s += time.perf_counter() - began
        return result

    def _ranks_that_differ(self, digests: list[int]) -> list[int]:
        return [rank for rank, digest in enumerate(digests) if digest != digests[self.rank]]
