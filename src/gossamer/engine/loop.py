"""The training loop of both engines: batches, learning rates, and when to yield which records."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import numpy.typing as npt

from gossamer.consensus import Decision, dispersion, sketch_distance, theta
from gossamer.engine.checkpoints import Checkpointing, RunCheckpoints, Saved
from gossamer.engine.environment import environment
from gossamer.engine.kept_norms import KeptNorms
from gossamer.engine.spec import RunSpec
from gossamer.records import Ended, Evaluation, Record, Spread, Started, Step
from gossamer.topology import Schedule
from gossamer.topology.arrays import FloatArray


class MixingWorkers(Protocol):
    """Workers that mix: a Simulation, or one rank's Gossip."""

    @property
    def schedule(self) -> Schedule:
        """The round of every step."""
        ...

    @property
    def last_norms(self) -> FloatArray | None:
        """Norms of every tensor of every worker before they were last mixed, where measured."""
        ...

    @property
    def norms_step(self) -> int:
        """How many steps had been taken with the one that they are of; 0 for none."""
        ...

    @property
    def decision(self) -> Decision | None:
        """The control's last decision."""
        ...

    def sketches(self) -> FloatArray:
        """Return a sketch of every worker's parameters, [W, m]."""
        ...


class Metrics(NamedTuple):
    """The result of an evaluation."""

    average: float
    """Of the average model."""

    replicas: dict[int, float]
    """Of workers' own."""

    samples: int | None
    """How many of the test samples it is on; None for all of them."""


class Trainer(Saved, Protocol):
    """What an engine provides: W workers, virtual or processes.

    With processes every method is a collective.
    """

    @property
    def mixing(self) -> MixingWorkers | None:
        """The workers that mix; None where all share one model."""
        ...

    @property
    def tensor_names(self) -> Sequence[str]:
        """The trained tensors, in the order of their norms."""
        ...

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that one worker trains."""
        ...

    def draw(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the samples of the workers in this process, [workers, steps, batch]."""
        ...

    def step(self, samples: npt.NDArray[np.int64], lr: float) -> None:
        """Take a training step on these workers' batches, [workers, batch]."""
        ...

    def losses(self) -> FloatArray:
        """Return all workers' losses in the last step."""
        ...

    def bytes_sent(self) -> float:
        """Return the bytes sent so far, mean over workers."""
        ...

    def evaluate(self, replicas: Sequence[int], last: bool) -> Metrics:
        """Return the metric of the average model, and of some workers' own.

        Args:
            replicas: these workers'.
            last: evaluate on all test samples, not on the subset used during training.
        """
        ...


def train(
    spec: RunSpec,
    trainer: Trainer,
    norms_mb: float = 0.0,
    checkpointing: Checkpointing | None = None,
) -> Iterator[Record]:
    """Run a specification; yield its records.

    Args:
        spec: what is run.
        trainer: the workers, before the first step.
        norms_mb: budget of norms among the records; 0 for none of them.
        checkpointing: where the run resumes from and saves to; by default it does neither.
    """
    kept = KeptNorms(spec, trainer.tensor_names, norms_mb)
    clock = _Clock(spec, trainer)
    if checkpointing is None:
        yield from _train(spec, trainer, clock, kept, lambda: None)
        return
    checkpoints = RunCheckpoints(spec.id, clock, trainer, checkpointing)
    yield from checkpoints.restore()
    for record in _train(spec, trainer, clock, kept, checkpoints.save_where_due):
        checkpoints.note(record)  # before the yield: the next step may save, and must include it
        yield record


def _train(
    spec: RunSpec,
    trainer: Trainer,
    clock: _Clock,
    kept: KeptNorms,
    before_step: Callable[[], None],
) -> Iterator[Record]:
    """Take the remaining steps, and yield their records."""
    if clock.step == 0:
        yield Started(
            run_id=spec.id,
            spec=spec.model_dump(),
            environment=environment() | spec.sources,
            norms_every=kept.every,
            workload_facts=spec.workload_facts,
            parameter_bytes=trainer.parameter_bytes,
        )
    replicas = _spread(spec.workers, spec.evaluate_replicas)
    while not clock.over:
        epoch = clock.step // spec.steps_per_epoch
        samples = trainer.draw(epoch)
        for batch in range(clock.step % spec.steps_per_epoch, spec.steps_per_epoch):
            before_step()
            clock.time(partial(trainer.step, samples[:, batch], clock.lr))
            if (norms := kept.after(clock.step, trainer.mixing)) is not None:
                yield norms
            if clock.step % spec.log_every and not clock.over:
                continue
            clock.learn_spent()
            measured = _measure(spec, clock, trainer)
            yield measured
            if not math.isfinite(measured.loss):
                reason = f"the loss was {measured.loss} after {clock.step} steps"
                yield Ended(
                    status="diverged", reason=reason, steps=clock.step, train_s=clock.train_s
                )
                return
            if clock.over:
                break
        if (epoch + 1) % spec.evaluate_every == 0 or clock.over:
            clock.learn_spent()
            metrics = trainer.evaluate(replicas, clock.over)
            yield Evaluation(
                step=clock.step,
                epoch=epoch,
                bytes_sent=clock.bytes_sent,
                train_s=clock.train_s,
                **metrics._asdict(),
            )
    yield Ended(status="done", steps=clock.step, train_s=clock.train_s)


_CLOCK_STATE = ("step", "lr", "last_lr", "bytes_sent", "train_s", "_own_s", "_learned_at")
"""The attributes that make up a clock's state."""


@final
class _Clock:
    """The progress of a run in steps, bytes and time, each of which may be its budget."""

    def __init__(self, spec: RunSpec, trainer: Trainer) -> None:
        self._spec = spec
        self._trainer = trainer
        self._own_s = 0.0
        self._learned_at = 0
        self.step = 0
        self.lr = spec.lr_at(0)
        """The learning rate of the next step."""
        self.last_lr = 0.0
        self.bytes_sent = self.train_s = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state; the seconds are this process's own."""
        return {name: getattr(self, name) for name in _CLOCK_STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        for name in _CLOCK_STATE:
            setattr(self, name, state[name])

    @property
    def over(self) -> bool:
        """Whether one of the run's limits is reached."""
        return self._done() >= 1

    def time(self, take_step: Callable[[], None]) -> None:
        """Take a step."""
        began = time.perf_counter()
        take_step()
        self._own_s += time.perf_counter() - began
        self.step += 1
        if self._spec.max_bytes or self._spec.max_train_s:
            self.learn_spent()
        self.last_lr, self.lr = self.lr, self._spec.lr_at(self.step, self._done())

    def learn_spent(self) -> None:
        """Update what all processes have spent; a collective, so that all end at the same step."""
        if self._learned_at == self.step:  # a budget, a record and an evaluation may all ask
            return
        self._learned_at = self.step
        self.bytes_sent = self._trainer.bytes_sent()
        self.train_s = self._trainer.slowest(self._own_s)

    def _done(self) -> float:
        """Return the fraction of the run that is done, by the nearest limit."""
        spec = self._spec
        return max(
            self.step / spec.num_steps,
            self.bytes_sent / (spec.max_bytes or math.inf),
            self.train_s / (spec.max_train_s or math.inf),
        )


def _measure(spec: RunSpec, clock: _Clock, trainer: Trainer) -> Step:
    """Return the record of the last step."""
    losses = trainer.losses()
    mixing = trainer.mixing
    apart: dict[str, Any] = _one_model(spec)
    if mixing is not None:
        with np.errstate(all="ignore"):  # a run that diverges is a result
            apart = _differences(spec, clock, trainer, mixing)
    return Step(
        step=clock.step,
        epoch=(clock.step - 1) // spec.steps_per_epoch,
        lr=clock.last_lr,
        loss=float(losses.mean()),
        worst_loss=float(losses.max()),
        bytes_sent=clock.bytes_sent,
        train_s=clock.train_s,
        **apart,
    )


def _one_model(spec: RunSpec) -> dict[str, Any]:
    return {
        "distance": 0.0,
        "theta": 0.0,
        "dispersion": {},
        "rounds": 1,
        "degree": spec.workers - 1,
        "target": None,
    }


def _differences(
    spec: RunSpec, clock: _Clock, trainer: Trainer, mixing: MixingWorkers
) -> dict[str, Any]:
    """Return the distance and dispersion of workers, and the control's decision."""
    sketches = mixing.sketches()
    decision, norms = mixing.decision, mixing.last_norms
    # Under awc the next step's round has been chosen, and its exchange has begun.
    last_chosen = clock.step if spec.make_algorithm().overlaps else clock.step - 1
    plain = (mixing.schedule.round(last_chosen),) * spec.gossip_steps
    rounds = plain if decision is None else decision.rounds
    coming = mixing.schedule.round(clock.step)
    spreads: dict[str, Spread] = {}
    since = clock.step - mixing.norms_step
    # Else they are of another record.
    if norms is not None and clock.step % spec.log_every == 0 and since < spec.log_every:
        measures = zip(*dispersion(norms), strict=True)
        spreads = {
            name: Spread(*map(float, of_tensor))
            for name, of_tensor in zip(trainer.tensor_names, measures, strict=True)
        }
    return {
        "distance": sketch_distance(sketches),
        "theta": theta(sketches, coming) if coming.keeps_consensus else math.nan,
        "dispersion": spreads,
        "dispersion_step": mixing.norms_step if spreads else None,
        "rounds": len(rounds),
        "degree": max((round.degree for round in rounds), default=0),
        "target": decision.target if decision is not None else None,
    }


def _spread(num_workers: int, most: int) -> list[int]:
    """Return all workers, or ``most`` at equal intervals where there are more."""
    places = np.linspace(0, num_workers - 1, min(num_workers, most))
    return sorted({round(place) for place in places.tolist()})
