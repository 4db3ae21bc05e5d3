"""DBench's observations from kept results, with graphs as the units of the tests.

``gossamer bench report`` computes the same from records. A kept row has all that is needed: the
run, its result, the connections of its graph and the dispersion of norms in each third of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from gossamer.bench.analysis import MEASURES, PHASES
from gossamer.bench.analysis.graphs import graph_names, variants
from gossamer.bench.analysis.names import facet_names, setting_names
from gossamer.bench.analysis.observations import observations
from gossamer.bench.analysis.permutation import FEWEST
from gossamer.engine import CENTRALIZED, RunSpec

_HEADS = ["observation", "setting", "workers", "graphs", "ρ", "p", "per doubling", "95 % interval"]

Kept = tuple[RunSpec, float, Mapping[str, float]]
"""A run, its result, and its facts as ``benchmarks.evidence`` keeps them."""


def claims(kept: Sequence[Kept]) -> str:
    """Return Markdown: how quality correlates with connections and dispersion.

    Empty where fewer than five graphs can be compared; variants of a graph are not graphs.
    """
    found = observed(kept)
    told = tested(found)
    if told.is_empty():
        return ""
    scale = found.filter(pl.col("observation") == "scale", pl.col("rho").is_not_null())
    rows = [_cells(row) for row in pl.concat([scale, told]).iter_rows(named=True)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (_HEADS, ["---"] * len(_HEADS), *rows))


def observed(kept: Sequence[Kept]) -> pl.DataFrame:
    """Return DBench's three observations, as ``bench.analysis.observations`` does of records."""
    kept = [run for run in kept if "connections" in run[2]]
    specs = [spec.model_dump() for spec, _, _ in kept]
    settings = setting_names(specs, facet_names(specs))
    runs = pl.DataFrame(
        [
            {
                "run_id": spec.id,
                "workload": setting,
                "workers": spec.workers,
                "method": spec.method,
                "seed": spec.seed,
                "centralized": spec.topology == CENTRALIZED,
                "twin": False,
                "graph": graph,
                "variant": variant,
                "connections": facts["connections"],
                "quality": final if spec.make_workload().higher_is_better else -final,
            }
            for (spec, final, facts), setting, graph, variant in zip(
                kept, settings, graph_names(specs), variants(specs), strict=True
            )
        ],
        schema=_RUNS,
    )
    return observations(runs, _dispersion(kept), pl.DataFrame(schema=_REPEATED))


def tested(found: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of ``observed`` that compare enough graphs for a p-value."""
    return found.filter(
        pl.col("units") >= FEWEST, pl.col("rho").is_not_null(), pl.col("observation") != "scale"
    )


def _dispersion(kept: Sequence[Kept]) -> pl.DataFrame:
    rows = [
        {"run_id": spec.id, "phase": phase}
        | {measure: facts[f"{phase} {measure}"] for measure in MEASURES}
        for spec, _, facts in kept
        for phase in PHASES
        if f"{phase} gini" in facts
    ]
    floats = dict.fromkeys(MEASURES, pl.Float64)
    return pl.DataFrame(rows, schema={"run_id": pl.String, "phase": pl.String, **floats})


def _cells(row: Mapping[str, Any]) -> list[str]:
    what = [row["observation"], row["method"], row["phase"], row["measure"]]
    p, low, high = row["p"], row["slope_low"], row["slope_high"]
    return [
        ", ".join(part.replace("_", " ") for part in what if part),
        row["workload"],
        "all" if row["workers"] is None else str(row["workers"]),
        str(row["units"]),
        f"{row['rho']:+.2f}",
        "–" if p is None else f"{p:.2g}",
        "–" if row["slope"] is None else f"{row['slope']:+.2g}",
        "–" if low is None or high is None else f"{low:+.2g} to {high:+.2g}",
    ]


_RUNS: dict[str, Any] = {
    **dict.fromkeys(["run_id", "workload"], pl.String),
    "workers": pl.Int64,
    "method": pl.String,
    "seed": pl.Int64,
    **dict.fromkeys(["centralized", "twin"], pl.Boolean),
    **dict.fromkeys(["graph", "variant"], pl.String),
    **dict.fromkeys(["connections", "quality"], pl.Float64),
}
_REPEATED = {"workload": pl.String, "workers": pl.Int64, "method": pl.String}
