"""A run that stops at any point resumes as if it had not; ranks are threads where possible."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import MultiStepLR

from gossamer import Checkpoints, decentralize
from gossamer.errors import UserError
from gossamer.gossip import ExchangeError, Gossip, snapshot
from gossamer.gossip.step import Step
from tests.pool import ProcessPool
from tests.ranks import run_ranks
from tests.reference import ALL_OPTIMIZERS, ORDERS, loss_of, make_model, vector_of


class Run:
    """One rank of a training run, with checkpoints."""

    def __init__(
        self,
        group: ProcessGroup | None,
        folder: Path,
        topology: str = "ring",
        order: str = "awc",
        optimizer: str = "adamw",
        **options: Any,
    ) -> None:
        self.model = make_model()
        self.optimizer = ALL_OPTIMIZERS[optimizer](self.model.parameters())
        self.gossip = decentralize(
            self.model, self.optimizer, topology, process_group=group, order=order
        )
        self.checkpoints = Checkpoints(
            folder, self.gossip, model=self.model, optimizer=self.optimizer, **options
        )

    def train_to(self, num_steps: int, *, save_at: tuple[int, ...] = ()) -> Run:
        """Train up to a number of steps; save after some of them."""
        while self.gossip.num_steps < num_steps:
            self.optimizer.zero_grad()
            loss_of(self.model, self.gossip.rank, self.gossip.num_steps).backward()
            self.optimizer.step()
            if self.gossip.num_steps in save_at:
                self.checkpoints.save()
        return self

    def end(self) -> Tensor:
        """End gossip; return this worker's parameters."""
        self.gossip.close()
        return vector_of(self.model)


def saved_at(folder: Path) -> list[int]:
    """Return the steps in a folder, complete or not."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# - Continuing


@pytest.mark.parametrize("optimizer", ["sgd_nesterov", "adamw", "accum_adamw", "smooth_adamw"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("num_ranks", "topology"),
    [(4, "one_peer_exponential"), (6, "base_graph(k=2)"), (5, "exponential")],
    ids=["pairs", "groups", "several_senders"],
)
def test_a_run_continues_bit_for_bit(
    num_ranks: int, topology: str, order: str, optimizer: str, tmp_path: Path
) -> None:
    """Saved after 4 steps and restored in another run, it ends where the uninterrupted run does."""

    def uninterrupted(group: ProcessGroup) -> Tensor:
        return Run(group, tmp_path, topology, order, optimizer).train_to(8, save_at=(4,)).end()

    def resumed(group: ProcessGroup) -> Tensor:
        run = Run(group, tmp_path, topology, order, optimizer)
        assert run.checkpoints.restore()
        assert run.gossip.num_steps == 4
        return run.train_to(8).end()

    assert equal(run_ranks(num_ranks, uninterrupted), run_ranks(num_ranks, resumed))


def continued_by_hand(group: ProcessGroup, order: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Return the end of a run, and of one that loaded its state after 3 steps."""
    run = Run(group, folder, "exponential", order).train_to(3)
    saved = copy.deepcopy(
        [run.model.state_dict(), run.optimizer.state_dict(), run.gossip.state_dict()]
    )
    end = run.train_to(7).end()
    other = Run(group, folder, "exponential", order)
    for thing, state in zip((other.model, other.optimizer, other.gossip), saved, strict=True):
        thing.load_state_dict(state)
    return end, other.train_to(7).end()


@pytest.mark.parametrize("order", ORDERS)
def test_the_states_alone_continue_a_run(order: str, tmp_path: Path) -> None:
    """gossip.load_state_dict() after the model's and the optimizer's is sufficient."""
    for end, continued in run_ranks(4, lambda group: continued_by_hand(group, order, tmp_path)):
        assert torch.equal(end, continued)


def test_the_exchange_must_start_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without that the first step after loading is not mixed, and the tests above fail."""
    restart = Step.restart

    def without_exchange(step: Step) -> None:
        restart(step)
        step._mixer.discard()

    monkeypatch.setattr(Step, "restart", without_exchange)
    for end, continued in run_ranks(4, lambda group: continued_by_hand(group, "awc", tmp_path)):
        assert not torch.equal(end, continued)


@pytest.mark.parametrize("order", ORDERS)
def test_a_running_gossip_can_go_back(order: str, tmp_path: Path) -> None:
    """restore() in the middle of a run, with an exchange in flight, repeats the same steps."""

    def body(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        run = Run(group, tmp_path, order=order).train_to(7, save_at=(3,))
        first = vector_of(run.model).clone()
        assert run.checkpoints.restore()
        return first, run.train_to(7).end()

    for first, again in run_ranks(4, body):
        assert torch.equal(first, again)


def test_saving_does_not_change_a_run(tmp_path: Path) -> None:
    """A run with a checkpoint after every step ends where one without does."""
    plain = run_ranks(3, lambda group: Run(group, tmp_path).train_to(5).end())
    every = (1, 2, 3, 4, 5)
    saving = run_ranks(3, lambda group: Run(group, tmp_path).train_to(5, save_at=every).end())
    assert equal(plain, saving)


class Convolutions(nn.Module):
    """Mixed statistics, weights in another memory format, tied and half-precision ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 1)
        self.third = nn.Conv2d(8, 8, 1)
        self.third.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.3, generator=generator)

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        return self.third(self.second(self.norm(self.first(images))).relu()) * self.scale.float()


@pytest.mark.parametrize("order", ORDERS)
def test_all_of_a_models_state_continues(order: str, tmp_path: Path) -> None:
    """Mixed statistics, memory formats, ties, bf16, two optimizers and a scheduler."""

    def train(group: ProcessGroup, *, resume: bool) -> list[Tensor]:
        model = Convolutions()
        convolutions = [p for p in model.parameters() if p.dim() == 4]
        others = [p for p in model.parameters() if p.dim() < 4]
        heavy, light = SGD(convolutions, lr=0.1, momentum=0.9), AdamW(others, lr=0.01)
        scheduler = MultiStepLR(heavy, [2, 5])
        gossip = decentralize(
            model, [heavy, light], "ring", process_group=group, order=order, buffers="mix"
        )
        saved = Checkpoints(
            tmp_path, gossip, model=model, heavy=heavy, light=light, scheduler=scheduler
        )
        assert saved.restore() == resume
        while gossip.num_steps < 7:
            seed = 100 * group.rank() + gossip.num_steps
            images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
            model.zero_grad()
            model(images).square().mean().backward()
            heavy.step()
            light.step()
            scheduler.step()
            if gossip.num_steps == 3:
                saved.save()
        gossip.close()
        moments = [state["momentum_buffer"] for state in heavy.state.values()]
        assert moments[0].is_contiguous(memory_format=torch.channels_last)
        return [*model.state_dict().values(), *moments]

    ends = run_ranks(3, lambda group: train(group, resume=False))
    for end, continued in zip(ends, run_ranks(3, lambda g: train(g, resume=True)), strict=True):
        assert equal(end, continued)


# - Damage


def flip(path: Path, places: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[places.randrange(len(content))] ^= 1 << places.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, places: random.Random) -> None:
    os.truncate(path, places.randrange(path.stat().st_size))


def remove(path: Path, places: random.Random) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip, truncate, remove])
def test_a_damaged_checkpoint_is_passed_over(
    damage: Callable[[Path, random.Random], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For damage in any file: all ranks fall back to the one before, and the log names it."""
    ends = run_ranks(2, lambda group: Run(group, tmp_path).train_to(6, save_at=(2, 4)).end())
    newest = tmp_path / "step-00000004"
    shutil.copytree(newest, tmp_path / "spare")
    places = random.Random(5)
    barrier = threading.Barrier(2)

    def body(group: ProcessGroup) -> Tensor:
        run = Run(group, tmp_path)
        for attempt in range(12):
            damaged = sorted(newest.iterdir())[attempt % 3]
            barrier.wait()
            if group.rank() == 0:
                caplog.clear()
                damage(damaged, places)
            barrier.wait()
            assert run.checkpoints.restore()
            assert run.gossip.num_steps == 2
            barrier.wait()
            if group.rank() == 0:
                if damaged.exists() or damaged.suffix != ".json":
                    assert any(str(damaged) in message for message in caplog.messages)
                shutil.copytree(tmp_path / "spare", newest, dirs_exist_ok=True)
            barrier.wait()
        return run.train_to(6).end()

    assert equal(run_ranks(2, body), ends)


def test_where_none_is_whole_the_run_does_not_start(tmp_path: Path) -> None:
    """Starting from scratch by accident would cost the run; an empty folder is fine."""

    def body(group: ProcessGroup) -> None:
        run = Run(group, tmp_path / "run")
        before = vector_of(run.model).clone()
        assert not run.checkpoints.restore()
        assert torch.equal(before, vector_of(run.model))
        run.train_to(2, save_at=(1, 2))
        for path in (tmp_path / "run").glob(f"*/rank-{group.rank():05d}*"):
            path.unlink()
        run.gossip.gather(0)  # so that none reads what another has yet to remove
        with pytest.raises(
            UserError, match=r"got damaged or missing parts in all, at steps \[1, 2\]"
        ):
            run.checkpoints.restore()
        run.end()

    run_ranks(2, body)


@pytest.mark.parametrize("found", ["a pipe", "brackets", "a million", "a list", "no keys", "text"])
def test_whatever_a_damaged_checkpoint_raises_the_one_before_is_taken(
    found: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe does not block, and no error of JSON, safetensors or Python escapes."""

    def write_part(folder: Path, state: Any) -> None:
        """Replace the only part by another state, with a matching checksum."""
        checksum = snapshot.write(folder / "new", state)
        _name_part(folder, checksum)

    def damage(folder: Path) -> None:
        manifest = folder / "checkpoint.json"
        if found == "a pipe":
            manifest.unlink()
            os.mkfifo(manifest)
        elif found == "brackets":
            manifest.write_text("[" * 200_000)
        elif found == "a million":
            manifest.write_text(json.dumps({"version": 1, "checksums": ["0" * 15] * 10**6}))
        elif found == "a list":
            write_part(folder, [1, 2])
        elif found == "no keys":
            write_part(folder, {"other": 1})
        else:  # a file of the right checksum that is none of safetensors
            (folder / "new").write_text("no tensors")
            _name_part(folder, snapshot.checksum_of(folder / "new"))

    def body(group: ProcessGroup) -> int:
        run = Run(group, tmp_path).train_to(4, save_at=(2, 4))
        damage(tmp_path / "step-00000004")
        run.end()
        other = Run(group, tmp_path)
        assert other.checkpoints.restore()
        other.end()
        return other.gossip.num_steps

    began = time.monotonic()
    assert run_ranks(1, body) == [2]
    assert time.monotonic() - began < 10
    assert "passes over" in caplog.text


def _name_part(folder: Path, checksum: int) -> None:
    (part,) = folder.glob("rank-00000-*")
    part.unlink()
    (folder / "new").rename(folder / f"rank-00000-{checksum:015x}.safetensors")
    (folder / "checkpoint.json").write_text(
        json.dumps({"version": 1, "checksums": [f"{checksum:015x}"]})
    )


def test_a_link_among_the_steps_is_neither_read_nor_removed(tmp_path: Path) -> None:
    """Its target belongs to another run, whose checkpoints stay unchanged."""

    def body(group: ProcessGroup) -> None:
        Run(group, tmp_path / "theirs").train_to(1, save_at=(1,)).end()
        (tmp_path / "ours").mkdir()
        link = tmp_path / "ours" / "step-00000001"
        link.symlink_to(tmp_path / "theirs" / "step-00000001")
        run = Run(group, tmp_path / "ours", keep=1)
        assert not run.checkpoints.restore()
        run.train_to(3, save_at=(2, 3)).end()
        assert link.is_symlink()
        with pytest.raises(UserError, match="which is a link"):
            Run(group, tmp_path / "ours").train_to(1).checkpoints._folder.write_part(1, {})

    run_ranks(1, body)
    theirs = tmp_path / "theirs" / "step-00000001"
    assert (theirs / "checkpoint.json").exists()
    assert len([*theirs.iterdir()]) == 2


def test_a_full_disk_is_said_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bytes needed and a remedy; no partial file stays."""

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(snapshot, "save_file", full)

    def body(group: ProcessGroup) -> None:
        run = Run(group, tmp_path).train_to(1)
        with pytest.raises(
            OSError, match=r"bytes must be written .* No space left .*free disk space"
        ):
            run.checkpoints.save()
        run.end()

    run_ranks(1, body)
    assert [*tmp_path.glob("step-*/*")] == []


class Disk:
    """Calls that change the disk, one of which fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls_left = 10**9
        for module, name in ((os, "replace"), (os, "fsync"), (snapshot, "save_file")):
            monkeypatch.setattr(module, name, self._failing(getattr(module, name)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls_left -= 1
            if self.calls_left == 0:
                raise OSError("no space left on device")
            return call(*args, **kwargs)

        return run

    def fail_at(self, call: int, gossip: Gossip) -> None:
        """Make the n-th call from now fail, after all ranks have reached this point."""
        gossip.gather(0)
        self.calls_left = call
        gossip.gather(0)


def save_fails(run: Run) -> bool:
    try:
        run.checkpoints.save()
    except OSError as error:
        return "no space left on device" in str(error)
    except UserError as error:
        return "every rank must write its part" in str(error)
    return False


def test_a_crash_anywhere_in_a_save_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If any call that changes the disk fails on any rank, all raise, and training can continue."""
    disk = Disk(monkeypatch)

    def body(group: ProcessGroup) -> int:
        run = Run(group, tmp_path, keep=1).train_to(4, save_at=(2,))
        failed, crash_at = True, 0
        while failed:
            crash_at += 1
            disk.fail_at(crash_at, run.gossip)
            failed = save_fails(run)
            other = Run(group, tmp_path)
            assert other.checkpoints.restore()
            assert torch.equal(other.train_to(6).end(), ends[group.rank()])
        run.end()
        return crash_at

    ends = run_ranks(2, lambda group: Run(group, tmp_path / "other").train_to(6).end())
    tried, _ = run_ranks(2, body)
    assert tried > 2 * (1 + 1 + 1 + 2)  # a part is written, synchronized and renamed, and so on
    assert saved_at(tmp_path) == [4]


def test_a_step_that_is_saved_again_is_there_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash leaves the first or the second save, the same on all ranks."""
    disk = Disk(monkeypatch)

    def body(group: ProcessGroup) -> list[int]:
        run = Run(group, tmp_path, keep=1).train_to(2, save_at=(2,))
        seen: list[int] = []
        failed = True
        while failed:
            run.optimizer.param_groups[0]["lr"] = 1 + len(seen)
            disk.fail_at(1 + len(seen), run.gossip)
            failed = save_fails(run)
            other = Run(group, tmp_path)
            assert other.checkpoints.restore()
            (rate,) = set(other.gossip.gather(int(other.optimizer.param_groups[0]["lr"])))
            seen.append(rate)
            other.end()
        run.end()
        return seen

    seen, _ = run_ranks(2, body)
    assert seen[0] == 0  # the first one's 0.01
    assert seen[-1] == len(seen)
    assert len([*tmp_path.glob("step-00000002/*")]) == 3


def test_a_rank_that_is_killed_while_it_saves(tmp_path: Path) -> None:
    """After SIGKILL in the middle of a file, the run resumes from the previous checkpoint."""
    command = [sys.executable, "-m", "tests.killed_while_saving", str(tmp_path)]
    subprocess.run(command, check=True, timeout=50)
    assert (tmp_path / "0.code").read_text() == "1"
    assert (tmp_path / "1.code").read_text() == str(-signal.SIGKILL)
    assert "ExchangeError" in (tmp_path / "0.err").read_text()
    assert [path.name for path in tmp_path.glob("run/*/*.part")] == ["rank-00001.part"]

    def resumed(group: ProcessGroup) -> Tensor:
        run = Run(group, tmp_path / "run")
        assert run.checkpoints.restore()
        assert run.gossip.num_steps == 2
        return run.train_to(6, save_at=(4,)).end()

    ends = run_ranks(2, lambda group: Run(group, tmp_path / "other").train_to(6).end())
    assert equal(run_ranks(2, resumed), ends)
    assert len([*tmp_path.glob("run/step-00000004/*")]) == 3  # two parts, the manifest, no more


# - What stays


def test_old_checkpoints_go(tmp_path: Path) -> None:
    """The last K stay; incomplete ones are removed; a step saved twice has one file per rank."""

    def body(group: ProcessGroup) -> None:
        run = Run(group, tmp_path, keep=2).train_to(3, save_at=(1, 2, 3))
        run.gossip.gather(0)
        assert saved_at(tmp_path) == [2, 3]
        (tmp_path / "step-00000002" / "checkpoint.json").unlink(missing_ok=True)
        run.gossip.gather(0)
        run.checkpoints.save()
        run.gossip.gather(0)
        assert saved_at(tmp_path) == [3]
        run.gossip.gather(0)
        run.train_to(5, save_at=(4, 5)).end()

    run_ranks(2, body)
    assert saved_at(tmp_path) == [4, 5]
    for folder in tmp_path.iterdir():
        names = [re.sub("-[0-9a-f]{15}", "", path.name) for path in sorted(folder.iterdir())]
        assert names == ["checkpoint.json", "rank-00000.safetensors", "rank-00001.safetensors"]


def test_a_damaged_checkpoint_takes_no_place(tmp_path: Path) -> None:
    """One that was passed over does not count among the last K, and is overwritten or removed."""

    def body(group: ProcessGroup) -> None:
        Run(group, tmp_path).train_to(6, save_at=(2, 4, 6)).end()
        for step in (4, 6):
            for path in tmp_path.glob(f"step-{step:08d}/rank-*"):
                os.truncate(path, 9)
        run = Run(group, tmp_path, keep=2)
        assert run.checkpoints.restore()
        assert run.gossip.num_steps == 2
        run.train_to(5, save_at=(5,))
        assert saved_at(tmp_path) == [2, 5, 6]
        run.train_to(7, save_at=(6, 7))
        assert saved_at(tmp_path) == [6, 7]
        assert run.checkpoints.restore()
        assert run.gossip.num_steps == 7
        run.end()

    run_ranks(1, body)


def test_what_is_being_removed_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint loses its manifest before any of its files."""

    def stopped(path: Path, **options: Any) -> None:
        assert not (path / "checkpoint.json").exists()
        for rank in range(2):
            assert [*path.glob(f"rank-{rank:05d}-*.safetensors")]

    monkeypatch.setattr(shutil, "rmtree", stopped)

    def body(group: ProcessGroup) -> list[int]:
        run = Run(group, tmp_path, keep=1).train_to(2, save_at=(1, 2))
        run.gossip.gather(0)
        steps = run.checkpoints._folder.complete_steps()
        run.end()
        return steps

    assert run_ranks(2, body) == [[2], [2]]
    assert saved_at(tmp_path) == [1, 2]


def test_a_folder_on_each_host_will_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks that see only their own files restore the newest checkpoint common to all."""

    def saving(group: ProcessGroup, run: str, order: str) -> Tensor:
        folder = tmp_path / run / str(group.rank())
        return Run(group, folder, order=order).train_to(6, save_at=(2, 4, 5)).end()

    ends = run_ranks(2, lambda group: saving(group, "run", "awc"))
    run_ranks(2, lambda group: saving(group, "other", "atc"))
    shutil.rmtree(tmp_path / "run" / "1" / "step-00000005")
    shutil.rmtree(tmp_path / "run" / "1" / "step-00000004")
    shutil.copytree(tmp_path / "other/1/step-00000004", tmp_path / "run/1/step-00000004")

    def resumed(group: ProcessGroup) -> Tensor:
        run = Run(group, tmp_path / "run" / str(group.rank()))
        assert run.checkpoints.restore()
        assert run.gossip.num_steps == 2
        return run.train_to(6).end()

    assert equal(run_ranks(2, resumed), ends)
    folder = tmp_path / "run" / "0"
    assert f"rank 0 passes over {folder}/step-00000005, which ranks [1] cannot read" in caplog.text
    assert f"rank 0 passes over {folder}/step-00000004, whose manifests differ" in caplog.text


# - Another number of workers


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("saved", "resumed"), [(4, 2), (2, 4), (3, 1)])
def test_another_number_of_workers_continues_from_the_average(
    saved: int, resumed: int, order: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Parameters and moments are the mean of all replicas, on every worker; it is logged."""
    caplog.set_level(logging.INFO)

    def moments(run: Run) -> Tensor:
        return torch.cat([s["exp_avg_sq"].flatten() for s in run.optimizer.state.values()])

    def save(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        run = Run(group, tmp_path, order=order).train_to(3, save_at=(3,))
        return run.end(), moments(run)

    def resume(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        run = Run(group, tmp_path, order=order)
        assert run.checkpoints.restore()
        assert run.gossip.num_steps == 3
        assert {int(state["step"]) for state in run.optimizer.state.values()} == {3}
        at_start = vector_of(run.model).clone(), moments(run).clone()
        run.train_to(5, save_at=(5,)).end()
        return at_start

    means = [torch.stack(parts).mean(0) for parts in zip(*run_ranks(saved, save), strict=True)]
    results = run_ranks(resumed, resume)
    for result in results:
        assert equal([*result], [*results[0]])
        for found, mean in zip(result, means, strict=True):
            torch.testing.assert_close(found, mean, rtol=0, atol=1e-15)
    words = f"resuming a run of {saved} workers on {resumed} from the average of all replicas"
    assert caplog.messages.count(words) == resumed


def test_a_window_stays_with_another_number_of_workers(tmp_path: Path) -> None:
    """AccumAdam's window was resolved by the first number of workers, as its moments were."""

    def window_after(group: ProcessGroup, num_steps: int) -> int:
        run = Run(group, tmp_path, optimizer="accum_adamw")
        run.checkpoints.restore()
        run.train_to(num_steps, save_at=(num_steps,)).end()
        return run.optimizer.param_groups[0]["window"]

    assert run_ranks(4, lambda group: window_after(group, 3)) == [2] * 4
    assert run_ranks(2, lambda group: window_after(group, 6)) == [2] * 2


# - Stopping


def test_all_ranks_stop_at_one_step(tmp_path: Path) -> None:
    """Whichever rank is interrupted, and when; none stops before that."""

    def body(group: ProcessGroup) -> list[int]:
        stops: list[int] = []
        for asked_at in range(6):
            run = Run(group, tmp_path, check_every=3)
            while not run.checkpoints.interrupted() and run.gossip.num_steps < 50:
                if (group.rank(), run.gossip.num_steps) == (asked_at % 3, asked_at):
                    run.checkpoints.interrupt()
                run.train_to(run.gossip.num_steps + 1)
            assert run.checkpoints.interrupted()
            stops.append(run.gossip.num_steps)
            run.end()
        return stops

    first, *others = run_ranks(3, body)
    assert others == [first, first]
    for asked_at, stop in enumerate(first):
        assert asked_at < stop <= asked_at + 6


def test_a_run_may_end_while_ranks_ask_each_other(tmp_path: Path) -> None:
    """A run may close while the all-gather of interrupted() is in flight."""

    def body(group: ProcessGroup) -> None:
        run = Run(group, tmp_path, check_every=1)
        for _ in range(3):
            run.train_to(run.gossip.num_steps + 1)
            assert not run.checkpoints.interrupted()
        run.end()

    run_ranks(3, body)


def train_until_interrupted(folder: Path) -> tuple[int, Tensor]:
    run = Run(None, folder / "run", "one_peer_exponential", check_every=5)
    with run.checkpoints.on_sigterm():
        (folder / f"ready-{run.gossip.rank}").touch()
        while not run.checkpoints.interrupted():
            run.train_to(run.gossip.num_steps + 1)
            time.sleep(0.001)
        run.checkpoints.save()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return run.gossip.num_steps, run.end()


def train_on(folder: Path, num_steps: int, resume: bool) -> Tensor:
    run = Run(None, folder / "run", "one_peer_exponential")
    assert not resume or run.checkpoints.restore()
    return run.train_to(num_steps).end()


def test_sigterm_to_one_process_saves_all(pool: ProcessPool, tmp_path: Path) -> None:
    """All ranks save the same step, and the run resumes from it bit for bit."""
    victim = pool.run(os.getpid)[2]

    def terminate() -> None:
        while len([*tmp_path.glob("ready-*")]) < 4:
            time.sleep(0.01)
        os.kill(victim, signal.SIGTERM)

    sender = threading.Thread(target=terminate, daemon=True)
    sender.start()
    stopped = pool.run(train_until_interrupted, tmp_path)
    sender.join()
    (step,) = {step for step, _ in stopped}
    assert step >= 5
    assert saved_at(tmp_path / "run") == [step]
    uninterrupted = pool.run(train_on, tmp_path, step + 10, False)
    assert equal(pool.run(train_on, tmp_path, step + 10, True), uninterrupted)


# - Mistakes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 0}, "keep must be an integer of at least 1, got 0"),
        ({"check_every": 0.5}, "check_every must be an integer of at least 1, got 0.5"),
        ({"rate": 0.1}, r"objects with state_dict\(\) and load_state_dict\(\), got rate"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    """They raise at construction, with the required and the given value."""

    def body(group: ProcessGroup) -> None:
        with pytest.raises(UserError, match=words):
            Run(group, tmp_path, **options)

    run_ranks(1, body)


def test_folders_that_cannot_hold_checkpoints_are_refused(tmp_path: Path) -> None:
    """A file, or a folder of another run, which would be resumed instead of this one."""
    (tmp_path / "file").touch()

    def body(group: ProcessGroup) -> None:
        with pytest.raises(UserError, match=r"checkpoints need a folder, got .*file, a file"):
            Run(group, tmp_path / "file")
        Run(group, tmp_path / "run").train_to(3, save_at=(3,)).end()
        forgetful = Run(group, tmp_path / "run")
        with pytest.raises(UserError, match=r"got step 1 .* which has step 3; call restore\(\)"):
            forgetful.train_to(1, save_at=(1,))
        forgetful.end()
        with pytest.raises(UserError, match="got none; pass model=model"):
            Checkpoints(tmp_path, forgetful.gossip)

    run_ranks(1, body)
    assert saved_at(tmp_path / "run") == [3]


def test_a_closed_gossip_and_join_are_refused(tmp_path: Path) -> None:
    """Collective calls are impossible there."""

    def body(group: ProcessGroup) -> None:
        run = Run(group, tmp_path, check_every=1)
        calls = (run.checkpoints.save, run.checkpoints.restore, run.checkpoints.interrupted)
        with run.gossip.join():
            for call in calls:
                with pytest.raises(UserError, match=r"inside join\(\)"):
                    call()
        run.end()
        for call in calls:
            with pytest.raises(UserError, match="must be open, got one that was closed"):
                call()

    run_ranks(1, body)


def test_another_model_is_refused_with_the_place(tmp_path: Path) -> None:
    """The error of torch says what differs, and a note names the checkpoint."""

    def body(group: ProcessGroup) -> None:
        Run(group, tmp_path).train_to(1, save_at=(1,)).end()
        model = nn.Linear(5, 7)
        optimizer = SGD(model.parameters(), lr=0.1)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        with pytest.raises(RuntimeError, match=r"Missing key\(s\)") as caught:
            Checkpoints(tmp_path, gossip, model=model, optimizer=optimizer).restore()
        assert caught.value.__notes__ == [f"while model was loaded from {tmp_path}/step-00000001"]
        with pytest.raises(UserError, match=r"\['model', 'optimizer'\], got \['model'\]; pass"):
            Checkpoints(tmp_path, gossip, model=model).restore()
        gossip.close()

    run_ranks(1, body)


def test_a_rank_that_saves_alone_is_told_so(tmp_path: Path) -> None:
    """It waits for the others up to the timeout, and the error names the call."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = ALL_OPTIMIZERS["adamw"](model.parameters())
        limit = timedelta(seconds=1)
        gossip = decentralize(model, optimizer, "ring", process_group=group, timeout=limit)
        if group.rank() == 0:
            with pytest.raises(ExchangeError, match=r"called Checkpoints.save\(\) at step 0, and"):
                Checkpoints(tmp_path, gossip, model=model).save()
        else:
            time.sleep(1.5)
        gossip.close()

    run_ranks(2, body)


def test_signals_need_the_main_thread(tmp_path: Path) -> None:
    """Python delivers signals there; the error names the alternative."""

    def body(group: ProcessGroup) -> None:
        run = Run(group, tmp_path)
        with pytest.raises(UserError, match=r"a handler there that calls interrupt\(\)"):
            run.checkpoints.on_sigterm().__enter__()
        run.end()

    run_ranks(1, body)
