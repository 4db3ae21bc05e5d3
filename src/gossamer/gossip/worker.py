"""One rank's worker: what the user's handle, checkpoints and the scaler share."""

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
"""How long a process that ends without close() stays for its peers."""

_EXIT_WAIT_AFTER_ERROR_S = 3.0

_ENDED = "ended its gossip (where ranks have fewer batches than others, use join())"

Result = TypeVar("Result")


@final
class Worker:
    """Makes the calls that all ranks make, and comes to an end with them.

    Args:
        replica: its parameters.
        step: what it does around optimizers' steps.
        epochs: who the others are, and what connects it to them.
        model_state: what is said of the model's state.
        within: what connects it to the ranks that hold its replica with it.
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
        # Also what keeps this object until close(): its tensors are on the wire.
        atexit.register(self._leave)

    @property
    def network(self) -> Network:
        """What connects it to the others."""
        return self.epochs.current.network

    @property
    def mixer(self) -> Mixer:
        """What may be in flight."""
        return self.epochs.current.context.mixer

    # - What all ranks do together

    def together(
        self,
        call: str,
        body: Callable[[], Result],
        *,
        drains: bool = True,
        undo: Callable[[], object] = lambda: None,
    ) -> Result:
        """Make a call that all ranks make; again with those who are left, where one was lost.

        A rank that comes back from here must know that all others do. So at the end they wait for
        each other, where training goes on after a failure: nobody gets past that before all have
        done their part, and if that wait fails, all have done it, or all who are left do it again.

        Args:
            call: what ranks say of one that makes it alone.
            body: this rank's part.
            drains: whether nothing may be on the wire meanwhile.
            undo: what has to be done before the body is run again.
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
        """Return every rank's number, at a place that each comes to once in every step.

        Where ranks are not at one place because one was lost, this rank's alone.
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
        """Raise where a collective call cannot be made: gossip has ended, or ranks are apart."""
        self.check_open()
        if self.step.joining:
            raise UserError(
                f"inside join() ranks may be at different places, so they cannot meet in {call}; "
                "call it after the loop"
            )

    def check_open(self) -> None:
        """Raise where gossip has ended."""
        if self.is_closed:
            raise UserError("this gossip must be open, got one that was closed; decentralize again")

    @contextlib.contextmanager
    def collective(self, call: str) -> Generator[None]:
        """Make a call that all ranks make, with nothing on the wire.

        Args:
            call: what ranks say of one that makes it alone.
        """
        self._check_together(call)
        self.step.drain()
        calling = self.network.detector.calling(call)
        with record_function(f"Gossip::{call}"), calling, torch.no_grad():
            self.network.collectives.assemble(call, self.step.num_steps)
            yield

    @contextlib.contextmanager
    def calling(self, call: str) -> Generator[None]:
        """Make a call that all ranks make, which lets an exchange in flight go on."""
        self._check_together(call)
        with self.network.detector.calling(call):
            yield

    def _check_together(self, call: str) -> None:
        """Raise where a collective call would see parameters from the middle of a step."""
        self.check_ready(call)
        if self.step.has_just_joined:
            raise UserError(
                f"a worker that joins others goes straight to its loop, got {call} before its "
                "first step, which the others have made long ago; put it under "
                "`if gossip.num_steps == 0:`"
            )
        if self.replica.weighted:  # some carry the weight until all optimizers have stepped
            self.step.refuse_amid_optimizers(call)

    def gather(self, value: int) -> list[int]:
        """Return every rank's number, in the order of ranks. A collective call."""
        return self.begin_gather(value, "a number from every rank")()

    def begin_gather(self, value: int, call: str) -> Callable[[], list[int]]:
        """Begin what ``gather`` does; return the function that waits for it.

        Args:
            value: this rank's number.
            call: what the numbers are for. Ranks that gather for something else are an error.
        """
        self.check_ready("gather()")
        return self.network.collectives.begin_gather(value, call)

    def averages(self) -> Generator[tuple[Tensor, Tensor]]:
        """Yield each tensor that is averaged with its mean over all workers, in a collective."""
        return self.replica.averages(self.network.collectives.average)

    def check_finite(self, call: str, *, refuses: bool) -> None:
        """Say whose parameters are not finite, in a collective before an average of them.

        Args:
            call: what asks for it.
            refuses: whether that is an error, on all ranks.
        """
        norms = measured_norms([tensor.unsqueeze(0) for tensor in self.replica.averaged])
        own = int(np.isnan(self.within.norms(norms, "the look at parameters")).any())
        flags = self.network.collectives.begin_gather(own, f"the look at parameters in {call}")()
        ranks = [rank for rank, flag in enumerate(flags) if flag]
        if ranks and refuses:
            raise NonFiniteError(
                f"{call} must average parameters that are finite, got those of "
                f"{name_ranks(ranks)}, which are not; go on from a checkpoint before that, or "
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
        """Wait for what is in flight, remove every hook, free all memory."""
        try:
            self.model_state.remove_hook()
            try:
                self.step.close()
            except ExchangeError as error:
                if not self.epochs.takes(error):
                    raise
                without_frames(error)  # what was in flight is for nobody
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
        """Tell the others why this rank ends; see ``FailureDetector.leave``."""
        self.network.detector.leave(reason, ended=ended)
        self.within.leave(reason, ended=ended)
        self.epochs.leave(reason, alarm=not ended)

    def _let_go(self) -> None:
        """Leave the network to those who go on, whatever has become of it."""
        if not self.network.detector.broken:
            self.network.collectives.wait_idle(_EXIT_WAIT_AFTER_ERROR_S)
        self.epochs.current.drop()
        if self.epochs.wait_dropped(_EXIT_WAIT_AFTER_ERROR_S):
            atexit.unregister(self._leave)

    def _leave(self) -> None:
        """At the end of a process: give peers what they wait for, and say why there is no more."""
        if os.getpid() != self._pid:  # a fork's end is not this rank's
            return
        raised = getattr(sys, "last_value", None)
        self.leave("ended without close()" if raised is None else f"raised {describe(raised)}")
        patience_s = _EXIT_WAIT_S if raised is None else _EXIT_WAIT_AFTER_ERROR_S
        if raised is not None and self.epochs.survives:
            self.epochs.current.drop()  # others go on without it, and need not wait for its end
        if self.mixer.state is MixerState.IN_FLIGHT:
            _log.warning("gossip was not closed; waiting for the exchange in flight")
            waiter = threading.Thread(target=_drain_quietly, args=(self.mixer,), daemon=True)
            waiter.start()
            waiter.join(patience_s)
        if not self.network.detector.broken:
            self.network.collectives.wait_idle(patience_s)
        self.epochs.wait_dropped(patience_s)
        # Each rank after another time: while one ends, the others still wait for its end.
        share = (1 + self.network.rank) / self.network.size
        self.within.abandon(0.0)
        self.network.abandon(share * _EXIT_WAIT_AFTER_ERROR_S)


def _drain_quietly(mixer: Mixer) -> None:
    with contextlib.suppress(ExchangeError):
        mixer.drain()
