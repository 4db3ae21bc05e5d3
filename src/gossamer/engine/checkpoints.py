"""A run that goes on inside itself after it was cut off, bit for bit.

Every few minutes all of a run is saved: where the loop is, what the workers hold, and the records
so far. A run that finds such a checkpoint yields the records in it once more, loads the rest, and
takes the next step. So whoever reads its records sees what a run shows that was never cut off.
Times alone differ: what was spent after the checkpoint is spent again, and counted once.

    <folder>/step-00000120/rank-00000-<checksum>.safetensors    see gossip.checkpoint_folder
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

from gossamer.engine.environment import environment
from gossamer.errors import UserError
from gossamer.gossip.checkpoint_folder import CheckpointFolder, Found
from gossamer.gossip.snapshot import DamagedError
from gossamer.records import Norms, Record, from_line, to_line

_log = logging.getLogger(__name__)

_VERSION = 2
_NOTHING = -1
"""What a process sends where it has no checkpoint, or cannot read or write one."""

EVERY_S = 180.0
"""Seconds between two checkpoints, where nothing else is asked for."""


class Checkpointing(NamedTuple):
    """Where a run keeps its checkpoint, and how often it makes one."""

    folder: Path
    """Of this run alone; one for all processes, or on each node a local one."""

    every_s: float = EVERY_S
    """Most seconds between two, so most that is lost, besides a step or an evaluation."""

    @property
    def step(self) -> int | None:
        """The newest step that has been saved; None where there is none."""
        return max(CheckpointFolder(self.folder, 0).complete_steps(), default=None)


class Clock(Protocol):
    """How far a run is."""

    step: int

    def state_dict(self) -> dict[str, Any]:
        """Return what continues it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        ...


class Saved(Protocol):
    """The workers of a run, here and in other processes that take its steps together."""

    @property
    def rank(self) -> int:
        """The index of this process among those that train."""
        ...

    def gather(self, value: int) -> list[int]:
        """Return every process's number. A collective call."""
        ...

    def slowest(self, seconds: float) -> float:
        """Return the longest of all processes' times. A collective call."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the workers that live in this process."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. A collective call."""
        ...


@final
class RunCheckpoints:
    """The checkpoint of one run: at most one is kept, and the one before until it is complete.

    Args:
        run_id: the specification's; a checkpoint of another run is never used.
        clock: how far the run is.
        workers: what it trains.
        where: the folder, and the interval.
    """

    def __init__(self, run_id: str, clock: Clock, workers: Saved, where: Checkpointing) -> None:
        self._facts = {
            "version": _VERSION,
            "run_id": run_id,
            **{name: environment()[name] for name in ("gossamer", "torch")},
        }
        self._clock = clock
        self._workers = workers
        self._every_s = where.every_s
        self._folder = CheckpointFolder(where.folder, workers.rank)
        self._lines: list[str] = []
        """The records so far; on the first process, which is the one that is heard."""
        self._renew()

    def note(self, record: Record) -> None:
        """Keep a record that the run has yielded, for the next checkpoint.

        Norms are too many to write again and again: whoever keeps them has them on the disk.
        """
        if self._workers.rank == 0 and not isinstance(record, Norms):
            self._lines.append(to_line(record))

    # - Saving

    def save_where_due(self) -> None:
        """Save, if the next step would end after the interval. Call it before every step.

        Processes must agree on that, and to agree is to wait for each other; so they ask rarely,
        about when half of the time that is left will be over.
        """
        step = self._clock.step
        if step < self._ask_at:
            return
        passed_s = self._workers.slowest(time.monotonic() - self._renewed_at)
        taken = step - self._renewed_step
        left = taken * (self._every_s - passed_s) / max(passed_s, 1e-9)  # in steps
        if left < 1:
            self._save(step)
            self._renew()
        else:
            self._ask_at = step + max(1, min(taken, int(left / 2)))

    def _renew(self) -> None:
        self._renewed_at = time.monotonic()
        self._renewed_step = self._clock.step
        self._ask_at = self._renewed_step + 1

    def _save(self, step: int) -> None:
        """Write a checkpoint; where a process cannot, the run goes on with the one before."""
        folder = self._folder
        try:
            checksum = folder.write_part(step, self._state())
        except (OSError, UserError) as error:
            _log.warning("the run goes on without a checkpoint of step %d: %s", step, error)
            checksum = _NOTHING
        checksums = self._workers.gather(checksum)
        try:
            complete = _NOTHING not in checksums
            if complete:
                folder.write_manifest(step, checksums)
        except OSError as error:
            _log.warning("the run goes on without a checkpoint of step %d: %s", step, error)
            complete = False
        # The one before goes when no process needs it any more.
        if _NOTHING in self._workers.gather(0 if complete else _NOTHING):
            folder.remove(step)
            return
        folder.remove_before(step, 1, ())
        folder.remove_other_parts(step, checksum)

    def _state(self) -> dict[str, Any]:
        return {
            **self._facts,
            "clock": self._clock.state_dict(),
            "workers": self._workers.state_dict(),
            "records": "\n".join(self._lines),
        }

    # - Going on

    def restore(self) -> Iterator[Record]:
        """Go on from the newest checkpoint that all processes can read; yield its records.

        Where there is none nothing has changed, and the run starts from its beginning.
        """
        found = self._find()
        for step in self._folder.steps():
            if found is None or self._folder.of(step) != found.folder:
                self._folder.remove(step)
        self._workers.gather(0)  # no process saves while another still removes
        if found is None:
            return
        self._workers.load_state_dict(found.state["workers"])
        self._clock.load_state_dict(found.state["clock"])
        self._lines = found.state["records"].splitlines()
        self._renew()
        _log.info("the run goes on from step %d", self._clock.step)
        yield from map(from_line, [*self._lines])

    def _find(self) -> Found | None:
        num_processes = len(self._workers.gather(0))
        older_than = None
        while (step := self._newest(older_than)) != _NOTHING:
            older_than = step
            found, reason = self._read(step, num_processes)
            manifests = self._workers.gather(_NOTHING if found is None else found.manifest_id)
            if found is not None and set(manifests) == {found.manifest_id}:
                return found
            _log.warning(
                "passing over %s, %s",
                self._folder.of(step),
                reason or "which another process cannot read, or has another one of",
            )
        return None

    def _newest(self, older_than: int | None) -> int:
        """Return the newest step that a process has a complete checkpoint of."""
        steps = self._folder.complete_steps()
        left = [step for step in steps if older_than is None or step < older_than]
        return max(self._workers.gather(max(left, default=_NOTHING)))

    def _read(self, step: int, num_processes: int) -> tuple[Found | None, str]:
        """Return the checkpoint of a step, or why it cannot be used."""
        try:
            found = self._folder.read(step, num_processes)
        except (OSError, DamagedError) as error:
            return None, f"which is damaged: {error}"
        for name, ours in self._facts.items():
            if found.state.get(name) != ours:
                return None, f"whose {name} is {found.state.get(name)} and not {ours}"
        if missing := {"clock", "workers", "records"} - found.state.keys():
            return None, f"which has no {', '.join(sorted(missing))}"
        return found, ""
