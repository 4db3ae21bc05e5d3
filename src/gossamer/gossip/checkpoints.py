"""Checkpoints of a run: all ranks save and restore the same step, or none does.

``checkpoint_folder`` has the layout of the files, ``snapshot`` the content of each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol, TypeVar, final

from gossamer.errors import UserError
from gossamer.gossip.checkpoint_folder import CheckpointFolder, Found
from gossamer.gossip.epochs import without_frames
from gossamer.gossip.failures import ExchangeError
from gossamer.gossip.gossip import Gossip, worker_of
from gossamer.gossip.snapshot import DamagedError, StateDict

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_NOTHING = -1
"""Gathered from a rank that has no checkpoint, or cannot read or write one."""


class Stateful(Protocol):
    """A model, an optimizer, a scheduler, or any other object with a state to save."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Load a state that ``state_dict`` returned."""
        ...


@final
class Checkpoints:
    """Saves checkpoints of a run in a folder, and resumes from them.

    Args:
        folder: shared by all ranks, or a local one on each node for the files of its ranks.
        gossip: the handle of the run; its ranks save together.
        keep: the number of checkpoints to keep; older ones are removed when a new one is complete.
        check_every: the number of steps between two comparisons of ``interrupted()`` across ranks.
        **objects: the objects to save, by name: the model, each optimizer, a scheduler.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        gossip: Gossip,
        /,
        *,
        keep: int = 3,
        check_every: int = 10,
        **objects: Stateful,
    ) -> None:
        self._gossip = gossip
        self._worker = worker_of(gossip)
        if self._worker.replica.is_sharded:
            raise UserError(
                "Checkpoints needs a full replica on each rank, got shards of FSDP2; save them "
                "by torch.distributed.checkpoint, as docs/fsdp.md shows"
            )
        self._path = Path(folder)
        CheckpointFolder(self._path, gossip.rank)  # raises now where the path cannot be a folder
        self._objects = objects
        self._keep = keep
        self._restored = False
        self._passed_over: set[int] = set()
        # - Stopping all ranks at one step
        self._check_every = check_every
        self._stop_requested = False
        self._stopping = False
        self._flags: Callable[[], list[int]] = list
        for name, number in (("keep", keep), ("check_every", check_every)):
            if not isinstance(number, int) or number < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UserError(
                    f"{name} must be an integer of at least 1, got {number}; leave it out for the "
                    "default, and rename an object of that name"
                )
        stateless = [name for name, thing in objects.items() if not _is_stateful(thing)]
        if stateless or not objects:
            raise UserError(
                "checkpoints need objects with state_dict() and load_state_dict(), got "
                f"{', '.join(stateless) or 'none'}; pass model=model, optimizer=optimizer"
            )

    @property
    def _folder(self) -> CheckpointFolder:
        return CheckpointFolder(self._path, self._gossip.rank)  # the rank changes with the epoch

    # - Saving

    def save(self) -> None:
        """Save a checkpoint of this step, after ``optimizer.step()``. A collective call.

        When it returns, the checkpoint is complete on all ranks. If a rank cannot write its part,
        all ranks raise, and earlier checkpoints stay.
        """
        step = self._gossip.num_steps

        def save() -> None:
            checksums = self._do_on_all(lambda: self._write_part(step), step)
            self._do_on_all(lambda: self._folder.write_manifest(step, checksums), step)
            self._passed_over.discard(step)
            self._folder.remove_before(step, self._keep, self._passed_over)
            self._folder.remove_other_parts(step, checksums[self._gossip.rank])

        self._worker.together("Checkpoints.save()", save)
        _log.info("saved step %d in %s", step, self._folder.of(step))

    def _do_on_all(self, part: Callable[[], int | None], step: int) -> list[int]:
        """Run this rank's part, and return the results of all; raise on all ranks if one fails."""
        try:
            result = part() or 0
        except Exception:
            self._worker.gather(_NOTHING)  # the others wait in the same gather, below
            raise
        results = self._worker.gather(result)
        failed = [rank for rank, result in enumerate(results) if result == _NOTHING]
        if failed:
            raise UserError(
                f"every rank must write its part of {self._folder.of(step)}, and ranks {failed} "
                "could not; their errors say why"
            )
        return results

    def _write_part(self, step: int) -> int:
        self._check_history(step)
        state: StateDict = {
            "gossip": self._gossip.state_dict(),
            "objects": {name: thing.state_dict() for name, thing in self._objects.items()},
        }
        return self._folder.write_part(step, state)

    def _check_history(self, step: int) -> None:
        """Raise if the folder has later checkpoints that this run did not resume from."""
        newest = max(self._folder.complete_steps(), default=step)
        if newest > step and not self._restored:
            raise UserError(
                f"a run must continue from the newest checkpoint in its folder, got step {step} "
                f"to save in {self._folder.path}, which has step {newest}; call restore() before "
                "the loop, or choose another folder"
            )

    # - Restoring

    def restore(self) -> bool:
        """Resume from the newest checkpoint that is complete on all ranks. A collective call.

        If a rank cannot read its part, which is logged, all ranks fall back to the checkpoint
        before it. On another number of workers, the run continues from the average of the saved
        replicas. A worker that has just joined has its state from its donor, and reads nothing.

        Returns:
            Whether a checkpoint was found. If not, nothing has changed.
        """
        if self._worker.step.has_just_joined:
            self._restored = True
            return True
        found = self._worker.together("Checkpoints.restore()", self._find)
        self._restored = True
        if found is not None:
            self._load(found)
        return found is not None

    def _find(self) -> Found | None:
        self._passed_over.clear()
        # Every rank runs the loop equally often, because it ends by gathered values only: ranks
        # that gather different numbers of times would deadlock.
        while (step := self._newest_left()) != _NOTHING:
            found, reason = None, ""
            try:
                found = _checked(self._folder.read(step, self._gossip.num_workers))
            except (OSError, DamagedError) as error:
                reason = f": {error}"
            manifests = self._worker.gather(_NOTHING if found is None else found.manifest_id)
            if found is not None and set(manifests) == {found.manifest_id}:
                return found
            self._passed_over.add(step)
            failed = [rank for rank, manifest in enumerate(manifests) if manifest == _NOTHING]
            _log.warning(
                "rank %d passes over %s, %s%s",
                self._gossip.rank,
                self._folder.of(step),
                f"which ranks {failed} cannot read" if failed else "whose manifests differ",
                reason,
            )
        if self._passed_over:
            raise UserError(
                f"a checkpoint in {self._folder.path} must be complete on all ranks, got damaged "
                f"or missing parts in all, at steps {sorted(self._passed_over)}; the log says "
                "which. Copy them back, or choose another folder to start from scratch"
            )
        return None

    def _newest_left(self) -> int:
        """Return the newest step that any rank has, older than those passed over."""
        oldest = min(self._passed_over, default=sys.maxsize)
        steps = [step for step in self._folder.complete_steps() if step < oldest]
        return max(self._worker.gather(max(steps, default=_NOTHING)))

    def _load(self, found: Found) -> None:
        gossip, folder, state = self._gossip, found.folder, found.state
        if state["objects"].keys() != self._objects.keys():
            raise UserError(
                f"{folder} must be loaded into the objects that it has, {[*state['objects']]}, got "
                f"{[*self._objects]}; pass the same names to Checkpoints"
            )
        if found.num_workers != gossip.num_workers:
            _log.info(
                "resuming a run of %d workers on %d from the average of all replicas",
                found.num_workers,
                gossip.num_workers,
            )
            state["gossip"].update(num_workers=gossip.num_workers, rank=gossip.rank)
            for kept in ("algorithm", "wire"):  # belongs to the saved workers: reset
                state["gossip"].pop(kept, None)
        with gossip.drained(keep_changes=True):
            for name, thing in self._objects.items():
                try:
                    thing.load_state_dict(state["objects"][name])
                except Exception as error:
                    error.add_note(f"while {name} was loaded from {folder}")
                    raise
            gossip.load_state_dict(state["gossip"])
        _log.info("restored step %d from %s", gossip.num_steps, folder)

    # - Stopping all ranks at one step

    @contextlib.contextmanager
    def on_sigterm(self) -> Generator[None]:
        """Call ``interrupt()`` on SIGTERM, instead of ending the process, during the block."""
        if threading.current_thread() is not threading.main_thread():
            raise UserError(
                "signals arrive in the main thread, got on_sigterm() in another one; install a "
                "handler there that calls interrupt()"
            )
        before = signal.signal(signal.SIGTERM, lambda *_: self.interrupt())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def interrupt(self) -> None:
        """Request that all ranks stop; callable from any thread of any rank, as by SIGTERM."""
        self._stop_requested = True

    def interrupted(self) -> bool:
        """Return whether a rank was interrupted, at the same step on all ranks.

        Call it once per step, on all ranks. Every ``check_every`` steps ranks start an all-gather
        of their flags, and read the result of the one before. So it does not block, and returns
        True ``check_every`` to twice as many steps after the signal.
        """
        # By the step, not by a count of calls: a worker that joined has made fewer of them, and
        # ranks that start the all-gather at different steps would deadlock.
        if not self._stopping and self._gossip.num_steps % self._check_every == 0:
            # Each rank has the flags of its own place in every node. The ranks of a node must
            # stop at the same step, or the gradient all-reduce within the node would deadlock.
            requested = self._unless_lost(lambda: int(any(self._flags())), 0)
            self._stopping = any(self._worker.within.gather(requested, "whether to stop"))
            if not self._stopping:
                self._flags = self._unless_lost(self._begin_gathering_flags, list)
        return self._stopping

    def _begin_gathering_flags(self) -> Callable[[], list[int]]:
        if self._worker.step.is_alone:
            return list
        what = "whether a rank was interrupted"
        return self._worker.begin_gather(int(self._stop_requested), what)

    def _unless_lost(self, part: Callable[[], _Result], otherwise: _Result) -> _Result:
        """Return the result of a part, or ``otherwise`` if a worker was lost during it.

        The next step starts an epoch of the survivors, which gather their flags again.
        """
        try:
            return part()
        except ExchangeError as error:
            if not self._worker.epochs.takes(error):
                raise
            without_frames(error)
            return otherwise


_GOSSIP_KEYS = {"num_workers", "rank", "topology", "num_steps", "control"}


def _checked(found: Found) -> Found:
    """Validate that a checkpoint holds a gossip and objects; another file may have its format."""
    objects, gossip = found.state.get("objects"), found.state.get("gossip")
    if not isinstance(objects, dict) or not isinstance(gossip, dict) or _GOSSIP_KEYS - {*gossip}:
        raise DamagedError(f"{found.folder} must hold a gossip and its objects, got other keys")
    return found


def _is_stateful(thing: object) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))
