"""Statistics of a gossip: totals, spans in a profile, scalars in TensorBoard."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed import ProcessGroup
from torch.optim import SGD
from torch.profiler import profile
from torch.utils.tensorboard import SummaryWriter

from gossamer.gossip import Stats, decentralize
from gossamer.gossip.failures import FailureDetector
from gossamer.gossip.network import Network
from gossamer.gossip.notices import NoticeBoard
from tests.ranks import run_ranks
from tests.reference import loss_of, make_model


def train(group: ProcessGroup, order: str, late_s: float, compute_s: float) -> Stats:
    """Take three steps in which rank 1 starts its exchange late, and all compute after that."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    gossip = decentralize(model, optimizer, "ring", process_group=group, order=order)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, group.rank(), step).backward()
        time.sleep(compute_s + late_s * group.rank())
        optimizer.step()
    gossip.gather(0)
    with gossip.drained():
        stats = gossip.stats()
    gossip.close()
    return stats


def test_waiting_is_exposed_only_where_nothing_hides_it() -> None:
    """Overlapped with computation an exchange takes no time; atc waits for the late rank."""
    hidden, _ = run_ranks(2, lambda group: train(group, "awc", 0, 0.05))
    assert hidden.overlap > 0.8
    assert hidden.exposed_per_step_s < 0.02
    exposed, _ = run_ranks(2, lambda group: train(group, "atc", 0.05, 0))
    assert exposed.overlap < 0.2
    assert exposed.exposed_per_step_s > 0.03
    assert exposed.num_steps == hidden.num_steps == 3
    num_bytes = 8 * 80  # 67 parameters of 8 bytes in four aligned places
    assert exposed.messages_sent == 3
    assert exposed.bytes_sent == 3 * num_bytes


def test_waiting_for_an_average_counts_as_collective() -> None:
    """The time that ranks wait for the last one counts as collective_s."""

    def body(group: ProcessGroup) -> float:
        detector = FailureDetector(NoticeBoard(group, timedelta(seconds=10)))
        network = Network(group, detector, torch.device("cpu"))
        time.sleep(0.1 * group.rank())
        network.collectives.average(torch.ones(3))
        network.close()
        return network.telemetry.stats(0).collective_s

    early, _late = run_ranks(2, body)
    assert early > 0.03


def test_a_profile_shows_the_phases_of_a_step() -> None:
    """finish, the optimizer's step, start: in this order, for every step that mixes."""

    def body(group: ProcessGroup) -> list[str]:
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1, foreach=True)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        with profile() as trace:
            for step in range(2):
                loss_of(model, 0, step).backward()
                optimizer.step()
            with gossip.averaged():
                pass
        gossip.close()
        events = sorted(trace.events() or (), key=lambda event: event.time_range.start)
        names = [event.name for event in events]
        # The optimizer's own span begins before its hooks: what moves parameters is inside.
        wanted = ("Mixer", "Gossip", "aten::_foreach_add_")
        return [name for name in names if name.startswith(wanted)]

    (spans,) = run_ranks(1, body)
    assert spans == [
        "aten::_foreach_add_",
        "Mixer::start",
        "Mixer::finish",
        "aten::_foreach_add_",
        "Mixer::start",
        "Mixer::drain",
        "Gossip::averaged()",
    ]


# TensorBoard's own protobuf code warns on import.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_every_number(tmp_path: Path) -> None:
    """One scalar per field, at its step, read back from the event file."""
    stats = Stats(
        num_steps=8,
        bytes_sent=640,
        messages_sent=8,
        exposed_s=0.4,
        in_flight_s=1.6,
        collective_s=0.1,
        left_out={3: 2, 5: 1},
    )
    with SummaryWriter(str(tmp_path)) as writer:
        stats.write_to(writer)
    events = EventAccumulator(str(tmp_path)).Reload()
    tags: Any = events.Tags()["scalars"]
    read: dict[str, Any] = {tag: events.Scalars(tag)[0] for tag in tags}
    assert {tag.removeprefix("gossip/") for tag in read} == {
        *("num_steps", "bytes_sent", "messages_sent", "exposed_s", "in_flight_s"),
        *("collective_s", "exposed_per_step_s", "overlap", "left_out", "mean_moved"),
        *("undecoded", "failures", "joins", "recovery_s"),
    }
    assert read["gossip/overlap"].value == pytest.approx(0.75)
    assert read["gossip/exposed_per_step_s"].value == pytest.approx(0.05)
    assert {scalar.step for scalar in read.values()} == {8}
    assert read["gossip/bytes_sent"].value == 640
    assert read["gossip/left_out"].value == 3
