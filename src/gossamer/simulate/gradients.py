"""Losses of many workers, some at a time: together under vmap, or one after the other.

Together is faster where a worker's own work is small, and impossible where a model does what vmap
refuses; so both are there, and a few timed steps choose. How many go together follows from the
memory that one worker's activations take: chunks whose activations fit in the last cache are
faster than larger ones, and they bound the memory that a step needs.
"""

from __future__ import annotations

import hashlib
import logging
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import UserError
from gossamer.simulate.kernels import StackedKernels

_log = logging.getLogger(__name__)

Tensors: TypeAlias = Mapping[str, Tensor]
Loss: TypeAlias = Callable[[Any, Any], Tensor]

_CHUNK_BYTES = 32 << 20
"""Activations of the workers that go together: what a last-level cache holds."""

_PROBED = 4
"""Workers that the first vmap runs on, to see whether it works and what memory it takes."""

_TIMED_STEPS = 3
_TIMED_IN_LOOP = 8


class Evaluate(Protocol):
    """Losses of one worker, or of a chunk of them: a leading dimension on everything."""

    def __call__(self, parameters: Tensors, buffers: Tensors, inputs: Any, targets: Any) -> Tensor:
        """Run the model and the loss."""
        ...


Backward: TypeAlias = Callable[[int | slice, Evaluate], None]
"""Computes and stores losses and gradients of the workers that an index (int or slice) selects."""


def worker_seed(seed: int, worker: int, step: int) -> int:
    """Return the seed of what a worker draws in a step's forward pass (dropout masks).

    A real run draws the same with ``torch.manual_seed(worker_seed(seed, rank, step))`` before its
    forward pass.
    """
    digest = hashlib.blake2b(f"{seed}/{worker}/{step}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


@final
class PerWorker:
    """Runs a backward pass for every worker, in chunks.

    Args:
        model: one worker's; its parameters and buffers are replaced by those that are passed in.
        loss: loss(output, target), a scalar.
        num_workers: how many there are.
        seed: of what forward passes draw.
        method: ``"vmap"``, ``"loop"``, or ``"auto"`` to time both and keep the faster.
        one_model: whether all workers have the same parameters, without a leading dimension.
        chunk_bytes: most memory for the activations of workers that go together.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        num_workers: int,
        seed: int,
        method: str,
        one_model: bool = False,
        chunk_bytes: float = _CHUNK_BYTES,
    ) -> None:
        if method not in _METHODS:
            raise UserError(f"gradients must be one of {', '.join(_METHODS)}, got {method!r}")
        self._model = model
        self._loss = loss
        self._num_workers = num_workers
        self._seed = seed
        self._method = method
        self._chunk_bytes = min(chunk_bytes, _CHUNK_BYTES)
        self._in_dims = (None if one_model else 0, 0, 0, 0)
        self._chunk = 0
        """Workers that go together; 0 until the first step has found out."""
        self._in_loop = 0 if method == "vmap" else num_workers if method == "loop" else None
        """How many workers run in the loop: all, none, or None while both are timed."""
        self._times: list[tuple[float, float]] = []

    def run(self, step: int, buffers: Tensors, backward: Backward) -> None:
        """Call ``backward`` for all workers.

        Args:
            step: which decides, with the seed, what is drawn.
            buffers: stacked; restored where a first attempt under vmap has changed them in vain.
            backward: gets the index of one worker or of a chunk, and what evaluates it.
        """
        start = 0
        if self._chunk == 0 and self._in_loop != self._num_workers:
            start = self._probe(step, buffers, backward)
        if self._in_loop is None:
            self._time(step, start, backward)
        else:
            self._run_loop(step, range(start, self._in_loop), backward)
            self._run_vmap(step, max(start, self._in_loop), backward)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been found out, so that a continued run computes in the same way."""
        return {"chunk": self._chunk, "in_loop": self._in_loop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what has been found out."""
        self._chunk, self._in_loop = state["chunk"], state["in_loop"]

    def _probe(self, step: int, buffers: Tensors, backward: Backward) -> int:
        """Try a few workers under vmap, set the size of chunks; return how many have been done."""
        index = slice(0, min(_PROBED, self._num_workers))
        before = {name: buffer[index].clone() for name, buffer in buffers.items()}
        try:
            with _counted() as saved:
                self._together(step, index, backward)
        except Exception as error:  # whatever vmap and a model may raise at each other
            for name, buffer in buffers.items():
                buffer[index] = before[name]
            self._run_loop(step, range(index.stop), backward)  # raises what is not vmap's doing
            self._in_loop = self._num_workers
            warnings.warn(
                f"workers run one after the other, because {self._where(error)} does what "
                f"torch.vmap refuses: {str(error)[:200] or type(error).__name__}",
                stacklevel=5,
            )
            return index.stop
        per_worker = sum(saved.values()) / index.stop
        self._chunk = max(1, min(self._num_workers, int(self._chunk_bytes / max(per_worker, 1))))
        _log.debug("%d bytes of activations per worker, chunks of %d", per_worker, self._chunk)
        return index.stop

    def _time(self, step: int, start: int, backward: Backward) -> None:
        """Run some workers in the loop, the others under vmap, and remember which was faster."""
        left = self._num_workers - start
        num_loop = min(_TIMED_IN_LOOP, left // 2)
        num_vmap = left - num_loop
        begin = time.perf_counter()
        self._run_loop(step, range(start, start + num_loop), backward)
        middle = time.perf_counter()
        self._run_vmap(step, start + num_loop, backward)
        end = time.perf_counter()
        if num_loop == 0:  # one worker: nothing to put together
            self._in_loop = self._num_workers if self._num_workers == 1 else None
        elif start == 0:  # the step that probes also warms up
            self._times.append(((middle - begin) / num_loop, (end - middle) / num_vmap))
        if len(self._times) == _TIMED_STEPS:
            in_loop, under_vmap = (min(times) for times in zip(*self._times, strict=True))
            self._in_loop = self._num_workers if in_loop < under_vmap else 0
            _log.debug("%.2g s per worker in a loop, %.2g under vmap", in_loop, under_vmap)

    def _run_loop(self, step: int, workers: range, backward: Backward) -> None:
        if not workers:
            return
        generator = torch.default_generator
        before = generator.get_state()
        try:
            for worker in workers:
                generator.manual_seed(worker_seed(self._seed, worker, step))
                backward(worker, self._evaluate)
        finally:
            generator.set_state(before)

    def _run_vmap(self, step: int, start: int, backward: Backward) -> None:
        for first in range(start, self._num_workers, self._chunk or 1):
            self._together(
                step, slice(first, min(first + self._chunk, self._num_workers)), backward
            )

    def _together(self, step: int, index: slice, backward: Backward) -> None:
        workers = range(index.start, index.stop)

        def generators() -> list[torch.Generator]:
            seeds = (worker_seed(self._seed, worker, step) for worker in workers)
            return [torch.Generator().manual_seed(seed) for seed in seeds]

        def evaluate(parameters: Tensors, buffers: Tensors, inputs: Any, targets: Any) -> Tensor:
            with StackedKernels(generators):
                vectorized = torch.vmap(self._evaluate, in_dims=self._in_dims)
                return vectorized(parameters, buffers, inputs, targets)

        backward(index, evaluate)

    def _evaluate(self, parameters: Tensors, buffers: Tensors, inputs: Any, targets: Any) -> Tensor:
        args, kwargs = (), {}
        if isinstance(inputs, dict):
            kwargs = inputs
        else:
            args = inputs if isinstance(inputs, tuple) else (inputs,)
        output = functional_call(self._model, {**parameters, **buffers}, args, kwargs)
        loss = self._loss(output, targets)
        if loss.dim():
            raise UserError(
                f"loss(output, target) must return a scalar, the mean over a worker's batch, got "
                f"shape {tuple(loss.shape)}; call .mean() on it"
            )
        return loss

    def _where(self, error: BaseException) -> str:
        """Name the innermost layer that an exception came through."""
        names = {id(module): name for name, module in self._model.named_modules()}
        found = "the loss"
        trace = error.__traceback__
        while trace is not None:
            module = trace.tb_frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in names:
                found = f"layer {names[id(module)] or 'model'!r} ({type(module).__name__})"
            trace = trace.tb_next
        return found


_METHODS = ("auto", "vmap", "loop")


@contextmanager
def _counted() -> Generator[dict[int, int]]:
    """Collect the memory that forward passes keep for their backward pass: bytes by address."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield saved
