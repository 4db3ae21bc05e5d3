"""Parts from outside of the package: experiments on them in both engines, and their ids."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from gossamer.bench import Store, expand
from gossamer.bench.experiment import load, parse
from gossamer.engine import RunSpec
from gossamer.errors import UserError
from gossamer.records import Started

pytestmark = pytest.mark.timeout(240)

Gossamer: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]

GRAPH = '''"""Graphs."""

from gossamer.topology import Round, lattice, ring


def chords(num_workers: int, k: int = 2) -> Round:
    """A lattice by another name."""
    return lattice(num_workers, k) if num_workers > 2 else ring(num_workers)
'''

PARTS = '''"""Everything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gossamer import workloads
from gossamer.consensus import Constant


class Signs(torch.optim.SGD):
    """Steps of one length."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0) -> None:
        super().__init__(params, lr=lr, momentum=momentum)


def bowl(curvature: float = 1.0) -> workloads.Workload:
    """The quadratic, scaled."""
    usual = workloads.find("quadratic")
    return replace(usual, name="bowl", loss=lambda x, y: curvature * usual.loss(x, y))


def striped(offset: int = 0):
    """Every worker has each n-th sample."""

    def deal(draw, workers, epoch):
        return [np.arange((w + offset) % draw.num_workers, draw.num_samples, draw.num_workers)
                for w in workers]

    return deal


def steady(workers: int, epochs: int, /, c: float = 0.25) -> dict[str, Any]:
    """A ring that is held."""
    return {"topology": "ring", "order": "atc", "control": f"constant(c={c})"}


def near(share: float) -> Constant:
    """A target."""
    return Constant(c=share)
'''

ENTRY_POINTS = """
[gossamer.topologies]
own_chords = own_parts.graphs:chords

[gossamer.workloads]
own-bowl = own_parts:bowl

[gossamer.optimizers]
own_signs = own_parts:Signs

[gossamer.shardings]
own_striped = own_parts:striped

[gossamer.methods]
OwnSteady = own_parts:steady
"""

EXPERIMENT = """
name = "outside"
workload = "own-bowl(curvature=0.5)"
workers = 2
engine = ["simulated", "distributed"]
methods = [
  "OwnSteady(c=0.5)",
  { name = "own", method = "D_own_chords(k=2)", optimizer = "own_signs(momentum=0.5)" },
  "own_parts.graphs:method",
]
run = { epochs = 1, steps_per_epoch = 4, sharding = "own_striped(offset=1)", log_every = 2 }
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder of packages: one with parts of every kind, registered as if it were installed."""
    site = tmp_path / "site"
    own = site / "own_parts"
    own.mkdir(parents=True)
    method = '''

def method(workers: int, epochs: int, /) -> dict[str, object]:
    """By its module."""
    return {"topology": "own_parts.graphs:chords", "order": "atc"}
'''
    (own / "__init__.py").write_text(PARTS)
    (own / "graphs.py").write_text(GRAPH + method)
    info = site / "own_parts-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return site


@pytest.fixture
def gossamer(package: Path, tmp_path: Path) -> Gossamer:
    """Runs the command line as someone who has installed the package, from an empty folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    program = "from gossamer.cli import main; main()"  # as a console script: nothing in sys.path

    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        places = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        result = subprocess.run(
            [sys.executable, "-P", "-c", program, *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(places), "COLUMNS": "200"},
            cwd=elsewhere,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == code, result.stderr[-3000:]
        return result

    return run


def ids_of(gossamer: Gossamer, file: Path) -> list[str]:
    lines = gossamer("bench", "expand", str(file), "--no-estimate", "--json").stdout.splitlines()
    return [json.loads(line)["id"] for line in lines]


def test_an_experiment_on_a_package_outside_of_the_tree(
    gossamer: Gossamer, package: Path, tmp_path: Path
) -> None:
    """Its parts train in both engines; another source or version is another run."""
    file, out = tmp_path / "outside.toml", tmp_path / "results"
    file.write_text(EXPERIMENT)
    gossamer("bench", "run", str(file), "--out", str(out))
    ids = ids_of(gossamer, file)
    store = Store(out)
    assert sorted(store.run_ids()) == sorted(ids)
    ended = [store.ended(run_id) for run_id in ids]
    assert [end.status for end in ended if end] == ["done"] * 6
    started = store.read(ids[2]).records[0]
    assert isinstance(started, Started)
    assert started.spec["optimizer_options"] == {"momentum": 0.5}
    sources = {key: text for key, text in started.environment.items() if "plug-in" in key}
    assert set(sources) == {
        f"plug-in {name}" for name in ("own-bowl", "own_chords", "own_signs", "own_striped")
    }
    assert all("own-parts 1.5" in text for text in sources.values())
    assert "own-bowl(curvature=0.5)" in gossamer("bench", "report", str(out)).stdout

    graphs = package / "own_parts" / "graphs.py"
    graphs.write_text(graphs.read_text() + "# changed\n")
    after = ids_of(gossamer, file)
    assert [old == new for old, new in zip(ids, after, strict=True)] == [True] * 2 + [False] * 4
    info = package / "own_parts-1.5.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("1.5", "1.6"))
    assert not set(after) & set(ids_of(gossamer, file))
    # What is in the folder is told without loading what it was made with.
    assert "6 done" in gossamer("bench", "status", str(out)).stdout


def test_ranks_take_the_package_that_the_command_took(gossamer: Gossamer, tmp_path: Path) -> None:
    """The installed one, also where the current folder has another of its name."""
    other = tmp_path / "elsewhere" / "own_parts"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    file, out = tmp_path / "ranks.toml", tmp_path / "results"
    file.write_text(
        'name = "ranks"\nworkload = "quadratic"\nworkers = 2\nengine = "distributed"\n'
        'methods = "D_own_parts.graphs:chords"\nrun = { epochs = 1, steps_per_epoch = 2 }\n'
    )
    gossamer("bench", "run", str(file), "--out", str(out))
    assert "1 done" in gossamer("bench", "status", str(out)).stdout


def test_a_name_that_is_registered_is_listed_and_built_in_names_win(
    gossamer: Gossamer, package: Path
) -> None:
    """A misspelt one is hinted at; one that is built in stays what it was."""
    points = package / "own_parts-1.5.dist-info" / "entry_points.txt"
    points.write_text(ENTRY_POINTS.replace("own_chords", "ring = nowhere:nothing\nown_chords"))
    said = gossamer("topology", "own_chrods", code=2).stderr
    assert "unknown topology 'own_chrods' (did you mean 'own_chords'?); choose from ring" in said
    assert said.count("\n") == 1
    shown = gossamer("topology", "own_chords(k=2)", "-n", "8").stdout
    assert "A lattice by another name." in shown
    gossamer("topology", "ring")


FILE = """
name = "files"
workload = "quadratic"
workers = 4
methods = [
  "D_parts/graphs.py:chords(k=2)",
  { name = "own", method = "ring", topology = "parts/graphs.py:chords" },
]
run = { epochs = 1, steps_per_epoch = 2 }

[[exclude]]
topology = "parts/graphs.py:chords(k=4)"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an experiment, and plug-ins in a folder below it."""
    place = tmp_path / "my work (new)"
    (place / "parts").mkdir(parents=True)
    (place / "parts" / "graphs.py").write_text(GRAPH)
    (place / "parts" / "own.py").write_text(PARTS)
    (place / "files.toml").write_text(FILE.partition("[[exclude]]")[0])
    return place


def test_a_file_lies_beside_the_experiment(
    gossamer: Gossamer, folder: Path, tmp_path: Path
) -> None:
    """From wherever it is run; its folder may move, and its runs are still those."""
    out = tmp_path / "results"
    gossamer("bench", "run", str(folder / "files.toml"), "--out", str(out))
    assert "2 done" in gossamer("bench", "status", str(out)).stdout
    moved = folder.rename(tmp_path / "moved")
    assert (
        "2 of them done before"
        in gossamer("bench", "run", str(moved / "files.toml"), "--out", str(out)).stderr
    )
    assert "D_parts/graphs.py:chords(k=2)" in gossamer("bench", "report", str(out)).stdout


def test_a_workload_in_a_file_has_a_short_name(
    gossamer: Gossamer, folder: Path, tmp_path: Path
) -> None:
    """In what a run prints, in its report, and in names of figures."""
    text = (folder / "files.toml").read_text().replace('"quadratic"', '"parts/own.py:bowl(2.0)"')
    (folder / "files.toml").write_text(text)
    out = tmp_path / "results"
    said = gossamer("bench", "run", str(folder / "files.toml"), "--out", str(out)).stderr
    assert "own.py:bowl(2.0) own, 4 workers, seed 0: done" in said
    moved = folder.rename(tmp_path / "moved")
    gossamer("bench", "run", str(moved / "files.toml"), "--out", str(out))
    report = gossamer("bench", "report", str(out)).stdout
    assert "own.py:bowl(2.0)" in report
    assert str(tmp_path) not in report


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("chords(k=2)", "chrods"), "(did you mean 'chords'?); choose from chords"),
        (("D_parts", "D_part"), "No such file or directory; correct its path"),
        (
            ('"D_parts', '"parts'),
            "method must be a dict, got graphs.py:chords, .* a Round; .*write D_",
        ),
        (("(k=2)", "(k=2.5)"), "graphs.py:chords needs an integer for k, got 2.5"),
        (("k=2)", "k=3)"), "lattice needs an even k"),
        (
            ('"D_parts/graphs.py:chords', '"D_parts/own.py:Signs'),
            "topology must be .* makes a Signs",
        ),
        (
            ('"quadratic"', '"parts/own.py:steady"'),
            "must be a Workload, got own.py:steady, which makes a dict",
        ),
        (
            ('"quadratic"', '"parts/own.py:striped"'),
            "a workload must be a Workload, got a function",
        ),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(
    folder: Path, change: tuple[str, str], words: str
) -> None:
    """In the words of the part that is wrong, and without the folders above it."""
    text = (folder / "files.toml").read_text().replace(*change)
    with pytest.raises(
        UserError, match=words.translate(str.maketrans({"(": r"\(", ")": r"\)", "?": r"\?"}))
    ):
        expand(parse(text, "files.toml", folder))


def test_excludes_are_of_plug_ins_too(folder: Path) -> None:
    """A path in [[exclude]] starts where the others do."""
    (folder / "files.toml").write_text(FILE.replace("(k=4)", ""))
    assert [spec.method for spec in expand(load(folder / "files.toml")).runs] == [
        "D_parts/graphs.py:chords(k=2)"
    ]


# - Ids

PINNED: dict[str, dict[str, Any]] = {
    "428ccd6ac59243f6": {"workload": "digits-mlp", "workers": 4},
    "9391d09b754f3e78": {
        "workload": "quadratic",
        "workers": 8,
        "topology": "lattice( 4 )",
        "order": "atc",
        "control": "repeat(phases(constant(c=0.25), plain), q_max=16)",
    },
    "033e04788a979700": {
        "workload": "digits-cnn",
        "workers": 4,
        "topology": "centralized",
        "optimizer": "adamw",
        "optimizer_options": {"betas": [0.9, 0.95], "weight_decay": 0.1},
        "sharding": "dirichlet(alpha=0.5)",
    },
    "21ccb62d9d9b9dc1": {
        "workload": "cifar10-resnet20",
        "workers": 16,
        "topology": "complete",
        "every": 16,
        "order": "atc",
        "outer_lr": 0.7,
        "seed": 3,
        "engine": "distributed",
        "max_bytes": 2e6,
    },
    "b39bc3164a6cb60f": {
        "workload": "stdlib-gpt",
        "workers": 2,
        "topology": "ada(k0=4, gamma=1)",
        "lr_schedule": "steps",
        "lr_scaling": "sqrt",
        "dtype": "float64",
        "sharding": "fixed",
    },
}


@pytest.mark.parametrize("run_id", PINNED)
def test_ids_of_runs_without_plug_ins_stay(run_id: str) -> None:
    """Records of before there were plug-ins are still found."""
    assert RunSpec.model_validate(PINNED[run_id]).id == run_id


def test_methods_name_the_runs_that_they_named() -> None:
    """Strings of methods become the same fields, to the letter, as before."""
    text = """
name = "pins"
workload = "digits-mlp"
workers = 16
methods = [" lattice( 4 ) ", "Ada(k0=8, gamma=1)", "local_sgd(every=4)", "DiLoCo(every=5, lr=1)"]
"""
    assert [spec.id for spec in expand(parse(text, "pins")).runs] == [
        "59d0cfe716713a75",
        "864e4fb373f69b62",
        "6d8da8f657527cac",
        "1aa104dccada8034",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"topology": "parts/graphs.py:chords(k=2)"},
        {"workload": "parts/own.py:bowl"},
        {"optimizer": "parts/own.py:Signs"},
        {"sharding": "parts/own.py:striped"},
        {"control": "repeat(phases(parts/own.py:near(share=0.5), plain))"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_id_has_the_source_of_a_plug_in_and_not_its_place(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str]
) -> None:
    """A copy elsewhere is the same run; a changed one is another; nested ones count."""

    def spec_in(place: Path) -> RunSpec:
        monkeypatch.chdir(place)
        usual: dict[str, Any] = {"workload": "quadratic", "workers": 4, "order": "atc"}
        return RunSpec.model_validate({**usual, **fields})

    here, copy = spec_in(folder), spec_in(shutil.copytree(folder, tmp_path / "copy"))
    changed = shutil.copytree(folder, tmp_path / "changed")
    for path in changed.glob("parts/*.py"):
        path.write_text(path.read_text() + "#")
    assert here.id == copy.id != spec_in(changed).id
    assert str(folder) in here.model_dump_json()  # every process finds it
    assert RunSpec.model_validate_json(here.model_dump_json()) == here
    (source,) = here.sources.items()
    assert source == (
        f"plug-in {next(iter(fields.values())).split('/')[-1].split('(')[0]}",
        source[1],
    )


def test_arguments_of_an_optimizer_stand_in_its_name_or_in_its_options() -> None:
    """Both ways are one run; a setting in both is refused."""
    usual: dict[str, Any] = {"workload": "digits-mlp", "workers": 4}
    named = RunSpec(**usual, optimizer="sgd(momentum=0.5)")
    assert named == RunSpec(**usual, optimizer="sgd", optimizer_options={"momentum": 0.5})
    both = RunSpec(**usual, optimizer="sgd(momentum=0.5)", optimizer_options={"nesterov": True})
    assert both.optimizer_options == {"momentum": 0.5, "nesterov": True}
    betas = RunSpec(**usual, optimizer="adamw(betas=(0.9, 0.95))")
    assert betas.optimizer_options == {"betas": (0.9, 0.95)}
    with pytest.raises(ValueError, match="in one place, got momentum in optimizer 'sgd"):
        RunSpec(**usual, optimizer="sgd(momentum=1)", optimizer_options={"momentum": 0.5})
    with pytest.raises(ValueError, match=r"sgd takes momentum, .* got 'lr'"):
        RunSpec(**usual, optimizer="sgd(lr=0.1)")
