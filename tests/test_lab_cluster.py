from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gossamer.errors import UserError
from gossamer.lab import Cluster, HostFailed, Layout, one_switch, parse_layout
from gossamer.lab.iproute import check_machine, configure
from gossamer.lab.iproute import run as run_tool
from gossamer.lab.namespaces import living_labs, sweep
from gossamer.lab.processes import HostProcesses, Launch

COMMAND = [sys.executable, "-m", "gossamer", "lab"]


def _why_not() -> str:
    try:
        with Cluster(one_switch(1, "1gbit")):
            return ""
    except UserError as error:
        return str(error)


WHY_NOT = _why_not()
needs_lab = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "a lab can be made")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def names() -> set[str]:
    """Return every namespace, and every folder of files for one, that a test may have left.

    Those of a lab that another living process runs meanwhile are not ours to judge.
    """
    folders = (Path("/run/netns"), Path("/etc/netns"))
    found = {path.name for folder in folders for path in folder.glob("gossamer-*")}
    others = {lab for lab in living_labs() if int(lab.split("-")[1]) != os.getpid()}
    return {name for name in found if name.partition(".")[0] not in others}


def interfaces() -> str:
    return subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout


def await_true(what: str, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)


def sleeps(seconds: str) -> bool:
    """Return whether a `sleep` of so many seconds runs anywhere; tests tell theirs apart by it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            program, *arguments = path.read_text().rstrip("\0").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if Path(program).name == "sleep" and arguments == [seconds]:
            return True
    return False


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Whatever a test does, the machine is afterwards as it was before."""
    if WHY_NOT:
        yield
        return
    before_names, before_interfaces = names(), interfaces()
    yield
    assert names() == before_names
    assert interfaces() == before_interfaces


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with Cluster(one_switch(2, "200mbit")) as cluster:
        yield cluster


def run(cluster: Cluster, command: Sequence[str]) -> dict[str, list[str]]:
    """Run a command on a cluster and return each host's lines."""
    lines: dict[str, list[str]] = {host.name: [] for host in cluster.layout.hosts}
    cluster.run(command, sink=lambda host, line: lines[host].append(line), timeout_s=50)
    return lines


@needs_lab
def test_a_worker_finds_the_environment_of_torchrun() -> None:
    """Ranks, sizes, the address of rank 0 and the interface are in every worker's environment."""
    code = """
    import os
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                 "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        print(os.environ[name])
    """
    with Cluster(parse_layout("2x2:1gbit/100mbit")) as cluster:
        lines = run(cluster, python(code))
    common = ["10.77.0.1", "29500", "eth0", os.environ.get("OMP_NUM_THREADS", "1")]
    assert lines["host0"] == ["0", "4", "0", "2", "0", *common]
    assert lines["host3"] == ["3", "4", "1", "2", "1", *common]


@needs_lab
def test_a_torch_script_runs_unchanged_and_its_bytes_are_counted(pair: Cluster) -> None:
    """An all-reduce through env:// works, and each host sends what Gloo's algorithm sends."""
    code = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    values = torch.full((500_000,), float(dist.get_rank() + 1))
    dist.all_reduce(values)
    print(values[0].item())
    dist.destroy_process_group()
    """
    before = pair.sent_bytes()
    lines = run(pair, python(code))
    sent = [after - at_first for after, at_first in zip(pair.sent_bytes(), before, strict=True)]
    assert lines == {"host0": ["3.0"], "host1": ["3.0"]}
    # On two hosts each sends the tensor once; frames add 4.6 %, the set-up some kilobytes.
    assert sent == pytest.approx([2e6 * 1514 / 1448] * 2, rel=0.03)


@needs_lab
@pytest.mark.parametrize(
    ("layout", "window_s"),
    [
        (one_switch(2, "10mbit"), 1.0),
        (one_switch(2, "300mbit"), 0.5),
        (one_switch(2, "1gbit"), 0.5),
        (one_switch(3, "100mbit,1gbit,300mbit"), 0.5),
        (parse_layout("2x2:1gbit/100mbit"), 0.5),
    ],
    ids=["10mbit", "300mbit", "1gbit", "per_host", "nodes"],
)
def test_rates_are_what_was_asked_for(layout: Layout, window_s: float) -> None:
    """The rate measured between hosts is within 5 % of the slowest link's on the path."""
    with Cluster(layout) as cluster:
        wrong = [str(each) for each in cluster.measure(window_s) if not each.holds]
    assert not wrong


@needs_lab
def test_hosts_of_a_node_share_its_uplink() -> None:
    """Two hosts of a node that send to another node together get its uplink's rate, not each."""
    code = """
    import os, socket, time
    rank, start = int(os.environ["RANK"]), float(os.environ["START"])
    if rank >= 2:
        with socket.create_server((f"host{rank}", 5000)) as server:
            connection, _ = server.accept()
            received = 0
            while chunk := connection.recv(65536):
                received += len(chunk) * (start < time.time() < start + 1.0)
            print(received)
    else:
        time.sleep(0.5)
        with socket.create_connection((f"host{rank + 2}", 5000)) as connection:
            while time.time() < start + 1.2:
                connection.sendall(bytes(20_000))
    """
    received: list[int] = []
    with Cluster(parse_layout("2x2:1gbit/40mbit")) as cluster:
        cluster.run(
            python(code),
            environment={"START": str(time.time() + 4.0)},
            sink=lambda _, line: received.append(int(line)),
            timeout_s=20,
        )
    assert sum(received) == pytest.approx(40e6 / 8 * 1448 / 1514, rel=0.1)


@needs_lab
def test_acknowledgements_have_a_queue_of_their_own(pair: Cluster) -> None:
    """Of what a port of the switch sends, frames of TCP without data wait for no data."""
    pair.measure(0.1)
    listed = run_tool("tc", "-n", f"{pair.id}.switch", "-s", "class", "show", "dev", "host0")
    found = re.findall(r"class htb (\S+) .*\n Sent (\d+) bytes (\d+) pkt", listed)
    sent = {name: (int(num_bytes), int(frames)) for name, num_bytes, frames in found}
    num_bytes, frames = sent["1:2"]
    assert frames > 10
    assert num_bytes == 66 * frames
    assert sent["1:3"][0] > 10 * num_bytes


@needs_lab
def test_the_first_failure_ends_all_others(pair: Cluster) -> None:
    """A host that fails ends the rest, which would go on, and the error has its code and output."""
    script = "[ $RANK = 0 ] && exec sleep 600.25; echo about to fail; sleep 0.2; exit 7"
    with pytest.raises(HostFailed) as failure:
        run(pair, ["sh", "-c", script])
    assert (failure.value.host, failure.value.code) == ("host1", 7)
    assert failure.value.output == "about to fail"
    assert not sleeps("600.25")


@needs_lab
def test_a_worker_that_ignores_sigterm_is_killed() -> None:
    """What does not end on SIGTERM is ended by SIGKILL after the grace."""
    script = 'trap "" TERM; [ $RANK = 0 ] && exec sleep 600.125; sleep 0.2; exit 1'
    with Cluster(one_switch(2, "1gbit")) as cluster, pytest.raises(HostFailed):
        run(cluster, ["sh", "-c", script])
    assert not sleeps("600.125")


@needs_lab
def test_a_run_that_takes_too_long_says_what_it_waited_for(pair: Cluster) -> None:
    """A timeout ends the command and names the hosts on which it was running."""
    with pytest.raises(TimeoutError, match="host0, host1"):
        pair.run(["sleep", "600"], timeout_s=0.2)


@needs_lab
def test_a_cut_link_carries_nothing_until_it_is_restored(pair: Cluster) -> None:
    """Messages stop when a host's link is cut, and the connection continues when it is restored."""
    code = """
    import os, socket, time
    if os.environ["RANK"] == "0":
        with socket.create_server(("host0", 5000)) as server:
            connection, _ = server.accept()
            while message := connection.recv(1):
                print("got", flush=True)
    else:
        time.sleep(0.3)
        with socket.create_connection(("host0", 5000)) as connection:
            while True:
                connection.sendall(b".")
                time.sleep(0.01)
    """
    got: queue.SimpleQueue[str] = queue.SimpleQueue()
    job = pair.start(python(code), sink=lambda _, line: got.put(line))
    try:
        assert got.get(timeout=10) == "got"
        pair.cut("host1")
        time.sleep(0.1)
        while not got.empty():
            got.get()
        with pytest.raises(queue.Empty):
            got.get(timeout=0.5)
        pair.restore("host1")
        assert got.get(timeout=10) == "got"
    finally:
        pair.restore("host1")
        job.stop()


@needs_lab
def test_a_link_that_is_none_cannot_be_cut(pair: Cluster) -> None:
    """The error for an unknown link lists those that there are."""
    with pytest.raises(UserError, match="one of host0, host1, got 'host9'"):
        pair.cut("host9")


@needs_lab
def test_descendants_of_workers_end_with_the_lab() -> None:
    """A process that a worker left in a session of its own is gone when the lab is."""
    with Cluster(one_switch(1, "1gbit")) as cluster:
        cluster.run(["sh", "-c", "setsid sleep 601.25 > /dev/null 2>&1 &"], timeout_s=10)
        await_true("the descendant", lambda: sleeps("601.25"))
    assert not sleeps("601.25")


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_removes_everything(number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM end the workers, remove the lab and give a shell's exit code."""
    marker = f"600.{number.value}"
    lab = subprocess.Popen(
        [*COMMAND, "--hosts", "2", "--rate", "1gbit", "--", "sleep", marker],
        # A test run in the background may have been told to ignore SIGINT, and hands that down.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    await_true("the worker", lambda: sleeps(marker))
    lab.send_signal(number)
    assert lab.wait(10) == 128 + number
    assert not sleeps(marker)


@needs_lab
def test_a_killed_lab_is_cleaned_up_by_the_next() -> None:
    """After kill -9 the workers die with the lab, and the next start removes what is left.

    A descendant in a session of its own outlives the lab, and is ended by the next start too. A
    lab that is alive is left alone by it.
    """
    script = "setsid sleep 602.5 & exec sleep 602.75"
    killed = subprocess.Popen(
        [*COMMAND, "--hosts", "1", "--rate", "1gbit", "--", "sh", "-c", script]
    )
    await_true("the workers", lambda: sleeps("602.5") and sleeps("602.75"))
    with Cluster(one_switch(1, "1gbit")) as alive:
        killed.kill()
        killed.wait(10)
        await_true("the death of the worker", lambda: not sleeps("602.75"))
        assert any(str(killed.pid) in name for name in names())
        sweep()
        assert not any(str(killed.pid) in name for name in names())
        assert not sleeps("602.5")
        assert alive.id in living_labs()
        alive.run(["true"], timeout_s=10)


@needs_lab
def test_the_command_shows_the_failing_host_again(tmp_path: Path) -> None:
    """The command prefixes output by host, repeats the failing host's and has its exit code."""
    other = tmp_path / "1"
    waits = f"for i in $(seq 400); do test -e {other} && break; sleep 0.05; done"
    script = (
        f'echo "I am $RANK"; touch {tmp_path}/$RANK; [ $RANK = 1 ] && sleep 30; {waits}; exit 3'
    )
    done = subprocess.run(
        [*COMMAND, "--hosts", "2", "--rate", "1gbit", "--", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == ["[host0] I am 0", "[host1] I am 1"]
    assert done.stderr.endswith("error: host0 ended with exit code 3; its last output:\nI am 0\n")


@needs_lab
def test_verify_prints_rates() -> None:
    """With --verify and no command it measures, prints to stdout and ends."""
    done = subprocess.run(
        [*COMMAND, "--hosts", "2", "--rate", "300mbit", "--verify"],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert "host0" in done.stdout
    assert "300mbit" in done.stdout


@needs_lab
def test_a_link_is_cut_from_another_shell(pair: Cluster) -> None:
    """The options --cut and --restore reach the lab that another process runs."""
    link = ["ip", "netns", "exec", f"{pair.id}.host0", "cat", "/sys/class/net/eth0/carrier"]
    for option, carrier in (("--cut", "0\n"), ("--restore", "1\n")):
        subprocess.run([*COMMAND, option, "host0", "--lab", pair.id], timeout=50, check=True)
        seen = subprocess.run(link, capture_output=True, text=True, timeout=10, check=True).stdout
        assert seen == carrier


@needs_lab
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "true"], "either --rate or --layout, got neither"),
        (["--rate", "1gbit", "--layout", "1x1:1gbit/1gbit", "--", "true"], "got both"),
        (["--rate", "fast", "--", "true"], "got 'fast'"),
        (["--rate", "1gbit", "--", "no-such-program"], "got 'no-such-program'"),
        (["--rate", "1gbit"], "got nothing"),
        (["--cut", "host0", "--lab", "gossamer-1-1-0"], "got 'gossamer-1-1-0'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str) -> None:
    """What a user can get wrong on the command line is said without a traceback."""
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@needs_lab
def test_a_kernel_without_a_part_is_named(pair: Cluster) -> None:
    """A device type or shaper that the kernel does not know is an error that names it."""
    for tool, line in (
        ("ip", "link add x type no_such_type"),
        ("tc", "qdisc add dev eth0 root no_such_shaper"),
    ):
        with pytest.raises(UserError, match="a kernel with the part"):
            configure(tool, f"{pair.id}.host0", [line], needs="the part")


def test_a_machine_without_iproute2_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `ip` on PATH the error names the package to install."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="install iproute2"):
        check_machine()


def test_a_user_who_is_not_root_is_told() -> None:
    """Another user than root gets an error that says to use sudo."""
    code = """
    import os
    from gossamer.errors import UserError
    from gossamer.lab import Cluster, one_switch
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        with Cluster(one_switch(2, "1gbit")):
            raise SystemExit("a lab was made")
    except UserError as error:
        print(error)
    """
    done = subprocess.run(python(code), capture_output=True, text=True, timeout=50, check=True)
    assert "must be run as root" in done.stdout
    assert "sudo" in done.stdout


@pytest.mark.full
@needs_lab
@pytest.mark.timeout(200)
def test_an_experiment_runs_on_hosts(tmp_path: Path) -> None:
    """The file that runs on one machine runs on two hosts, one rank each; rank 0 keeps records.

    A plug-in beside it is imported on every host.
    """
    (tmp_path / "graphs.py").write_text(
        "from gossamer.topology import complete\n\ndef both(num_workers: int):\n"
        "    return complete(num_workers)\n"
    )
    file = tmp_path / "two.toml"
    file.write_text(
        """
        name = "two"
        workload = "digits-mlp"
        engine = ["simulated", "distributed"]
        workers = 2
        methods = "D_graphs.py:both"
        run = { epochs = 1, steps_per_epoch = 4 }
        """
    )
    bench = ["gossamer", "bench", "run", str(file), "--out", str(tmp_path / "out")]
    result = subprocess.run(
        [*COMMAND, "--hosts", "2", "--rate", "1gbit", "--", sys.executable, "-m", *bench],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "D_graphs.py:both, 2 ranks, seed 0: done" in result.stdout + result.stderr
    status = subprocess.run(
        [sys.executable, "-m", "gossamer", "bench", "status", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "1 done" in status.stdout
    assert "1 to do" in status.stdout


def test_what_a_sink_raises_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised where the job is waited for; nothing is left running."""
    start = subprocess.Popen

    def start_here(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        return start(command[command.index("host0") + 1 :], **options)  # not in a namespace

    def sink(host: str, line: str) -> None:
        raise ValueError(f"a disk is full: {line}")

    monkeypatch.setattr(subprocess, "Popen", start_here)
    processes = HostProcesses(["echo", "loss"], [Launch("host0", "host0", os.environ)], sink)
    with pytest.raises(ValueError, match="a disk is full: loss"):
        processes.wait(timeout_s=30)
