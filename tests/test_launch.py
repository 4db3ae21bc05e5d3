"""`gossamer launch`: one worker may fail while the others continue."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import UserError
from gossamer.launch import Place, hold_store, launch

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
if gossip.num_steps:  # it has joined
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
def test_a_worker_that_is_killed_is_restarted_and_joins(tmp_path: Path) -> None:
    """A plain script on two supervisors: one worker is killed, is restarted and joins."""
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
        "worker 1 ended with SIGKILL; 1 others here continue; restart in 1 s, 0 more after that"
    ) in " ".join(said[0].split())
    ends = {(tmp_path / str(worker)).read_text() for worker in (0, 1, 2)}
    assert len(ends) == 1
    assert ends.pop().startswith("(0, 1, 2) ")


def run_here(script: str, **options: int) -> tuple[int, list[str]]:
    """Launch two workers that run a line of shell; return the exit code and the messages."""
    said: list[str] = []
    return launch(["sh", "-c", script], Place(2), said.append, **options), said


def test_a_worker_is_not_restarted_once_training_is_over() -> None:
    """Training is over when one worker has succeeded; the exit code is 0."""
    code, said = run_here('test "$RANK" = 0 || { sleep 0.3; exit 3; }')
    assert code == 0
    assert said == [
        "worker 1 ended with exit code 3; 0 others here continue; no restart: training is over"
    ]


def test_nobody_is_restarted_if_all_have_failed() -> None:
    """There is no donor left, and the exit code is 1."""
    code, said = run_here("exit 3")
    assert code == 1
    assert said[0].endswith("restart in 1 s, 2 more after that")
    assert "no restart: no worker is left to join" in said[1]
    assert said[2] == "worker 0 is not restarted: no worker is left to join"


def until(log: Path, lines: int) -> str:
    """Return a command that waits for so many lines, at most 30 s."""
    enough = f'test "$(cat {log} | wc -l)" -ge {lines}'
    return f"for i in $(seq 600); do {enough} && break; sleep 0.05; done"


def test_a_worker_is_restarted_a_few_times_and_knows_that_it_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most ``restarts`` times, after a pause that doubles; GOSSAMER_JOIN is set."""
    monkeypatch.setattr("gossamer.launch._FIRST_PAUSE_S", 0.1)
    log = tmp_path / "log"
    joins = f'echo "$GOSSAMER_JOIN" >> {log}; exit 1'
    script = f'test "$RANK" = 0 && {{ {until(log, 3)}; sleep 0.5; }} || {{ {joins}; }}'
    code, said = run_here(script, restarts=2)
    assert code == 0
    assert log.read_text() == "\nreturned\nreturned\n"
    assert [line.partition("restart in ")[2][:5] for line in said] == ["0.1 s", "0.2 s", ""]


def test_a_hung_worker_is_terminated_after_the_others() -> None:
    """It would keep the job running forever; the exit code is 0."""
    said: list[str] = []
    command = ["sh", "-c", 'test "$RANK" = 0 || exec sleep 60']
    assert launch(command, Place(2), said.append, over_min=0.005) == 0
    assert said == ["worker 1 is terminated: others finished 0 s ago"]


def test_a_worker_that_has_run_for_long_has_all_restarts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failure is then a new one, with the first pause."""
    monkeypatch.setattr("gossamer.launch._FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr("gossamer.launch._STEADY_S", 0.0)
    log = tmp_path / "log"
    ends = f'echo >> {log}; test "$(wc -l < {log})" = 4'  # it succeeds the fourth time
    code, said = run_here(
        f'test "$RANK" = 0 && {{ {until(log, 4)}; }} || {{ {ends}; }}', restarts=1
    )
    assert code == 0
    assert len(said) == 3
    assert all("restart in 0.05 s, 0 more" in line for line in said)


def test_a_new_worker_that_is_restarted_is_still_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took no part in the start of the job, so it must not look for a gossip that it opened."""
    monkeypatch.setattr("gossamer.launch._FIRST_PAUSE_S", 0.05)
    log = tmp_path / "log"
    command = ["sh", "-c", f'echo "$GOSSAMER_JOIN" >> {log}; exit 3']
    place = Place(1, first=2, store="127.0.0.1:1", joins=True)
    assert launch(command, place, restarts=1) == 1
    assert log.read_text() == "new\nnew\n"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(0), "must be within those of the job, got 0 workers from rank 0 of 0"),
        (Place(2, first=3, total=4), "must be within .*, got 2 workers from rank 3 of 4"),
        (Place(2, total=4), "supervisors of several nodes need one store, got ''"),
        (Place(2, store="node0:1", joins=True), "ranks that no other has, got --join from rank 0"),
        (Place(2, store="node0"), "need one store, got 'node0'; pass --store host:port"),
    ],
)
def test_ranks_and_stores_that_do_not_fit_are_rejected(place: Place, words: str) -> None:
    """No worker is started."""
    with pytest.raises(UserError, match=words):
        launch(["false"], place)


def test_the_process_of_the_store_resolves_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread answers all workers, and would wait for a resolver at each that connects."""
    started: list[Any] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(options["env"])

    monkeypatch.setattr("subprocess.Popen", Recorded)
    monkeypatch.setenv("RES_OPTIONS", "timeout:1")
    with hold_store("localhost") as port:
        store = TCPStore("127.0.0.1", port, is_master=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
    assert started[0]["RES_OPTIONS"].split() == ["timeout:1", "attempts:0"]
    code, _ = run_here('test "$RES_OPTIONS" = timeout:1')  # workers may need names
    assert code == 0


def test_a_store_on_a_port_that_is_taken_is_refused() -> None:
    """The error names host and port, and nothing is left behind."""
    with hold_store("127.0.0.1") as port, pytest.raises(UserError, match=f"127.0.0.1:{port}"):
        launch(["true"], Place(2, store=f"127.0.0.1:{port}"))


def test_a_store_on_a_host_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the host and the option."""

    def fail(*args: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", fail)
    with pytest.raises(UserError, match=r"must have an address, got 'node0' .*; pass --store"):
        launch(["false"], Place(2, store="node0:29400"))
