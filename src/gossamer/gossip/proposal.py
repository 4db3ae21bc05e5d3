"""The rules by which a member proposes how the next epoch begins.

Every member may propose at any time, and the store keeps the first proposal. A proposal therefore
depends only on the records of the epoch and on how long other members have been silent. Anything
else that a worker knows must be part of its ``Arrival``, or members would propose differently.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import final

from gossamer.gossip.epoch_log import STEP, Arrival, Decision, Record, arrivals_in

_CLOSED_S = 0.25
"""How long a worker whose connections closed has to write that it is alive."""

READY_S = 1.0
"""How long a member that waits for a decision may take to read it."""

NO_DONOR = (
    "a worker that joins needs a donor, and every worker that had trained is lost; restart the job "
    "from a checkpoint"
)


@final
class SilenceClock:
    """Measures how long members have been waited for, and how long each has been silent.

    Args:
        timeout_s: how long a member that is alive may take to arrive.
        answer_s: how long it may be silent.
    """

    def __init__(self, timeout_s: float, answer_s: float) -> None:
        self._timeout_s = timeout_s
        self._answer_s = answer_s
        self._began = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}

    def update(self, log: Sequence[Record]) -> None:
        """Reset the silence of members that have written since the last call."""
        now = time.monotonic()
        written = Counter(record["alive"] for record in log if "alive" in record)
        for member, num_records in written.items():
            if num_records != self._heard.get(member, (0, 0.0))[0]:
                self._heard[member] = num_records, now

    def why_gone(self, member: int, arrivals: Mapping[int, Arrival]) -> str:
        """Return why a member that has not arrived counts as lost; empty while it may arrive."""
        waited_s = time.monotonic() - self._began
        if member in self._heard:
            # Its own wait may have begun only now, and has to time out before it can arrive.
            if waited_s > self._timeout_s + self._answer_s:
                return "it did not arrive within the timeout"
            silent_s = time.monotonic() - self._heard[member][1]
            return "it stopped answering" if silent_s > self._answer_s else ""
        if any(member in arrival.closed for arrival in arrivals.values()):
            return "its connections closed" if waited_s > min(_CLOSED_S, self._answer_s) else ""
        connecting = any(not arrival.opened for arrival in arrivals.values())
        limit_s = min(READY_S, self._answer_s) if connecting else self._answer_s
        return "it did not answer" if waited_s > limit_s else ""


def propose(
    members: tuple[int, ...],
    log: Sequence[Record],
    left: Sequence[Record],
    asked: Sequence[Record],
    clock: SilenceClock,
) -> Decision | None:
    """Return the next epoch; None while a member may still arrive."""
    arrivals = arrivals_in(log)
    gone: dict[int, str] = {record["left"]: record["why"] for record in left}
    for member in members:
        if member not in arrivals and member not in gone:
            why = clock.why_gone(member, arrivals)
            if not why:
                return None
            gone[member] = why
    here = [arrivals[member] for member in members if member in arrivals and member not in gone]
    if not here:
        return None
    if not gone:
        # Nobody is lost, so the epoch failed because a joiner could not connect or got no state.
        # Without this rule it would be admitted, and fail, again and again.
        stuck = [arrival.member for arrival in here if arrival.joins]
        gone |= dict.fromkeys(stuck, "it was admitted, and could not connect to all others")
        here = [arrival for arrival in here if not arrival.joins] or here
    joining = {
        arrival.member: arrival.token
        for arrival in (*arrivals_in(asked).values(), *here)
        if arrival.joins
    }
    here = [arrival for arrival in here if not arrival.joins]
    if not here:
        return Decision(members=(), step=0, calls_done=0, error=NO_DONOR)
    present = {arrival.member for arrival in here}
    error = ""
    # Only the first arrival shows the original failure: the others may have failed because the
    # first one closed its connections.
    if len(here) == len(members) and next(iter(arrivals.values())).timed_out:
        if (diverged := _diverged_joiner(here)) is not None:
            gone[diverged] = f"it joined, and makes other calls: {_program_error(here)}"
            here = [arrival for arrival in here if arrival.member != diverged]
        error = _program_error(here)
        if (unreachable := _unreachable(here)) is not None:
            gone[unreachable] = "another member cannot connect to it, though both are alive"
            here = [arrival for arrival in here if arrival.member != unreachable]
    entry = _entry_step(here)
    donors = (
        {}
        if entry is None
        else {member: _donor(here, member) for member in sorted(joining.keys() - present)}
    )
    return Decision(
        members=tuple(sorted([*donors, *(arrival.member for arrival in here)])),
        step=max(arrival.step for arrival in here),
        calls_done=min(arrival.calls_done for arrival in here),
        gone={member: why for member, why in gone.items() if member in members},
        donors=donors,
        tokens={member: joining[member] for member in donors},
        entry=entry or 0,
        error=error,
    )


def _entry_step(here: Sequence[Arrival]) -> int | None:
    """Return the step that a joiner begins with, such that it makes the same calls as the others.

    A joiner begins right before the update of its first step: it makes no collective call that
    precedes this update, and every call that follows. If the member that is furthest ahead also
    waits before an update, the joiner begins with that step. If it has just updated, the joiner
    begins one step earlier. If it is in a collective call that others have yet to make, no step
    fits, and the joiner has to ask again.
    """
    last = max(arrival.step for arrival in here)
    ahead = [arrival for arrival in here if arrival.step == last]
    if any(arrival.call == STEP for arrival in ahead):
        return last
    return last - 1 if all(arrival.updated for arrival in ahead) else None


def _donor(here: Sequence[Arrival], joiner: int) -> int:
    """Return the donor of a joiner: of the members furthest ahead, the next lower number.

    A member in a collective call cannot be one: its parameters may be the average of all.
    """
    last = max(arrival.step for arrival in here)
    ahead = [
        arrival.member
        for arrival in here
        if arrival.step == last and (arrival.call == STEP or arrival.updated)
    ]
    return max((member for member in ahead if member < joiner), default=ahead[-1])


def _diverged_pair(here: Sequence[Arrival]) -> tuple[Arrival, Arrival] | None:
    """Return a member that waits in a collective call, and one that has gone past that call."""
    pairs = ((one, other) for one in here for other in here if _has_passed(other, one))
    return next(pairs, None)


def _diverged_joiner(here: Sequence[Arrival]) -> int | None:
    """Return the member to remove where one that joined makes other calls than the rest."""
    late = [arrival.member for arrival in _diverged_pair(here) or () if arrival.came_later]
    return late[-1] if late else None


def _program_error(here: Sequence[Arrival]) -> str:
    """Return the error if no member is lost but not all make the same calls; else empty."""
    pair = _diverged_pair(here)
    if pair is None:
        return ""
    one, other = pair
    return (
        "all workers must make the same calls, and none is lost, but they waited for each other "
        f"until the timeout: worker {one.member} called {one.call} at step {one.step}, and worker "
        f"{other.member} was in {other.call or 'optimizer.step()'} at step {other.step}; every "
        "worker must make this call, put the `if` inside"
    )


def _has_passed(other: Arrival, one: Arrival) -> bool:
    """Return whether a member has gone past the collective call in which another waits for it."""
    if one.call in ("", STEP) or other.calls_done != one.calls_done or other.call == one.call:
        return False
    in_another_call = other.call not in ("", STEP)
    return in_another_call or other.step + (other.call == STEP) > one.step


def _unreachable(here: Sequence[Arrival]) -> int | None:
    """Return the member to remove where two are alive and cannot connect: the higher number."""
    present = {arrival.member for arrival in here}
    pairs = [
        max(arrival.member, peer)
        for arrival in here
        if not arrival.opened
        for peer in arrival.waited_for
        if len(arrival.waited_for) == 1 and peer in present
    ]
    return max(pairs, default=None)
