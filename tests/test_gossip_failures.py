"""Ranks that disagree or fail are named: at the start, on rounds, and through notices."""

from __future__ import annotations

import json
import logging
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]
from torch.optim import SGD

from benchmarks import faults
from benchmarks.store import CountingStore
from gossamer.errors import UserError
from gossamer.gossip import ExchangeError, decentralize, failures
from gossamer.gossip.causes import find_cause
from gossamer.gossip.failures import FailureDetector
from gossamer.gossip.handshake import shake_hands
from gossamer.gossip.notices import Notice, NoticeBoard
from gossamer.topology import Schedule, parse, ring
from tests.ranks import run_ranks
from tests.reference import loss_of, make_model

Start = tuple[nn.Module, dict[str, Any]]
"""A model, and what decentralize() is called with."""


def usual() -> Start:
    return make_model(), {"topology": "ring"}


def with_model(change: Callable[[nn.Module], object]) -> Callable[[], Start]:
    def make() -> Start:
        model, options = usual()
        change(model)
        return model, options

    return make


def with_options(**options: Any) -> Callable[[], Start]:
    return lambda: (make_model(), {"topology": "ring", **options})


def renamed() -> Start:
    first, tanh, last = make_model().children()
    return nn.Sequential(first, tanh).append(nn.Sequential(last)), {"topology": "ring"}


def _with_other_layer(model: nn.Module) -> None:
    model.get_submodule("2").register_parameter("extra", nn.Parameter(torch.zeros(2).double()))


DIFFERENCES: dict[str, tuple[Callable[[], Start], str]] = {
    "topology": (with_options(topology="complete"), r"topology is \S+ on rank 0 and \S+ on "),
    "order": (with_options(order="atc"), r"algorithm is \w+ on rank 0 and \w+ on "),
    "buffers": (with_options(buffers="mix"), "buffers is "),
    "bucket size": (with_options(bucket_mb=1.0), "bucket_mb is "),
    "dtype": (with_model(lambda m: m.get_submodule("2").float()), r"2\.weight is float\d\d "),
    "a frozen layer": (
        with_model(lambda m: m.get_submodule("0").requires_grad_(False)),
        r"0\.weight is float64 \[7, 5\]",
    ),
    "shape": (
        lambda: (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double(), usual()[1]),
        r"2\.weight is float64 \[\d, 7\]",
    ),
    "names": (renamed, r"2\.(0\.)?weight is \S.* on rank 0 and "),
    "one more parameter": (with_model(_with_other_layer), r"2\.extra is "),
    "one more optimizer": (lambda: (make_model(), {"topology": "ring", "optimizers": 2}), "opt"),
    "a schedule that fails": (
        with_options(topology=Schedule(1, None, lambda step: ring(1), name="none")),
        r"rank \d could not start",
    ),
    "a typing error": (with_options(topology="rign"), r"rank \d could not start: unknown topology"),
}


def test_starts_that_differ_are_named_on_every_rank() -> None:
    """100 random differences on random ranks: each error names the field and the ranks."""
    dice = random.Random(5)

    def body(group: ProcessGroup, others: set[int], make: Callable[[], Start]) -> str:
        model, options = make() if group.rank() in others else usual()
        parts = options.pop("optimizers", 1)
        held = [*model.parameters()]
        optimizer = [SGD(held[part::parts], lr=0.1) for part in range(parts)]
        try:
            decentralize(
                model, optimizer, process_group=group, timeout=timedelta(seconds=20), **options
            )
        except UserError as error:
            return str(error)
        raise AssertionError("nobody noticed")

    for _ in range(100):
        num_ranks = dice.randint(2, 5)
        others = set(dice.sample(range(num_ranks), dice.randint(1, num_ranks - 1)))
        name, (make, words) = dice.choice([*DIFFERENCES.items()])
        ranks = sorted(set(range(num_ranks)) - others if 0 in others else others)
        for rank, message in enumerate(run_ranks(num_ranks, lambda g: body(g, others, make))):  # noqa: B023
            if name in ("a typing error", "a schedule that fails"):  # said by those that made it
                assert re.search(words if rank not in others else "rign|got one on 1;", message)
                continue
            assert re.search(words, message), (name, others, message)
            named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            assert f"on {named}" in message, (name, others, rank, message)


def test_versions_and_custom_schedules_are_compared() -> None:
    """Schedules of one name with different rounds are an error; so are two versions."""

    def body(group: ProcessGroup) -> str:
        model = make_model()
        rounds = parse("ring" if group.rank() else "star", 3).round(0)
        schedule = Schedule(3, 1, lambda step: rounds, name="mine")
        with pytest.raises(UserError) as caught:
            decentralize(model, SGD(model.parameters(), lr=0.1), schedule, process_group=group)
        return str(caught.value)

    for message in run_ranks(3, body):
        assert re.search(
            r"the digest of its rounds is \w+ on rank 0 and \w+ on ranks 1, 2", message
        )

    def versions(group: ProcessGroup) -> str:
        board = NoticeBoard(group, timedelta(seconds=5))
        with pytest.raises(UserError) as caught:
            shake_hands(board, {"the version of gossamer": f"0.{group.rank()}"})
        return str(caught.value)

    for message in run_ranks(2, versions):
        assert "the version of gossamer is 0.0 on rank 0 and 0.1 on rank 1" in message


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_starts_is_named(missing: int) -> None:
    """After the timeout the errors of the others name the rank that did not call."""

    def body(group: ProcessGroup) -> str:
        if group.rank() == missing:
            return ""
        model = make_model()
        with pytest.raises((UserError, ExchangeError)) as caught:
            decentralize(
                model,
                SGD(model.parameters(), lr=0.1),
                process_group=group,
                timeout=timedelta(seconds=1),
            )
        return str(caught.value)

    words = "rank 0 to call" if missing == 0 else "rank 2 did not call decentralize"
    for rank, message in enumerate(run_ranks(3, body)):
        assert rank == missing or words in message


@pytest.mark.parametrize("period", [None, 100])
def test_rounds_that_differ_later_are_an_error(period: int | None) -> None:
    """Rounds without a period are compared at every step; others when a wait fails."""
    usual, other = parse("ring", 3).round(0), parse("star", 3).round(0)

    def body(group: ProcessGroup) -> str:
        def build(step: int) -> Any:
            return other if group.rank() == 2 and step >= 70 else usual

        model = nn.Linear(2, 2)
        optimizer = SGD(model.parameters(), lr=0.1)
        schedule = Schedule(3, period, build)
        limit = timedelta(seconds=2)
        gossip = decentralize(model, optimizer, schedule, process_group=group, timeout=limit)
        for _ in range(70):
            optimizer.step()
        with pytest.raises(ExchangeError) as caught:
            optimizer.step()
        gossip.close()
        assert gossip.num_steps == 70
        return str(caught.value)

    for message in run_ranks(3, body):
        if period is None:
            assert "all ranks must mix with the same round, but rank" in message
        else:
            assert re.search(r"mix with different rounds at step 70", message), message


def detectors(num_ranks: int) -> list[FailureDetector]:
    store = HashStore()
    limit = timedelta(seconds=0.4)  # half of it is how long a rank looks for a cause
    groups = [dist.ProcessGroup(store, rank, num_ranks) for rank in range(num_ranks)]
    return [FailureDetector(NoticeBoard(group, limit)) for group in groups]


def test_a_cause_is_found_along_notices() -> None:
    """From a healthy neighbour's failure to the rank without a notice, at any distance."""
    zero, one, two, _three = detectors(4)
    timed_out, lost = RuntimeError("Timed out waiting"), RuntimeError("Connection closed by peer")
    assert two.failure("bucket 0 from rank 3", (3,), timed_out).culprit == 3
    assert one.failure("bucket 1 from rank 2", (2,), lost).culprit == 3
    error = zero.failure("the average of bucket 0 over all ranks", (1, 2, 3), timed_out)
    assert error.culprit == 3
    assert "rank 0 at step 0 waits for the average of bucket 0 over all ranks" in str(error)
    assert "and failed: rank 3 is gone or stalled" in str(error)
    assert zero.failure("something else", (1,), lost) is error  # the first one stays


def test_a_failure_of_all_ranks_asks_the_store_little() -> None:
    """Of many ranks that lose a peer in a collective, one searches and informs the others."""
    num_ranks = 40
    stores = [CountingStore(shared) for shared in [HashStore()] * num_ranks]
    groups = [dist.ProcessGroup(store, rank, num_ranks) for rank, store in enumerate(stores)]
    boards = [NoticeBoard(group, timedelta(seconds=2)) for group in groups]
    reasons: list[str] = []

    def fail(board: NoticeBoard) -> None:
        others = tuple(rank for rank in range(num_ranks) if rank != board.rank)
        own = Notice(rank=board.rank, step=3, what="an average", peers=others, final=True)
        reasons.append(find_cause(board, own, lost=True).reason)

    threads = [threading.Thread(target=fail, args=(board,)) for board in boards[:-1]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reasons == ["rank 39 is gone"] * (num_ranks - 1)
    asked = sorted(store.requests.total() for store in stores[:-1])
    assert asked[-2] <= 8  # all but the one that looks


def test_a_rank_that_leaves_says_why() -> None:
    """The reason that it posts is the cause in the errors of direct and indirect neighbours."""
    zero, one, two = detectors(3)
    two.leave("raised ValueError('x')")
    assert "rank 2 raised ValueError('x') at step 0" in str(one.failure("it", (2,), RuntimeError()))
    assert zero.failure("it", (1,), RuntimeError()).culprit == 2


def test_a_peer_that_is_late_is_not_blamed_for_a_rank_that_raised() -> None:
    """A rank that waits for a silent peer names the rank that failed first."""
    zero, one, two = detectors(3)
    two.leave("raised ValueError('x')")
    assert zero.failure("it", (1,), RuntimeError("timed out")).culprit == 2
    one.end()


def test_last_calls_are_named_as_such() -> None:
    """A recorded call may have returned, and a rank may have made none."""
    zero, one, _two = detectors(3)
    with one.calling("averaged()"):
        pass
    said = zero.calls_of([1, 2])
    assert said == "rank 1 last called averaged(), rank 2 has made no collective call"


def test_a_blocked_rank_is_not_blamed_and_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A blocked rank posts its position, logs a warning, and removes the notice later."""
    monkeypatch.setattr(failures, "_WARN_S", 0.1)
    zero, one, _two = detectors(3)
    one.at(7, "abc")
    one.watch()
    with caplog.at_level(logging.WARNING), one.blocked():
        one.awaits("bucket 0 from rank 2", (2,))
        time.sleep(0.3)
        error = zero.failure("bucket 0 from rank 1", (1,), RuntimeError("Timed out"))
    assert error.culprit == 2
    assert "rank 1 at step 7 waits for bucket 0 from rank 2, for" in caplog.text
    time.sleep(0.2)
    assert not one.board.store.get("notice/1")
    one.end()


@pytest.mark.timeout(150)
def test_every_survivor_of_a_fault_names_the_cause() -> None:
    """Kills, stalls, exceptions, lone calls: an error within twice the timeout, no hang."""
    limit_s = 2.0
    command = [sys.executable, "-m", "benchmarks.faults", "--json", "--timeout", str(limit_s)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=140, check=True).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    for name, fault in faults.FAULTS.items():
        answers = {row["rank"]: row for row in rows if row["fault"] == name}
        survivors = {*range(4)} - ({fault.culprit} if fault.silent else set())
        assert survivors == {*answers}, name
        for row in answers.values():
            assert fault.cause in row["message"] or row["rank"] == fault.culprit, row
            assert row["seconds"] < 2 * limit_s, row
            assert row["exit_code"] == 1, row


def test_training_uses_nothing_of_this() -> None:
    """A step without failures writes nothing to the store."""

    def body(group: ProcessGroup) -> int:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        keys = gossip._worker.network.detector.board.store.num_keys()
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, group.rank(), step).backward()
            optimizer.step()
        added = gossip._worker.network.detector.board.store.num_keys() - keys
        gossip._worker.gather(0)  # nobody closes before all have counted
        gossip.close()
        return added

    assert run_ranks(3, body) == [0, 0, 0]
