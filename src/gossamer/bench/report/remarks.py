"""What a reader must know before believing a page: who was counted once, what varies together."""

from __future__ import annotations

import polars as pl

from gossamer.bench.analysis import Analysis
from gossamer.bench.report.words import listed, number, quoted


def remarks(analysis: Analysis) -> dict[str, list[str]]:
    """Return sentences for each workload that has runs with a result."""
    found: dict[str, list[str]] = {}
    for (workload,), runs in analysis.runs.group_by(["workload"], maintain_order=True):
        repeated = analysis.repeats.filter(pl.col("workload") == workload)
        done = runs.filter(pl.col("quality").is_not_null(), ~pl.col("twin"))
        found[str(workload)] = [
            *_facet(runs["facet"][0]),
            *_rates(done),
            *_idle_controls(done),
            *_averaging(done),
            *_repeats(repeated),
            *_alone(done),
        ]
    return found


def _facet(facet: str) -> list[str]:
    """Say that there are other settings."""
    if not facet:
        return []
    return [
        f"All this is of one setting, {facet}: methods are compared within it, and never with runs "
        "of another. The others are listed as workloads in the filter."
    ]


def _rates(runs: pl.DataFrame) -> list[str]:
    """Say where graph and learning rate vary together, with the scale at which they do most."""
    mixing = runs.filter(~pl.col("centralized"), pl.col("highest_lr") > 0)
    apart = (
        mixing.group_by("workers", maintain_order=True)
        .agg(
            ratio=pl.col("highest_lr").max() / pl.col("highest_lr").min(),
            least=pl.col("method").sort_by("highest_lr").first(),
            low=pl.col("highest_lr").min(),
            most=pl.col("method").sort_by("highest_lr").last(),
            high=pl.col("highest_lr").max(),
            scaled=(pl.col("lr_scaling") != "none").any(),
        )
        .filter(pl.col("ratio") > 1 + 1e-9)
        .sort("ratio", descending=True, maintain_order=True)
    )
    if apart.is_empty():
        return []
    row = apart.row(0, named=True)
    why = (
        f"The learning rate follows the neighbourhood ({_scalings(mixing)})"
        if row["scaled"]
        else "Methods have learning rates of their own"
    )
    told = (
        f"{why}: on {row['workers']} workers its highest is {number(row['low'])} in "
        f"{quoted(row['least'])} and {number(row['high'])} in {quoted(row['most'])}. Graph and "
        "rate vary together, so what is told of connections and dispersion may be due to the rate."
    )
    if row["scaled"] and "none" in mixing["lr_scaling"]:
        return [f"{told} Graphs are compared within each rule, of which one is none."]
    if row["scaled"]:
        told += ' Methods with lr_scaling = "none" would tell the two apart.'
    return [told]


def _scalings(runs: pl.DataFrame) -> str:
    used = runs.filter(pl.col("lr_scaling") != "none")["lr_scaling"].unique(maintain_order=True)
    return f"lr_scaling = {listed(used.to_list())}"


def _idle_controls(runs: pl.DataFrame) -> list[str]:
    """Name controls that never did anything, and say where their calibration took the whole run."""
    found: list[str] = []
    controlled = runs.filter(pl.col("acted").is_not_null())
    for (method,), own in controlled.group_by(["method"], maintain_order=True):
        idle = own.filter(~pl.col("acted"))
        if idle.is_empty():
            continue
        scales = listed([str(scale) for scale in sorted(set(idle["workers"]))])
        told = f"The control of {quoted(str(method))} never acted on {scales} workers: "
        if idle["aimed"].any():
            told += "in no recorded step did it mix otherwise than the graph alone."
        else:
            told += "its calibration, or another phase without a target, took the whole run."
        found.append(told)
    return found


def _averaging(runs: pl.DataFrame) -> list[str]:
    """Name methods whose neighbours are not what a graph's are."""
    rare = runs.filter(pl.col("averages_every").is_not_null())
    rows = rare.group_by("method", maintain_order=True).agg(
        pl.col("averages_every", "connections", "workers").sort_by("workers").last()
    )
    return [
        f"{quoted(method)} averages in one of {every} steps: its {number(heard)} neighbours per "
        f"step on {workers} workers are {number(heard * every)} at once and none in between, and "
        "are counted with those that graphs hear at every step."
        for method, every, heard, workers in rows.iter_rows()
    ]


def _repeats(repeated: pl.DataFrame) -> list[str]:
    """Name methods that are the same trajectory."""
    pairs = repeated.group_by(["method", "same_as"], maintain_order=True).agg("workers")
    return [
        f"{quoted(method)} and {quoted(same)} are the same trajectory, bit by bit, on "
        f"{listed([str(scale) for scale in sorted(scales)])} workers: they count once."
        for method, same, scales in pairs.iter_rows()
    ]


def _alone(runs: pl.DataFrame) -> list[str]:
    """Name methods that differ from all others in more than their graph."""
    mixing = runs.filter(~pl.col("centralized"))
    graphs = pl.col("graph").n_unique()
    mixing = mixing.filter(graphs.over("workers") > 1)
    compared = set(mixing.filter(graphs.over(["workers", "variant"]) > 1)["method"])
    alone = [name for name in mixing["method"].unique(maintain_order=True) if name not in compared]
    if not alone or not compared:
        return []
    are, their = ("is", "its") if len(alone) == 1 else ("are", "their")
    return [
        f"{listed([quoted(name) for name in alone])} {are} not counted where results are set "
        f"against connections and dispersion: no other graph has {their} optimizer and recipe."
    ]
