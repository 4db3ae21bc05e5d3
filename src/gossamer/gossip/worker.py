"""One rank's worker: the part that the user's handle, checkpoints and the scaler share."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator
from typing import TypeVar, final

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from gossamer.errors import UserError
from gossamer.gossip.epoch_log import STEP
from gossamer.gossip.epochs import Epochs, without_frames
from gossamer.gossip.failures import ExchangeError
from gossamer.gossip.mixer import Mixer, MixerState
from gossamer.gossip.model_state import ModelState
from gossamer.gossip.network import Network
from gossamer.gossip.notices import describe, name_ranks
from gossamer.gossip.replica import Replica
from gossamer.gossip.step import Step
from gossamer.gossip.within import Within
from gossamer.nonfinite import NonFiniteError, measured_norms

_log = logging.getLogger(__name__)

_EXIT_WAIT_S = 30.0
"""How long a process that exits without close() waits for its peers."""

_EXIT_WAIT_AFTER_ERROR_S = 3.0

_ENDED = "ended its gossip (where ranks have fewer batches than others, use join())"

Result = TypeVar("Result")


@final
class Worker:
    """Makes collective calls, and shuts gossip down in an order that blocks no peer.

    Args:
        replica: its parameters.
        step: the hooks around optimizers' steps.
        epochs: the current members, and the connections to them.
        model_state: warns about the state of a single replica.
        within: the connections to the ranks that hold its replica with it.
    """

    def __init__(
        self,
        replica: Replica,
        step: Step,
        epochs: Epochs,
        model_state: ModelState,
        within: Within,
    ) -> None:
        self.replica = replica
        self.step = step
        self.epochs = epochs
        self.model_state = model_state
        self.within = within
        self._pid = os.getpid()
        # The registration also keeps this object alive until close(): its tensors are in flight.
        atexit.register(self._leave)

    @property
    def network(self) -> Network:
        """The connections of the current epoch."""
        return self.epochs.current.network

    @property
    def mixer(self) -> Mixer:
        """The mixer of parameters, which may have an exchange in flight between steps."""
        return self.epochs.current.context.mixer

    # - Collective calls

    def together(
        self,
        call: str,
        body: Callable[[], Result],
        *,
        drains: bool = True,
        undo: Callable[[], object] = lambda: None,
    ) -> Result:
        """Make a collective call; repeat it with the survivors if a worker is lost.

        If this returns on one survivor, it must return on all of them. So with
        ``on_failure="continue"`` ranks wait for each other at the end: no rank returns before all
        have run their part. If that wait fails, the survivors compare how many calls each has
        completed, and either all return or all run the part again.

        Args:
            call: the name of the call, for errors on ranks that do not make it.
            body: this rank's part.
            drains: whether to wait for the exchange in flight first.
            undo: called before the body is run again.
        """
        while True:
            results: list[Result] = []
            try:
                with self.collective(call) if drains else self.calling(call):
                    results.append(body())
                    if self.epochs.survives:
                        self.epochs.calls_done += 1
                        self.network.collectives.begin_gather(0, f"the end of {call}")()
                    return results[0]
            except ExchangeError as error:
                if not self.epochs.takes(error):
                    raise
                failure = without_frames(error)
            decision = self.step.recover(failure, call)
            if results and decision.calls_done >= self.epochs.calls_done:
                return results[0]
            self.epochs.calls_done -= len(results)
            undo()

    def gather_in_step(self, value: int, call: str) -> list[int]:
        """Return every rank's integer, at a point that each rank reaches once per step.

        Returns only this rank's while ranks are at different steps after a loss.
        """
        while not self.step.is_alone:
            try:
                return self.begin_gather(value, call)()
            except ExchangeError as error:
                if not self.epochs.takes(error):
                    raise
                failure = without_frames(error)
            self.step.recover(failure, STEP)
        return [value]

    def check_ready(self, call: str) -> None:
        """Raise if a collective call cannot be made: after the end, or inside join()."""
        self.check_open()
        if self.step.joining:
            raise UserError(
                f"inside join() ranks may be at different steps, so {call} cannot be a collective "
                "call there; call it after the loop"
            )

    def check_open(self) -> None:
        """Raise if gossip has ended."""
        if self.is_closed:
            raise UserError(
                "this gossip must be open, got one that was closed; call decentralize() again"
            )

    @contextlib.contextmanager
    def collective(self, call: str) -> Generator[None]:
        """Make a collective call, after waiting for the exchange in flight.

        Args:
            call: the name of the call, for errors on ranks that do not make it.
        """
        self._check_together(call)
        self.step.drain()
        calling = self.network.detector.calling(call)
        with record_function(f"Gossip::{call}"), calling, torch.no_grad():
            self.network.collectives.assemble(call, self.step.num_steps)
            yield

    @contextlib.contextmanager
    def calling(self, call: str) -> Generator[None]:
        """Make a collective call that does not wait for the exchange in flight."""
        self._check_together(call)
        with self.network.detector.calling(call):
            yield

    def _check_together(self, call: str) -> None:
        """Raise where ranks could not all make the call, or parameters are in mid-step."""
        self.check_ready(call)
        if self.step.has_just_joined:
            raise UserError(
                f"a worker that joins others goes straight to its loop, got {call} before its "
                "first step, which the others made when they started; put it under "
                "`if gossip.num_steps == 0:`"
            )
        # Between two optimizers' steps of push-sum, parameters are multiplied by the weight.
        if self.replica.weighted:
            self.step.refuse_amid_optimizers(call)

    def gather(self, value: int) -> list[int]:
        """Return every rank's integer, in the order of ranks. A collective call."""
        return self.begin_gather(value, "a number from every rank")()

    def begin_gather(self, value: int, call: str) -> Callable[[], list[int]]:
        """Start to gather an integer from every rank; return the function that waits for them.

        Args:
            value: this rank's integer.
            call: the purpose; it is an error if another rank gathers for another one.
        """
        self.check_ready("gather()")
        return self.network.collectives.begin_gather(value, call)

    def averages(self) -> Generator[tuple[Tensor, Tensor]]:
        """Yield each averaged tensor with its mean over all workers; inside a collective call."""
        return self.replica.averages(self.network.collectives.average)

    def check_finite(self, call: str, *, refuses: bool) -> None:
        """Find ranks whose parameters are not finite, in a collective call before an average.

        Args:
            call: the name of the call.
            refuses: whether to raise on all ranks, instead of logging a warning.
        """
        norms = measured_norms([tensor.unsqueeze(0) for tensor in self.replica.averaged])
        own = int(np.isnan(self.within.norms(norms, "the check of parameters")).any())
        flags = self.network.collectives.begin_gather(own, f"the check of parameters in {call}")()
        ranks = [rank for rank, flag in enumerate(flags) if flag]
        if ranks and refuses:
            raise NonFiniteError(
                f"{call} must average parameters that are finite, got those of "
                f"{name_ranks(ranks)}, which are not; resume from a checkpoint before that, or "
                "close() and keep a replica",
                ranks,
            )
        if ranks:
            _log.warning(
                "%s averages parameters that are not finite, those of %s", call, name_ranks(ranks)
            )

    # - The end

    @property
    def is_closed(self) -> bool:
        """Whether gossip has ended."""
        return self.replica.is_released

    def close(self) -> None:
        """Wait for the exchange in flight, remove all hooks, free all memory."""
        try:
            self.model_state.remove_hook()
            try:
                self.step.close()
            except ExchangeError as error:
                if not self.epochs.takes(error):
                    raise
                without_frames(error)  # a lost peer: this rank needs no result any more
            self.leave(_ENDED, ended=True)
            self.within.close()
            if self.epochs.survives:
                self._let_go()
            elif not self.network.detector.broken:
                atexit.unregister(self._leave)
                self.network.close()
                self.network.detector.board.discard()
        finally:
            self.replica.release()

    def leave(self, reason: str, *, ended: bool = False) -> None:
        """Report to other ranks why this one ends; see ``FailureDetector.leave``."""
        self.network.detector.leave(reason, ended=ended)
        self.within.leave(reason, ended=ended)
        self.epochs.leave(reason, alarm=not ended)

    def _let_go(self) -> None:
        """Release the network without waiting for survivors, which may be in the next epoch."""
        if not self.network.detector.broken:
            self.network.collectives.wait_idle(_EXIT_WAIT_AFTER_ERROR_S)
        self.epochs.current.drop()
        if self.epochs.wait_dropped(_EXIT_WAIT_AFTER_ERROR_S):
            atexit.unregister(self._leave)

    def _leave(self) -> None:
        """At exit of the process: complete the exchange in flight, and report why it ends."""
        if os.getpid() != self._pid:  # in a forked child, whose exit is not this rank's
            return
        raised = getattr(sys, "last_value", None)
        self.leave("ended without close()" if raised is None else f"raised {describe(raised)}")
        patience_s = _EXIT_WAIT_S if raised is None else _EXIT_WAIT_AFTER_ERROR_S
        if raised is not None and self.epochs.survives:
            self.epochs.current.drop()  # survivors detect the closed connections at once
        if self.mixer.state is MixerState.IN_FLIGHT:
            _log.warning("gossip was not closed; waiting for the exchange in flight")
            waiter = threading.Thread(target=_drain_quietly, args=(self.mixer,), daemon=True)
            waiter.start()
            waiter.join(patience_s)
        if not self.network.detector.broken:
            self.network.collectives.wait_idle(patience_s)
        self.epochs.wait_dropped(patience_s)
        # Ranks exit one after the other: a thread that waits in Gloo is woken by a peer's exit, and
        # must not be while its own interpreter shuts down.
        share = (1 + self.network.rank) / self.network.size
        self.within.abandon(0.0)
        self.network.abandon(share * _EXIT_WAIT_AFTER_ERROR_S)


def _drain_quietly(mixer: Mixer) -> None:
    with contextlib.suppress(ExchangeError):
        mixer.drain()
