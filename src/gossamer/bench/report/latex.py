r"""Tables as LaTeX for a paper: ``\input`` the file, with ``\usepackage{booktabs}``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import polars as pl

from gossamer.bench.report.words import number

_SPECIAL = {
    "\\": r"\textbackslash{}",
    **{character: "\\" + character for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': "''",
    # Characters that fonts of pdflatex may lack.
    "−": r"$-$",
    "–": "--",
    "ρ": r"$\rho$",
    "Ξ": r"$\Xi$",
}

_NAMES = (pl.String, pl.Boolean)
_SHARED = ("workload", "metric")
_POWER = re.compile(r"e(\$-\$|[+-])0*(\d+)")


def escape(text: str) -> str:
    r"""Return a string as LaTeX prints it.

    >>> escape("D_ring, 50 %")
    'D\\_ring, 50 \\%'
    """
    # A newline would end the row, and an empty line the table.
    return "".join(_SPECIAL.get(character, character) for character in " ".join(text.split()))


def to_latex(table: pl.DataFrame) -> str:
    """Return a table as ``tabular`` with the rules of booktabs.

    An interval follows its value. A workload or a metric that all rows share becomes a comment
    instead of a column, and a column without values is left out.
    """
    columns = [name for name in table.columns if _has_values(table[name])]
    shared = [name for name in columns if name in _SHARED and table[name].n_unique() == 1]
    columns = [name for name in columns if name not in shared and not _is_bound(name, columns)]
    kinds = "".join("l" if isinstance(table[name].dtype, _NAMES) else "r" for name in columns)
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            *(f"% {name}: {escape(table[name][0])}" for name in shared),
            rf"\begin{{tabular}}{{{kinds}}}",
            r"\toprule",
            _line([escape(name.replace("_", " ")) for name in columns]),
            r"\midrule",
            *(_line([_cell(row, name) for name in columns]) for row in table.iter_rows(named=True)),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _has_values(column: pl.Series) -> bool:
    return any(value not in (None, "") for value in column)


def _is_bound(column: str, columns: Sequence[str]) -> bool:
    """Return whether a column is one end of another's interval."""
    value = re.sub("_(low|high)$", "", column)
    return value != column and value in columns


def _line(cells: Sequence[str]) -> str:
    # After \\, LaTeX would read these as its optional argument.
    begin = "{}" if cells[:1] and cells[0].startswith(("[", "*")) else ""
    return f"{begin}{' & '.join(cells)} \\\\"


def _cell(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "--" if value is None else escape(str(value))
    low, high = row.get(f"{column}_low"), row.get(f"{column}_high")
    bounds = "" if low is None or high is None else f" [{number(low)}, {number(high)}]"
    return _POWER.sub(_in_math, escape(f"{number(value)}{bounds}"))


def _in_math(found: re.Match[str]) -> str:
    sign = "" if found[1] == "+" else "-"
    return rf"$\cdot 10^{{{sign}{found[2]}}}$"
