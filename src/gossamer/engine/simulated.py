"""The simulated engine: all workers stacked in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage]

from gossamer.engine.batches import Batches
from gossamer.engine.checkpoints import Checkpointing
from gossamer.engine.evaluation import TestSamples
from gossamer.engine.loop import Metrics, train
from gossamer.engine.spec import CENTRALIZED, DTYPES, RunSpec, set_lr, trained_bytes, trained_names
from gossamer.records import Record
from gossamer.simulate import Centralized, Simulation
from gossamer.topology.arrays import FloatArray
from gossamer.workloads import Data
from gossamer.workloads.evaluation import Forward, MeanMetric


def run(
    spec: RunSpec,
    memory_gb: float | None = None,
    norms_mb: float = 0.0,
    checkpointing: Checkpointing | None = None,
) -> Iterator[Record]:
    """Run a specification in this process; ``memory_gb`` as in ``Simulation``."""
    return train(spec, _Virtual(spec, memory_gb), norms_mb, checkpointing)


class _Virtual:
    rank = 0  # of one process

    def __init__(self, spec: RunSpec, memory_gb: float | None) -> None:
        self._batches = Batches(spec, range(spec.workers))
        self._tests = TestSamples(spec, self._batches.data)
        self._workload = spec.make_workload()
        model, dtype = spec.make_model(), DTYPES[spec.dtype]
        self._dtype = dtype
        self.tensor_names = trained_names(model)
        self.parameter_bytes = trained_bytes(model)
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
                clip_norm=spec.clip_norm,
            )
        else:
            self.mixing = self._sim = Simulation(
                model,
                self._workload.loss,
                spec.make_optimizer,
                spec.workers,
                spec.base_schedule,
                algorithm=spec.algorithm,
                every=spec.every,
                gossip_steps=spec.gossip_steps,
                control=spec.control,
                wire=spec.wire,
                fragments=spec.fragments,
                dtype=dtype,
                seed=spec.seed,
                memory_gb=memory_gb,
                clip_norm=spec.clip_norm,
                norms_every=spec.log_every,
                nonfinite_rounds=0,  # a run that diverges is a result
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

    def gather(self, value: int) -> list[int]:
        return [value]

    def state_dict(self) -> dict[str, Any]:
        outer = None if self._outer is None else self._outer.state_dict()
        return {"simulation": self._sim.state_dict(), "outer": outer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sim.load_state_dict(state["simulation"])
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])

    def evaluate(self, replicas: Sequence[int], last: bool) -> Metrics:
        data = self._tests.data(last)
        if isinstance(self._sim, Centralized) or self._sim.all_equal():  # one model
            average = self._workload.evaluate(self._sim.worker(0).eval(), data)
            own = [average] * len(replicas)
        else:
            average, *own = self._metrics(self._sim, replicas, data)
        return Metrics(average, dict(zip(replicas, own, strict=True)), self._tests.num(last))

    def _metrics(self, sim: Simulation, replicas: Sequence[int], data: Data) -> list[float]:
        """Return the metrics of the average model, and of some workers' own."""
        metric, average = self._workload.evaluate, sim.average().eval()
        if not isinstance(metric, MeanMetric):  # an unknown metric may need a module
            own = (sim.worker(worker).eval() for worker in replicas)
            return [metric(average, data), *(metric(model, data) for model in own)]
        models = [average, *(_forward(average, sim, worker) for worker in replicas)]
        return metric.of_each(models, self._dtype, data)


def _forward(model: nn.Module, sim: Simulation, worker: int) -> Forward:
    """Return the forward pass of a worker's parameters through a model, without a copy of them."""
    own = sim.tensors(worker)
    own |= {name: own[name].clone() for name, _ in model.named_buffers()}  # a pass may change them
    return partial(functional_call, model, own)
