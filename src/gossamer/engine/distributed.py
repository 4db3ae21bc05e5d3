"""The engine of real ranks: one process per worker under torchrun, over Gloo.

``run`` starts them and yields the records that rank 0 writes; ``python -m
gossamer.engine.distributed`` is what each of them executes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gossamer.engine.loop import train
from gossamer.engine.spec import CENTRALIZED, DTYPES, RunSpec
from gossamer.gossip import decentralize
from gossamer.records import Record, from_line, to_line

_POLL_S = 0.05


class RunError(RuntimeError):
    """The processes of a run did not come to their end."""


def run(spec: RunSpec) -> Iterator[Record]:
    """Run a specification on processes of this machine."""
    with tempfile.TemporaryDirectory(prefix="gossamer-run-") as folder:
        records, errors = Path(folder) / "records.jsonl", Path(folder) / "errors.txt"
        records.touch()
        with errors.open("wb") as log:
            processes = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(spec.workers)),
                    *("-m", "gossamer.engine.distributed", spec.model_dump_json(), str(records)),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )
        try:
            yield from _follow(records, processes)
        finally:
            processes.terminate()
            processes.wait()
        if processes.returncode != 0:
            said = errors.read_text(errors="replace").strip()[-3000:]
            raise RunError(f"{spec.workers} processes were to train {spec.workload}: {said}")


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


class _Rank:
    def __init__(self, spec: RunSpec) -> None:
        rank = dist.get_rank()
        self.workers = [rank]
        self._workload = spec.make_workload()
        data = self._workload.load()
        dtype = DTYPES[spec.dtype]
        self._inputs, self._targets = data.train_inputs.to(dtype), data.train_targets
        self._test = data.test_inputs.to(dtype), data.test_targets
        self._model = spec.make_model()
        self._optimizer = spec.make_optimizer(self._model.parameters())
        self._loss = torch.zeros(1, dtype=torch.float64)
        self._gossip = None
        self._trained: nn.Module = self._model
        if spec.topology == CENTRALIZED:
            self._trained = DistributedDataParallel(self._model)
        else:
            self._gossip = decentralize(
                self._model,
                self._optimizer,
                spec.topology,
                order=spec.order,
                gossip_steps=spec.gossip_steps,
            )

    def step(self, samples: npt.NDArray[np.int64], lr: float) -> None:
        chosen = torch.from_numpy(samples[0])
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._model.train()
        self._optimizer.zero_grad()
        loss = self._workload.loss(self._trained(self._inputs[chosen]), self._targets[chosen])
        loss.backward()
        self._optimizer.step()
        self._loss = loss.detach().double().reshape(1)

    def losses(self) -> list[float]:
        return _gather(self._loss)

    def distance(self) -> float:
        return 0.0 if self._gossip is None else self._gossip.consensus_distance()

    def bytes_sent(self) -> float:
        size = dist.get_world_size()
        if self._gossip is None:
            return 0.0
        sent = torch.tensor([self._gossip.bytes_sent], dtype=torch.float64)
        return sum(_gather(sent)) / size

    def evaluate(self, replicas: Sequence[int]) -> tuple[float, dict[int, float]]:
        own = _gather(torch.tensor([self._metric()], dtype=torch.float64))
        if self._gossip is None:
            return own[0], {worker: own[worker] for worker in replicas}
        with self._gossip.averaged():
            average = self._metric()
        return average, {worker: own[worker] for worker in replicas}

    def close(self) -> None:
        if self._gossip is not None:
            self._gossip.close()

    @torch.no_grad()
    def _metric(self) -> float:
        inputs, targets = self._test
        outputs: Tensor = self._model.eval()(inputs)
        return self._workload.metric(outputs, targets)


def _gather(value: Tensor) -> list[float]:
    """Return every rank's number."""
    values = torch.empty(dist.get_world_size(), dtype=value.dtype)
    dist.all_gather_into_tensor(values, value)
    return values.tolist()


def _main(specification: str, path: str) -> None:
    """Train as one rank; rank 0 writes the records."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    spec = RunSpec(**json.loads(specification))
    rank = _Rank(spec)
    with open(path if dist.get_rank() == 0 else os.devnull, "a", buffering=1) as lines:
        for record in train(spec, rank):
            lines.write(to_line(record) + "\n")
    rank.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
