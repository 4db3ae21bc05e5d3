"""The page on architecture names what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_imports import EDGES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "architecture.md").read_text()
LINKS = re.findall(r"\[`([\w.]+)`\]\((\.\./src/[^)]+)\)", PAGE)


def defined_in(path: Path) -> set[str]:
    """Return all classes and functions of a module, methods after the name of their class."""
    names: set[str] = {path.stem}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def is_there(name: str, link: str) -> bool:
    """Return whether what a link is called is defined in the file that it leads to."""
    return name in defined_in((DOCS / link).resolve())


@pytest.mark.parametrize(("name", "link"), LINKS, ids=[name for name, _ in LINKS])
def test_what_is_linked_is_there(name: str, link: str) -> None:
    """Every class and function that a walk names is defined in the file that it links to."""
    assert is_there(name, link)


def test_what_is_not_there_is_noticed() -> None:
    """The check above can fail."""
    assert not is_there("Step._gone", "../src/gossamer/gossip/step.py")
    assert len(LINKS) > 30


def test_walks_are_short() -> None:
    """Three walks, each of ten lines at most."""
    walks = [part for part in PAGE.split("\n## ") if re.search(r"^1\. ", part, re.MULTILINE)]
    assert len(walks) == 3
    assert all(len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) <= 10 for walk in walks)


def test_rooms_are_there() -> None:
    """The table of rooms lists packages, each above what it imports."""
    rooms = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert set(rooms) <= EDGES.keys()
    for place, room in enumerate(rooms):
        assert not set(rooms[:place]) & set(EDGES[room].split()), f"{room} imports from above"
