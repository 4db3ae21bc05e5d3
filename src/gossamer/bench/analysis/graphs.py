"""Witnesses: graphs, each with its mean over seeds at each scale.

Connections and dispersion belong to a graph, so a graph is one witness, however many runs it has.
Two methods have one graph where topology, algorithm, control, wire and exchanges are the same.
Graphs are compared where nothing else but the learning rate differs: what does is the *variant*,
such as the optimizer. Runs that are the same trajectory, bit by bit, count once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from gossamer.records import Evaluation, Record, Step

_GRAPH = ("topology", "algorithm", "every", "control", "gossip_steps", "wire", "fragments")
_NO_VARIANT = {
    *("workload", "workers", "engine", "method", "seed", *_GRAPH),
    *("lr", "log_every", "evaluate_every", "evaluate_replicas", "evaluate_samples"),
    *("steps_per_epoch", "max_steps"),
}
"""Fields that belong to the graph, that follow the scale or a budget, or that change no training;
and the learning rate, which may follow the graph."""

_CELL = ["workload", "workers", "variant", "graph"]


def trajectory(records: Iterable[Record]) -> str:
    """Return a digest of what a run's models went through: equal where that is, bit by bit."""
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
    """Return the graph of each run: the first method that has the same at all scales of both."""
    graphs: dict[str, dict[tuple[Any, ...], tuple[Any, ...]]] = {}
    for spec in specs:
        scale = (spec["workload"], spec["workers"], spec["steps_per_epoch"], spec["epochs"])
        own = tuple(spec.get(name) for name in _GRAPH)
        graphs.setdefault(spec["method"], {})[scale] = own
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
    """Return what tells each run from others besides graph, scale, seed and learning rate."""
    return [
        repr(sorted((name, repr(value)) for name, value in spec.items() if name not in _NO_VARIANT))
        for spec in specs
    ]


def repeats(runs: pl.DataFrame) -> pl.DataFrame:
    """Return one row per method and scale that went through the same as another before it.

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
    """Return one row per scale, variant and graph: the means of values over seeds, and of how many
    runs they are.

    Seeds that not all graphs of a scale have are left out, where there are others: a seed's luck
    would pass for a graph's.

    Args:
        runs: of ``Tables``, with columns for the values.
        repeated: as ``repeats`` returns it; these are no witnesses.
        values: names of columns. A run that lacks one of them is left out, and so is one whose
            metric is no finite number.
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


_REPEAT_SCHEMA: dict[str, Any] = {
    "workload": pl.String,
    "workers": pl.Int64,
    "method": pl.String,
    "same_as": pl.String,
}
