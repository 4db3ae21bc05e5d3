"""The engine of virtual workers: all of them stacked in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gossamer.engine.batches import Batches
from gossamer.engine.loop import train
from gossamer.engine.spec import CENTRALIZED, DTYPES, RunSpec, set_lr, trained_names
from gossamer.records import Record
from gossamer.simulate import Centralized, Simulation
from gossamer.topology.round import FloatArray


def run(spec: RunSpec, memory_gb: float | None = None) -> Iterator[Record]:
    """Run a specification in this process; ``memory_gb`` as in ``Simulation``."""
    return train(spec, _Virtual(spec, memory_gb))


class _Virtual:
    def __init__(self, spec: RunSpec, memory_gb: float | None) -> None:
        self._batches = Batches(spec, range(spec.workers))
        self._workload = spec.make_workload()
        model, dtype = spec.make_model(), DTYPES[spec.dtype]
        self.tensor_names = trained_names(model)
        self._sim: Simulation | Centralized
        if spec.topology == CENTRALIZED:
            self.mixing = None
            self._sim = Centralized(
                model,
                self._workload.loss,
                spec.make_optimizer,
                spec.workers,
                dtype=dtype,
                seed=spec.seed,
                memory_gb=memory_gb,
            )
        else:
            self.mixing = self._sim = Simulation(
                model,
                self._workload.loss,
                spec.make_optimizer,
                spec.workers,
                spec.schedule,
                spec.order,
                gossip_steps=spec.gossip_steps,
                control=spec.control,
                dtype=dtype,
                seed=spec.seed,
                memory_gb=memory_gb,
                norms_every=spec.log_every,
            )
        self._outer = spec.make_outer(self._sim.parameters.values())
        self._losses = torch.empty(0)

    def draw(self, epoch: int) -> npt.NDArray[np.int64]:
        return self._batches.draw(epoch)

    def step(self, samples: npt.NDArray[np.int64], lr: float) -> None:
        set_lr(self._sim.optimizer, lr)
        inputs, targets = self._batches.fetch(samples, self._sim.num_steps)
        self._losses = self._sim.step(inputs, targets)
        if self._outer is not None:
            self._outer.step()

    def losses(self) -> FloatArray:
        return self._losses.double().numpy(force=True)

    def bytes_sent(self) -> float:
        return float(np.mean(self._sim.bytes_sent))

    def slowest(self, seconds: float) -> float:
        return seconds

    def evaluate(self, replicas: Sequence[int]) -> tuple[float, dict[int, float]]:
        own = {worker: self._metric(self._sim.worker(worker)) for worker in replicas}
        return self._metric(self._sim.average()), own

    def _metric(self, model: nn.Module) -> float:
        return self._workload.evaluate(model.eval(), self._batches.data)
