"""DBench's observations from kept results, with graphs as the units of the tests.

``gossamer bench report`` computes the same from records. A kept row has all that is needed: the
run, its result, the connections of its graph and the dispersion of norms in each third of training.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from gossamer.bench.analysis import MEASURES, PHASES
from gossamer.bench.analysis.graphs import graph_names, variants
from gossamer.bench.analysis.names import facet_names, setting_names
from gossamer.bench.analysis.observations import observations
from gossamer.bench.analysis.permutation import FEWEST
from gossamer.engine import CENTRALIZED, RunSpec
from gossamer.errors import UserError

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
    rows = pl.concat([scale, told]).iter_rows(named=True)
    return markdown(_HEADS, map(_cells, rows))


def of_fewer(kept: Sequence[Kept], num_graphs: int, most: int = 60) -> str:
    """Return Markdown: what would have been seen with fewer graphs, over all choices of them.

    Every choice has the graphs with the fewest and with the most connections, each with all its
    variants; of more than ``most`` choices so many are drawn. A choice that cannot be tested has
    seen nothing.
    """
    known = sorted(
        (run for run in kept if run[0].topology != CENTRALIZED and "connections" in run[2]),
        key=lambda run: run[0].id,
    )
    graphs = graph_names([spec.model_dump() for spec, _, _ in known])
    # Connections may grow with the scale: graphs are sorted by those at their largest.
    largest: dict[str, tuple[int, float]] = {}
    for graph, (spec, _, facts) in zip(graphs, known, strict=True):
        own = (spec.workers, facts["connections"])
        largest[graph] = max(largest.get(graph, own), own)
    if not FEWEST <= num_graphs <= len(largest):
        raise UserError(
            f"--graphs must be from {FEWEST} to the number of graphs whose connections are known, "
            f"{len(largest)}, got {num_graphs}; leave it out to test all of them"
        )
    first, *others, last = sorted(largest, key=lambda graph: (largest[graph][1], graph))
    choices = [*itertools.combinations(others, num_graphs - 2)]
    told = str(len(choices))
    if len(choices) > most:
        told = f"{most} drawn of {len(choices)}"
        choices = random.Random(0).sample(choices, most)
    found: list[pl.DataFrame] = []
    for choice in choices:
        chosen = {first, last, *choice}
        part = [run for graph, run in zip(graphs, known, strict=True) if graph in chosen]
        found.append(tested(observed(part)).filter(pl.col("workers").is_null()))
    rows = pl.concat(found)
    if rows.is_empty():
        raise UserError(
            f"--graphs needs {FEWEST} graphs that can be compared and whose results differ, got "
            f"none in {told} choices of {num_graphs}; take more graphs, or leave it out"
        )
    keys = ["workload", "observation", "phase", "measure"]
    rho, seen = pl.col("rho"), (pl.col("p") < 0.05).sum() / len(choices)
    table = rows.group_by(keys, maintain_order=True).agg(
        rho.min().alias("low"), rho.median(), rho.max().alias("high"), seen
    )
    lines = [
        [
            _in_words(row[1:4]),
            row[0],
            *(f"{value:+.2f}" for value in row[4:7]),
            f"{100 * row[7]:.0f} %",
        ]
        for row in table.rows()
    ]
    return markdown(
        ["observation", "setting", "lowest ρ", "median", "highest", f"p < 0.05 of {told}"], lines
    )


def observed(kept: Sequence[Kept]) -> pl.DataFrame:
    """Return DBench's three observations, as ``bench.analysis.observations`` does of records.

    Permutations are drawn, and follow the order of runs: they are sorted.
    """
    kept = sorted((run for run in kept if "connections" in run[2]), key=lambda run: run[0].id)
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
        _in_words(what),
        row["workload"],
        "all" if row["workers"] is None else str(row["workers"]),
        str(row["units"]),
        f"{row['rho']:+.2f}",
        "–" if p is None else f"{p:.2g}",
        "–" if row["slope"] is None else f"{row['slope']:+.2g}",
        "–" if low is None or high is None else f"{low:+.2g} to {high:+.2g}",
    ]


def _in_words(parts: Iterable[str | None]) -> str:
    return ", ".join(part.replace("_", " ") for part in parts if part)


def markdown(heads: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table."""
    head, *lines = [f"| {' | '.join(map(str, cells))} |" for cells in (heads, *rows)]
    return "\n".join([head, f"|{'---|' * len(heads)}", *lines])


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
