"""Chunks of workers: how many are computed together under vmap, or one at a time in a loop.

vmap is faster if a worker's own work is small, and impossible if a model uses operations that vmap
does not support; so both exist. The choice depends on the number of workers and on the memory that
the forward pass of a few workers saves, never on a timing: the methods differ in the last bits, and
a run must be reproducible to the bit. The thresholds were measured; ``python -m benchmarks.chunks``
prints how far they are from the best choice.

The chunk size follows from the memory of one worker's activations: in small chunks kernel launches
cost more than arithmetic, in large ones activations leave the cache. Chunks also bound the memory
of a step.
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
"""Activations of a chunk, which should stay in the last-level cache. Of 8 to 128 MB, 24 is within
4 % of the best for convnets, LSTMs and transformers of 64 and 256 workers."""

_FEWEST = 4
"""The smallest chunk under vmap: two workers take longer than in the loop, three as long."""

_LAYER_BYTES = 150 << 10
"""Saved bytes per layer and worker above which arithmetic outweighs the call: the loop is then as
fast or faster, because torch's kernels for one worker are better than its batched ones."""

_PROBED = 4
"""Workers of the first vmap, which probes whether vmap works and how much memory it takes."""

_LOOP = 0
"""Sentinel chunk size: one worker after the other, without vmap."""


@final
class ChunkedGradients:
    """Computes every worker's gradient, in chunks.

    Args:
        gradients: computes one chunk.
        num_workers: the number of workers.
        method: ``"vmap"``, ``"loop"``, or ``"auto"`` for the one that is expected to be faster.
        budget: memory for the activations of a chunk.
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
        """Chunk size, or _LOOP; None until the first step has probed it."""
        self._worker_bytes = 1.0
        """Bytes of one worker's activations; measured in the first step."""

    def compute(self, step: int, workers: AllWorkers) -> Iterator[ChunkGradients]:
        """Yield losses and gradients of all workers, chunk by chunk, every worker once.

        Args:
            step: seeds, with the seed and the worker, the random numbers of forward passes.
            workers: parameters, buffers and batches of all workers.
        """
        start = 0
        if self._chosen is None:
            start, self._chosen = yield from self._probe(step, workers)
        yield from self._chunks(step, workers, range(start, self._num_workers), self._chosen)

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements of the first step, so that a resumed run uses the same chunks.

        A new measurement would be the same, unless the memory or the version of the rule differs:
        other chunks would change the last bits.
        """
        return {"chunk": self._chosen, "worker_bytes": self._worker_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load measurements, within the method and the memory budget given here."""
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
                yield self._gradients.single(step, workers.chunk(worker))
            return
        for start in part[::size]:
            index = slice(start, min(start + size, part.stop))
            yield self._gradients.vmapped(step, workers.chunk(index))

    def _probe(
        self, step: int, workers: AllWorkers
    ) -> Generator[ChunkGradients, None, tuple[int, int]]:
        """Try a few workers under vmap; return how many are done, and the chunk size."""
        done, layer_bytes = 0, 0.0
        for stop in (1, _PROBED):  # one worker first, in case there is no memory for more
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

        None if vmap does not support the model: then they have been computed in the loop.
        """
        chunk = workers.chunk(slice(part.start, part.stop))
        # A forward pass may update running statistics before it raises. The loop starts over, and
        # would update them twice.
        before = {name: buffer.clone() for name, buffer in chunk.buffers.items()}
        try:
            with saved_bytes(chunk.tensors) as saved:
                done = self._gradients.vmapped(step, chunk)
        except Exception as error:  # vmap may raise anything on an unsupported model
            refused = (
                f"workers run one after the other, because {self._gradients.layer_of(error)} does "
                f"what torch.vmap does not support: {str(error)[:200] or type(error).__name__}"
            )
        else:
            yield done
            return saved.values()
        for name, buffer in chunk.buffers.items():
            buffer.copy_(before[name])
        yield from self._chunks(step, workers, part, _LOOP)  # raises if the model itself fails
        warnings.warn(refused, stacklevel=6)
        return None

    def _rule(self, layer_bytes: float) -> int:
        """Return the chunk size, from the memory that workers save for backward.

        Args:
            layer_bytes: mean bytes that a layer saves for one worker.
        """
        good, most = self._budget
        if self._worker_bytes > most:
            warnings.warn(
                f"activations of one worker take about {self._worker_bytes / 1e6:.3g} MB, more "
                f"than the {most / 1e6:.3g} MB that are available; workers run one at a time "
                "and exceed the budget: use smaller batches or more memory_gb",
                stacklevel=6,
            )
        # The memory at hand must not decide between vmap and loop: two machines with the same
        # inputs may differ in chunk sizes, not in the method.
        size = self._equal(min(_CHUNK_BYTES, good))
        if self._method == "auto" and (size < _FEWEST or layer_bytes > _LAYER_BYTES):
            return _LOOP
        capped = min(size, self._equal(most))
        if capped < size and self._worker_bytes <= most:
            warnings.warn(
                f"there is memory for the activations of {capped} workers at a time, where "
                f"{size} would be faster; the last bits of a run may depend on that: to reproduce "
                "them, give the same memory_gb",
                stacklevel=6,
            )
        return capped

    def _equal(self, num_bytes: float) -> int:
        """Return the chunk size whose activations fit in ``num_bytes``, in equal chunks."""
        return math.ceil(self._num_workers / math.ceil(self._num_workers / self._most(num_bytes)))

    def _most(self, num_bytes: float) -> int:
        """Return how many workers' activations fit in ``num_bytes``, at least one."""
        return max(1, int(min(self._num_workers, num_bytes / self._worker_bytes)))
