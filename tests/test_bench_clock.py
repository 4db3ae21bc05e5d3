"""A link of 24 Mbit/s has no latency of its own here: 30,000 bytes take 10 ms."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gossamer.bench import expand
from gossamer.bench.analysis import analyse
from gossamer.bench.clock import Clock, Mark, make_clocks
from gossamer.bench.experiment import parse
from gossamer.bench.matrix import Matrix
from gossamer.bench.planned import planned_runs
from gossamer.bench.report.figures import figures
from gossamer.bench.report.reading import Reader
from gossamer.bench.report.words import races
from gossamer.bench.report.writing import write_report
from gossamer.engine import RunSpec, run
from gossamer.errors import UserError
from gossamer.records import Started
from gossamer.runtime_model import Job, Profile, costs, predict, write_profile
from gossamer.runtime_model.methods import gossip
from gossamer.runtime_model.model import after_update
from gossamer.runtime_model.presets import from_seconds, link_of
from gossamer.runtime_model.profile import Link
from gossamer.topology import complete, spaced, static
from tests.stories import PARAMETER_BYTES, spec_of, story_of, write

COMPUTE_S, COPY_S = 0.05, 0.01
LINK = Link(bits_s=8 * PARAMETER_BYTES / COPY_S)

TEXT = """
name = "timed"
workload = "digits-mlp"
workers = 8
methods = ["C_complete", "D_ring"]
run = { epochs = 6, steps_per_epoch = 10, log_every = 5 }
"""


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    """Steps of 50 ms, links that take 10 ms for a copy of the parameters."""
    path = tmp_path / "profile.json"
    write_profile(from_seconds(COMPUTE_S, LINK, PARAMETER_BYTES), path)
    return Clock(profile=path)


def seconds(clock: Clock, spec: RunSpec, copies: float = 0.0, degree: int = 2) -> list[float]:
    """Return the time of every tenth step of a run that sends so many copies in each."""
    marks = [Mark(step, step * copies * PARAMETER_BYTES, degree) for step in range(10, 61, 10)]
    found = clock.seconds(spec.model_dump(), PARAMETER_BYTES, marks)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("method", "fields", "step_s"),
    [
        # An all-reduce of all begins when the only bucket is there.
        ("C_complete", {}, COMPUTE_S + 2 * 7 / 8 * COPY_S),
        ("D_ring", {}, COMPUTE_S + 2 * COPY_S),
        ("D_ring", {"gossip_steps": 3}, COMPUTE_S + 6 * COPY_S),
        ("D_ring", {"order": "awc"}, COMPUTE_S),
        ("D_exponential", {"order": "awc", "workers": 64}, 6 * COPY_S),
        ("D_one_peer_exponential", {}, COMPUTE_S + COPY_S),
        ("local_sgd(every=4)", {}, COMPUTE_S + 2 * 7 / 8 * COPY_S / 4),
        ("local_sgd(every=1000)", {}, COMPUTE_S + 2 * 7 / 8 * COPY_S / 1000),
    ],
)
def test_steps_take_what_the_links_need(
    clock: Clock, method: str, fields: dict[str, Any], step_s: float
) -> None:
    """Compute and the wire, one after the other or at once, for every step of the run."""
    found = seconds(clock, spec_of(method, **fields))
    assert found == pytest.approx([step * step_s for step in range(10, 61, 10)], rel=1e-6)


def test_a_controller_pays_for_its_rounds_and_its_sketches(clock: Clock) -> None:
    """From the bytes sent: 2.5 rounds of two copies each, and all sketches at every step."""
    held = spec_of("D_ring", control="constant(c=0.5)")
    sketches_s = 7 * 8 * 509 * 8 / LINK.bits_s
    found = seconds(clock, held, copies=5.0)
    assert found[-1] == pytest.approx(60 * (COMPUTE_S + 5 * COPY_S + sketches_s))


def test_a_controller_s_all_reduces_are_told_from_its_rounds() -> None:
    """As many bytes in one all-reduce of eight as in 7/8 of a round of the ring: 14 latencies in
    place of 7/4.
    """
    clock = Clock("24mbit", compute_s={"digits-mlp": COMPUTE_S})
    held = spec_of("D_ring", control="exact")
    latency_s, copies = link_of("24mbit").latency_s, 2 * 7 / 8
    sketches_s = 7 * 8 * 509 * 8 / LINK.bits_s + 3 * latency_s
    both_s = COMPUTE_S + copies * COPY_S + sketches_s
    found = {degree: seconds(clock, held, copies, degree)[-1] for degree in (2, 7)}
    assert found[2] == pytest.approx(60 * (both_s + 7 / 4 * latency_s))
    assert found[7] == pytest.approx(60 * (both_s + 14 * latency_s))


def test_a_graph_that_thins_out_gets_faster(clock: Clock) -> None:
    """Ada takes 10 ms of communication for each of its current neighbours."""
    ada = spec_of("D_ada(k0=6, gamma=1)")
    found = [0.0, *seconds(clock, ada)]
    steps_s = [(after - before) / 10 for before, after in itertools.pairwise(found)]
    degrees = [ada.schedule.round(step).degree for step in range(0, 60, 10)]
    assert degrees[0] > degrees[-1]
    assert steps_s == pytest.approx([COMPUTE_S + degree * COPY_S for degree in degrees])


def test_a_stated_time_is_of_the_run_s_own_model() -> None:
    """Twice the parameters take twice the communication; without compute_s there are no times."""
    clock = Clock("24mbit", compute_s={"digits-mlp": COMPUTE_S})
    ring = spec_of("D_ring").model_dump()
    once, twice = (clock.seconds(ring, PARAMETER_BYTES * k, [Mark(1, 0.0, 2)]) for k in (1, 2))
    assert once
    assert twice
    latency_s = 2 * link_of("24mbit").latency_s
    assert once[0] == pytest.approx(COMPUTE_S + 2 * COPY_S + latency_s)
    assert twice[0] == pytest.approx(COMPUTE_S + 4 * COPY_S + latency_s)
    assert clock.seconds(ring, 0, [Mark(1, 0.0, 2)]) is None
    assert (
        clock.seconds(ring | {"workload": "quadratic"}, PARAMETER_BYTES, [Mark(1, 0.0, 2)]) is None
    )
    assert (
        clock.seconds(ring | {"topology": "my.py:graph"}, PARAMETER_BYTES, [Mark(1, 0.0, 2)])
        is None
    )


def test_cycles_are_counted_to_their_end() -> None:
    """Local SGD that averages every 200 steps pays for a 200th of an average, not for none."""
    job = Job.of(from_seconds(COMPUTE_S, LINK, PARAMETER_BYTES), 8)
    rare = gossip(job, schedule=spaced(static(complete(8)), every=200), order=after_update)
    expected = COMPUTE_S + 2 * 7 / 8 * COPY_S / 200
    assert predict(rare, job.trials()).mean_s == pytest.approx(expected)


@pytest.mark.parametrize("topology", ["random_matching", "ada(k0=6, gamma=0.1)"])
def test_exchanges_between_local_steps_are_counted(clock: Clock, topology: str) -> None:
    """Aperiodic rounds at every fourth step cost a quarter, at any point of the run."""
    spec = spec_of(f"D_{topology}", every=4, epochs=640)
    marks = [Mark(step, 0.0, 2) for step in (100, 3300, 6400)]
    found = clock.seconds(spec.model_dump(), PARAMETER_BYTES, marks)
    often = clock.seconds(spec_of(f"D_{topology}", epochs=640).model_dump(), PARAMETER_BYTES, marks)
    assert found
    assert often
    for rare, usual, mark in zip(found, often, marks, strict=True):
        expected = mark.step * COMPUTE_S + (usual - mark.step * COMPUTE_S) / 4
        assert rare == pytest.approx(expected, rel=0.02)


def test_reading_times_runs_no_algorithm_of_a_plug_in(clock: Clock) -> None:
    """Reading results does not load the plug-in of an algorithm."""
    spec = spec_of("D_ring").model_dump() | {"algorithm": "nowhere.py:Mine"}
    assert clock.seconds(spec, PARAMETER_BYTES, [Mark(1, 0.0, 2)]) is None


def test_rows_reach_everyone_in_the_logarithm_of_messages() -> None:
    """Nine workers: four latencies, eight rows; where three share a link, three times as long."""
    one = from_seconds(1.0, Link(bits_s=8000, latency_s=0.5), 4).network
    assert costs.all_gather_s(costs.Links.of(one, 9), 100) == pytest.approx(4 * 0.5 + 8 * 0.1)
    assert costs.all_gather_s(costs.Links.of(one, 1), 100) == 0
    nodes = one.model_copy(update={"workers_per_node": 3})
    assert costs.all_gather_s(costs.Links.of(nodes, 9), 100) == pytest.approx(4 * 0.5 + 24 * 0.1)


def test_a_link_changes_no_run() -> None:
    """The clock is only used for reading: ids are those of the experiment without it."""
    plain = expand(parse(TEXT, "plain")).runs
    asked = expand(parse(f'link = "300mbit"\ncompute_s = 0.01\n{TEXT}', "timed")).runs
    assert [spec.id for spec in asked] == [spec.id for spec in plain]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ('link = "300 mbps"\ncompute_s = 1', "must be a number and a unit"),
        ('link = ["1gbit", "1gbit"]\ncompute_s = 1', "links must be distinct"),
        ('link = "300mbit"', "got neither; write for example compute_s = 0.05"),
        ('link = "300mbit"\ncompute_s = 1\nprofile = "x"', "got both"),
        ("compute_s = 1", "compute_s needs a link"),
        ('link = "300mbit"\ncompute_s = { digits-mpl = 1 }', "did you mean 'digits-mlp'?"),
        ('profile = "none.json"', "none.json: No such file"),
    ],
)
def test_what_is_missing_for_a_clock_is_said_before_anything_runs(keys: str, words: str) -> None:
    """One line that says what to write."""
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        expand(parse(f"{keys}\n{TEXT}", "wrong"))


def test_a_profile_of_one_node_needs_a_link(tmp_path: Path) -> None:
    """It has no rate between nodes."""
    profile = from_seconds(COMPUTE_S, LINK, PARAMETER_BYTES)
    one_node: Profile = profile.replace(network={"workers_per_node": 2, "inside": LINK})
    write_profile(one_node, tmp_path / "p.json")
    with pytest.raises(UserError, match="measured on one node"):
        Clock(profile=tmp_path / "p.json")
    assert Clock("1gbit", tmp_path / "p.json").described.endswith("of 2 with 1gbit between")


def test_records_get_modelled_seconds(tmp_path: Path) -> None:
    """In the tables of steps, evaluations and runs, on the page, and in a figure."""
    text = f'link = "24mbit"\ncompute_s = {COMPUTE_S}\n{TEXT}'
    stories = [story_of(spec_of(name), 0.9) for name in ("C_complete", "D_ring")]
    write(tmp_path / "f", stories, text)
    write_report(tmp_path / "f")
    analysis = Reader(tmp_path / "f").read().analysis
    step_s = COMPUTE_S + 2 * COPY_S + 2 * link_of("24mbit").latency_s
    ring = analysis.runs.filter(method="D_ring")
    assert ring["modelled_s"].to_list() == pytest.approx([60 * step_s])
    looks = analysis.evaluations.filter(pl.col("run_id") == ring["run_id"][0])
    expected = [step * step_s for step in looks["step"]]
    assert looks["modelled_s"].to_list() == pytest.approx(expected)
    assert analysis.steps["modelled_s"].null_count() == 0
    assert analyse(stories, make_clocks(parse(text, "t"))[0]).runs.equals(analysis.runs)
    (drawn,) = [figure for figure in figures(analysis) if figure.name == "modelled"]
    own = [trace for trace in drawn.traces if trace["meta"]["method"] == "D_ring"]
    assert own[0]["x"] == pytest.approx(expected, rel=1e-5)
    assert "every worker has a link of 24mbit" in (tmp_path / "f" / "report.html").read_text()
    assert "modelled" not in {figure.name for figure in figures(analyse(stories))}


def test_on_each_link_another_method_may_be_first(tmp_path: Path) -> None:
    """By steps all-reduce is; it sends 1.75 copies and one-peer 1, which decides on slow links."""
    methods = '"C_complete", "D_one_peer_exponential", "D_ring"'
    text = f'link = ["10gbit", "1mbit"]\ncompute_s = {COMPUTE_S}\ntarget = 0.9\n{TEXT}'
    text = text.replace('"C_complete", "D_ring"', methods)
    stories = [
        story_of(spec_of(method), lambda step, at=at: 0.9 if step >= at else 0.5)
        for method, at in (("D_one_peer_exponential", 30), ("C_complete", 20))
    ]
    store = write(tmp_path / "f", [*stories, story_of(spec_of("D_ring"), 0.8)], text)
    analysis = Reader(store.folder).read().analysis
    found = analysis.links.select("link", "method").rows()
    assert found == [
        ("10gbit", "C_complete"),
        ("10gbit", "D_one_peer_exponential"),
        ("10gbit", "D_ring"),
        ("1mbit", "D_one_peer_exponential"),
        ("1mbit", "C_complete"),
        ("1mbit", "D_ring"),
    ]
    assert analysis.links.filter(method="D_ring")["modelled_s"].null_count() == 2
    (said,) = races(analysis.links)
    assert said.startswith("To 0.9 accuracy on 8 workers, by modelled time: at 10gbit C_complete")
    assert "stay with all-reduce; at 1mbit D_one_peer_exponential is first" in said
    assert "1.1 times as fast as C_complete" in said
    write_report(store.folder)
    assert said in (store.folder / "report.html").read_text()


def test_a_profile_that_is_gone_costs_the_modelled_seconds_alone(tmp_path: Path) -> None:
    """The page gives the reason, and shows everything else."""
    spec = spec_of("D_ring")
    store = write(tmp_path / "f", [story_of(spec, 0.9)], f'profile = "gone.json"\n{TEXT}')
    store.plan(planned_runs(Matrix([spec], [])).model_dump_json())
    results = Reader(tmp_path / "f").read()
    assert "gone.json" in results.clock
    assert results.analysis.runs["modelled_s"].to_list() == [None]
    assert results.analysis.runs["final"].to_list() == [0.9]


def test_a_run_records_the_size_of_its_model() -> None:
    """In bytes, of the type that it trains in."""
    for dtype, size in (("float32", 4), ("float64", 8)):
        spec = RunSpec(workload="quadratic", workers=2, topology="ring", dtype=dtype)  # pyright: ignore[reportArgumentType]
        started = next(iter(run(spec)))
        assert isinstance(started, Started)
        assert started.parameter_bytes == size * sum(
            p.numel() for p in spec.make_model().parameters()
        )
