"""The distributed engine: one process per worker under torchrun, over Gloo.

``run`` starts them and yields the records that rank 0 writes; each of them executes ``python -m
gossamer.engine.distributed``.
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
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossamer.engine.batches import Batches
from gossamer.engine.checkpoints import Checkpointing
from gossamer.engine.evaluation import TestSamples
from gossamer.engine.handover import receive
from gossamer.engine.loop import Metrics, train
from gossamer.engine.spec import CENTRALIZED, DTYPES, RunSpec, set_lr, trained_bytes, trained_names
from gossamer.errors import UserError
from gossamer.gossip import Gossip, decentralize
from gossamer.lifeline import end_with_parent
from gossamer.optim import tell_num_workers
from gossamer.records import Ended, Record, from_line, to_line
from gossamer.seeds import worker_seed
from gossamer.topology.arrays import FloatArray
from gossamer.topology.cost import ring_copies
from gossamer.workloads import Data
from gossamer.workloads.evaluation import MeanMetric

_POLL_S = 0.05
_END_S = 60.0
"""How long torchrun may take to end its ranks."""


class RunError(RuntimeError):
    """The processes of a run failed."""


def run(
    spec: RunSpec, norms_mb: float = 0.0, checkpointing: Checkpointing | None = None
) -> Iterator[Record]:
    """Run a specification on processes of this machine."""
    with tempfile.TemporaryDirectory(prefix="gossamer-run-") as folder:
        records, errors = Path(folder) / "records.jsonl", Path(folder) / "errors.txt"
        records.touch()
        where = map(str, checkpointing or ())
        arguments = [spec.model_dump_json(), spec.id, str(records), str(norms_mb), *where]
        with errors.open("wb") as log, _torchrun(spec.workers, arguments, log) as processes:
            end: Ended | None = None
            for record in _follow(records, processes):
                if isinstance(record, Ended):
                    end = record  # the processes may still fail
                else:
                    yield record
        if end is not None and end.status == "error":  # a rank could not start
            raise UserError(end.reason)
        if processes.returncode != 0 or end is None:
            said = errors.read_text(errors="replace").strip()[-3000:]
            raise RunError(f"{spec.workers} processes were to train {spec.workload}: {said}")
        yield end


@contextlib.contextmanager
def _torchrun(
    workers: int, arguments: Sequence[str], log: IO[bytes]
) -> Generator[subprocess.Popen[bytes]]:
    processes = subprocess.Popen(
        [
            *(sys.executable, "-m", "gossamer.lifeline", "--standalone"),
            *("--nproc-per-node", str(workers)),
            *("-m", "gossamer.engine.distributed", *arguments),
        ],
        env={"OMP_NUM_THREADS": "1", **_search_alike(), **os.environ},
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C reaches only this process, which ends them
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


def _search_alike() -> dict[str, str]:
    """Return the environment in which ``python -m`` searches modules where this process does.

    It would search the current folder first, which a console script does not: a plug-in there would
    shadow the installed one whose digest is in the run's id.
    """
    first = sys.path[0] if sys.path else None
    return {} if first in ("", str(Path.cwd())) else {"PYTHONSAFEPATH": "1"}


def _follow(path: Path, processes: subprocess.Popen[bytes]) -> Iterator[Record]:
    """Yield records as their lines are completed, until the processes exit."""
    with path.open() as lines:
        rest = ""
        while True:
            ended = processes.poll() is not None
            *complete, rest = (rest + lines.read()).split("\n")
            yield from map(from_line, complete)
            if ended:
                return
            time.sleep(_POLL_S)


class _Synchronization(Protocol):
    """How ranks synchronize: DDP, or gossip."""

    module: nn.Module
    """The module to call in forward passes."""

    @property
    def mixing(self) -> Gossip | None: ...

    def averaged(self) -> AbstractContextManager[None]: ...

    def bytes_of(self, step: Callable[[], object]) -> float:
        """Take a step; return the bytes that this rank sent for it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return its state, without the model's and the optimizer's."""
        ...

    def resumed(
        self, state: dict[str, Any], take_step: Callable[[], object]
    ) -> AbstractContextManager[None]:
        """Continue from a state; the model and the optimizer load theirs in the ``with`` block.

        Args:
            state: of the same run.
            take_step: takes a step whose effects the loaded states overwrite.
        """
        ...

    def close(self) -> None: ...


class _AllReduce:
    """DDP: gradients are averaged, and all ranks hold one model."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        tell_num_workers(optimizer, 1)  # all ranks hold the same moments
        self.module: nn.Module = DistributedDataParallel(model)
        self.mixing = None
        self._buffers = list(model.buffers())
        self._bytes_per_step = ring_copies(dist.get_world_size()) * trained_bytes(model)

    def averaged(self) -> AbstractContextManager[None]:
        for buffer in self._buffers:  # rank 0's, as every forward pass in training starts from
            dist.broadcast(buffer, 0)
        return nullcontext()

    def bytes_of(self, step: Callable[[], object]) -> float:
        step()
        return self._bytes_per_step

    def state_dict(self) -> dict[str, Any]:
        return {}

    @contextlib.contextmanager
    def resumed(self, state: dict[str, Any], take_step: Callable[[], object]) -> Generator[None]:
        # DDP rebuilds its buckets after the first step, and their order decides how sums round.
        take_step()
        yield

    def close(self) -> None:
        pass


class _Gossiping:
    """Gossip: parameters are mixed."""

    def __init__(self, spec: RunSpec, model: nn.Module, optimizer: Optimizer) -> None:
        self.module = model
        self.mixing = decentralize(
            model,
            optimizer,
            spec.base_schedule,
            algorithm=spec.algorithm,
            every=spec.every,
            gossip_steps=spec.gossip_steps,
            control=spec.control,
            wire=spec.wire,
            fragments=spec.fragments,
            norms_every=spec.log_every,
            nonfinite_rounds=0,  # a run that diverges is a result
        )
        self._overlapped = spec.make_algorithm().overlaps
        self._on_the_wire = 0.0

    def averaged(self) -> AbstractContextManager[None]:
        return self.mixing.averaged()

    def bytes_of(self, step: Callable[[], object]) -> float:
        before = self.mixing.bytes_sent
        step()
        sent = self.mixing.bytes_sent - before
        if not self._overlapped:
            return sent
        # An overlapped step mixes what the previous one sent.
        mixed, self._on_the_wire = self._on_the_wire, sent
        return mixed

    def state_dict(self) -> dict[str, Any]:
        return {"gossip": self.mixing.state_dict(), "on_the_wire": self._on_the_wire}

    @contextlib.contextmanager
    def resumed(self, state: dict[str, Any], take_step: Callable[[], object]) -> Generator[None]:
        with self.mixing.drained(keep_changes=True):
            yield
            self.mixing.load_state_dict(state["gossip"])
        self._on_the_wire = state["on_the_wire"]

    def close(self) -> None:
        self.mixing.close()


class _Rank:
    def __init__(self, spec: RunSpec) -> None:
        self.rank = dist.get_rank()
        self._batches = Batches(spec, [self.rank])
        self._tests = TestSamples(spec, self._batches.data)
        self._dtype = DTYPES[spec.dtype]
        self._workload = spec.make_workload()
        self._model = spec.make_model()
        self.tensor_names = trained_names(self._model)
        self.parameter_bytes = trained_bytes(self._model)
        self._optimizer = spec.make_optimizer(self._model.parameters())
        self._synchronization: _Synchronization = (
            _AllReduce(self._model, self._optimizer)
            if spec.topology == CENTRALIZED
            else _Gossiping(spec, self._model, self._optimizer)
        )
        self._outer = spec.make_outer(p for p in self._model.parameters() if p.requires_grad)
        self._seed, self._num_steps = spec.seed, 0
        self._clip_norm = spec.clip_norm
        self._loss = self._sent = 0.0

    @property
    def mixing(self) -> Gossip | None:
        return self._synchronization.mixing

    def draw(self, epoch: int) -> npt.NDArray[np.int64]:
        return self._batches.draw(epoch)

    def step(self, samples: npt.NDArray[np.int64], lr: float) -> None:
        inputs, targets = self._batches.fetch(samples, self._num_steps)
        set_lr(self._optimizer, lr)
        self._model.train()
        self._optimizer.zero_grad()
        # The seed of this worker in a simulation: forward passes draw the same numbers.
        torch.manual_seed(worker_seed(self._seed, self.rank, self._num_steps))
        self._num_steps += 1
        loss = self._workload.loss(self._synchronization.module(inputs[0]), targets[0])
        loss.backward()
        if self._clip_norm:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        self._sent += self._synchronization.bytes_of(self._optimizer.step)
        if self._outer is not None:
            self._outer.step()
        self._loss = float(loss.detach())

    def losses(self) -> FloatArray:
        return _gather(self._loss)

    def bytes_sent(self) -> float:
        return float(_gather(self._sent).mean())

    def slowest(self, seconds: float) -> float:
        return float(_gather(seconds).max())

    def gather(self, value: int) -> list[int]:
        values = torch.empty(dist.get_world_size(), dtype=torch.int64)
        dist.all_gather_single(values, torch.tensor([value]))
        return values.tolist()

    def evaluate(self, replicas: Sequence[int], last: bool) -> Metrics:
        data, num = self._tests.data(last), self._tests.num(last)
        self._model.eval()
        if self.mixing is None:  # one model
            with self._synchronization.averaged():
                metric = self._common_metric(data)
            return Metrics(metric, dict.fromkeys(replicas, metric), num)
        mine = self._workload.evaluate(self._model, data) if self.rank in replicas else 0.0
        own = _gather(mine)
        with self._synchronization.averaged():
            average = self._common_metric(data)
        return Metrics(average, {worker: float(own[worker]) for worker in replicas}, num)

    def state_dict(self) -> dict[str, Any]:
        synchronization = self._synchronization.state_dict()  # first: then a replica's is expected
        return {
            "num_steps": self._num_steps,
            "sent": self._sent,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "synchronization": synchronization,
            "outer": None if self._outer is None else self._outer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        any_step = partial(self.step, self.draw(0)[:, 0], 0.0)
        with self._synchronization.resumed(state["synchronization"], any_step):
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
        self._num_steps, self._sent = state["num_steps"], state["sent"]

    def close(self) -> None:
        self._synchronization.close()

    def _common_metric(self, data: Data) -> float:
        """Return the metric of a model that all ranks share; each evaluates a part of the data."""
        metric = self._workload.evaluate
        if not isinstance(metric, MeanMetric):
            return float(_gather(metric(self._model, data) if self.rank == 0 else 0.0)[0])
        num_ranks = dist.get_world_size()
        parts = torch.arange(len(data.test_targets)).tensor_split(num_ranks)
        part = data.with_tests(parts[self.rank])
        (total,), num = metric.sums([self._model], self._dtype, part)
        return metric.finish(float(_gather(total).sum()), int(_gather(num).sum()))


def _gather(value: float) -> FloatArray:
    """Return every rank's value."""
    values = torch.empty(dist.get_world_size(), dtype=torch.float64)
    dist.all_gather_single(values, torch.tensor([value], dtype=torch.float64))
    return values.numpy()


def train_rank(
    spec: RunSpec, norms_mb: float = 0.0, checkpointing: Checkpointing | None = None
) -> Iterator[Record]:
    """Train as one rank of the default process group; every rank yields the same records.

    When resumed from a checkpoint, only rank 0 yields the records up to it.
    """
    rank = _Rank(spec)
    yield from train(spec, rank, norms_mb, checkpointing)
    rank.close()


def _main(
    specification: str, run_id: str, path: str, norms_mb: str, folder: str = "", every_s: str = ""
) -> None:
    """Train as one rank; rank 0 writes the records, and any rank why it cannot start."""
    end_with_parent(signal.SIGKILL)
    try:
        spec = receive(specification, run_id, f"on rank {os.environ['RANK']}")
    except UserError as error:
        with open(path, "a") as lines:
            lines.write(to_line(Ended(status="error", reason=str(error))) + "\n")
        sys.exit(1)
    dist.init_process_group("gloo")
    checkpointing = Checkpointing(Path(folder), float(every_s)) if folder else None
    with open(path if dist.get_rank() == 0 else os.devnull, "a", buffering=1) as lines:
        for record in train_rank(spec, float(norms_mb), checkpointing):
            lines.write(to_line(record) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
