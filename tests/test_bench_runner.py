"""The runner: processes, kills, both engines, and several nodes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from gossamer.bench import Store, expand, run_experiment
from gossamer.bench.experiment import Experiment, parse
from gossamer.bench.runner import Listener
from gossamer.bench.store import StoreError
from gossamer.engine import RunSpec
from gossamer.records import Ended, Evaluation, Started, Step

# Processes start in a second on a machine that is free, and in many on one that is not.
pytestmark = pytest.mark.timeout(200)

SHORT = """
name = "short"
workload = "digits-mlp"
workers = 4
methods = ["C_complete", "D_ring"]
seeds = [0, 1]
run = { epochs = 1, steps_per_epoch = 6, log_every = 3, dtype = "float64" }
"""


def short(more: str = "", text: str = SHORT) -> Experiment:
    return parse(text + more, "short.toml")


class Heard(Listener):
    """Collects the calls of a runner."""

    def __init__(self) -> None:
        self.before = -1
        self.ends: dict[str, Ended] = {}
        self.steps: list[int] = []

    def planned(self, runs: Sequence[RunSpec], done: int) -> None:  # noqa: D102
        self.before = done

    def started(self, spec: RunSpec) -> None:  # noqa: D102
        pass

    def advanced(self, spec: RunSpec, step: int) -> None:  # noqa: D102
        self.steps.append(step)

    def ended(self, spec: RunSpec, ended: Ended, metric: float | None) -> None:  # noqa: D102
        self.ends[spec.method] = ended


def run_it(experiment: Experiment, folder: Path, **options: bool) -> Heard:
    heard = Heard()
    run_experiment(experiment, Store(folder), heard, jobs=2, **options)
    return heard


def statuses(experiment: Experiment, folder: Path) -> list[str]:
    ends = [Store(folder).ended(spec.id) for spec in expand(experiment).runs]
    return [ended.status if ended else "to do" for ended in ends]


def wait_until(true: Callable[[], bool], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def processes_with(text: str) -> list[int]:
    """Return the processes whose command line holds a text."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    """A second start only runs what a longer experiment adds; progress is reported step by step."""
    first = run_it(short(), tmp_path)
    assert first.before == 0
    assert sorted(set(first.steps)) == [3, 6]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    more = short(text=SHORT.replace("[0, 1]", "[0, 1, 2]"))
    second = run_it(more, tmp_path)
    assert second.before == 4
    assert statuses(more, tmp_path) == ["done"] * 6
    assert all(path.stat().st_mtime_ns == changed for path, changed in files.items())


def test_failures_are_kept_and_tried_again_on_request(tmp_path: Path) -> None:
    """Divergence is a result; an error is retried on request, and its records are kept."""
    text = SHORT.replace("seeds = [0, 1]", "seeds = 0")
    failing = """
        [[include]]
        methods = { name = "diverges", method = "D_ring", lr = 1e200 }
    """
    experiment = short(failing, text)
    heard = run_it(experiment, tmp_path)
    assert heard.ends["diverges"].status == "diverged"
    assert "the loss was" in heard.ends["diverges"].reason
    assert statuses(experiment, tmp_path).count("done") == 2
    store, spec = Store(tmp_path), expand(experiment).runs[0]
    with store.locked(experiment.text):
        story = store.read(spec.id)
        store.set_aside(spec.id)
        with store.writing(spec.id) as write:
            write(story.records[0])
            write(Ended(status="error", reason="made up"))
    assert run_it(experiment, tmp_path).before == 3
    assert run_it(experiment, tmp_path, retry=True).before == 2
    assert statuses(experiment, tmp_path).count("done") == 2
    assert len(list((tmp_path / "failures").iterdir())) == 2


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """It counts as timeout, with its records so far."""
    text = SHORT.replace("seeds = [0, 1]", "seeds = 0\ntimeout_s = 6").replace(
        "epochs = 1", "epochs = 100000"
    )
    experiment = short(text=text.replace('["C_complete", "D_ring"]', '"D_ring"'))
    heard = run_it(experiment, tmp_path)
    assert heard.ends["D_ring"].status == "timeout"
    assert heard.ends["D_ring"].reason == "took more than 6 s"
    story = Store(tmp_path).read(expand(experiment).runs[0].id)
    assert story.ended == heard.ends["D_ring"]
    assert any(isinstance(record, Step) for record in story.records)


def test_a_killed_runner_goes_on_where_it_was(tmp_path: Path) -> None:
    """After kill -9 the next start does the rest; no finished run is repeated or lost."""
    file = tmp_path / "short.toml"
    file.write_text(SHORT.replace("[0, 1]", "[0, 1, 2, 3]").replace("= 6,", "= 60,"))
    experiment, folder = parse(file.read_text(), "short.toml"), tmp_path / "out"
    command = [sys.executable, "-m", "gossamer", "bench", "run", str(file), "--out", str(folder)]
    runner = subprocess.Popen([*command, "--jobs", "1"], stderr=subprocess.DEVNULL)
    finished: set[Path] = set()
    deadline = time.monotonic() + 120
    while len(finished) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        finished = set((folder / "runs").glob("*.jsonl"))
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    kept = {path: path.stat().st_mtime_ns for path in (folder / "runs").glob("*.jsonl")}
    assert 2 <= len(kept) < 8
    heard = run_it(experiment, folder)
    assert heard.before >= len(kept)
    assert statuses(experiment, folder) == ["done"] * 8
    assert all(path.stat().st_mtime_ns == changed for path, changed in kept.items())


def test_a_run_that_ended_in_the_last_moment_is_not_overwritten(tmp_path: Path) -> None:
    """If a process died after its run ended, the complete file is not changed."""
    run_it(short(), tmp_path)
    store, spec = Store(tmp_path), expand(short()).runs[0]
    whole = store.read(spec.id)
    started = whole.records[0]
    assert isinstance(started, Started)
    store.conclude(started, 1, Ended(status="error", reason="killed"))
    assert store.read(spec.id) == whole


def test_processes_end_with_the_runner(tmp_path: Path) -> None:
    """After kill -9 of the runner nothing of a distributed run is left: no torchrun, no rank."""
    file = tmp_path / "long.toml"
    text = SHORT.replace("workers = 4", 'workers = 2\nengine = "distributed"')
    # In the specification that they are started with; a number may not end in a zero there.
    mark = f"0.0{os.getpid()}1"
    file.write_text(text.replace("epochs = 1", f"lr = {mark}, epochs = 100000"))
    command = [sys.executable, "-m", "gossamer", "bench", "run", str(file)]
    runner = subprocess.Popen([*command, "--out", str(tmp_path)], stderr=subprocess.DEVNULL)
    wait_until(lambda: len(processes_with(mark)) >= 3)  # torchrun and its ranks
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    wait_until(lambda: not processes_with(mark))


def test_a_process_that_is_killed_is_an_error_of_its_run(tmp_path: Path) -> None:
    """The runner reports the signal, keeps the records, and continues with the others."""

    class Killer(Heard):
        def advanced(self, spec: RunSpec, step: int) -> None:
            super().advanced(spec, step)
            if spec.method == "C_complete":
                for part in (tmp_path / "runs").glob(f"{spec.id}.*.part"):
                    os.kill(int(part.name.split(".")[1]), signal.SIGKILL)

    experiment = short(
        """
        [[include]]
        methods = { name = "C_complete", method = "C_complete", epochs = 100000 }
        """,
        SHORT.replace("[0, 1]", "0").replace('"C_complete", ', ""),
    )
    heard = Killer()
    run_experiment(experiment, Store(tmp_path), heard, jobs=1)
    assert statuses(experiment, tmp_path) == ["done", "error"]
    assert "killed by SIGKILL" in heard.ends["C_complete"].reason


def test_a_full_disk_ends_the_experiment_with_a_message(tmp_path: Path) -> None:
    """The runner stops with an error, and resumes when there is space again."""
    if os.geteuid() != 0:
        pytest.skip("a small file system needs root")
    mount = tmp_path / "small"
    mount.mkdir()
    options = ["-t", "tmpfs", "-o", "size=24k", "none", str(mount)]
    subprocess.run(["mount", *options], check=True)
    try:
        many = short(text=SHORT.replace("log_every = 3", "log_every = 1"))
        with pytest.raises(StoreError, match="No space left on device; free disk space"):
            run_it(many, mount)
        subprocess.run(["mount", "-o", "remount,size=4m", str(mount)], check=True)
        run_it(many, mount)
        assert statuses(many, mount) == ["done"] * 4
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_both_engines_give_one_experiment_the_same_records(tmp_path: Path) -> None:
    """Simulated and on processes under torchrun, in double precision, to rounding."""
    text = SHORT.replace("workers = 4", 'workers = 2\nengine = ["simulated", "distributed"]')
    experiment = short(text=text.replace("[0, 1]", "0").replace('"C_complete", ', ""))
    run_it(experiment, tmp_path)
    one, other = (Store(tmp_path).read(spec.id).records for spec in expand(experiment).runs)
    assert [record.kind for record in one] == [record.kind for record in other]
    for ours, theirs in zip(one, other, strict=True):
        if isinstance(ours, Step) and isinstance(theirs, Step):
            assert theirs.loss == pytest.approx(ours.loss, abs=1e-12)
            assert theirs.distance == pytest.approx(ours.distance, abs=1e-12)
            assert theirs.theta == pytest.approx(ours.theta, abs=1e-12)
            for name, spread in ours.dispersion.items():
                assert theirs.dispersion[name] == pytest.approx(spread, abs=1e-12)
        if isinstance(ours, Evaluation) and isinstance(theirs, Evaluation):
            assert theirs.average == ours.average
    norms, others = (Store(tmp_path).norms(spec.id) for spec in expand(experiment).runs)
    assert norms is not None
    assert others is not None
    assert others.drop("norm").equals(norms.drop("norm"))
    assert norms["step"].unique().sort().to_list() == [3, 6]
    np.testing.assert_allclose(others["norm"], norms["norm"], rtol=1e-12)


def run_on_two_nodes(files: Sequence[Path], folder: Path) -> tuple[list[int], list[str]]:
    """Start an agent of torchrun with each file; return their exit codes and outputs."""
    port = free_port()
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--nproc-per-node", "1", "--node-rank", str(node)),
                *("--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint"),
                f"127.0.0.1:{port}",
                *("-m", "gossamer", "bench", "run", str(file), "--out", str(folder)),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, file in enumerate(files)
    ]
    said = [agent.communicate(timeout=150)[1] for agent in agents]
    return [agent.returncode for agent in agents], said


def test_two_agents_run_the_same_file(tmp_path: Path) -> None:
    """Two torchrun agents, as on two nodes, do the distributed runs; a later start does nothing."""
    file, folder = tmp_path / "short.toml", tmp_path / "out"
    file.write_text(SHORT.replace("workers = 4", 'workers = 2\nengine = "distributed"'))
    codes, said = run_on_two_nodes([file, file], folder)
    assert codes == [0, 0], said
    experiment = parse(file.read_text(), "short.toml")
    assert statuses(experiment, folder) == ["done"] * 4
    assert sum("D_ring, 2 ranks, seed 1: done" in text for text in said) == 1


GRAPH = """
from gossamer.topology import Round, ring


def own(num_workers: int) -> Round:
    return ring(num_workers)
"""
OF_A_FILE = """
name = "own"
workload = "quadratic"
workers = 2
methods = "D_graph.py:own"
run = { epochs = 1, steps_per_epoch = 2 }
"""


@pytest.mark.parametrize(
    ("engine", "edited", "words"),
    [
        ("simulated", GRAPH + "# edited\n", "got another one since the experiment began; make"),
        ("simulated", "import no_such", "^.*graph.py must be imported without an error, got Mod"),
        ("distributed", GRAPH + "# edited\n", "got another one since the experiment began; make"),
    ],
)
def test_a_plug_in_that_is_edited_meanwhile_is_an_error_of_the_planned_run(
    tmp_path: Path, engine: str, edited: str, words: str
) -> None:
    """In one line, under the planned id; nothing is recorded under another one."""
    source, folder = tmp_path / "graph.py", tmp_path / "out"
    source.write_text(GRAPH)
    experiment = parse(f'engine = "{engine}"\n{OF_A_FILE}', "own.toml", tmp_path)
    (spec,) = expand(experiment).runs
    source.write_text(edited)
    run_it(experiment, folder)
    ended = Store(folder).ended(spec.id)
    assert ended is not None
    assert ended.status == "error"
    assert re.search(words, ended.reason)
    assert "Traceback" not in ended.reason
    assert Store(folder).run_ids() == [spec.id]


@pytest.mark.full
def test_two_nodes_with_different_plug_ins_do_not_train_together(tmp_path: Path) -> None:
    """The run ends as an error that names the rank, and both nodes end."""
    files: list[Path] = []
    for node, source in enumerate([GRAPH, GRAPH + "# edited\n"]):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "graph.py").write_text(source)
        files.append(tmp_path / str(node) / "own.toml")
        files[-1].write_text(f'engine = "distributed"\n{OF_A_FILE}')
    codes, said = run_on_two_nodes(files, tmp_path / "out")
    assert all(codes), said
    (run_id,) = Store(tmp_path / "out").run_ids()
    ended = Store(tmp_path / "out").ended(run_id)
    assert ended is not None
    assert ended.status == "error"
    assert re.search("got another one on rank 1 than on rank 0; make", ended.reason)
