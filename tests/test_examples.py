"""The programs in examples/ run, and reach what they say."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.pool import ProcessPool

# Jobs of several processes that each import torch: a loaded machine takes its time.
pytestmark = pytest.mark.timeout(150)

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, constants: dict[str, int] | None = None) -> str:
    """Run a script in this process and in the group that is there; return what it prints.

    Args:
        name: of the file, without its ending.
        constants: other values for what the script sets at its top, to make it short.
    """
    path = EXAMPLES / f"{name}.py"
    source = with_constants(path, constants or {})
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        exec(compile(source, path, "exec"), {"__name__": "__main__"})
    return output.getvalue()


def with_constants(path: Path, constants: dict[str, int]) -> str:
    """Return a script with other values for what it sets at its top."""
    source = path.read_text()
    for constant, value in constants.items():
        assignment = rf"^(\w+, )*{constant}(, \w+)* = .+$"
        changed = rf"\g<0>; {constant} = {value}"
        source, found = re.subn(assignment, changed, source, count=1, flags=re.MULTILINE)
        assert found, f"{path} does not set {constant}"
    return source


def accuracy_in(printed: str) -> float:
    """Return the accuracy that an example printed."""
    found = re.search(r"test accuracy (0\.\d+)", printed)
    assert found, printed
    return float(found[1])


def test_gossip_reaches_ddps_accuracy(pool: ProcessPool, tmp_path: Path) -> None:
    """Digits on four processes: gossip is within 3 points of DDP, both above 88 %; gossip by the
    command that its docstring says to type.
    """
    reached = accuracy_in(run_command("ddp_to_gossip", tmp_path))
    ddp = accuracy_in(pool.run(run_example, "ddp")[0])
    assert min(reached, ddp) > 0.88
    assert abs(reached - ddp) < 0.03


def test_a_gpt_learns_to_write(pool: ProcessPool) -> None:
    """Bits per byte fall within 60 steps on four processes, and rank 0 alone prints and writes."""
    printed = pool.run(run_example, "gpt", {"STEPS": 60, "REPORT_EVERY": 20})
    bits = [float(number) for number in re.findall(r"([\d.]+) bits per byte", printed[0])]
    assert len(bits) == 3
    assert bits[2] < bits[1] < bits[0] < 8
    assert len(printed[0].partition("def ")[2]) > 100
    assert printed[1:] == ["", "", ""]


def test_a_gpt_sharded_within_nodes_learns(pool: ProcessPool) -> None:
    """FSDP inside two nodes of two and gossip between: bits fall, and a rank holds half."""
    printed = pool.run(run_example, "fsdp_between_nodes", {"STEPS": 30, "REPORT_EVERY": 15})
    bits = [float(number) for number in re.findall(r"([\d.]+) bits per byte", printed[0])]
    assert len(bits) == 2
    assert bits[1] < bits[0] < 8
    holdings = [re.search(r"holds ([\d,]+) of ([\d,]+)", text) for text in printed]
    numbers = [[int(n.replace(",", "")) for n in held.groups()] for held in holdings if held]
    assert sum(held for held, _ in numbers) == 2 * numbers[0][1]
    assert all(held < 0.6 * whole for held, whole in numbers)


def test_a_topology_of_ones_own() -> None:
    """A schedule for racks sends as little between racks as a ring, and mixes faster."""
    printed = run_example("custom_topology", {"STEPS": 20}).splitlines()[1:]
    rows = {line[:15].strip(): list(map(float, line[15:].split())) for line in printed}
    assert set(rows) == {"ring", "exponential", "cliques", "mostly within"}
    (slow, ring_copies, *_), (fast, own_copies, *_) = rows["ring"], rows["mostly within"]
    assert own_copies == ring_copies
    assert fast > 3 * slow


def test_control_keeps_workers_closer() -> None:
    """Controlled workers are closer than on a plain ring; an all-reduce costs no more bytes."""
    printed = run_example("consensus_control", {"STEPS": 100}).splitlines()[1:]
    rows = {line.split()[4].rstrip(":"): list(map(float, line.split()[:4])) for line in printed}
    distances = {control: row[2] for control, row in rows.items()}
    megabytes = {control: row[3] for control, row in rows.items()}
    assert distances["exact"] < distances["constant(c=0.25)"] < distances["plain"]
    assert megabytes["ada_consensus(constant(c=0.25))"] <= megabytes["plain"]


def test_a_thousand_workers() -> None:
    """1008 workers take a step on every graph of the example, and centrally."""
    printed = run_example("simulate_1008_workers", {"STEPS": 1})
    assert all(name in printed for name in ("ring", "exponential", "ada", "centralized"))


def test_accelerate_reaches_an_accuracy(tmp_path: Path) -> None:
    """What the docstring says to type runs, and trains digits to 88 %."""
    assert accuracy_in(run_command("accelerate_prepare", tmp_path)) > 0.88


def run_command(name: str, folder: Path) -> str:
    """Run what an example's docstring says to type; return what it prints."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    torchrun, *arguments, script = shlex.split(text.splitlines()[-1])
    assert torchrun == "torchrun"
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, EXAMPLES.parent / script],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_every_example_is_run_here() -> None:
    """A new file in examples/ gets a test."""
    here = Path(__file__)
    files = (here, here.with_name("test_nanogpt.py"), here.with_name("test_frameworks.py"))
    texts = "".join(file.read_text() for file in files)
    names = {word.removesuffix(".py") for word in re.findall(r'"([\w.]+)"', texts)}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= names
