"""The direction of imports: DESIGN's layers, bottom first."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gossamer"

# A module may import from its own layer's package and from the layers before it.
LAYERS = [
    "errors",
    "files",
    "calls",
    "statistics",
    "topology",
    "picture",
    "consensus",
    "optim",
    "gossip",
    "simulate",
    "workloads",
    "records",
    "engine",
    "runtime_model",
    "lab",
    "bench",
    "cli",
    "__main__",
]
MAY_IMPORT = {"topology": {"gossamer", "networkx", "numpy", "scipy"}}


def imports_of(path: Path) -> set[str]:
    """Return every absolute module name that a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_flow_downwards(path: Path) -> None:
    """No module imports from a layer above its own, and every module is in a layer."""
    own = LAYERS.index(layer_of(path))
    for name in imports_of(path):
        if match := re.match(r"gossamer\.(\w+)", name):
            assert match[1] in LAYERS[: own + 1], f"{path.name} imports {name} from above"


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_pure_layers_stay_pure(layer: str) -> None:
    """Topology is arrays and graphs: no torch, nothing that prints, draws or communicates."""
    names = set().union(*(imports_of(path) for path in MODULES if layer_of(path) == layer))
    foreign = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    assert foreign <= MAY_IMPORT[layer]
