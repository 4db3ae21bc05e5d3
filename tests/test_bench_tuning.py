"""Tuning: the same trials for every method, and runs that follow from results alone."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from gossamer import workloads
from gossamer.bench import Matrix, Store, expand, run_experiment
from gossamer.bench.analysis import analyse
from gossamer.bench.experiment import Experiment, Tune, parse
from gossamer.bench.planned import read_planned
from gossamer.bench.report.figures import figures
from gossamer.bench.report.writing import write_report
from gossamer.bench.store import Story
from gossamer.bench.trials import Trials
from gossamer.bench.tuning import search, study_names
from gossamer.cli.bench import bench_app
from gossamer.engine import RunSpec, run
from gossamer.errors import UserError
from gossamer.records import Evaluation, Started
from gossamer.workloads import Workload
from tests.stories import story_of, write
from tests.test_bench_runner import Heard, run_on_two_nodes

pytestmark = pytest.mark.timeout(200)

TEXT = """
name = "tuned"
workload = "digits-mlp"
workers = [4, 8]
methods = ["C_complete", "D_ring"]
seeds = [0, 1, 2]
run = { epochs = 6, steps_per_epoch = 10, log_every = 5 }
tune = { lr = [0.1, 0.2, 0.4] }
"""


def tuned(text: str = TEXT) -> Experiment:
    return parse(text, "tuned.toml")


def peak(at: float) -> Callable[[float], float]:
    """Return a quality whose best rate is known."""
    return lambda lr: -abs(math.log(lr / at))


def is_trial(spec: RunSpec) -> bool:
    return spec.validation_share > 0


def outcomes(matrix: Matrix, truth: Callable[[RunSpec], float | None]) -> dict[str, float | None]:
    return {spec.id: truth(spec) for spec in matrix.runs if is_trial(spec)}


def expanded(
    experiment: Experiment, truth: Callable[[RunSpec], float | None], most: int = 12
) -> list[Matrix]:
    """Return the runs of an experiment, expanded until no more trials follow."""
    matrices = [expand(experiment)]
    while len(matrices) < most:
        matrices.append(expand(experiment, outcomes(matrices[-1], truth)))
        if matrices[-1] == matrices[-2]:
            return matrices[:-1]
    raise AssertionError("it has no end")


# - The search


@pytest.mark.parametrize(
    ("best", "grid"),
    [
        ({"a": 0.2, "b": 0.21}, [0.1, 0.2, 0.4]),
        ({"a": 0.2, "b": 0.8}, [0.1, 0.2, 0.4, 0.8, 1.6]),
        ({"a": 0.05, "b": 0.4}, [0.025, 0.05, 0.1, 0.2, 0.4, 0.8]),
    ],
)
def test_the_grid_grows_for_all_until_no_best_is_on_its_edge(
    best: dict[str, float], grid: list[float]
) -> None:
    """The grid is extended in its ratio; every method tries all rates, and its best is found."""
    tune = Tune(lr=[0.1, 0.2, 0.4])
    found = search(tune, list(best), lambda method, lr: peak(best[method])(lr))
    assert found.grid == grid
    for method, rate in best.items():
        chosen = found.grid[found.best[method]]
        assert abs(math.log(chosen / rate)) == min(abs(math.log(lr / rate)) for lr in grid)
        assert 0 < found.best[method] < len(grid) - 1
        assert len(found.quality[method]) == len(grid)


def test_the_grid_has_a_bound() -> None:
    """A best rate further out remains at the edge; the other side is not extended."""
    found = search(Tune(lr=[0.1, 0.2], extensions=3), ["a"], lambda _, lr: lr)
    assert found.grid == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert found.best == {"a": 4}
    fixed = search(Tune(lr=[0.1, 0.2], extensions=0), ["a"], lambda _, lr: lr)
    assert (fixed.grid, fixed.best) == ([0.1, 0.2], {"a": 1})


def test_divergence_is_worst() -> None:
    """A best rate below one that diverges is no edge. If all diverge, smaller ones are tried."""
    found = search(Tune(lr=[1, 2, 4]), ["a"], lambda _, lr: lr if lr < 3 else -math.inf)
    assert found.best == {"a": 1}
    small = search(Tune(lr=[1, 2, 4]), ["a"], lambda _, lr: lr if lr < 0.3 else -math.inf)
    assert (small.grid, small.best) == ([0.125, 0.25, 0.5, 1, 2, 4], {"a": 1})
    never = search(Tune(lr=[1, 2, 4], extensions=1), ["a"], lambda *_: -math.inf)
    assert (never.grid, never.best) == ([0.5, 1, 2, 4], {"a": 0})


def test_of_equal_rates_one_inside_is_taken() -> None:
    """A plateau that reaches the edge needs no further trials."""
    found = search(Tune(lr=[1, 2, 4]), ["a"], lambda *_: 0.5)
    assert (found.grid, found.best) == ([1, 2, 4], {"a": 1})


# - The runs


def test_every_method_gets_the_same_trials_and_fresh_seeds_for_its_runs() -> None:
    """Equal budgets at each scale; what is compared has the best rate, and no validation split."""

    def truth(spec: RunSpec) -> float:
        return peak({4: 0.2, 8: 0.8}[spec.workers] * (2 if spec.method == "D_ring" else 1))(spec.lr)

    experiment = tuned()
    first, *_, last = expanded(experiment, truth)
    assert all(is_trial(spec) for spec in first.runs)
    assert not any(study.over for study in first.studies)
    rates = Counter((s.workers, s.method, s.seed) for s in last.runs if is_trial(s))
    assert {(workers, num) for (workers, *_), num in rates.items()} == {(4, 4), (8, 6)}
    assert {seed for _, _, seed in rates} == {1000, 1001}
    final = [spec for spec in last.runs if not is_trial(spec)]
    assert {(s.workers, s.method, s.lr) for s in final} == {
        (4, "C_complete", 0.2),
        (4, "D_ring", 0.4),
        (8, "C_complete", 0.8),
        (8, "D_ring", 1.6),
    }
    assert Counter(spec.seed for spec in final) == {0: 4, 1: 4, 2: 4}
    study = last.studies[0]
    assert (study.seeds, study.final_seeds, study.validation) == ([1000, 1001], [0, 1, 2], 0.1)
    ids = {spec.id for spec in last.runs}
    named = [i for s in last.studies for m in s.methods for r in m.rates for i in r.trials]
    named += [run_id for s in last.studies for m in s.methods for run_id in m.final]
    assert sorted(named) == sorted(ids)
    assert {spec.num_steps for spec in last.runs} == {60}


def test_runs_follow_from_results_and_none_goes_away() -> None:
    """Expanding again gives the same runs; each expansion contains all runs of the previous one."""
    waves = expanded(tuned(), lambda spec: peak(1.0)(spec.lr))
    assert len(waves) > 3
    for before, after in itertools.pairwise(waves):
        assert {s.id for s in before.runs} < {s.id for s in after.runs}
    some = outcomes(waves[0], lambda spec: 1.0)
    del some[waves[0].runs[-1].id]
    assert expand(tuned(), some).studies[-1].methods[-1].best is None
    assert len(expand(tuned(), some).studies[0].methods[0].final) == 3


def test_a_seed_that_diverges_spoils_its_rate() -> None:
    """The rate counts as worst even if other seeds are good."""

    def truth(spec: RunSpec) -> float | None:
        return None if spec.lr == 0.2 and spec.seed == 1001 else peak(0.2)(spec.lr)

    *_, last = expanded(tuned(TEXT.replace("0.4]", "0.4], extensions = 0")), truth)
    assert {method.best for study in last.studies for method in study.methods} == {0.1}
    assert {method.edge for study in last.studies for method in study.methods} == {"lowest"}


def test_the_lower_metric_is_the_better_where_that_is_so() -> None:
    """Bits per byte: the rate with the least of them."""
    text = TEXT.replace("digits-mlp", "stdlib-gpt").replace("[4, 8]", "4")
    *_, last = expanded(tuned(text), lambda spec: abs(math.log(spec.lr / 0.2)))
    assert [method.best for method in last.studies[0].methods] == [0.2, 0.2]


def test_each_setting_is_tuned_by_itself_and_shares_its_rates() -> None:
    """Batch sizes are settings; a method of an include joins those of its setting."""
    text = TEXT.replace("[4, 8]", "4") + (
        "axes = { batch_size = [4, 8] }\n[[include]]\n"
        'methods = [{ name = "adam", method = "D_ring", optimizer = "adamw" }]\n'
    )

    def truth(spec: RunSpec) -> float:
        return peak({4: 0.2, 8: 0.4}[spec.batch_size] / (8 if spec.method == "adam" else 1))(
            spec.lr
        )

    *_, last = expanded(tuned(text), truth)
    small, large = last.studies
    assert [m.best for m in small.methods] == [0.2, 0.2, 0.025]
    assert [m.best for m in large.methods] == [0.4, 0.4, 0.05]
    assert [r.lr for r in small.methods[0].rates] == [0.0125, 0.025, 0.05, 0.1, 0.2, 0.4]
    assert study_names(last.studies) == [
        "digits-mlp on 4 workers, batch_size=4",
        "digits-mlp on 4 workers, batch_size=8",
    ]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[0.1, 0.2, 0.4]", "[0.1]", "at least two rates in increasing order, got .0.1.; write"),
        ("[0.1, 0.2, 0.4]", "[0.4, 0.2]", "two rates in increasing order"),
        ("[0.1, 0.2, 0.4]", "[0.1, 0.2], seeds = [2]", "no seed in common, got .2. in both"),
        ("[0.1, 0.2, 0.4]", "[0.1, 0.2], seeds = [7, 7]", "tune.seeds must be distinct"),
        ("[0.1, 0.2, 0.4]", "[0.1, 0.2], share = 0.1", "has no key 'tune.share'"),
        ("[0.1, 0.2, 0.4]", "[0.1, 0.2], validation = 1.5", "tune.validation: .* less than 1"),
        ("epochs = 6", "lr = 0.1, epochs = 6", "tune sets lr, got it also in run"),
        (
            '"D_ring"]',
            '{ name = "D_ring", method = "D_ring", lr = 1.0 }]',
            "tune sets lr, got it also",
        ),
        ('"D_ring"]', '"D_ring", "D_ring"]\naxes = { lr = [1.0] }', "tune sets lr, got it also"),
        (
            '"D_ring"]',
            '{ name = "x", method = "D_ring" }, { name = "x", method = "ring" }]',
            "different names, got two with the name 'x'",
        ),
    ],
)
def test_mistakes_are_refused(old: str, new: str, words: str) -> None:
    """Before anything runs, with what to do."""
    with pytest.raises(UserError, match=words):
        expand(tuned(TEXT.replace(old, new)))


# - The validation split


@pytest.mark.parametrize("name", ["digits-mlp", "stdlib-gpt", "quadratic"])
def test_validation_samples_are_training_samples_that_are_not_trained_on(name: str) -> None:
    """The two parts are the training samples, each once; the same every time; no test sample."""
    data = workloads.find(name).load()
    split, again = data.with_validation(0.1), data.with_validation(0.1)
    num = len(data.train_targets)
    assert len(split.test_targets) == round(0.1 * num)
    assert split.test_samples is not None
    assert again.test_samples is not None
    held = split.test_samples
    assert torch.equal(held, again.test_samples)
    rest = torch.tensor(sorted({*range(num)} - {*held.tolist()}))
    every = torch.arange(len(rest))
    assert torch.equal(split.train_inputs[every], data.train_inputs[rest])
    assert torch.equal(split.test_inputs[torch.arange(len(held))], data.train_inputs[held])
    if data.labels is not None:
        assert split.labels is not None
        assert torch.equal(split.labels, data.labels[rest])
    some = split.with_tests(torch.tensor([1, 3]))
    assert some.validation
    assert some.test_samples is not None
    assert some.test_samples.tolist() == held[[1, 3]].tolist()


class Forbidden:
    """Samples that raise when they are used."""

    def __len__(self) -> int:
        raise AssertionError("looked at")

    def __getitem__(self, chosen: object) -> torch.Tensor:
        raise AssertionError("looked at")


def test_a_method_is_tuned_or_has_a_rate() -> None:
    """Runs at the recipe's rate would be pooled with those at the best one; names separate them."""
    fixed = TEXT.replace("tune =", "# tune =")
    both = fixed + "\n[[include]]\nseeds = [3]\ntune = { lr = [0.1, 0.2] }\n"
    with pytest.raises(
        UserError, match="'C_complete' with both on 4 workers; give it another name"
    ):
        expand(tuned(both))
    named = both + 'methods = [{ name = "tuned ring", method = "D_ring" }]\n'
    assert {spec.method for spec in expand(tuned(named)).runs} >= {"D_ring", "tuned ring"}


def test_a_trial_never_sees_the_test_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs without test samples; the run that is compared does not."""
    make = RunSpec.make_workload

    def without_tests(spec: RunSpec) -> Workload:
        workload = make(spec)
        known = workload.load()
        hidden = replace(known, test_inputs=Forbidden(), test_targets=Forbidden())
        return replace(workload, load=lambda: hidden)

    monkeypatch.setattr(RunSpec, "make_workload", without_tests)
    fields: dict[str, Any] = {"workload": "digits-mlp", "workers": 2, "topology": "ring"}
    fields |= {"epochs": 2, "steps_per_epoch": 2, "evaluate_samples": 20}
    *_, last, _ = run(RunSpec(**fields, validation_share=0.2))
    assert isinstance(last, Evaluation)
    assert last.samples is None
    with pytest.raises(AssertionError, match="looked at"):
        list(run(RunSpec(**fields)))


def test_ids_know_the_split_only_where_there_is_one() -> None:
    """Runs of before keep their ids (pinned in test_evaluation); both engines split alike."""
    fields: dict[str, Any] = {"workload": "digits-mlp", "workers": 2, "topology": "ring"}
    assert RunSpec(**fields, validation_share=0.0).id == RunSpec(**fields).id
    assert RunSpec(**fields, validation_share=0.1).id != RunSpec(**fields).id
    with pytest.raises(UserError, match="on both sides, got 0 of 1500 samples; choose another"):
        RunSpec(**fields, validation_share=1e-5).load_data()


# - The runner

SHORT = """
name = "short"
workload = "digits-mlp"
workers = 2
methods = "D_ring"
run = { epochs = 1, steps_per_epoch = 6, log_every = 3 }
tune = { lr = [0.3, 1e30], seeds = 7, extensions = 1 }
"""


def test_a_runner_goes_from_trials_to_what_is_compared(tmp_path: Path) -> None:
    """The highest rate diverges and the lowest is best, so one is added; started again, no more."""
    experiment, store = tuned(SHORT), Store(tmp_path)
    run_experiment(experiment, store, Heard(), jobs=2)
    matrix = expand(experiment, Trials(store).outcomes())
    assert [spec.lr for spec in matrix.runs if is_trial(spec)] == [0.3, 1e30, 9e-32]
    assert all(store.ended(spec.id) for spec in matrix.runs)
    assert [spec.lr for spec in matrix.runs if not is_trial(spec)] == [0.3]
    planned = read_planned(store, experiment)
    assert planned is not None
    assert [each.id for each in planned.runs] == [spec.id for spec in matrix.runs]
    assert planned.studies == matrix.studies
    assert not list((tmp_path / "norms").glob(f"{matrix.runs[0].id}*"))
    again = Heard()
    run_experiment(experiment, store, again, jobs=2)
    assert (again.before, again.steps) == (len(matrix.runs), [])


def test_a_trial_that_fails_holds_its_setting_up(tmp_path: Path) -> None:
    """It does not count as divergence: no runs follow, and each start retries it at most once."""
    experiment = tuned(SHORT.replace("seeds = 7", "seeds = 7, validation = 1e-6"))
    for retry in (False, True):
        run_experiment(experiment, Store(tmp_path), Heard(), jobs=2, retry=retry)
    store = Store(tmp_path)
    ends = [store.ended(spec.id) for spec in expand(experiment, Trials(store).outcomes()).runs]
    assert [ended.status for ended in ends if ended] == ["error", "error"]
    shown = CliRunner().invoke(bench_app, ["status", str(tmp_path)])
    assert "2 rates of methods are left to try" in shown.output


def test_a_damaged_trial_decides_nothing(stories: list[Story], tmp_path: Path) -> None:
    """Its last evaluation may be missing: an earlier one is not used instead."""
    store = write(tmp_path / "f", stories)
    assert Trials(store).outcomes()
    trial = next(
        story
        for story in stories
        if isinstance(story.records[0], Started) and story.records[0].spec["validation_share"]
    )
    path = tmp_path / "f" / "runs" / f"{trial.run_id}.jsonl"
    *lines, evaluation, end = path.read_text().splitlines()
    assert '"evaluation"' in evaluation
    path.write_text("\n".join([*lines, evaluation[:-9], end]) + "\n")
    with pytest.raises(UserError, match="remove the file"):
        Trials(store).outcomes()


@pytest.mark.full
def test_ranks_tune_together(tmp_path: Path) -> None:
    """Rank 0 reads the records and broadcasts the results, so all ranks expand the same runs."""
    file, folder = tmp_path / "short.toml", tmp_path / "out"
    file.write_text(
        'engine = "distributed"\n'
        + SHORT.replace("1e30", "0.6").replace("extensions = 1", "extensions = 0")
    )
    codes, said = run_on_two_nodes([file, file], folder)
    assert codes == [0, 0], said
    store = Store(folder)
    matrix = expand(parse(file.read_text(), "short.toml"), Trials(store).outcomes())
    assert all(study.over for study in matrix.studies)
    assert all(store.ended(spec.id) for spec in matrix.runs)


# - Analysis and report


def told(experiment: Experiment, truth: Callable[[RunSpec], float | None]) -> list[Story]:
    """Return records of all runs of an experiment."""
    *_, last = expanded(experiment, truth)
    stories: list[Story] = []
    for spec in last.runs:
        value = truth(spec)
        status = "diverged" if value is None else "done"
        stories.append(story_of(spec, value or 0.0, status=status))
    return stories


def accuracy(spec: RunSpec) -> float | None:
    """D_ring is best at the highest rates, all-reduce at 0.2; above 5 both diverge."""
    if spec.lr > 5:
        return None
    best = 0.2 if spec.method == "C_complete" else 100.0
    return 0.9 - 0.05 * abs(math.log2(spec.lr / best)) + 0.01 * (spec.seed % 1000)


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    """Of an experiment whose grid ends before what diverges."""
    return told(tuned(TEXT.replace("0.4]", "0.4], extensions = 2")), accuracy)


def test_trials_are_no_part_of_what_is_compared(stories: list[Story]) -> None:
    """Methods keep their names, whatever rate each has, and count the final seeds alone."""
    analysis = analyse(stories)
    assert set(analysis.runs["method"]) == {"C_complete", "D_ring"}
    assert set(analysis.runs["seed"]) == {0, 1, 2}
    assert set(analysis.summary["planned"]) == {3}
    assert set(analysis.trials["seed"]) == {1000, 1001}
    assert set(analysis.evaluations["run_id"]) == set(analysis.runs["run_id"])


def test_the_table_has_the_best_rate_and_where_it_lies(stories: list[Story]) -> None:
    """Known truth: 0.2 inside, and the highest of the grid on its edge, with the test's result."""
    rows = analyse(stories).tuning.filter(pl.col("workers") == 4).to_dicts()
    central, ring = rows
    assert (central["best"], central["edge"], central["rates"]) == (0.2, "", 5)
    assert (ring["best"], ring["edge"], ring["highest"]) == (1.6, "highest", 1.6)
    assert central["validation"] == pytest.approx(0.905)
    assert central["final"] == pytest.approx(0.91)
    assert {row["trials"] for row in rows} == {10}


def test_a_rate_that_diverged_has_no_metric(stories: list[Story]) -> None:
    """With more extensions the grid reaches a rate that diverges: the best is not at the edge."""
    analysis = analyse(told(tuned(TEXT.replace("0.4]", "0.4], extensions = 5")), accuracy))
    ring = analysis.tuning.filter(pl.col("method") == "D_ring").row(0, named=True)
    assert (ring["best"], ring["edge"], ring["diverged"]) == (3.2, "", 1)
    curve = analysis.sensitivity.filter(pl.col("method") == "D_ring", pl.col("workers") == 4)
    assert curve["lr"].to_list() == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4]
    assert curve["validation"][-1] is None
    drawn = {figure.name: figure for figure in figures(analysis)}["sensitivity"]
    crosses = [t for t in drawn.traces if t.get("marker", {}).get("symbol") == "x-thin-open"]
    assert {tuple(trace["x"]) for trace in crosses} == {(6.4,)}


def test_the_page_shows_curves_rates_and_edges(stories: list[Story], tmp_path: Path) -> None:
    """And says with which seeds, on how much, and where a better rate may lie further out."""
    write(tmp_path / "done", stories, TEXT.replace("0.4]", "0.4], extensions = 2"))
    write_report(tmp_path / "done", tables_dir=tmp_path / "tables")
    page = (tmp_path / "done" / "report.html").read_text()
    section = page[page.index('<section id="tuning">') : page.index('<section id="why">')]
    assert section.count("the highest tried") == 2
    assert "seeds 1000 and 1001" in section
    assert "10 % of the training samples" in section
    assert "seeds 0, 1 and 2" in section
    table = pl.read_csv(tmp_path / "tables" / "tuning.csv")
    assert table["best"].to_list() == [0.2, 1.6, 0.2, 1.6]


def test_before_anything_is_compared_the_page_shows_trials(
    stories: list[Story], tmp_path: Path
) -> None:
    """No verdict, and no failure either."""
    trials = [s for s in stories if '"validation_share":0.1' in s.records[0].model_dump_json()]
    write(tmp_path / "half", trials, TEXT.replace("0.4]", "0.4], extensions = 2"))
    results = write_report(tmp_path / "half")
    assert results.analysis.verdicts.is_empty()
    assert results.missing == 12
    assert "no run is done yet" in (tmp_path / "half" / "report.html").read_text()


def test_the_command_lists_what_is_known_so_far(stories: list[Story], tmp_path: Path) -> None:
    """With the trials in the folder, the runs that follow from them."""
    file = tmp_path / "tuned.toml"
    file.write_text(TEXT.replace("0.4]", "0.4], extensions = 2"))
    write(tmp_path / "out", stories)
    for out, final in ((tmp_path / "none", 0), (tmp_path / "out", 12)):
        command = ["expand", str(file), "--out", str(out), "--no-estimate", "--json"]
        result = CliRunner().invoke(bench_app, command)
        lines = [json.loads(line) for line in result.output.splitlines()]
        runs = [line for line in lines if line["kind"] == "run"]
        assert sum(not line["trial"] for line in runs) == final
        assert [line["kind"] for line in lines][-2:] == ["study", "study"]
    shown = CliRunner().invoke(
        bench_app, ["expand", str(file), "--out", str(tmp_path / "out"), "--no-estimate"]
    )
    assert "C_complete 0.2; D_ring 1.6 (the highest rate)" in shown.output
