"""Controllers and targets that are not the package's: what they remember is theirs to save.

That they decide alike in both engines is a row in ``test_control_parity``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import gossamer
from gossamer.consensus import (
    Decision,
    Memory,
    Needs,
    Observation,
    Phases,
    Plain,
    Repeat,
    bind,
    parse_control,
    sketch_distance,
)
from gossamer.errors import UserError
from gossamer.gossip import ExchangeError, decentralize
from gossamer.topology import Schedule, parse, ring, static
from tests.own_control import Pi
from tests.ranks import run_ranks
from tests.reference import batch, make_model, vector_of
from tests.test_control_parity import NUM_WORKERS, make_optimizer, make_simulation, take_step

NUM_STEPS = 24


def simulate(
    order: str, control: Any, carry: Callable[[Any], Any] | None = None
) -> tuple[list[Tensor], list[str]]:
    """Return every worker's parameters and all decisions; halfway, continue from a saved state."""
    sim, decided = make_simulation(control, order), list[str]()
    for step in range(NUM_STEPS):
        if carry is not None and step == NUM_STEPS // 2:
            state = sim.state_dict()
            sim = make_simulation(control, order)
            sim.load_state_dict({**state, "control": carry(state["control"])})
        batches = [batch(worker, step) for worker in range(NUM_WORKERS)]
        inputs, targets = map(torch.stack, zip(*batches, strict=True))
        sim.step(inputs, targets)
        assert sim.decision is not None
        decided.append(sim.decision.digest)
    return [vector_of(sim.worker(worker)) for worker in range(NUM_WORKERS)], decided


def train(
    group: ProcessGroup, order: str, control: Any, folder: Path | None = None
) -> tuple[Tensor, list[str]]:
    """Train one rank; with a folder, halfway, as a new process would continue from a checkpoint."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    options: Any = {"process_group": group, "order": order, "control": control}
    gossip = decentralize(model, optimizer, "ring", **options)
    decided: list[str] = []
    for step in range(NUM_STEPS):
        if folder is not None and step == NUM_STEPS // 2:
            gossamer.Checkpoints(folder, gossip, model=model, optimizer=optimizer).save()
            gossip.close()
            model = make_model()
            optimizer = make_optimizer(model.parameters())
            gossip = decentralize(model, optimizer, "ring", **options)
            checkpoints = gossamer.Checkpoints(folder, gossip, model=model, optimizer=optimizer)
            assert checkpoints.restore()
        decided.append(take_step(model, optimizer, gossip, group.rank(), step))
    gossip.close()
    return vector_of(model), decided


@pytest.mark.parametrize("order", ["atc", "awc"])
def test_a_simulation_continues_bit_for_bit(order: str) -> None:
    """Its state is what it saved, though no engine knows what is in it; through JSON, too."""
    control = Pi(log_distance=-2.5)
    whole, decided = simulate(order, control)

    def through_json(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": json.loads(json.dumps(state["state"]))}

    continued, also_decided = simulate(order, control, through_json)
    assert decided == also_decided
    assert all(map(torch.equal, whole, continued))
    forgotten, _ = simulate(
        order, control, lambda state: {**state, "state": {"error": -9.0, "history": []}}
    )
    assert not all(map(torch.equal, whole, forgotten))


@pytest.mark.parametrize("order", ["atc", "awc"])
def test_ranks_continue_bit_for_bit(order: str, tmp_path: Path) -> None:
    """From checkpoints on disk, in a model, an optimizer and a gossip that are new."""
    control = Pi(log_distance=-2.5)
    whole = run_ranks(NUM_WORKERS, lambda group: train(group, order, control))
    continued = run_ranks(NUM_WORKERS, lambda group: train(group, order, control, tmp_path))
    for (vector, decided), (other, also_decided) in zip(whole, continued, strict=True):
        assert decided == also_decided
        assert torch.equal(vector, other)


# - A target with a memory


@dataclass(frozen=True)
class Best(Memory):
    """The least distance that was seen."""

    distance: float = math.inf

    def observed(self, seen: Observation) -> Best:
        """Keep the least."""
        if seen.sketches is None:
            return self
        return replace(self, distance=min(self.distance, sketch_distance(seen.sketches)))


@dataclass(frozen=True)
class NoFurther:
    """Never further apart than the closest that workers have been."""

    def remember(self, schedule: Schedule, step: int) -> Best:
        """Nothing seen yet."""
        return Best()

    def value(self, seen: Observation, memory: Best) -> float:
        """The least distance; infinite before the first."""
        return memory.distance

    def needs(self, memory: Best) -> Needs:
        """Sketches."""
        return Needs(sketches=True)


@pytest.mark.parametrize(
    "control", [NoFurther(), Repeat(NoFurther()), Phases((Plain(), NoFurther()), at=(5,))]
)
def test_an_own_target_keeps_its_memory(control: Any) -> None:
    """By itself, under a policy and in a phase: it acts, and its memory is saved and loaded."""
    controller = bind(control, static(ring(8)), "atc")
    state, loaded = controller.start(0), controller.start(0)
    least, targets = math.inf, list[float]()
    for step in range(12):
        sketches = np.random.default_rng(step).standard_normal((8, 4)) * (1 + step % 3)
        least = min(least, sketch_distance(sketches))
        seen = Observation(step=step, lr=1.0, sketches=sketches)
        decision, state = controller.decide(seen, state)
        other, loaded = controller.decide(seen, loaded)
        assert other == decision
        loaded = controller.load(json.loads(json.dumps(controller.save(loaded))))
        targets.append(decision.target)
    assert targets[-1] == least
    assert loaded == state


@dataclass(frozen=True)
class Entry:
    """What was seen at one step."""

    step: int
    distance: float


@dataclass(frozen=True)
class History(Memory):
    """Entries of all steps: there are none at the start, so it saves and loads them itself."""

    entries: tuple[Entry, ...] = ()

    def observed(self, seen: Observation) -> History:
        """One more."""
        assert seen.sketches is not None
        return History((*self.entries, Entry(seen.step, sketch_distance(seen.sketches))))

    def save(self) -> dict[str, Any]:
        """As lists."""
        return {"entries": [[entry.step, entry.distance] for entry in self.entries]}

    def load(self, saved: dict[str, Any]) -> History:
        """From lists."""
        return History(tuple(Entry(*entry) for entry in saved["entries"]))


@dataclass(frozen=True)
class Median:
    """The median of all distances so far."""

    def remember(self, schedule: Schedule, step: int) -> History:
        """Nothing seen yet."""
        return History()

    def value(self, seen: Observation, memory: History) -> float:
        """The median."""
        return float(np.median([entry.distance for entry in memory.entries]))

    def needs(self, memory: History) -> Needs:
        """Sketches."""
        return Needs(sketches=True)


def test_a_memory_of_any_shape_saves_itself() -> None:
    """Where a fresh memory does not tell the types of a later one, its own save and load do."""
    controller = bind(Phases((Median(), NoFurther())), static(ring(8)), "atc")
    state = controller.start(0)
    for step in range(4):
        sketches = np.random.default_rng(step).standard_normal((8, 4))
        seen = Observation(step=step, lr=1.0, sketches=sketches)
        _, state = controller.decide(seen, state)
    loaded = controller.load(json.loads(json.dumps(controller.save(state))))
    assert loaded == state
    assert controller.decide(seen, loaded) == controller.decide(seen, state)  # pyright: ignore[reportPossiblyUnboundVariable]


# - What is refused


@dataclass(frozen=True)
class Careless:
    """A target whose memory is a list."""

    def remember(self, schedule: Schedule, step: int) -> list[float]:
        """A list."""
        return []

    def value(self, seen: Observation, memory: list[float]) -> float:
        """Nothing that matters."""
        return 1.0

    def needs(self, memory: list[float]) -> Needs:
        """Nothing."""
        return Needs()


class Unbound(Pi):
    """A policy that binds to nothing."""

    def bind(self, schedule: Schedule, order: str) -> Any:
        """Nothing."""
        return None


class Nameless(Pi):
    """A policy whose repr does not include its settings."""

    __repr__ = object.__repr__


@dataclass(frozen=True)
class Unready:
    """A policy whose controller cannot start on one rank."""

    rank: int

    def bind(self, schedule: Schedule, order: str) -> Unready:
        """Itself."""
        return self

    def start(self, step: int) -> float:
        """Not on rank 1."""
        if self.rank == 1:
            raise ValueError("cannot open my table")
        return 0.0

    def needs(self, step: int, state: float) -> Needs:
        """Nothing."""
        return Needs()

    def decide(self, seen: Observation, state: float) -> tuple[Decision, float]:
        """The ring."""
        return Decision((ring(3),), math.nan, math.inf), state

    def save(self, state: float) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load(self, saved: dict[str, Any]) -> float:
        """Nothing."""
        return 0.0

    def __repr__(self) -> str:
        return "Unready()"


@pytest.mark.parametrize(
    ("control", "reason"),
    [
        (Careless(), r"must be a gossamer.consensus.Memory, got \[\] of Careless"),
        (Unbound(-2.0), "with start, needs, decide, save and load, got None from Pi"),
        (Nameless(-2.0), "a repr with its settings, got <.*Nameless object"),
    ],
)
def test_what_could_not_be_restored_is_refused(control: Any, reason: str) -> None:
    """When a simulation is built, not steps after a state was loaded."""
    with pytest.raises(UserError, match=reason):
        make_simulation(control, "atc")


def test_a_controller_that_cannot_start_is_told_to_all_ranks() -> None:
    """Before anything is sent: no rank waits for the one whose controller failed."""

    def body(group: ProcessGroup) -> str:
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        with pytest.raises(ValueError, match="cannot open my table") as caught:
            decentralize(
                model, optimizer, "ring", process_group=group, control=Unready(group.rank())
            )
        return str(caught.value)

    first, second, third = run_ranks(3, body, timeout=15)
    assert second == "cannot open my table"
    assert "rank 1 could not start: cannot open my table" in first
    assert first == third


# - States of before, and states that differ

_FIRST_FORMAT = """
{"phase": 1, "lr_before": 0.1, "calibrates_from": 10, "calibrates_until": 20,
 "plain_total": 1.7944090277777778, "plain_count": 10, "lr_max": 1.0, "gradient2": {"decay": 0.9,
 "weight": 0.9353891811077333, "total": 2.139604398619405, "total_of_squares": 5.818652983626992},
 "critical": {"sigma2": {"decay": 0.9, "weight": 0.9353891811077333, "total": 2.1582377470372465,
 "total_of_squares": 5.661604086552389}, "gradient2": {"decay": 0.9, "weight": 0.9353891811077333,
 "total": -0.01863334841784199, "total_of_squares": 0.5238349394682273}, "rise": {"decay": 0.98,
 "weight": 0.3842196634909217, "total": -0.15529603601225858, "total_of_squares":
 0.2920166457274621}, "run": {"decay": 0.98, "weight": 0.3842196634909217, "total":
 -0.15529603601225858, "total_of_squares": 0.2920166457274621}, "product": {"decay": 0.98, "weight":
 0.3842196634909217, "total": 0.2920166457274621, "total_of_squares": 0.8023236692739864},
 "lipschitz": 1.0, "lipschitz_error": 0.0, "num_workers": 4, "point": [0.2917897987691853,
 -0.40071020123081463], "gradient": [0.2917897987691853, -0.40071020123081463], "displacement":
 [0.09952335569231274, -0.1404766443076872]}, "held": 3}
"""
"""What a controller saved at commit 1561fc6, after 26 steps of the observations below."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "phases(constant(c=0.5), critical(share=0.5), adaptive(s=0.1), at=(24, 27))",
            [
                (3, 0.1293757720002187),
                (2, 0.15638823935475626),
                (2, 0.15144194440992062),
                (1, 0.1436102256797591),
            ],
        ),
        ("gamma(p=0.5)", [(1, math.inf)] * 4),
    ],
)
def test_a_state_of_the_first_format_continues(text: str, expected: list[Any]) -> None:
    """Checkpoints from when all targets had one state decide as they would have then."""
    controller = bind(parse_control(text), parse("ring", 4), "atc")
    state, decided = controller.load(json.loads(_FIRST_FORMAT)), list[Any]()
    for step in range(26, 30):
        x = np.random.default_rng(step).standard_normal((4, 2)).round(2) + 0.9**step
        seen = Observation(step=step, lr=0.1, sketches=x, gradients=x, points=x)
        decision, state = controller.decide(seen, state)
        decided.append((len(decision.rounds), decision.target))
        if text.startswith("gamma"):
            third = 1 - math.sqrt(0.1) * 2 / 3
            assert decision.rounds[0].neighbours(0).self_weight == pytest.approx(third)
    assert decided == expected


def test_a_number_is_the_same_however_it_was_written() -> None:
    """A state that was saved under gamma(p=1) is that of gamma(p=1.0)."""
    sim = make_simulation("gamma(p=1)", "awc")
    state = sim.state_dict()
    name = state["control"]["name"]
    assert "p=1.0" in name
    state["control"] |= {"name": name.replace("p=1.0", "p=1"), "state": {"lr_max": 7.0}}
    sim.load_state_dict(state)
    assert sim.state_dict()["control"]["state"] == {"lr_max": 7.0}
    state["control"] |= {"name": name.replace("p=1.0", "p=2")}
    sim.load_state_dict(state)
    assert sim.state_dict()["control"]["state"] == {"lr_max": 0.0}


def test_ranks_that_load_different_states_are_told() -> None:
    """One loads the state of another control, the others their own: no rank waits for a timeout."""

    def body(group: ProcessGroup) -> str:
        model = make_model()
        options: Any = {"process_group": group, "timeout": timedelta(seconds=30)}
        optimizer = make_optimizer(model.parameters())
        gossip = decentralize(model, optimizer, "ring", control="auto", **options)
        state = gossip.state_dict()
        if group.rank() == 1:
            state["control"]["name"] = "another"
        with pytest.raises(ExchangeError) as caught:
            gossip.load_state_dict(state)
        gossip.close()
        return str(caught.value)

    for message in run_ranks(3, body, timeout=15):
        assert "all ranks must make the same calls" in message
