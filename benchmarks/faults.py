"""The error on every rank when one of them fails, in real processes with real signals.

    python -m benchmarks.faults [--continue] [--timeout 5] [--workers 4] [--together 5] [FAULT ...]

Each fault happens at step 20 of a training loop, or earlier. For every surviving rank it prints the
seconds from the fault to its error, and the error. Processes are forked from one that has imported
torch, so a fault takes its timeout and little more. With ``--continue`` survivors continue, and it
prints how long after the fault the last of them completed its next step (``benchmarks.survival``);
run these with ``--together 1``, because concurrent faults slow each other down. Links are cut in a
lab, as root.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks import survival
from gossamer.gossip import Gossip, decentralize
from gossamer.gossip.network import Network
from gossamer.topology import Round, Schedule, parse, ring

FAULT_STEP = 20
NUM_STEPS = 36
_END_S = 15.0
"""How long a rank may take to end after its error."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    culprit: int
    """The rank that it happens on."""

    cause: str
    """What every other rank's error must contain."""

    happen: Callable[[Gossip], object]
    """Called on the culprit before its step."""

    topology: str | Callable[[int, int], Schedule] = "ring"
    """A string, or a function of the rank and the number of workers."""

    everywhere: bool = False
    """Whether every rank does it."""

    silent: bool = False
    """Whether the culprit raises no error of its own."""

    step: int | None = FAULT_STEP
    """When it happens; None for between the handshake and the connections."""

    stored_on_0: bool = False
    """Whether rank 0's process holds the store, as without torchrun."""


def _kill(_: object = None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stall(gossip: Gossip) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(gossip: Gossip) -> None:
    raise ValueError("bad sample in the data")


def _spoil_gradients(gossip: Gossip) -> None:
    def spoil(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.fill_(math.nan)

    register_optimizer_step_pre_hook(spoil)


def _average_alone(gossip: Gossip) -> None:
    with gossip.averaged():
        pass


def _measure_alone(gossip: Gossip) -> None:
    gossip.consensus_distance()


def _join_alone(gossip: Gossip) -> None:
    with gossip.join():
        pass


def _keep_alone(gossip: Gossip) -> None:
    with gossip.drained(keep_changes=True):
        pass


def _average_or_measure(gossip: Gossip) -> None:
    """Make another collective call on rank 1 than on the others."""
    if gossip.rank == 1:
        gossip.consensus_distance()
    else:
        _average_alone(gossip)


def _go_on(gossip: Gossip) -> None:
    pass


def _deviating(rank: int, num_workers: int) -> Schedule:
    """Return a schedule that differs on rank 2 from the step of the fault on."""
    usual, other = ring(num_workers), parse("star", num_workers).round(0)

    def build(step: int) -> Round:
        return other if rank == 2 and step >= FAULT_STEP else usual

    return Schedule(num_workers, None, build)


def _meets_late(rank: int, num_workers: int) -> Schedule:
    """Return a schedule in which most ranks are first connected after the fault."""
    pairs = parse("one_peer_exponential", num_workers)

    def build(step: int) -> Round:
        return pairs.round(0 if step <= FAULT_STEP else step)

    return Schedule(num_workers, None, build)


_NOT_FINITE = "rank 2 raised NonFiniteError('parameters must be finite, got those of rank 2"

FAULTS: dict[str, Fault] = {
    "killed": Fault(2, "rank 2 is gone", _kill, silent=True),
    "killed in an all-reduce": Fault(2, "rank 2 is gone", _kill, "complete", silent=True),
    "killed while ranks connect": Fault(2, "rank 2 is gone", _kill, silent=True, step=None),
    "killed before first contact": Fault(2, "rank 2 is gone", _kill, _meets_late, silent=True),
    "killed before first contact, by name": Fault(
        2, "rank 2 is gone", _kill, "random_matching", silent=True, step=0
    ),
    "stalled": Fault(2, "rank 2 is gone or stalled", _stall, silent=True),
    "stalled in pairs": Fault(
        2, "rank 2 is gone or stalled", _stall, "one_peer_exponential", silent=True
    ),
    "raises": Fault(2, "rank 2 raised ValueError('bad sample in the data') at step 20", _raise),
    "NaN": Fault(2, _NOT_FINITE, _spoil_gradients),
    "NaN in an all-reduce": Fault(2, _NOT_FINITE, _spoil_gradients, "complete"),
    "rank 0 killed": Fault(0, "rank 0 is gone", _kill, silent=True),
    "rank 0 killed with the store": Fault(
        0, "the store does not answer", _kill, silent=True, stored_on_0=True
    ),
    "rank 0 stalled with the store": Fault(
        0, "the store does not answer", _stall, silent=True, stored_on_0=True
    ),
    "averages alone": Fault(1, "rank 1 called averaged() at step 20, and ranks", _average_alone),
    "measures alone": Fault(
        1, "rank 1 called consensus_distance() at step 20", _measure_alone, "complete"
    ),
    "joins alone": Fault(1, "rank 1 called join() at step 20", _join_alone, "complete"),
    "keeps changes alone": Fault(
        1, "rank 1 called drained(keep_changes=True) at step 20", _keep_alone
    ),
    "makes another call": Fault(
        1, "all ranks must make the same calls", _average_or_measure, "complete", everywhere=True
    ),
    "ends early": Fault(1, "rank 1 ended its gossip", Gossip.close, silent=True),
    "another round": Fault(2, "another one than rank", _go_on, _deviating),
}


@dataclass(frozen=True)
class Answer:
    """The error of one rank."""

    rank: int
    seconds: float
    message: str
    exit_code: int = 0


@dataclass(frozen=True)
class Running:
    """The processes of one fault."""

    folder: Path
    ranks: list[int]
    """Process ids, in the order of ranks."""

    holder: int | None
    """The process that holds the store, unless rank 0 does."""


def start(name: str, num_workers: int, timeout_s: float) -> Running:
    """Start the ranks of a fault."""
    fault = FAULTS[name]
    # Not a `with`: a forked process unwinds through this frame, and must not delete the folder.
    folder = Path(tempfile.mkdtemp(prefix="gossamer-faults-"))
    holder = None if fault.stored_on_0 else _fork(lambda: _hold_store(folder))
    ranks = [
        _fork(lambda rank=rank: _work(fault, rank, num_workers, timeout_s, folder))
        for rank in range(num_workers)
    ]
    return Running(folder, ranks, holder)


def collect(running: Running, timeout_s: float) -> list[Answer]:
    """Wait for the ranks to end; return the errors of those that raised."""
    codes = _reap(running.ranks, 2 * timeout_s + 2 * _END_S)
    if running.holder is not None:
        os.kill(running.holder, signal.SIGKILL)
        os.waitpid(running.holder, 0)
    answers = [
        Answer(**json.loads(path.read_text()), exit_code=code)
        for rank, code in enumerate(codes)
        if (path := running.folder / f"{rank}.json").exists()
    ]
    shutil.rmtree(running.folder)
    return answers


def _fork(body: Callable[[], None]) -> int:
    """Run a function in a forked process, which ends as a script does."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        body()
        sys.exit()
    return pid


def _reap(pids: list[int], patience_s: float) -> list[int]:
    """Wait for all processes, kill those that do not end, and return exit codes."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + patience_s
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if all(pid in codes or _is_stopped(pid) for pid in pids):
            break
        time.sleep(0.05)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [codes[pid] for pid in pids]


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def _work(fault: Fault, rank: int, num_workers: int, timeout_s: float, folder: Path) -> None:
    """Train on one rank until the fault, and write its error to a file."""
    torch.set_num_threads(1)
    holds = fault.stored_on_0 and rank == 0
    store = _open_store(folder) if holds else _join_store(folder)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_workers)
    torch.manual_seed(rank)
    model = nn.Linear(1000, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    make = fault.topology
    began = time.time()

    def connect(*given: Any, **options: Any) -> Network:
        nonlocal began
        began = time.time()
        if rank == fault.culprit:
            _kill()
        return Network(*given, **options)

    if fault.step is None:
        sys.modules[decentralize.__module__].Network = connect  # pyright: ignore[reportAttributeAccessIssue]
    try:
        gossip = decentralize(
            model,
            optimizer,
            make if isinstance(make, str) else make(rank, num_workers),
            timeout=timedelta(seconds=timeout_s),
        )
        for step in range(NUM_STEPS):
            time.sleep(0.02)
            if step == fault.step:
                began = time.time()
                if rank == fault.culprit or fault.everywhere:
                    fault.happen(gossip)
                    if fault.happen == Gossip.close:
                        return
            optimizer.zero_grad()
            model(torch.randn(8, 1000)).square().mean().backward()
            optimizer.step()
    except BaseException as error:
        answer = {"rank": rank, "seconds": time.time() - began, "message": str(error)}
        aside = folder / f"{rank}.part"
        aside.write_text(json.dumps(answer))
        aside.rename(folder / f"{rank}.json")
        raise


def _open_store(folder: Path) -> TCPStore:
    store = TCPStore("127.0.0.1", 0, is_master=True)
    (folder / "port.part").write_text(str(store.port))
    (folder / "port.part").rename(folder / "port")
    return store


def _join_store(folder: Path) -> TCPStore:
    deadline = time.monotonic() + 30
    while not (folder / "port").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)


def _hold_store(folder: Path) -> None:
    """Hold the store, as torchrun's agent does, until killed."""
    _store = _open_store(folder)
    time.sleep(600)


def rows(
    names: list[str], num_workers: int, timeout_s: float, together: int
) -> Iterator[dict[str, Any]]:
    """Yield one row per fault and surviving rank; several faults at a time, as they mostly wait."""
    torch.set_num_threads(1)
    torch.optim.SGD(nn.Linear(1, 1).parameters())  # triggers imports, once before the forks
    gc.freeze()  # else every fork collects the parent's garbage when it ends
    for batch in (names[i : i + together] for i in range(0, len(names), together)):
        running = [start(name, num_workers, timeout_s) for name in batch]
        for name, processes in zip(batch, running, strict=True):
            for answer in collect(processes, timeout_s):
                yield {"fault": name, **vars(answer)}


def print_survival(names: list[str], timeout_s: float, together: int, *, as_json: bool) -> None:
    """Print a row per fault about its survivors."""
    if not as_json:
        print("| fault | survivors | seconds | steps lost | all went on | others said why |")
        print("|---|---|---|---|---|---|")
    for row in survival.play(names, timeout_s, together):
        if as_json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"| {row['fault']} | {row['survivors']} | {row['seconds']:.2f} "
                f"| {row['steps_lost']} | {row['went_on'] and row['one_model']} | {row['said']} |",
                flush=True,
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=5.0, help="of the gossip, in seconds")
    parser.add_argument("--together", type=int, default=5, help="faults at a time")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--continue", action="store_true", dest="survive", help="with the others")
    options = parser.parse_args()
    known = survival.FAULTS if options.survive else FAULTS
    unknown = set(options.faults) - set(known)
    if unknown:
        parser.error(f"unknown faults {sorted(unknown)}; choose from {list(known)}")
    if options.survive:
        names = options.faults or survival.playable()
        print_survival(names, options.timeout, options.together, as_json=options.json)
        return
    if not options.json:
        print("| fault | rank | seconds | exit code | error |\n|---|---|---|---|---|")
    for row in rows(
        options.faults or [*FAULTS], options.workers, options.timeout, options.together
    ):
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            text = row["message"].replace("|", "/").replace("\n", " ")
            print(
                f"| {row['fault']} | {row['rank']} | {row['seconds']:.1f} | {row['exit_code']} "
                f"| {text} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
