"""A loop of nanoGPT's shape, its conversion on docs/nanogpt.md, and what belongs to such loops."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gossamer import Checkpoints, decentralize
from gossamer.errors import UserError
from gossamer.gossip import alone
from tests.pages import REPOSITORY, apply_diff, blocks_of
from tests.pool import ProcessPool
from tests.reference import loss_of, make_model, sgd

# Jobs of several processes that each import torch: a loaded machine takes its time.
pytestmark = pytest.mark.timeout(150)

PAGE = "docs/nanogpt.md"


def run_script(path: Path, *settings: str, launched: bool = True) -> str:
    """Run a script in this process and in the group that is there; return what it prints."""
    output = io.StringIO()
    environment = {"RANK": str(dist.get_rank())} if launched else {}
    with (
        contextlib.redirect_stdout(output),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", [str(path), *settings]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        exec(compile(path.read_text(), path, "exec"), {"__name__": "__main__"})
    return output.getvalue()


def losses_in(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"val loss ([\d.]+)", printed)]


def converted(folder: Path) -> Path:
    """Return nanogpt_ddp.py with the page's changes."""
    (diff,) = [block for block in blocks_of(PAGE) if block.changed_file]
    apply_diff(diff, folder)
    return folder / diff.changed_file


def test_the_page_comes_to_the_example(tmp_path: Path) -> None:
    """Its diff makes examples/nanogpt_gossip.py of nanogpt_ddp.py, all but the docstring."""
    example = (REPOSITORY / "examples" / "nanogpt_gossip.py").read_text()
    scripts = [text.split('"""', 2)[2] for text in (converted(tmp_path).read_text(), example)]
    assert scripts[0] == scripts[1]


def test_both_scripts_train_and_gossip_resumes(pool: ProcessPool, tmp_path: Path) -> None:
    """On four processes, to losses within 2 %; rank 0 alone prints; resumed, it is the same run.

    The converted script goes on from the checkpoint of all ranks, and comes to the same average,
    bit for bit.
    """
    settings = ["--max_iters=30", "--eval_interval=10", "--eval_iters=4", "--batch_size=2"]
    script, losses = converted(tmp_path), dict[str, list[float]]()
    for name, path in {"ddp": REPOSITORY / "examples" / "nanogpt_ddp.py", "gossip": script}.items():
        printed = pool.run(run_script, path, *settings, f"--out_dir={tmp_path / name}")
        assert printed[1:] == ["", "", ""]
        losses[name] = losses_in(printed[0])
        assert losses[name] == sorted(losses[name], reverse=True)
        assert len(losses[name]) == 4
    assert abs(losses["gossip"][-1] / losses["ddp"][-1] - 1) < 0.02

    folder = tmp_path / "gossip"
    best = torch.load(folder / "ckpt.pt")
    assert best["best_val_loss"] == pytest.approx(losses["gossip"][-1], abs=1e-4)
    shutil.rmtree(folder / "step-00000030")
    torch.save({"best_val_loss": float("inf")}, folder / "ckpt.pt")  # to be written again
    again = pool.run(run_script, script, *settings, f"--out_dir={folder}", "--resume=True")
    assert losses_in(again[0]) == losses["gossip"][-2:]
    resumed = torch.load(folder / "ckpt.pt")
    assert resumed["best_val_loss"] == best["best_val_loss"]
    assert all(torch.equal(resumed["model"][name], best["model"][name]) for name in best["model"])


def test_one_process_without_torchrun(tmp_path: Path) -> None:
    """Both scripts run as one process, and come to the same losses: alone, gossip is nothing."""
    settings = ["--max_iters=4", "--eval_interval=2", "--eval_iters=1", f"--out_dir={tmp_path}"]
    printed = [
        run_script(REPOSITORY / "examples" / name, *settings, launched=False)
        for name in ("nanogpt_ddp.py", "nanogpt_gossip.py")
    ]
    assert printed[0] == printed[1]
    assert len(losses_in(printed[0])) == 3


# - One worker


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_launched_process_must_connect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a launcher has started several, decentralize() does not train each by itself."""
    model = make_model()
    monkeypatch.setenv(name, "1")
    decentralize(model, sgd(model)).close()
    monkeypatch.setenv(name, "4")
    with pytest.raises(UserError, match="needs a process group, and none is initialized"):
        decentralize(model, sgd(model))


def is_alone_without_group() -> bool:
    return alone.is_alone()


def test_a_child_of_python_is_not_alone(pool: ProcessPool) -> None:
    """Processes of torch.multiprocessing have no variable that tells; their parent does."""
    assert alone.is_alone()
    assert not any(pool.run(is_alone_without_group))


# - Exponential moving averages


def train_with_ema(folder: Path) -> float:
    """Return how far the mean of all workers' EMAs is from the EMA of the mean of all workers."""
    model = make_model()
    optimizer = sgd(model)
    gossip = decentralize(model, optimizer)
    decay = get_ema_multi_avg_fn(0.9)
    ema = AveragedModel(model, multi_avg_fn=decay)
    of_mean = AveragedModel(model, multi_avg_fn=decay)
    checkpoints = Checkpoints(folder, gossip, model=model, optimizer=optimizer, ema=ema)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, gossip.rank, step).backward()
        optimizer.step()
        ema.update_parameters(model)
        with gossip.averaged():
            of_mean.update_parameters(model)
    checkpoints.save()
    saved = [p.clone() for p in ema.parameters()]
    distance = 0.0
    for own, expected in zip(ema.parameters(), of_mean.parameters(), strict=True):
        mean = own.detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        distance = max(distance, float((mean - expected).abs().max()))
        assert gossip.rank == 0 or not torch.equal(own, expected)  # or there is nothing to average
        own.data.zero_()
    assert checkpoints.restore()
    assert all(map(torch.equal, ema.parameters(), saved))
    gossip.close()
    return distance


def test_the_mean_of_emas_is_the_ema_of_the_mean(pool: ProcessPool, tmp_path: Path) -> None:
    """An AveragedModel of each replica, averaged at the end; it is saved and restored, too."""
    assert max(pool.run(train_with_ema, tmp_path)) < 1e-12


def test_a_compiled_model_gossips() -> None:
    """Compiled before decentralize() moves parameters, and run after: it sees what is mixed."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    inputs = torch.ones(1, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.compile(backend="eager")
    with decentralize(model, optimizer):
        before = model(inputs)
        before.sum().backward()
        optimizer.step()
        assert not torch.equal(model(inputs), before)
        expected = nn.functional.linear(inputs, model.weight, model.bias)
        torch.testing.assert_close(model(inputs), expected)
