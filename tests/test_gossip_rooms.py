"""The modules of gossip/ are all in the table of its docstring, and import downwards only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import gossamer.gossip

FOLDER = Path(gossamer.gossip.__file__).parent


def rooms() -> list[str]:
    """Return the modules of the table, from top to bottom."""
    return re.findall(r"^ {8}(\w+)  ", gossamer.gossip.__doc__ or "", re.MULTILINE)


def imports_of(room: str) -> set[str]:
    """Return the modules of gossip/ that one imports, at any depth of its code."""
    tree = ast.parse((FOLDER / f"{room}.py").read_text())
    names = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {name.split(".")[2] for name in names if name.startswith("gossamer.gossip.")}


def test_the_table_has_every_module() -> None:
    """Every module is in the table once, and every row is a module."""
    there = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert sorted(rooms()) == sorted(there)


def test_imports_only_go_down() -> None:
    """A module imports none above it, so it can be read and changed without them."""
    order = rooms()
    upward = {
        (room, other)
        for place, room in enumerate(order)
        for other in imports_of(room)
        if other not in order[place + 1 :]
    }
    assert not upward
