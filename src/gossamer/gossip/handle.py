"""The handle of a training loop that gossips: its hooks, and all that a user can ask of it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from gossamer.consensus import Decision, Plan
from gossamer.errors import UserError
from gossamer.gossip import hooks
from gossamer.gossip.buckets import unflatten_
from gossamer.gossip.bulletin import Bulletin, ExchangeError
from gossamer.gossip.meter import RankMeter
from gossamer.gossip.mixer import Mixer, MixerState
from gossamer.gossip.orders import Order
from gossamer.gossip.parameters import Guard
from gossamer.gossip.stats import Stats
from gossamer.gossip.transport import Transport
from gossamer.topology import Schedule
from gossamer.topology.round import FloatArray

_log = logging.getLogger(__name__)

_EXIT_WAIT_S = 30.0
"""How long a process that ends without close() stays for its peers."""

_EXIT_WAIT_AFTER_ERROR_S = 3.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """What a gossip looks after."""

    trained: Sequence[Tensor] = ()
    """Parameters that are mixed: views of the buckets."""

    flattened: Sequence[Tensor] = ()
    """All tensors that live in buckets: those, and statistics that are mixed with them."""

    buckets: Sequence[Tensor] = ()
    statistics: Sequence[Tensor] = ()
    """Buffers that are averaged with them."""


@final
class Gossip:
    """A training loop that gossips; made by ``decentralize``.

    Between two steps under awc the parameters are what is being sent, so they must not change,
    except inside ``drained()``.
    """

    def __init__(  # noqa: PLR0913 - the parts that decentralize() has put together
        self,
        optimizers: Sequence[Optimizer],
        schedule: Schedule,
        order: Order,
        plan: Plan,
        meter: RankMeter,
        mixer: Mixer,
        transport: Transport,
        bulletin: Bulletin,
        guard: Guard,
        tensors: Tensors,
        norms_every: int,
    ) -> None:
        self.schedule = schedule
        self.rank, self.num_workers = transport.rank, transport.size
        self.num_steps = 0
        """Steps of training taken so far."""
        self._order = order
        self._meter = meter
        self._plan = plan
        self._mixer = mixer
        self._transport = transport
        self._bulletin = bulletin
        self._guard = guard
        self._tensors = tensors
        self._norms_every = norms_every
        self.last_norms: FloatArray | None = None
        """L2 norms [T, W] of every parameter tensor of every worker, after an update and before it
        is mixed, as DBench correlates them; of the last step that measured them."""
        # - The step that is being taken
        self._optimizers = optimizers
        self._stepped: list[Optimizer] = []
        self._begun = False
        # - What the user is inside of
        self._inside = ""
        self._restoring = False
        self._joining = False
        self._pid = os.getpid()
        # - Hooks
        untraced: Any = torch.compiler.disable  # where a user compiles the optimizer's step
        self._handles = [
            handle
            for optimizer in optimizers
            for handle in (
                optimizer.register_step_pre_hook(untraced(self._before_step)),
                optimizer.register_step_post_hook(untraced(self._after_step)),
            )
        ]
        # Also what keeps this object until close(): its tensors are on the wire.
        atexit.register(self._leave)

    def __enter__(self) -> Gossip:
        """Gossip until the end of a block, and tell the others about an exception that ends it."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close; after an exception only say so, for peers may never come."""
        if error is None:
            self.close()
        else:
            self._bulletin.leave(f"raised {error!r}")

    # - Measuring

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        self._check_open()
        return self._tensors.buckets[0].device

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far in rounds and averages."""
        return self._transport.bytes_sent

    @property
    def messages_sent(self) -> int:
        """Messages that this rank has sent so far; an all-reduce of g ranks counts as 2(g − 1)."""
        return self._transport.messages_sent

    @property
    def decision(self) -> Decision | None:
        """What the control decided last: rounds, the estimated distance and its target."""
        return self._plan.decision

    def stats(self) -> Stats:
        """Return what this rank has sent and waited so far."""
        return Stats(
            num_steps=self.num_steps,
            bytes_sent=self.bytes_sent,
            messages_sent=self.messages_sent,
            exposed_s=self._mixer.exposed_s,
            in_flight_s=self._mixer.in_flight_s,
            meeting_s=self._transport.meeting_s,
        )

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Return Ξ, with Ξ² = (1/n) Σ_i ‖x̄ − x_i‖², over all parameters. A collective call."""
        with self.collective("consensus_distance()"):
            squared = torch.zeros(1, dtype=torch.float64, device=self.device)
            for flat in self._tensors.buckets:
                difference = self._transport.average(flat).sub_(flat)
                squared += torch.linalg.vector_norm(difference, dtype=torch.float64) ** 2
            return float(self._transport.average(squared).sqrt())

    def sketches(self) -> FloatArray:
        """Return a sketch of every worker's parameters, [n, m]: their distances, nearly.

        A collective call that lets an exchange in flight go on. ``consensus.sketch_distance`` and
        ``consensus.theta`` read it; it costs a pass over the parameters and 2 kB per rank.
        """
        self._check_open()
        self._refuse_while_joining("sketches()")
        return self._meter.begin_parameters()()

    def gather(self, value: int) -> list[int]:
        """Return every rank's number, in the order of ranks. A collective call."""
        return self.begin_gather(value, "a number from every rank")()

    def begin_gather(self, value: int, call: str) -> Callable[[], list[int]]:
        """Begin what ``gather`` does; return the function that waits for it.

        Args:
            value: this rank's number.
            call: what the numbers are for. Ranks that gather for something else are an error.
        """
        self._check_open()
        self._refuse_while_joining("gather()")
        return self._transport.begin_gather(value, call)

    # - Looking at other parameters, or changing them

    @contextlib.contextmanager
    def averaged(self) -> Generator[None]:
        """Give the model the exact average of all workers; restore it bit for bit at the end.

        A collective call. Needs one more copy of the parameters while it lasts.
        """
        with self._restored("averaged()"):
            with self.collective("averaged()"):
                for tensor, mean in self._averages():
                    tensor.copy_(mean)
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
        self._refuse_amid_optimizers(call)
        with self.collective(call):
            pass
        try:
            with self._without_steps(call):
                yield
        finally:
            self._restart()  # after an exception too: the others will

    @contextlib.contextmanager
    def _restored(self, call: str) -> Generator[None]:
        with self._without_steps(call):
            tensors = [*self._tensors.buckets, *self._tensors.statistics]
            saved = [tensor.detach().clone() for tensor in tensors]
            outer, self._restoring = self._restoring, True
            try:
                yield
            finally:
                self._restoring = outer
                with torch.no_grad():
                    for tensor, before in zip(tensors, saved, strict=True):
                        tensor.copy_(before)
                self._guard.renew()

    @contextlib.contextmanager
    def _without_steps(self, call: str) -> Generator[None]:
        """Drain, and refuse to take a step until the end."""
        self._check_open()
        self._check_unchanged()
        self._mixer.drain()
        outer, self._inside = self._inside, call
        try:
            yield
        finally:
            self._inside = outer

    def _restart(self) -> None:
        """Drop what was received; exchange what parameters are now."""
        self._mixer.discard()
        self._guard.check_trained()
        self._guard.renew()
        if self.num_steps > 0:
            self._order.resume(self._mixer, self._plan, self.num_steps)

    def _refuse_where_undone(self, call: str) -> None:
        """Raise where the end of a block would undo a call."""
        if self._restoring:
            raise UserError(
                f"{call} must come outside of blocks that restore parameters, got it inside "
                f"{self._inside}; leave the block first"
            )

    def _refuse_amid_optimizers(self, call: str) -> None:
        if self._begun:
            raise UserError(
                f"{call} must come between two steps of training, got it after the first of "
                f"{len(self._optimizers)} optimizers; let all of them take their step first"
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
        with self.collective("join()"):
            pass
        self._joining = True
        try:
            yield
            self._meter.training = False
            while self._count_training(training=False):
                self._order.before_step(self._mixer, self._plan, self.num_steps)
                self._finish_step()
        finally:
            self._joining, self._meter.training = False, True

    def _count_training(self, *, training: bool) -> int:
        return sum(self._transport.begin_gather(int(training), "a step inside join()")())

    def _refuse_while_joining(self, call: str) -> None:
        if self._joining:
            raise UserError(
                f"inside join() ranks may be at different places, so they cannot meet in {call}; "
                "call it after the loop"
            )

    # - State

    def state_dict(self) -> dict[str, Any]:
        """Return what, with the model's and the optimizer's state, continues this run."""
        self._check_open()
        return {
            "num_steps": self.num_steps,
            "num_workers": self.num_workers,
            "rank": self.rank,
            "topology": self.schedule.name,
            "control": self._plan.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, after the model and the optimizer have loaded theirs.

        A collective call. Under awc the exchange that was in flight starts again, from the loaded
        parameters. To load while training, wrap all three in ``drained(keep_changes=True)``.
        """
        self._check_open()
        self._refuse_where_undone("load_state_dict()")
        self._refuse_amid_optimizers("load_state_dict()")
        for field, ours in (("num_workers", self.num_workers), ("rank", self.rank)):
            if state[field] != ours:
                raise UserError(
                    f"a state must be of this rank and number of workers, got {field} "
                    f"{state[field]} where this gossip has {ours}; gossamer.Checkpoints resumes "
                    "on another number of workers from the average"
                )
        if state["topology"] != self.schedule.name:
            _log.warning("continuing a run on %s with %s", state["topology"], self.schedule.name)
        with self.collective("load_state_dict()"):
            steps = self._transport.begin_gather(state["num_steps"], "the loaded number of steps")()
        if len(set(steps)) > 1:
            raise UserError(
                f"all ranks must load the state of one step, got steps {steps} on ranks 0 to "
                f"{self.num_workers - 1}; choose a checkpoint that all of them have"
            )
        self.num_steps = state["num_steps"]
        self._plan.load_state_dict(state["control"], self.num_steps)
        if not self._inside:  # or the end of drained() does it
            self._restart()

    # - The end

    def finalize(self) -> None:
        """End gossip and leave the exact average in every rank's model. A collective call."""
        self._refuse_where_undone("finalize()")
        with self.collective("finalize()"):
            averages = list(self._averages())  # all before any: a failure leaves the model whole
            for tensor, mean in averages:
                tensor.copy_(mean)
        self.close()

    def close(self) -> None:
        """End gossip: wait for what is in flight, remove every hook, free all memory.

        Parameters stay as they are, in storage of their own again. What is closed stays closed.
        """
        if not self._tensors.buckets:
            return
        self._refuse_where_undone("close()")
        for handle in self._handles:
            handle.remove()
        self._handles = []
        try:
            self._mixer.close()
            self._bulletin.leave(
                "ended its gossip (where ranks have fewer batches than others, use join())"
            )
            if self._mixer.state is not MixerState.BROKEN:
                atexit.unregister(self._leave)
                self._transport.close()
        finally:
            tensors, self._tensors = self._tensors, Tensors()
            unflatten_(tensors.flattened)
            self._guard.release()

    def _leave(self) -> None:
        """At the end of a process: give peers what they wait for, and say why there is no more."""
        if os.getpid() != self._pid:  # a fork's end is not this rank's
            return
        raised = getattr(sys, "last_value", None)
        self._bulletin.leave("ended without close()" if raised is None else f"raised {raised!r}")
        if self._mixer.state is MixerState.IN_FLIGHT:
            _log.warning("gossip was not closed; waiting for the exchange in flight")
            waiter = threading.Thread(target=_drain_quietly, args=(self._mixer,), daemon=True)
            waiter.start()
            waiter.join(_EXIT_WAIT_S if raised is None else _EXIT_WAIT_AFTER_ERROR_S)
        # Each rank after another time: while one ends, the others still wait for its end.
        share = (1 + self.rank) / self.num_workers
        self._transport.abandon(share * _EXIT_WAIT_AFTER_ERROR_S)

    # - The step

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if hooks.is_nested(optimizer):
            return args, kwargs
        hooks.refuse_other_scaler()
        if self._inside:
            raise UserError(
                f"optimizer.step() must come outside of {self._inside}, got one inside; "
                "leave the block first"
            )
        if optimizer in self._stepped:
            raise UserError(
                f"each of the {len(self._optimizers)} optimizers must take one step before any "
                "takes the next, got a second step of one; where they train in turns, give each "
                "model its own decentralize()"
            )
        if self._stepped and hooks.closure_of(args, kwargs) is not None:
            raise UserError(
                "with several optimizers gradients must be there before the first one's step, got "
                "a closure for a later one; call backward() first and step() without a closure"
            )
        self._guard.check_trained()
        args, kwargs = hooks.evaluate_closure(args, kwargs)
        if not self._begun:
            self._check_unchanged()
            if self._joining:
                self._count_training(training=True)
            self._order.before_step(self._mixer, self._plan, self.num_steps)
            self._begun = True
        return args, kwargs

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not hooks.is_nested(optimizer):
            self._count_step(optimizer)

    def skip(self, optimizer: Optimizer) -> None:
        """Count an optimizer's step as taken, though all ranks agreed to skip it."""
        assert optimizer in self._optimizers, "an optimizer of another gossip"
        self._count_step(optimizer)

    def _count_step(self, optimizer: Optimizer) -> None:
        self._stepped.append(optimizer)
        if len(self._stepped) == len(self._optimizers):
            if self._begun:  # else all were skipped
                self._finish_step()
            self._stepped = []

    def _finish_step(self) -> None:
        self._stepped, self._begun = [], False
        self._guard.renew()
        if self._norms_every and (self.num_steps + 1) % self._norms_every == 0:
            self.last_norms = self._meter.norms()
        self._order.after_step(self._mixer, self._plan, self.num_steps)
        self.num_steps += 1

    def _check_unchanged(self) -> None:
        if self._mixer.state is MixerState.IN_FLIGHT:
            self._guard.check_unchanged()

    def _check_open(self) -> None:
        if not self._tensors.buckets:
            raise UserError("this gossip must be open, got one that was closed; decentralize again")

    # - Averages

    @contextlib.contextmanager
    def collective(self, call: str) -> Generator[None]:
        """Make a call in which all ranks meet, with nothing on the wire.

        Args:
            call: what ranks say of one that makes it alone.
        """
        self._check_open()
        self._refuse_while_joining(call)
        self._check_unchanged()
        self._mixer.drain()
        with record_function(f"Gossip::{call}"), self._bulletin.calling(call), torch.no_grad():
            self._transport.meet(call)
            yield

    @torch.no_grad()
    def _averages(self) -> Generator[tuple[Tensor, Tensor]]:
        """Yield each tensor that is averaged with its mean over all workers."""
        for flat in self._tensors.buckets:
            yield flat, self._transport.average(flat)
        statistics = self._tensors.statistics
        if statistics:
            # Many and small: one message for all of them.
            means = self._transport.average(torch.cat([buffer.flatten() for buffer in statistics]))
            sizes = [buffer.numel() for buffer in statistics]
            for buffer, mean in zip(statistics, means.split(sizes), strict=True):
                yield buffer, mean.view_as(buffer)


def _drain_quietly(mixer: Mixer) -> None:
    with contextlib.suppress(ExchangeError):
        mixer.drain()
