"""Plans: tables, advice with its reason, the page, and the verb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gossamer.cli import app
from gossamer.errors import UserError
from gossamer.runtime_model import Profile, write_profile
from gossamer.runtime_model.plan import WORTH_IT, make_plan
from gossamer.runtime_model.presets import from_data_sheet

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
    """Times, speed-up over DDP, bytes, p and rounds are there for each."""
    plan = make_plan(transformer(), [8, 16], topologies=TOPOLOGIES)
    assert len(plan.rows) == 2 * (2 + len(TOPOLOGIES))
    rows = {(row.method, row.workers): row for row in plan.rows}
    assert rows["ddp", 8].speedup == pytest.approx(1)
    assert rows["ddp", 8].bytes_per_step == pytest.approx(2 * 7 / 8 * 26e6)
    assert rows["one_peer_exponential", 16].bytes_per_step == pytest.approx(26e6)
    assert rows["one_peer_exponential", 16].rounds_to_consensus == 4
    assert rows["ring", 16].mixing == pytest.approx(0.0989, abs=1e-4)


def test_a_slow_network_asks_for_gossip_and_says_why() -> None:
    """With 25 Gbit/s between nodes AER is advised; its reason names the saving and its sources."""
    (advice,) = make_plan(transformer(), [16], topologies=TOPOLOGIES).advice
    assert advice.method == "aer"
    assert advice.saving > 0.3
    assert "overlap" in advice.reason
    assert "slow links" in advice.reason


def test_a_plan_keeps_the_batch_of_all_workers_where_it_is_asked_to() -> None:
    """Compute shrinks with the scale, for the rows as for the timeline and the curves."""
    plan = make_plan(transformer(), [8, 32], topologies=TOPOLOGIES, strong=True)
    assert plan.job(32).profile.forward_s == pytest.approx(transformer().forward_s / 4)
    assert plan.job(8).profile.forward_s == pytest.approx(transformer().forward_s)


def test_a_fast_network_says_stay_with_ddp() -> None:
    """Where gossip saves next to nothing the exact average is kept, and the reason says so."""
    (advice,) = make_plan(transformer("400gbit").with_compute(20), [8]).advice
    assert advice.method == "ddp"
    assert "stay with DDP" in advice.reason
    assert advice.saving == 0
    assert advice.split.ddp_s - advice.split.method_s < WORTH_IT * advice.split.ddp_s


def test_of_graphs_as_fast_the_best_mixing_one_is_advised() -> None:
    """Where all graphs hide behind compute, the one with the largest p wins."""
    profile = transformer("100gbit", variance=0.0134).with_compute(3)
    plan = make_plan(profile, [8], topologies=("one_peer_ring", "one_peer_exponential"))
    assert plan.advice[0].method == "one_peer_exponential"
    assert "mixes best" in plan.advice[0].reason


def test_strong_scaling_divides_compute() -> None:
    """With the batch of all workers kept, twice the workers compute half as long."""
    profile = transformer("400gbit").with_compute(10)
    weak, strong = (
        make_plan(profile, [16], topologies=["ring"], strong=strong).rows[0].prediction.mean_s
        for strong in (False, True)
    )
    assert strong / weak == pytest.approx(0.5, abs=0.05)


def test_what_cannot_be_built_is_said() -> None:
    """AER does not exist on three nodes; the plan goes on without it."""
    plan = make_plan(transformer(), [12], topologies=("ring", "aer"))
    assert "power-of-two" in plan.missing["aer on 12"]
    with pytest.raises(UserError, match="topology that exists on 12"):
        make_plan(transformer(), [12], topologies=["aer"])


@pytest.mark.parametrize("workers", [[], [1], [8, 0]])
def test_scales_are_two_or_more(workers: list[int]) -> None:
    """No scale at all, one worker and none are refused with what a plan takes."""
    with pytest.raises(UserError, match="2 or more workers"):
        make_plan(transformer(), workers)


def run(path: Path, *arguments: str) -> list[str]:
    write_profile(transformer(), path / "profile.json")
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "eight"], "whole numbers"),
        (["--html", "plan.pdf"], "change its ending"),
    ],
)
def test_wrong_options_are_answered(tmp_path: Path, arguments: list[str], said: str) -> None:
    """The message says what the option takes."""
    with pytest.raises(UserError, match=said):
        run(tmp_path, *arguments)
