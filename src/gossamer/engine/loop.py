"""The training loop of both engines: which batches, which learning rate, which records when."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gossamer.engine.spec import RunSpec
from gossamer.records import Ended, Evaluation, Record, Started, Step
from gossamer.workloads import Draw, draw_batches

_MOST_REPLICAS = 16
"""How many workers' own models are evaluated."""


class Trainer(Protocol):
    """What an engine provides: W workers, here or elsewhere.

    Every method is a collective call where workers are processes.
    """

    @property
    def workers(self) -> Sequence[int]:
        """The workers that live in this process."""
        ...

    def step(self, samples: npt.NDArray[np.int64], lr: float) -> None:
        """Take a training step on these workers' batches, [workers, batch]."""
        ...

    def losses(self) -> list[float]:
        """Return all workers' losses in the last step."""
        ...

    def distance(self) -> float:
        """Return the consensus distance."""
        ...

    def bytes_sent(self) -> float:
        """Return what the average worker has sent so far."""
        ...

    def evaluate(self, replicas: Sequence[int]) -> tuple[float, dict[int, float]]:
        """Return the metric of the average model, and of some workers' own."""
        ...


def train(spec: RunSpec, trainer: Trainer) -> Iterator[Record]:
    """Run a specification; yield its records."""
    yield Started(run_id=spec.id, spec=spec.model_dump(), environment=environment())
    replicas = _spread(spec.workers)
    step, train_s, diverged = 0, 0.0, False
    for epoch in range(spec.epochs):
        samples = _samples(spec, trainer.workers, epoch)
        for batch in range(spec.steps_per_epoch):
            began = time.perf_counter()
            trainer.step(samples[:, batch], spec.lr_at(step))
            train_s += time.perf_counter() - began
            step += 1
            if step % spec.log_every == 0 or step == spec.num_steps:
                losses = trainer.losses()
                yield Step(
                    step=step,
                    epoch=epoch,
                    lr=spec.lr_at(step - 1),
                    losses=losses,
                    distance=trainer.distance(),
                    bytes_sent=trainer.bytes_sent(),
                )
                diverged = not all(map(math.isfinite, losses))
            if diverged:
                yield Ended(status="diverged", steps=step, train_s=train_s)
                return
        if (epoch + 1) % spec.evaluate_every == 0 or epoch + 1 == spec.epochs:
            average, own = trainer.evaluate(replicas)
            yield Evaluation(step=step, epoch=epoch, average=average, replicas=own)
    yield Ended(status="done", steps=step, train_s=train_s)


def environment() -> dict[str, str]:
    """Return what a result depends on besides its specification."""
    return {
        "gossamer": metadata.version("gossamer"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": str(torch.get_num_threads()),
    }


def _samples(spec: RunSpec, workers: Sequence[int], epoch: int) -> npt.NDArray[np.int64]:
    """Return the samples of these workers, [workers, steps, batch]."""
    data = spec.make_workload().load()
    draw = Draw(
        num_samples=len(data.train_inputs),
        num_workers=spec.workers,
        batch_size=spec.batch_size,
        steps_per_epoch=spec.steps_per_epoch,
        seed=spec.seed,
        sharding=spec.sharding,
        labels=None if data.labels is None else data.labels.numpy(),
    )
    return draw_batches(draw, workers, epoch)


def _spread(num_workers: int) -> list[int]:
    """Return all workers, or some at even distances where there are many."""
    places = np.linspace(0, num_workers - 1, min(num_workers, _MOST_REPLICAS))
    return sorted({round(place) for place in places.tolist()})
