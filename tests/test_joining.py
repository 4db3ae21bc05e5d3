"""A worker that comes back, or comes later, trains on with the others from a donor's state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, Optimizer

from gossamer.gossip import Checkpoints, Gossip, decentralize
from gossamer.launched import JOINS, RETURNED
from tests.ranks import run_ranks
from tests.reference import loss_of, make_model
from tests.test_survival import vanish

LIMIT = timedelta(seconds=5)
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

    def live(self, group: ProcessGroup, ends_at: int | None = None) -> dict[str, Any]:
        """Train from the start of a process to its end."""
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
        if gossip.num_steps:
            self.until.append(gossip.num_steps + 8)
        while not self.until or gossip.num_steps < self.until[0]:
            if gossip.num_steps == ends_at:
                vanish(gossip)
                return {}
            optimizer.zero_grad()
            loss_of(model, worker, gossip.num_steps).backward()
            optimizer.step()
            self.each_step(gossip)
            if gossip.num_workers == 3:
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
        ({"topology": "ring", "algorithm": "gradient_tracking"}, None),
        ({"topology": "ring", "control": "constant(c=0.5)", "norms_every": 1}, None),
        ({"topology": "random_matching", "every": 3}, None),
        ({"topology": "ring"}, average_often),
        ({"topology": "ring"}, asking()),
    ],
    ids=str,
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


@pytest.mark.timeout(120)
def test_processes_go_on_where_a_donor_or_a_joiner_is_killed() -> None:
    """SIGKILL in the middle of what one gives to the other: all who are left end with one model.

    The worker that joins then gets everything from another.
    """
    command = [sys.executable, "-m", "tests.joining_processes"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True).stdout
    donor, joiner = map(json.loads, output.splitlines())
    assert donor["killed"] in (0, 2, 3)
    assert joiner["killed"] == 1
    for story in (donor, joiner):
        assert story["hung"] == [], story
        assert story["codes"] == [0, 0, 0], story
        assert story["members"] == story["left"], story
        assert story["ends"] == 1, story
