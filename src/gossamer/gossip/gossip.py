"""The user's handle of a training loop that gossips."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator
from typing import Any, final

import torch
from torch import Tensor

from gossamer.algorithms import PARAMETERS
from gossamer.consensus import Decision, RoundSource
from gossamer.errors import UserError
from gossamer.gossip.notices import describe
from gossamer.gossip.telemetry import Stats
from gossamer.gossip.worker import Worker
from gossamer.topology import Schedule
from gossamer.topology.arrays import FloatArray

_log = logging.getLogger(__name__)


@final
class Gossip:
    """A training loop that gossips; created by ``decentralize``.

    Under awc the parameters are in flight between two steps, so they must not change, except
    inside ``drained()``.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._step = worker.step
        self._restoring = False

    def __enter__(self) -> Gossip:
        """Close gossip at the end of the block; report an exception that ends it to all ranks."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close. After an exception only report it: waiting for peers could block for ever."""
        if error is None:
            self.close()
        else:
            self._worker.leave(f"raised {describe(error)}")

    # - Who takes part

    @property
    def members(self) -> tuple[int, ...]:
        """The members, in the order of their current ranks.

        Each is identified by its rank at the start, which stays when others are lost or join.
        """
        return self._worker.epochs.current.members

    @property
    def rank(self) -> int:
        """The index of this worker among the members."""
        return self._worker.network.rank

    @property
    def num_workers(self) -> int:
        """The number of members."""
        return self._worker.network.size

    @property
    def schedule(self) -> Schedule:
        """The round of every step."""
        return self._worker.epochs.current.schedule

    @property
    def _source(self) -> RoundSource:
        return self._worker.epochs.current.source

    # - Measuring

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        self._worker.check_open()
        return self._worker.replica.device

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` or ``finalize()`` has ended gossip."""
        return self._worker.is_closed

    @property
    def num_steps(self) -> int:
        """Steps of training taken so far."""
        return self._step.num_steps

    @property
    def last_norms(self) -> FloatArray | None:
        """L2 norms [T, W] of every parameter tensor of every worker, after an update and before
        mixing, at the last step that measured them. DBench's correlations are of these.
        """
        return self._step.last_norms

    @property
    def norms_step(self) -> int:
        """Steps taken when ``last_norms`` was measured, including that step; 0 if it never was."""
        return self._step.norms_step

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far in rounds and averages."""
        return self._worker.network.telemetry.bytes_sent

    @property
    def messages_sent(self) -> int:
        """Messages that this rank has sent so far; an all-reduce of g ranks counts as 2(g − 1)."""
        return self._worker.network.telemetry.messages_sent

    @property
    def decision(self) -> Decision | None:
        """The last decision of the control: rounds, the estimated distance and its target."""
        return self._source.decision

    def stats(self) -> Stats:
        """Return the bytes and messages sent by this rank so far, and the seconds it waited."""
        return self._worker.network.telemetry.stats(self.num_steps)

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Return Ξ, with Ξ² = (1/n) Σ_i ‖x̄ − x_i‖², over all parameters. A collective call."""

        def measure() -> float:
            average = self._worker.network.collectives.average
            self._worker.replica.collect()
            squared = torch.zeros(1, dtype=torch.float64, device=self._worker.replica.device)
            for sent in self._worker.replica.exchanged[PARAMETERS]:
                difference = average(sent).sub_(sent)
                squared += torch.linalg.vector_norm(difference, dtype=torch.float64) ** 2
            return float(self._worker.within.total(average(squared), "the distance").sqrt())

        return self._worker.together("consensus_distance()", measure)

    def sketches(self) -> FloatArray:
        """Return a sketch of every worker's parameters, [n, m]: it nearly preserves distances.

        A collective call that does not wait for an exchange in flight. Read it by
        ``consensus.sketch_distance`` and ``consensus.theta``, which estimate distances from it. It
        costs a pass over the parameters and 4 kB per rank.
        """
        return self._worker.together(
            "sketches()",
            lambda: self._worker.epochs.current.meter.begin_parameters()(),
            drains=False,
        )

    def gather(self, value: int) -> list[int]:
        """Return every rank's integer, in the order of ranks. A collective call."""
        return self._worker.together(
            "gather()", lambda: self._worker.begin_gather(value, "gather()")(), drains=False
        )

    # - Averaging and changing parameters

    @contextlib.contextmanager
    def averaged(self) -> Generator[None]:
        """Load the exact average of all workers into the model, and restore it bit for bit after.

        A collective call. Needs memory for one more copy of the parameters during the block.
        """
        with self._averaged("averaged()", refuses=False):
            yield

    def averaged_state_dict(self) -> dict[str, Any]:
        """Return the model's state with the exact average of all workers. A collective call.

        Every tensor has storage of its own, so that any format can save it. Values are equal on all
        ranks, except in buffers that are not averaged. ``model.load_state_dict`` accepts it.
        """
        with self._averaged("averaged_state_dict()", refuses=True):
            return self._worker.model_state.copy()

    @contextlib.contextmanager
    def _averaged(self, call: str, *, refuses: bool) -> Generator[None]:
        def average() -> None:
            self._worker.check_finite(call, refuses=refuses)
            for tensor, mean in self._worker.averages():
                tensor.copy_(mean)

        with self._restored(call) as put_back, self._worker.model_state.silent():
            self._worker.together(call, average, undo=put_back)
            yield

    @contextlib.contextmanager
    def drained(self, *, keep_changes: bool = False) -> Generator[None]:
        """Wait for the exchange in flight, so that code may change parameters between two steps.

        Args:
            keep_changes: by default parameters are restored bit for bit at the end (a second
                gradient for SAM, evaluation with swapped weights), which needs memory for a copy
                during the block. True keeps the changes, and makes this a collective call: the
                exchange of this step is restarted from the changed parameters.
        """
        if not keep_changes:
            with self._restored("drained()"):
                yield
            return
        call = "drained(keep_changes=True)"
        self._refuse_where_undone(call)
        self._step.refuse_amid_optimizers(call)
        self._worker.together(call, lambda: None)
        try:
            with self._step.paused(call):
                yield
        finally:
            # After an exception too: the other ranks restart theirs, and would wait for this one.
            self._step.restart()

    @contextlib.contextmanager
    def _restored(self, call: str) -> Generator[Callable[[], None]]:
        self._worker.check_open()
        with self._step.paused(call), self._worker.replica.restored() as put_back:
            outer, self._restoring = self._restoring, True
            try:
                yield put_back
            finally:
                self._restoring = outer

    def _refuse_where_undone(self, call: str) -> None:
        """Raise inside a block that restores parameters at its end, which would undo the call."""
        if self._restoring:
            raise UserError(
                f"{call} must come outside of blocks that restore parameters, got it inside "
                f"{self._step.paused_by}; leave the block first"
            )

    # - Uneven inputs

    @contextlib.contextmanager
    def join(self) -> Generator[None]:
        """Allow ranks to take different numbers of steps in the block, as DDP's ``join`` does.

        A collective call around the loop. A rank whose loop has ended continues to exchange and
        mix, without updates of its own, until all loops have ended; these steps count in
        ``num_steps``. Every step gathers which ranks still train, so no rank can be more than one
        step ahead of the slowest.
        """
        if self._worker.epochs.survives:
            raise UserError(
                "join() counts at every step which ranks still train, and cannot when a worker is "
                "lost, got it with on_failure='continue'; give all workers the same number of "
                "steps, as in `while gossip.num_steps < total:`"
            )
        self._worker.together("join()", lambda: None)
        with self._step.joined():
            yield

    # - State

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, together with the model's and the optimizer's."""
        self._worker.check_open()
        self._worker.model_state.silence()
        return {
            "num_steps": self.num_steps,
            "num_workers": self.num_workers,
            "rank": self.rank,
            "topology": self.schedule.name,
            "control": self._source.state_dict(),
            **self._step.algorithm_state(),
            **self._step.wire_state(),
            **self._step.norms_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, after the model and the optimizer have loaded theirs.

        A collective call. Under awc the exchange that was in flight is restarted from the loaded
        parameters. To load while training, wrap all three in ``drained(keep_changes=True)``.
        """
        self._worker.check_open()
        self._refuse_where_undone("load_state_dict()")
        self._step.refuse_amid_optimizers("load_state_dict()")
        for field, ours in (("num_workers", self.num_workers), ("rank", self.rank)):
            if state[field] != ours:
                raise UserError(
                    f"a state must be of this rank and number of workers, got {field} "
                    f"{state[field]} where this gossip has {ours}; gossamer.Checkpoints resumes "
                    "on another number of workers from the average"
                )
        if state["topology"] != self.schedule.name:
            _log.warning("continuing a run on %s with %s", state["topology"], self.schedule.name)
        steps = self._worker.together(
            "load_state_dict()",
            lambda: self._worker.begin_gather(state["num_steps"], "the loaded number of steps")(),
        )
        of_node = self._worker.within.gather(state["num_steps"], "the loaded number of steps")
        if len({*of_node}) > 1:
            raise UserError(
                f"all ranks within a node must load the state of one step, got steps {of_node}; "
                "choose a checkpoint that all of them have"
            )
        if len(set(steps)) > 1:
            raise UserError(
                f"all ranks must load the state of one step, got steps {steps} on ranks 0 to "
                f"{self.num_workers - 1}; choose a checkpoint that all of them have"
            )
        self._worker.epochs.come_together()
        self._step.num_steps = state["num_steps"]
        self._step.load_norms(state, self.num_workers)
        self._step.load_algorithm(state)
        self._step.load_wire(state)
        self._source.load_state_dict(state["control"], self.num_steps)
        if not self._step.paused_by:  # otherwise the end of drained() restarts it
            self._step.restart()

    # - The end

    def finalize(self) -> None:
        """End gossip and leave the exact average in every rank's model. A collective call."""
        self._refuse_where_undone("finalize()")

        def average() -> list[tuple[Tensor, Tensor]]:
            self._worker.check_finite("finalize()", refuses=True)
            # All averages before the first copy, or a failure would leave some tensors averaged.
            return [*self._worker.averages()]

        averages = self._worker.together("finalize()", average)
        with torch.no_grad():
            for tensor, mean in averages:
                tensor.copy_(mean)
        self.close()

    def close(self) -> None:
        """End gossip: wait for the exchange in flight, remove all hooks, free all memory.

        Each rank keeps its own parameters, moved out of the buckets. Closing twice does nothing.
        """
        if not self._worker.is_closed:
            self._refuse_where_undone("close()")
            self._worker.close()


def worker_of(gossip: Gossip) -> Worker:
    """Return the internals of a handle, for ``Checkpoints`` and ``GradScaler``; not public."""
    return gossip._worker  # pyright: ignore[reportPrivateUsage]
