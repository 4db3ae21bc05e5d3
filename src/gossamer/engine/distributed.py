"""The engine of real ranks: one process per worker under torchrun, over Gloo.

``run`` starts them and yields the records that rank 0 writes; ``python -m
gossamer.engine.distributed`` is what each of them executes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossamer.engine.batches import Batches
from gossamer.engine.lifeline import end_with_parent
from gossamer.engine.loop import train
from gossamer.engine.spec import CENTRALIZED, RunSpec, set_lr, trained_names
from gossamer.gossip import Gossip, decentralize
from gossamer.records import Ended, Record, from_line, to_line
from gossamer.simulate import worker_seed
from gossamer.topology.round import FloatArray

_POLL_S = 0.05
_END_S = 60.0
"""How long torchrun may take to end its ranks."""


class RunError(RuntimeError):
    """The processes of a run did not come to their end."""


def run(spec: RunSpec) -> Iterator[Record]:
    """Run a specification on processes of this machine."""
    with tempfile.TemporaryDirectory(prefix="gossamer-run-") as folder:
        records, errors = Path(folder) / "records.jsonl", Path(folder) / "errors.txt"
        records.touch()
        with errors.open("wb") as log, _torchrun(spec, records, log) as processes:
            end: Record | None = None
            for record in _follow(records, processes):
                if isinstance(record, Ended):
                    end = record  # the processes may still fail
                else:
                    yield record
        if processes.returncode != 0 or end is None:
            said = errors.read_text(errors="replace").strip()[-3000:]
            raise RunError(f"{spec.workers} processes were to train {spec.workload}: {said}")
        yield end


@contextlib.contextmanager
def _torchrun(spec: RunSpec, records: Path, log: IO[bytes]) -> Generator[subprocess.Popen[bytes]]:
    processes = subprocess.Popen(
        [
            *(sys.executable, "-m", "gossamer.engine.lifeline", "--standalone"),
            *("--nproc-per-node", str(spec.workers)),
            *("-m", "gossamer.engine.distributed", spec.model_dump_json(), str(records)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C is for who started the run
    )
    try:
        yield processes
    finally:
        processes.terminate()
        try:
            processes.wait(_END_S)
        except subprocess.TimeoutExpired:
            processes.kill()  # its ranks end with it
            processes.wait()


def _follow(path: Path, processes: subprocess.Popen[bytes]) -> Iterator[Record]:
    """Yield records as their lines are completed, until the processes end."""
    with path.open() as lines:
        rest = ""
        while True:
            ended = processes.poll() is not None
            *complete, rest = (rest + lines.read()).split("\n")
            yield from map(from_line, complete)
            if ended:
                return
            time.sleep(_POLL_S)


class _Method(Protocol):
    """How ranks keep together."""

    module: nn.Module
    """What a forward pass goes through."""

    @property
    def mixing(self) -> Gossip | None: ...

    def averaged(self) -> AbstractContextManager[None]: ...

    def bytes_of(self, step: Callable[[], object]) -> float:
        """Take a step; return the bytes that this rank has sent for what it mixed or averaged."""
        ...

    def close(self) -> None: ...


class _AllReduce:
    """DDP: gradients are averaged, and all ranks hold one model."""

    def __init__(self, model: nn.Module) -> None:
        self.module: nn.Module = DistributedDataParallel(model)
        self.mixing = None
        size = dist.get_world_size()
        num_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        self._bytes_per_step = 2 * (size - 1) / size * num_bytes

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext()

    def bytes_of(self, step: Callable[[], object]) -> float:
        step()
        return self._bytes_per_step

    def close(self) -> None:
        pass


class _Mixing:
    """Gossip: parameters are mixed."""

    def __init__(self, spec: RunSpec, model: nn.Module, optimizer: Optimizer) -> None:
        self.module = model
        self.mixing = decentralize(
            model,
            optimizer,
            spec.schedule,
            order=spec.order,
            gossip_steps=spec.gossip_steps,
            control=spec.control,
            norms_every=spec.log_every,
        )
        self._overlapped = spec.order == "awc"
        self._on_the_wire = 0.0

    def averaged(self) -> AbstractContextManager[None]:
        return self.mixing.averaged()

    def bytes_of(self, step: Callable[[], object]) -> float:
        before = self.mixing.bytes_sent
        step()
        sent = self.mixing.bytes_sent - before
        if not self._overlapped:
            return sent
        # An overlapped step mixes what the one before it has sent.
        mixed, self._on_the_wire = self._on_the_wire, sent
        return mixed

    def close(self) -> None:
        self.mixing.close()


class _Rank:
    def __init__(self, spec: RunSpec) -> None:
        self._rank = dist.get_rank()
        self._batches = Batches(spec, [self._rank])
        self._workload = spec.make_workload()
        self._model = spec.make_model()
        self.tensor_names = trained_names(self._model)
        self._optimizer = spec.make_optimizer(self._model.parameters())
        self._method: _Method = (
            _AllReduce(self._model)
            if spec.topology == CENTRALIZED
            else _Mixing(spec, self._model, self._optimizer)
        )
        self._outer = spec.make_outer(p for p in self._model.parameters() if p.requires_grad)
        self._seed, self._num_steps = spec.seed, 0
        self._loss = self._sent = 0.0

    @property
    def mixing(self) -> Gossip | None:
        return self._method.mixing

    def draw(self, epoch: int) -> npt.NDArray[np.int64]:
        return self._batches.draw(epoch)

    def step(self, samples: npt.NDArray[np.int64], lr: float) -> None:
        inputs, targets = self._batches.fetch(samples, self._num_steps)
        set_lr(self._optimizer, lr)
        self._model.train()
        self._optimizer.zero_grad()
        # What a forward pass draws is what this worker draws in a simulation.
        torch.manual_seed(worker_seed(self._seed, self._rank, self._num_steps))
        self._num_steps += 1
        loss = self._workload.loss(self._method.module(inputs[0]), targets[0])
        loss.backward()
        self._sent += self._method.bytes_of(self._optimizer.step)
        if self._outer is not None:
            self._outer.step()
        self._loss = float(loss.detach())

    def losses(self) -> FloatArray:
        return _gather(self._loss)

    def bytes_sent(self) -> float:
        return float(_gather(self._sent).mean())

    def slowest(self, seconds: float) -> float:
        return float(_gather(seconds).max())

    def evaluate(self, replicas: Sequence[int]) -> tuple[float, dict[int, float]]:
        own = _gather(self._metric() if self._rank in replicas else 0.0)
        with self._method.averaged():
            average = self._metric()
        return average, {worker: float(own[worker]) for worker in replicas}

    def close(self) -> None:
        self._method.close()

    def _metric(self) -> float:
        return self._workload.evaluate(self._model.eval(), self._batches.data)


def _gather(value: float) -> FloatArray:
    """Return every rank's number."""
    values = torch.empty(dist.get_world_size(), dtype=torch.float64)
    dist.all_gather_single(values, torch.tensor([value], dtype=torch.float64))
    return values.numpy()


def train_rank(spec: RunSpec) -> Iterator[Record]:
    """Train as one rank of the default process group; every rank yields the same records."""
    rank = _Rank(spec)
    yield from train(spec, rank)
    rank.close()


def _main(specification: str, path: str) -> None:
    """Train as one rank; rank 0 writes the records."""
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    spec = RunSpec.model_validate_json(specification)
    with open(path if dist.get_rank() == 0 else os.devnull, "a", buffering=1) as lines:
        for record in train_rank(spec):
            lines.write(to_line(record) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
