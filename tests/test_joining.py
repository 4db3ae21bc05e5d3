"""A worker that comes back, or comes later, trains on with the others from a donor's state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
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
from gossamer.gossip.membership import Membership
from gossamer.gossip.network import Network
from gossamer.launched import JOINS, NEW, RETURNED
from tests.ranks import run_ranks
from tests.reference import loss_of, make_model
from tests.test_survival import agree, memberships, vanish

LIMIT = timedelta(seconds=3)
LOST_AT = 4


@dataclass
class Return:
    """A run in which worker 1 is lost, and comes back."""

    options: dict[str, Any]
    each_step: Callable[[Gossip], object] = lambda gossip: None
    make_optimizer: Callable[[Any], Optimizer] = lambda parameters: SGD(parameters, 0.1, 0.9)
    given: list[list[Tensor]] = field(default_factory=list[list[Tensor]])
    """What donors have packed."""

    have_gone_on: threading.Event = field(default_factory=threading.Event)
    """Whether the others train without it."""

    until: list[int] = field(default_factory=list[int])
    """The step that all train to, when the worker is back."""

    def __call__(self, group: ProcessGroup) -> dict[str, Any]:
        """Train as one worker; as worker 1 twice."""
        if group.rank() == 1:
            self.live(group, ends_at=LOST_AT)
            assert self.have_gone_on.wait(20)
            os.environ[JOINS] = RETURNED  # the others have begun, and do not look any more
        return self.live(group)

    def live(
        self, group: ProcessGroup, ends_at: int | None = None, stays: int | None = None
    ) -> dict[str, Any]:
        """Train from the start of a process to its end, or for some steps."""
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
        """Note what this worker has when it gives."""
        donation: Any = gossip._worker.epochs._donation
        pack = donation.pack

        def watched() -> bytes:
            self.given.append(all_of(model, optimizer))
            return pack()

        donation.pack = watched


def all_of(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return copies of all tensors that a worker has."""
    states = optimizer.state_dict()["state"].values()
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers(), *kept)]


def average_often(gossip: Gossip) -> None:
    with gossip.averaged():
        pass
    gossip.gather(1)


def asking() -> Callable[[Gossip], object]:
    """Return what asks after every step whether to stop, and makes another call after that."""
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
    """Parameters, buffers and momenta; its own number; and all end with one model.

    Also where all make collective calls after every step.
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
    """A worker that is lost and comes back leaves what the last two epochs have in the store."""
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
    """A number that nobody had at the start; restore() in its script asks the others nothing.

    Other collective calls before its first step are refused there, and harm nobody.
    """
    assert join_as(2, 3, NEW, make_model) == [(0, 1, 2)] * 3


def test_a_worker_that_would_train_another_model_is_refused() -> None:
    """Before it asks: it says in what it differs, and the others see nothing of it."""

    def make_other() -> nn.Module:
        return nn.Linear(5, 3).double()

    first, second, late = join_as(2, 3, NEW, make_other)
    assert first == second == (0, 1)
    assert "all ranks must call decentralize() with the same model and arguments" in late


def test_a_worker_s_number_can_be_taken_once() -> None:
    """While the one that has it is there, another is told so."""
    first, second, late = join_as(1, 2, RETURNED, make_model)
    assert first == second == (0, 1)
    assert "a worker joins once, and worker 1 is a member already, of (0, 1)" in late


def test_optimizers_are_compared_before_a_worker_asks() -> None:
    """Momenta of one order are not those of another: it is told before it gets any."""

    def reverse(model: nn.Module) -> list[nn.Parameter]:
        return [*model.parameters()][::-1]

    first, second, late = join_as(2, 3, NEW, make_model, reverse)
    assert first == second == (0, 1)
    assert "optimizer 0 is SGD of groups of" in late


def test_who_joins_a_process_with_several_gossips_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot know which one its first decentralize() stands for."""
    store = HashStore()
    for serial in (1, 2):
        store.set(f"gossamer/{serial}/members/current", "[0, [0, 1]]")
    store.add("gossamer/opened/1", 2)
    monkeypatch.setenv(JOINS, RETURNED)
    with pytest.raises(UserError, match="opens one gossip, got one that has opened 2"):
        late.board_of(ProcessGroup(store, 1, 2), LIMIT, survives=True)


def test_workers_that_could_not_begin_begin_when_all_come_back() -> None:
    """The second time they are given the same; nobody waits for others that never began."""

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


# - Asking for membership

ASKS = Arrival(member=2, step=0, why="", joins=True)


def test_a_worker_that_nobody_lets_in_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that are gone, have ended, or come to no step: it waits for none of them for long."""
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


def test_a_worker_that_asks_where_training_has_failed_is_told_so_once() -> None:
    """Though its number is a member's; and it asked once."""
    store = HashStore()
    limit = timedelta(seconds=5)
    zero = Membership(store, 0, range(1), limit)
    zero._log.decide(Decision(members=(0,), step=0, calls_done=0, error="the program is wrong"))
    for number in (0, 2):
        other = Membership(store, number, (), limit)
        with pytest.raises(ExchangeError, match="they have ended: the program is wrong"):
            other.join(replace(ASKS, member=number))
    assert len(zero._log.records("asked")) == 2


def test_a_worker_that_gives_up_asking_says_nothing_of_a_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though it asked with the number of one: that one goes on."""
    monkeypatch.setattr("gossamer.gossip.membership._SEEN_S", 0.1)
    zero, _ = memberships(2)
    impostor = Membership(zero._log._all, 1, (), timedelta(seconds=0.3))
    with pytest.raises(ExchangeError, match="none of them has seen that"):
        impostor.join(replace(ASKS, member=1))
    impostor.leave("could not join", alarm=True)
    assert zero._log.records("left") == zero._log.records("log") == []


def test_a_worker_that_reaches_the_store_alone_ends_nothing() -> None:
    """It was let in and cannot connect: the others go on without it, and it may ask four times."""
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


def test_what_is_no_error_of_the_store_is_raised_as_it_is() -> None:
    """A line that is no JSON: nobody is told to look for a network that is cut."""
    (zero,) = memberships(1)
    zero._log._store.set("0/log", "not JSON")
    with pytest.raises(json.JSONDecodeError):
        zero.agree()


def test_of_two_with_one_number_one_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other is told so; one that has given up is not let in at all."""
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


def test_one_that_joins_decides_nothing_for_those_who_have_parameters() -> None:
    """It takes slow members for lost and raises; these go on without it when they come."""
    zero, one = memberships(2, timeout_s=0.4)
    one.arrive(replace(ASKS, member=1, opened=False, closed=(0,)))
    with pytest.raises(ExchangeError, match="every worker that had trained is lost"):
        one.agree()
    one.leave("could not join", alarm=True)
    zero.announce(0)
    zero.arrive(Arrival(member=0, step=5, why="", call=STEP, opened=False, timed_out=True))
    assert zero.agree().members == (0,)


def test_what_takes_longer_than_the_timeout_is_handed_over_in_parts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each part may take as long as a message; the others wait for all, and nobody is lost."""
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
    """Before an update that nobody has made calls behind; not while one waits for others' calls."""
    members = memberships(len(arrivals))
    Membership(members[0]._log._all, 9, (), LIMIT)  # who only asks later changes nothing
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
def test_a_worker_that_came_later_and_makes_other_calls_is_alone_in_that(late: int) -> None:
    """Its loop counts from its own beginning, say: the others go on, and it is told why."""
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


def test_one_that_was_stalled_for_long_is_out_whatever_it_finds() -> None:
    """Two epochs later nothing is left of its own, and it must not decide that it is alone."""
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


# - What it gets


@pytest.mark.parametrize("scheduled_first", [True, False])
def test_a_scheduler_follows_by_as_many_steps(
    scheduled_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Optimizer state is the donor's; the rate is the same after the loop that the page shows."""

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
    """A rate that a loop has set is training's, too."""
    model, other = make_model(), make_model()
    given, taken = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    given.param_groups[0]["lr"] = 0.025
    Donation(other, [taken]).load(Donation(model, [given]).pack())
    assert taken.param_groups[0]["lr"] == 0.025


def test_a_donor_that_cannot_give_goes_on() -> None:
    """An optimizer with a state that is no tensor: the one that joins is told, and raises."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[next(model.parameters())]["kept"] = {1, 2}
    given = Donation(model, [optimizer]).pack()
    with pytest.raises(
        UserError,
        match=r"donor must be able to serialize its state, and cannot: a state must .* got set",
    ):
        Donation(make_model(), [optimizer]).load(given)


@pytest.mark.timeout(200)
def test_processes_go_on_where_a_donor_or_a_joiner_is_killed() -> None:
    """SIGKILL in the middle of what one gives to the other: all who are left end with one model.

    The worker that joins then gets everything from another.
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
