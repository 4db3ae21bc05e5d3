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
from pathlib import Path

import torch
import torch.distributed as dist

import gossamer

dist.init_process_group("gloo")
folder = Path(sys.argv[1])
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
gossip = gossamer.decentralize(
    model, optimizer, "ring", on_failure="continue", timeout=timedelta(seconds=60)
)
worker = gossip.members[gossip.rank]
assert worker == dist.get_rank()
if gossip.num_steps:  # it is back
    (folder / "part").write_text(str(gossip.num_steps + 10))
    (folder / "part").rename(folder / "until")
while not (folder / "until").exists() or gossip.num_steps < int((folder / "until").read_text()):
    if worker == 1 and gossip.num_steps == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    optimizer.zero_grad()
    model(torch.ones(1, 4)).square().sum().backward()
    optimizer.step()
gossip.finalize()
(folder / str(worker)).write_text(f"{gossip.members} {gossip.num_steps} {model.weight.norm()}")
"""


@pytest.mark.timeout(240)
def test_a_worker_that_is_killed_comes_back(tmp_path: Path) -> None:
    """A plain script on two supervisors: one worker is killed, is started anew and joins."""
    (tmp_path / "train.py").write_text(SCRIPT)
    verb = [sys.executable, "-m", "gossamer", "launch", "--total", "3"]
    verb += ["--store", "127.0.0.1:29653"]
    script = ["--", sys.executable, str(tmp_path / "train.py"), str(tmp_path)]
    places = (["--workers", "2", "--restarts", "1"], ["--workers", "1", "--first", "2"])
    running = [
        subprocess.Popen([*verb, *place, *script], stderr=subprocess.PIPE, text=True)
        for place in places
    ]
    said = [process.communicate(timeout=220)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert (
        "worker 1 ended with SIGKILL; 1 others here are running; it restarts in 1 s, and at most 0"
    ) in " ".join(said[0].split())
    ends = {(tmp_path / str(worker)).read_text() for worker in (0, 1, 2)}
    assert len(ends) == 1
    assert ends.pop().startswith("(0, 1, 2) ")


def run_here(script: str, **options: int) -> tuple[int, list[str]]:
    """Launch two workers that run a line of shell; return the exit code and what was said."""
    said: list[str] = []
    return launch(["sh", "-c", script], Place(2), said.append, **options), said


def test_a_worker_is_not_started_anew_where_training_is_at_its_end() -> None:
    """One that ended in order says so to all; the exit code is that of success."""
    code, said = run_here('test "$RANK" = 0 || { sleep 0.3; exit 3; }')
    assert code == 0
    assert said == [
        "worker 1 ended with exit code 3; 0 others here are running; it is not restarted: "
        "training has finished"
    ]


def test_nobody_is_started_anew_where_all_are_lost() -> None:
    """There is nobody to get parameters from, and the job has failed."""
    code, said = run_here("exit 3")
    assert code == 1
    assert said[0].endswith("it restarts in 1 s, and at most 2 more times")
    assert "it is not restarted: no worker is left to join" in said[1]
    assert said[2] == "worker 0 is not restarted: no worker is left to join"


def test_a_worker_is_started_anew_a_few_times_and_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as asked, after longer and longer; it then knows that it joins."""
    monkeypatch.setattr("gossamer.launch._FIRST_PAUSE_S", 0.1)
    log = tmp_path / "log"
    script = f'test "$RANK" = 0 && sleep 1.5 || echo "$GOSSAMER_JOIN" >> {log}; test "$RANK" = 0'
    code, said = run_here(script, restarts=2)
    assert code == 0
    assert log.read_text() == "\nreturned\nreturned\n"
    assert [line.partition("it restarts in ")[2][:5] for line in said] == ["0.1 s", "0.2 s", ""]


def test_a_worker_that_stands_still_is_ended_after_the_others() -> None:
    """It would keep the job for ever; the exit code is that of success."""
    said: list[str] = []
    command = ["sh", "-c", 'test "$RANK" = 0 || exec sleep 60']
    assert launch(command, Place(2), said.append, over_min=0.005) == 0
    assert said == ["worker 1 is terminated: others finished 0 s ago"]


def test_a_worker_that_has_run_for_long_is_started_anew_as_often_as_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each end is a fault of its own, and waits as short as the first."""
    monkeypatch.setattr("gossamer.launch._FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr("gossamer.launch._STEADY_S", 0.0)
    log = tmp_path / "log"
    ends = f'echo >> {log}; test "$(wc -l < {log})" = 4'  # in order the fourth time
    code, said = run_here(f'test "$RANK" = 0 && sleep 1.5 || {{ {ends}; }}', restarts=1)
    assert code == 0
    assert len(said) == 3
    assert all("it restarts in 0.05 s, and at most 0 more" in line for line in said)


def test_a_new_worker_that_is_started_anew_is_new_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not begin with the others, so it must not look for what it began."""
    monkeypatch.setattr("gossamer.launch._FIRST_PAUSE_S", 0.05)
    log = tmp_path / "log"
    command = ["sh", "-c", f'echo "$GOSSAMER_JOIN" >> {log}; exit 3']
    place = Place(1, first=2, store="127.0.0.1:1", joins=True)
    assert launch(command, place, restarts=1) == 1
    assert log.read_text() == "new\nnew\n"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(0), "must be among those of all nodes, got 0 from rank 0 on of 0"),
        (Place(2, first=3, total=4), "of all nodes, got 2 from rank 3 on of 4"),
        (Place(2, total=4), "supervisors of several nodes need a common store, got ''"),
        (Place(2, store="node0:1", joins=True), "unused ranks, got --join from rank 0"),
        (Place(2, store="node0"), "need a common store, got 'node0'; set --store host:port"),
    ],
)
def test_places_that_cannot_be_are_refused(place: Place, words: str) -> None:
    """Before any worker is started."""
    with pytest.raises(UserError, match=words):
        launch(["false"], place)
