"""Caveats of a report: confounded settings, and methods that the tests leave out."""

from __future__ import annotations

import polars as pl

from gossamer.bench.analysis import Analysis
from gossamer.bench.analysis.graphs import largest_variants
from gossamer.bench.report.words import listed, number, quoted


def remarks(analysis: Analysis) -> dict[str, list[str]]:
    """Return the caveats of each workload, as sentences."""
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
            *_variants(done, repeated),
        ]
    return found


def _facet(facet: str) -> list[str]:
    """Note that the page has further settings."""
    if not facet:
        return []
    return [
        f"All this is about one setting, {facet}: methods are compared within it, never with runs "
        "of another. The filter lists the other settings as workloads."
    ]


def _rates(runs: pl.DataFrame) -> list[str]:
    """Note where graph and learning rate are confounded, at the scale with the largest ratio."""
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
        else "Methods have different learning rates"
    )
    text = (
        f"{why}: on {row['workers']} workers its highest is {number(row['low'])} for "
        f"{quoted(row['least'])} and {number(row['high'])} for {quoted(row['most'])}. Graph and "
        "rate vary together, so effects of connections and dispersion may be due to the rate."
    )
    if row["scaled"] and "none" in mixing["lr_scaling"]:
        return [f"{text} Graphs are compared within each rule, of which one is none."]
    if row["scaled"]:
        text += ' Runs with lr_scaling = "none" would separate the two.'
    return [text]


def _scalings(runs: pl.DataFrame) -> str:
    used = runs.filter(pl.col("lr_scaling") != "none")["lr_scaling"].unique(maintain_order=True)
    return f"lr_scaling = {listed(used.to_list())}"


def _idle_controls(runs: pl.DataFrame) -> list[str]:
    """Name controls that never changed a round, and why."""
    found: list[str] = []
    controlled = runs.filter(pl.col("acted").is_not_null())
    for (method,), own in controlled.group_by(["method"], maintain_order=True):
        idle = own.filter(~pl.col("acted"))
        if idle.is_empty():
            continue
        scales = listed([str(scale) for scale in sorted(set(idle["workers"]))])
        text = f"The control of {quoted(str(method))} never acted on {scales} workers: "
        if idle["aimed"].any():
            text += "in every recorded step it mixed exactly as the graph alone would."
        else:
            text += "its calibration, or another phase without a target, took the whole run."
        found.append(text)
    return found


def _averaging(runs: pl.DataFrame) -> list[str]:
    """Name methods whose neighbours per step are an average over steps without an exchange."""
    rare = runs.filter(pl.col("averages_every").is_not_null())
    rows = rare.group_by("method", maintain_order=True).agg(
        pl.col("averages_every", "connections", "workers").sort_by("workers").last()
    )
    return [
        f"{quoted(method)} averages in one of {every} steps: its {number(heard)} neighbours per "
        f"step on {workers} workers are {number(heard * every)} at once and none in between."
        for method, every, heard, workers in rows.iter_rows()
    ]


def _repeats(repeated: pl.DataFrame) -> list[str]:
    """Name methods whose trajectories are equal."""
    pairs = repeated.group_by(["method", "same_as"], maintain_order=True).agg("workers")
    return [
        f"{quoted(method)} and {quoted(same)} have the same trajectory, bit for bit, on "
        f"{listed([str(scale) for scale in sorted(scales)])} workers: they count once."
        for method, same, scales in pairs.iter_rows()
    ]


def _variants(runs: pl.DataFrame, repeated: pl.DataFrame) -> list[str]:
    """Name methods that take no part in the tests of graphs: their variant has fewer graphs."""
    mixing = runs.filter(~pl.col("centralized")).join(
        repeated, on=["workers", "method"], how="anti", maintain_order="left"
    )
    graphs = pl.col("graph").n_unique()
    mixing = mixing.filter(graphs.over("workers") > 1)
    compared = largest_variants(mixing).filter(graphs.over(["workers", "variant"]) > 1)
    left_out = mixing.filter(~pl.col("method").is_in(compared["method"].to_list()))
    names = left_out["method"].unique(maintain_order=True).to_list()
    if not names or compared.is_empty():
        return []
    are, their = ("is", "its") if len(names) == 1 else ("are", "their")
    return [
        f"{listed([quoted(name) for name in names])} {are} left out of the tests against "
        "connections and dispersion: they compare graphs that have all other settings in common, "
        f"such as algorithm, wire format, control and optimizer, and fewer graphs have {their} "
        "settings."
    ]
