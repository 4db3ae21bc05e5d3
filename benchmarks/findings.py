"""Draw the figures of docs/findings.md from evidence/*.csv: `python -m benchmarks.findings`.

One figure per file: each method's difference from all-reduce with its interval, setting by setting.
Where five graphs or more can be compared, also results against a worker's neighbourhood; where
distances of controlled runs were kept, these beside the critical distance. Chromium draws.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer

from benchmarks.claims import observed, tested
from benchmarks.evidence import Compared, Result, compare, read, varied
from gossamer.charts.page import save, subplots
from gossamer.charts.theme import PALETTE, REFERENCE
from gossamer.engine import CENTRALIZED

_ROOT = Path(__file__).parents[1]
_STEPS = "-steps"
"""At the end of the names of files that have distances and not results."""

_GAMMA = 1e6
"""Targets of a run beside Γ are so many times Γ, so that they never act."""

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
    results = [r for r in read(path) if not r.is_trial and r.final is not None]
    # Without all-reduce, what few bits do is compared with the same graph in full.
    centralized = any(r.spec.topology == CENTRALIZED for r in results)
    rows = compare(results, () if centralized else ("wire", "fragments"))
    beside = "all-reduce" if centralized else "full precision"
    drawn = [("", differences(rows, varied(results), path.stem, beside))]
    known = [r for r in results if "connections" in r.facts]
    kept = [(r.spec, r.final, r.facts) for r in known if r.final is not None]
    if not tested(observed(kept)).is_empty():
        drawn.append(("_connections", connections(known, path.stem)))
    return [(ending, figure) for ending, figure in drawn if figure is not None]


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
    figure.update_layout(
        margin=_MARGIN,
        title=f"{title}: difference from {beside}, 95 % intervals over seeds",
        xaxis_title=f"{unit}; {'less' if told[0].unit else 'more'} is better",
        yaxis={"tickvals": list(range(len(methods))), "ticktext": methods, "autorange": "reversed"},
        showlegend=len(settings) > 1,
        width=860,
        height=150 + len(methods) * max(26, 14 * len(settings)),
    )
    return figure


def connections(results: list[Result], title: str) -> Any:
    """Return results against the size of a worker's neighbourhood, a point per method."""
    figure = subplots()
    axes = varied(results)
    settings = sorted({tuple(getattr(r.spec, a) for a in axes) for r in results})
    for number, setting in enumerate(settings):
        cells: dict[str, list[Result]] = {}
        for result in results:
            here = tuple(getattr(result.spec, a) for a in axes) == setting
            if here and result.spec.topology != CENTRALIZED:
                cells.setdefault(result.spec.method, []).append(result)
        points = sorted(
            (1 + own[0].facts["connections"], statistics.fmean(r.final or 0.0 for r in own), name)
            for name, own in cells.items()
        )
        figure.add_scatter(
            x=[point[0] for point in points],
            y=[point[1] for point in points],
            text=[point[2] for point in points],
            mode="markers",
            marker={
                "color": PALETTE[number % len(PALETTE)],
                "symbol": ["circle", "square", "diamond", "cross"][number % 4],
                "size": 9,
            },
            name=", ".join(f"{a} {v}" for a, v in zip(axes, setting, strict=True)) or title,
        )
    figure.update_layout(
        margin=_MARGIN,
        title=f"{title}: a point per method, mean over seeds",
        xaxis={"title": "a worker and those it hears per step", "type": "log", "dtick": 0.30103},
        yaxis_title=results[0].spec.make_workload().metric_name,
        legend={"orientation": "h", "y": -0.2},
        width=860,
        height=560,
    )
    return figure


def distances(steps: pl.DataFrame, title: str) -> Any:
    """Return how far apart workers were in the first seed, and beside a plain ring its Γ."""
    figure = subplots()
    first = steps.filter(pl.col("seed") == pl.col("seed").min(), pl.col("distance") > 0)
    for number, (key, own) in enumerate(first.group_by("method", maintain_order=True)):
        color, beside = PALETTE[number % len(PALETTE)], str(key[0]).endswith("Γ")
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
