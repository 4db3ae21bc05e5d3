"""A plan and a profile in words: what a terminal and a page have in common."""

from __future__ import annotations

from gossamer.rates import format_rate
from gossamer.runtime_model.plan import Row
from gossamer.runtime_model.profile import Profile

LEGEND = (
    "ms: mean of an iteration, then its 5th to 95th percentile; waits: ms of it without computing; "
    "gain: DDP's time over this one; MB: sent by the busiest worker; p: share of the squared "
    "consensus error removed per step; exact: steps after which nothing is left. PostLocalSGD "
    "is listed, not recommended: it averages every fourth step only."
)
HEADINGS = ("method", "ms", "5–95 %", "waits", "gain", "MB", "p", "exact")


def describe(profile: Profile) -> str:
    """Return a profile in one line."""
    network = profile.network
    links = f", nodes of {network.workers_per_node}" if network.workers_per_node > 1 else ""
    if network.between is not None:
        links += f", {format_rate(network.between.bits_s)} between nodes"
    return (
        f"{profile.name}: {profile.num_bytes / 1e6:.3g} MB in {len(profile.buckets)} buckets, "
        f"{1e3 * profile.compute_s:.3g} ms of compute (variance {profile.variance:.2g}){links}"
    )


def row_cells(row: Row) -> list[str]:
    """Return a row as texts, for a table or a page."""
    times = row.prediction
    exact = row.rounds_to_consensus
    none = "–" if row.mixing is None else "never"
    return [
        row.method,
        _ms(times.mean_s),
        f"{_ms(times.p05_s)}–{_ms(times.p95_s)}",
        _ms(times.exposed_s),
        f"{row.speedup:.2f}×",
        f"{row.bytes_per_step / 1e6:.3g}",
        "–" if row.mixing is None else f"{row.mixing:.3g}",
        none if exact is None else str(exact),
    ]


def _ms(seconds: float) -> str:
    milliseconds = round(1e3 * seconds, 6)  # differences of equal times are not quite 0
    return f"{milliseconds:.0f}" if milliseconds >= 99.5 else f"{milliseconds:.2g}"
