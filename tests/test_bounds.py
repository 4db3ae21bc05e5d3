"""Inputs that once hung, filled the memory or ended in a traceback: each is one clear refusal."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from gossamer import topology
from gossamer.bench import expand, load
from gossamer.bench.experiment import parse
from gossamer.bench.planned import read_planned
from gossamer.bench.report import watch
from gossamer.bench.report.reading import Reader
from gossamer.bench.store import Store
from gossamer.cli import app
from gossamer.engine import RunSpec
from gossamer.errors import UserError, quoted
from gossamer.files import open_regular, read_bounded
from gossamer.runtime_model import Job
from gossamer.runtime_model.plan import make_plan
from gossamer.runtime_model.presets import from_data_sheet
from gossamer.runtime_model.profile import Profile, read_profile, write_profile
from gossamer.topology import spectrum
from gossamer.topology.spectrum import rounds_to_consensus
from tests.stories import spec_of, story_of, write

EXPERIMENT = 'name = "x"\nworkload = "quadratic"\nmethods = ["D_ring"]\nworkers = 4\n'


def sheet(**changes: Any) -> Profile:
    given: dict[str, Any] = {"parameters": 1e6, "flops": 1e9, "workers": 8, "workers_per_node": 4}
    return from_data_sheet("a40", "25gbit", **(given | changes))


def refused(*arguments: str) -> str:
    """Return what the command line says to arguments that it refuses."""
    with pytest.raises(UserError) as error:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    return str(error.value)


# - Numbers of workers


@pytest.mark.parametrize(
    ("name", "workers", "said"),
    [
        ("erdos_renyi(p=0.5)", "131072", "up to 16,777,216 messages, got 8589869056"),
        ("erdos_renyi(p=0.5)", "1000000", "from 1 to 131,072"),
        ("lattice(k=100000)", "131072", "messages"),
        ("random_regular(k=1000)", "100000", "messages"),
        ("base_graph(k=100000)", "131072", "messages"),
        ("complete(weights=metropolis)", "131072", "messages"),
        ("ring", "1000000000000", "from 1 to 131,072"),
    ],
)
def test_a_topology_that_would_not_fit_is_refused_before_it_is_built(
    name: str, workers: str, said: str
) -> None:
    """The limit is said, and no array of that size is made."""
    assert said in refused("topology", name, "-n", workers)


@pytest.mark.parametrize("given", [("-n", "100000"), ("--rounds", "1000")])
def test_a_picture_is_of_a_bounded_size(tmp_path: Path, given: tuple[str, str]) -> None:
    """A dense matrix of a hundred thousand workers is refused before the table is printed."""
    path = str(tmp_path / "ring.html")
    said = refused("topology", "random_matching", *given, "--html", path)
    assert "a picture can have up to 4,096 workers and 32 rounds" in said


def test_rounds_to_show_are_bounded() -> None:
    """A schedule that never repeats itself would be listed for ever."""
    result = CliRunner().invoke(app, ["topology", "random_matching", "--rounds", "1000000000"])
    assert result.exit_code == 2


def test_the_search_for_an_exact_average_ends_on_many_workers() -> None:
    """A ring of odd length has as many rounds as workers; two periods of it took hours."""
    assert rounds_to_consensus(topology.parse("one_peer_ring", 131_071)) is None
    with mock.patch.object(spectrum, "_MOST_MIXED", 0):  # steps in which nobody talks are free
        assert rounds_to_consensus(topology.spaced(topology.parse("complete", 64), 500)) == 500


@pytest.mark.parametrize("given", [True, 1.5, "4", None, 10**5000], ids=type)
def test_what_is_no_number_of_workers_is_refused(given: Any) -> None:
    """True is no number of workers, and one of 5,000 digits can still be told."""
    with pytest.raises(UserError, match="at least one worker, got"):
        topology.ring(given)
    with pytest.raises(UserError, match="at least one worker, got"):
        topology.parse("one_peer_exponential", given)


def test_long_values_are_cut_in_errors() -> None:
    """A message stays one that can be read, whatever was given."""
    assert len(quoted("x" * 10**6)) < 120
    assert "too long to show" in quoted(10**5000)


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ("1000000000", "up to 16,384 workers, got 1000000000"),
        (",".join(map(str, range(2, 40))), "1 to 32 scales"),
    ],
)
def test_a_plan_is_for_a_bounded_number_of_workers(tmp_path: Path, workers: str, said: str) -> None:
    """Scales that would take hours are refused before anything is computed."""
    write_profile(sheet(), tmp_path / "profile.json")
    assert said in refused("plan", str(tmp_path / "profile.json"), "--workers", workers)


def test_a_plan_says_how_many_workers_its_buckets_leave() -> None:
    """Work is workers times buckets; the limit follows from the profile."""
    with pytest.raises(UserError, match=r"for 3053 buckets is for up to 171 workers, got 512"):
        make_plan(sheet(parameters=2e10), [512])


def test_predictions_of_many_workers_take_fewer_trials() -> None:
    """A thousand workers are as many samples as four times 256 of them."""
    profile = sheet(variance=0.01)
    assert Job.of(profile, 256).trials().num_trials == 24
    assert Job.of(profile, 1024).trials().num_trials == 6


# - Strings


@pytest.mark.parametrize(
    "text",
    [
        "ring(" * 5000 + ")" * 5000,
        "x" * 20_000,
        f"erdos_renyi(p={'9' * 400})",
        f"lattice(k={'9' * 5000})",
        "lattice(k=٣)",
    ],
)
def test_strings_of_parts_are_bounded(text: str) -> None:
    """Depth, length and digits have limits, and the message is short."""
    with pytest.raises(UserError, match="a topology is a name or name") as error:
        topology.parse(text, 8)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("text", ["x" * 9000, f"ring({'x' * 9000}=1)"])
def test_long_names_are_cut_in_errors(text: str) -> None:
    """The message says what is there, and not all that was given."""
    with pytest.raises(UserError, match=r"9002 characters|got '") as error:
        topology.parse(text, 8)
    assert len(str(error.value)) < 1000


# - Profiles


@pytest.mark.parametrize(
    "changes",
    [
        {"forward_s": 1e308},
        {"mix_s": 1e308},
        {"factors": [1e-300]},
        {"workers": 2**64},
        {"variance": 1e308},
        {"network": {"inside": {"bits_s": 1e-300}}},
        {"buckets": [{"num_bytes": 10**300, "backward_s": 0, "update_s": 0}]},
        {"buckets": [{"num_bytes": 1, "backward_s": 0, "update_s": 0}] * 10_000},
    ],
)
def test_a_profile_holds_values_that_sums_of_stay_finite(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """What overflowed in the middle of a plan is refused by its name when it is read."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(sheet().model_dump() | changes))
    with pytest.raises(UserError, match=rf"with {next(iter(changes))}"):
        read_profile(path)


@pytest.mark.parametrize(
    "changes",
    [{"parameters": 1e300}, {"flops": float("inf")}, {"efficiency": 1e-300}, {"workers": 2**40}],
)
def test_data_sheets_are_bounded(changes: dict[str, Any]) -> None:
    """A number of parameters that would fill the memory with buckets is refused, with the limit."""
    with pytest.raises(UserError, match="must be from"):
        sheet(**changes)


# - Files


def not_files(folder: Path) -> list[Path]:
    """Return what is no regular file: a device that never ends, a pipe, a folder."""
    os.mkfifo(folder / "pipe")
    return [Path("/dev/zero"), folder / "pipe", folder]


def test_files_are_read_where_they_are_files_of_a_bounded_size(tmp_path: Path) -> None:
    """Others are refused without a byte read, and without waiting for one."""
    for path in not_files(tmp_path):
        with pytest.raises(OSError, match=r"regular file|Is a directory"):
            open_regular(path)
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="larger than the 4 bytes"):
        read_bounded(tmp_path / "file", 4)


def test_verbs_refuse_what_is_no_file(tmp_path: Path) -> None:
    """`plan /dev/zero` and `bench expand /dev/zero` never ended."""
    for path in not_files(tmp_path):
        assert "a profile must be a file that can be read" in refused("plan", str(path))
        for verb in ("expand", "run"):
            assert "must be a readable TOML file" in refused("bench", verb, str(path))


def test_files_have_limits(tmp_path: Path) -> None:
    """A profile of more than 16 MB and an experiment of more than one are refused unread."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**24 + 1)  # takes no room
    with pytest.raises(UserError, match="larger than the 16,777,216 bytes"):
        read_profile(path)
    with pytest.raises(UserError, match="larger than the 1,048,576 bytes"):
        load(path)


# - Records


def report_with(tmp_path: Path, line: str, number: int = 1) -> dict[str, int]:
    """Return the counts of a report on two runs, one of which has another line."""
    good, other = (story_of(spec_of("D_ring", seed=seed), 0.5) for seed in (0, 1))
    write(tmp_path / "x", [good, other])
    path = tmp_path / "x" / "runs" / f"{other.run_id}.jsonl"
    lines = path.read_text().splitlines()
    lines[number] = line
    path.write_text("\n".join(lines) + "\n")
    return Reader(tmp_path / "x").read().counts


def test_one_record_does_not_break_the_report(tmp_path: Path) -> None:
    """A step of 2⁶³ is damage of its run; the others are reported."""
    step = story_of(spec_of("D_ring"), 0.5).records[1].model_dump(mode="json")
    line = json.dumps(step | {"step": 2**63})
    assert report_with(tmp_path, line) == {"done": 1, "damaged": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 2**63},
        {"workers": 2**63},
        {"epochs": 10**30},
        {"topology": 7},
        {"lr": "fast"},
        {"workers": "8"},
    ],
)
def test_one_specification_does_not_break_the_report(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Nor does a field of a first record that no table can hold."""
    started = story_of(spec_of("D_ring", seed=1), 0.5).records[0].model_dump(mode="json")
    line = json.dumps(started | {"spec": started["spec"] | fields})
    assert report_with(tmp_path, line, 0) == {"done": 1, "damaged": 1}


def test_a_specification_that_says_too_little_is_damage(tmp_path: Path) -> None:
    """A first record without its fields is as none."""
    started = story_of(spec_of("D_ring", seed=1), 0.5).records[0].model_dump(mode="json")
    line = json.dumps(started | {"spec": {"method": "x"}})
    assert report_with(tmp_path, line, 0) == {"done": 1, "damaged": 1}


def test_pipes_and_other_bytes_among_records_are_not_read(tmp_path: Path) -> None:
    """A report neither waits for them nor ends in a traceback."""
    write(tmp_path / "x", [story_of(spec_of("D_ring"), 0.5)], "name = 1")
    for name in ("a.jsonl", "b.1.part"):
        os.mkfifo(tmp_path / "x" / "runs" / name)
    (tmp_path / "x" / "runs" / "c.jsonl").mkdir()
    store = Store(tmp_path / "x")
    assert len(store.run_ids()) == 1
    for look in (store.ended, store.read):
        with pytest.raises(UserError, match="not a regular file"):
            look("a")
    assert store.started("a") is None
    store.experiment_path.write_bytes(b"\xff\xfe")
    assert Reader(tmp_path / "x").read().counts == {"done": 1}
    store.experiment_path.unlink()
    os.mkfifo(store.experiment_path)
    assert Reader(tmp_path / "x").read().counts == {"done": 1}


def test_a_plan_of_runs_that_names_nothing_is_refused(tmp_path: Path) -> None:
    """planned.json is data that anybody may have edited."""
    store = write(tmp_path / "x", [], 'name = "x"\nworkload = "quadratic"\nmethods = "D_ring"\n')
    run: dict[str, Any] = {"id": "a", "workers": 2, "method": "", "engine": "", "seed": 0}
    (tmp_path / "x" / "planned.json").write_text(
        json.dumps({"runs": [run | {"num_steps": 1, "parts": {}}]})
    )
    with pytest.raises(UserError, match="must be as gossamer bench run wrote it"):
        read_planned(store, parse(EXPERIMENT, "x.toml"))


def test_a_connection_that_says_nothing_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bench watch` gives up on it, where its thread waited for ever."""
    assert watch._Handler.timeout == 10
    monkeypatch.setattr(watch._Handler, "timeout", 0.2)
    write(tmp_path / "x", [story_of(spec_of("D_ring"), 0.5)])
    server = watch.Watch(tmp_path / "x")
    thread = threading.Thread(target=server.serve)
    thread.start()
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")  # and never the rest
        assert connection.recv(100) == b""
    server.close()
    thread.join()


# - Experiments


@pytest.mark.parametrize("depth", [50, 5000])
@pytest.mark.parametrize("bracket", ["[]", "{}"])
def test_deep_toml_is_refused(depth: int, bracket: str) -> None:
    """Whether the parser gives up on it or not."""
    inner = "[" * depth + "]" * depth if bracket == "[]" else "{a=" * depth + "1" + "}" * depth
    with pytest.raises(UserError, match="at most 10 deep"):
        parse(f"{EXPERIMENT}axes = {{ lr = {inner} }}", "x.toml")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("workers = 1000000000", "less than or equal to 131072"),
        ("workers = 1" + "0" * 400, "less than or equal to 131072"),
        ("seeds = 9223372036854775808", "less than 9223372036854775808"),
        ("run = { epochs = 1" + "0" * 400 + " }", "less than or equal to 1000000000"),
        ('run = { batch_size = "abc" }\nworkers = 1000000000', "less than or equal to 131072"),
        ("run = { gossip_steps = 1000000000 }", "less than or equal to 1000"),
        (f"seeds = {[*range(200)]}\naxes = {{ batch_size = {[*range(1, 200)]} }}", "39800 in x"),
        ('name = ".."', "name"),
        ('name = "."', "name"),
        ('name = "..\\\\x"', "name"),
        (f'name = "{"x" * 300}"', "at most 100"),
    ],
)
def test_numbers_and_names_of_experiments_are_bounded(line: str, said: str) -> None:
    """`bench expand` on a billion workers ends at once, and no name leads out of the folder."""
    kept = [
        given
        for given in EXPERIMENT.splitlines()
        if given.split(" = ")[0] not in {each.split(" = ")[0] for each in line.splitlines()}
    ]
    with pytest.raises(UserError, match=said):
        expand(parse("\n".join([*kept, line]), "x.toml"))


def test_the_largest_run_can_be_made() -> None:
    """The limits are the ones that are said."""
    spec = RunSpec(workload="quadratic", workers=2**17, topology="ring", seed=2**63 - 1)
    assert spec.workers == 131_072
