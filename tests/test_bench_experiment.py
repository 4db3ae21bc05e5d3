"""Experiments: the runs of a file, and errors before anything runs."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from gossamer.bench import estimate, expand, modelled
from gossamer.bench.experiment import Experiment, load, parse
from gossamer.bench.methods import fields_of
from gossamer.engine import RunSpec
from gossamer.errors import UserError
from gossamer.runtime_model import model
from gossamer.runtime_model.model import Prediction, TimedMethod, Trials
from gossamer.runtime_model.profile import Bucket, Link, Network, Profile, write_profile

SMALL = """
name = "small"
workload = "digits-mlp"
workers = [4, 8]
methods = ["C_complete", "D_ring", "ring"]
seeds = [0, 1, 2]
"""


def experiment(more: str = "", text: str = SMALL) -> Experiment:
    return parse(text + more, "small.toml")


def test_the_matrix_is_the_product_of_all_axes() -> None:
    """Workers x methods x seeds x other fields, each combination once."""
    runs = expand(experiment("axes = { lr = [0.1, 0.2] }")).runs
    assert len(runs) == len({spec.id for spec in runs}) == 2 * 3 * 3 * 2
    assert Counter(spec.method for spec in runs) == {"C_complete": 12, "D_ring": 12, "ring": 12}
    assert {spec.lr for spec in runs} == {0.1, 0.2}


def test_methods_mean_what_papers_say() -> None:
    """Method names of papers set topology, order and other fields."""
    by_name = {spec.method: spec for spec in expand(experiment()).runs}
    assert by_name["C_complete"].topology == "centralized"
    assert (by_name["D_ring"].topology, by_name["D_ring"].algorithm) == ("ring", "atc")
    assert (by_name["ring"].topology, by_name["ring"].algorithm) == ("ring", "awc")
    assert fields_of("Ada(k0=10, gamma=0.5)", 96, 10)["topology"] == "ada(k0=10, gamma=0.5)"
    assert fields_of("Ada", 1008, 90)["topology"] == "ada(k0=112, gamma=1.236)"
    assert fields_of("local_sgd(every=4)", 8, 1) == {
        "topology": "complete",
        "algorithm": "atc",
        "every": 4,
    }
    diloco = RunSpec.model_validate(
        {"workload": "digits-mlp", "workers": 8, **fields_of("DiLoCo(every=5, lr=0.5)", 8, 1)}
    )
    assert (diloco.every, diloco.outer_lr, diloco.outer_momentum) == (5, 0.5, 0.9)


def test_include_adds_runs_and_exclude_takes_them_out() -> None:
    """An include inherits missing keys; an exclude removes all runs that match."""
    runs = expand(
        experiment(
            """
            [[include]]
            engine = "distributed"
            workers = 2
            methods = [{ name = "held", method = "D_ring", control = "auto" }]
            seeds = 0
            [[exclude]]
            method = "D_ring"
            workers = 8
            """
        )
    ).runs
    assert len(runs) == 18 - 3 + 1
    held = runs[-1]
    assert (held.engine, held.workers, held.control) == ("distributed", 2, "auto")


def test_what_an_include_says_is_added_to_what_the_experiment_says() -> None:
    """Fields of runs are merged one by one; excludes also match values of recipes and defaults."""
    text = SMALL.replace('"ring"]', '"Ada"]') + "run = { epochs = 3 }"
    runs = expand(experiment("\n[[include]]\nworkers = 2\nrun = { lr = 0.9 }", text)).runs
    assert {spec.epochs for spec in runs} == {3}
    assert runs[-1].lr == 0.9
    ada = next(spec for spec in runs if spec.method == "Ada")
    assert ada.schedule.round(ada.num_steps - 1).degree == 2
    few = expand(experiment('[[exclude]]\norder = "awc"\noptimizer = "sgd"')).runs
    assert {spec.method for spec in few} == {"D_ring"}


def test_a_budget_is_for_every_run() -> None:
    """Megabytes and seconds become limits of each specification."""
    runs = expand(experiment("budget = { bytes_mb = 2, train_s = 30 }")).runs
    assert {(spec.max_bytes, spec.max_train_s) for spec in runs} == {(2e6, 30.0)}


def ten_modelled_seconds(folder: Path) -> str:
    link = Link(bits_s=1e8, latency_s=1e-4)
    profile = Profile(
        name="by hand",
        workers=4,
        forward_s=0.01,
        buckets=(Bucket(num_bytes=1_000_000, backward_s=0.02, update_s=0.001),),
        network=Network(inside=link, between=link),
    )
    write_profile(profile, folder / "profile.json")
    return f'budget = {{ modelled_s = 10, profile = "{folder / "profile.json"}" }}'


def test_equal_modelled_time_gives_a_slower_method_fewer_steps(tmp_path: Path) -> None:
    """A link of 100 Mbit/s: the steps that fit into a second, by the runtime model."""
    budget = ten_modelled_seconds(tmp_path)
    runs = expand(experiment(budget)).runs
    steps = {(spec.method, spec.workers): spec.num_steps for spec in runs}
    # 8 Mbit on the wire take 80 ms; a ring sends twice that, hidden behind 31 ms where it overlaps.
    assert steps["D_ring", 4] < steps["ring", 4] < 10 / 0.08
    assert steps["C_complete", 4] > steps["C_complete", 8]
    with pytest.raises(UserError, match="modelled_s and profile must be given together"):
        experiment("budget = { modelled_s = 10 }")
    held = SMALL.replace('"ring"]', '{ name = "held", method = "ring", control = "auto" }]')
    with pytest.raises(UserError, match="known in advance, got control 'auto'"):
        expand(experiment(budget, held))


def test_a_profile_lies_beside_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Independent of the current folder; the stored copy of the experiment still finds it."""
    ten_modelled_seconds(tmp_path)
    text = f"{SMALL}\nbudget = {{ modelled_s = 10, profile = 'profile.json' }}"
    (tmp_path / "mine.toml").write_text(text)
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path / "results")
    first = load(tmp_path / "mine.toml")
    Path("experiment.toml").write_text(first.text)
    assert expand(load(Path("experiment.toml"))) == expand(first)


def test_runs_that_differ_in_seed_share_a_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime model predicts once for each method and scale, for all seeds."""
    asked: list[TimedMethod] = []

    def predict(method: TimedMethod, trials: Trials) -> Prediction:
        asked.append(method)
        return model.predict(method, trials)

    monkeypatch.setattr(modelled, "predict", predict)
    runs = expand(experiment(ten_modelled_seconds(tmp_path))).runs
    assert (len(asked), len(runs)) == (2 * 3, 2 * 3 * 3)
    assert len({(spec.method, spec.workers, spec.max_steps) for spec in runs}) == len(asked)


def test_learning_rates_follow_the_averaging_neighbourhood() -> None:
    """A rate grows with batch x (k + 1): all workers, or neighbours and self."""

    def lr(method: str, scaling: str = "linear", step: int = 0, **more: object) -> float:
        fields: dict[str, object] = {
            "workload": "digits-mlp",
            "workers": 16,
            "lr": 0.1,
            "batch_size": 32,
            "reference_batch": 64,
            "lr_scaling": scaling,
            "lr_schedule": "constant",
            "epochs": 10,
            "steps_per_epoch": 5,
            **fields_of(method, 16, 10),
            **more,
        }
        return RunSpec.model_validate(fields).lr_at(step)

    assert lr("C_complete") == pytest.approx(0.1 * 32 * 16 / 64)
    assert lr("D_ring") == pytest.approx(0.1 * 32 * 3 / 64)
    assert lr("D_torus", "sqrt") == pytest.approx(0.1 * (32 * 5 / 64) ** 0.5)
    assert lr("D_complete", "none") == 0.1
    ada = "Ada(k0=8, gamma=1)"
    assert lr(ada, step=45) == pytest.approx(0.1 * 32 * 9 / 64)
    assert lr(ada, step=45, lr_follows_graph=True) == pytest.approx(0.1 * 32 * 3 / 64)
    assert lr("D_ring", "none", step=4, warmup_epochs=2) == pytest.approx(0.1 * 5 / 10)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workerz = 3\n" + SMALL, "has no key 'workerz'; did you mean 'workers'"),
        (SMALL.replace("workers", "worker"), "has no key 'worker'; did you mean 'workers'"),
        (SMALL + "run = { lrr = 3 }", "a run has no field 'lrr' to set; did you mean 'lr'"),
        (SMALL + "run = { workers = 3 }", "a run has no field 'workers' to set"),
        (SMALL + "axes = { epoch = [1, 2] }", "did you mean 'epochs'"),
        (
            SMALL.replace('"D_ring"', '"D_rign"'),
            "unknown method 'D_rign' .did you mean 'D_ring'",
        ),
        (SMALL.replace('"ring"', '"C_complet"'), "did you mean 'C_complete'"),
        (SMALL.replace("digits-mlp", "digits-mpl"), "did you mean 'digits-mlp'"),
        (SMALL.replace("[4, 8]", "7").replace('"D_ring"', '"D_torus"'), "D_torus on 7 workers"),
        (SMALL + "[[exclude]]\nworker = 4", "a run has no field 'worker'; did you mean 'workers'"),
        (SMALL + "[[include]]\nworker = 4", "has no key 'worker'; did you mean 'workers'"),
        (SMALL + "[[exclude]]\nworkers = [4, 8]", "must have at least one run"),
        (SMALL + "budget = { bytes_mb = 0 }", "budget.bytes_mb: .* greater than 0, got 0"),
        (SMALL.replace("small", "a/b"), "name: String should match"),
        (SMALL.replace("name", "#name"), "name: Field required"),
        ("name = ", "small.toml must be valid TOML"),
        (SMALL.replace('"ring"', '{ name = "x" }'), r"methods\.2\.method: Field required"),
        (SMALL.replace('"ring"', '"DiLoCo(ever=5)"'), "DiLoCo takes every, lr, momentum"),
        (SMALL.replace('"ring"', '"C_complete(k=4)"'), "C_complete takes no arguments"),
        (SMALL + "axes = { lr = [0.1] }\nrun = { lr = 0.2 }", "must be set in one place, got 'lr'"),
        (SMALL + 'run = { epochs = "6" }', "epochs: Input should be a valid integer, got '6'"),
        (SMALL + "run = { lr = inf }", "lr: Input should be a finite number"),
        (SMALL.replace("[4, 8]", '"4"'), "workers.0: Input should be a valid integer"),
        (SMALL + "[[exclude]]\nworkers = 5", "must match at least one run"),
        (SMALL.replace('"ring"]', '{ name = "x", method = "D_ring" }]'), "are the same run"),
        (
            'skip_impossible = true\nrun = { optimizer = "sdg" }\n' + SMALL,
            "unknown optimizer 'sdg' .did you mean 'sgd'.*; choose from",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_runs(text: str, words: str) -> None:
    """Errors suggest the nearest known key, or name the impossible combination."""
    with pytest.raises(UserError, match=words):
        expand(experiment(text=text))


def test_impossible_combinations_can_be_skipped_with_their_reason() -> None:
    """With skip_impossible a torus of 7 is listed and the others are run."""
    text = SMALL.replace("[4, 8]", "[7, 8]").replace('"D_ring"', '"D_torus"')
    matrix = expand(experiment("skip_impossible = true", text))
    assert len(matrix.runs) == 15
    assert len(matrix.skipped) == 3
    assert "torus needs" in matrix.skipped[0].reason


def test_a_file_that_is_not_there() -> None:
    """One line names the file."""
    with pytest.raises(UserError, match=r"got no/such\.toml: No such file"):
        load(Path("no/such.toml"))


def test_the_demo_is_a_race_and_seven_methods_at_two_scales_and_real_processes() -> None:
    """Three ways to train a GPT, four seeds; seven on digits at two scales; one on processes."""
    text = resources.files("gossamer.bench").joinpath("demo.toml").read_text()
    runs = expand(parse(text, "demo.toml")).runs
    assert len(runs) == 3 * 4 + 7 * 2 * 2 + 1
    assert [spec.engine for spec in runs].count("distributed") == 1


@pytest.mark.parametrize("path", sorted(Path("experiments").glob("*.toml")), ids=str)
def test_the_experiments_that_come_with_the_project_expand(path: Path) -> None:
    """Each is a valid experiment."""
    assert expand(load(path)).runs


@pytest.mark.parametrize(
    "fields", [{"order": "atc"}, {"order": "atc", "gossip_steps": 3}, {"evaluate_replicas": 0}]
)
def test_runs_that_cost_differently_are_measured_apart(fields: dict[str, Any]) -> None:
    """An estimate distinguishes runs with three gossip steps from runs with one."""
    plain = {"workload": "digits-mlp", "workers": 4, "topology": "ring"}
    kinds = [estimate._kind(RunSpec.model_validate({**plain, **more})) for more in ({}, fields)]
    assert kinds[0] != kinds[1]


def test_the_text_that_is_kept_says_where_paths_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even without paths in it; its key folder is relative to the file."""
    text = 'name = "x"\nworkload = "quadratic"\nworkers = 4\nmethods = ["D_ring"]\n'
    place, kept = tmp_path / "place", tmp_path / "kept"
    place.mkdir()
    kept.mkdir()
    monkeypatch.chdir(kept)
    for given, expected in [
        ("", place),
        ('folder = "deep"  # here\n', place / "deep"),
        (f'folder = "{kept}"\n', kept),
    ]:
        (place / "x.toml").write_text(given + text)
        first = load(place / "x.toml")
        assert first.folder == str(expected)
        (kept / "experiment.toml").write_text(first.text)
        again = load(kept / "experiment.toml")
        assert (again.folder, again.text) == (first.folder, first.text)
