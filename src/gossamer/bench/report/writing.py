"""Write a report: the page, figures and tables as files. All writes are atomic."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from gossamer.bench.analysis import Analysis, Tables
from gossamer.bench.report.figures import Figure, figures
from gossamer.bench.report.latex import to_latex
from gossamer.bench.report.page import render
from gossamer.bench.report.reading import Reader, Results
from gossamer.charts.page import rendering
from gossamer.charts.theme import LIGHT, template
from gossamer.extras import needed_by
from gossamer.files import write_all_atomic, write_atomic

_NOT_IN_FILE_NAMES = r"[^\w.=()-]+"
_IMAGES = ("png", "svg", "pdf")
_MEASUREMENTS = {*Tables._fields, "dispersion_by_phase", "dispersion_by_run", "norms"}
"""Tables with at least one row per run, which are too long for LaTeX."""


def write_report(
    folder: Path,
    out: Path | None = None,
    *,
    figures_dir: Path | None = None,
    tables_dir: Path | None = None,
    tensorboard_dir: Path | None = None,
) -> Results:
    """Write the report of an experiment's folder; return its contents.

    Args:
        folder: where the records are.
        out: the page; by default ``report.html`` in the folder.
        figures_dir: for figures as .png, .svg and .pdf, which needs Chromium; None writes none.
        tables_dir: for tables as .csv, .parquet and .tex; None writes none.
        tensorboard_dir: for curves as TensorBoard event files; None writes none.
    """
    results = Reader(folder).read()
    page = render(results)
    write_atomic(out or folder / "report.html", lambda path: path.write_text(page))
    if tables_dir is not None:
        write_tables(results.analysis, tables_dir, results.norms)
    if figures_dir is not None:
        write_figures(results.analysis, figures_dir, results.norms)
    if tensorboard_dir is not None:
        write_tensorboard(results.analysis, tensorboard_dir)
    return results


def write_tables(analysis: Analysis, folder: Path, norms: pl.DataFrame | None = None) -> None:
    """Write every table, as .csv and .parquet; lists in a .csv are joined by semicolons.

    Results are also written as LaTeX, measurements are not. The table of norms has quantiles over
    workers; the raw norms are in the folder ``norms``.
    """
    tables = analysis._asdict() | ({} if norms is None else {"norms": norms})
    for name, table in tables.items():
        lists = [column for column, kind in table.schema.items() if isinstance(kind, pl.List)]
        flat = table.with_columns(pl.col(lists).list.join("; ")) if lists else table
        write_atomic(folder / f"{name}.csv", flat.write_csv)
        write_atomic(folder / f"{name}.parquet", table.write_parquet)
        if name not in _MEASUREMENTS and len(table):
            text = to_latex(flat)
            write_atomic(folder / f"{name}.tex", partial(_write_text, text))


def write_figures(analysis: Analysis, folder: Path, norms: pl.DataFrame | None = None) -> None:
    """Write every figure as .png, .svg and .pdf, one for each workload and scale."""
    from plotly.io import write_images

    drawn = dict(images(analysis, norms))
    if not drawn:
        return
    paths = [folder / f"{name}.{kind}" for name in drawn for kind in _IMAGES]
    charts = [chart for chart in drawn.values() for _ in _IMAGES]

    def write(aside: list[Path]) -> None:
        with rendering("leave --figures out: the page itself needs no browser"):
            write_images(fig=charts, file=list[str | Path](aside))

    write_all_atomic(paths, write)


def write_tensorboard(analysis: Analysis, folder: Path) -> None:
    """Write the curves of every run as scalars, each run under its name."""
    with needed_by("--tensorboard needs", extra="tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    curves = {"train": analysis.steps, "evaluation": analysis.evaluations}
    for run in analysis.runs.iter_rows(named=True):
        name = f"{run['workload']} {run['method']} {run['workers']} workers seed {run['seed']}"
        place = folder / re.sub(_NOT_IN_FILE_NAMES, "_", f"{name} {run['run_id'][:6]}")
        with SummaryWriter(str(place)) as writer:
            for kind, table in curves.items():
                for row in table.filter(pl.col("run_id") == run["run_id"]).iter_rows(named=True):
                    for column, value in row.items():
                        if column not in ("run_id", "step", "epoch") and value is not None:
                            writer.add_scalar(f"{kind}/{column}", value, row["step"])


def images(analysis: Analysis, norms: pl.DataFrame | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the name and the plotly figure of every image."""
    for figure in figures(analysis, norms):
        first = {name: next(iter(options)) for name, options in figure.choices.items()}
        groups: dict[tuple[str | None, int | None], list[dict[str, Any]]] = {}
        for trace in figure.traces:
            meta = trace["meta"]
            if meta["choice"] == first or not first:
                groups.setdefault((meta["workload"], meta["workers"]), []).append(trace)
        for (workload, workers), traces in groups.items():
            parts = [figure.name, workload, workers]
            name = "-".join(str(part) for part in parts if part is not None)
            yield re.sub(_NOT_IN_FILE_NAMES, "_", name), _chart(figure, traces, workload, workers)


def _chart(
    figure: Figure, traces: list[dict[str, Any]], workload: str | None, workers: int | None
) -> dict[str, Any]:
    of = "" if workload is None else f": {workload}"
    scale = "" if workers is None else f", {workers} workers"
    names = {"xaxis": traces[0]["meta"]["x"], "yaxis": traces[0]["meta"]["y"]}
    axes = {
        key: {**figure.axes.get(key, {}), "title": {"text": text}} for key, text in names.items()
    }
    seen: set[str] = set()
    data = [
        {key: value for key, value in trace.items() if key != "meta"}
        | {"showlegend": not _named_before(trace, seen)}
        for trace in traces
    ]
    layout = {
        "template": template(LIGHT),
        "title": {"text": f"{figure.title}{of}{scale}"},
        "width": 900,
        "height": 540,
        **axes,
    }
    return {"data": data, "layout": layout}


def _write_text(text: str, path: Path) -> None:
    path.write_text(text)


def _named_before(trace: dict[str, Any], seen: set[str]) -> bool:
    name = trace.get("name", "")
    known = not name or name in seen
    seen.add(name)
    return known
