"""The rules by which a member proposes how the next epoch begins.

Every member may propose at any time, and the store keeps the first proposal. A proposal therefore
depends only on the records of the epoch and on how long other members have been silent. Anything
else that this worker knows must be part of its ``Arrival``, or members would propose differently.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import final

from gossamer.gossip.epoch_log import STEP, Arrival, Decision, Line, arrivals_in

_CLOSED_S = 0.25
"""How long a worker whose connections closed has to say that it is there."""

READY_S = 1.0
"""How long a member that has waited for a decision may take to see it."""

NOTHING_LEFT = (
    "a worker that joins needs one to get parameters from, and of those who had any nobody is "
    "left; start the job again, from a checkpoint"
)


@final
class Listener:
    """Knows how long others have been waited for, and have said nothing.

    Args:
        timeout_s: how long a member that is there may take to come.
        answer_s: how long it may say nothing.
    """

    def __init__(self, timeout_s: float, answer_s: float) -> None:
        self._timeout_s = timeout_s
        self._answer_s = answer_s
        self._began = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}

    def hear(self, log: Sequence[Line]) -> None:
        """Note who has said something since the log was read last."""
        now = time.monotonic()
        for member, times in Counter(line["alive"] for line in log if "alive" in line).items():
            if times != self._heard.get(member, (0, 0.0))[0]:
                self._heard[member] = times, now

    def why_gone(self, member: int, arrivals: Mapping[int, Arrival]) -> str:
        """Say why a member that has not arrived is gone; nothing where it may still come."""
        waited_s = time.monotonic() - self._began
        if member in self._heard:
            # It may itself be in a wait that has just begun, and then needs time to answer.
            if waited_s > self._timeout_s + self._answer_s:
                return "it did not come within the timeout"
            silent_s = time.monotonic() - self._heard[member][1]
            return "it gave no further answer" if silent_s > self._answer_s else ""
        if any(member in arrival.closed for arrival in arrivals.values()):
            return "its connections broke" if waited_s > min(_CLOSED_S, self._answer_s) else ""
        connecting = any(not arrival.opened for arrival in arrivals.values())
        enough_s = min(READY_S, self._answer_s) if connecting else self._answer_s
        return "it gave no answer" if waited_s > enough_s else ""


def propose(
    members: tuple[int, ...],
    log: Sequence[Line],
    left: Sequence[Line],
    asked: Sequence[Line],
    listener: Listener,
) -> Decision | None:
    """Return the next epoch, as far as one can tell; None where that is too early."""
    arrivals = arrivals_in(log)
    gone: dict[int, str] = {line["left"]: line["why"] for line in left}
    gone |= {line["dead"]: line["why"] for line in log if "dead" in line}
    for member in members:
        if member not in arrivals and member not in gone:
            why = listener.why_gone(member, arrivals)
            if not why:
                return None
            gone[member] = why
    here = [arrivals[member] for member in members if member in arrivals and member not in gone]
    if not here:
        return None
    if not gone:
        # A member that still joins could not connect, or got nothing; and nobody else is lost.
        stuck = [arrival.member for arrival in here if arrival.joins]
        gone |= dict.fromkeys(stuck, "it was let in, and could not connect with all others")
        here = [arrival for arrival in here if not arrival.joins] or here
    joining = {
        arrival.member: arrival.token
        for arrival in (*arrivals_in(asked).values(), *here)
        if arrival.joins
    }
    here = [arrival for arrival in here if not arrival.joins]
    if not here:
        return Decision(members=(), step=0, calls_done=0, error=NOTHING_LEFT)
    present = {arrival.member for arrival in here}
    error = ""
    # The first to arrive saw what happened first: others see that it let go of its connections.
    if len(here) == len(members) and next(iter(arrivals.values())).timed_out:
        if (odd := _odd_one(here)) is not None:
            gone[odd] = f"it joined, and does otherwise than they: {_error_of_program(here)}"
            here = [arrival for arrival in here if arrival.member != odd]
        error = _error_of_program(here)
        if (unreachable := _unreachable(here)) is not None:
            gone[unreachable] = "another member cannot connect with it, though both are there"
            here = [arrival for arrival in here if arrival.member != unreachable]
    entry = _entry(here)
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


def _entry(here: Sequence[Arrival]) -> int | None:
    """Return the step that a worker can begin with and make the same calls as the others.

    It comes from its own beginning right before the update of a step. So it makes no call that
    comes before that update, and all calls after it. Where the first of the others waits before an
    update, too, all calls up to there are made. Where it is right behind one, a worker that joins
    begins one step earlier. Where it is in a call that others have yet to make, there is no step.
    """
    last = max(arrival.step for arrival in here)
    first = [arrival for arrival in here if arrival.step == last]
    if any(arrival.call == STEP for arrival in first):
        return last
    return last - 1 if all(arrival.updated for arrival in first) else None


def _donor(here: Sequence[Arrival], joiner: int) -> int:
    """Return the member that a joiner gets everything from: the one before it that is ahead.

    Not one in a collective call, whose parameters may be the average of all.
    """
    last = max(arrival.step for arrival in here)
    ahead = [
        arrival.member
        for arrival in here
        if arrival.step == last and (arrival.call == STEP or arrival.updated)
    ]
    return max((member for member in ahead if member < joiner), default=ahead[-1])


def _apart(here: Sequence[Arrival]) -> tuple[Arrival, Arrival] | None:
    """Return a member that waits in a call, and one that is past it."""
    pairs = ((one, other) for one in here for other in here if _has_passed(other, one))
    return next(pairs, None)


def _odd_one(here: Sequence[Arrival]) -> int | None:
    """Return who must go where one that came later makes other calls than the others."""
    late = [arrival.member for arrival in _apart(here) or () if arrival.came_later]
    return late[-1] if late else None


def _error_of_program(here: Sequence[Arrival]) -> str:
    """Say why nobody is gone, and yet they waited in vain: not all make the same calls."""
    apart = _apart(here)
    if apart is None:
        return ""
    one, other = apart
    return (
        "all workers must make the same calls, and all are there, but they waited for each other "
        f"in vain: worker {one.member} called {one.call} at step {one.step}, and worker "
        f"{other.member} was in {other.call or 'optimizer.step()'} at step {other.step}; every "
        "worker must make this call, put the `if` inside"
    )


def _has_passed(other: Arrival, one: Arrival) -> bool:
    """Whether a member went past the place where another waits for it in a collective call."""
    if one.call in ("", STEP) or other.calls_done != one.calls_done or other.call == one.call:
        return False
    in_another_call = other.call not in ("", STEP)
    return in_another_call or other.step + (other.call == STEP) > one.step


def _unreachable(here: Sequence[Arrival]) -> int | None:
    """Return who must go where two members are there and could not connect."""
    present = {arrival.member for arrival in here}
    pairs = [
        max(arrival.member, peer)
        for arrival in here
        if not arrival.opened
        for peer in arrival.waited_for
        if len(arrival.waited_for) == 1 and peer in present
    ]
    return max(pairs, default=None)
