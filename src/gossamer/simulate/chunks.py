"""How many workers go together, or whether they go one after the other.

Together is faster where a worker's own work is small, and impossible where a model does what vmap
refuses; so both are there. Which it is follows from the number of workers and from the memory that
the forward pass of a few workers keeps, and from nothing that is timed: methods differ in the last
bits, and a run must come to the same bits again. The thresholds were found by measurement;
``python -m benchmarks.chunks`` prints what they cost against the best of the others.

How many go together follows from the memory that one worker's activations take: too few and calls
cost more than arithmetic, too many and activations leave the cache. Chunks also bound the memory
that a step needs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Generator, Iterator
from typing import Any, final

from gossamer.errors import UserError
from gossamer.memory import keep_freed_memory
from gossamer.simulate.budget import MemoryBudget, saved_bytes
from gossamer.simulate.gradients import ChunkGradients, WorkerGradients
from gossamer.simulate.workers import AllWorkers

_METHODS = ("auto", "vmap", "loop")

_CHUNK_BYTES = 24 << 20
"""Activations of the workers that go together: they stay in a last-level cache. Of 8 to 128 MB, 24
is within 4 % of the best for convnets, LSTMs and transformers of 64 and 256 workers."""

_FEWEST = 4
"""Workers that go together: two take longer than in the loop, three take as long."""

_LAYER_BYTES = 150 << 10
"""What a layer keeps of one worker, from which on its arithmetic outweighs the call: the loop is as
fast then, or faster, because torch's kernels for one worker are better than those for many."""

_PROBED = 4
"""Workers that the first vmap runs on, to see whether it works and what memory it takes."""

_LOOP = 0
"""In place of the size of a chunk: one worker after the other, without vmap."""


@final
class ChunkedGradients:
    """Computes every worker's gradient, in chunks.

    Args:
        gradients: computes one chunk.
        num_workers: how many there are.
        method: ``"vmap"``, ``"loop"``, or ``"auto"`` for what should be the faster of them.
        budget: memory for the activations of workers that go together.
    """

    def __init__(
        self, gradients: WorkerGradients, num_workers: int, method: str, budget: MemoryBudget
    ) -> None:
        if method not in _METHODS:
            raise UserError(f"gradients must be one of {', '.join(_METHODS)}, got {method!r}")
        keep_freed_memory()
        self._gradients = gradients
        self._num_workers = num_workers
        self._budget = budget
        self._method = method
        self._chosen: int | None = _LOOP if method == "loop" else None
        """Workers that go together, or _LOOP; None until it is known."""
        self._worker_bytes = 1.0
        """Activations of one worker; the first step finds them."""

    def compute(self, step: int, workers: AllWorkers) -> Iterator[ChunkGradients]:
        """Yield losses and gradients of all workers, chunk by chunk, every worker once.

        Args:
            step: which decides, with the seed, what is drawn.
            workers: what to compute at.
        """
        start = 0
        if self._chosen is None:
            start, self._chosen = yield from self._probe(step, workers)
        yield from self._chunks(step, workers, range(start, self._num_workers), self._chosen)

    def state_dict(self) -> dict[str, Any]:
        """Return what the first step has found out, so that a continued run computes as this one.

        It would find out the same; but one that has more memory, or another version of the rule,
        would not.
        """
        return {"chunk": self._chosen, "worker_bytes": self._worker_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what has been found out, within the method and the memory given here."""
        chunk = state["chunk"]
        if chunk is None or self._method == ("vmap" if chunk == _LOOP else "loop"):
            return
        self._worker_bytes = state["worker_bytes"]
        self._chosen = min(chunk, self._most(self._budget.most))

    def _chunks(
        self, step: int, workers: AllWorkers, part: range, size: int
    ) -> Iterator[ChunkGradients]:
        if size == _LOOP:
            for worker in part:
                yield self._gradients.alone(step, workers.chunk(worker))
            return
        for start in part[::size]:
            index = slice(start, min(start + size, part.stop))
            yield self._gradients.together(step, workers.chunk(index))

    def _probe(
        self, step: int, workers: AllWorkers
    ) -> Generator[ChunkGradients, None, tuple[int, int]]:
        """Try a few workers under vmap; return how many have been done, and the size of chunks."""
        done, layer_bytes = 0, 0.0
        for stop in (1, _PROBED):  # one alone first, in case that there is no memory for more
            part = range(done, min(stop, self._num_workers))
            if not part or (done and len(part) * self._worker_bytes > min(self._budget)):
                break
            kept = yield from self._try_together(step, workers, part)
            done = part.stop
            if kept is None:
                return done, _LOOP
            self._worker_bytes = max(1.0, sum(kept) / len(part))
            layer_bytes = self._worker_bytes / max(1, len(kept))
        return done, self._rule(layer_bytes)

    def _try_together(
        self, step: int, workers: AllWorkers, part: range
    ) -> Generator[ChunkGradients, None, Collection[int] | None]:
        """Compute workers under vmap and return the bytes of each tensor that they kept.

        None where vmap refuses the model: they have been computed in the loop.
        """
        chunk = workers.chunk(slice(part.start, part.stop))
        before = {name: buffer.clone() for name, buffer in chunk.buffers.items()}
        try:
            with saved_bytes(chunk.tensors) as saved:
                done = self._gradients.together(step, chunk)
        except Exception as error:  # whatever vmap and a model may raise at each other
            refused = (
                f"workers run one after the other, because {self._gradients.layer_of(error)} does "
                f"what torch.vmap refuses: {str(error)[:200] or type(error).__name__}"
            )
        else:
            yield done
            return saved.values()
        for name, buffer in chunk.buffers.items():
            buffer.copy_(before[name])
        yield from self._chunks(step, workers, part, _LOOP)  # raises what is not vmap's doing
        warnings.warn(refused, stacklevel=6)
        return None

    def _rule(self, layer_bytes: float) -> int:
        """Return how many workers go together, by what they keep.

        Args:
            layer_bytes: what a layer keeps of one worker, on average.
        """
        good, most = self._budget
        if self._worker_bytes > most:
            warnings.warn(
                f"activations of one worker take about {self._worker_bytes / 1e6:.3g} MB, more "
                f"than the {most / 1e6:.3g} MB that there are for them; workers go one "
                "at a time and take it all the same: use smaller batches or more memory_gb",
                stacklevel=6,
            )
        # Memory has no say in the method, so that machines differ in the size of chunks at most.
        size = self._equal(min(_CHUNK_BYTES, good))
        if self._method == "auto" and (size < _FEWEST or layer_bytes > _LAYER_BYTES):
            return _LOOP
        capped = min(size, self._equal(most))
        if capped < size and self._worker_bytes <= most:
            warnings.warn(
                f"there is memory for the activations of {capped} workers at a time, where "
                f"{size} would be faster; the last bits of a run may depend on that: to have "
                "the same ones again, give the same memory_gb",
                stacklevel=6,
            )
        return capped

    def _equal(self, num_bytes: float) -> int:
        """Return how many workers keep no more than so much, at least one, in equal chunks."""
        return math.ceil(self._num_workers / math.ceil(self._num_workers / self._most(num_bytes)))

    def _most(self, num_bytes: float) -> int:
        """Return how many workers keep no more than so much, at least one."""
        return max(1, int(min(self._num_workers, num_bytes / self._worker_bytes)))
