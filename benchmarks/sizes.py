"""Lengths of modules and functions: `python -m benchmarks.sizes`.

Lines of every module of the package, and of every function and method, docstrings included; the
median, the 90th percentile and the longest of each.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "gossamer"


class Sizes(NamedTuple):
    """Lengths of modules or of functions, in lines."""

    number: int
    median: float
    p90: float
    longest: int
    name: str
    """Of the longest one."""


def measure(lines: dict[str, int]) -> Sizes:
    """Return statistics of lengths that are given by name."""
    ordered = sorted(lines.values())
    p90 = statistics.quantiles(ordered, n=10, method="inclusive")[-1]
    longest = max(lines, key=lines.__getitem__)
    return Sizes(len(ordered), statistics.median(ordered), p90, lines[longest], longest)


def modules(source: Path = SOURCE) -> dict[str, int]:
    """Return the lines of every module."""
    return {
        str(path.relative_to(source)): len(path.read_text().splitlines())
        for path in sorted(source.rglob("*.py"))
    }


def functions(source: Path = SOURCE) -> dict[str, int]:
    """Return the lines of every function and method, nested ones too."""
    return {
        f"{path.relative_to(source)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in sorted(source.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }


def main() -> None:
    """Print a line for modules and one for functions."""
    for kind, lines in (("modules", modules()), ("functions", functions())):
        sizes = measure(lines)
        print(
            f"{kind}: {sizes.number}, median {sizes.median:g} lines, 90 % within {sizes.p90:g}, "
            f"longest {sizes.longest} ({sizes.name})"
        )


if __name__ == "__main__":
    main()
