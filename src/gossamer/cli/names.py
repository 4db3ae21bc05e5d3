"""Valid names and existing files, for help and for shell completion.

Tables are parsed from their source: importing them would load torch or scipy, which is too slow for
completion.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

from gossamer.errors import UserError

TABLES = {
    "topologies": ("topology/catalogue.py", "CATALOGUE"),
    "workloads": ("workloads/__init__.py", "WORKLOADS"),
    "data sets": ("workloads/sources.py", "DATA_SETS"),
    "GPUs": ("runtime_model/presets.py", "GPUS"),
    "links": ("runtime_model/presets.py", "LINKS"),
}
"""Where each table is: a file of the package, and the name of a dict in it."""


def names(table: str) -> list[str]:
    """Return the names in a table.

    >>> names("links")[:2]
    ['1gbit', '10gbit']
    """
    file, variable = TABLES[table]
    for statement in ast.parse((resources.files("gossamer") / file).read_text()).body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(keys=keys)):
                if name == variable:
                    return [ast.literal_eval(key) for key in keys if key is not None]
            case _:
                pass
    raise LookupError(f"{file} has no table {variable}")


def complete(table: str) -> Callable[[str], list[str]]:
    """Return a completion function for the names of a table."""

    def completed(incomplete: str) -> list[str]:
        return [name for name in names(table) if name.startswith(incomplete)]

    return completed


def with_endings(**paths: Path | None) -> list[Path]:
    """Return the given paths, after a check that each has the suffix of its option."""
    for kind, path in paths.items():
        if path is not None and path.suffix.lower() != f".{kind}":
            raise UserError(f"--{kind} writes a .{kind} file, got {path.name!r}; change its suffix")
    return [path for path in paths.values() if path is not None]


def complete_experiment(incomplete: str) -> list[str]:
    """Return the experiments that complete a path, here and one folder down."""
    return [str(path) for path in _below(incomplete, ".toml") if _is_experiment(path)]


def complete_results(incomplete: str) -> list[str]:
    """Return the folders of records that complete a path."""
    return [str(path.parent) for path in _below(incomplete, "/experiment.toml")]


def _below(incomplete: str, ending: str) -> Iterator[Path]:
    pattern = re.sub(r"([*?[])", r"[\1]", incomplete)
    folder = Path("/") if incomplete.startswith("/") else Path()
    for middle in ("*", "*/*"):
        yield from sorted(folder.glob(f"{pattern.lstrip('/')}{middle}{ending}"))


def _is_experiment(path: Path) -> bool:
    try:
        return bool(re.search(r"^workload\s*=", path.read_text(), re.MULTILINE))
    except (OSError, UnicodeDecodeError):
        return False
