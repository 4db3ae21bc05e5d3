"""Checkpoints within a run: an interrupted run resumes in the middle, bit for bit.

Every few minutes the complete state of a run is saved: the position of the loop, the workers, and
the records so far. A run that finds such a checkpoint yields its records, loads the rest, and takes
the next step. So its records are those of a run that was never interrupted, except for times: steps
after the checkpoint are repeated, and counted once.

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
"""Sentinel step of a process that has no checkpoint, or cannot read or write one."""

EVERY_S = 180.0
"""Default seconds between two checkpoints."""


class Checkpointing(NamedTuple):
    """Where a run stores its checkpoint, and how often it saves."""

    folder: Path
    """Used by this run only; shared by all processes, or local to each node."""

    every_s: float = EVERY_S
    """Most seconds between two, so the most work that is lost, plus a step or an evaluation."""

    @property
    def step(self) -> int | None:
        """The newest step that has been saved; None where there is none."""
        return max(CheckpointFolder(self.folder, 0).complete_steps(), default=None)


class Clock(Protocol):
    """The progress of a run."""

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
        """Return every process's value. A collective."""
        ...

    def slowest(self, seconds: float) -> float:
        """Return the longest time of all processes. A collective."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the workers in this process."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. A collective."""
        ...


@final
class RunCheckpoints:
    """The checkpoint of one run; the previous one is removed when the new one is complete.

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
        """The records so far; on the first process only, whose records are used."""
        self._renew()

    def note(self, record: Record) -> None:
        """Keep a record for the next checkpoint.

        Not norms, which are too large to write at every checkpoint: the reader has stored them.
        """
        if self._workers.rank == 0 and not isinstance(record, Norms):
            self._lines.append(to_line(record))

    # - Saving

    def save_where_due(self) -> None:
        """Save, if the next step would end after the interval. Call it before every step.

        Processes must agree on that by a collective, which synchronizes them; so they do it
        rarely, about when half of the remaining time has passed.
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
        """Write a checkpoint; if any process fails to, the previous one stays valid."""
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
        # Removed only after all processes have saved: until then one may need it to resume.
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

    # - Resuming

    def restore(self) -> Iterator[Record]:
        """Resume from the newest checkpoint that all processes can read; yield its records.

        Without one nothing has changed, and the run starts from the beginning.
        """
        found = self._find()
        for step in self._folder.steps():
            if found is None or self._folder.of(step) != found.folder:
                self._folder.remove(step)
        self._workers.gather(0)  # a barrier: no process may save while another removes
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
        """Return the newest step of which any process has a complete checkpoint."""
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
