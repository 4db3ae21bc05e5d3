"""One step of training on a rank, around ``optimizer.step()``.

The user's loop does not change. A hook before the first optimizer's update and one after the last
one's call the algorithm (``gossamer.algorithms``). This module reduces several optimizers, closures
and nested steps to that.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, final

import torch
from torch.optim import Optimizer

from gossamer.algorithms import Algorithm
from gossamer.errors import UserError
from gossamer.gossip import step_call
from gossamer.gossip.epoch_log import STEP, Decision
from gossamer.gossip.epochs import Epochs, without_frames
from gossamer.gossip.failures import ExchangeError
from gossamer.gossip.guard import Guard
from gossamer.gossip.mixer import Mixer, MixerState
from gossamer.gossip.rank_context import RankContext
from gossamer.gossip.rank_meter import RankMeter
from gossamer.gossip.wrapper_watch import WrapperWatch
from gossamer.topology.arrays import FloatArray

_log = logging.getLogger(__name__)


@final
class Step:
    """Runs an algorithm around the steps of optimizers, by hooks on them.

    Args:
        optimizers: each takes one step per step of training.
        algorithm: what a step does around updates.
        epochs: the current epoch: its members, buckets, and exchanges in flight.
        guard: detects parameters that changed or were replaced.
        wrappers: detects DDP that averages gradients of gossiping ranks.
        entry: the first step of a worker that joins; None for the others.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        epochs: Epochs,
        guard: Guard,
        wrappers: WrapperWatch,
        entry: int | None = None,
    ) -> None:
        self.num_steps = entry or 0
        """Steps taken so far."""
        self._entry = entry
        self.last_norms: FloatArray | None = None
        self.norms_step = 0
        self.joining = False
        """Whether ranks may be at different steps: the user is inside join()."""
        self.paused_by = ""
        """The name of the block that the user is in, if it must not contain steps."""
        # - What a step uses
        self._optimizers = optimizers
        self._algorithm = algorithm
        self._epochs = epochs
        self._guard = guard
        self._wrappers = wrappers
        # - The current step
        self._stepped: list[Optimizer] = []
        self._begun = False
        self._has_scanned = False
        # - Hooks
        untraced: Any = torch.compiler.disable  # the user may compile the optimizer's step
        self._hooks = [
            hook
            for optimizer in optimizers
            for hook in (
                optimizer.register_step_pre_hook(untraced(self._before_update)),
                optimizer.register_step_post_hook(untraced(self._after_update)),
            )
        ]

    @property
    def _context(self) -> RankContext:
        return self._epochs.current.context

    @property
    def _mixer(self) -> Mixer:
        return self._context.mixer

    @property
    def _meter(self) -> RankMeter:
        return self._epochs.current.meter

    # - From hook to hook

    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if step_call.is_nested(optimizer):
            return args, kwargs
        step_call.refuse_other_scaler()
        self._refuse_out_of_turn(optimizer, args, kwargs)
        self._guard.check_trained()
        args, kwargs = step_call.evaluate_closure(args, kwargs)
        if not self._begun:
            self._begin()
        return args, kwargs

    def _after_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not step_call.is_nested(optimizer):
            self._count(optimizer)

    def skip(self, optimizer: Optimizer) -> None:
        """Count an optimizer's step that all ranks have agreed to skip."""
        assert optimizer in self._optimizers, "an optimizer of another gossip"
        self._count(optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        self._stepped.append(optimizer)
        if len(self._stepped) == len(self._optimizers):
            if self._begun:  # not if all optimizers were skipped
                self._finish()
            self._stepped = []

    def _begin(self) -> None:
        """Run between the backward pass and the first optimizer's update."""
        if self._algorithm.acts_before_update:
            step_call.refuse_inside_backward(self._algorithm.name)
        if not self._has_scanned:
            self._has_scanned = True
            self._wrappers.scan()  # a framework may have wrapped the model after decentralize()
        self._check_unchanged()
        if self.joining:
            self._meter.count_training()
        self._before_first_update()
        self._begun = True

    @torch.no_grad()
    def _before_first_update(self) -> None:
        def begin() -> None:
            # While is_alone, members may be in calls that this worker has yet to make: a worker
            # that is admitted now would not make them, and those members would wait for it.
            if not self.is_alone:
                self._epochs.admit()
            if not self._is_behind:
                self._context.source.before_update(self.num_steps)
            self._algorithm.before_update(self._context, self.num_steps)

        while not self._survived(begin, STEP):
            pass  # again from its beginning, with the survivors

    def _finish(self) -> None:
        """Run between the last optimizer's update and the next forward pass."""
        self._stepped, self._begun = [], False  # also if the exchange fails: the update was taken
        self._guard.renew()  # after the update and before the exchange: later changes are errors

        def finish() -> None:
            if self.num_steps in self._epochs.current.norm_steps and not self._is_behind:
                self.last_norms = self._meter.norms()
                self.norms_step = self.num_steps + 1
            with torch.no_grad():
                self._algorithm.after_update(self._context, self.num_steps)
            self._context.refuse_unfinished()

        # Not repeated after a loss: the update has been taken, and stays unmixed.
        self._survived(finish, updated=True)
        self.num_steps += 1

    # - When a worker is lost

    @property
    def _is_behind(self) -> bool:
        """Whether other members were past this step when the epoch began: then it is local."""
        return self.num_steps < self._epochs.current.first_step

    @property
    def has_just_joined(self) -> bool:
        """Whether this worker has joined, and not taken a step yet."""
        return self.num_steps == self._entry

    @property
    def is_alone(self) -> bool:
        """Whether a collective of this step may lack ranks that made it in the epoch before.

        That is so up to the first step of an epoch: some members began that step before it.
        """
        first_step = self._epochs.current.first_step
        return first_step > 0 and self.num_steps <= first_step

    def recover(self, error: ExchangeError, call: str = "", *, updated: bool = False) -> Decision:
        """Begin the next epoch with the survivors, from this worker's own parameters.

        Args:
            error: the failure.
            call: the collective call that failed.
            updated: whether the current step's update was taken, and not yet mixed.

        Returns:
            The survivors' decision on the next epoch.
        """
        with torch.no_grad():
            if updated:
                self._algorithm.abandon(self._context)
            decision = self._epochs.advance(error, self.num_steps + updated, call, updated=updated)
            self._algorithm.restart(self._context)
        return decision

    def _survived(
        self, part: Callable[[], object], call: str = "", *, updated: bool = False
    ) -> bool:
        """Run a part of a step; return False if a worker was lost, after recovering from it."""
        try:
            part()
            return True
        except ExchangeError as error:
            if not self._epochs.takes(error):
                raise
            failure = without_frames(error)
        self.recover(failure, call, updated=updated)
        return False

    def _refuse_out_of_turn(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.paused_by:
            raise UserError(
                f"optimizer.step() must come outside of {self.paused_by}, got one inside; "
                "leave the block first"
            )
        if optimizer in self._stepped:
            raise UserError(
                f"each of the {len(self._optimizers)} optimizers must take one step before any "
                "takes the next, got a second step of one; where they train in turns, give each "
                "model its own decentralize()"
            )
        if self._stepped and step_call.closure_of(args, kwargs) is not None:
            raise UserError(
                "with several optimizers gradients must be computed before the first one's step, "
                "got a closure for a later one; call backward() first and step() without a closure"
            )

    # - Between two steps

    def algorithm_state(self) -> dict[str, Any]:
        """Return the algorithm's state as an entry of a state dict; empty if it has none."""
        kept = self._context.state_dict()
        return {"algorithm": {"name": repr(self._algorithm), **kept}} if kept else {}

    @torch.no_grad()
    def load_algorithm(self, state: dict[str, Any]) -> None:
        """Load the algorithm's state; reset it if there is none, or it is of another algorithm."""
        kept: dict[str, Any] = state.get("algorithm", {})
        if kept.get("name") == repr(self._algorithm):
            self._context.load_state_dict(kept)
            return
        self._algorithm.restart(self._context)
        if kept or self._context.state_dict():
            _log.warning("the state is not of %r, which is reset", self._algorithm)

    def wire_state(self) -> dict[str, Any]:
        """Return the wire format's state as an entry of a state dict; empty if it has none."""
        kept = self._mixer.state_dict()
        return {"wire": kept} if kept else {}

    def load_wire(self, state: dict[str, Any]) -> None:
        """Load the wire format's state; reset it if there is none, or it is of other buckets."""
        self._mixer.load_state_dict(state.get("wire", []))

    def norms_state(self) -> dict[str, Any]:
        """Return the last measured norms as entries of a state dict; empty if there are none."""
        if self.last_norms is None:
            return {}
        return {"norms_step": self.norms_step, "last_norms": torch.from_numpy(self.last_norms)}

    def load_norms(self, state: dict[str, Any], num_workers: int) -> None:
        """Load the last measured norms; drop those of another number of workers."""
        norms: torch.Tensor | None = state.get("last_norms")
        of_these = norms is not None and norms.shape[1] == num_workers
        self.norms_step = state["norms_step"] if of_these else 0
        self.last_norms = norms.numpy() if norms is not None and of_these else None

    def refuse_amid_optimizers(self, call: str) -> None:
        """Raise if some optimizers have taken this step and others have not."""
        if self._begun:
            raise UserError(
                f"{call} must come between two steps of training, got it after the first of "
                f"{len(self._optimizers)} optimizers; let all of them take their step first"
            )

    def drain(self) -> None:
        """Wait for messages in flight; raise if parameters changed in the meantime."""
        self._check_unchanged()
        self._survived(lambda: self._mixer.drain())

    @contextlib.contextmanager
    def paused(self, call: str) -> Generator[None]:
        """Drain, and reject optimizer steps until the end of the block."""
        self.drain()
        outer, self.paused_by = self.paused_by, call
        try:
            yield
        finally:
            self.paused_by = outer

    def restart(self) -> None:
        """Discard the exchange in flight, and start it again from the current parameters."""

        def restart() -> None:
            self._mixer.discard()
            self._guard.check_trained()
            self._guard.renew()
            if self.num_steps > 0:
                with torch.no_grad():
                    self._algorithm.resume(self._context, self.num_steps)

        self._survived(restart)  # not repeated after a loss: the step is then local

    @contextlib.contextmanager
    def joined(self) -> Generator[None]:
        """After the block, continue to mix without updates until all ranks have left theirs."""
        if not self._algorithm.plain:
            raise UserError(
                f"join() continues with steps without a gradient, which {self._algorithm.name} "
                "needs; give all ranks the same number of batches, or use algorithm='awc' or 'atc'"
            )
        self.joining = True
        try:
            yield
            self._meter.training = False
            while self._meter.count_training():
                self._before_first_update()
                self._finish()
        finally:
            self.joining, self._meter.training = False, True

    def close(self) -> None:
        """Remove all hooks, wait for exchanges in flight, and release the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._wrappers.release()
        try:
            self._context.close()
        finally:
            self._guard.release()

    def _check_unchanged(self) -> None:
        if self._mixer.state is MixerState.IN_FLIGHT:
            self._guard.check_unchanged()
