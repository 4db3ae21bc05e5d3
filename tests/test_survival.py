"""Training continues when a worker is lost: who survives, with which state, what is logged."""

from __future__ import annotations

import atexit
import gc
import json
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
import torch
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.optim import SGD

import gossamer
from gossamer.algorithms import parse_algorithm
from gossamer.errors import UserError
from gossamer.gossip import ExchangeError, Gossip, decentralize
from gossamer.gossip.epoch import Rules
from gossamer.gossip.epoch_log import STEP, Arrival, Decision
from gossamer.gossip.epochs import _NextStore  # pyright: ignore[reportPrivateUsage]
from gossamer.gossip.membership import Membership
from gossamer.gossip.notices import NoticeBoard
from gossamer.topology import Schedule, parse, ring
from gossamer.wire import parse_wire
from tests.ranks import run_ranks
from tests.reference import loss_of, make_model

LIMIT = timedelta(seconds=2)


_VANISHED: list[Gossip] = []
"""Referenced as atexit would: no other object may get the ids of their parameters."""


def vanish(gossip: Gossip) -> None:
    """End a rank that is a thread as SIGKILL ends a process: without a word to the others."""
    epochs = gossip._worker.epochs
    membership: Any = epochs._membership
    membership._watcher.end()
    membership._watcher._thread.join()
    epochs.current.drop()
    atexit.unregister(gossip._worker._leave)
    _VANISHED.append(gossip)


def train_on(
    group: ProcessGroup,
    lost: int,
    at: int,
    each_step: Callable[[Gossip], object] = lambda gossip: None,
    **options: Any,
) -> dict[str, Any]:
    """Train as one rank until all have taken 12 steps; one rank is lost before a step."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    gossip = decentralize(
        model, optimizer, process_group=group, on_failure="continue", timeout=LIMIT, **options
    )
    worker = gossip.rank
    while gossip.num_steps < 12:
        if worker == lost and gossip.num_steps == at:
            vanish(gossip)
            return {}
        optimizer.zero_grad()
        loss_of(model, worker, gossip.num_steps).backward()
        optimizer.step()
        each_step(gossip)
    distance = gossip.consensus_distance()
    result = {
        "worker": worker,
        "members": gossip.members,
        "rank": gossip.rank,
        "num_workers": gossip.num_workers,
        "topology": gossip.schedule.name,
        "failures": gossip.stats().failures,
        "distance": distance,
    }
    gossip.finalize()
    return result | {"model": [p.detach().clone() for p in model.parameters()]}


@pytest.mark.parametrize(
    "options",
    [
        {"topology": "ring"},
        {"topology": "complete", "algorithm": "atc"},
        {"topology": "ring", "algorithm": "gradient_tracking"},
        {"topology": "one_peer_exponential", "algorithm": "push_sum"},
        {"topology": "ring", "control": "constant(c=0.5)"},
        {"topology": "ring", "every": 3},
        {"topology": "ring", "norms_every": 1, "buffers": "mix"},
    ],
    ids=str,
)
def test_those_who_are_left_take_all_steps_and_end_with_one_model(options: dict[str, Any]) -> None:
    """For every kind of exchange: ranks are renumbered, no step is lost, and all end equal."""
    results = run_ranks(4, lambda group: train_on(group, lost=1, at=5, **options))
    survivors = [result for result in results if result]
    assert [result["worker"] for result in survivors] == [0, 2, 3]
    for rank, result in enumerate(survivors):
        assert result["members"] == (0, 2, 3)
        assert (result["rank"], result["num_workers"]) == (rank, 3)
        assert result["failures"] == 1
        for ours, theirs in zip(result["model"], survivors[0]["model"], strict=True):
            assert torch.equal(ours, theirs)


def test_what_a_lost_epoch_opened_is_freed_without_garbage_collection() -> None:
    """A connection closes with the last reference to it, so epochs must not be reference cycles.

    Otherwise a process would keep one more connection to the store per worker that was lost or
    joined, until a garbage collection of the oldest generation.
    """
    boards: dict[int, weakref.ref[NoticeBoard]] = {}
    freed: dict[int, bool] = {}

    def note(gossip: Gossip) -> None:
        worker, network = gossip.members[gossip.rank], gossip._worker.network
        if gossip.num_workers == 4:
            boards[worker] = weakref.ref(network.detector.board)
        elif gossip.num_steps == 12:
            epochs = gossip._worker.epochs
            assert epochs.wait_dropped(10)
            epochs._dropped.clear()  # as at the next failure
            freed[worker] = boards[worker]() is None

    gc.disable()
    try:
        run_ranks(4, lambda group: train_on(group, lost=1, at=5, each_step=note, topology="ring"))
    finally:
        gc.enable()
    assert freed == {0: True, 2: True, 3: True}


def test_collective_calls_are_made_again_with_those_who_are_left() -> None:
    """A rank is lost amid many averages: each survivor gets every one of them."""
    seen: dict[int, int] = {}

    def average(gossip: Gossip) -> None:
        before = [p.detach().clone() for p in gossip._worker.replica.averaged]
        with gossip.averaged():
            seen[gossip.members[gossip.rank]] = seen.get(gossip.members[gossip.rank], 0) + 1
        for now, then in zip(gossip._worker.replica.averaged, before, strict=True):
            assert torch.equal(now, then)

    run_ranks(4, lambda group: train_on(group, lost=2, at=6, each_step=average, topology="ring"))
    assert {worker: seen[worker] for worker in (0, 1, 3)} == {0: 12, 1: 12, 3: 12}


def test_one_worker_goes_on_alone() -> None:
    """Of two workers, the survivor trains alone."""
    (result, _) = run_ranks(2, lambda group: train_on(group, lost=1, at=5, topology="ring"))
    assert result["members"] == (0,)
    assert result["distance"] == 0


def test_a_topology_that_does_not_exist_for_those_who_are_left_has_a_named_fallback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A torus of 6 becomes a finite-time graph of 5, and the log says so."""
    results = run_ranks(6, lambda group: train_on(group, lost=5, at=3, topology="torus"))
    assert {result["topology"] for result in results if result} == {"base_graph(k=1)"}
    assert "mixing with base_graph(k=1) from now on: torus needs" in caplog.text


@pytest.mark.parametrize("algorithm", ["awc", "exact_diffusion", "d2", "push_sum"])
def test_there_is_a_fallback_for_every_algorithm_and_number(algorithm: str) -> None:
    """Each algorithm accepts one of the fallbacks on any number of workers."""

    def never(num_workers: int) -> str:
        raise UserError("no such graph")

    rules = Rules(never, parse_algorithm(algorithm), 1, 1, "plain", 0, 1, parse_wire("fp32"))
    for num_workers in range(1, 12):
        schedule = rules.or_fallback(num_workers).schedule(num_workers)
        assert schedule.num_workers == num_workers


def test_a_topology_may_be_a_function_of_the_number_of_workers() -> None:
    """It is called again for the number of survivors."""
    asked: set[int] = set()

    def choose(num_workers: int) -> Schedule:
        asked.add(num_workers)
        return parse("ring", num_workers)

    results = run_ranks(4, lambda group: train_on(group, lost=0, at=3, topology=choose))
    assert asked == {4, 3}
    assert all(result["num_workers"] == 3 for result in results if result)


def start_alone(**options: Any) -> None:
    model = make_model()
    store = options.pop("store", None) or HashStore()
    group = ProcessGroup(store, 0, 1)
    decentralize(model, SGD(model.parameters(), lr=0.1), process_group=group, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_failure": "ignore"}, "on_failure must be 'raise' or 'continue', got 'ignore'"),
        ({"topology": ring(1)}, "needs a topology for any number of workers, got a Round on 1"),
        ({"topology": parse("ring", 1)}, "got a Schedule on 1; pass a string, or a function"),
        (
            {"store": TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)},
            "needs a store that no worker holds.* got one in the process of rank 0",
        ),
    ],
)
def test_what_could_not_go_on_is_refused_at_the_start(options: dict[str, Any], words: str) -> None:
    """A fixed graph, or a store that ends with a worker, is rejected before training begins."""
    with pytest.raises(UserError, match=words):
        start_alone(**{"on_failure": "continue", **options})


def test_join_is_refused() -> None:
    """It counts workers at every step, and after a failure their counts would differ."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        gossip = decentralize(model, optimizer, process_group=group, on_failure="continue")
        with (
            pytest.raises(UserError, match="counts at every step which ranks still train"),
            gossip.join(),
        ):
            pass
        gossip.close()

    run_ranks(2, body)


# - Agreeing on members


def memberships(num: int, timeout_s: float = 1.0) -> list[Membership]:
    store = HashStore()
    limit = timedelta(seconds=timeout_s)
    return [Membership(store, member, range(num), limit) for member in range(num)]


def agree(arrivals: dict[Membership, Arrival]) -> list[Decision | ExchangeError]:
    """Let members agree, each on a thread."""
    for membership, arrival in arrivals.items():
        membership.announce(0)
        membership.arrive(arrival)

    def run(group: ProcessGroup) -> Decision | ExchangeError:
        try:
            return [*arrivals][group.rank()].agree()
        except ExchangeError as error:
            return error

    return run_ranks(len(arrivals), run)


def test_a_silent_member_is_lost_soon_if_its_connections_closed() -> None:
    """If nobody has seen them close, it is lost after a longer time."""
    zero, one, _ = memberships(3)
    began = time.monotonic()
    seen = Arrival(member=0, step=7, why="", closed=(2,))
    decisions = agree({zero: seen, one: Arrival(member=1, step=8, why="")})
    assert time.monotonic() - began < 0.45
    zero, one, _ = memberships(3)
    began = time.monotonic()
    slower = agree({m: Arrival(member=m.member, step=8, why="") for m in (zero, one)})
    assert time.monotonic() - began > 0.45
    for decision in (*decisions, *slower):
        assert isinstance(decision, Decision)
        assert (decision.members, decision.step) == ((0, 1), 8)
        assert decision.gone.keys() == {2}


def test_a_member_that_was_late_is_told_that_others_went_on() -> None:
    """The decision does not change, and does not include it."""
    zero, one, two = memberships(3)
    agree({m: Arrival(member=m.member, step=8, why="", closed=(2,)) for m in (zero, one)})
    two.arrive(Arrival(member=2, step=8, why=""))
    with pytest.raises(ExchangeError, match="the others went on without worker 2 at step 8"):
        two.agree()


def test_an_epochs_connection_to_the_store_is_opened_before_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connecting may take seconds, in which this worker would count as lost."""
    slow, opened = Event(), list[Store]()

    def clone_slowly(store: Store) -> Store:
        slow.wait(60)
        opened.append(HashStore())
        return opened[-1]

    monkeypatch.setattr("gossamer.gossip.epochs.clone", clone_slowly)
    ahead = _NextStore(HashStore())
    ahead.open()
    assert not opened  # and yet nobody waits
    slow.set()
    assert [ahead.take()] == opened
    assert [opened[0], ahead.take()] == opened  # two failures in a row: not opened before
    monkeypatch.setattr("gossamer.gossip.epochs._answers", lambda store: False)
    ahead.open()
    assert ahead.wait(10)
    assert ahead.take() is opened[-1]  # a new one, for that of before is broken
    assert len(opened) == 4


def test_where_nobody_is_gone_a_call_made_alone_is_an_error_on_all() -> None:
    """All members are alive, and timed out in different calls: the program is wrong."""
    zero, one = memberships(2)
    alone = Arrival(member=0, step=5, why="", call="averaged()", timed_out=True)
    other = Arrival(member=1, step=5, why="", call=STEP, timed_out=True)
    for error in agree({zero: alone, one: other}):
        assert isinstance(error, ExchangeError)
        assert "worker 0 called averaged() at step 5, and worker 1 was in optimizer.step()" in str(
            error
        )


def test_where_one_is_only_behind_all_go_on() -> None:
    """A member that has yet to make the call makes it with the others in the next epoch."""
    zero, one = memberships(2)
    ahead = Arrival(member=0, step=5, why="", call="averaged()", timed_out=True)
    behind = Arrival(member=1, step=4, why="", call=STEP, timed_out=True)
    for decision in agree({zero: ahead, one: behind}):
        assert isinstance(decision, Decision)
        assert (decision.members, decision.step) == ((0, 1), 5)


def test_of_two_that_cannot_connect_one_stays() -> None:
    """Two members reach the store, but not each other: the one with the higher number leaves."""
    zero, one, two = memberships(3)
    said = {m: Arrival(member=m.member, step=5, why="", timed_out=True) for m in (zero, one, two)}
    cut: dict[str, Any] = {"step": 5, "why": "", "opened": False, "timed_out": True}
    said[zero] = Arrival(member=0, waited_for=(2,), **cut)
    said[two] = Arrival(member=2, waited_for=(0,), **cut)
    first, second, third = agree(said)
    assert isinstance(first, Decision)
    assert isinstance(second, Decision)
    assert first.members == second.members == (0, 1)
    assert "another member cannot connect to it" in str(third)


# - Real processes


@pytest.mark.timeout(150)
def test_processes_that_are_left_go_on() -> None:
    """SIGKILL, SIGSTOP, exceptions: all survivors take their next step within twice the timeout."""
    names = ["killed, with averages", "half killed", "killed during recovery", "stalled", "raises"]
    limit_s = 10.0  # so many processes take seconds to start on two processors
    command = [sys.executable, "-m", "benchmarks.faults", "--continue", "--json"]
    command += ["--timeout", str(limit_s), *names]
    output = subprocess.run(command, capture_output=True, text=True, timeout=140, check=True).stdout
    rows = {row["fault"]: row for row in map(json.loads, output.splitlines())}
    assert rows.keys() == set(names)
    for row in rows.values():
        assert all(row[good] for good in ("went_on", "said", "one_model")), row
        assert row["steps_lost"] == 0, row
        assert row["seconds"] < 2 * limit_s, row
    # Its process takes 3 s to end, and the others must not wait for that.
    assert rows["raises"]["seconds"] < 3, rows["raises"]


def test_a_failure_is_raised_by_default() -> None:
    """Without on_failure="continue" every rank raises, with the cause."""

    def body(group: ProcessGroup) -> str:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        gossip = gossamer.decentralize(model, optimizer, "ring", process_group=group, timeout=LIMIT)
        if group.rank() == 2:
            gossip.close()
            return ""
        optimizer.step()
        with pytest.raises(ExchangeError) as caught:
            optimizer.step()
        assert gossip.stats().failures == 0
        return str(caught.value)

    first, second, _ = run_ranks(3, body)
    assert "rank 2 ended its gossip" in first + second
