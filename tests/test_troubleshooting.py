"""Messages in docs/troubleshooting.md are those that a user gets."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Optimizer

from gossamer import Checkpoints, Simulation, decentralize, picture, workloads
from gossamer.bench.experiment import parse as parse_experiment
from gossamer.bench.methods import fields_of
from gossamer.bench.report.writing import write_report
from gossamer.gossip import ExchangeError, Gossip
from gossamer.runtime_model import read_profile
from gossamer.runtime_model.measure import measure
from gossamer.topology import Round, Schedule, complete, parse, ring
from tests.pages import REPOSITORY
from tests.pool import ProcessPool
from tests.ranks import run_ranks
from tests.reference import make_model

PAGE = REPOSITORY / "docs" / "troubleshooting.md"
ROWS = re.findall(r"^\| (.+?) \| .+ \|$", PAGE.read_text(), re.MULTILINE)
MESSAGES = [row for row in ROWS if row not in ("message", "---")]

Body = Callable[[nn.Module, Optimizer, Gossip], None]


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()


# - When gossip starts


def gossips(
    change: Callable[[int, nn.Module], nn.Module] = lambda rank, model: model,
    optimizer: Callable[[nn.Module], Optimizer] = sgd,
    **options: Any,
) -> Callable[[], None]:
    """Return a function that calls decentralize() on two ranks."""

    def body(group: ProcessGroup) -> None:
        model = change(group.rank(), make_model())
        decentralize(model, optimizer(model), process_group=group, **options).close()

    return lambda: discard(run_ranks(2, body))


def discard(result: object) -> None:
    """Take a result."""


def larger_on_one(rank: int, model: nn.Module) -> nn.Module:
    return nn.Linear(5, 3) if rank else model


def gossip_twice() -> None:
    def body(group: ProcessGroup) -> None:
        model = make_model()
        with decentralize(model, sgd(model), process_group=group):
            decentralize(model, sgd(model), process_group=group)

    run_ranks(1, body)


def launched_without_group() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        model = make_model()
        decentralize(model, sgd(model))


def wrap_in_ddp() -> str:
    """On a rank of the pool: gossip with a model in DDP; return what that rank is told."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="DDP") as raised:
        decentralize(model, sgd(model))
    return str(raised.value)


# - In the training loop


def in_loop(body: Body) -> Callable[[], None]:
    """Return a function that trains a step on two ranks, and then does something wrong."""

    def rank(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, process_group=group)
        try:
            train(model, optimizer)
            body(model, optimizer, gossip)
        finally:
            gossip.close()

    return lambda: discard(run_ranks(2, rank))


@torch.no_grad()
def write_parameters(model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
    next(model.parameters()).mul_(2)
    optimizer.step()


def replace_parameter(model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
    model.get_submodule("0").weight = nn.Parameter(torch.ones(7, 5, dtype=torch.float64))
    optimizer.step()


def add_parameter(model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.step()


def scale_with_torch(model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4, 5, dtype=torch.float64)).sum()).backward()
    scaler.step(optimizer)


def learn_nan(model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
    optimizer.param_groups[0]["lr"] = float("nan")
    for _ in range(10):
        train(model, optimizer)


def finalize_nan(model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
    optimizer.param_groups[0]["lr"] = float("nan")
    train(model, optimizer)
    gossip.finalize()


def step_in_average(model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
    with gossip.averaged():
        optimizer.step()


def average_in_join(model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
    with gossip.join(), gossip.averaged():
        pass


def step_after_close(model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
    gossip.close()
    gossip.consensus_distance()


def step_another_optimizer(model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
    other = sgd(model)
    other.step()
    optimizer.step()


def step_in_backward(model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
    last = [*model.parameters()][-1]
    last.register_post_accumulate_grad_hook(lambda _: discard(optimizer.step()))
    model(torch.ones(4, 5, dtype=torch.float64)).sum().backward()


# - When another rank stops


def with_others(
    own: Callable[[Gossip], object], others: Callable[[Gossip], object]
) -> Callable[[], None]:
    """Return a function in which rank 1 of four does something else than the others.

    It raises what rank 0 gets.
    """

    def rank(group: ProcessGroup) -> str:
        model = make_model()
        optimizer = sgd(model)
        gossip = decentralize(
            model, optimizer, "ring", process_group=group, timeout=timedelta(seconds=2)
        )
        try:
            train(model, optimizer)
            (own if group.rank() == 1 else others)(gossip)
            for _ in range(0 if group.rank() == 1 else 2):
                train(model, optimizer)
        except (ExchangeError, ValueError) as error:
            return str(error)
        finally:
            gossip.close()
        return ""

    def provoke() -> None:
        raise ExchangeError(run_ranks(4, rank)[0])

    return provoke


def average(gossip: Gossip) -> None:
    with gossip.averaged():
        pass


def ring_of(rank: int) -> Schedule:
    def build(step: int) -> Round:
        return complete(4) if rank == 1 and step > 16 else ring(4)

    return Schedule(4, None, build)


def train_long(topology: Callable[[int], Schedule]) -> Callable[[], None]:
    """Return a function that trains past the rounds that ranks compare at the start."""

    def rank(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = sgd(model)
        chosen = topology(group.rank())
        gossip = decentralize(model, optimizer, chosen, process_group=group)
        try:
            for _ in range(20):
                train(model, optimizer)
        finally:
            gossip.close()

    return lambda: discard(run_ranks(4, rank))


# - Checkpoints


def with_checkpoints(body: Callable[[Path, Gossip, nn.Module], object]) -> Callable[[Path], None]:
    def provoke(folder: Path) -> None:
        def rank(group: ProcessGroup) -> None:
            model = make_model()
            optimizer = sgd(model)
            with decentralize(model, optimizer, process_group=group) as gossip:
                train(model, optimizer)
                body(folder, gossip, model)

        run_ranks(1, rank)

    return provoke


def save_in_a_used_folder(folder: Path, gossip: Gossip, model: nn.Module) -> None:
    (folder / "step-00000007").mkdir()
    (folder / "step-00000007" / "checkpoint.json").write_text("{}")
    Checkpoints(folder, gossip, model=model).save()


class Odd:
    """An object whose state cannot be written."""

    def state_dict(self) -> dict[str, Any]:
        """Hold a class."""
        return {"made_by": Odd}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


# - Simulation


def simulate(
    inputs: tuple[int, ...] = (8, 2, 5), reduction: str = "mean", **options: Any
) -> Callable[[], None]:
    def provoke() -> None:
        loss = nn.MSELoss(reduction=reduction)
        sim = Simulation(nn.Linear(5, 3), loss, lambda p: SGD(p, lr=0.1), 8, "ring", **options)
        sim.step(torch.zeros(inputs), torch.zeros(8, 2, 3))

    return provoke


def draw_without_plotly() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "plotly", None)
        picture.draw(parse("ring", 4))


EXPERIMENT = 'name = "mine"\nworkload = "digits-mlp"\nworker = 4\nmethods = ["D_ring"]\n'

# What provokes each message, by how the message begins.
PROVOKE: dict[str, Callable[[], object]] = {
    "decentralize needs": launched_without_group,
    "all ranks must call": gossips(larger_on_one),
    "the optimizer must hold": gossips(optimizer=lambda model: sgd(make_model())),
    "a parameter can gossip once": gossip_twice,
    "an optimizer must take": gossips(optimizer=lambda model: LBFGS(model.parameters())),
    "unknown topology": gossips(topology="rign"),
    "the topology must be on": gossips(topology=ring(8)),
    "torus needs": lambda: parse("torus", 7),
    "one_peer_hypercube needs": lambda: parse("one_peer_hypercube", 12),
    "awc mixes once": gossips(gossip_steps=2),
    "repeat mixes": gossips(control="repeat(constant(c=0.5))"),
    "parameters must not change": in_loop(write_parameters),
    "parameters must stay": in_loop(replace_parameter),
    "parameters must be trainable": in_loop(add_parameter),
    "parameters must be finite": in_loop(learn_nan),
    "finalize() must average": in_loop(finalize_nan),
    "a GradScaler must": in_loop(scale_with_torch),
    "optimizer.step() must": in_loop(step_in_average),
    "inside join()": in_loop(average_in_join),
    "this gossip must be open": in_loop(step_after_close),
    "every optimizer that trains": in_loop(step_another_optimizer),
    "awc acts before": in_loop(step_in_backward),
    "rank … waits for bucket": with_others(lambda gossip: gossip.close(), lambda gossip: None),
    "rank … called averaged()": with_others(average, lambda gossip: None),
    "all ranks must make": with_others(average, lambda gossip: gossip.consensus_distance()),
    "all ranks must mix": train_long(ring_of),
    "inputs must be": simulate(inputs=(4, 2, 5)),
    "parameters, gradients, buffers and": simulate(memory_gb=1e-6),
    "loss(output, target)": simulate(reduction="none"),
    "mine.toml has": lambda: parse_experiment(EXPERIMENT, "mine.toml"),
    "unknown method": lambda: fields_of("D_rign", workers=4, epochs=1),
    "unknown workload": lambda: workloads.find("digit-mlp"),
    "a profile must be": lambda: read_profile(Path("nowhere.json")),
    "a profile needs": lambda: measure(model := make_model(), sgd(model), "profile.json"),
    "a report needs": lambda: write_report(Path("nowhere")),
    "pictures need plotly": draw_without_plotly,
}
IN_A_FOLDER: dict[str, Callable[[Path], object]] = {
    "a run must continue": with_checkpoints(save_in_a_used_folder),
    "checkpoints need": with_checkpoints(lambda folder, gossip, _: Checkpoints(folder, gossip)),
    "a state must hold": with_checkpoints(
        lambda folder, gossip, _: Checkpoints(folder, gossip, odd=Odd()).save()
    ),
}
# Found in the source only, by how they begin, and why.
FOUND = {
    "DDP and gossip": "test_a_model_in_ddp_is_refused provokes it",
    "training must go": "needs processes: tests/test_gossip_silent.py",
    "all ranks must have": "tests/test_gossip_silent.py",
    "rank … goes on to": "tests/test_gossip_silent.py",
    "rank … waits for … and failed": "needs a killed process: tests/test_gossip_failures.py",
    "a member must answer": "needs a stalled process: tests/test_survival.py",
    "worker": "tests/test_joining.py",
    "members must reach": "needs a store that ends: python -m benchmarks.faults --continue",
    "all workers must make": "tests/test_survival.py",
    "on_failure='continue' needs a topology": "tests/test_survival.py",
    "on_failure='continue' needs a store": "tests/test_survival.py",
    "a lab must be run as root": "tests/test_lab_cluster.py",
    "a lab needs the program": "tests/test_lab_cluster.py",
    "a lab needs a kernel": "tests/test_lab_cluster.py",
    "a lab must be allowed": "needs a container",
    "measured rates must": "needs links that are off",
    "--cut and --restore": "tests/test_lab_cluster.py",
}


def test_each_message_is_provoked_or_found() -> None:
    """No message of the page is without a row here, and no row without a message."""
    rows = [*PROVOKE, *IN_A_FOLDER, *FOUND]
    assert [sum(message.startswith(row) for row in rows) for message in MESSAGES] == [1] * len(rows)


def pattern(message: str) -> str:
    return ".*".join(map(re.escape, message.split("…")))


def of(rows: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(message, row, id=row)
        for row in rows
        for message in MESSAGES
        if message.startswith(row)
    ]


@pytest.mark.parametrize(("message", "row"), of(PROVOKE))
def test_a_message_is_what_a_user_gets(message: str, row: str) -> None:
    """What the page quotes is in the error that is raised."""
    with pytest.raises((ValueError, RuntimeError, AssertionError)) as raised:
        PROVOKE[row]()
    assert re.search(pattern(message), str(raised.value), re.DOTALL), str(raised.value)[-600:]


@pytest.mark.parametrize(("message", "row"), of(IN_A_FOLDER))
def test_a_message_about_files_is_what_a_user_gets(message: str, row: str, tmp_path: Path) -> None:
    """What the page quotes is in the error that is raised."""
    with pytest.raises(AssertionError) as raised:
        IN_A_FOLDER[row](tmp_path)
    assert re.search(pattern(message), str(raised.value), re.DOTALL), str(raised.value)[-600:]


def test_a_model_in_ddp_is_refused(pool: ProcessPool) -> None:
    """DDP over the ranks that gossip says what the page quotes."""
    message = next(message for message in MESSAGES if message.startswith("DDP and gossip"))
    assert all(message in said for said in pool.run(wrap_in_ddp))


def strings() -> Iterator[str]:
    """Return every string in the source, with … for what is filled in."""
    for path in (REPOSITORY / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.parametrize(("message", "row"), of(FOUND))
def test_a_message_is_in_the_source(message: str, row: str) -> None:
    """What cannot be provoked here is worded in the source as on the page, part by part."""
    everything = list(strings())
    for part in message.split("…"):
        assert any(part.strip() in text for text in everything), part
