"""The package: what its wheel holds, what it imports, and what it asks to be installed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gossamer"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

OF_USERS = ("accelerate", "bench", "lightning", "tensorboard", "transformers")
"""Extras that are for users of the package, not for those who measure or build it."""

NEED_EXTRAS = (
    *("gossamer.bench.analysis", "gossamer.bench.report", "gossamer.cli.summary"),
    *(f"gossamer.frameworks.{name}" for name in ("accelerate", "lightning", "transformers")),
)
"""What needs an extra to be imported at all."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    """Every file under src/gossamer is in it, data files included; no tests, no benchmarks."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (path for path in SOURCE.rglob("*") if path.is_file())
    own = {str(p.relative_to(SOURCE.parent)) for p in files if "__pycache__" not in p.parts}
    assert names == own
    assert {"gossamer/py.typed", "gossamer/bench/demo.toml"} <= names


def test_the_wheel_says_what_it_is(built: Path) -> None:
    """Metadata have the license, the README, the versions of Python and the command."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        read = {Path(n).name: archive.read(n).decode() for n in archive.namelist() if "info/" in n}
    assert "License-Expression: Apache-2.0" in read["METADATA"]
    assert "Requires-Python: >=3.11" in read["METADATA"]
    assert (ROOT / "README.md").read_text().splitlines()[0] in read["METADATA"]
    assert "Apache License" in read["LICENSE"]
    assert "gossamer = gossamer.cli:main" in read["entry_points.txt"]


def modules_imported(folders: Iterable[Path]) -> set[str]:
    """Return the first names of all modules that files import, at any depth of their code."""
    names: set[str] = set()
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    return names - sys.stdlib_module_names - {"gossamer", "tests", "benchmarks"}


def declared(*extras: str) -> set[str]:
    """Return the names of distributions that the package, with these extras, asks for."""
    wanted = [*PROJECT["dependencies"], *(r for extra in extras for r in EXTRAS[extra])]
    return {normalized(re.split(r"[\[<>=!~ ;]", requirement)[0]) for requirement in wanted}


def distributions(modules: Iterable[str]) -> set[str]:
    """Return the distributions that modules come from; a module itself where there is none."""
    known = metadata.packages_distributions()
    return {normalized(known.get(module, [module])[0]) for module in modules}


def normalized(name: str) -> str:
    """Return the name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_the_package_imports_is_declared_and_what_is_declared_is_imported() -> None:
    """Dependencies and extras for users are what the source imports, no more and no less."""
    imported = distributions(modules_imported([SOURCE]))
    used_by_others = {
        "kaleido",  # plotly's write_image runs it
        "tensorboard",  # torch.utils.tensorboard imports it
    }
    assert imported | used_by_others == declared(*OF_USERS)


def test_what_the_repository_imports_is_declared() -> None:
    """Tests, benchmarks and examples run with the extras that this repository names."""
    folders = [ROOT / name for name in ("tests", "benchmarks", "examples")]
    assert distributions(modules_imported(folders)) <= declared(*EXTRAS)


def loaded_by(statement: str) -> set[str]:
    """Return the first names of modules that a fresh interpreter has loaded after a statement."""
    program = f"import sys; {statement}; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in result.stdout.splitlines()[-1].split()}


HEAVY = {"jinja2", "networkx", "pandas", "plotly", "polars", "sklearn"}


def test_an_import_waits_for_nothing() -> None:
    """`import gossamer` loads the standard library alone; names load what they need when used."""
    assert not loaded_by("import gossamer") & (HEAVY | {"numpy", "scipy", "torch"})


def test_training_loads_torch_and_little_else() -> None:
    """The functions that train bring nothing that prints, parses or draws."""
    loaded = loaded_by("from gossamer import Checkpoints, Simulation, decentralize")
    assert {"torch", "scipy"} <= loaded
    assert not loaded & (HEAVY | {"pydantic", "rich", "typer"})


def test_the_command_line_does_not_wait_for_torch() -> None:
    """Help and the table of topologies load neither torch nor anything that draws."""
    run = "from gossamer.cli import app; app('topology -n 4'.split(), standalone_mode=False)"
    assert not loaded_by(run) & (HEAVY - {"networkx"} | {"torch"})


def test_without_extras_the_rest_can_be_imported() -> None:
    """Where no extra is installed, all modules are there but analysis, report and frameworks."""
    extras = declared(*OF_USERS) - declared()
    modules = metadata.packages_distributions().items()
    absent = sorted(name for name, owners in modules if {*map(normalized, owners)} & extras)
    paths = [path.relative_to(SOURCE.parent) for path in SOURCE.rglob("*.py")]
    names = sorted(".".join(path.with_suffix("").parts) for path in paths)
    wanted = [name for name in names if not name.startswith(NEED_EXTRAS) and "__main__" not in name]
    program = (
        f"import importlib, sys; sys.modules.update(dict.fromkeys({absent})); "
        f"[importlib.import_module(name) for name in {wanted}]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_extras_the_demo_says_what_to_install(tmp_path: Path) -> None:
    """Before it trains anything, in one line."""
    program = (
        "import sys; sys.modules['polars'] = None; from gossamer.cli import main; "
        f"sys.argv = ['gossamer', 'demo', '--out', {str(tmp_path / 'demo')!r}]; main()"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "pip install 'gossamer[bench]'" in result.stderr.replace("\n", " ")
    assert not (tmp_path / "demo").exists()
