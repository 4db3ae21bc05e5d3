"""A worker that is restarted, or added later, joins the others with the state of a donor."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from gossamer.errors import UserError
from gossamer.gossip import Checkpoints, ExchangeError, Gossip, decentralize, late
from gossamer.gossip.donation import Donation
from gossamer.gossip.epoch_log import STEP, Arrival, Decision
from gossamer.gossip.failures import FailureDetector
from gossamer.gossip.membership import Membership
from gossamer.gossip.network import Network, num_parts
from gossamer.gossip.notices import NoticeBoard
from gossamer.launched import JOINS, NEW, RETURNED
from tests.ranks import run_ranks
from tests.reference import loss_of, make_model
from tests.test_survival import agree, memberships, vanish

LIMIT = timedelta(seconds=3)
LOST_AT = 4


@dataclass
class Return:
    """A run in which worker 1 is lost, and joins again."""

    options: dict[str, Any]
    each_step: Callable[[Gossip], object] = lambda gossip: None
    make_optimizer: Callable[[Any], Optimizer] = lambda parameters: SGD(parameters, 0.1, 0.9)
    given: list[list[Tensor]] = field(default_factory=list[list[Tensor]])
    """The tensors of each donor when it packed them."""

    have_gone_on: threading.Event = field(default_factory=threading.Event)
    """Whether the others train without it."""

    until: list[int] = field(default_factory=list[int])
    """The last step of all workers, once the worker has joined."""

    def __call__(self, group: ProcessGroup) -> dict[str, Any]:
        """Train as one worker; as worker 1 twice."""
        if group.rank() == 1:
            self.live(group, ends_at=LOST_AT)
            assert self.have_gone_on.wait(20)
            # Ranks are threads; the others have read the variable already.
            os.environ[JOINS] = RETURNED
        return self.live(group)

    def live(
        self, group: ProcessGroup, ends_at: int | None = None, stays: int | None = None
    ) -> dict[str, Any]:
        """Train as one process would, from its start to its end or for some steps."""
        model = nn.Sequential(make_model(), nn.BatchNorm1d(3).double())
        optimizer = self.make_optimizer(model.parameters())
        gossip = decentralize(
            model,
            optimizer,
            process_group=group,
            on_failure="continue",
            timeout=LIMIT,
            **self.options,
        )
        self.watch_donor(gossip, model, optimizer)
        worker = gossip.members[gossip.rank]
        result = {"worker": worker, "began_at": gossip.num_steps, "got": all_of(model, optimizer)}
        if stays is not None:
            ends_at = gossip.num_steps + stays
        elif gossip.num_steps:
            self.until.append(gossip.num_steps + 8)
        while not self.until or gossip.num_steps < self.until[0]:
            if gossip.num_steps == ends_at:
                vanish(gossip)
                return {}
            optimizer.zero_grad()
            loss_of(model, worker, gossip.num_steps).backward()
            optimizer.step()
            self.each_step(gossip)
            if gossip.num_workers == group.size() - 1:
                self.have_gone_on.set()
        result |= {"members": gossip.members, "rank": gossip.rank, "stats": gossip.stats()}
        gossip.finalize()
        return result | {"model": [p.detach().clone() for p in model.parameters()]}

    def watch_donor(self, gossip: Gossip, model: nn.Module, optimizer: Optimizer) -> None:
        """Record this worker's tensors whenever it is a donor."""
        donation: Any = gossip._worker.epochs._donation
        pack = donation.pack

        def watched() -> bytes:
            self.given.append(all_of(model, optimizer))
            return pack()

        donation.pack = watched


def all_of(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return copies of all tensors of a worker."""
    states = optimizer.state_dict()["state"].values()
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers(), *kept)]


def average_often(gossip: Gossip) -> None:
    with gossip.averaged():
        pass
    gossip.gather(1)


def asking() -> Callable[[Gossip], object]:
    """Return a function that polls after every step for a signal, and then makes another call."""
    made: dict[int, Checkpoints] = {}

    def ask(gossip: Gossip) -> None:
        if id(gossip) not in made:
            made[id(gossip)] = Checkpoints("/nowhere", gossip, check_every=3, model=nn.Linear(1, 1))
        assert not made[id(gossip)].interrupted()
        gossip.gather(1)

    return ask


@pytest.mark.parametrize(
    ("options", "each_step"),
    [
        ({"topology": "ring"}, None),
        ({"topology": "complete", "algorithm": "atc"}, None),
        ({"topology": "one_peer_exponential", "algorithm": "push_sum"}, None),
        ({"topology": "ring", "control": "constant(c=0.5)", "norms_every": 1}, None),
        ({"topology": "ring"}, average_often),
        ({"topology": "ring"}, asking()),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_worker_that_comes_back_has_its_donor_s_bits(
    options: dict[str, Any], each_step: Callable[[Gossip], object] | None
) -> None:
    """Parameters, buffers and momenta are the donor's, the number its own, and all end equal.

    Also if all make collective calls after every step.
    """
    run = Return(options, each_step or (lambda gossip: None))
    results = run_ranks(4, run)
    assert [result["worker"] for result in results] == [0, 1, 2, 3]
    back = results[1]
    assert back["began_at"] >= LOST_AT
    (given,) = run.given
    assert len(given) == len(back["got"]) > 8
    for ours, theirs in zip(back["got"], given, strict=True):
        assert torch.equal(ours, theirs)
    for rank, result in enumerate(results):
        assert (result["members"], result["rank"]) == ((0, 1, 2, 3), rank)
        assert result["stats"].num_steps == run.until[0]
        assert (result["stats"].joins, result["stats"].failures) == (1, int(rank != 1))
        for ours, theirs in zip(result["model"], results[0]["model"], strict=True):
            assert torch.equal(ours, theirs)


def test_nothing_in_the_store_grows_with_epochs() -> None:
    """After a worker was lost and joined twice, only records of the last two epochs are left."""
    store = HashStore()
    run = Return({"topology": "ring"})

    def body(group: ProcessGroup) -> None:
        if group.rank() == 1:
            run.live(group, ends_at=LOST_AT)
            for stays in (5, None):
                assert run.have_gone_on.wait(20)
                run.have_gone_on.clear()
                os.environ[JOINS] = RETURNED
                run.live(group, stays=stays)
        else:
            run.live(group)

    run_ranks(3, body, store=store)
    keys = [key.removeprefix("gossamer/1/").split("/") for key in store.list_keys()]
    epochs = {int(key[1]) for key in keys if key[0] in ("members", "epoch") and key[1] != "current"}
    assert max(epochs) >= 3
    assert epochs == {max(epochs) - 1, max(epochs)}
    rest = {"/".join(key[:2]) for key in keys if key[0] not in ("members", "epoch")}
    assert rest == {"facts", "gossamer/opened"}


def join_as(
    worker: int,
    num_workers: int,
    how: str,
    make: Callable[[], nn.Module],
    trained: Callable[[nn.Module], Iterable[nn.Parameter]] = nn.Module.parameters,
) -> list[tuple[int, ...] | str]:
    """Let a worker join two others that train; return the members that each ends with."""
    until: list[int] = []

    def body(group: ProcessGroup) -> tuple[int, ...] | str:
        is_late = group.rank() == 2
        rank, size = (worker, num_workers) if is_late else (group.rank(), 2)
        group = ProcessGroup(group.get_group_store(), rank, size)
        if is_late:
            group.get_group_store().wait(["gossamer/1/members/current"], LIMIT)
            time.sleep(0.1)
            os.environ[JOINS] = how
        model = make() if is_late else make_model()
        optimizer = SGD(trained(model) if is_late else model.parameters(), lr=0.1)
        try:
            gossip = decentralize(
                model, optimizer, "ring", process_group=group, on_failure="continue", timeout=LIMIT
            )
        except (UserError, ExchangeError) as error:
            until.append(0)
            return str(error)
        if is_late:
            assert Checkpoints("/nowhere", gossip, model=model).restore()
            with pytest.raises(UserError, match=r"straight to its loop, got averaged\(\) before"):
                gossip.averaged().__enter__()
            until.append(gossip.num_steps + 5)
        while not until or gossip.num_steps < until[0]:
            optimizer.zero_grad()
            loss_of(model, 0, gossip.num_steps).backward()
            optimizer.step()
        members = gossip.members
        gossip.close()
        return members

    return run_ranks(3, body)


def test_a_worker_may_be_one_more_than_there_were() -> None:
    """Its number is new, and restore() in its script makes no collective call.

    Other collective calls before its first step are rejected, and do not disturb the others.
    """
    assert join_as(2, 3, NEW, make_model) == [(0, 1, 2)] * 3


def test_a_worker_that_would_train_another_model_is_refused() -> None:
    """Before it asks: its error names the difference, and the others are not disturbed."""

    def make_other() -> nn.Module:
        return nn.Linear(5, 3).double()

    first, second, late = join_as(2, 3, NEW, make_other)
    assert first == second == (0, 1)
    assert "all ranks must call decentralize() with the same model and arguments" in late


def test_two_workers_cannot_have_one_number() -> None:
    """While a member has it, another worker with the number raises."""
    first, second, late = join_as(1, 2, RETURNED, make_model)
    assert first == second == (0, 1)
    assert "a worker joins once, and worker 1 is a member already, of (0, 1)" in late


def test_optimizers_are_compared_before_a_worker_asks() -> None:
    """Momenta of another order of parameters would be wrong, so the worker raises first."""

    def reverse(model: nn.Module) -> list[nn.Parameter]:
        return [*model.parameters()][::-1]

    first, second, late = join_as(2, 3, NEW, make_model, reverse)
    assert first == second == (0, 1)
    assert "optimizer 0 is SGD of groups of" in late


def test_nobody_can_join_a_job_with_several_gossips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker cannot know which of them its first decentralize() belongs to."""
    store = HashStore()
    for serial in (1, 2):
        store.set(f"gossamer/{serial}/members/current", "[0, [0, 1]]")
    store.add("gossamer/opened/1", 2)
    monkeypatch.setenv(JOINS, RETURNED)
    with pytest.raises(UserError, match="opens one gossip, got one that has opened 2"):
        late.board_of(ProcessGroup(store, 1, 2), LIMIT, survives=True)


def test_workers_start_together_after_a_failed_handshake() -> None:
    """Restarted with equal arguments, nobody waits to join a job that never began."""

    def body(group: ProcessGroup) -> tuple[int, ...]:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"process_group": group, "on_failure": "continue"}
        with pytest.raises(UserError, match="gossip_steps is 1 on rank 0 and 2 on rank 1"):
            decentralize(
                model, optimizer, algorithm="atc", gossip_steps=1 + group.rank(), **options
            )
        os.environ[JOINS] = RETURNED
        gossip = decentralize(model, optimizer, timeout=LIMIT, **options)
        gossip.close()
        return gossip.members

    try:
        assert run_ranks(2, body) == [(0, 1)] * 2
    finally:
        os.environ.pop(JOINS, None)


# - Asking to join

ASKS = Arrival(member=2, step=0, why="", joins=True)


def test_a_worker_that_nobody_admits_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are gone, have ended, or reach no step: it raises in time, with the reason."""
    monkeypatch.setattr("gossamer.gossip.membership._SEEN_S", 0.3)
    store = HashStore()
    limit = timedelta(seconds=0.3)
    members = [Membership(store, member, range(2), limit) for member in range(2)]
    with pytest.raises(ExchangeError, match="none of them has seen that within"):
        Membership(store, 2, (), limit).join(ASKS)
    members[0].watch(lambda reason: None)
    with pytest.raises(ExchangeError, match="none of them reached a step within"):
        Membership(store, 2, (), limit).join(ASKS)
    for member in members:
        member.leave("ended its gossip", alarm=False)
    with pytest.raises(ExchangeError, match=r"\(0, 1\), and they have ended: worker 0 ended its"):
        Membership(store, 2, (), limit).join(ASKS)


def test_a_request_to_join_costs_two_queries_per_step() -> None:
    """On any number of ranks; while one has yet to connect, nobody is admitted."""
    store = HashStore()
    groups = [ProcessGroup(store, rank, 20) for rank in range(20)]
    boards = [NoticeBoard(group, LIMIT) for group in groups]
    first, *others = (FailureDetector(board, lambda: None) for board in boards)
    first.watch()
    assert not first.has_made_all_calls()
    for other in others:
        other.watch()
    asked = first.board.store = Mock(wraps=first.board.store)
    assert first.has_made_all_calls()
    with others[-1].calling("averaged()"):
        assert not first.has_made_all_calls()
    assert len(asked.method_calls) == 2 * 2
    with first.calling("averaged()"):
        assert first.has_made_all_calls()
    for detector in (first, *others):
        detector.end()


def test_a_worker_that_asks_after_training_failed_gets_the_error() -> None:
    """Even if a member had its number; and it asks only once."""
    store = HashStore()
    limit = timedelta(seconds=5)
    zero = Membership(store, 0, range(1), limit)
    zero._log.decide(Decision(members=(0,), step=0, calls_done=0, error="the program is wrong"))
    for number in (0, 2):
        other = Membership(store, number, (), limit)
        with pytest.raises(ExchangeError, match="they have ended: the program is wrong"):
            other.join(replace(ASKS, member=number))
    assert len(zero._log.records("asked")) == 2


def test_a_worker_that_gives_up_does_not_remove_a_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asked with the number of a member, which continues."""
    monkeypatch.setattr("gossamer.gossip.membership._SEEN_S", 0.1)
    zero, _ = memberships(2)
    impostor = Membership(zero._log._all, 1, (), timedelta(seconds=0.3))
    with pytest.raises(ExchangeError, match="none of them has seen that"):
        impostor.join(replace(ASKS, member=1))
    impostor.leave("could not join", alarm=True)
    assert zero._log.records("left") == zero._log.records("log") == []


def test_a_worker_that_reaches_only_the_store_does_not_stop_the_others() -> None:
    """It cannot connect: the others continue, and it raises after it was admitted 4 times."""
    zero, one, two = memberships(3, timeout_s=5)
    failed: dict[str, Any] = {"why": "", "opened": False, "timed_out": True}
    asked: list[Arrival] = []

    def refuse(arrival: Arrival) -> Decision:
        asked.append(arrival)
        raise ExchangeError("asks again")

    two.join = refuse
    arrivals = {
        zero: Arrival(member=0, step=5, call=STEP, waited_for=(2,), **failed),
        one: Arrival(member=1, step=5, call=STEP, waited_for=(2,), **failed),
        two: Arrival(member=2, step=0, joins=True, waited_for=(0,), **failed),
    }
    *decisions, late = agree(arrivals)
    for decision in decisions:
        assert isinstance(decision, Decision)
        assert (decision.members, decision.donors, decision.error) == ((0, 1), {}, "")
        assert "could not connect" in decision.gone[2]
    assert str(late) == "asks again"
    for _ in range(2):
        with pytest.raises(ExchangeError, match="asks again"):
            two.agree()
    with pytest.raises(ExchangeError, match="worker 2 was admitted 4 times"):
        two.agree()
    assert len(asked) == 3


def test_an_error_that_is_not_the_store_s_is_raised_unchanged() -> None:
    """A record that is not JSON must not be reported as a broken network."""
    (zero,) = memberships(1)
    zero._log._store.set("0/log", "not JSON")
    with pytest.raises(json.JSONDecodeError):
        zero.agree()


def test_of_two_workers_with_one_number_one_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one raises; a worker that has withdrawn is not admitted."""
    (zero,) = memberships(1)
    askers = [Membership(zero._log._all, 2, (), LIMIT) for _ in range(2)]
    gives_up = Membership(zero._log._all, 3, (), LIMIT)
    monkeypatch.setattr(gives_up, "_check_answer", Mock(side_effect=ExchangeError("gives up")))

    def ask(asker: Membership) -> str:
        try:
            return str(asker.join(replace(ASKS, member=asker.member)).members)
        except ExchangeError as error:
            return str(error)

    def decide() -> str:
        with pytest.raises(ExchangeError, match="gives up"):
            gives_up.join(replace(ASKS, member=3))
        gives_up.leave("could not join", alarm=True)
        while sum("here" in line for line in zero._log.records("asked")) < 3:
            time.sleep(0.01)
        zero.arrive(Arrival(member=0, step=5, why="", call=STEP))
        return str(zero.agree().members)

    bodies = [decide, *(partial(ask, asker) for asker in askers)]
    first, *rest = run_ranks(3, lambda group: bodies[group.rank()]())
    assert first == min(rest) == "(0, 2)"
    assert "worker 2 is a member already" in max(rest)


def test_a_joiner_does_not_end_members_that_have_parameters() -> None:
    """It mistakes slow members for lost ones and raises; they continue without it."""
    zero, one = memberships(2, timeout_s=0.4)
    one.arrive(replace(ASKS, member=1, opened=False, closed=(0,)))
    with pytest.raises(ExchangeError, match="every worker that had trained is lost"):
        one.agree()
    one.leave("could not join", alarm=True)
    zero.announce(0)
    zero.arrive(Arrival(member=0, step=5, why="", call=STEP, opened=False, timed_out=True))
    assert zero.agree().members == (0,)


def test_a_transfer_may_take_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each part has the timeout of a message; the others wait for all parts, and nobody is lost."""
    monkeypatch.setattr("tests.test_joining.LIMIT", timedelta(seconds=1.5))
    monkeypatch.setattr("gossamer.gossip.network._PART_BYTES", 64)
    num_sent: list[int] = []
    wait = Network._wait

    def wait_slowly(network: Network, *args: Any) -> None:
        num_sent.append(network.rank)
        time.sleep(0.1)
        wait(network, *args)

    monkeypatch.setattr(Network, "_wait", wait_slowly)
    assert join_as(2, 3, NEW, make_model) == [(0, 1, 2)] * 3
    assert num_sent.count(2) > 16  # at 0.1 s each
    assert "nobody is lost" not in caplog.text  # no epoch failed


@pytest.mark.parametrize(
    ("arrivals", "entry"),
    [
        ([{"step": 7, "call": STEP}, {"step": 6, "updated": True}], 7),
        ([{"step": 7, "call": STEP}, {"step": 7, "call": "averaged()", "calls_done": 1}], 7),
        ([{"step": 7, "updated": True}, {"step": 6, "call": STEP}], 6),
        ([{"step": 7, "call": "averaged()"}, {"step": 6, "call": STEP}], None),
        ([{"step": 7, "call": "averaged()"}, {"step": 7, "updated": True}], None),
        ([{"step": 7}], None),
    ],
)
def test_a_worker_begins_where_it_makes_the_same_calls(
    arrivals: list[dict[str, Any]], entry: int | None
) -> None:
    """Before the update of the fastest member; not while one waits in a call for the others."""
    members = memberships(len(arrivals))
    Membership(members[0]._log._all, 9, (), LIMIT)  # has no effect before it asks
    asked = Arrival(member=9, step=0, why="", joins=True)
    members[0]._log.append("asked", here=asdict(asked))
    said = {
        membership: Arrival(member=membership.member, why="", **arrival)
        for membership, arrival in zip(members, arrivals, strict=True)
    }
    for decision in agree(said):
        assert isinstance(decision, Decision)
        assert (9 in decision.members) == (entry is not None)
        assert decision.entry == (entry or 0)
        donor = max(arrivals, key=lambda arrival: arrival["step"])
        if entry is not None:
            assert said[members[decision.donors[9]]].call in ("", STEP)
        assert decision.donors == ({} if entry is None else {9: decision.donors[9]})
        assert entry is None or said[members[decision.donors[9]]].step == donor["step"]


@pytest.mark.parametrize("late", [0, 1])
def test_a_worker_that_joined_and_makes_other_calls_is_removed(late: int) -> None:
    """Its loop counts from its own start, say: the others continue, and its error says why."""
    said: dict[str, Any] = {"why": "", "timed_out": True}
    arrivals = [
        Arrival(member=0, step=5, call="averaged()", **said),
        Arrival(member=1, step=6, call=STEP, **said),
    ]
    arrivals[late] = replace(arrivals[late], came_later=True)
    results = agree(dict(zip(memberships(2), arrivals, strict=True)))
    other = results[1 - late]
    assert isinstance(other, Decision)
    assert (other.members, other.error) == ((1 - late,), "")
    assert "it joined, and makes other calls: all workers must make the same calls" in str(
        results[late]
    )


def test_a_worker_that_was_stalled_for_two_epochs_is_out() -> None:
    """The records of its epoch are deleted, and it must not conclude that all others are lost."""
    zero, one, two = memberships(3, timeout_s=0.4)
    for step in (5, 6):
        for member in (zero, one):
            member.announce(member.epoch)
            member.arrive(Arrival(member=member.member, step=step, why="", closed=(2,)))
        run_ranks(2, lambda group: (zero, one)[group.rank()].agree())
    zero.discard_past()
    assert not [key for key in zero._log._all.list_keys() if key.startswith("members/0/")]
    two.arrive(Arrival(member=2, step=5, why=""))
    with pytest.raises(ExchangeError, match="the others went on without worker 2"):
        two.agree()


# - The state of a donor


@pytest.mark.parametrize("scheduled_first", [True, False])
def test_a_scheduler_follows_by_as_many_steps(
    scheduled_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Optimizer state is the donor's; the rate is, too, after the loop in docs/survival.md."""

    def start() -> tuple[nn.Module, Adam]:
        model = make_model()
        return model, Adam(model.parameters(), lr=0.1)

    def schedule(optimizer: Adam) -> StepLR:
        return StepLR(optimizer, step_size=2, gamma=0.5)

    model, optimizer = start()
    scheduler = schedule(optimizer)
    for step in range(7):
        loss_of(model, 0, step).backward()
        optimizer.step()
        scheduler.step()
    other, late = start()
    follower = schedule(late) if scheduled_first else None
    Donation(other, [late]).load(Donation(model, [optimizer]).pack())
    assert "joins with the learning rate 0.1, and its donor has" in caplog.text
    follower = follower or schedule(late)
    for _ in range(7):
        follower.step()
    ours, theirs = late.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for tensor, given in zip(all_of(other, late), all_of(model, optimizer), strict=True):
        assert torch.equal(tensor, given)


def test_without_a_scheduler_the_rate_is_the_donor_s() -> None:
    """The training loop may have changed it."""
    model, other = make_model(), make_model()
    given, taken = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    given.param_groups[0]["lr"] = 0.025
    Donation(other, [taken]).load(Donation(model, [given]).pack())
    assert taken.param_groups[0]["lr"] == 0.025


def test_a_donor_that_cannot_serialize_its_state_continues() -> None:
    """An optimizer keeps a set: the joiner raises, with the reason, and the donor does not."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[next(model.parameters())]["kept"] = {1, 2}
    given = Donation(model, [optimizer]).pack()
    with pytest.raises(
        UserError,
        match=r"donor must be able to serialize its state, and cannot: a state must .* got set",
    ):
        Donation(make_model(), [optimizer]).load(given)


def test_a_donor_copies_one_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds its model and the serialized state; a third copy may not fit in memory."""
    monkeypatch.setattr("gossamer.gossip.network._PART_BYTES", 2**16)
    data = os.urandom(2**22 + 1)
    sent = hashlib.blake2b()
    network: Any = Mock(spec=Network, rank=0, _wait=lambda work, what, peer: work())
    network._open_lane.return_value.send = lambda tensors, *_: sent.update(tensors[0].numpy())
    each_part = Mock()
    tracemalloc.start()
    Network.send(network, data, 1, each_part)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < len(data) / 8
    assert each_part.call_count == num_parts(len(data))
    header = len(data).to_bytes(8, "little") + hashlib.blake2b(data, digest_size=32).digest()
    assert sent.digest() == hashlib.blake2b(header + data).digest()


@pytest.mark.timeout(200)
def test_processes_continue_if_a_donor_or_a_joiner_is_killed() -> None:
    """SIGKILL during the transfer: all survivors end with equal models.

    If the donor is killed, the joiner gets the state of another one.
    """
    command = [sys.executable, "-m", "tests.joining_processes"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=190, check=True).stdout
    donor, joiner = map(json.loads, output.splitlines())
    assert donor["killed"] in (0, 2, 3)
    assert joiner["killed"] == 1
    for story in (donor, joiner):
        assert story["hung"] == [], story
        assert story["codes"] == [0, 0, 0], story
        assert story["members"] == story["left"], story
        assert story["ends"] == 1, story
