"""A report's summary and verdict for a terminal."""

from __future__ import annotations

from typing import Any

import polars as pl
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gossamer.bench.analysis import Analysis
from gossamer.bench.report import words
from gossamer.bench.report.remarks import remarks


def summary_table(analysis: Analysis) -> Group:
    """Return results by method and scale, the winner of each marked, and the verdict below.

    ``terminal.show(summary_table(analyse(store.stories())))`` prints it.
    """
    lines, findings = words.headlines(analysis), words.findings(analysis)
    notes = remarks(analysis)
    parts: list[Table | Text] = []
    for workload in analysis.all_runs["workload"].unique(maintain_order=True):
        group = analysis.summary.filter(pl.col("workload") == workload)
        if group.is_empty():
            continue
        said = lines.get(str(workload), ["No run is done yet."])
        said += [
            f"{finding.answer.capitalize()}: {finding.claim[:-1].lower()} ({finding.statistic})."
            for finding in findings
            if finding.workload == workload
        ]
        said += notes.get(str(workload), [])
        verdicts = analysis.verdicts.filter(pl.col("workload") == workload)
        parts += [_table(str(workload), group, verdicts), Text("\n".join(said))]
    return Group(*parts)


def _table(workload: str, results: pl.DataFrame, verdicts: pl.DataFrame) -> Table:
    table = Table(title=workload)
    table.add_column("method")
    for heading in ("workers", "runs", f"final {results['metric'][0]}", "sent", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    won = {row["workers"]: row for row in verdicts.iter_rows(named=True)}
    for (workers,), group in results.group_by(["workers"], maintain_order=True):
        verdict = won.get(workers, {"winner": "", "level": None})
        marks = {name: "level" for name in verdict["level"] or []} | {verdict["winner"]: "best"}
        for row in group.iter_rows(named=True):
            mark = marks.get(row["method"], "")
            table.add_row(
                escape(row["method"]),
                str(workers),
                f"{row['runs']} of {row['planned']}",
                _with_interval(row),
                words.megabytes(row["bytes_sent"]),
                mark,
                style="bold" if mark == "best" else None,
            )
        table.add_section()
    table.caption = "means over seeds with 95 % intervals; sent by the average worker"
    return table


def _with_interval(row: dict[str, Any]) -> str:
    return f"{words.number(row['final'])} {words.half(row['final'], row['final_high'])}".strip()
