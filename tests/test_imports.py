"""Who may import whom: a table of edges, which the source uses all of and no others."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gossamer"

# For each package or module of gossamer, the others that it imports, at any depth of its code.
# What must never be is said below, in NEVER.
EDGES: dict[str, str] = {
    "__main__": "cli",
    "algorithms": "errors registry topology",
    "bench": "algorithms charts consensus engine errors extras files lifeline memory picture rates "
    "records registry runtime_model topology wire workloads",
    "charts": "errors extras files",
    "cli": "bench charts engine errors extras gossamer lab launch picture rates records registry "
    "runtime_model topology workloads",
    "consensus": "algorithms errors registry topology",
    "engine": "algorithms consensus errors gossip lifeline optim records registry seeds simulate "
    "topology wire workloads",
    "errors": "",
    "extras": "errors",
    "files": "errors",
    "fork_server": "lifeline",
    "frameworks": "errors extras gossip",
    "gossip": "algorithms consensus errors files launched nonfinite normalization optim seeds "
    "topology wire",
    "lab": "errors rates",
    "launch": "errors launched lifeline",
    "launched": "",
    "lifeline": "",
    "memory": "",
    "nonfinite": "errors topology",
    "normalization": "errors",
    "optim": "errors",
    "picture": "charts errors topology",
    "rates": "errors",
    "records": "errors",
    "registry": "errors",
    "runtime_model": "algorithms charts engine errors files gossip optim rates topology wire",
    "seeds": "",
    "simulate": "algorithms consensus errors memory nonfinite normalization optim seeds topology "
    "wire",
    "topology": "errors registry",
    "wire": "algorithms errors registry topology",
    "workloads": "errors extras files registry",
}

_ABOVE = "engine runtime_model lab bench cli frameworks"

# What a package must not reach, through whatever it imports. A row of EDGES may change; these stay.
NEVER: dict[str, str] = {
    "topology": f"algorithms consensus optim gossip simulate workloads charts picture {_ABOVE}",
    "algorithms": f"consensus optim gossip simulate workloads {_ABOVE}",
    "consensus": f"gossip simulate workloads {_ABOVE}",
    "optim": f"topology consensus gossip simulate workloads {_ABOVE}",
    "gossip": f"simulate workloads {_ABOVE}",
    "simulate": f"gossip workloads {_ABOVE}",
    "wire": f"consensus optim gossip simulate workloads {_ABOVE}",
    "workloads": f"topology consensus optim gossip simulate {_ABOVE}",
    "engine": "runtime_model lab bench cli frameworks",
    "frameworks": "simulate workloads engine runtime_model lab bench cli",
    "lab": "gossip simulate engine runtime_model bench cli frameworks",
    "bench": "lab cli frameworks",
    "runtime_model": "lab bench cli frameworks",
}

MAY_BE_FOREIGN = {"topology": {"networkx", "numpy", "scipy"}}
TERMINAL = {"rich", "typer"}


class Import(NamedTuple):
    """One name that a file of a package imports."""

    package: str
    file: Path
    name: str

    @property
    def edge(self) -> str:
        """The package or module of gossamer that the name is in; of other libraries nothing.

        ``import gossamer`` by itself is an edge of that name: its face leads everywhere.
        """
        first, _, rest = self.name.partition(".")
        return (rest.split(".")[0] or "gossamer") if first == "gossamer" else ""


def imports_of(source: Path) -> Iterator[Import]:
    """Yield what all files import, at any depth of their code; of gossamer's own face nothing."""
    for path in sorted(source.rglob("*.py")):
        file = path.relative_to(source)
        package = file.parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (Import(package, file, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: imports are absolute"
                yield from (Import(package, file, f"{node.module}.{a.name}") for a in node.names)


def wrong_edges(source: Path, table: dict[str, str]) -> list[str]:
    """Return what a source imports and its table does not allow, and what only the table has."""
    found = {(i.package, i.edge): i for i in imports_of(source) if i.edge not in ("", i.package)}
    allowed = {(package, edge) for package in table for edge in table[package].split()}
    packages = {file.relative_to(source).parts[0] for file in source.rglob("*.py")}
    own = {package.removesuffix(".py") for package in packages} - {"__init__"}
    return [
        *(f"{i.file} must not import {i.name}" for edge, i in found.items() if edge not in allowed),
        *(f"nothing in {a} imports {b}: remove it from EDGES" for a, b in allowed - found.keys()),
        *(f"{package} must have a row in EDGES" for package in own - table.keys()),
        *(f"{package} has a row in EDGES and is not there" for package in table.keys() - own),
    ]


def reached_from(package: str, table: dict[str, str]) -> set[str]:
    """Return all that a package imports, and what that imports."""
    reached: set[str] = set()
    waiting = table[package].split()
    while waiting:
        edge = waiting.pop()
        if edge not in reached:
            reached.add(edge)
            waiting += table.get(edge, "").split()
    return reached


def test_the_source_has_the_edges_of_the_table_and_no_others() -> None:
    """An import that the table does not allow fails, and so does one that it allows in vain."""
    assert wrong_edges(SOURCE, EDGES) == []


@pytest.mark.parametrize("package", EDGES)
def test_nothing_imports_itself_in_a_circle(package: str) -> None:
    """Imports flow downwards: what a package reaches does not reach the package."""
    assert package not in reached_from(package, EDGES)


@pytest.mark.parametrize("package", NEVER)
def test_what_must_not_be_known_is_not_reached(package: str) -> None:
    """Neither engine knows the other, workloads know no distribution, topology knows nobody."""
    assert reached_from(package, EDGES) & {*NEVER[package].split()} == set()
    assert {*NEVER[package].split()} <= EDGES.keys()  # else a renamed package would be free


@pytest.mark.parametrize("package", MAY_BE_FOREIGN)
def test_pure_packages_stay_pure(package: str) -> None:
    """Topology is arrays and graphs: no torch, nothing that prints, draws or communicates."""
    names = {i.name.split(".")[0] for i in imports_of(SOURCE) if i.package == package}
    assert names - sys.stdlib_module_names - {"gossamer"} <= MAY_BE_FOREIGN[package]


def test_only_the_command_line_writes_on_a_terminal() -> None:
    """Libraries report to a listener or a log; the lab passes on what a user's command prints."""
    users = {i.package for i in imports_of(SOURCE) if i.name.split(".")[0] in TERMINAL}
    printing = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "print"
    }
    assert users == {"cli"}
    assert {file for file in printing if not file.startswith("cli/")} == {"lab/cluster.py"}


# - The test itself


def write_source(folder: Path, **files: str) -> None:
    """Write a package `gossip` that imports errors, and files of it besides."""
    (folder / "gossip").mkdir()
    (folder / "__init__.py").write_text("from gossamer.gossip import face")
    (folder / "errors.py").write_text("")
    for name, text in {"face": "from gossamer.errors import UserError", **files}.items():
        (folder / "gossip" / f"{name}.py").write_text(text)


MADE_UP = {"errors": "", "gossip": "errors"}


def test_a_source_as_the_table_says_is_right(tmp_path: Path) -> None:
    """Other libraries and the package's own modules need no row."""
    write_source(tmp_path, own="import torch\nfrom gossamer.gossip.face import UserError")
    assert wrong_edges(tmp_path, MADE_UP) == []


@pytest.mark.parametrize(
    "text",
    [
        "from gossamer.simulate import Simulation",
        "from gossamer import simulate",
        "import gossamer.simulate.kernels",
        "import gossamer",
        "from gossamer import Simulation",
        "def late():\n    from gossamer.simulate import Simulation",
        "if TYPE_CHECKING:\n    from gossamer.simulate import Simulation",
    ],
)
def test_a_forbidden_import_is_found(text: str, tmp_path: Path) -> None:
    """However it is written, and wherever it stands; the file is named."""
    write_source(tmp_path, other=text)
    (wrong,) = wrong_edges(tmp_path, MADE_UP)
    assert wrong.startswith("gossip/other.py must not import gossamer")


def test_a_row_that_is_not_needed_or_not_there_is_found(tmp_path: Path) -> None:
    """The table says what is: no edge in vain, no package without a row, no row without one."""
    write_source(tmp_path)
    assert wrong_edges(tmp_path, {"errors": "gossip", "simulate": ""}) == [
        "gossip/face.py must not import gossamer.errors.UserError",
        "nothing in errors imports gossip: remove it from EDGES",
        "gossip must have a row in EDGES",
        "simulate has a row in EDGES and is not there",
    ]


def test_a_detour_is_found() -> None:
    """What is imported by what is imported counts, also in a circle."""
    table = {"gossip": "memory", "memory": "seeds", "seeds": "simulate memory", "simulate": ""}
    assert "simulate" in reached_from("gossip", table)
    assert "memory" in reached_from("memory", table)
