"""The engine of virtual workers: all of them stacked in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gossamer.engine.loop import train
from gossamer.engine.spec import CENTRALIZED, DTYPES, RunSpec, cast_floats
from gossamer.records import Record
from gossamer.simulate import Centralized, Simulation


def run(spec: RunSpec) -> Iterator[Record]:
    """Run a specification in this process."""
    return train(spec, _Virtual(spec))


class _Virtual:
    def __init__(self, spec: RunSpec) -> None:
        self.workers = range(spec.workers)
        self._workload = spec.make_workload()
        data = self._workload.load()
        self._inputs, self._targets = data.train_inputs, data.train_targets
        self._test = cast_floats(data.test_inputs, DTYPES[spec.dtype]), data.test_targets
        model, loss = spec.make_model(), self._workload.loss
        dtype = DTYPES[spec.dtype]
        self._sim: Simulation | Centralized
        if spec.topology == CENTRALIZED:
            self._sim = Centralized(
                model, loss, spec.make_optimizer, spec.workers, dtype=dtype, seed=spec.seed
            )
        else:
            self._sim = Simulation(
                model,
                loss,
                spec.make_optimizer,
                spec.workers,
                spec.topology,
                spec.order,
                gossip_steps=spec.gossip_steps,
                control=spec.control,
                dtype=dtype,
                seed=spec.seed,
            )
        self._losses = torch.empty(0)

    def step(self, samples: npt.NDArray[np.int64], lr: float) -> None:
        chosen = torch.from_numpy(samples)
        for group in self._sim.optimizer.param_groups:
            group["lr"] = lr
        self._losses = self._sim.step(self._inputs[chosen], self._targets[chosen])

    def losses(self) -> list[float]:
        return self._losses.tolist()

    def distance(self) -> float:
        return self._sim.consensus_distance()

    def bytes_sent(self) -> float:
        return float(np.mean(self._sim.bytes_sent))

    def evaluate(self, replicas: Sequence[int]) -> tuple[float, dict[int, float]]:
        own = {worker: self._metric(self._sim.worker(worker)) for worker in replicas}
        return self._metric(self._sim.average()), own

    @torch.no_grad()
    def _metric(self, model: nn.Module) -> float:
        inputs, targets = self._test
        outputs: Tensor = model.eval()(inputs)
        return self._workload.metric(outputs, targets)
