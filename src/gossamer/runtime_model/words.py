"""Plans and profiles as strings, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gossamer.rates import format_rate
from gossamer.runtime_model.losses import MEASURED_TOPOLOGY
from gossamer.runtime_model.plan import Row
from gossamer.runtime_model.profile import Profile

_LEGEND = (
    "ms: mean of an iteration, then its 5th to 95th percentile; waits: ms of it without computing; "
    "gain: DDP's time over this one; MB: sent by the busiest worker; p: share of the squared "
    "consensus error removed per step; exact: steps after which the average is exact. PostLocalSGD "
    "is listed, not recommended: it averages every fourth step only."
)
_LOSS_LEGEND = (
    " loss: above DDP's after as many steps, measured with SmoothAdamW on the number of workers in "
    f"brackets; *: taken to be that of {MEASURED_TOPOLOGY}; ms to equal loss: ms, times as many "
    "steps as it takes to DDP's loss."
)


def describe(profile: Profile) -> str:
    """Return a profile in one line."""
    network = profile.network
    links = f", nodes of {network.workers_per_node}" if network.workers_per_node > 1 else ""
    if network.between is not None:
        links += f", {format_rate(network.between.bits_s)} between nodes"
    name = f"{profile.name} ({profile.kind})" if profile.kind else profile.name
    return (
        f"{name}: {profile.num_bytes / 1e6:.3g} MB in {len(profile.buckets)} buckets, "
        f"{1e3 * profile.compute_s:.3g} ms of compute (variance {profile.variance:.2g}){links}"
    )


def legend(rows: Sequence[Row]) -> str:
    """Return the legend of the columns of these rows."""
    return _LEGEND + (_LOSS_LEGEND if _have_losses(rows) else "")


def columns_of(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """Return the columns of a table or a page: headings, and a row's cell in each."""
    return {**_TIMES, **(_LOSSES if _have_losses(rows) else {}), **_MIXING}


def _have_losses(rows: Sequence[Row]) -> bool:
    return any(row.loss is not None for row in rows)


def _spread(row: Row) -> str:
    return f"{_ms(row.prediction.p05_s)}–{_ms(row.prediction.p95_s)}"


def _exact(row: Row) -> str:
    none = "–" if row.mixing is None else "never"
    return none if row.rounds_to_consensus is None else str(row.rounds_to_consensus)


def _loss(row: Row) -> str:
    if row.loss is None:
        return "–"
    workers = f" ({row.loss.workers})" if row.loss.workers else ""
    return f"{100 * row.loss.gap:+.1f} %{workers}{'*' if row.loss.assumed else ''}"


def _ms(seconds: float) -> str:
    milliseconds = round(1e3 * seconds, 6)  # differences of equal times are not quite 0
    return f"{milliseconds:.0f}" if milliseconds >= 99.5 else f"{milliseconds:.2g}"


_TIMES: dict[str, Callable[[Row], str]] = {
    "method": lambda row: row.method,
    "ms": lambda row: _ms(row.prediction.mean_s),
    "5–95 %": _spread,
    "waits": lambda row: _ms(row.prediction.exposed_s),
    "gain": lambda row: f"{row.speedup:.2f}×",
}
_LOSSES: dict[str, Callable[[Row], str]] = {
    "loss": _loss,
    "ms to equal loss": lambda row: "–" if row.equal_loss_s is None else _ms(row.equal_loss_s),
}
_MIXING: dict[str, Callable[[Row], str]] = {
    "MB": lambda row: f"{row.bytes_per_step / 1e6:.3g}",
    "p": lambda row: "–" if row.mixing is None else f"{row.mixing:.3g}",
    "exact": _exact,
}
