"""That all ranks were given the same, which they find out before anything is sent.

Through the store: rank 0 shows its facts, the others say where theirs differ, rank 0 collects that
and concludes. Each of the others reads two texts and writes one, however many there are.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from gossamer.errors import UserError
from gossamer.gossip.bulletin import Bulletin, ExchangeError, name_ranks

_CONCLUDES_WITHIN = timedelta(seconds=4)
"""How long rank 0 may take to say what it has collected."""

_MOST_DIFFERENCES = 3


def agree(bulletin: Bulletin, facts: dict[str, str]) -> None:
    """Raise, on all ranks, where these are not the same on all ranks."""
    if bulletin.rank == 0:
        bulletin.store.set("facts", json.dumps(facts))
        _conclude(bulletin, _collect_differences(bulletin))
    else:
        shown = _read(bulletin, "facts", "rank 0 to call decentralize()")
        _differ(bulletin, _differences(facts, shown))
    _raise_conclusion(bulletin)


def decline(bulletin: Bulletin, error: Exception) -> None:
    """Tell the others that this rank cannot start, so that they do not wait for it."""
    reason = f"rank {bulletin.rank} could not start: {error}"
    if bulletin.rank == 0:
        bulletin.store.set("facts", json.dumps({}))
        _conclude(bulletin, [reason])
    else:
        _differ(bulletin, {"": (reason, "")})


def _differ(bulletin: Bulletin, differences: dict[str, tuple[str, str]]) -> None:
    """Tell rank 0 what this rank has in place of its facts; a reason by itself under no name."""
    bulletin.store.set(f"differs/{bulletin.rank}", json.dumps(differences))


def _collect_differences(bulletin: Bulletin) -> list[str]:
    """Return what is not the same, in words; a rank that does not answer is a difference."""
    ranks_by_difference: dict[tuple[str, str, str], list[int]] = {}
    reasons: list[str] = []
    deadline = time.monotonic() + bulletin.timeout.total_seconds()
    for rank in range(1, bulletin.size):
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.01))
        try:
            differences = _read(bulletin, f"differs/{rank}", "", left)
        except ExchangeError:
            reasons.append(f"rank {rank} did not call decentralize() within {bulletin.timeout}")
            continue
        for field, (theirs, ours) in differences.items():
            if field:
                ranks_by_difference.setdefault((field, theirs, ours), []).append(rank)
            else:
                reasons.append(theirs)
    for (field, theirs, ours), ranks in ranks_by_difference.items():
        reasons.append(f"{field} is {ours} on rank 0 and {theirs} on {name_ranks(ranks)}")
    return reasons


def _conclude(bulletin: Bulletin, reasons: list[str]) -> None:
    bulletin.store.set("conclusion", json.dumps(reasons))


def _raise_conclusion(bulletin: Bulletin) -> None:
    # Rank 0 waits as long for the others as they for it, and then has yet to say so.
    patience = 2 * bulletin.timeout + _CONCLUDES_WITHIN
    reasons = _read(bulletin, "conclusion", "rank 0 to compare all ranks", patience)
    if reasons:
        shown = reasons[:_MOST_DIFFERENCES]
        more = len(reasons) - len(shown)
        raise UserError(
            "all ranks must call decentralize() with the same model and arguments, but "
            + "; ".join(shown)
            + (f"; and {more} more" if more else "")
        )


def _read(bulletin: Bulletin, key: str, what: str, timeout: timedelta | None = None) -> Any:
    timeout = timeout or bulletin.timeout
    try:
        bulletin.store.wait([key], timeout)
        return json.loads(bulletin.store.get(key))
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {bulletin.rank} waited for {what}, at most {timeout}, and failed: {error}; "
            "look for a rank that stopped, or allow a longer timeout"
        ) from error


def _differences(ours: dict[str, str], theirs: dict[str, str]) -> dict[str, tuple[str, str]]:
    fields = {**theirs, **ours}
    pairs = {field: (ours.get(field, "absent"), theirs.get(field, "absent")) for field in fields}
    return {field: (a, b) for field, (a, b) in pairs.items() if a != b}
