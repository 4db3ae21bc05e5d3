"""Plans: tables, advice with its reason, the page, and the verb."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from gossamer.cli import app
from gossamer.errors import UserError
from gossamer.runtime_model import Profile, read_profile, write_profile
from gossamer.runtime_model import plan as plans
from gossamer.runtime_model.losses import MeasuredLoss
from gossamer.runtime_model.plan import WORTH_IT, Row, make_plan
from gossamer.runtime_model.presets import LINKS, from_data_sheet, link_of
from gossamer.runtime_model.profile import TRANSFORMER_ADAM, Link
from gossamer.topology import parse
from tests.test_losses import measured

TOPOLOGIES = ("ring", "one_peer_exponential", "aer")


def transformer(link: str = "25gbit", variance: float = 0.0) -> Profile:
    return from_data_sheet(
        "a40",
        link,
        parameters=6.5e6,
        flops=1.2e11,
        workers=8,
        workers_per_node=4,
        efficiency=0.1,
        variance=variance,
    )


def test_every_method_has_a_row_at_every_scale() -> None:
    """Each has times, speed-up over DDP, bytes, p and rounds."""
    plan = make_plan(transformer(), [8, 16], topologies=TOPOLOGIES)
    assert len(plan.rows) == 2 * (2 + len(TOPOLOGIES))
    rows = {(row.method, row.workers): row for row in plan.rows}
    assert rows["ddp", 8].speedup == pytest.approx(1)
    assert rows["ddp", 8].bytes_per_step == pytest.approx(2 * 7 / 8 * 26e6)
    assert rows["one_peer_exponential", 16].bytes_per_step == pytest.approx(26e6)
    assert rows["one_peer_exponential", 16].rounds_to_consensus == 4
    assert rows["ring", 16].mixing == pytest.approx(0.0989, abs=1e-4)


def test_a_slow_network_asks_for_gossip_and_says_why() -> None:
    """At 25 Gbit/s between nodes few bits are; the reason has the saving and its sources."""
    (advice,) = make_plan(transformer(), [16], topologies=TOPOLOGIES).advice
    assert advice.method == "one_peer_exponential"
    assert advice.wire.startswith("modulo")
    assert advice.saving > 0.3
    assert "overlap" in advice.reason
    assert "slow links" in advice.reason


def test_a_plan_keeps_the_batch_of_all_workers_where_it_is_asked_to() -> None:
    """Compute shrinks with the scale, for the rows as for the timeline and the curves."""
    plan = make_plan(transformer(), [8, 32], topologies=TOPOLOGIES, strong=True)
    assert plan.job(32).profile.forward_s == pytest.approx(transformer().forward_s / 4)
    assert plan.job(8).profile.forward_s == pytest.approx(transformer().forward_s)


def test_a_plan_knows_algorithms_and_local_steps() -> None:
    """Tracking sends twice and waits for it, atc waits, and local steps send less often."""

    def ring(**options: Any) -> Row:
        plan = make_plan(transformer(), [16], topologies=["ring"], **options)
        return next(row for row in plan.rows if row.method == "ring")

    awc, atc, tracking = ring(), ring(algorithm="atc"), ring(algorithm="gradient_tracking")
    assert awc.prediction.mean_s < atc.prediction.mean_s < tracking.prediction.mean_s
    assert tracking.bytes_per_step == 2 * atc.bytes_per_step == 2 * awc.bytes_per_step
    rare = ring(algorithm="atc", every=8)
    assert rare.bytes_per_step == awc.bytes_per_step / 8
    assert rare.prediction.mean_s < atc.prediction.mean_s
    with pytest.raises(UserError, match="did you mean 'push_sum'"):
        ring(algorithm="pushsum")


def test_a_plan_knows_wire_formats_and_fragments() -> None:
    """A quarter of the bytes on graphs of messages, the same where ranks reduce; less in turns."""
    profile = transformer("1gbit")
    one_peer, complete = "one_peer_exponential", "complete"

    def row(topology: str, **options: Any) -> Row:
        plan = make_plan(profile, [8], topologies=[topology], **options)
        return next(row for row in plan.rows if row.method == topology)

    full, coded = row(one_peer), row(one_peer, wire="modulo(bits=8)")
    assert coded.bytes_per_step == pytest.approx(full.bytes_per_step / 4, rel=1e-3)
    assert coded.prediction.mean_s < full.prediction.mean_s
    assert row(complete, wire="bf16").bytes_per_step == row(complete).bytes_per_step
    in_turn = row(one_peer, fragments=4)
    assert in_turn.bytes_per_step == pytest.approx(full.bytes_per_step / 4)
    assert in_turn.prediction.mean_s < full.prediction.mean_s
    with pytest.raises(UserError, match="needs rounds of messages, got an all-reduce"):
        row(complete, wire="modulo(bits=8)")


def test_advice_names_the_wire_with_the_most_bits_that_is_as_fast() -> None:
    """Few bits on a slow link, and full precision if nothing waits for the link."""
    slow, fast = (
        make_plan(transformer(link), [8], topologies=["one_peer_exponential"]).advice[0]
        for link in ("1gbit", "400gbit")
    )
    assert slow.wire.startswith("modulo")
    assert f"with wire='{slow.wire}' one_peer_exponential takes" in slow.reason
    assert slow.wire_s == pytest.approx(slow.split.method_s, rel=0.05)
    assert fast.wire == "fp32"
    assert "wire" not in fast.reason
    (in_full,) = make_plan(
        transformer("1gbit"), [8], topologies=["one_peer_exponential"], wires=()
    ).advice
    assert in_full.wire == "fp32"


def test_a_wire_that_does_not_exist_is_refused() -> None:
    """Also where advice would never try it; one that cannot travel is only left out."""
    with pytest.raises(UserError, match="bf61"):
        make_plan(transformer("400gbit"), [8], wires=("bf16", "bf61"))


def test_graphs_are_compared_with_the_wire_of_each() -> None:
    """In full a graph of four neighbours is slower; of few bits they are all hidden, and it is
    advised, for it mixes best. Reading is charged for every neighbour.
    """
    profile = transformer("10gbit").with_compute(4)
    plan = make_plan(profile, [8], topologies=("one_peer_ring", "lattice(k=4)"))
    full = {row.method: row.prediction.mean_s for row in plan.rows}
    assert full["lattice(k=4)"] > 1.2 * full["one_peer_ring"]
    assert plan.advice[0].method == "lattice(k=4)"
    assert plan.advice[0].wire == "modulo(bits=4)"
    job = plan.job(8)._replace(wire="modulo(bits=8)")
    one, four = (
        job.coding_s(parse(name, 8).round(0)) for name in ("one_peer_ring", "lattice(k=4)")
    )
    assert four.max() > 2 * one.max()


def test_a_fast_network_says_stay_with_ddp() -> None:
    """If gossip saves next to nothing, DDP is recommended, with that reason."""
    (advice,) = make_plan(transformer("400gbit").with_compute(20), [8]).advice
    assert advice.method == "ddp"
    assert "stay with DDP" in advice.reason
    assert advice.saving == 0
    assert advice.split.ddp_s - advice.split.method_s < WORTH_IT * advice.split.ddp_s


def test_of_graphs_as_fast_the_best_mixing_one_is_advised() -> None:
    """If all exchanges are overlapped, the graph with the largest p wins."""
    profile = transformer("100gbit", variance=0.0134).with_compute(3)
    plan = make_plan(profile, [8], topologies=("one_peer_ring", "one_peer_exponential"))
    assert plan.advice[0].method == "one_peer_exponential"
    assert "mixes best" in plan.advice[0].reason


def test_advice_that_flips_between_two_profiles_of_one_job_is_said_to_be_level() -> None:
    """Times that differ by 2 % never turn advice into another that was not named as level."""
    random, flips = Random(0), 0

    def measured_again(profile: Profile) -> Profile:
        off = [random.uniform(0.99, 1.01) for _ in range(3)]
        return profile.with_compute(off[0]).with_rate(off[1]).replace(mix_s=profile.mix_s * off[2])

    @cache
    def advised(gbit: float) -> str:
        return make_plan(transformer(f"{gbit}gbit").with_compute(20), [8]).advice[0].method

    for low, high in ((1.0, 2.0), (40.0, 100.0)):  # the advice is another at each end
        for _ in range(8):
            middle = (low + high) / 2
            low, high = (middle, high) if advised(middle) == advised(low) else (low, middle)
        job = transformer(f"{low}gbit").with_compute(20)
        plans = [make_plan(measured_again(job), [8]).advice[0] for _ in range(4)]
        for one in plans:
            for other in plans:
                flips += one.method != other.method
                assert one.method in (other.method, *other.level)
    assert flips  # else nothing has been shown


def test_methods_that_are_level_are_named_and_others_are_not() -> None:
    """Within a tenth of the recommended method's time; the reason names them."""
    plan = make_plan(transformer("100gbit").with_compute(3), [8])
    (advice,) = plan.advice
    times = {row.method: row.prediction.mean_s for row in plan.rows}
    own_s = times[advice.method]
    near = {name for name, s in times.items() if 1 / 1.1 <= s / own_s <= 1.1}
    assert near - {advice.method, "post_local_sgd(h=4)"} == {*advice.level}
    assert {*advice.level} < {*times}
    assert f"within the model's error of 10%: {', '.join(advice.level)}" in advice.reason


def test_what_mixes_best_does_not_cost_the_saving() -> None:
    """If only the fastest graph saves enough, it is recommended, and not one nearly as fast."""
    advised: list[str] = []
    for gbit in range(40, 120, 8):
        job = transformer(f"{gbit}gbit").with_compute(20)
        plan = make_plan(job.replace(mix_s=0.02 * job.compute_s), [8])
        ddp_s = plan.rows[0].prediction.mean_s
        gossip_s = min(row.prediction.mean_s for row in plan.rows[2:])
        advised.append(plan.advice[0].method)
        assert (advised[-1] == "ddp") == (1 - gossip_s / ddp_s < WORTH_IT)
    assert {*advised} == {"complete", "one_peer_exponential"}


NO_LOSSES = "no losses were measured for this kind of model"
NOT_THESE = "what these methods take to an equal loss was not measured"
COSTLY = measured(more_steps=3.0, gap=0.08)
CHEAP = measured(more_steps=1.05, gap=0.004)


def test_gossip_that_wins_by_step_loses_where_an_equal_loss_takes_too_many_steps() -> None:
    """The same job gets gossip by step, and DDP if gossip takes three times the steps."""
    job = transformer().with_kind(TRANSFORMER_ADAM)
    (by_step,) = make_plan(job, [16], topologies=TOPOLOGIES, losses=[]).advice
    plan = make_plan(job, [16], topologies=TOPOLOGIES, losses=[COSTLY])
    (advice,) = plan.advice
    assert (by_step.method, by_step.ranked_by) == ("one_peer_exponential", "step")
    assert (advice.method, advice.ranked_by, advice.saving) == ("ddp", "equal loss", 0)
    assert "3 times as many steps" in advice.reason
    assert "ranked by time to equal loss, as measured on stdlib-gpt with 8 workers" in advice.reason
    rows = {row.method: row for row in plan.rows}
    assert rows["ddp"].equal_loss_s == rows["ddp"].prediction.mean_s
    assert rows["aer"].prediction.mean_s < rows["ddp"].prediction.mean_s
    for name in TOPOLOGIES:
        assert rows[name].equal_loss_s == pytest.approx(3 * rows[name].prediction.mean_s)
    assert rows["post_local_sgd(h=4)"].equal_loss_s is None


def test_a_saving_to_equal_loss_counts_the_steps() -> None:
    """If gossip still wins, its saving is in time to equal loss, and the parts add up."""
    job = transformer().with_kind(TRANSFORMER_ADAM)
    plan = make_plan(job, [16], topologies=["aer"], losses=[CHEAP])
    (advice,) = plan.advice
    rows = {row.method: row for row in plan.rows}
    ddp_s = rows["ddp"].prediction.mean_s
    assert advice.method == "aer"
    assert advice.saving == pytest.approx(1 - 1.05 * advice.wire_s / ddp_s)
    assert "more steps -" in advice.reason
    assert "(on one_peer_exponential)" in advice.reason


def test_a_topology_of_its_own_losses_takes_them_and_others_are_assumed() -> None:
    """A ring that was measured has its own gap; AER has that of one-peer exponential, marked."""
    job = transformer().with_kind(TRANSFORMER_ADAM)
    own = CHEAP.model_copy(update={"method": "ring", "gap": 0.03})
    plan = make_plan(job, [16], topologies=TOPOLOGIES, losses=[CHEAP, own])
    found = {row.method: row.loss for row in plan.rows if row.loss is not None}
    assert {name: (loss.gap, loss.assumed) for name, loss in found.items()} == {
        "ddp": (0.0, False),
        "ring": (0.03, False),
        "one_peer_exponential": (0.004, False),
        "aer": (0.004, True),
    }


@pytest.mark.parametrize(
    ("kind", "rows", "options", "said"),
    [
        ("", [COSTLY], {}, NO_LOSSES),
        (TRANSFORMER_ADAM, [], {}, NO_LOSSES),
        (TRANSFORMER_ADAM, [COSTLY], {"every": 4}, NOT_THESE),
        (TRANSFORMER_ADAM, [COSTLY], {"algorithm": "atc"}, NOT_THESE),
        (TRANSFORMER_ADAM, [measured(more_steps=None)], {}, NOT_THESE),
    ],
)
def test_without_losses_that_fit_methods_are_ranked_by_step(
    kind: str, rows: list[MeasuredLoss], options: dict[str, Any], said: str
) -> None:
    """The advice is that of a plan that knows no losses, and says by what it ranks, and why."""
    before = make_plan(transformer(), [16], topologies=TOPOLOGIES, losses=[], **options)
    job = transformer().replace(kind=kind)
    (advice,) = make_plan(job, [16], topologies=TOPOLOGIES, losses=rows, **options).advice
    assert advice.ranked_by == "step"
    assert advice.method == before.advice[0].method
    assert advice.saving == before.advice[0].saving
    assert f"ranked by time per step; {said}" in advice.reason


@pytest.mark.parametrize("rate", ["300mbit", "64kbit", "40GBIT", "1.5gbit"])
def test_a_plan_takes_any_rate_in_the_spelling_of_the_lab(tmp_path: Path, rate: str) -> None:
    """The plan uses the given rate between nodes, and prints it as given."""
    text = "\n".join(run(tmp_path, "--workers", "8", "--link", rate))
    assert f"{rate.lower()} between nodes" in text


def test_latency_comes_from_the_next_slower_link_of_the_data_sheets() -> None:
    """A rate between two of them has the latency of the slower one."""
    assert link_of("300mbit") == Link(bits_s=3e8, latency_s=LINKS["1gbit"].latency_s)
    assert link_of("40gbit") == Link(bits_s=4e10, latency_s=LINKS["25gbit"].latency_s)
    assert {name: link_of(name) for name in LINKS} == LINKS


def test_strong_scaling_divides_compute() -> None:
    """With the batch of all workers kept, twice the workers compute half as long."""
    profile = transformer("400gbit").with_compute(10)
    weak, strong = (
        make_plan(profile, [16], topologies=["ring"], strong=strong).rows[0].prediction.mean_s
        for strong in (False, True)
    )
    assert strong / weak == pytest.approx(0.5, abs=0.05)


def test_what_cannot_be_built_is_said() -> None:
    """AER does not exist on three nodes; the plan leaves it out."""
    plan = make_plan(transformer(), [12], topologies=("ring", "aer"))
    assert "power-of-two" in plan.missing["aer on 12"]
    with pytest.raises(UserError, match="topology that exists on 12"):
        make_plan(transformer(), [12], topologies=["aer"])


@pytest.mark.parametrize("workers", [[], [1], [8, 0]])
def test_scales_are_two_or_more(workers: list[int]) -> None:
    """No scale at all, one worker and none are refused with what a plan takes."""
    with pytest.raises(UserError, match="2 or more workers"):
        make_plan(transformer(), workers)


def run(path: Path, *arguments: str, kind: str = "") -> list[str]:
    write_profile(transformer().replace(kind=kind), path / "profile.json")
    options = ["plan", str(path / "profile.json"), "--topology", "aer", *arguments]
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_the_verb_prints_advice_and_a_table(tmp_path: Path) -> None:
    """Every scale has a sentence and a row per method."""
    text = "\n".join(run(tmp_path, "--workers", "8,16"))
    assert "8 workers: aer" in text
    assert "16 workers: aer" in text
    assert "post_local_sgd(h=4)" in text


def test_json_lines_hold_rows_and_advice(tmp_path: Path) -> None:
    """For scripts: one object per row, then one per scale."""
    lines = [json.loads(line) for line in run(tmp_path, "--workers", "8", "--json")]
    assert [line["kind"] for line in lines] == ["row", "row", "row", "advice"]
    assert lines[-1]["method"] == "aer"


def test_the_page_holds_all_it_needs(tmp_path: Path) -> None:
    """One file, plotly inside, nothing loaded from elsewhere."""
    pytest.importorskip("plotly")
    run(tmp_path, "--workers", "8", "--html", str(tmp_path / "plan.html"))
    page = (tmp_path / "plan.html").read_text()
    assert "<script src=" not in page
    for part in ("Timeline", "Where the saving comes from", "over the rate", "over the variance"):
        assert part in page


def test_losses_are_shown_wherever_times_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table, JSON lines and the page have what was measured, where the kind matches."""
    pytest.importorskip("plotly")
    monkeypatch.setattr(plans, "packaged_losses", lambda: (COSTLY,))
    page = tmp_path / "plan.html"
    options = ["--workers", "8", "--html", str(page)]
    text = "\n".join(run(tmp_path, *options, kind=TRANSFORMER_ADAM))
    for part in ("ms to equal loss", "+8.0 % (8)*", "taken to be that of one_peer_exponential"):
        assert part in text
        assert part in page.read_text()
    lines = run(tmp_path, "--workers", "8", "--json", kind=TRANSFORMER_ADAM)
    *rows, advice = map(json.loads, lines)
    aer = next(row for row in rows if row["method"] == "aer")
    assert aer["equal_loss_s"] == pytest.approx(3 * aer["prediction"]["mean_s"])
    assert (aer["loss"]["gap"], aer["loss"]["assumed"]) == (0.08, True)
    assert advice["ranked_by"] == "equal loss"
    assert "ms to equal loss" not in "\n".join(run(tmp_path, "--workers", "8"))


def test_a_data_sheet_is_of_a_kind_where_it_is_said(tmp_path: Path) -> None:
    """--kind is in the profile; the error for an unknown one lists the known ones."""
    path = tmp_path / "profile.json"
    options = ["profile", "--gpu", "a40", "--out", str(path), "--kind"]
    runner = CliRunner()
    runner.invoke(app, [*options, TRANSFORMER_ADAM], catch_exceptions=False)
    assert read_profile(path).kind == TRANSFORMER_ADAM
    with pytest.raises(UserError, match="got 'LSTM'; write 'transformer, Adam'"):
        runner.invoke(app, [*options, "LSTM"], catch_exceptions=False)


def test_profiles_of_before_kinds_are_read(tmp_path: Path) -> None:
    """A file without a kind is a valid profile."""
    write_profile(transformer(), tmp_path / "profile.json")
    fields = json.loads((tmp_path / "profile.json").read_text())
    del fields["kind"]
    (tmp_path / "profile.json").write_text(json.dumps(fields))
    assert read_profile(tmp_path / "profile.json") == transformer()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "eight"], "integers"),
        (["--html", "plan.pdf"], "change its suffix"),
    ],
)
def test_wrong_options_are_answered(tmp_path: Path, arguments: list[str], said: str) -> None:
    """The error says what the option accepts."""
    with pytest.raises(UserError, match=said):
        run(tmp_path, *arguments)
