"""Files and modules that users bring: how they are found, loaded, told apart and refused."""

from __future__ import annotations

import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gossamer.bench import expand, load
from gossamer.engine import RunSpec
from gossamer.errors import UserError
from gossamer.registry import plugins
from gossamer.topology import parse

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True, slots=True)
class Point:
    x: int = 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("mine", "own_package"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_file_is_loaded_once_and_its_classes_are_whole(folder: Path) -> None:
    """Dataclasses and pickle find their module; however the path is written, it is one class."""
    (folder / "points.py").write_text(SOURCE)
    (folder / "sub").mkdir()
    point = plugins.load("points.py:Point").part
    assert plugins.load("sub/../points.py:Point").part is point
    assert plugins.load(f"{folder}/points.py:Point").part is point
    assert pickle.loads(pickle.dumps(point(3))) == point(3)
    assert point.__module__ in sys.modules


def test_two_files_of_one_name_are_two_modules(folder: Path) -> None:
    """A file is known by its path."""
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "points.py").write_text(f"{SOURCE}\nNAME = {name!r}")
    assert [plugins.load(f"{name}/points.py:NAME").part for name in "ab"] == ["a", "b"]


def test_the_digest_is_of_the_source_and_not_of_its_place(folder: Path) -> None:
    """Files that are the same byte for byte have one digest; a changed byte is another."""
    for name, text in {"a": SOURCE, "b": SOURCE, "c": f"{SOURCE}#"}.items():
        (folder / f"{name}.py").write_text(text)
    a, b, c = (plugins.load(f"{name}.py:Point").digest for name in "abc")
    assert a == b != c
    (folder / "a.py").write_text("other = 1")
    assert plugins.load("a.py:Point").digest == a  # of what was executed


def test_threads_load_a_file_once(folder: Path) -> None:
    """Ranks can be threads, and all of them start with this."""
    (folder / "slow.py").write_text("import time\ntime.sleep(0.2)\nclass Part: ...")
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(plugins.load("slow.py:Part").part))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_module_of_the_current_folder_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is not searched, as in a console script; what is installed comes first."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (folder / "mine.py").write_text(SOURCE)
    (folder / "json.py").write_text(SOURCE)
    assert plugins.load("mine:Point").label == "mine:Point"
    with pytest.raises(UserError, match="a name of its module, got json:Point"):
        plugins.load("json:Point")


def test_the_digest_of_a_module_has_the_file_where_a_part_is_written(folder: Path) -> None:
    """A package that offers it from elsewhere is another one when that file changes."""
    package = folder / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("from own_package.points import Point")

    def digest(source: str) -> str:
        (package / "points.py").write_text(source)
        for name in [name for name in sys.modules if name.startswith("own_package")]:
            del sys.modules[name]
        plugins._digests.clear()
        return plugins.load("own_package:Point").digest

    assert digest(SOURCE) != digest(SOURCE.replace("x: int = 1", "x: int = 20"))


def test_a_module_that_is_installed_has_the_version_of_its_distribution() -> None:
    """So that a change in another file of it makes another digest."""
    plugin = plugins.load("numpy.linalg:norm")
    assert plugin.version.startswith("numpy 2")
    assert plugin.source == f"{plugin.digest} ({plugin.version})"


@pytest.mark.parametrize(
    ("name", "words", "cause"),
    [
        ("no.py:x", "a file that can be read, got no.py: No such file .*; correct its", OSError),
        ("text.txt/x:x", "a file that can be read, got text.txt/x: Not a directory", OSError),
        ("./text.txt:x", "a file that ends with .py, got ./text.txt; rename it", None),
        ("syntax.py:x", r"syntax.py must be imported .* SyntaxError: .*line 2\); c", SyntaxError),
        ("raises.py:x", "division by zero .raises.py, line 1.; correct it", ArithmeticError),
        ("exits.py:x", "got SystemExit: 3 .exits.py, line 1.; correct it", SystemExit),
        ("lacks.py:x", "No module named 'no_such_thing' .lacks.py, line 1.; c", ImportError),
        ("lacks:x", "lacks must be imported without an error, got ModuleNotFound", ImportError),
        ("no_such_module.a:x", "installed or be in .*, got 'no_such_module.a'", ImportError),
        ("json.nothing:x", "of which there is no 'json.nothing'; install it", ImportError),
        ("a..b:x", r"package.module:name or path/file.py:name, got 'a..b' before", None),
        ("json:dmups", r"got json:dmups \(did you mean 'dumps'\?\); choose from dump, dumps", None),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_says_why(
    folder: Path, name: str, words: str, cause: type[BaseException] | None
) -> None:
    """In three parts, in one line; what its code raised is chained, for its author."""
    for file, text in {
        "text.txt": "",
        "syntax.py": "x = 1\nx = = 2",
        "raises.py": "x = 1 / 0",
        "exits.py": "raise SystemExit(3)",
        "lacks.py": "import no_such_thing",
    }.items():
        (folder / file).write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        plugins.load(name)
    assert "\n" not in str(caught.value)
    if cause:
        assert isinstance(caught.value.__cause__, cause)


def test_a_plug_in_that_is_a_word_counts_too(tmp_path: Path) -> None:
    """A part may look up what it is given as a string: its source is in the id, its path is not."""
    ids: list[str] = []
    for folder, body in (("a", "ring"), ("b", "ring"), ("c", "complete")):
        place = tmp_path / folder
        place.mkdir()
        (place / "inner.py").write_text(
            f"from gossamer.topology import {body}\n\ndef g(n: int):\n    return {body}(n)\n"
        )
        (place / "outer.py").write_text(
            "from gossamer.topology import parse\n\n"
            "def g(n: int, inner: str):\n    return parse(inner, n)\n"
        )
        topology = f"{place}/outer.py:g(inner={place}/inner.py:g)"
        ids.append(RunSpec(workload="quadratic", workers=4, topology=topology).id)
    moved, changed = ids[1], ids[2]
    assert moved == ids[0]
    assert changed != ids[0]


def test_an_annotation_for_type_checkers_alone_hides_no_other(tmp_path: Path) -> None:
    """Arguments are converted by the annotations that can be resolved."""
    (tmp_path / "checked.py").write_text(
        "from __future__ import annotations\n\nfrom typing import TYPE_CHECKING\n\n"
        "from gossamer.topology import lattice\n\nif TYPE_CHECKING:\n"
        "    from gossamer.topology import Round\n\n\n"
        'def g(n: "number of workers", k: int = 2) -> Round:\n    return lattice(n, k)\n'
    )
    assert parse(f"{tmp_path}/checked.py:g(k=4)", 8).round(0).degree == 4
    with pytest.raises(UserError, match=r"needs an integer for k, got 1\.5"):
        parse(f"{tmp_path}/checked.py:g(k=1.5)", 8)


def test_a_method_leaves_the_experiment_what_it_compares(tmp_path: Path) -> None:
    """A method that sets the number of workers, or an axis, would list other runs than it makes."""
    (tmp_path / "methods.py").write_text(
        "def more(workers, epochs, /):\n    return {'topology': 'ring', 'workers': 8}\n\n\n"
        "def faster(workers, epochs, /):\n    return {'topology': 'ring', 'lr': 0.5}\n"
    )
    text = 'name = "x"\nworkload = "quadratic"\nworkers = 4\naxes = { lr = [0.1, 0.2] }\n'
    for method, field in (("more", "workers"), ("faster", "lr")):
        file = tmp_path / "x.toml"
        file.write_text(f'{text}methods = "methods.py:{method}"\n')
        with pytest.raises(UserError, match=f"that the experiment varies, got '{field}' from"):
            expand(load(file))
