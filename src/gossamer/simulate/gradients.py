"""Losses of many workers, some at a time: together under vmap, or one after the other.

Together is faster where a worker's own work is small, and impossible where a model does what vmap
refuses; so both are there, and a few timed steps choose. How many go together follows from the
memory that one worker's activations take: too few and calls cost more than arithmetic, too many and
activations leave the cache. Chunks also bound the memory that a step needs.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._pytree import tree_leaves

from gossamer.errors import UserError
from gossamer.simulate.batches import each
from gossamer.simulate.kernels import StackedKernels, vmapped
from gossamer.simulate.memory import Room, keep_freed_memory

_log = logging.getLogger(__name__)

Tensors: TypeAlias = Mapping[str, Tensor]
Loss: TypeAlias = Callable[[Any, Any], Tensor]

_METHODS = ("auto", "vmap", "loop")

_CHUNK_BYTES = (32 << 20, 16 << 20, 64 << 20, 128 << 20)
"""Activations of the workers that go together: about a last-level cache. The first is the rule, the
others are tried where methods are timed."""

_PROBED = 4
"""Workers that the first vmap runs on, to see whether it works and what memory it takes."""

_LOOP = 0
"""In place of the size of a chunk: one worker after the other, without vmap."""

_TIMED_STEPS = 3
_TIMED_IN_LOOP = 8


class Part(NamedTuple):
    """What one worker is evaluated on, or a chunk of them: a leading dimension on everything."""

    parameters: Tensors
    """By name."""

    buffers: dict[str, Tensor]
    """By name; those that the model replaces are replaced in the dict."""

    inputs: Any
    """Of the model."""

    targets: Any
    """Of the loss."""

    into: Tensors
    """By name, memory that gradients of parameters may be written to."""


Evaluate: TypeAlias = Callable[[Part], Tensor]
"""Runs the model and the loss; returns the losses."""

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
        room: memory for the activations of workers that go together.
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
        room: Room,
    ) -> None:
        if method not in _METHODS:
            raise UserError(f"gradients must be one of {', '.join(_METHODS)}, got {method!r}")
        keep_freed_memory()
        # A copy, because functional_call puts parameters into it. What ran under vmap may stay
        # there: a cached activation, or a parameter of a module that is there twice. For the same
        # reason names of one tensor are found here, once.
        self._model = copy.deepcopy(model)
        self._names = _names(model)
        self._loss = loss
        self._num_workers = num_workers
        self._seed = seed
        self._room = room
        self._one_model = one_model
        self._method = method
        self._chosen: int | None = _LOOP if method == "loop" else None
        """Workers that go together, or _LOOP; None until it is known."""
        self._candidates: list[int] = []
        """Sizes of chunks to time; the first step finds them."""
        self._times: dict[int, list[float]] = {}
        """Seconds per worker by size of chunk."""
        self._worker_bytes = 1.0
        """Activations of one worker; the first step finds them."""

    def run(self, step: int, buffers: Tensors, backward: Backward) -> None:
        """Call ``backward`` for all workers.

        Args:
            step: which decides, with the seed, what is drawn.
            buffers: stacked; restored where a first attempt under vmap has changed them in vain.
            backward: gets the index of one worker or of a chunk, and what evaluates it.
        """
        start = 0
        if self._chosen is None and not self._candidates:
            start = self._probe(step, buffers, backward)
        if self._chosen is None:
            self._time(step, start, backward)
        else:
            self._run(step, range(start, self._num_workers), self._chosen, backward)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been found out so far, so that a continued run computes in the same way.

        While methods are timed that is nothing: a continued run times them anew, and computes some
        workers by other methods than this one.
        """
        return {"chunk": self._chosen, "worker_bytes": self._worker_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what has been found out, within the method and the memory given here."""
        chunk = state["chunk"]
        if chunk is None or self._method == ("vmap" if chunk == _LOOP else "loop"):
            return
        self._worker_bytes = state["worker_bytes"]
        self._chosen = min(chunk, max(1, int(self._room.most / self._worker_bytes)))

    def _probe(self, step: int, buffers: Tensors, backward: Backward) -> int:
        """Try a few workers under vmap, set the size of chunks; return how many have been done."""
        done = 0
        for stop in (1, _PROBED):  # one alone first, in case that there is no room for more
            index = slice(done, min(stop, self._num_workers))
            num = index.stop - done
            if num == 0 or (done and num * self._worker_bytes > self._room.good):
                break
            saved_bytes = self._try_together(step, index, buffers, backward)
            done = index.stop
            if self._chosen == _LOOP:
                return done
            self._worker_bytes = max(1.0, saved_bytes / num)
        if self._worker_bytes > self._room.most:
            warnings.warn(
                f"activations of one worker take about {self._worker_bytes / 1e6:.3g} MB, more "
                f"than the {self._room.most / 1e6:.3g} MB that there are for them; workers go one "
                "at a time and take it all the same: use smaller batches or more memory_gb",
                stacklevel=5,
            )
        sizes = [
            max(1, int(min(size, self._room.good) / self._worker_bytes)) for size in _CHUNK_BYTES
        ]
        nums = [math.ceil(self._num_workers / size) for size in sizes]
        self._candidates = list(dict.fromkeys(math.ceil(self._num_workers / num) for num in nums))
        if self._method == "vmap" or self._num_workers == 1:
            self._chosen = self._candidates[0]
        return done

    def _try_together(self, step: int, index: slice, buffers: Tensors, backward: Backward) -> float:
        """Run workers under vmap and return the bytes they kept, or in the loop from now on."""
        before = {name: buffer[index].clone() for name, buffer in buffers.items()}
        saved: dict[int, int] = {}

        def counted(index: int | slice, evaluate: Evaluate) -> None:
            backward(index, partial(_count, evaluate, saved))

        try:
            self._together(step, index, counted)
            return sum(saved.values())
        except Exception as error:  # whatever vmap and a model may raise at each other
            for name, buffer in buffers.items():
                buffer[index] = before[name]
            # Raises what is not vmap's doing.
            self._run(step, range(index.start, index.stop), _LOOP, backward)
            self._chosen = _LOOP
            warnings.warn(
                f"workers run one after the other, because {self._where(error)} does what "
                f"torch.vmap refuses: {str(error)[:200] or type(error).__name__}",
                stacklevel=6,
            )
            return 0.0

    def _time(self, step: int, start: int, backward: Backward) -> None:
        """Time some workers in the loop and the others in chunks of one size; choose at the end."""
        chunk = min(self._candidates, key=lambda size: len(self._times.get(size, ())))
        left = self._num_workers - start
        num_loop = min(_TIMED_IN_LOOP, left // 4 or left // 2)  # a few stand for all
        parts = {
            _LOOP: range(start, start + num_loop),
            chunk: range(start + num_loop, self._num_workers),
        }
        for size, workers in parts.items():
            begin = time.perf_counter()
            self._run(step, workers, size, backward)
            if start == 0:  # the step that probes also warms up
                seconds = (time.perf_counter() - begin) / len(workers)
                self._times.setdefault(size, []).append(seconds)
        if all(len(self._times.get(size, ())) == _TIMED_STEPS for size in self._candidates):
            fastest = {size: min(times) for size, times in self._times.items()}
            self._chosen = min(fastest, key=fastest.__getitem__)
            _log.debug("seconds per worker by size of chunk, %d the loop: %s", _LOOP, fastest)

    def _run(self, step: int, workers: range, chunk: int, backward: Backward) -> None:
        if chunk == _LOOP:
            self._one_by_one(step, workers, backward)
            return
        for start in workers[::chunk]:
            self._together(step, slice(start, min(start + chunk, workers.stop)), backward)

    def _one_by_one(self, step: int, workers: range, backward: Backward) -> None:
        generator = torch.default_generator
        before = generator.get_state()

        def evaluate(part: Part) -> Tensor:
            loss, replaced = self._evaluate(*part[:4])
            part.buffers.update(replaced)
            return loss

        try:
            for worker in workers:
                generator.manual_seed(worker_seed(self._seed, worker, step))
                backward(worker, evaluate)
        finally:
            generator.set_state(before)

    def _together(self, step: int, index: slice, backward: Backward) -> None:
        workers = range(index.start, index.stop)

        def generators() -> list[torch.Generator]:
            seeds = (worker_seed(self._seed, worker, step) for worker in workers)
            return [torch.Generator().manual_seed(seed) for seed in seeds]

        def evaluate(part: Part) -> Tensor:
            into = [(part.parameters[name], grad) for name, grad in part.into.items()]
            with StackedKernels(generators, into), vmapped(len(workers)) as (own, stacked):
                parameters = part.parameters
                if not self._one_model:
                    parameters = {name: own(p) for name, p in parameters.items()}
                buffers = {name: own(buffer) for name, buffer in part.buffers.items()}
                x, y = each(own, part.inputs), each(own, part.targets)
                loss, replaced = self._evaluate(parameters, buffers, x, y)
                part.buffers.update({name: stacked(new) for name, new in replaced.items()})
                return stacked(loss)

        backward(index, evaluate)

    def _evaluate(
        self, parameters: Tensors, buffers: Tensors, inputs: Any, targets: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a worker's loss, and the buffers that its forward pass has replaced."""
        args, kwargs = (), {}
        if isinstance(inputs, dict):
            kwargs = inputs
        else:
            args = inputs if isinstance(inputs, tuple) else (inputs,)
        given = {**parameters, **buffers}
        tensors = {name: given[first] for name, first in self._names.items() if first in given}
        output = functional_call(self._model, tensors, args, kwargs, tie_weights=False)
        replaced = {n: tensors[n].detach() for n, b in buffers.items() if tensors[n] is not b}
        for name, new in replaced.items():
            if new.shape != buffers[name].shape:
                raise UserError(
                    f"a forward pass must keep the shapes of buffers, got {tuple(new.shape)} for "
                    f"{name!r} of {tuple(buffers[name].shape)}; register it in its final shape"
                )
        loss = self._loss(output, targets)
        if loss.dim():
            raise UserError(
                f"loss(output, target) must return a scalar, the mean over a worker's batch, got "
                f"shape {tuple(loss.shape)}; call .mean() on it"
            )
        return loss, replaced

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


def _names(model: nn.Module) -> dict[str, str]:
    """Return the first name of the same tensor, by name of parameter or buffer."""
    first: dict[int, str] = {}
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _count(evaluate: Evaluate, saved: dict[int, int], part: Part) -> Tensor:
    """Evaluate, and collect the memory that is kept for the backward pass: bytes by address.

    What the pass is given is there anyway.
    """
    known = {_address(leaf) for leaf in tree_leaves(part)}

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in known:
            saved[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with saved_tensors_hooks(pack, unpack):
        return evaluate(part)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
