"""Measured losses: the file, which row a plan takes, and the command that writes them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from benchmarks import evidence
from benchmarks import losses as command
from gossamer.bench.store import Story
from gossamer.errors import UserError
from gossamer.optim import AccumAdam, AccumAdamW, SmoothAdam, SmoothAdamW
from gossamer.runtime_model import links, measure, read_profile
from gossamer.runtime_model.losses import (
    ASSUMED_OPTIMIZERS,
    MeasuredLoss,
    comparable,
    factor_of_steps,
    nearest_gap,
    packaged_losses,
    read_losses,
    write_losses,
)
from gossamer.runtime_model.measure import kind_of
from gossamer.runtime_model.profile import KINDS, TRANSFORMER_ADAM
from gossamer.workloads import find
from tests.page_commands import own_app
from tests.pool import ProcessPool
from tests.stories import spec_of, story_of, write


def measured(**changes: Any) -> MeasuredLoss:
    """Return one-peer exponential with SmoothAdamW on 8 workers, but for what is changed."""
    fields: dict[str, Any] = {
        "kind": TRANSFORMER_ADAM,
        "workload": "stdlib-gpt",
        "workers": 8,
        "batch_size": 4,
        "steps": 500,
        "method": "one_peer_exponential",
        "algorithm": "awc",
        "optimizer": "smooth_adamw",
        "loss": 3.06,
        "all_reduce_loss": 3.0,
        "gap": 0.02,
        "interval": (0.01, 0.03),
        "seeds": 5,
        "more_steps": 1.2,
        "commit": "abc",
        "date": "2026-11-20",
    }
    return MeasuredLoss(**(fields | changes))


# - The file


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    """What is not known stays so."""
    rows = (measured(), measured(more_steps=None, interval=None, slope_from="8 workers"))
    write_losses(rows, tmp_path / "losses.json")
    assert read_losses(tmp_path / "losses.json") == rows


def test_rows_of_the_package_are_of_known_kinds() -> None:
    """A plan looks for no others, so such rows would never be found."""
    assert {row.kind for row in packaged_losses()} <= {*KINDS}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"workers": 8', '"workers": 0', "rows.0.workers"),
        ('"more_steps": 1.2', '"more_steps": 0.9', "rows.0.more_steps"),
        ('"gap": 0.02', '"gap": NaN', "rows.0.gap"),
        ('"seeds"', '"sedes"', "rows.0.seeds"),
        ('"schema_version": 1', '"schema_version": 2', "schema_version"),
        ("{", "", "the file"),
    ],
)
def test_what_no_command_writes_is_refused_by_name(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    """A file that was edited by hand says which field is wrong, and what writes it."""
    path = tmp_path / "losses.json"
    write_losses([measured()], path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=f"{said}.*write it again"):
        read_losses(path)


def test_a_missing_file_says_what_writes_it(tmp_path: Path) -> None:
    """A path that does not exist is named."""
    with pytest.raises(UserError, match=r"none\.json.*python -m benchmarks\.losses"):
        read_losses(tmp_path / "none.json")


# - What a plan takes


def test_as_many_steps_are_needed_as_the_slope_says() -> None:
    """A gap of one e-fold takes e times the steps; a lower loss takes no fewer than as many."""
    assert factor_of_steps(3.5, 3.0, 0.5) == pytest.approx(math.e)
    assert factor_of_steps(2.9, 3.0, 0.5) == 1
    assert math.isfinite(factor_of_steps(3.0, 2.0, 1e-300))


def test_the_nearest_number_of_workers_is_taken() -> None:
    """By their ratio; of one number the longest training, then the largest batches."""
    rows = [
        measured(workers=4, gap=0.4),
        measured(workers=16, gap=0.16),
        measured(workers=16, steps=2000, batch_size=2, gap=0.17),
        measured(workers=16, steps=2000, gap=0.18),
    ]
    found = {n: nearest_gap(rows, "one_peer_exponential", n) for n in (2, 7, 9, 512)}
    assert {n: gap and gap.gap for n, gap in found.items()} == {2: 0.4, 7: 0.4, 9: 0.18, 512: 0.18}
    assert found[9]
    assert found[9].setting == "stdlib-gpt with 16 workers, batches of 4, 2000 steps"
    without = measured(workers=8, more_steps=None)
    assert nearest_gap([without, *rows], "ring", 8) != nearest_gap([without], "ring", 8)


def test_only_what_was_trained_as_a_plan_assumes_is_taken() -> None:
    """AdamW on gossip, another algorithm and local steps have other losses."""
    rows = [measured(optimizer=name) for name in ("adamw", *ASSUMED_OPTIMIZERS)]
    rows.append(measured(algorithm="atc"))
    assert comparable(rows, "awc", 1) == rows[1:3]
    assert comparable(rows, "atc", 1) == rows[3:]
    assert comparable(rows, "awc", 4) == []
    assert nearest_gap([], "ring", 8) is None
    assert nearest_gap([measured(method="ring")], "aer", 8) is None


# - Kinds


@pytest.mark.parametrize("optimizer", [Adam, AdamW, AccumAdam, AccumAdamW, SmoothAdam, SmoothAdamW])
def test_a_model_with_attention_under_adam_is_of_that_kind(
    optimizer: Callable[..., Optimizer],
) -> None:
    """Ours, torch's, and those inside other modules; one of several optimizers is not enough."""
    for model in (
        find("stdlib-gpt").make_model(),
        nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8)),
    ):
        own, sgd = optimizer(model.parameters()), SGD(model.parameters())
        assert kind_of(model, own) == kind_of(model, [own, own]) == TRANSFORMER_ADAM
        assert kind_of(model, [own, sgd]) == kind_of(model, sgd) == ""
    model = find("digits-mlp").make_model()
    assert kind_of(model, optimizer(model.parameters())) == ""


def measure_transformer(path: Path) -> None:
    """Profile a few steps of ours."""
    with (
        mock.patch.object(links, "_WINDOW_S", 0.004),
        mock.patch.object(measure, "_TINY_STEPS", 3),
    ):
        model = find("stdlib-gpt").make_model()
        optimizer = AdamW(model.parameters())
        measure.measure(model, optimizer, path, steps=2, warmup=1)
        for _ in range(3):
            model(torch.zeros(1, 8, dtype=torch.long)).mean().backward()
            optimizer.step()


def test_a_measured_profile_has_its_kind(pool: ProcessPool, tmp_path: Path) -> None:
    """stdlib-gpt under AdamW is what its losses were measured for."""
    pool.run(measure_transformer, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json").kind == TRANSFORMER_ADAM


# - The command

SMOOTH: dict[str, Any] = {"optimizer": "smooth_adamw", "optimizer_options": {"betas": (0.9, 0.99)}}


def runs_of(method: str, losses: list[float], *, times: int = 1, **fields: Any) -> list[Story]:
    """Return a run of the transformer per seed, with these losses."""
    common: dict[str, Any] = {"workload": "stdlib-gpt", "batch_size": 4, "epochs": 6 * times}
    specs = [spec_of(method, seed=s, **(common | fields)) for s in range(len(losses))]
    return [story_of(spec, loss) for spec, loss in zip(specs, losses, strict=True)]


def test_records_become_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seed by seed, with a slope of its own or of the nearest setting; trials do not count."""
    one_peer: dict[str, Any] = {"topology": "one_peer_exponential", **SMOOTH}
    short = [
        *runs_of("C_complete", [3.0, 3.2, 2.8]),
        *runs_of("gossip", [3.1, 3.3], **one_peer),
        *runs_of("gossip, at a rate", [9.0], lr=1.0, validation_share=0.1, **one_peer),
        *runs_of("C_complete", [3.0], workers=16),
        *runs_of("gossip", [2.9], workers=16, **one_peer),
        *runs_of("C_complete", [0.5], workload="quadratic"),
    ]
    unfinished = story_of(
        spec_of("gossip", seed=2, workload="stdlib-gpt", batch_size=4, **one_peer), 1.0, status=None
    )
    write(tmp_path / "short", [*short, unfinished], "of no matter")
    longer = runs_of("C_complete", [2.4, 2.6, 2.2], times=4, evaluate_every=2)
    write(tmp_path / "long", longer, "of no matter")
    out = tmp_path / "losses.json"
    app = typer.main.get_command(own_app(command))
    folders = [str(tmp_path / name) for name in ("short", "long", "short")]
    app.main([*folders, "--out", str(out)], standalone_mode=False)
    own, other = read_losses(out)
    assert own.kind == TRANSFORMER_ADAM
    assert (own.method, own.algorithm, own.optimizer) == (
        "one_peer_exponential",
        "awc",
        "smooth_adamw",
    )
    assert (own.workers, own.batch_size, own.steps, own.seeds) == (8, 4, 60, 2)
    assert (own.loss, own.all_reduce_loss) == (3.2, 3.1)
    assert own.gap == pytest.approx((3.1 / 3.0 + 3.3 / 3.2) / 2 - 1, rel=1e-4)
    assert own.interval
    assert own.interval[0] < own.gap < own.interval[1]
    assert own.more_steps == pytest.approx(math.exp(0.1 / (0.6 / math.log(4))), rel=1e-4)
    assert own.slope_from == ""
    assert own.commit == "abc"
    assert (other.workers, other.seeds, other.interval, other.more_steps) == (16, 1, None, 1)
    assert other.slope_from == "8 workers, batches of 4, 60 to 240 steps"
    printed = capsys.readouterr()
    assert [json.loads(line)["workers"] for line in printed.out.splitlines()] == [8, 16]
    for reason in ("1 trials", "has not ended", "1 of no kind"):
        assert reason in printed.err


def test_without_a_longer_run_no_steps_are_named(tmp_path: Path) -> None:
    """The gap is there; what makes up for it is not known."""
    stories = [*runs_of("C_complete", [3.0, 3.2]), *runs_of("D_ring", [3.1, 3.1], **SMOOTH)]
    write(tmp_path / "short", stories, "of no matter")
    left_out = Counter[str]()
    runs = command.final_runs([tmp_path / "short"], left_out)
    (row,) = command.rows_from(command.group(runs, left_out))
    assert (row.method, row.algorithm, row.more_steps, row.slope_from) == ("ring", "atc", None, "")


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    """A folder that is none, no pair of runs, and two runs for one place."""
    with pytest.raises(UserError, match="must be the --out of gossamer bench run"):
        command.main([tmp_path], tmp_path / "losses.json")
    write(tmp_path / "alone", runs_of("D_ring", [3.0], **SMOOTH), "of no matter")
    with pytest.raises(UserError, match="share a seed, got none"):
        command.main([tmp_path / "alone"], tmp_path / "losses.json")
    twice = [*runs_of("D_ring", [3.0], **SMOOTH), *runs_of("D_ring", [3.1], lr=0.1, **SMOOTH)]
    write(tmp_path / "twice", twice, "of no matter")
    with pytest.raises(UserError, match="one run per setting and seed, got two of D_ring"):
        command.main([tmp_path / "twice"], tmp_path / "losses.json")
    assert not (tmp_path / "losses.json").exists()


def test_evidence_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """Specifications follow from the experiment and the trials: a file has ids and results only."""
    path = Path(__file__).parents[1] / "evidence" / "adam-stdlib-gpt.csv"
    results = evidence.read(path)
    again = tmp_path / path.name
    evidence.write(results, again)
    by_id = {result.spec.id: result for result in results}
    assert {result.spec.id: result for result in evidence.read(again)} == by_id
    rows = [line for line in evidence.table(results).splitlines() if "all-reduce, AdamW" in line]
    assert [row.split("|")[1:3] for row in rows] == [
        [f" {workers} ", f" {size} "] for workers in (4, 8) for size in (4, 8)
    ]
    again.write_text(again.read_text().replace(results[0].spec.id, "0123456789abcdef"))
    with pytest.raises(UserError, match=f"got 1 of {len(results)} that are not, such as 01234"):
        evidence.read(again)


def test_a_field_is_compared_with_its_default_on_the_same_graph() -> None:
    """8 bits on a ring are measured by the ring in full, seed by seed, and by no other graph."""
    accuracies = {"D_ring": 0.90, "D_torus": 0.50}
    results = [
        evidence.Result(
            spec_of(method, seed=seed, wire=wire).model_copy(update={"method": f"{method} {wire}"}),
            accuracy + 0.01 * seed - (0.02 if wire != "fp32" else 0),
            "",
            "",
        )
        for method, accuracy in accuracies.items()
        for wire in ("fp32", "modulo(bits=8)")
        for seed in (0, 1, 2)
    ]
    lines = evidence.table(results, ["wire"]).splitlines()[2:]
    assert [line.split(" | ")[-3] for line in lines] == ["–", "-0.02", "–", "-0.02"]
