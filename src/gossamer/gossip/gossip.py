"""The user's handle of a training loop that gossips: all that can be asked of it."""

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
    """A training loop that gossips; made by ``decentralize``.

    Between two steps under awc the parameters are what is being sent, so they must not change,
    except inside ``drained()``.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._step = worker.step
        self._restoring = False

    def __enter__(self) -> Gossip:
        """Gossip until the end of a block, and tell the others about an exception that ends it."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close; after an exception only say so, for peers may never come."""
        if error is None:
            self.close()
        else:
            self._worker.leave(f"raised {describe(error)}")

    # - Who takes part

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that take part, in the order of their ranks now.

        Each is called by its rank at the start, whatever becomes of the others.
        """
        return self._worker.epochs.current.members

    @property
    def rank(self) -> int:
        """The index of this worker among the members."""
        return self._worker.network.rank

    @property
    def num_workers(self) -> int:
        """How many members there are."""
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
        """Where the parameters live."""
        self._worker.check_open()
        return self._worker.replica.device

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` or ``finalize()`` has ended it."""
        return self._worker.is_closed

    @property
    def num_steps(self) -> int:
        """Steps of training taken so far."""
        return self._step.num_steps

    @property
    def last_norms(self) -> FloatArray | None:
        """L2 norms [T, W] of every parameter tensor of every worker, after an update and before it
        is mixed, as DBench correlates them; of the last step that measured them.
        """
        return self._step.last_norms

    @property
    def norms_step(self) -> int:
        """How many steps had been taken with the one that ``last_norms`` is of; 0 for none."""
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
        """What the control decided last: rounds, the estimated distance and its target."""
        return self._source.decision

    def stats(self) -> Stats:
        """Return what this rank has sent and waited so far."""
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
        """Return a sketch of every worker's parameters, [n, m]: their distances, nearly.

        A collective call that lets an exchange in flight go on. ``consensus.sketch_distance`` and
        ``consensus.theta`` read it; it costs a pass over the parameters and 4 kB per rank.
        """
        return self._worker.together(
            "sketches()",
            lambda: self._worker.epochs.current.meter.begin_parameters()(),
            drains=False,
        )

    def gather(self, value: int) -> list[int]:
        """Return every rank's number, in the order of ranks. A collective call."""
        return self._worker.together(
            "gather()", lambda: self._worker.begin_gather(value, "gather()")(), drains=False
        )

    # - Looking at other parameters, or changing them

    @contextlib.contextmanager
    def averaged(self) -> Generator[None]:
        """Give the model the exact average of all workers; restore it bit for bit at the end.

        A collective call. Needs one more copy of the parameters while it lasts.
        """
        with self._averaged("averaged()", refuses=False):
            yield

    def averaged_state_dict(self) -> dict[str, Any]:
        """Return the model's state with the exact average of all workers. A collective call.

        Every tensor has storage of its own, so that any format can save it; the same values on all
        ranks, except buffers that are each worker's own. ``model.load_state_dict`` takes it.
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
        """Let code change parameters between two steps, while nothing is being sent.

        Args:
            keep_changes: by default parameters are restored bit for bit at the end (a second
                gradient for SAM, evaluation with swapped weights), which needs a copy of them while
                it lasts. True keeps what the code leaves, and makes this a collective call: the
                exchange of this step starts again, from the changed parameters.
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
            self._step.restart()  # after an exception too: the others will

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
        """Raise where the end of a block would undo a call."""
        if self._restoring:
            raise UserError(
                f"{call} must come outside of blocks that restore parameters, got it inside "
                f"{self._step.paused_by}; leave the block first"
            )

    # - Uneven inputs

    @contextlib.contextmanager
    def join(self) -> Generator[None]:
        """Let ranks take different numbers of steps inside, as DDP's ``join`` does.

        A collective call around the loop. A rank that has left its loop goes on to exchange and
        mix, without updates of its own, until all ranks have left theirs; these steps count in
        ``num_steps``. Every step tells all ranks who still trains, so no rank can be more than one
        step ahead of the slowest.
        """
        if self._worker.epochs.survives:
            raise UserError(
                "join() counts at every step who still trains, and loses count where a worker is "
                "lost, got it with on_failure='continue'; give all workers as many steps, as in "
                "`while gossip.num_steps < total:`"
            )
        self._worker.together("join()", lambda: None)
        with self._step.joined():
            yield

    # - State

    def state_dict(self) -> dict[str, Any]:
        """Return what, with the model's and the optimizer's state, continues this run."""
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
        """Continue from a state, after the model and the optimizer have loaded theirs.

        A collective call. Under awc the exchange that was in flight starts again, from the loaded
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
        if not self._step.paused_by:  # or the end of drained() does it
            self._step.restart()

    # - The end

    def finalize(self) -> None:
        """End gossip and leave the exact average in every rank's model. A collective call."""
        self._refuse_where_undone("finalize()")

        def average() -> list[tuple[Tensor, Tensor]]:
            self._worker.check_finite("finalize()", refuses=True)
            return [*self._worker.averages()]  # all before any: a failure changes nothing

        averages = self._worker.together("finalize()", average)
        with torch.no_grad():
            for tensor, mean in averages:
                tensor.copy_(mean)
        self.close()

    def close(self) -> None:
        """End gossip: wait for what is in flight, remove every hook, free all memory.

        Parameters stay as they are, in storage of their own again. What is closed stays closed.
        """
        if not self._worker.is_closed:
            self._refuse_where_undone("close()")
            self._worker.close()


def worker_of(gossip: Gossip) -> Worker:
    """Return what ``Checkpoints`` and ``GradScaler`` share with a handle; no business of users."""
    return gossip._worker  # pyright: ignore[reportPrivateUsage]
