"""Results are data: who looks at a folder runs nothing that its files name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gossamer.bench import Store, expand
from gossamer.bench.experiment import parse
from gossamer.bench.planned import planned_runs
from gossamer.bench.report.reading import Reader
from gossamer.bench.store import Story
from gossamer.cli import app
from gossamer.records import Started, WorkloadFacts
from tests.stories import spec_of, story_of, write

TEXT = """
name = "x"
workload = "digits-mlp"
workers = 8
methods = ["D_ring", "D_complete"]
"""

EVIL = "os:system('touch pwned')"

FOLDERS = {
    "a workload": TEXT.replace("digits-mlp", EVIL),
    "a method": TEXT.replace("D_complete", EVIL),
    "a topology": TEXT.replace("D_complete", f"D_{EVIL}"),
    "a field of runs": f'{TEXT}run = {{ sharding = "{EVIL}" }}',
    "a field of a method": TEXT.replace(
        '"D_ring"', f'{{ name = "a", method = "D_ring", control = "repeat({EVIL})" }}'
    ),
    "an axis": f'{TEXT}axes = {{ optimizer = ["sgd", "{EVIL}"] }}',
    "an include": f'{TEXT}[[include]]\nworkload = "{EVIL}"',
}


@pytest.mark.parametrize("text", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_is_looked_at_and_not_executed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever its experiment names a plug-in: status and reports go by records, and say so."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x", [story_of(spec_of("D_ring"), 0.5)], text)
    status = CliRunner().invoke(app, ["bench", "status", "x"])
    assert status.exit_code == 0, status.output
    assert "x: 1 done" in status.output
    assert "only runs with records are listed" in status.output
    results = Reader(tmp_path / "x").read()
    assert results.counts == {"done": 1}
    assert "planned.json is not in the folder" in results.remark
    assert not (tmp_path / "pwned").exists()


def test_a_plan_tells_which_runs_there_are(tmp_path: Path) -> None:
    """Those of plug-ins too, whose experiment is not expanded; the same as without a plan."""
    experiment = parse(TEXT, "x.toml")
    matrix = expand(experiment)
    store = Store(tmp_path / "x")
    said: list[str] = []
    for text, plan in [
        (TEXT, None),
        (TEXT, planned_runs(matrix).model_dump_json()),
        (TEXT.replace("digits-mlp", "gone.py:workload"), planned_runs(matrix).model_dump_json()),
    ]:
        with store.locked(text, plan):
            pass
        result = CliRunner().invoke(app, ["bench", "status", str(store.folder), "--json"])
        said.append(result.stdout)
        assert Reader(store.folder).read().counts == {"to do": 2}
    assert said == [said[0]] * 3
    assert [json.loads(line)["id"] for line in said[0].splitlines()] == [
        spec.id for spec in matrix.runs
    ]


def test_a_plan_is_of_the_text_beside_it(tmp_path: Path) -> None:
    """One of an experiment of before is removed; one that cannot be read is refused by name."""
    store = Store(tmp_path / "x")
    with store.locked(TEXT, "{}"):
        assert store.planned() == "{}"
    result = CliRunner().invoke(app, ["bench", "status", str(store.folder)])
    assert "must be as gossamer bench run wrote it" in str(result.exception)
    with store.locked(TEXT):
        assert store.planned() is None


@pytest.mark.parametrize(
    ("workload", "facts", "expected"),
    [
        (EVIL, None, ("metric", True, None)),
        ("gone", None, ("metric", True, None)),
        (
            EVIL,
            WorkloadFacts(metric_name="gap", higher_is_better=False, target=0.7),
            ("gap", False, 50),
        ),
        ("digits-mlp", None, ("accuracy", True, 10)),
    ],
)
def test_records_tell_what_a_workload_measures(
    workload: str,
    facts: WorkloadFacts | None,
    expected: tuple[str, bool, int | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Old ones of what is built in by its name; nothing that they name is executed."""
    monkeypatch.chdir(tmp_path)
    first, *others = story_of(spec_of("D_ring"), lambda step: 1.2 - step / 100).records
    assert isinstance(first, Started)
    spec = first.spec | {"workload": workload, "topology": EVIL}
    changed = first.model_copy(update={"spec": spec, "workload_facts": facts})
    write(tmp_path / "x", [Story(first.run_id, [changed, *others])])
    result = CliRunner().invoke(app, ["bench", "report", "x"])
    assert result.exit_code == 0, result.output
    run = Reader(tmp_path / "x").read().analysis.runs.row(0, named=True)
    assert (run["metric"], run["higher_is_better"], run["target_step"]) == expected
    assert run["connections"] == 2
    assert not (tmp_path / "pwned").exists()
