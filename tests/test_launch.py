"""`gossamer launch`: workers of which one may end while the others go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.errors import UserError
from gossamer.launch import Place, launch

SCRIPT = """
import os, signal, sys, time
from datetime import timedelta

import torch
import torch.distributed as dist

import gossamer

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gossip = gossamer.decentralize(
    model, optimizer, "ring", on_failure="continue", timeout=timedelta(seconds=10)
)
worker = gossip.rank
while gossip.num_steps < 20:
    if worker == 1 and gossip.num_steps == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(1, 4)).square().sum().backward()
    optimizer.step()
gossip.finalize()
with open(f"{sys.argv[1]}/{worker}", "w") as file:
    file.write(f"{gossip.members}")
"""


@pytest.mark.timeout(120)
def test_two_supervisors_let_the_others_go_on(tmp_path: Path) -> None:
    """A plain script with a process group on two supervisors: one worker is killed, two end."""
    (tmp_path / "train.py").write_text(SCRIPT)
    verb = [sys.executable, "-m", "gossamer", "launch", "--total", "3"]
    verb += ["--store", "127.0.0.1:29653"]
    script = ["--", sys.executable, str(tmp_path / "train.py"), str(tmp_path)]
    places = (["--workers", "2"], ["--workers", "1", "--first", "2"])
    running = [
        subprocess.Popen([*verb, *place, *script], stderr=subprocess.PIPE, text=True)
        for place in places
    ]
    said = [process.communicate(timeout=100)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert "worker 1 ended with SIGKILL; 1 others here go on" in said[0]
    for worker in (0, 2):
        assert (tmp_path / str(worker)).read_text() == "(0, 2)"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(0), "must be some of all, got 0 from rank 0 on of 0"),
        (Place(2, first=3, total=4), "must be some of all, got 2 from rank 3 on of 4"),
        (Place(2, total=4), "supervisors of several nodes need one store, got ''"),
        (Place(2, store="node0"), "need one store, got 'node0'; give --store host:port"),
    ],
)
def test_places_that_cannot_be_are_refused(place: Place, words: str) -> None:
    """Before any worker is started."""
    with pytest.raises(UserError, match=words):
        launch(["false"], place)
