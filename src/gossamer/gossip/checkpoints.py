"""Checkpoints of a run on all ranks: whole or not there, verified before anything is loaded.

    <folder>/step-00000120/rank-00003-<checksum>.safetensors      what rank 3 wrote
                           checkpoint.json                        the checksums of all ranks

Note [Whole or not there]
Every file is written aside, brought to the disk and renamed. The manifest comes when all ranks have
told each other their checksums, so where there is one, all files that it names are there. File
names contain checksums: saving a step again leaves the files of the first time as they are until
the new manifest has taken the place of the old one. What is removed loses its manifest first.
Every rank writes the manifest and removes what is old, so the folder may be one for all ranks or a
local one on each host. Ranks compare the manifests they read before they use what these name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

from gossamer.errors import UserError
from gossamer.gossip import snapshot
from gossamer.gossip.handle import Gossip

_log = logging.getLogger(__name__)

_MANIFEST = "checkpoint.json"
_VERSION = 1
_NOTHING = -1
"""What a rank sends where it has no checkpoint, or cannot read or write one."""


class Stateful(Protocol):
    """A model, an optimizer, a scheduler, or anything else that continues from a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Continue from a state."""
        ...


class _Found(NamedTuple):
    """A checkpoint that this rank has read."""

    folder: Path
    manifest_id: int
    num_workers: int
    state: snapshot.State


@final
class Checkpoints:
    """Saves a run in a folder, and continues it from there.

    Args:
        folder: one for all ranks, or on each host a local one that holds what its ranks wrote.
        gossip: whose ranks save together.
        keep: how many checkpoints stay; older ones are removed when a new one is whole.
        check_every: how often, in calls of ``interrupted()``, ranks tell each other whether they
            were interrupted.
        **objects: whatever has a state to save, by name: the model, each optimizer, a scheduler.
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
        self._folder = Path(folder)
        self._gossip = gossip
        self._objects = objects
        self._keep = keep
        self._restored = False
        self._passed_over: set[int] = set()
        # - Stopping all ranks at one step
        self._check_every = check_every
        self._num_asked = 0
        self._asked_to_stop = False
        self._stopping = False
        self._answers: Callable[[], list[int]] = list
        if self._folder.exists() and not self._folder.is_dir():
            raise UserError(f"checkpoints need a folder, got {folder}, a file; choose another name")
        for name, number in (("keep", keep), ("check_every", check_every)):
            if not isinstance(number, int) or number < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UserError(
                    f"{name} must be a whole number of at least 1, got {number}; leave it out for "
                    "the default, and give an object of that name another"
                )
        stateless = [name for name, thing in objects.items() if not _is_stateful(thing)]
        if stateless or not objects:
            raise UserError(
                "checkpoints need objects with state_dict() and load_state_dict(), got "
                f"{', '.join(stateless) or 'none'}; pass model=model, optimizer=optimizer"
            )

    # - Saving

    def save(self) -> None:
        """Save this step, after ``optimizer.step()``. A collective call.

        When it returns, the checkpoint is whole on all ranks. Where a rank cannot write its part,
        all ranks raise, and the checkpoints before stay.
        """
        step = self._gossip.num_steps
        folder = _folder_of(self._folder, step)
        with self._gossip.collective("Checkpoints.save()"):
            checksums = self._do_on_all(lambda: self._write_part(folder, step), folder)
            self._do_on_all(lambda: self._write_manifest(folder, checksums), folder)
            self._passed_over.discard(step)
            self._remove_old(step, _part(folder, self._gossip.rank, checksums[self._gossip.rank]))
        _log.info("saved step %d in %s", step, folder)

    def _do_on_all(self, part: Callable[[], int], folder: Path) -> list[int]:
        """Do this rank's part and return what all ranks got; raise on all where one fails."""
        try:
            result = part()
        except Exception:
            self._gossip.gather(_NOTHING)
            raise
        results = self._gossip.gather(result)
        failed = [rank for rank, result in enumerate(results) if result == _NOTHING]
        if failed:
            raise UserError(
                f"every rank must write its part of {folder}, and ranks {failed} could not; "
                "their errors say why"
            )
        return results

    def _write_part(self, folder: Path, step: int) -> int:
        self._check_history(step)
        state: snapshot.State = {
            "gossip": self._gossip.state_dict(),
            "objects": {name: thing.state_dict() for name, thing in self._objects.items()},
        }
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"{self._prefix}.part"
        checksum = snapshot.write(aside, state)
        _publish(aside, _part(folder, self._gossip.rank, checksum))
        return checksum

    def _write_manifest(self, folder: Path, checksums: list[int]) -> int:
        aside = folder / f"{self._prefix}.part"
        with aside.open("w") as file:
            file.write(_manifest_of(checksums))
            file.flush()
            os.fsync(file.fileno())
        _publish(aside, folder / _MANIFEST)
        return 0

    def _check_history(self, step: int) -> None:
        """Raise where a run would save among the checkpoints of another."""
        newest = max(self._whole_steps(), default=step)
        if newest > step and not self._restored:
            raise UserError(
                f"a run must continue from the newest checkpoint in its folder, got step {step} "
                f"to save in {self._folder}, which has step {newest}; call restore() before the "
                "loop, or choose another folder"
            )

    def _remove_old(self, step: int, own: Path) -> None:
        """Remove what this step makes superfluous, unfinished checkpoints among it.

        Nothing later than this step: another rank may already be writing the next one.
        """
        usable = [s for s in self._whole_steps() if s <= step and s not in self._passed_over]
        for saved, folder in self._folders().items():
            if saved <= step and saved not in usable[-self._keep :]:
                with contextlib.suppress(OSError):  # another rank may have been faster
                    (folder / _MANIFEST).unlink()
                shutil.rmtree(folder, ignore_errors=True)
        for path in own.parent.glob(f"{self._prefix}*"):
            if path != own:
                path.unlink()

    # - Restoring

    def restore(self) -> bool:
        """Continue from the newest checkpoint that is whole on all ranks. A collective call.

        Where a rank cannot read its part, which is logged, all ranks take the one before. A run of
        another number of workers continues from the average of its replicas.

        Returns:
            Whether there was one; where not, nothing has changed.
        """
        with self._gossip.collective("Checkpoints.restore()"):
            found = self._find()
        self._restored = True
        if found is not None:
            self._load(found)
        return found is not None

    def _find(self) -> _Found | None:
        self._passed_over.clear()
        while (step := self._newest_left()) != _NOTHING:
            folder = _folder_of(self._folder, step)
            found, reason = None, ""
            try:
                found = self._read(folder)
            except (OSError, snapshot.DamagedError) as error:
                reason = f": {error}"
            manifests = self._gossip.gather(_NOTHING if found is None else found.manifest_id)
            if found is not None and set(manifests) == {found.manifest_id}:
                return found
            self._passed_over.add(step)
            failed = [rank for rank, manifest in enumerate(manifests) if manifest == _NOTHING]
            _log.warning(
                "rank %d passes over %s, %s%s",
                self._gossip.rank,
                folder,
                f"which ranks {failed} cannot read" if failed else "whose manifests differ",
                reason,
            )
        if self._passed_over:
            raise UserError(
                f"one checkpoint in {self._folder} must be whole on all ranks, got damaged or "
                f"missing parts in all, at steps {sorted(self._passed_over)}; the log says which. "
                "Bring them back, or choose another folder to start from scratch"
            )
        return None

    def _newest_left(self) -> int:
        """Return the newest step that a rank has, older than those passed over."""
        oldest = min(self._passed_over, default=sys.maxsize)
        steps = [step for step in self._whole_steps() if step < oldest]
        return max(self._gossip.gather(max(steps, default=_NOTHING)))

    def _read(self, folder: Path) -> _Found:
        manifest_id = snapshot.checksum_of(folder / _MANIFEST)
        checksums = _read_manifest(folder / _MANIFEST)
        parts = [(_part(folder, rank, c), c) for rank, c in enumerate(checksums)]
        if len(parts) == self._gossip.num_workers:
            state = snapshot.read(*parts[self._gossip.rank])
        else:
            state = snapshot.average(snapshot.read(*part) for part in parts)
        return _Found(folder, manifest_id, len(parts), state)

    def _load(self, found: _Found) -> None:
        gossip, folder, state = self._gossip, found.folder, found.state
        if state["objects"].keys() != self._objects.keys():
            raise UserError(
                f"{folder} must be loaded into what was saved, {[*state['objects']]}, got "
                f"{[*self._objects]}; pass the same names to Checkpoints"
            )
        if found.num_workers != gossip.num_workers:
            _log.info(
                "resuming a run of %d workers on %d from the average of all replicas",
                found.num_workers,
                gossip.num_workers,
            )
            state["gossip"].update(num_workers=gossip.num_workers, rank=gossip.rank)
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
        """Let SIGTERM interrupt the run, and not end this process, until the block ends."""
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
        """Ask all ranks to stop; from any thread of any rank, as SIGTERM does."""
        self._asked_to_stop = True

    def interrupted(self) -> bool:
        """Return whether a rank was interrupted, at the same step on all ranks.

        Call it once per step, on all ranks. Every ``check_every`` calls ranks begin to tell each
        other, and read what they told the time before: that costs no waiting, and comes
        ``check_every`` to twice as many steps after the signal.
        """
        self._num_asked += 1
        if not self._stopping and self._num_asked % self._check_every == 0:
            self._stopping = any(self._answers())
            if not self._stopping:
                what = "every rank to say whether it was interrupted"
                self._answers = self._gossip.begin_gather(int(self._asked_to_stop), what)
        return self._stopping

    # - What is in the folder

    @property
    def _prefix(self) -> str:
        return f"rank-{self._gossip.rank:05d}"

    def _folders(self) -> dict[int, Path]:
        """Return the folders of all steps, whole or not, oldest first."""
        matches = [re.fullmatch(r"step-(\d+)", path.name) for path in self._folder.glob("step-*")]
        steps = sorted(int(match[1]) for match in matches if match)
        return {step: _folder_of(self._folder, step) for step in steps}

    def _whole_steps(self) -> list[int]:
        return [step for step, path in self._folders().items() if (path / _MANIFEST).exists()]


def _is_stateful(thing: object) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def _folder_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _part(folder: Path, rank: int, checksum: int) -> Path:
    return folder / f"rank-{rank:05d}-{checksum:015x}.safetensors"


def _publish(aside: Path, final: Path) -> None:
    """Give a file that is on the disk its name, there too."""
    os.replace(aside, final)
    for folder in (final.parent, final.parent.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _manifest_of(checksums: list[int]) -> str:
    return json.dumps({"version": _VERSION, "checksums": [f"{c:015x}" for c in checksums]})


def _read_manifest(path: Path) -> list[int]:
    try:
        text = path.read_text()
        checksums = [int(checksum, 16) for checksum in json.loads(text)["checksums"]]
        if checksums and text == _manifest_of(checksums):
            return checksums
    except (ValueError, TypeError, LookupError):
        pass  # said below
    raise snapshot.DamagedError(f"{path} is not a manifest of version {_VERSION}")
