from __future__ import annotations

import polars as pl

from gossamer.bench.report.latex import escape, to_latex


def test_what_latex_reads_as_a_command_is_escaped() -> None:
    """Special characters are escaped, and no newline breaks a row."""
    text = escape("50 % of D_ring\n& {a} #1 $x$ ~ ^ < > \\ −1")
    expected = (
        r"50 \% of D\_ring \& \{a\} \#1 \$x\$ \textasciitilde{} \textasciicircum{} "
        r"\textless{} \textgreater{} \textbackslash{} $-$1"
    )
    assert text == expected


def test_a_table_is_a_tabular_of_booktabs() -> None:
    """Each row has as many cells as columns are declared; bounds follow their value."""
    table = pl.DataFrame(
        {
            "workload": ["digits-mlp"] * 2,
            "method": ["[x]", "D_ring"],
            "workers": [8, 8],
            "final": [0.9, None],
            "final_low": [0.8, None],
            "final_high": [0.95, None],
            "p": [2.5e-07, -2.5e-10],
            "empty": [None, None],
            "note": ["", ""],
        }
    )
    assert to_latex(table).splitlines() == [
        r"% \usepackage{booktabs}",
        "% workload: digits-mlp",
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"method & workers & final & p \\",
        r"\midrule",
        r"{}[x] & 8 & 0.9 [0.8, 0.95] & 2.5$\cdot 10^{-7}$ \\",
        r"D\_ring & 8 & -- & $-$2.5$\cdot 10^{-10}$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
