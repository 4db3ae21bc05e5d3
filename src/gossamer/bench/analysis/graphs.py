"""The units of DBench's tests: graphs, each with its mean over seeds at each scale.

Connections and dispersion belong to a graph, so a graph is one unit, however many runs it has. A
graph is a topology. Methods that have the same topology and differ in any other setting but the
learning rate (algorithm, wire format, optimizer, control) are *variants* of one graph: what makes
a graph good makes its variants good, so they are not independent. Graphs are compared within a
variant. Runs whose trajectories are equal bit for bit count once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from gossamer.records import Evaluation, Record, Step

_NO_VARIANT = {
    *("workload", "workers", "engine", "method", "seed", "topology"),
    *("lr", "log_every", "evaluate_every", "evaluate_replicas", "evaluate_samples"),
    *("steps_per_epoch", "max_steps"),
}
"""Fields that make the graph, that follow from the scale or a budget, or that do not change
training; and the learning rate, which may follow from the graph."""

_CELL = ["workload", "workers", "variant", "graph"]


def trajectory(records: Iterable[Record]) -> str:
    """Return a digest of a run's losses, dispersions and metrics: equal for equal trajectories."""
    digest = hashlib.blake2b(digest_size=8)
    for record in records:
        if isinstance(record, Step):
            digest.update(repr((record.step, record.loss, record.worst_loss)).encode())
            digest.update(repr(sorted(record.dispersion.items())).encode())
        elif isinstance(record, Evaluation):
            own = sorted(record.replicas.items())
            digest.update(repr((record.step, record.average, own)).encode())
    return digest.hexdigest()


def graph_names(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the graph of each run, named after the first method with the same topologies.

    A topology may follow from the scale or the epochs, as Ada's does, so methods are compared at
    all scales that both have.
    """
    graphs: dict[str, dict[tuple[Any, ...], str]] = {}
    for spec in specs:
        scale = (spec["workload"], spec["workers"], spec["steps_per_epoch"], spec["epochs"])
        graphs.setdefault(spec["method"], {})[scale] = spec["topology"]
    first: dict[str, str] = {}
    for method, graph in graphs.items():
        same = (
            other
            for other in dict.fromkeys(first.values())
            if (shared := graph.keys() & graphs[other].keys())
            and all(graph[scale] == graphs[other][scale] for scale in shared)
        )
        first[method] = next(same, method)
    return [first[spec["method"]] for spec in specs]


def variants(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the variant of each run: all its settings but graph, scale, seed and learning rate."""
    return [
        repr(sorted((name, repr(value)) for name, value in spec.items() if name not in _NO_VARIANT))
        for spec in specs
    ]


def repeats(runs: pl.DataFrame) -> pl.DataFrame:
    """Return one row per method and scale whose trajectory equals that of an earlier method.

    Args:
        runs: of ``Tables``. Runs on processes that repeat simulated ones are left out.
    """
    rows: list[dict[str, Any]] = []
    done = runs.filter(pl.col("quality").is_not_null(), ~pl.col("twin"))
    for (workload, workers), group in done.group_by(["workload", "workers"], maintain_order=True):
        before: dict[Any, str] = {}
        for (method,), own in group.group_by(["method"], maintain_order=True):
            went = tuple(own.sort("seed").select("seed", "trajectory").iter_rows())
            same = before.setdefault(went, str(method))
            if same != method:
                row = {"workload": workload, "workers": workers, "method": method}
                rows.append(row | {"same_as": same})
    return pl.DataFrame(rows, schema=_REPEAT_SCHEMA)


def graph_means(runs: pl.DataFrame, repeated: pl.DataFrame, values: Sequence[str]) -> pl.DataFrame:
    """Return one row per scale, variant and graph: the means of values over seeds, and the number
    of runs.

    Seeds that not all graphs of a scale have are left out, if there are others: the effect of a
    seed would be confounded with that of a graph.

    Args:
        runs: of ``Tables``, with columns for the values.
        repeated: as ``repeats`` returns it; these methods are left out.
        values: names of columns. Runs that lack one of them are left out, and so are runs whose
            metric is not finite.
    """
    counted = runs.filter(pl.col("quality").is_not_null(), ~pl.col("twin")).join(
        repeated, on=["workload", "workers", "method"], how="anti", maintain_order="left"
    )
    counted = counted.drop_nulls(list(values)).filter(
        pl.all_horizontal(pl.col("quality", *values).is_finite())
    )
    within = ["workload", "workers", "variant"]
    shared = pl.col("graph").n_unique().over([*within, "seed"]) == pl.col("graph").n_unique().over(
        within
    )
    counted = counted.with_columns(shared=shared)
    chosen = counted.filter(pl.col("shared") | ~pl.col("shared").any().over(within))
    return chosen.group_by(_CELL, maintain_order=True).agg(
        pl.col("centralized").first(),
        pl.len().cast(pl.Int64).alias("runs"),
        pl.col("quality").mean(),
        *[pl.col(name).mean() for name in values if name != "quality"],
    )


def largest_variants(cells: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of the variants that have the most graphs at their scale.

    Graphs are only exchanged with graphs that have cells in the same strata, so a variant of a few
    graphs would leave fewer permutations to all the others. Variants with equally many graphs all
    stay, and are strata like scales.

    Args:
        cells: as ``graph_means`` returns them, or ``runs`` of ``Tables``.
    """
    scale = ["workload", "workers"]
    counted = cells.with_columns(num_graphs=pl.col("graph").n_unique().over([*scale, "variant"]))
    most = pl.col("num_graphs") == pl.col("num_graphs").max().over(scale)
    return counted.filter(most).drop("num_graphs")


_REPEAT_SCHEMA: dict[str, Any] = {
    "workload": pl.String,
    "workers": pl.Int64,
    "method": pl.String,
    "same_as": pl.String,
}
