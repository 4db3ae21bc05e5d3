"""The files of checkpoints in a folder: written atomically, verified when read.

    <folder>/step-00000120/rank-00003-<checksum>.safetensors      the state of rank 3
                           checkpoint.json                        the checksums of all ranks

Note [Atomic checkpoints]
Every file is written under a temporary name, synced to disk and renamed. The manifest is written
after all ranks have gathered their checksums, so if it exists, all files that it names exist. File
names contain checksums: saving a step again keeps the files of the first time until the new
manifest has replaced the old one. Removing a checkpoint removes its manifest first. Every rank
writes the manifest and removes old checkpoints, so the folder may be shared by all ranks or local
to each node. Ranks compare the manifests that they read before they use the files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, cast, final

from torch import Tensor

from gossamer.errors import UserError
from gossamer.files import read_bounded, sync_folder
from gossamer.gossip import snapshot

_MANIFEST = "checkpoint.json"
_VERSION = 1
_MANIFEST_BYTES = 2**22
"""The largest manifest that is read: about 200,000 ranks."""


class Found(NamedTuple):
    """A checkpoint that this rank has read."""

    folder: Path
    manifest_id: int
    num_workers: int
    state: snapshot.StateDict


def _weight_of(state: snapshot.StateDict) -> Callable[[snapshot.Place], float]:
    """Return the weight of each tensor of a worker in the average of all.

    Under push-sum parameters have the worker's weight. Moments and statistics do not: their means
    are plain, as all workers took the same number of steps.
    """
    gossip: Any = state.get("gossip")
    algorithm = gossip.get("algorithm") if isinstance(gossip, dict) else None
    kept: dict[str, Any] = algorithm if isinstance(algorithm, dict) else {}
    weight, weighed = kept.get("weight"), {*kept.get("weighed", ())}
    if not isinstance(weight, Tensor) or weight.numel() != 1:
        return lambda path: 1.0
    own = float(weight)
    # A path is ("objects", name of the object, key in its state).
    return lambda path: own if path[0] == "objects" and {*path[2:3]} & weighed else 1.0


@final
class CheckpointFolder:
    """One rank's view of the checkpoints in a folder; see Note [Atomic checkpoints].

    Args:
        path: the folder; it is created by the first save.
        rank: the rank whose part is written.
    """

    def __init__(self, path: Path, rank: int) -> None:
        if path.exists() and not path.is_dir():
            raise UserError(f"checkpoints need a folder, got {path}, a file; choose another name")
        self.path = path
        self._rank = rank

    def of(self, step: int) -> Path:
        """Return the folder of one step."""
        return self.path / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a folder, complete or not, oldest first."""
        found: list[int] = []
        for path in self.path.glob("step-*"):
            match = re.fullmatch(r"step-([0-9]{8,18})", path.name)
            # Never follow a link: files outside of the folder are not ours to read or remove.
            if match and self.of(int(match[1])) == path and _is_own_folder(path):
                found.append(int(match[1]))
        return sorted(found)

    def complete_steps(self) -> list[int]:
        """Return the steps whose checkpoint is complete on all ranks, oldest first."""
        return [step for step in self.steps() if (self.of(step) / _MANIFEST).exists()]

    def write_part(self, step: int, state: snapshot.StateDict) -> int:
        """Write this rank's part of a checkpoint; return its checksum."""
        folder = self.of(step)
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_own_folder(folder):
            raise UserError(
                f"a checkpoint needs a folder of its own, got {folder}, which is a link; remove "
                "it, or choose another folder"
            )
        checksum = snapshot.write(self._aside(folder), state)
        _publish(self._aside(folder), _part(folder, self._rank, checksum))
        return checksum

    def write_manifest(self, step: int, checksums: list[int]) -> None:
        """Complete a checkpoint, after all ranks have written their parts."""
        folder = self.of(step)
        self._aside(folder).unlink(missing_ok=True)
        with self._aside(folder).open("x") as file:
            file.write(_manifest_of(checksums))
            file.flush()
            os.fsync(file.fileno())
        _publish(self._aside(folder), folder / _MANIFEST)

    def read(self, step: int, num_workers: int) -> Found:
        """Read this rank's part of a checkpoint, or the average of all parts.

        Args:
            step: the step of the checkpoint.
            num_workers: if the checkpoint is of another number, the average is read.
        """
        folder = self.of(step)
        manifest_id = snapshot.checksum_of(folder / _MANIFEST)
        checksums = _read_manifest(folder / _MANIFEST)

        def read_part(rank: int) -> snapshot.StateDict:
            part = _part(folder, rank, checksums[rank])
            state = snapshot.read(part, checksums[rank])
            if not isinstance(state, dict):
                raise snapshot.DamagedError(f"{part} must hold a dict, got another state")
            return cast("snapshot.StateDict", state)

        if len(checksums) == num_workers:
            state = read_part(self._rank)
        else:
            state = snapshot.average(map(read_part, range(len(checksums))), _weight_of)
        return Found(folder, manifest_id, len(checksums), state)

    def remove_before(self, step: int, keep: int, damaged: Collection[int]) -> None:
        """Remove old checkpoints, incomplete ones included.

        Never one later than this step: another rank may already be writing it.

        Args:
            step: the step of the newest complete checkpoint.
            keep: the number of checkpoints to keep, not counting damaged ones.
            damaged: steps that could not be read.
        """
        usable = [s for s in self.complete_steps() if s <= step and s not in damaged]
        for saved in self.steps():
            if saved <= step and saved not in usable[-keep:]:
                self.remove(saved)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first: if interrupted, the rest is incomplete."""
        if self.of(step).is_symlink():
            return
        with contextlib.suppress(OSError):  # another rank may have been faster
            (self.of(step) / _MANIFEST).unlink()
        shutil.rmtree(self.of(step), ignore_errors=True)

    def remove_other_parts(self, step: int, checksum: int) -> None:
        """Remove the parts of this rank from earlier saves of a step."""
        folder = self.of(step)
        for path in folder.glob(f"{_prefix(self._rank)}*"):
            if path != _part(folder, self._rank, checksum):
                with contextlib.suppress(OSError):  # a folder, for example: not written by us
                    path.unlink()

    def _aside(self, folder: Path) -> Path:
        return folder / f"{_prefix(self._rank)}.part"


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _prefix(rank: int) -> str:
    return f"rank-{rank:05d}"


def _part(folder: Path, rank: int, checksum: int) -> Path:
    return folder / f"{_prefix(rank)}-{checksum:015x}.safetensors"


def _publish(aside: Path, final: Path) -> None:
    """Rename a synced file, and sync its folders: else a crash could lose the name."""
    os.replace(aside, final)
    for folder in (final.parent, final.parent.parent):
        sync_folder(folder)


def _manifest_of(checksums: list[int]) -> str:
    return json.dumps({"version": _VERSION, "checksums": [f"{c:015x}" for c in checksums]})


def _read_manifest(path: Path) -> list[int]:
    try:
        text = read_bounded(path, _MANIFEST_BYTES).decode()
        checksums = [int(checksum, 16) for checksum in json.loads(text)["checksums"]]
        if checksums and text == _manifest_of(checksums):
            return checksums
    except (ValueError, TypeError, LookupError, RecursionError):
        pass  # raises below
    raise snapshot.DamagedError(f"{path} is not a manifest of version {_VERSION}")
