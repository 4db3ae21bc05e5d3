from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.bench import expand
from gossamer.bench.analysis import analyse
from gossamer.bench.experiment import parse
from gossamer.bench.report.remarks import remarks
from gossamer.bench.report.writing import write_report
from gossamer.bench.store import Story
from gossamer.engine import RunSpec, run
from gossamer.records import Step
from tests.stories import spec_of, story_of, write

GRAPHS = ("D_ring", "D_torus", "D_lattice(k=6)", "D_lattice(k=8)", "D_complete")


def with_steps(story: Story, **fields: Any) -> Story:
    """Return a run with other values in its step records."""
    changed = [r.model_copy(update=fields) if isinstance(r, Step) else r for r in story.records]
    return Story(story.run_id, changed)


def at_its_rate(spec: RunSpec, accuracy: float) -> Story:
    """Return a run with the learning rate that its specification gives it."""
    return with_steps(story_of(spec, accuracy), lr=spec.lr_at(30))


def named(spec: RunSpec, method: str) -> RunSpec:
    return spec.model_copy(update={"method": method})


def said(stories: list[Story]) -> str:
    return " ".join(remarks(analyse(stories))["digits-mlp"])


# - The learning rate


def test_a_rate_that_follows_the_neighbourhood_is_said(tmp_path: Path) -> None:
    """With the rates of the two graphs that are furthest apart: the complete graph of 16 has 16/3
    times the ring's. On the page, too. Where all have one rate there is nothing to say.
    """
    scaled: dict[str, Any] = {
        "lr_scaling": "linear",
        "reference_batch": 8,
        "batch_size": 8,
        "lr": 0.03,
    }
    stories = [at_its_rate(spec_of(method, 16, **scaled), 0.5) for method in GRAPHS]
    told = said(stories)
    assert "The learning rate follows the neighbourhood (lr_scaling = linear): on 16 work" in told
    rates = analyse(stories).runs["highest_lr"]
    assert rates[-1] / rates[0] == pytest.approx(16 / 3)
    assert f"{rates[0]:.4g} for D_ring and {rates[-1]:.4g} for D_complete" in told
    assert 'lr_scaling = "none" would separate the two' in told
    write(tmp_path / "x", stories)
    write_report(tmp_path / "x")
    assert "Graph and rate vary together" in (tmp_path / "x" / "report.html").read_text()
    assert "rate" not in said([at_its_rate(spec_of(method, 16), 0.5) for method in GRAPHS])


def test_the_rule_of_the_rate_can_be_an_arm() -> None:
    """Five graphs with the rule, in the order of their neighbours, and the same five at one rate
    and without an order: graphs are compared within each, and are five, not ten. By hand, ρ is
    (10 + 0) / 20.
    """
    stories: list[Story] = []
    fixed = (0.94, 0.93, 0.92, 0.91, 0.95)
    for place, method in enumerate(GRAPHS):
        for rule, value in (("linear", 0.5 + place / 100), ("none", fixed[place])):
            spec = spec_of(method, 16, lr_scaling=rule)
            stories.append(at_its_rate(named(spec, f"{method}, {rule}"), value))
    found = analyse(stories)
    row = found.observations.filter(observation="connections", workers=16).row(0, named=True)
    assert (row["units"], row["rho"]) == (5, pytest.approx(0.5))
    assert "Graphs are compared within each rule" in said(stories)


def test_the_rule_of_the_rate_can_be_an_axis() -> None:
    """An experiment accepts it in both places; as an axis it makes settings with own verdicts."""
    head = 'name = "x"\nworkload = "digits-mlp"\nworkers = 8\n'
    axis = 'methods = ["D_ring", "D_complete"]\naxes = { lr_scaling = ["linear", "none"] }'
    arms = 'methods = ["D_ring", { name = "fixed", method = "D_ring", lr_scaling = "linear" }]'
    runs = expand(parse(head + axis, "x")).runs
    assert [run.lr_scaling for run in runs] == ["linear", "none"] * 2
    assert [run.lr_scaling for run in expand(parse(head + arms, "x")).runs] == ["none", "linear"]
    found = analyse(story_of(spec_of(r.method, lr_scaling=r.lr_scaling), 0.5) for r in runs)
    names = ["digits-mlp, lr_scaling=linear", "digits-mlp, lr_scaling=none"]
    assert found.verdicts["workload"].to_list() == names


# - Controls


def controlled(**fields: Any) -> Story:
    spec = spec_of("D_ring", 16, control="constant(c=0.25)")
    return with_steps(story_of(named(spec, "held"), 0.6), **fields)


def test_a_control_that_never_acted_is_said() -> None:
    """Its calibration takes 60 steps and more; or it has a target, and mixes as the ring would. One
    that mixed twice in a step did act.
    """
    ring = story_of(spec_of("D_ring", 16), 0.5)
    told = said([ring, controlled(target=float("inf"))])
    assert "The control of held never acted on 16 workers: its calibration" in told
    told = said([ring, controlled(target=0.1)])
    assert "in every recorded step it mixed exactly as the graph alone would" in told
    assert "never acted" not in said([ring, controlled(target=0.1, rounds=2)])
    assert "never acted" not in said([ring, controlled(target=0.1, degree=4)])


def test_a_real_calibration_longer_than_the_run_is_said() -> None:
    """A ring of 32 measures plain gossip for 158 steps, and the run has 20; the run without control
    is the same trajectory, and that is said as well.
    """
    text = """
        name = "x"
        workload = "digits-mlp"
        workers = 32
        methods = ["D_ring", { name = "held", method = "D_ring", control = "constant(c=0.25)" }]
        run = { epochs = 2, steps_per_epoch = 10, log_every = 5, batch_size = 2 }
    """
    stories = [Story(spec.id, list(run(spec))) for spec in expand(parse(text, "x")).runs]
    told = said(stories)
    assert "The control of held never acted on 32 workers: its calibration" in told
    assert "held and D_ring have the same trajectory, bit for bit, on 32 workers" in told


# - Who is counted, and as what


def test_a_method_that_averages_now_and_then_is_said() -> None:
    """Local SGD on 16 workers, every tenth step: 1.5 neighbours per step are 15 in one of ten."""
    local = spec_of("D_ring", 16, topology="complete", every=10)
    told = said([story_of(named(local, "local"), 0.5), story_of(spec_of("D_ring", 16), 0.6)])
    assert "local averages in one of 10 steps: its 1.5 neighbours per step on 16 workers" in told
    assert "are 15 at once and none in between" in told
    assert "averages in" not in said([story_of(spec_of("D_one_peer_exponential", 16), 0.5)])


def test_a_method_that_differs_in_more_than_its_graph_is_said() -> None:
    """No other graph has the optimizer of one, nor the wire format of another."""
    stories = [story_of(spec_of(method, 16), 0.5, spread=p) for p, method in enumerate(GRAPHS)]
    adam = spec_of("D_exponential", 16, optimizer="adamw", optimizer_options={})
    told = said([*stories, story_of(named(adam, "Adam"), 0.9)])
    assert "Adam is left out of the tests against connections and dispersion" in told
    few_bits = spec_of("D_ring", 16, wire="modulo(bits=8)")
    told = said([*stories, story_of(named(few_bits, "8 bits"), 0.9)])
    assert "“8 bits” is left out of the tests against connections and dispersion" in told
    assert "left out" not in said(stories)


def test_a_setting_says_that_there_are_others() -> None:
    """With its facets, under its own name."""
    stories = [story_of(spec_of("D_ring", 16, batch_size=size), 0.5) for size in (4, 8)]
    found = remarks(analyse(stories))
    assert [*found] == ["digits-mlp, batch_size=4", "digits-mlp, batch_size=8"]
    assert "All this is about one setting, batch_size=8" in found["digits-mlp, batch_size=8"][0]


def test_the_same_trajectory_is_named() -> None:
    """Two spellings of the ring, with the scales at which they agree."""
    stories = [
        story_of(spec_of(method, workers), 0.5)
        for method in ("D_ring", "D_lattice(k=2)")
        for workers in (8, 16)
    ]
    told = said(stories)
    assert "D_lattice(k=2) and D_ring have the same trajectory, bit for bit, on 8 and 16" in told
