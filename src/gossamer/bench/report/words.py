"""Format numbers and findings as text, for the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import polars as pl

from gossamer.bench.analysis import MEASURES, Analysis

SIGNIFICANT = 0.05


class Finding(NamedTuple):
    """One of the three observations, tested on this experiment."""

    workload: str
    title: str
    claim: str
    """What the paper observed."""

    answer: str
    """One of: seen, not seen, the opposite."""

    statistic: str
    effect: str
    row: dict[str, Any]
    """Of the table of observations."""


def number(value: float | None) -> str:
    """Return a number with four significant digits.

    >>> number(0.91234567), number(123456.0), number(None)
    ('0.9123', '123,456', '–')
    """
    if value is None:
        return "–"
    text = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return text.replace("-", "−") if value < 0 else text


def megabytes(count: float | None) -> str:
    """Return bytes in kB, MB or GB.

    >>> megabytes(14069040.0)
    '14.1 MB'
    """
    if count is None:
        return "–"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def half(mean: float | None, high: float | None) -> str:
    """Return half the width of an interval; empty if there is none.

    >>> half(0.9, 0.91234)
    '± 0.012'
    """
    return "" if mean is None or high is None else f"± {high - mean:.2g}"


def bounds(low: float | None, high: float | None) -> str:
    """Return an interval; empty if there is none."""
    return "" if low is None or high is None else f"{number(low)} to {number(high)}"


def p_value(p: float | None) -> str:
    """Return a p-value as papers write it.

    >>> p_value(0.00001), p_value(0.0421)
    ('p < 0.001', 'p = 0.042')
    """
    if p is None:
        return ""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def correlation(row: dict[str, Any]) -> str:
    """Return a row of the table of observations as text."""
    units = f"{row['units']} {'scales' if row['observation'] == 'scale' else 'graphs'}"
    parts = [] if row["rho"] is None else [f"ρ = {signed(row['rho'])}"]
    parts += [row["note"]] if row["note"] else [p_value(row["p"]), units]
    return ", ".join(parts).replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")


def effect(row: dict[str, Any]) -> str:
    """Return the effect size with its interval, and the size that would have been detected."""
    if row["slope"] is None:
        return ""
    text = f"{signed(row['slope'], 2)} per doubling of {_DOUBLED[row['observation']]}"
    if row["p"] is None:
        return text
    text += f", 95 % interval {slopes(row)}"
    if row["detectable"] is None:
        return f"{text}; no effect of any size would have been detected reliably"
    return f"{text}; ±{row['detectable']:.2g} would have been detected"


def slopes(row: dict[str, Any]) -> str:
    """Return the interval of a slope, which may be unbounded."""
    low, high = row["slope_low"], row["slope_high"]
    first = "−∞" if low is None else signed(low, 2)
    return f"{first} to {'∞' if high is None else signed(high, 2)}"


def signed(value: float, digits: int | None = None) -> str:
    """Return a correlation, or another number with so many significant digits.

    >>> signed(-0.5), signed(-0.001), signed(0.01234, 2), signed(-1e-17, 2)
    ('−0.50', '0.00', '+0.012', '0')
    """
    if digits is None:
        value = round(value, 2)
        return f"{value:+.2f}".replace("-", "−") if value else "0.00"
    return f"{value:+.{digits}g}".replace("-", "−") if abs(value) > 1e-12 else "0"


def headlines(analysis: Analysis) -> dict[str, list[str]]:
    """Return, for each workload, a few sentences: which method wins, and at what cost."""
    lines: dict[str, list[str]] = {}
    for (workload,), verdicts in analysis.verdicts.group_by(["workload"], maintain_order=True):
        rows = list(verdicts.sort("workers").iter_rows(named=True))
        links = analysis.links.filter(pl.col("workload") == workload)
        lines[str(workload)] = [
            *races(links),
            _winners(rows),
            *_costs(rows[-1]),
            *_versus(rows[-1]),
        ]
    return lines


def races(links: pl.DataFrame) -> list[str]:
    """Return, for each workload and scale, which method is first at the target on which link."""
    lines: list[str] = []
    for _, group in links.group_by(["workload", "workers"], maintain_order=True):
        parts = [
            f"at {link[0]} {_first(list(own.iter_rows(named=True)))}"
            for link, own in group.group_by(["link"], maintain_order=True)
        ]
        row = group.row(0, named=True)
        aim = f"{number(row['target'])} {row['metric']} on {row['workers']} workers"
        lines.append(f"To {aim}, by modelled time: {'; '.join(parts)}.")
    return lines


def _first(rows: Sequence[dict[str, Any]]) -> str:
    """Return which method is first on a link, and its speed-up over all-reduce.

    Args:
        rows: sorted by modelled seconds.
    """
    first = rows[0]
    if first["modelled_s"] is None:
        return "no method reaches it"
    text = f"{quoted(first['method'])} is first, after {first['modelled_s']:.3g} s"
    if first["centralized"]:
        return f"{text}: stay with all-reduce"
    for row in rows:
        if row["centralized"]:
            if row["modelled_s"] is None:
                return f"{text}; {quoted(row['method'])} does not reach it"
            ratio = row["modelled_s"] / first["modelled_s"]
            return f"{text}, {ratio:.1f} times as fast as {quoted(row['method'])}"
    return text


def findings(analysis: Analysis) -> list[Finding]:
    """Return those of the three observations that each workload has enough graphs or scales for."""
    found: list[Finding] = []
    overall = pl.col("workers").is_null() & pl.col("method").is_null()
    for workload in analysis.observations["workload"].unique(maintain_order=True):
        here = analysis.observations.filter(pl.col("workload") == workload, overall)
        for name, claim, sign in _CLAIMS:
            rows = here.filter(pl.col("observation") == name)
            if rows.is_empty():
                continue
            # All are tested together and corrected for it, so the strongest row decides.
            rows = rows.with_columns(far=pl.col("rho").abs())
            row = rows.sort("far", descending=True, nulls_last=True, maintain_order=True).row(
                0, named=True
            )
            if row["p"] is None:
                continue
            title = f"Against {_AGAINST[name]}"
            if name == "dispersion":
                measure = MEASURES[row["measure"]]
                title += f" ({measure}, {row['phase']} in training; the strongest of {len(rows)})"
            found.append(
                Finding(
                    workload, title, claim, _answer(row, sign), correlation(row), effect(row), row
                )
            )
    return found


_CLAIMS = (
    ("scale", "Decentralized training loses as it scales.", -1),
    ("connections", "More connections go with a better result.", 1),
    ("dispersion", "Replicas that differ more go with a worse result.", -1),
)
_AGAINST = {
    "scale": "the number of workers",
    "connections": "the number of connections",
    "dispersion": "dispersion",
}
_DOUBLED = {
    "scale": "the workers",
    "connections": "the neighbourhood",
    "dispersion": "dispersion",
}


def _answer(row: dict[str, Any], sign: int) -> str:
    if row["p"] >= SIGNIFICANT:
        return "not seen"
    return "seen" if row["rho"] * sign > 0 else "the opposite"


def _winners(rows: Sequence[dict[str, Any]]) -> str:
    """Return which method is best at which scale; none is where all are level with the best."""
    scales: dict[str, list[str]] = {}
    for row in rows:
        num = len(row["level"] or [])
        ahead = f"{quoted(row['winner'])} is best"
        if num:
            ahead += f", level with {num} other{'s'[num == 1 :]}"
        if 0 < num == row["methods"] - 1:
            ahead = "no method is clearly ahead"
        scales.setdefault(ahead, []).append(str(row["workers"]))
    parts = [
        f"on {listed(where)} worker{'s'[where == ['1'] :]} {ahead}"
        for ahead, where in scales.items()
    ]
    return f"By {rows[0]['metric']}, {'; '.join(parts)}."


def _costs(row: dict[str, Any]) -> list[str]:
    where = f"On {row['workers']} workers"
    if row["methods"] < 2:
        return []
    if row["level"] is None:
        return [f"{where} methods have only one seed in common: their order may be chance."]
    if not row["level"]:
        return [f"{where} it is ahead of every other method by more than the noise between seeds."]
    best = f"{quoted(row['winner'])} has the best mean, {number(row['final'])}"
    others = listed([quoted(name) for name in row["level"]])
    if len(row["level"]) == row["methods"] - 1 > 2:
        others = "the others"
    level = f"{where} {best}; {others} cannot be distinguished from it."
    if row["cheapest"] == row["winner"]:
        sent = megabytes(row["winner_bytes"])
        return [f"{level} It sends the least of these, {sent} per worker."]
    saved = 1 - row["cheapest_bytes"] / row["winner_bytes"]
    return [
        f"{level} The cheapest of these, {quoted(row['cheapest'])}, sends "
        f"{megabytes(row['cheapest_bytes'])} per worker instead of "
        f"{megabytes(row['winner_bytes'])} ({100 * saved:.0f} % less)."
    ]


def _versus(row: dict[str, Any]) -> list[str]:
    if row["better"] is None:
        return []
    gap = "ahead of" if row["better"] > 0 else "behind"
    even = row["better"] == 0
    size = "level with" if even else f"{number(abs(row['better']))} {gap}"
    between = bounds(row["better_low"], row["better_high"])
    return [
        f"The best decentralized method there, {quoted(row['decentralized'])}, is {size} "
        f"{quoted(row['centralized'])}" + (f" (95 % interval {between})." if between else ".")
    ]


def quoted(name: str) -> str:
    """Return a name in quotes where it would be ambiguous in a sentence.

    >>> quoted("Ada"), quoted("ring, held")
    ('Ada', '“ring, held”')
    """
    return f"“{name}”" if " " in name else name


def listed(items: Sequence[str]) -> str:
    """Return items as an enumeration.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
