"""Draw the figures of docs/findings.md from evidence/*.csv: `python -m benchmarks.findings`.

Each method's difference from all-reduce with its interval, setting by setting; of experiments whose
names begin with dbench, if they have enough graphs, results against a worker's neighbourhood
instead, and how they go with the dispersion of norms; where distances of controlled runs were kept,
these beside the critical distance. Chromium draws.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer

from benchmarks.claims import observed, tested
from benchmarks.evidence import Compared, Result, compare, counted, kept, read, varied
from gossamer.bench.analysis import MEASURES, PHASES
from gossamer.charts.page import save, subplots
from gossamer.charts.theme import PALETTE, REFERENCE
from gossamer.engine import CENTRALIZED

_ROOT = Path(__file__).parents[1]
_STEPS = "-steps"
"""At the end of the names of files that have distances and not results."""

_GAMMA = 1e6
"""Targets of a run beside Γ are so many times Γ, so that they never act."""

_GRAPHS = "dbench"
_PHASES = "consensus"
"""What names of experiments begin with that compare graphs, and phases of training."""

_EXACT = "D_complete"
"""What phases are compared with: those that are not controlled average exactly."""

_SYMBOLS = {
    **{"ring": "circle", "lattice": "circle", "torus": "square", "random_regular": "diamond"},
    **{"exponential": "triangle-up", "hypercube": "triangle-up", "complete": "star"},
}
"""Marks of kinds of graphs; that of others is a cross."""

_MARGIN = {"l": 10, "r": 20, "t": 50, "b": 50}


def main(
    name: Annotated[
        list[str] | None, typer.Argument(help="Of experiments; all by default.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of images.")] = _ROOT / "docs" / "images",
) -> None:
    """Write findings_NAME.svg for each file of results."""
    files = sorted((_ROOT / "evidence").glob("*.csv"))
    for path in files:
        if name and path.stem.removesuffix(_STEPS) not in name:
            continue
        for ending, figure in _figures(path):
            image = out / f"findings_{path.stem}{ending}.svg"
            save(figure, image)
            print(image)


def _figures(path: Path) -> list[tuple[str, Any]]:
    if path.stem.endswith(_STEPS):
        return [("", distances(pl.read_csv(path), path.stem.removesuffix(_STEPS)))]
    results = counted(read(path))
    if path.stem.startswith(_GRAPHS):
        found = tested(observed(kept(results)))
        if not found.is_empty():  # few graphs are compared as methods are, below
            figures = [
                ("_connections", connections(results, path.stem)),
                ("_dispersion", correlations(found, path.stem)),
            ]
            return [(ending, figure) for ending, figure in figures if figure is not None]
    if path.stem.startswith(_PHASES):
        rows, beside = compare(results, method=_EXACT), "exact averages"
    elif any(r.spec.topology == CENTRALIZED for r in results):
        rows, beside = compare(results), "all-reduce"
    else:  # few bits are compared with the same graph in full
        rows, beside = compare(results, ("wire", "fragments")), "full precision"
    figure = differences(rows, varied(results), path.stem, beside)
    return [] if figure is None else [("", figure)]


def differences(rows: list[Compared], axes: list[str], title: str, beside: str) -> Any:
    """Return methods' differences from the reference, a colour per setting; None without any."""
    told = [row for row in rows if row.gap is not None]
    if not told:
        return None
    figure = subplots()
    settings = list(dict.fromkeys(row.setting for row in told))
    methods = list(dict.fromkeys(row.method for row in told))
    for number, setting in enumerate(settings):
        own = [row for row in told if row.setting == setting]
        gaps = [row.gap for row in own if row.gap is not None]
        high = [gap.mean if gap.high is None else gap.high for gap in gaps]
        # Beside each other, the first on top.
        aside = 0.6 * ((len(settings) - 1) / 2 - number) / len(settings)
        figure.add_scatter(
            x=[gap.mean for gap in gaps],
            y=[methods.index(row.method) - aside for row in own],
            error_x={"array": [top - gap.mean for top, gap in zip(high, gaps, strict=True)]},
            mode="markers",
            marker={"color": PALETTE[number % len(PALETTE)], "size": 8},
            name=", ".join(f"{a} {v}" for a, v in zip(axes, setting, strict=True)) or title,
        )
    figure.add_vline(x=0, line_color=REFERENCE)
    unit = "percent of its loss" if told[0].unit else "accuracy"
    seen = any(row.gap is not None and row.gap.low is not None for row in told)
    figure.update_layout(
        margin=_MARGIN,
        title=f"{title}: difference from {beside}, {'95 % intervals' if seen else 'one seed'}",
        xaxis_title=f"{unit}; {'less' if told[0].unit else 'more'} is better",
        yaxis={"tickvals": list(range(len(methods))), "ticktext": methods, "autorange": "reversed"},
        showlegend=len(settings) > 1,
        width=860,
        height=150 + len(methods) * max(26, 14 * len(settings)),
    )
    return figure


def connections(results: list[Result], title: str) -> Any:
    """Return results against the size of a worker's neighbourhood: a point per method, a colour per
    scale, a mark per kind of graph, a panel per setting; None where no run of gossip has its
    connections.
    """
    results = [r for r in results if r.spec.topology != CENTRALIZED and "connections" in r.facts]
    if not results:
        return None
    scales = sorted({r.spec.workers for r in results})
    axes = [
        axis
        for axis in varied(results)  # but for what follows from the number of workers
        if len({(r.spec.workers, str(getattr(r.spec, axis))) for r in results}) > len(scales)
    ]
    settings = sorted({tuple(getattr(r.spec, a) for a in axes) for r in results})
    cols = min(2, len(settings))
    rows = -(-len(settings) // cols)
    named = [", ".join(f"{a} {v}" for a, v in zip(axes, each, strict=True)) for each in settings]
    figure = subplots(
        rows=rows, cols=cols, shared_yaxes=True, subplot_titles=named, vertical_spacing=0.12
    )
    told: set[int] = set()
    for number, setting in enumerate(settings):
        for place, scale in enumerate(scales):
            cells: dict[str, list[Result]] = {}
            for result in results:
                here = tuple(getattr(result.spec, a) for a in axes) == setting
                if here and result.spec.workers == scale:
                    cells.setdefault(result.spec.method, []).append(result)
            points = [
                (
                    1 + own[0].facts["connections"],
                    statistics.fmean(r.final for r in own if r.final is not None),
                    m,
                )
                for m, own in cells.items()
            ]
            if not points:  # a scale that this setting does not have
                continue
            figure.add_scatter(
                x=[point[0] for point in points],
                y=[point[1] for point in points],
                text=[point[2] for point in points],
                mode="markers",
                marker={
                    "color": PALETTE[place % len(PALETTE)],
                    "symbol": [_symbol(_kind(point[2])) for point in points],
                    "size": 8,
                },
                name=f"{scale} workers",
                showlegend=scale not in told,
                row=number // cols + 1,
                col=number % cols + 1,
            )
            told.add(scale)
    kinds: dict[str, list[str]] = {}
    for kind in dict.fromkeys(_kind(r.spec.method) for r in results):
        kinds.setdefault(_symbol(kind), []).append(kind.replace("_", " "))
    for symbol, names in kinds.items():
        marker = {"color": REFERENCE, "symbol": symbol, "size": 8}
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=", ".join(names))
    figure.update_xaxes(type="log", dtick=0.30103)
    figure.update_xaxes(title="a worker and those it hears per step", row=rows)
    figure.update_yaxes(title=results[0].spec.make_workload().metric_name, col=1)
    figure.update_layout(
        margin={**_MARGIN, "t": 70},
        title=f"{title}: a point per graph, mean over seeds",
        width=960,
        height=120 + 280 * rows,
    )
    return figure


def _kind(method: str) -> str:
    """Return the kind of a method's graph: lattice of D_lattice(k=4)."""
    return method.removeprefix("D_").partition("(")[0]


def _symbol(kind: str) -> str:
    return _SYMBOLS.get(kind, "cross")


def correlations(found: pl.DataFrame, title: str) -> Any:
    """Return how results go with dispersion: settings by phases and measures, over all scales; None
    where nothing was tested.
    """
    told = found.filter(
        pl.col("observation") == "dispersion",
        pl.col("workers").is_null(),
    )
    if told.is_empty():
        return None
    columns = [(phase, measure) for phase in PHASES for measure in MEASURES]
    settings = told["workload"].unique(maintain_order=True).to_list()
    cells = {(r["workload"], r["phase"], r["measure"]): r for r in told.iter_rows(named=True)}
    known = [[cells.get((setting, *column)) for column in columns] for setting in settings]
    figure = subplots()
    figure.add_heatmap(
        x=[f"{phase}<br>{measure.replace('_', ' ')}" for phase, measure in columns],
        y=[re.sub(r", (?![^(]*\))", "<br>", setting) for setting in settings],
        z=[[row and row["rho"] for row in line] for line in known],
        text=[[row and _starred(row["rho"], row["p"]) for row in line] for line in known],
        texttemplate="%{text}",
        colorscale=[[0, PALETTE[0]], [0.5, "#ffffff"], [1, PALETTE[1]]],
        zmin=-1,
        zmax=1,
        colorbar={"title": "ρ"},
    )
    figure.update_layout(
        margin=_MARGIN,
        title=f"{title}: correlation of results with dispersion over replicas (* p < 0.05)",
        yaxis={"autorange": "reversed"},
        xaxis={"tickangle": -60},
        width=960,
        height=260 + 70 * len(settings),
    )
    return figure


def _starred(rho: float, p: float | None) -> str:
    return f"{rho:+.2f}{'*' if p is not None and p < 0.05 else ''}"


def distances(steps: pl.DataFrame, title: str) -> Any:
    """Return how far apart workers were in the first seed, and beside a plain ring its Γ."""
    figure = subplots()
    first = steps.filter(pl.col("seed") == pl.col("seed").min(), pl.col("distance") > 0)
    for number, (key, own) in enumerate(first.group_by("method", maintain_order=True)):
        color, beside = PALETTE[number % len(PALETTE)], str(key[0]).endswith("beside Γ")
        dash = ("solid", "dash", "dot")[number // len(PALETTE) % 3]
        line = {"color": "#000000" if beside else color, "dash": dash}
        figure.add_scatter(x=own["step"], y=own["distance"], line=line, name=str(key[0]))
        if beside:
            known = own.filter(pl.col("target").is_finite())
            line = {"color": REFERENCE, "width": 4}
            figure.add_scatter(x=known["step"], y=known["target"] / _GAMMA, line=line, name="Γ")
    figure.update_layout(
        margin=_MARGIN,
        title=f"{title}: distance between workers",
        xaxis_title="step",
        yaxis={"title": "Ξ", "type": "log"},
        width=860,
        height=560,
    )
    return figure


if __name__ == "__main__":
    typer.run(main)
